"""Memory over time against brute force, and slopes against all pairs."""

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.memory import memory
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table
from tests.builders.runs import Row, loaded
from tests.effort import examples
from tests.places import SHARED_DATA

GIB = 2**30
COMPONENTS = {
    "torch": "device_allocated_bytes",
    "device": "device_used_bytes",
    "non-PyTorch": "device_other_bytes",
    "host": "host_rss_bytes",
    "child processes": "children_rss_bytes",
}


def span(
    name: str, step: int, counters: Mapping[str, float] | None, kind: str = "stage", at: int = 0
) -> Row:
    return Row(name, kind, step, at, at + 1, counters=counters)  # type: ignore[arg-type]


def gpu(peak: int, **more: int) -> dict[str, int]:
    return {"device_peak_bytes": peak, "host_rss_bytes": 7, **more}


def test_each_column_is_the_maximum_with_the_step_of_the_peak() -> None:
    rank = [
        span("actor_update", 3, gpu(5 * GIB, device_reserved_bytes=9 * GIB), at=1),
        span("actor_update", 4, gpu(6 * GIB, device_reserved_bytes=8 * GIB), at=2),
        span("actor_generate", 3, gpu(2 * GIB), at=0),
        span("step", 4, gpu(6 * GIB), "step", at=3),
        span("backward", 4, gpu(99 * GIB), "region"),
        span("actor_update", 5, {"tokens": 3}),  # not captured
    ]
    found = [row for row in rows_of(loaded(rank)) if row["component"] == "torch"]
    names = ("stage", "step", "peak", "peak at", "reserved", "samples")
    assert [tuple(row[name] for name in names) for row in found] == [
        ("all", 4, 6 * GIB, 3, 9 * GIB, 4),
        ("actor_update", 4, 6 * GIB, 3, 9 * GIB, 2),
        ("actor_generate", 3, 2 * GIB, 1, None, 1),
    ]
    assert "non-PyTorch" not in memory(loaded(rank)).note


def test_ranks_of_a_stage_are_adjacent_and_the_largest_comes_first() -> None:
    ranks = [
        [span("a", 1, gpu(10)), span("b", 1, gpu(20))],
        [span("a", 1, gpu(30)), span("b", 1, gpu(5, device_other_bytes=1))],
    ]
    table = memory(loaded(*ranks))
    names = ("component", "stage", "rank", "peak")
    found = list(zip(*map(table.column, names), strict=True))
    assert found[:6] == [
        *(("torch", "all", 0, 20), ("torch", "all", 1, 30)),
        *(("torch", "a", 0, 10), ("torch", "a", 1, 30)),
        *(("torch", "b", 0, 20), ("torch", "b", 1, 5)),
    ]
    assert {row[0] for row in found[6:12]} == {"host"}
    assert found[12:] == [("non-PyTorch", "all", 1, 1), ("non-PyTorch", "b", 1, 1)]


def test_the_step_is_the_first_that_had_the_maximum() -> None:
    sizes = ((1, 3), (2, 8), (3, 8))
    rank = [span("a", step, {"host_rss_bytes": size}, at=step) for step, size in sizes]
    found = rows_of(loaded([*rank, span("b", 1, {"host_rss_bytes": 9}, at=9)]))
    assert [(row["stage"], row["step"], row["peak"]) for row in found] == [
        *(("all", 1, 9), ("b", 1, 9), ("a", 2, 8)),
    ]


COUNTERS = st.dictionaries(
    st.sampled_from([*COMPONENTS.values(), "device_peak_bytes"]), st.integers(0, 2**50)
)
SPANS = st.tuples(
    st.sampled_from(["a", "b"]),
    st.integers(1, 3),
    st.one_of(st.none(), COUNTERS),
    st.sampled_from(["stage", "stage", "step", "region"]),
    st.integers(0, 9),
)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.lists(SPANS, max_size=12), min_size=1, max_size=3))
def test_counters_agree_with_brute_force(drawn: list[list[Any]]) -> None:
    spans = loaded(*[[span(*one) for one in rank] for rank in drawn])
    table = memory(spans)
    keys = zip(*map(table.column, ("component", "stage", "rank")), strict=True)
    found = dict(zip(keys, zip(*map(table.column, ("peak", "samples")), strict=True), strict=True))
    expected: dict[tuple[Cell, ...], list[list[float]]] = defaultdict(list)
    for one in spans:
        if one.kind in ("stage", "step"):
            for component, counter in COMPONENTS.items():
                names = [counter]
                if component == "torch":
                    names += ["device_peak_bytes", "device_reserved_bytes"]
                sizes = [(one.counters or {}).get(name) for name in names]
                if any(size is not None for size in sizes):
                    held = [size for size in sizes[:2] if size is not None]
                    for stage in {"all", one.name if one.kind == "stage" else "all"}:
                        expected[component, stage, one.rank].append(held)
    assert found == {
        key: (max((size for held in every for size in held), default=None), len(every))
        for key, every in expected.items()
    }


