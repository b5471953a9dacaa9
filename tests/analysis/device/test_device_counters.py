"""Counters over time, against every nanosecond, one by one."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.device.device_counters import device_counters
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table
from tests.builders.runs import Row, loaded
from tests.effort import examples

Sample = tuple[int | None, int | None, str | None, int, float | None]
"""Rank, device, metric, time, value."""


def stage(name: str, start: int, end: int) -> Row:
    return Row(name, "stage", 1, start, end)


def with_samples(spans: Spans, *samples: Sample) -> Spans:
    names = ("rank", "device", "metric", "time", "value")
    columns = tuple(Column(name, "text" if name == "metric" else "number") for name in names)
    return replace(spans, tables={"counters": lambda: Table("counters", columns, list(samples))})


def found(spans: Spans) -> dict[Any, dict[str, Cell]]:
    table = device_counters(spans)
    assert table.abstained is None
    names = [column.name for column in table.columns]
    return {row[:4]: dict(zip(names[4:], row[4:], strict=True)) for row in table.rows}


def test_a_value_counts_for_as_long_as_it_holds() -> None:
    rows = found(
        with_samples(
            loaded([]), (0, 1, "MHz", 0, 100.0), (0, 1, "MHz", 90, 200.0), (0, 1, "MHz", 100, 5.0)
        )
    )
    assert rows == {
        ("MHz", 0, 1, "all"): {
            "mean": 110.0,
            "p50": 100.0,
            "p95": 200.0,
            "min": 5.0,
            "max": 200.0,
            "samples": 3,
        }
    }


def test_a_sample_counts_to_the_stage_of_its_host() -> None:
    spans = loaded(
        [stage("actor_generate", 10, 20), stage("actor_update", 20, 40)], [stage("x", 0, 50)]
    )
    samples: list[Sample] = [(0, 0, "util", at, float(at)) for at in range(0, 60, 5)]
    rows = found(with_samples(spans, *samples))
    assert {key[3]: row["samples"] for key, row in rows.items()} == {
        "all": 12,
        "actor_generate": 2,
        "actor_update": 4,
    }
    assert rows["util", 0, 0, "actor_generate"]["mean"] == 12.5


def test_between_captures_nothing_holds() -> None:
    spans = loaded([Row("", "epoch", 1, 0, 1), Row("rlprof close capture", "region", 1, 30, 35)])
    rows = found(
        with_samples(
            spans, (0, 0, "W", 10, 100.0), (0, 0, "W", 1000, 300.0), (0, 0, "W", 1020, 0.0)
        )
    )
    assert rows["W", 0, 0, "all"]["mean"] == 200.0


def test_metrics_of_a_machine_have_no_rank_and_the_stage_of_the_only_one() -> None:
    columns = (
        Column("device", "count"),
        Column("time", "duration"),
        Column("metric", "text"),
        Column("value", "number"),
    )
    table = Table("gpu_metrics", columns, [(0, 5, "SM", 1.0), (0, 7, "SM", 3.0), (1, 5, "SM", 9.0)])
    one, two = loaded([stage("a", 0, 9)]), loaded([stage("a", 0, 9)], [stage("a", 0, 9)])
    alone, among = (
        found(replace(spans, tables={"gpu_metrics": lambda: table})) for spans in (one, two)
    )
    assert [key for key in alone if key[3] == "a"] == [("SM", None, 0, "a"), ("SM", None, 1, "a")]
    assert {key[3] for key in among} == {"all"}
    assert alone["SM", None, 1, "all"]["mean"] == 9.0  # one sample is all that is known


def test_samples_without_a_value_are_left_out_and_counted() -> None:
    spans = with_samples(loaded([]), (0, None, "W", 0, None), (0, None, None, 0, 2.0))
    assert found(spans)[None, 0, None, "all"]["samples"] == 1
    assert "Left out of counters: 1 samples without a value." in device_counters(spans).note


def broken() -> Table:
    raise TraceError("trace.json: is no trace")


def test_it_abstains_without_counters() -> None:
    for spans in (loaded([]), with_samples(loaded([]))):
        assert str(device_counters(spans).abstained).startswith("This run has no device counters.")
    spans = replace(loaded([]), tables={"counters": broken})
    assert "trace.json: is no trace" in str(device_counters(spans).abstained)


SAMPLES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, None]),
        st.sampled_from([0, None]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 40),
        st.integers(-3, 9).map(float),
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda sample: sample[:4],
)
STAGES = st.lists(
    st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 30), st.integers(0, 15)), max_size=4
)


@settings(max_examples=examples(100), deadline=None)
@given(SAMPLES, STAGES, STAGES, st.none() | st.integers(0, 40))
def test_it_agrees_with_every_nanosecond(
    samples: list[Sample], first: list[Any], second: list[Any], closed: int | None
) -> None:
    ranks = [[stage(name, at, at + size) for name, at, size in own] for own in (first, second)]
    if closed is not None:
        ranks[0].append(Row("rlprof close capture", "region", 1, closed, closed + 1))
    spans = loaded(*ranks)
    rows = found(with_samples(spans, *samples))
    expected = walked(spans, samples)
    assert rows.keys() == expected.keys()
    for key, pairs in expected.items():
        held = [value for value, time in pairs for _ in range(time)]
        held = sorted(held or [value for value, _ in pairs])
        row, values = rows[key], [value for value, _ in pairs]
        assert row["mean"] == pytest.approx(sum(held) / len(held))
        for name, percent in (("p50", 50), ("p95", 95)):
            assert row[name] == held[-(-len(held) * percent // 100) - 1]
        assert (row["min"], row["max"]) == (min(values), max(values))
        assert row["samples"] == len(values)


def walked(spans: Spans, samples: list[Sample]) -> dict[Any, list[Any]]:
    """Return (value, how long it held) of each counter as a whole and in each stage."""
    groups = defaultdict(list)
    series = defaultdict(list)
    rows = spans.rows(kind="region")  # the axis begins with the first span
    closed = int(spans.start_ns[rows[0]]) if len(rows) else None
    for rank, device, metric, time, value in samples:
        series[metric, rank, device].append((time, value))
    for key, own in series.items():
        own.sort()
        for at, (time, value) in enumerate(own):
            until = own[at + 1][0] if at + 1 < len(own) else time
            if key[1] == 0 and closed is not None and time < closed:
                until = min(until, closed)
            groups[(*key, "all")].append((value, until - time))
            around = [
                (one.start_ns, one.id, one.name)
                for one in spans
                if one.kind == "stage" and one.rank == key[1] and one.start_ns <= time < one.end_ns
            ]
            if around:
                groups[(*key, max(around)[2])].append((value, until - time))
    return groups
