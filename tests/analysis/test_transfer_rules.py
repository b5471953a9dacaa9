"""Small messages are a finding where the same group shows that it can move more, and only there."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_rlprof.analysis.claims import Claim, Undecided
from lightning_rlprof.analysis.device_runs import device_runs
from lightning_rlprof.analysis.transfer_rules import transfer_claims
from lightning_rlprof.spans import Spans
from tests.analysis.device_trace import KERNELS, Cells, table, thinned
from tests.runs import Row, loaded

COLLECTIVES = ("rank", "device", "stream", "operation", "group", "group size", "number", "bytes")
COLUMNS = (*COLLECTIVES, "dtype", "start", "duration", "stage", "step", "launch")
SMALL, LARGE = 4_000, 40_000_000


def calls(
    small: int = 200,
    large: int = 40,
    *,
    took: int = 40_000,
    late: int = 0,
    ranks: tuple[int, ...] = (0, 1),
) -> list[Cells]:
    """Return all_reduces of 4 kB and of 40 MB, one after the other; rank 1 comes later."""
    rows: list[Cells] = []
    for rank in ranks:
        now = 1_000
        for at in range(small + large):
            big = at >= small
            place = {"rank": rank, "device": rank, "stream": 9, "operation": "all_reduce"}
            group = {"group": "dp", "group size": 2, "number": at, "step": 1}
            length = 200_000 if big else took
            wait = late if rank == 0 and not big else 0
            time = {"start": now + (late - wait if not big else 0), "duration": length + wait}
            rows.append({**place, **group, **time, "bytes": LARGE if big else SMALL})
            now += length + (0 if big else late)
    return rows


def traced(rows: list[Cells], *, hidden: bool = False) -> Spans:
    spans = loaded(*([Row("step", "step", 1, 0, 10**8)] for _ in range(2)))
    kernels = [{**row, "kernel": "ncclDevKernel_AllReduce"} for row in rows]
    kernels += [{**row, "kernel": "gemm", "stream": 7} for row in rows if hidden]
    tables = {
        "kernels": lambda: table("kernels", KERNELS, kernels),
        "collectives": lambda: table("collectives", COLUMNS, rows),
    }
    return replace(spans, tables=tables)


def claims_of(spans: Spans, seen_ns: int) -> Iterator[Claim | Undecided]:
    return transfer_claims(spans, device_runs(spans), seen_ns)


def said(rows: list[Cells], seen_ns: int = 30_000_000) -> list[Claim | Undecided]:
    return list(claims_of(traced(rows), seen_ns))


def test_it_fires_with_what_they_cost_and_the_link_returns_the_calls() -> None:
    mixed = [{**row, "stage": "small" if row["bytes"] == SMALL else "large"} for row in calls()]
    spans = traced(mixed)
    (claim,) = claims_of(spans, 30_000_000)
    assert isinstance(claim, Claim)
    assert claim.text.startswith("small messages, exposed: all_reduce of group dp in small: 1/")
    assert (claim.low, claim.effect, claim.high) == (16_000_000,) * 3
    found = spans.sql(claim.query)
    assert len(found.rows) == 400
    assert set(found.column("bytes")) == {SMALL}
    assert claim.place is not None
    assert claim.place.step == 1


def staged(rows: list[Cells]) -> list[Cells]:
    return [{**row, "stage": "small" if row["bytes"] == SMALL else "large"} for row in rows]


def test_it_is_silent_where_they_are_few_or_hidden_or_none_are_recorded() -> None:
    assert said(staged(calls(took=1_000))) == []
    assert said(staged(calls()), seen_ns=10**10) == []
    assert list(claims_of(traced(staged(calls()), hidden=True), 30_000_000)) == []
    assert list(claims_of(loaded([Row("step", "step", 1, 0, 9)]), 10**9)) == []


def test_it_is_silent_where_they_use_as_much_of_the_link_as_larger_ones() -> None:
    fast = [{**row, "bytes": 10**6, "stage": "small"} for row in calls(large=0, took=10_000)]
    slow = [{**row, "stage": "large"} for row in calls(small=0)]
    assert said([*fast, *slow]) == []


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (calls(large=0), "nothing 8x as large compares"),
        (calls(small=19, took=400_000), "of 19 meetings"),
        (calls(ranks=(0,)), "are not told apart"),
    ],
)
def test_it_abstains_without_a_comparison_or_a_peer(rows: list[Cells], why: str) -> None:
    found = said(staged(rows))
    assert found
    assert all(isinstance(each, Undecided) for each in found)
    assert any(why in each[1] for each in found)


def test_what_is_waited_is_not_charged_to_the_messages() -> None:
    (claim,) = said(staged(calls(late=100_000)))
    assert isinstance(claim, Claim)
    assert claim.effect == 16_000_000, "rank 0 waits as long again for rank 1"


def test_it_abstains_where_all_that_is_exposed_may_be_waiting() -> None:
    rows = staged(calls(large=40, late=100_000))
    spans = traced(rows)
    kernels = [{**row, "kernel": "ncclDevKernel_AllReduce"} for row in rows]
    kernels += [{**row, "kernel": "gemm", "stream": 7, "duration": 40_000} for row in rows]
    told = {**spans.tables, "kernels": lambda: table("kernels", KERNELS, kernels)}
    (found,) = claims_of(replace(spans, tables=told), 30_000_000)
    assert isinstance(found, Undecided)
    assert "may wait for peers" in found.why


@pytest.mark.parametrize("seed", range(10))
def test_deleting_a_fifth_of_the_calls_accuses_nothing_large(seed: int) -> None:
    for found in said(staged(thinned(calls(), 0.2, seed))):
        assert isinstance(found, Undecided) or "in small" in found.text
