"""Collectives across ranks: meetings, transfer, wait, who came last, bandwidths."""

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.communication import bus_factor, communication
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Cell, Column, Table
from tests.runs import Row, loaded

DATA = Path(__file__).parents[3] / "shared" / "data"
ASCEND, TWO_RANKS = DATA / "ascend", DATA / "kineto" / "two_ranks"


class Call(NamedTuple):
    rank: int
    start: int
    duration: int
    operation: str | None = "all_reduce"
    group: str | None = "dp"
    size: int | None = 2
    number: int | None = None
    bytes: int | None = 1000
    stage: str | None = "actor_update"
    step: int | None = 1


def columns(*names: str) -> tuple[Column, ...]:
    texts = {"operation", "group", "stage", "kernel", "operator"}
    return tuple(Column(name, "text" if name in texts else "count") for name in names)


def with_table(name: str, table: Table | None) -> Spans:
    def read() -> Table:
        if table is None:
            raise TraceError("trace.json: is no trace")
        return table

    return replace(loaded([Row("actor_update", "stage", 1, 0, 9)]), tables={name: read})


def with_calls(*calls: Call) -> Spans:
    names = ("rank", "start", "duration", "operation", "group", "group size", "number", "bytes")
    return with_table("collectives", Table("x", columns(*names, "stage", "step"), list(calls)))


def rows_of(spans: Spans) -> list[dict[str, Cell]]:
    table = communication(spans)
    assert table.abstained is None
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def one_of(spans: Spans) -> dict[str, Cell]:
    (row,) = rows_of(spans)
    return row


def test_transfer_wait_and_who_came_last() -> None:
    row = one_of(
        with_calls(
            Call(0, 0, 50, bytes=4000),
            Call(1, 40, 10, bytes=4000),
            Call(0, 100, 30, bytes=4000),
            Call(1, 100, 10, bytes=4000),
            Call(0, 200, 20, bytes=4000),
            Call(1, 190, 30, bytes=4000),
        )
    )
    assert row == {
        "operation": "all_reduce",
        "group": "dp",
        "stage": "actor_update",
        "total": 150,
        "count": 6,
        "meetings": 3,
        "transfer": 13,  # 10, 10, 20
        "wait": 12,  # 40 + 20 + 10 over six calls, rounded
        "last to come": 1,
        "times last": 2,
        "bytes": 24_000,
        "typical": 4000,
        "algorithm GB/s": 12_000 / 40,
        "bus GB/s": 12_000 / 40,  # 2 (n - 1) / n is 1 of two
        "group size": 2,
        "ranks": 2,
    }


def test_where_two_ranks_came_last_as_often_none_is_named() -> None:
    row = one_of(with_calls(Call(0, 0, 5), Call(1, 0, 9), Call(0, 20, 9), Call(1, 20, 5)))
    assert (row["last to come"], row["times last"], row["meetings"]) == (None, 1, 2)
    row = one_of(with_calls(Call(0, 0, 5), Call(1, 0, 5)))
    assert (row["last to come"], row["times last"], row["meetings"]) == (None, 0, 1)


def test_groups_and_operations_do_not_meet_one_another() -> None:
    calls = [Call(0, 0, 5), Call(1, 0, 5, group="tp"), Call(2, 0, 5, operation="all_gather")]
    rows = rows_of(with_calls(*calls))
    assert [row["meetings"] for row in rows] == [0, 0, 0]


def test_ranks_with_different_counts_are_not_matched_and_it_says_so() -> None:
    spans = with_calls(Call(0, 0, 9), Call(0, 10, 9), Call(1, 0, 9), Call(0, 50, 9, step=2))
    row = one_of(spans)
    assert (row["count"], row["meetings"], row["transfer"], row["wait"]) == (4, 0, None, None)
    assert "4 of 4 calls have no counterpart" in communication(spans).note


def test_a_group_that_was_not_recorded_as_a_whole_is_said() -> None:
    calls = [Call(rank, 10 * at, 5 + rank, size=8) for rank in (0, 1) for at in range(3)]
    note = communication(with_calls(*calls)).note
    assert "In 3 of 3 meetings not every rank of the group was recorded" in note
    assert "not every rank" not in communication(with_calls(Call(0, 0, 5), Call(1, 0, 5))).note


