"""Counters over time, against every nanosecond, one by one."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.device.device_counters import background_samples, device_counters
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table
from tests.builders.runs import Row, loaded
from tests.builders.sampled import S, sampled_run
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


# ---- background metrics


def background(found_: dict[Any, dict[str, Cell]], metric: str) -> dict[Any, Cell]:
    return {key[3]: row["mean"] for key, row in found_.items() if key[0] == metric}


def test_a_rate_lasts_for_its_own_time_and_counts_to_a_stage_that_was_open_all_of_it() -> None:
    rows = [stage("actor_generate", 0, 3 * S), stage("actor_update", 3 * S, int(4.5 * S))]
    spans = sampled_run([(0, None, {"swap_in_bytes_per_s": [10, 20, 60, 7, 100]})], rows, seconds=5)
    assert background(found(spans), "swap_in_bytes_per_s") == {
        "all": pytest.approx(197 / 5),
        "actor_generate": 30.0,
        "actor_update": 7.0,  # the second in which it ended belongs to no stage
    }


def test_a_rate_over_several_short_stages_belongs_to_none_of_them() -> None:
    rows = [stage("a", at, at + S // 4) for at in range(0, 2 * S, S // 4)]
    spans = sampled_run([(0, None, {"host_cpu_percent": [50, 70]})], rows, seconds=2)
    assert background(found(spans), "host_cpu_percent") == {"all": 60.0}


def test_a_value_counts_to_the_stage_that_was_open_when_it_was_read() -> None:
    """Not to that in which its line was written, which is later."""
    rows = [stage("actor_generate", 0, int(2.5 * S)), stage("actor_update", int(2.5 * S), 5 * S)]
    watts = [100.0, 200.0, 400.0, 600.0]  # at 1 to 4 s
    spans = sampled_run([(0, 3, {"device_clock_mhz": watts})], rows, seconds=5)
    rows_ = found(spans)
    assert rows_["device_clock_mhz", 0, 3, "actor_generate"]["mean"] == 150.0
    assert rows_["device_clock_mhz", 0, 3, "actor_update"]["max"] == 600.0


def test_the_end_of_a_capture_does_not_end_what_is_sampled_in_the_background() -> None:
    rows = [Row("rlprof close capture", "region", 1, S + S // 2, 2 * S)]
    spans = sampled_run([(0, None, {"host_available_bytes": [1, 3, 9]})], rows, seconds=3)
    assert background(found(spans), "host_available_bytes") == {"all": 2.0}


def test_background_metrics_and_counters_of_captures_are_listed_together() -> None:
    spans = sampled_run([(0, None, {"host_cpu_percent": [50, 70]})], seconds=2)
    both = with_samples(spans, (0, 0, "SM", 0, 5.0))
    both = replace(both, tables={**spans.tables, **both.tables})
    assert {key[0] for key in found(both)} == {"SM", "host_cpu_percent"}
    assert "Background metrics: a rate is" in device_counters(both).note
    assert (
        "Background metrics" not in device_counters(with_samples(spans, (0, 0, "a", 0, 5.0))).note
    )


def test_samples_of_one_background_metric_are_by_rank_device_and_time() -> None:
    values = {"device_clock_mhz": [1.0, 2.0]}
    spans = sampled_run([(1, 0, values), (0, 2, values), (0, 1, values)], ranks=2, seconds=2)
    samples = background_samples(spans, "device_clock_mhz")
    assert samples is not None
    assert samples.rank.tolist() == [0, 0, 0, 0, 1, 1]
    assert samples.device.tolist() == [1, 1, 2, 2, 0, 0]
    assert samples.time.tolist() == [S, 2 * S] * 3
    assert background_samples(spans, "device_power_watts") is None
    assert background_samples(loaded([]), "device_clock_mhz") is None


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
