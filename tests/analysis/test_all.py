from pathlib import Path

import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.analysis.comparison.compare import compare
from lightning_rlprof.report.summary import summary, summary_lines
from tests.builders.oracle import runs
from tests.builders.runs import Row, grpo_rows, grpo_run, loaded
from tests.effort import examples


def test_each_is_named_as_its_table(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path, ranks=2)
    assert [each.__name__ for each in [each.run for each in CATALOG if each.summary]] == [
        each(spans).name for each in [each.run for each in CATALOG if each.summary]
    ]


@settings(max_examples=examples(60), deadline=None)
@given(runs(overlapping_steps=True))
def test_none_fails_on_odd_runs(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    for each in [each.run for each in CATALOG if each.summary]:
        each(spans)
    summary_lines(summary(spans))
    compare(spans, spans)


COUNTED = (
    *("tokens", "samples", "flops", "replicas", "device_ns", "host_rss_bytes"),
    *("device_allocated_bytes", "device_peak_bytes", "device_reserved_bytes"),
)


@pytest.mark.parametrize("odd", [2**63 - 1, -(2**63), 2**63, -(10**30), 1.7e308, -1e308, 5e-324])
@pytest.mark.parametrize("other", [1, 0.5])
def test_none_fails_on_counters_that_nothing_can_have(odd: float, other: float) -> None:
    counters = [dict.fromkeys(COUNTED, value) for value in (odd, other)]
    rows = [row._replace(counters=counters[at % 2]) for at, row in enumerate(grpo_rows(steps=6))]
    spans = loaded(rows, rows)
    for each in [each.run for each in CATALOG if each.summary]:
        each(spans)
    compare(spans, spans)


@pytest.mark.parametrize("each", [each.run for each in CATALOG if each.summary])
def test_each_is_pure(tmp_path: Path, each: object) -> None:
    spans = grpo_run(tmp_path, ranks=2)
    before = [column.copy() for column in (spans.start_ns, spans.end_ns, spans.name)]
    assert each(spans) == each(spans)  # type: ignore[operator]
    after = (spans.start_ns, spans.end_ns, spans.name)
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