def test_numbered_meetings_whose_members_lie_apart_are_kept_and_counted() -> None:
    spans = with_calls(Call(0, 0, 50, number=4), Call(1, 900, 10, number=4))
    assert one_of(spans)["transfer"] == 10
    assert "In 1 of 1 meetings a rank was done before another began" in communication(spans).note


def test_one_rank_alone_has_durations_and_bytes_only() -> None:
    row = one_of(with_calls(Call(0, 0, 5), Call(0, 9, 7, bytes=None)))
    assert (row["total"], row["count"], row["bytes"], row["typical"]) == (12, 2, 1000, 1000)
    nothing = ("transfer", "wait", "last to come", "times last", "algorithm GB/s")
    assert [row[name] for name in nothing] == [None] * 5


def test_sends_and_receives_meet_nobody() -> None:
    for operation in ("send", "recv", "send_recv"):
        calls = [Call(rank, 0, 5, operation, number=3) for rank in (0, 1)]
        assert one_of(with_calls(*calls))["meetings"] == 0


def test_a_stage_that_one_rank_knows_holds_for_the_meeting() -> None:
    row = one_of(with_calls(Call(0, 0, 5), Call(1, 0, 5, stage=None)))
    assert (row["stage"], row["count"]) == ("actor_update", 2)


def test_kernels_stand_in_by_their_names() -> None:
    names = ("rank", "kernel", "start", "duration", "stage", "step")
    reduce, send = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_SendRecv"
    rows = [(0, reduce, 0, 50, None, 1), (0, "gemm", 0, 9, None, 1), (0, send, 60, 5, None, 1)]
    rows += [(1, reduce, 40, 10, None, 1), (1, None, 0, 9, None, 1), (1, send, 60, 5, None, 1)]
    spans = with_table("kernels", Table("kernels", columns(*names), rows))
    found = {str(row["operation"]): row for row in rows_of(spans)}
    assert {name: (row["count"], row["meetings"]) for name, row in found.items()} == {
        "all_reduce": (2, 1),
        "send_recv": (2, 0),
    }
    row = found["all_reduce"]
    assert (row["transfer"], row["wait"], row["last to come"], row["group"]) == (10, 20, 1, None)
    assert row["bus GB/s"] is None
    assert "From kernels by their names" in communication(spans).note


@pytest.mark.parametrize("name", ["collectives", "kernels"])
def test_it_abstains_without_collectives_and_says_what_could_not_be_read(name: str) -> None:
    empty = Table(name, columns("rank", "kernel", "stage", "start", "duration", "step"))
    assert communication(with_table(name, empty)).abstained == (
        "no device tool recorded a collective"
    )
    assert "trace.json: is no trace" in str(communication(with_table(name, None)).abstained)
    assert communication(loaded([])).abstained is not None


def test_bus_factors_are_nccls() -> None:
    two_ways, one_way = ["all_reduce"], ["all_gather", "reduce_scatter", "all_to_all"]
    assert [bus_factor(name, 4) for name in two_ways] == [1.5]
    assert [bus_factor(name, 4) for name in one_way] == [0.75] * 3
    assert [bus_factor(name, 4) for name in ("broadcast", "reduce", "send", "recv")] == [1.0] * 4
    assert [bus_factor(name, 1) for name in ("all_reduce", "broadcast")] == [None] * 2


CALLS = st.lists(
    st.builds(  # all end at once, so none lie apart
        lambda rank, start, *rest: Call(rank, start, 50 - start, *rest),
        st.integers(0, 2),
        st.integers(20, 50),
        st.sampled_from(["all_reduce", "broadcast", "send", None]),
        st.sampled_from(["dp", "tp", None]),
        st.sampled_from([2, None]),
        st.sampled_from([None, None, 1]),
        st.sampled_from([None, 0, 70, 80]),
        st.sampled_from(["actor_update", None]),
        st.sampled_from([1, 2, None]),
    ),
    min_size=1,
    max_size=14,
    unique_by=lambda call: (call.rank, call.start),
)


@settings(max_examples=200, deadline=None)
@given(CALLS)
def test_it_agrees_with_brute_force_and_its_sums_are_whole(calls: list[Call]) -> None:
    rows = rows_of(with_calls(*calls))
    assert sum(int(row["count"] or 0) for row in rows) == len(calls)
    assert sum(int(row["total"] or 0) for row in rows) == sum(call.duration for call in calls)
    expected = brute(calls)
    assert {(r["operation"], r["group"], r["stage"]): r for r in rows}.keys() == expected.keys()
    for row in rows:
        for name, value in expected[row["operation"], row["group"], row["stage"]].items():
            assert row[name] == value, name


