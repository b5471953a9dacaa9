"""What the page says of a run before its tables."""

from dataclasses import replace
from pathlib import Path

from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html.run_facts import is_whole
from lightning_rlprof.tables.spans import RunWarning
from tests.builders.runs import grpo_rows, grpo_run, header, write_rank


def test_nothing_is_missing_only_where_all_ranks_are_there(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path)
    assert is_whole(spans)
    assert not is_whole(replace(spans, warnings=(RunWarning(0, "3 lines are lost"),)))

    alone = tmp_path / "alone"
    write_rank(alone, header(0, 2), grpo_rows(2))
    assert not is_whole(load(alone))
