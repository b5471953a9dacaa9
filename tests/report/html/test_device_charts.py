"""What the report draws of devices, as data."""

from dataclasses import replace

from lightning_rlprof.analysis.device.breakdown import (
    COMPUTE_CLASSES,
    EDGE,
    NOT_PROFILED,
    OVERLAPPED,
    PARTS,
    WORK,
)
from lightning_rlprof.analysis.device.gaps import CAUSES
from lightning_rlprof.analysis.diagnosis.data_quality import Check
from lightning_rlprof.report.html.device_charts import DeviceCharts, Segment, trust
from lightning_rlprof.report.html.device_timeline import WORK_CLASSES
from lightning_rlprof.tables.spans import Spans
from tests.builders.device_work import Job, Work, rows_of, spans_of, table
from tests.builders.runs import Row

CALLS = ("hcom_allReduce__586_0_1", "hcom_allReduce__586_7_1")


def named(*names: str) -> Spans:
    """Return a trace of one rank with a kernel of each name, one after the other."""
    work = [Work("compute", 10 * at, 10 * at + 1 + at, None, 10 * at) for at, _ in enumerate(names)]
    rows = [row | {"kernel": name} for row, name in zip(rows_of(work), names, strict=True)]
    spans = spans_of(Job({0: [Row("run", "region", 1, 0, 100)]}, work))
    return replace(spans, tables={"kernels": lambda: table("kernels", rows)})


def test_kernels_of_one_short_name_are_one_row_with_the_longest_full_name() -> None:
    rows = DeviceCharts(named(*CALLS, "ampere_sgemm_128x64_nn")).kernels
    assert [(row.calls, row.total) for row in rows] == [(2, 3), (1, 3)]
    assert rows[0].full == CALLS[1]
    assert rows[1].full == "ampere_sgemm_128x64_nn"
    assert [row.kind for row in rows] == ["communication", "matmul"]


def test_a_bar_divides_its_time_and_a_legend_leaves_out_what_is_tiny() -> None:
    charts = DeviceCharts(named("ampere_sgemm_128x64_nn"))
    bar = charts.bar
    assert sum(part.ns for part in bar.segments) == bar.ns == 100
    assert bar.busy == 0.01
    tiny = bar._replace(segments=[bar.segments[0]._replace(share=0.0004)])
    assert tiny.legend == []


def test_a_part_is_picked_out_by_the_name_that_the_timeline_has() -> None:
    names = {*CAUSES, *WORK_CLASSES}
    parts = [name for name in (*PARTS, *OVERLAPPED) if name not in (EDGE, NOT_PROFILED)]
    assert {Segment(name, "", 0, 0).pick for name in parts} == names


def test_a_full_column_is_a_hundred_high() -> None:
    spans = spans_of(
        Job({0: [Row("run", "region", 1, 0, 220)]}, [Work("compute", 0, 110, None, 0)])
    )
    charts = DeviceCharts(spans)
    ((style, name, path),) = charts.columns
    assert (style, name) == ("matmul", "matmul")
    assert path.startswith("M0 100.0V0.0h1V100.0z")
    assert path.count("M") == 55
    assert charts.time.columns.shape == (110, len(WORK))


def test_names_of_parts_are_distinct_and_classes_are_among_them() -> None:
    assert len({*PARTS}) == len(PARTS)
    assert {*COMPUTE_CLASSES} < {*PARTS}


def test_doubts_come_first_and_beyond_three_are_counted() -> None:
    doubts = [Check(f"check {at}", "warn", "wrong") for at in range(5)]
    checks = [Check("ranks", "ok", "1 of 1 present"), *doubts, Check("MFU", "ok", "below 100%")]
    found = trust(checks, 10)
    assert [state for state, _, _ in found] == ["warn"] * 4 + ["ok"]
    assert found[3][2].startswith("2 more doubts")
    assert [name for _, name, _ in trust([], 2)] == ["steps"]
    assert trust([], 0) == []