def brute(calls: list[Call]) -> dict[Any, dict[str, Any]]:
    """Return some cells of each row, meeting by meeting."""
    places: Any = defaultdict(lambda: defaultdict(list))
    for call in sorted(calls, key=lambda call: call.start):
        told = call.number is not None
        where = call.number if told else (call.step or 0)
        if call.operation != "send":
            places[call.operation, call.group, told, where][call.rank].append(call)
    meetings, stage_of = [], {}
    for ranks in places.values():
        if len(ranks) > 1 and len({len(own) for own in ranks.values()}) == 1:
            meetings += list(zip(*ranks.values(), strict=True))
    for meeting in meetings:
        stages = [call.stage for call in meeting if call.stage]
        stage_of.update({(call.rank, call.start): (stages or [None])[0] for call in meeting})
    groups: Any = defaultdict(lambda: ([], []))
    for call in calls:
        stage = stage_of.get((call.rank, call.start), call.stage)
        groups[call.operation, call.group, stage][0].append(call)
    for meeting in meetings:
        first = meeting[0]
        stage = stage_of[first.rank, first.start]
        groups[first.operation, first.group, stage][1].append(meeting)
    return {key: cells(*group) for key, group in groups.items()}


def cells(calls: list[Call], meetings: list[tuple[Call, ...]]) -> dict[str, Any]:
    shortest = [min(call.duration for call in meeting) for meeting in meetings]
    waited = [c.duration - s for m, s in zip(meetings, shortest, strict=True) for c in m]
    last = Counter(
        min(meeting, key=lambda call: call.duration).rank
        for meeting, least in zip(meetings, shortest, strict=True)
        if [call.duration for call in meeting].count(least) == 1
    )
    best = [rank for rank, count in last.items() if count == max(last.values())]
    moved = took = 0
    for meeting, least in zip(meetings, shortest, strict=True):
        payload = max(call.bytes or 0 for call in meeting)
        moved, took = (moved + payload, took + least) if payload and least else (moved, took)
    sizes = [call.bytes for call in calls if call.bytes is not None]
    return {
        "meetings": len(meetings),
        "transfer": half_up(shortest),
        "wait": half_up(waited),
        "last to come": best[0] if len(best) == 1 else None,
        "times last": max(last.values(), default=0) if meetings else None,
        "bytes": sum(sizes) if sizes else None,
        "algorithm GB/s": moved / took if took else None,
        "ranks": len({call.rank for call in calls}),
    }


def half_up(values: list[int]) -> int | None:
    return (2 * sum(values) + len(values)) // (2 * len(values)) if values else None


@pytest.mark.skipif(not ASCEND.is_dir(), reason="no real captures in ../shared/data/ascend")
def test_two_ranks_of_a_real_ascend_run_meet_in_every_collective() -> None:
    spans = load(ASCEND)
    table = spans.table("collectives")
    durations = defaultdict(list)
    names = ("group", "number", "duration")
    for group, number, took in zip(*map(table.column, names), strict=True):
        durations[group, number].append(int(took or 0))
    both = [own for own in durations.values() if len(own) == 2]
    (row,) = [row for row in rows_of(spans) if row["ranks"] == 2]
    assert (row["operation"], row["count"], row["meetings"]) == ("all_reduce", 8, 4)
    assert row["total"] == sum(map(sum, both))
    assert row["transfer"] == half_up([min(own) for own in both])


@pytest.mark.skipif(not TWO_RANKS.is_dir(), reason="no real traces in ../shared/data/kineto")
def test_of_two_real_ranks_that_lost_calls_only_what_ended_together_meets() -> None:
    spans = load(TWO_RANKS)
    rows = {row["operation"]: (row["count"], row["meetings"]) for row in rows_of(spans)}
    # The traces were thinned out by those who published them: the n-th of a step is not the n-th.
    assert rows == {"all_to_all": (8, 0), "all_reduce": (8, 2), "all_gather": (4, 2)}
    assert "12 of 20 calls have no counterpart" in communication(spans).note
