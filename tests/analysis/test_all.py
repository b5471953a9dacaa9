from pathlib import Path

import pytest
from hypothesis import given, settings

from lightning_rlprof import analysis
from tests.analysis.oracle import runs
from tests.runs import Row, grpo_run, loaded


def test_each_is_named_as_its_table(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path, ranks=2)
    assert [each.__name__ for each in analysis.ALL] == [each(spans).name for each in analysis.ALL]


@settings(max_examples=60, deadline=None)
@given(runs(overlapping_steps=True))
def test_none_fails_on_odd_runs(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    for each in analysis.ALL:
        each(spans)
    analysis.headline(spans)
    analysis.compare(spans, spans)


@pytest.mark.parametrize("each", analysis.ALL)
def test_each_is_pure(tmp_path: Path, each: object) -> None:
    spans = grpo_run(tmp_path, ranks=2)
    before = [column.copy() for column in (spans.start_ns, spans.end_ns, spans.name)]
    assert each(spans) == each(spans)  # type: ignore[operator]
    after = (spans.start_ns, spans.end_ns, spans.name)
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
