import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.chrome_trace import write_trace
from lightning_rlprof.report.device_tracks import DeviceTracks
from lightning_rlprof.tables.kernels import UNKNOWN
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.chrome_tracks import Tracks
from tests.builders.kernels import Kernels, kernel_table
from tests.builders.runs import Row, loaded
from tests.builders.sampled import sampled_run
from tests.places import SHARED_DATA

KINETO = SHARED_DATA / "kineto"
TWO = ([Row("actor_update", "stage", 1, 0, 90)], [Row("actor_update", "stage", 1, 0, 90)])
COPIES = [
    Column(name, "text" if name in ("kind", "stage") else "count")
    for name in ("rank", "device", "stream", "kind", "start", "duration", "stage", "step")
]

Slice = dict[str, Any]


def _kernels(*rows: tuple[Any, ...]) -> Table:
    """Return a table of kernels: rank, device, stream, start, end, launch; step 3, named by row."""
    whole = np.array(rows, np.int64).reshape(-1, 6)
    rank, device, stream, start, end, launch = whole.T
    names = (np.arange(len(rows)), [f"gemm<{row}>" for row in range(len(rows))])
    stage, around = (np.zeros(len(rows), np.int64), ["actor_update"]), names
    step = np.full(len(rows), 3)
    columns = (rank, device, stream, names, start, end, stage, step, around, launch)
    return kernel_table(Kernels(*columns), ["3 launches were not recorded"])


def _spans(**tables: Any) -> Spans:
    return dataclasses.replace(loaded(*TWO), tables=tables)


