"""The ±u of numbers that cross ranks."""

from dataclasses import replace
from pathlib import Path

from lightning_rlprof.analysis.steps.sync_points import (
    is_within_uncertainty,
    uncertainty_note,
    uncertainty_ns,
    unsynchronized_clocks,
)
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.runs import grpo_run, header

CLOCKS = (
    Column("rank", "count"),
    Column("clock", "text"),
    Column("uncertainty", "duration", "ns"),
)


def spans_of(folder: Path, hosts: str, unsure: list[int | None] | None) -> Spans:
    """Return a run with a rank on each of these hosts, and what its clocks told."""
    grpo_run(folder, steps=1, ranks=1)
    spans = load(folder)
    headers = {rank: header(rank, len(hosts), host=host) for rank, host in enumerate(hosts)}
    tables = dict(spans.tables)
    if unsure is not None:
        rows = [(rank, hosts[rank], each) for rank, each in enumerate(unsure)]
        tables["clocks"] = lambda: Table("clocks", CLOCKS, rows)
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


def test_the_clocks_table_tells_which_ranks_share_one(tmp_path: Path) -> None:
    """Two machines may have one name, and where no host is told each rank may have its own."""
    spans = spans_of(tmp_path, "aaa", None)
    rows = [(0, "0", 0), (1, "0", 0), (2, "2", None)]
    spans = replace(spans, tables={"clocks": lambda: Table("clocks", CLOCKS, rows)})
    assert uncertainty_ns(spans) is None
    assert uncertainty_ns(spans, [0, 1]) == 0


def test_an_effect_below_what_clocks_are_sure_of_says_nothing() -> None:
    assert [
        is_within_uncertainty(99, 100),
        is_within_uncertainty(-101, 100),
        is_within_uncertainty(0, 0),
    ] == [
        True,
        False,
        False,
    ]
    assert is_within_uncertainty(10**15, None)


def test_a_table_tells_the_uncertainty_of_a_number_that_crosses_ranks(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, "aabb", [0, 0, 50_000, 70_000])
    assert uncertainty_note(spans, "Skew") == "Skew: ±0.070 ms."
    assert uncertainty_note(spans_of(tmp_path / "2", "aa", None), "Skew") == ""
    assert unsynchronized_clocks(spans) == ""


def test_a_table_says_where_clocks_were_never_compared(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, "ba", None)
    assert uncertainty_note(spans, "Skew") == (
        "Skew: may be off by milliseconds, because clocks of hosts a, b were not synchronized."
    )
    columns = tuple(Column(name, "count") for name in ("rank", "clock", "uncertainty"))
    table = Table("clocks", columns, [(0, 0, None), (1, 1, None)])
    unnamed = {rank: header(rank, 2, host="") for rank in (0, 1)}
    unknown = replace(spans, headers=unnamed, tables={"clocks": lambda: table})
    assert unsynchronized_clocks(unknown).startswith("the hosts of some ranks are unknown")
    many = spans_of(tmp_path / "3", "abcdefg", None)
    assert "a, b, c, d, e and 2 more" in unsynchronized_clocks(many)