DATA = SHARED_DATA
ASCEND = DATA / "ascend" / "text_level1_rank0"
KINETO = DATA / "kineto" / "h100_qwen1.5-0.5b.json.gz"
NAMES = ("rank", "device", "component", "time", "allocated", "reserved")
Sample = tuple[int, int | None, str | None, int, int | None, int | None]


def stage(name: str, start: int, end: int) -> Row:
    return Row(name, "stage", 1, start, end)


def step(number: int, start: int, end: int) -> Row:
    return Row("step", "step", number, start, end)


def with_memory(spans: Spans, *samples: Sample) -> Spans:
    columns = tuple(Column(name, "text" if name == "component" else "count") for name in NAMES)
    return replace(spans, tables={"memory": lambda: Table("memory", columns, list(samples))})


def cuda(*samples: tuple[int, int, int]) -> list[Sample]:
    """Return (time, allocated, reserved) of one device."""
    return [(0, 0, "CUDA", *each) for each in samples]


def rows_of(spans: Spans) -> list[dict[str, Cell]]:
    table = memory(spans)
    assert table.abstained is None
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def test_peak_fragmentation_and_both_ends_of_a_recording_and_of_a_stage() -> None:
    spans = loaded([step(1, 0, 100), stage("actor_update", 30, 60)])
    samples = cuda((10, 5, 20), (40, 90, 100), (50, 60, 120), (70, 10, 120))
    whole, update = rows_of(with_memory(spans, *samples))
    assert whole == {
        "stage": "all",
        "rank": 0,
        "component": "CUDA",
        "device": 0,
        "step": 1,
        "peak": 90,
        "peak at": 40,
        "reserved": 120,
        "fragmentation": 10,
        "start": 5,
        "end": 10,
        "samples": 4,
    }
    assert (update["stage"], update["start"], update["end"]) == ("actor_update", 5, 60)
    assert update["samples"] == 2  # the value that the stage began with was carried into it


def test_no_value_is_carried_from_one_capture_to_the_next() -> None:
    closed = Row("rlprof close capture", "region", 1, 20, 25)
    spans = loaded([step(1, 0, 100), closed, stage("a", 40, 60)])
    found = rows_of(with_memory(spans, *cuda((10, 7, 7), (90, 9, 9))))
    assert [row["stage"] for row in found] == ["all"]


def test_a_component_with_only_reserved_bytes_has_no_peak() -> None:
    (row,) = rows_of(with_memory(loaded([]), (0, 0, "APP", 5, None, 30), (0, 0, "APP", 9, None, 4)))
    assert (row["peak"], row["peak at"], row["start"]) == (None, None, None)
    assert (row["reserved"], row["fragmentation"]) == (30, None)


def test_without_a_table_memory_comes_from_captured_spans() -> None:
    gpu = {"device_allocated_bytes": 40, "device_peak_bytes": 90, "device_reserved_bytes": 99}
    ranks = [
        [Row("a", "stage", 1, 0, 5, counters=gpu | {"host_rss_bytes": 7})],
        [Row("step", "step", 2, 0, 6, counters={"host_rss_bytes": 8})],
    ]
    found = rows_of(loaded(*ranks))
    shown = [tuple(row[name] for name in ("rank", "component", "stage", "peak")) for row in found]
    assert shown == [
        (0, "torch", "all", 90),
        (0, "torch", "a", 90),
        (0, "host", "all", 7),
        (1, "host", "all", 8),
        (0, "host", "a", 7),
    ]
    assert found[0]["fragmentation"] is None  # the peak was somewhere within
    assert (found[0]["reserved"], found[0]["end"], found[0]["peak at"]) == (99, 40, 5)


def broken() -> Table:
    raise TraceError("memory.csv: is damaged")


