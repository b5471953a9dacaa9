"""Real traces, recorded by others: every kernel, to the nanosecond, in the place of its launch."""

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.loaders import chrome_events
from lightning_rlprof.loaders.kineto.reader import is_chrome_trace, read_kineto
from lightning_rlprof.tables.spans import Spans
from tests.builders.chrome import stream_of
from tests.places import SHARED_DATA

DATA = SHARED_DATA / "kineto"
NAMES = [
    "alexnet",
    "cpu_only_rank-34",
    "cuda_event_sync",
    "h100_qwen1.5-0.5b",
    "mi300_bert-small",
    "nccl",
    "ns_resolution_rank-0",
    "sglang_qwen3-8b_decode",
    "two_ranks/rank-0",
    "two_ranks/rank-1",
    "vllm_prefill_decode_graph",
]
CALLS = ("cuda_runtime", "cuda_driver")
every_trace = pytest.mark.parametrize("name", NAMES)
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no real traces in ../shared/data/kineto")


def path_of(name: str) -> Path:
    return DATA / f"{name}.json.gz"


@cache
def loaded(name: str) -> Spans:
    return read_kineto(path_of(name))


@cache
def events_of(name: str) -> list[dict[str, Any]]:
    """Read a trace by the standard library, numbers as they are written."""
    found = json.loads(gzip.decompress(path_of(name).read_bytes()), parse_float=Decimal)
    events: list[dict[str, Any]] = found["traceEvents"]
    for event in events:
        event["start"], event["length"] = (int(event.get(key, 0) * 1000) for key in ("ts", "dur"))
    return events


def of(name: str, *categories: str) -> list[dict[str, Any]]:
    return [event for event in events_of(name) if event.get("cat") in categories]


@every_trace
def test_no_event_is_lost(name: str) -> None:
    events, stream = stream_of(path_of(name))

    assert len(events) == len(events_of(name))
    assert [event["name"] for event in events] == [event["name"] for event in events_of(name)]
    assert (stream.lost, stream.problems, stream.complete) == (0, [], True)
    assert is_chrome_trace(path_of(name))


@every_trace
def test_a_small_buffer_gives_the_same_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_kineto(path_of(name)).table("kernels").arrays()
    monkeypatch.setattr(chrome_events, "SIZE", 30_000)

    parts = read_kineto(path_of(name)).table("kernels").arrays()

    for one, other in zip(whole, parts, strict=True):
        if not isinstance(one, tuple):
            np.testing.assert_array_equal(one, other)


@every_trace
def test_every_kernel_is_there_to_the_nanosecond(name: str) -> None:
    table, kernels = loaded(name).table("kernels"), of(name, "kernel")
    first = min((event["start"] for event in [*kernels, *of(name, "user_annotation")]), default=0)

    found = Counter((row[3], row[4], row[5], row[1], row[2]) for row in table.rows)

    assert found == Counter(
        (
            kernel["name"],
            kernel["start"] - first,
            kernel["length"],
            kernel["args"]["device"],
            kernel["args"]["stream"],
        )
        for kernel in kernels
    )


@every_trace
def test_every_annotation_is_a_span_to_the_nanosecond(name: str) -> None:
    spans, marks = loaded(name), of(name, "user_annotation")
    first = min(event["start"] for event in [*of(name, "kernel"), *marks])

    found = Counter((s.name, s.start_ns, s.end_ns, s.thread) for s in spans)

    assert found == Counter(
        (m["name"], m["start"] - first, m["start"] + m["length"] - first, m["tid"]) for m in marks
    )


def around(marks: list[dict[str, Any]], tid: int, at: int) -> str | None:
    found = [
        (mark["start"], -mark["length"], mark["name"])
        for mark in marks
        if mark["tid"] == tid and mark["start"] <= at < mark["start"] + mark["length"]
    ]
    return max(found)[2] if found else None


