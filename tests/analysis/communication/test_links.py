"""Bandwidth of links: sums, verdicts on healthy and slow ones, the matrix, unknown ranks."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.communication.links import link_speeds, links
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table, columns_of
from tests.builders.runs import loaded
from tests.effort import examples
from tests.places import SHARED_DATA

ASCEND = SHARED_DATA / "ascend"

COLUMNS = (
    Column("rank", "count"),
    Column("step", "count"),
    Column("operation", "text"),
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
    step: int = 1,
    operation: str = "allreduce",
) -> tuple[object, ...]:
    """Return a row of the rank that is number `source` of its group, which begins at a rank."""
    own = (first + source, step, operation, source, to, first + source, None)
    return (*own, group, by, size, took)


PAIRS = list(itertools.permutations(range(4), 2))


def mesh(
    ranks: int, steps: int, speed: Callable[[int, int, int], float], *, by: str = "HCCS"
) -> list[tuple[object, ...]]:
    """Return what every rank saw of its links in each step, at speeds in GB/s."""
    return [
        link(one, other, 10**7, round(10**7 / speed(one, other, step)), by=by, step=step)
        for step in range(1, steps + 1)
        for one, other in itertools.permutations(range(ranks), 2)
    ]


def test_a_slow_link_is_named_with_its_evidence() -> None:
    rows = mesh(4, 3, lambda one, other, _: 10 if (one, other) == (1, 2) else 20)
    rows += mesh(2, 3, lambda *_: 1, by="RDMA")

    table = links(run(*rows))

    assert table.rows[0][:4] == (1, 2, None, "HCCS")
    assert table.rows[0][4:7] == (30_000_000, 3_000_000, 10.0)
    assert table.rows[0][7] == pytest.approx(0.5)
    assert table.column("verdict")[:2] == ["slow", "ok"]
    assert table.note.startswith(
        "Slow link: rank 1 to rank 2 over HCCS, 10 GB/s, 0.50x the speed of 11 links in the same "
        "operations and sizes (99% CI 0.44\u20130.56), slower in 3 of 3 observations. "
        "Inconclusive: 2 of 14 links"
    )


def test_equal_links_are_not_slow() -> None:
    table = links(run(*mesh(4, 1, lambda *_: 20)))
    assert {*table.column("verdict")} == {"ok"}
    assert table.note == (
        "No slow link: each of 12 links has more than 0.75x the speed of comparable ones (99% CI)."
    )


def test_one_slow_moment_is_not_a_slow_link() -> None:
    table = links(run(*mesh(4, 1, lambda one, other, _: 5 if (one, other) == (1, 2) else 20)))
    assert table.column("verdict")[0] == "inconclusive"
    assert table.rows[0][:2] == (1, 2)
    assert table.note.startswith("Inconclusive: 1 of 12 links")


def test_links_are_compared_with_what_did_the_same() -> None:
    """Small messages, other operations and slower steps are slow on every link."""
    rows = mesh(4, 3, lambda one, other, step: 20 / step)
    for step in (1, 2, 3):  # one link has small messages alone, which all links are slow in
        rows += [link(*pair, 1_000, 5_000, step=step, operation="broadcast") for pair in PAIRS]
        rows += [link(2, 3, 1_000, 5_000, step=step, operation="broadcast") for _ in range(50)]
    table = links(run(*rows))
    assert {*table.column("verdict")} == {"ok"}
    slowest = min(table.rows, key=lambda row: float(row[6]))  # type: ignore[arg-type]
    assert slowest[:2] == (2, 3)
    assert slowest[7] == pytest.approx(1.0)


def test_all_links_of_a_rank_are_named_as_its_port() -> None:
    table = links(run(*mesh(8, 3, lambda one, other, _: 8 if 5 in (one, other) else 20)))
    assert table.column("verdict").count("slow") == 14
    assert table.note == (
        "All 14 links of rank 5 are slow, 0.40x the speed of comparable ones: check its port or "
        "network card."
    )


def test_links_that_vary_leave_the_verdict_open() -> None:
    rng = np.random.default_rng(0)
    table = links(run(*mesh(4, 3, lambda *_: float(np.exp(rng.normal(3, 0.5))))))
    assert "slow" not in table.column("verdict")
    assert "Inconclusive: 12 of 12 links" in table.note


def noisy(seed: int, kind: str, ranks: int, steps: int) -> Callable[[int, int, int], float]:
    """Return speeds of a healthy run: links differ, steps differ, and each observation does."""
    rng = np.random.default_rng(seed)
    own = {pair: rng.normal(0, 0.03) for pair in itertools.permutations(range(ranks), 2)}
    pace = rng.normal(0, 0.3, steps + 1)

    def noise() -> float:
        if kind == "heavy":
            return float(rng.standard_t(3)) * 0.05
        burst = rng.exponential() if kind == "congested" and rng.random() < 0.1 else 0.0
        return float(rng.normal(0, 0.04)) - burst

    return lambda one, other, step: 20 * float(np.exp(own[one, other] + pace[step] + noise()))


@pytest.mark.parametrize("kind", ["even", "heavy", "congested"])
@pytest.mark.parametrize(("ranks", "steps"), [(4, 3), (8, 3), (8, 10)])
def test_at_most_one_healthy_run_in_fifty_names_a_link(kind: str, ranks: int, steps: int) -> None:
    seeds = range(50)
    named = [
        seed
        for seed in seeds
        if "slow"
        in links(run(*mesh(ranks, steps, noisy(seed, kind, ranks, steps)))).column("verdict")
    ]
    assert len(named) <= 1


@pytest.mark.parametrize("kind", ["even", "heavy", "congested"])
def test_a_link_of_half_the_speed_is_named_and_no_other(kind: str) -> None:
    found = []
    for seed in range(30):
        healthy = noisy(seed, kind, 8, 10)

        def speed(
            one: int, other: int, step: int, usual: Callable[[int, int, int], float] = healthy
        ) -> float:
            return usual(one, other, step) * (0.5 if (one, other) == (2, 5) else 1)

        table = links(run(*mesh(8, 10, speed)))
        found.append([row[:2] for row in table.rows if row[-1] == "slow"])
    assert found.count([(2, 5)]) >= 29


@pytest.mark.skipif(not ASCEND.is_dir(), reason="no real traces in ../shared/data/ascend")
def test_links_of_a_real_ascend_run_are_healthy() -> None:
    table = links(load(ASCEND / "text_level1_rank0"))
    assert {*table.column("verdict")} <= {"ok", "inconclusive"}


def test_copies_inside_a_device_and_empty_rows_are_no_links() -> None:
    table = links(run(link(0, 0, 5, 5), link(0, 1, 0, 5), link(0, 1, 5, 0), link(0, 1, 8, 4)))
    row = (0, 1, "tp", "HCCS", 8, 4, 2.0, None, None, None, 1, "inconclusive")
    assert list(table.rows) == [row]


def test_a_peer_that_recorded_nothing_is_not_mixed_with_the_rank_of_its_number() -> None:
    other = link(0, 1, 10, 5, group="dp", first=8)  # from rank 8 to number 1 of its group
    table = links(run(link(0, 1, 10, 5), link(1, 0, 10, 5), other))
    assert {row[:3] for row in table.rows} == {(0, 1, None), (1, 0, None), (8, 1, "dp")}
    assert "a rank that recorded nothing has its number" in table.note


def test_speeds_are_the_rows_of_the_table() -> None:
    rows = [*mesh(4, 3, lambda one, other, step: 10 + one * step + other), link(0, 7, 500, 9)]
    table = links(run(*rows))
    speeds, note = link_speeds(run(*rows))
    assert note == table.note
    assert [
        (each.source.number, each.destination.number, each.transport, each.size, each.time)
        for each in speeds
    ] == [(*row[:2], row[3], *row[4:6]) for row in table.rows]
    assert [(each.ratio, each.verdict) for each in speeds] == [
        (row[7], row[11]) for row in table.rows
    ]
    assert {each.destination.name for each in speeds} == {"0", "1", "2", "3", "#7"}
    assert link_speeds(run()) == ([], links(run()).abstained)


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