def test_it_abstains_without_memory_and_names_the_switch() -> None:
    for rows in ([], [span("a", 1, {"tokens": 1})], [span("a", 1, gpu(1), "region")]):
        table = memory(loaded(rows))
        assert not table.rows
        assert str(table.abstained).startswith("This run has no memory data. Capture a step with")
    assert memory(with_memory(loaded([]))).abstained is not None
    damaged = replace(loaded([]), tables={"memory": broken})
    assert "memory.csv: is damaged" in str(memory(damaged).abstained)


SAMPLES = st.lists(
    st.tuples(
        st.sampled_from([0, 1]),
        st.sampled_from([0, None]),
        st.sampled_from(["CPU", "CUDA"]),
        st.integers(0, 40),
        st.none() | st.integers(0, 9),
        st.none() | st.integers(0, 9),
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda sample: sample[:4],
)
STAGES = st.lists(
    st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 30), st.integers(0, 12)), max_size=3
)


@settings(max_examples=examples(100), deadline=None)
@given(SAMPLES, STAGES)
def test_it_agrees_with_every_nanosecond(samples: list[Sample], stages: list[Any]) -> None:
    rows = [Row("", "epoch", 1, 0, 50), *(stage(name, at, at + size) for name, at, size in stages)]
    spans = loaded(rows, [rows[0]])
    expected = walked(spans, samples)
    found = rows_of(with_memory(spans, *samples))
    keys = ("rank", "device", "component", "stage")
    assert {tuple(row[key] for key in keys) for row in found} == set(expected)
    for row in found:
        held, reserved, count = expected[tuple(row[key] for key in keys)]
        assert row["peak"] == max(held, default=None)
        assert row["reserved"] == max(reserved, default=None)
        ends = (held[0], held[-1]) if held else (None, None)
        assert (row["start"], row["end"]) == ends
        assert row["samples"] == count


def walked(spans: Spans, samples: list[Sample]) -> dict[Any, Any]:
    """Return what was held at each instant of each group and stage, and the count of samples."""
    groups: Any = defaultdict(dict)
    for rank, device, component, time, *sizes in samples:
        groups[rank, device, component][time] = sizes
    found: Any = defaultdict(lambda: ([], [], [0]))
    for key, own in groups.items():
        for now in range(min(own), max(own) + 1):
            last = own[max(time for time in own if time <= now)]
            for name in ("all", innermost(spans, key[0], now)):
                if name is not None:
                    for into, size in zip(found[(*key, name)], last, strict=False):
                        into.extend([] if size is None else [size])
                    found[(*key, name)][2][0] += now in own
    return {key: (held, reserved, count) for key, (held, reserved, (count,)) in found.items()}


def innermost(spans: Spans, rank: int, now: int) -> str | None:
    around = [one for one in spans if one.kind == "stage" and one.rank == rank]
    around = [one for one in around if one.start_ns <= now < one.end_ns]
    return max(around, key=lambda one: (one.start_ns, one.id)).name if around else None


@pytest.mark.skipif(not ASCEND.is_dir(), reason="no real capture in ../shared/data/ascend")
def test_a_real_ascend_capture_peaks_where_its_own_table_does() -> None:
    spans = load(ASCEND)
    table = spans.table("memory")
    columns = zip(*map(table.column, ("component", "allocated", "reserved")), strict=True)
    rows = {row["component"]: row for row in rows_of(spans) if row["stage"] == "all"}
    most = max(int(held or 0) for name, held, _ in columns if name == "PTA")
    assert rows["PTA"]["peak"] == most > 10**9
    assert rows["APP"]["peak"] is None
    assert int(rows["APP"]["reserved"] or 0) > most


@pytest.mark.skipif(not KINETO.is_file(), reason="no real trace in ../shared/data/kineto")
def test_a_real_torch_trace_peaks_where_its_own_events_do() -> None:
    events = json.loads(gzip.decompress(KINETO.read_bytes()))["traceEvents"]
    events_of_memory = [event["args"] for event in events if event["name"] == "[memory]"]
    most = max(args["Total Allocated"] for args in events_of_memory if args["Device Type"] == 1)
    rows = {row["component"]: row for row in rows_of(load(KINETO)) if row["stage"] == "all"}
    assert rows["CUDA"]["peak"] == most > 10**9
    assert rows["CUDA"]["samples"] == sum(args["Device Type"] == 1 for args in events_of_memory)
    assert int(rows["CUDA"]["fragmentation"] or -1) >= 0
    assert rows["CPU"]["fragmentation"] is None  # its allocator reserves nothing
