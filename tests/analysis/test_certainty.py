"""The ±u of numbers that cross ranks."""

from dataclasses import replace
from pathlib import Path

from lightning_rlprof.analysis.certainty import uncertainty_ns
from lightning_rlprof.loaders.load import load
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Column, Table
from tests.runs import grpo_run, header


def spans_of(folder: Path, hosts: str, unsure: list[int | None] | None) -> Spans:
    """Return a run with a rank on each of these hosts, and what its clocks told."""
    grpo_run(folder, steps=1, ranks=1)
    spans = load(folder)
    headers = {rank: header(rank, len(hosts), host=host) for rank, host in enumerate(hosts)}
    tables = dict(spans.tables)
    if unsure is not None:
        columns = (Column("rank", "count"), Column("uncertainty", "duration", "ns"))
        tables["clocks"] = lambda: Table("clocks", columns, list(enumerate(unsure)))
    return replace(spans, headers=headers, tables=tables)


def test_one_host_has_one_clock(tmp_path: Path) -> None:
    assert uncertainty_ns(spans_of(tmp_path, "aa", None)) == 0
    assert uncertainty_ns(spans_of(tmp_path / "2", "aab", None), [0, 1]) == 0


def test_two_hosts_that_compared_clocks_have_the_sum(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, "aabbcd", [0, 0, 50, 70, 30, 20])
    assert uncertainty_ns(spans) == 100
    assert uncertainty_ns(spans, [0, 5]) == 20
    assert uncertainty_ns(spans, [2, 3]) == 0


def test_without_a_comparison_it_is_not_known(tmp_path: Path) -> None:
    assert uncertainty_ns(spans_of(tmp_path, "ab", None)) is None
    assert uncertainty_ns(spans_of(tmp_path / "2", "abc", [0, 5, None])) is None
    assert uncertainty_ns(spans_of(tmp_path / "3", "abc", [0, 5, None]), [0, 1]) == 5
    assert uncertainty_ns(spans_of(tmp_path / "4", "abc", [0, 5])) is None