def _tracks(spans: Spans, path: Path) -> dict[tuple[int, str], list[Slice]]:
    """Return the slices of each device's track by process and name."""
    write_trace(spans, path, devices=DeviceTracks(spans))
    events = json.loads(path.read_text(), parse_float=str)["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    found: dict[tuple[int, str], list[Slice]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] in ("kernel", "gpu_memcpy"):
            place = event["pid"], names[event["pid"], event["tid"]]
            found.setdefault(place, []).append(event)
    return found


def test_a_kernel_lies_on_the_track_of_its_rank_device_and_stream(tmp_path: Path) -> None:
    rows = [(1, 4, 7, 2**60 + 1, 2**60 + 8, 2**60 - 1999), (0, 3, 20, 40, 45, UNKNOWN)]
    tracks = _tracks(_spans(kernels=lambda: _kernels(*rows)), tmp_path / "t.json")

    assert [*tracks] == [(1, "device 3, stream 20"), (2, "device 4, stream 7")]
    (first,), (second,) = tracks.values()
    assert (first["name"], first["cat"], first["ts"], first["dur"]) == (
        "gemm ~fa8",
        "kernel",
        "0.040",
        "0.005",
    )
    assert first["args"] == {
        "kernel": "gemm<1>",
        "class": "matmul",
        "step": 3,
        "stage": "actor_update",
    }
    assert (second["ts"], second["dur"]) == ("1152921504606846.977", "0.007")
    assert second["args"]["queued_us"] == "2.000"


def test_kernels_that_overlap_on_one_stream_go_to_further_tracks(tmp_path: Path) -> None:
    times = [(0, 10), (2, 4), (3, 12), (10, 11), (12, 12), (12, 20)]
    rows = [(0, 0, 7, start, end, UNKNOWN) for start, end in reversed(times)]
    tracks = _tracks(_spans(kernels=lambda: _kernels(*rows)), tmp_path / "t.json")

    assert [name for _, name in tracks] == [
        f"device 0, stream 7{more}" for more in ("", " (2)", " (3)")
    ]
    assert sum(map(len, tracks.values())) == len(times)
    for slices in tracks.values():
        ends = 0
        for each in slices:
            start, length = (round(float(each[name]) * 1000) for name in ("ts", "dur"))
            assert start >= ends
            ends = start + length


def test_copies_lie_beside_the_kernels_of_their_stream(tmp_path: Path) -> None:
    copies = [
        (0, 0, 7, "HtoD", 4, 5, "actor_update", 3),
        (0, 0, None, None, 5, 5, None, None),
        (0, None, None, "memset", 5, 5, None, None),
    ]
    spans = _spans(
        kernels=lambda: _kernels((0, 0, 7, 9, 11, UNKNOWN)),
        memcpy=lambda: Table("memcpy", tuple(COPIES), copies),
    )
    tracks = _tracks(spans, tmp_path / "t.json")
    assert {
        name: [(e["name"], e["cat"], e["args"].get("step")) for e in slices]
        for (_, name), slices in tracks.items()
    } == {
        "device 0, stream 7": [("Memcpy HtoD", "gpu_memcpy", 3), ("gemm", "kernel", 3)],
        "device 0": [("Memcpy", "gpu_memcpy", None)],
        "device": [("Memset", "gpu_memcpy", None)],
    }


def test_counters_of_a_profiler_are_tracks_of_their_rank(tmp_path: Path) -> None:
    kinds = {"rank": "count", "device": "count", "time": "duration", "metric": "text"}
    columns = [*(Column(name, kind) for name, kind in kinds.items()), Column("value", "number")]
    table = Table(
        "gpu_metrics", columns,
        [(0, 1, 5, "SM active (%)", 7.0), (0, 1, 9, "SM active (%)", 30.5),
         (1, None, 6, "power (W)", 300.0), (None, 0, 5, "SM active (%)", 1.0)],
    )  # fmt: skip
    found = Tracks(_spans(gpu_metrics=lambda: table), tmp_path / "t.json", kernels=True).counters
    assert found == {
        ("rank 0 (node-a)", "device 1 SM active (%)"): [(5, 7.0), (9, 30.5)],
        ("rank 0 (node-a)", "device 0 SM active (%)"): [(5, 1.0)],
        ("rank 1 (node-a)", "power (W)"): [(6, 300.0)],
    }


@pytest.mark.parametrize("kernels", [False, True])
def test_background_metrics_are_tracks_with_and_without_kernels(
    tmp_path: Path, kernels: bool
) -> None:
    metrics = {"swap_in_bytes_per_s": [10.0, 30.0], "device_clock_mhz": [5.0, 7.0]}
    spans = sampled_run([(0, None, {"host_available_bytes": [8.0]}), (1, 2, metrics)], ranks=2)
    found = Tracks(spans, tmp_path / "t.json", kernels=kernels).counters
    second = 1_000_000_000
    assert found == {
        ("rank 0 (node-a)", "host_available_bytes"): [(second, 8.0)],
        ("rank 1 (node-a)", "device 2 swap_in_bytes_per_s"): [(0, 10.0), (second, 30.0)],
        ("rank 1 (node-a)", "device 2 device_clock_mhz"): [(second, 5.0), (2 * second, 7.0)],
    }


def test_what_was_sampled_before_the_first_span_is_at_the_start(tmp_path: Path) -> None:
    late = [Row("step", "step", 1, 1_500_000_000, 3_000_000_000)]
    spans = sampled_run([(0, None, {"host_cpu_percent": [20.0, 40.0]})], late, seconds=0)
    found = Tracks(spans, tmp_path / "t.json", kernels=False).counters
    assert found["rank 0 (node-a)", "host_cpu_percent"] == [(0, 20.0), (0, 40.0)]


def test_many_kernels_are_written_some_at_a_time(tmp_path: Path) -> None:
    rows = [(0, 0, 7, 2 * at, 2 * at + 1, UNKNOWN) for at in range(25_000)]
    tracks = DeviceTracks(_spans(kernels=lambda: _kernels(*rows)))
    kernels = [*tracks.events(0, 1)]
    assert [len(part) for part in kernels] == [2, 10_000, 10_000, 5_000]
    assert [*tracks.events(1, 2)] == []


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    def broken() -> Table:
        raise TraceError("rank-0.json: cannot be read")

    spans = _spans(
        kernels=lambda: _kernels((0, 0, 7, 1, 2, UNKNOWN), (9, 0, 7, 1, 2, UNKNOWN)), memcpy=broken
    )
    tracks = DeviceTracks(spans)
    assert tracks.remarks == [
        "The table memcpy could not be read: rank-0.json: cannot be read.",
        "3 launches were not recorded",
        "kernels of ranks without spans are left out: 9",
    ]
    absent = Table("kernels", (), abstained="no device was profiled")
    for tables, why in (
        ({}, "no kernels: the run holds no capture of a device"),
        (
            {"kernels": lambda: absent},
            "The table kernels is missing: no device was profiled.",
        ),
    ):
        nothing = _spans(**tables)
        assert DeviceTracks(nothing).remarks == [why]
        assert _tracks(nothing, tmp_path / "t.json") == {}


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
@pytest.mark.parametrize("name", ["h100_qwen1.5-0.5b.json.gz", "vllm_prefill_decode_graph.json.gz"])
def test_all_kernels_and_copies_of_a_real_trace_are_drawn(tmp_path: Path, name: str) -> None:
    spans = load(KINETO / name)
    tracks = _tracks(spans, tmp_path / "t.json")
    drawn = sorted(
        (float(each["ts"]), each["dur"], each["args"].get("stage"))
        for slices in tracks.values()
        for each in slices
    )
    tables = [spans.table(each) for each in ("kernels", "memcpy") if each in spans.tables]
    assert len(drawn) > 400
    assert drawn == sorted(
        (start / 1000, f"{length // 1000}.{length % 1000:03d}", stage)
        for table in tables
        for start, length, stage in zip(
            *(table.column(each) for each in ("start", "duration", "stage")), strict=True
        )
    )