def places(name: str) -> Iterator[tuple[int | None, str | None]]:
    """Yield the step and range of each kernel by start, by comparing everything with everything."""
    marks, calls = of(name, "user_annotation"), of(name, *CALLS)
    steps = [mark for mark in marks if mark["name"].startswith("ProfilerStep#")]
    named = [mark for mark in marks if mark not in steps]
    by_number = {call["args"]["correlation"]: call for call in calls}
    trains = steps[0]["tid"] if steps else None
    for kernel in sorted(of(name, "kernel"), key=lambda event: int(event["start"])):
        call = by_number.get(kernel["args"]["correlation"])
        if call is None:
            shadows = of(name, "gpu_user_annotation")
            step = around(shadows, kernel["tid"], kernel["start"])
            yield (int(step.split("#")[1]) if step else None), None
            continue
        step = around(steps, trains, call["start"]) if steps else None
        own = around(named, call["tid"], call["start"])
        lent = around(named, trains, call["start"]) if steps else None
        yield (int(step.split("#")[1]) if step else None), own or lent


@every_trace
def test_steps_and_ranges_are_those_around_the_launch(name: str) -> None:
    table = loaded(name).table("kernels")

    found = list(zip(table.column("step"), table.column("range"), strict=True))

    assert found == list(places(name))


def test_nanoseconds_are_those_of_the_file() -> None:
    """Times there are since 1970, with fractions that doubles keep to a quarter of one."""
    spans = loaded("ns_resolution_rank-0")

    fractions = {event["start"] % 1000 for event in of("ns_resolution_rank-0", "kernel")}

    assert fractions > {200, 500, 800}  # 1712195495406752.8 stands there, no double is that number
    assert spans.unix_ns == min(
        event["start"] for event in of("ns_resolution_rank-0", "kernel", "user_annotation")
    )


@pytest.mark.parametrize(
    ("name", "rank", "world", "unix_s", "device"),
    [
        ("alexnet", 0, 1, 1695835542, "NVIDIA A100-PG509-200"),
        ("cpu_only_rank-34", 34, 300, 1721065959, "cpu"),
        ("h100_qwen1.5-0.5b", 0, 1, 1752839461, "NVIDIA H100 80GB HBM3"),
        ("mi300_bert-small", 0, 1, 1753615174, "AMD Instinct MI300X VF"),
        ("two_ranks/rank-1", 1, 128, 1682725898, "unknown"),
        ("vllm_prefill_decode_graph", 0, 1, 1773709800, "unknown"),
    ],
)
def test_who_and_when(name: str, rank: int, world: int, unix_s: int, device: str) -> None:
    spans = loaded(name)

    header = spans.headers[rank]
    assert (header.rank, header.world_size, header.device) == (rank, world, device)
    assert spans.unix_ns // 10**9 == unix_s


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("h100_qwen1.5-0.5b", "436 kernels have no recorded launch"),
        ("sglang_qwen3-8b_decode", "544 kernels ran in 1 CUDA graph replays"),
        ("vllm_prefill_decode_graph", "361 kernels ran in 25 CUDA graph replays"),
        ("nccl", "1776 kernels were launched by threads without marks"),
        ("cpu_only_rank-34", "no kernels: no device was profiled"),
        ("mi300_bert-small", ""),
    ],
)
def test_what_little_is_known_of_is_said(name: str, remark: str) -> None:
    assert loaded(name).table("kernels").note.startswith(remark)


@every_trace
def test_a_file_cut_anywhere_keeps_what_comes_before_the_cut(name: str, tmp_path: Path) -> None:
    noise, data = random.Random(name), path_of(name).read_bytes()
    whole = [event["name"] for event in events_of(name)]
    path = tmp_path / "cut.json.gz"
    for _ in range(6):
        path.write_bytes(data[: noise.randrange(20, len(data))])
        events, stream = stream_of(path)
        assert [event["name"] for event in events] == whole[: len(events)]
        assert not stream.complete
        assert stream.lost == 0


@every_trace
def test_damage_costs_little_and_is_counted(name: str, tmp_path: Path) -> None:
    noise, data = random.Random(name), bytearray(gzip.decompress(path_of(name).read_bytes()))
    count, path = len(events_of(name)), tmp_path / "damaged.json"
    begin, end = data.index(b'"traceEvents"') + 20, data.rindex(b"]")
    for _ in range(5):
        at = noise.randrange(begin, end)
        data[at : at + 5] = noise.choice([b'"', b"}}", b"\x00", b"\\", b"{", b"[[["])
    path.write_bytes(data)

    events, stream = stream_of(path)

    assert count - 10 <= len(events) + stream.lost <= count + 10 or stream.problems
