"""Bandwidth of links: sums by pair of ranks, the slowest one named, and ranks that are unknown."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.links import links
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table, columns_of
from tests.builders.runs import loaded
from tests.effort import examples

COLUMNS = (
    Column("rank", "count"),
    *columns_of("count", "source", "destination", "source rank", "destination rank"),
    *columns_of("text", "group", "transport"),
    Column("size", "count", "bytes"),
    Column("transfer", "duration", "ns"),
)


def run(*rows: tuple[object, ...]) -> Spans:
    return replace(loaded([]), tables={"links": lambda: Table("links", COLUMNS, list(rows))})  # type: ignore[arg-type]


def link(
    source: int,
    to: int,
    size: int,
    took: int,
    *,
    group: str = "tp",
    by: str = "HCCS",
    first: int = 0,
) -> tuple[object, ...]:
    """Return a row of the rank that is number `source` of its group, which begins at a rank."""
    return (first + source, source, to, first + source, None, group, by, size, took)


def test_the_slowest_link_is_named_against_the_others_of_its_transport() -> None:
    rows = [link(at, to, 100, 10) for at in range(3) for to in range(3) if at != to]
    rows[3] = link(1, 2, 100, 40)
    rows += [link(0, 1, 100, 80, by="RDMA"), link(1, 0, 100, 80, by="RDMA")]

    table = links(run(*rows))

    assert table.rows[0] == (1, 2, None, "HCCS", 100, 40, 2.5, 0.25)
    assert table.note == (
        "Slowest link of its transport: rank 1 to rank 2 over HCCS, 2.5 GB/s, 0.25x the median."
    )


def test_copies_inside_a_device_and_empty_rows_are_no_links() -> None:
    table = links(run(link(0, 0, 5, 5), link(0, 1, 0, 5), link(0, 1, 5, 0), link(0, 1, 8, 4)))
    assert list(table.rows) == [(0, 1, "tp", "HCCS", 8, 4, 2.0, 1.0)]


def test_a_peer_that_recorded_nothing_is_not_mixed_with_the_rank_of_its_number() -> None:
    other = link(0, 1, 10, 5, group="dp", first=8)  # from rank 8 to number 1 of its group
    table = links(run(link(0, 1, 10, 5), link(1, 0, 10, 5), other))
    assert {row[:3] for row in table.rows} == {(0, 1, None), (1, 0, None), (8, 1, "dp")}
    assert "a rank that recorded nothing has its number" in table.note


def test_one_rank_alone() -> None:
    assert links(run(link(0, 1, 8, 4), link(1, 0, 8, 4)), ranks=[1]).column("source") == [1]


@pytest.mark.parametrize("spans", [loaded([]), run(), run(link(0, 0, 5, 5))])
def test_it_abstains_without_links(spans: Spans) -> None:
    assert "torch_npu.profiler records it from level1 on" in str(links(spans).abstained)


amounts = st.integers(1, 1_000)
pairs = st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["HCCS", "RDMA"]))


@given(st.lists(st.tuples(pairs, amounts, amounts), min_size=1))
@settings(max_examples=examples(50), deadline=None)
def test_sums_are_those_of_brute_force(drawn: list[tuple[tuple[int, int, str], int, int]]) -> None:
    known = [link(at, at, 1, 1) for at in range(4)]
    sums: dict[tuple[int, int, str], list[int]] = defaultdict(lambda: [0, 0])
    for (source, to, by), size, took in drawn:
        if source != to:
            sums[source, to, by][0] += size
            sums[source, to, by][1] += took

    table = links(run(*known, *(link(*pair[:2], *own, by=pair[2]) for pair, *own in drawn)))

    found = {(row[0], row[1], row[3]): [row[4], row[5]] for row in table.rows}
    assert found == dict(sums)
