"""Matching collectives across ranks, and telling their transfer from the wait for the last.

Collectives across ranks: meetings, transfer, wait, who came last, bandwidths.

Matching calls across ranks by number or by order, against brute force; names of kernels.
"""

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.communication.collectives import (
    Doubt,
    LongCall,
    MatchedCollectives,
    bus_factor,
    call_times,
    communication,
    match_calls,
    operation_of,
    transfer_times,
)
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.arrays import UNKNOWN
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table
from tests.builders.runs import Row, loaded
from tests.effort import examples
from tests.places import SHARED_DATA


def match_collectives(*members: tuple[int, int, int]) -> list[int]:
    """Return transfers of (rank, start, end), all of one name and step."""
    rank, start, end = np.array(members).T
    zeros = np.zeros(len(members), dtype=np.int64)
    return transfer_times(rank, zeros, zeros, start, end).tolist()


def test_a_clock_that_is_off_changes_no_duration() -> None:
    right = match_collectives((0, 0, 50), (1, 40, 50), (0, 60, 70), (1, 60, 72))
    assert right == [10, 10, 10, 10]
    assert match_collectives((0, 5, 55), (1, 40, 50), (0, 65, 75), (1, 60, 72)) == right


def test_clocks_that_are_unsure_by_more_do_not_part_a_collective() -> None:
    zeros, rank = np.zeros(2, dtype=np.int64), np.array([0, 1])
    start, end = np.array([0, 13]), np.array([10, 20])  # 3 ns apart
    found = [
        transfer_times(rank, zeros, zeros, start, end, unsure_ns=unsure).tolist()
        for unsure in (0, 2, 3, None)
    ]
    assert found == [[UNKNOWN] * 2, [UNKNOWN] * 2, [7, 7], [7, 7]]


def test_collectives_that_cannot_be_one_are_not_matched() -> None:
    nothing = [UNKNOWN] * 3
    assert match_collectives((0, 0, 10), (1, 0, 10), (1, 20, 30)) == nothing  # not as many
    assert match_collectives((0, 0, 10), (0, 20, 30), (0, 40, 50)) == nothing  # one rank alone
    assert (
        match_collectives((0, 0, 10), (1, 11, 20), (2, 5, 15)) == nothing
    )  # one went before one came
    rank, step = np.array([0, 1]), np.array([1, 2])
    zeros, ends = np.zeros(2, dtype=np.int64), np.array([5, 5])
    assert transfer_times(rank, step, zeros, zeros, ends).tolist() == [UNKNOWN] * 2
    assert transfer_times(rank, zeros, step, zeros, ends).tolist() == [UNKNOWN] * 2
    empty = np.empty(0, dtype=np.int64)
    assert transfer_times(empty, empty, empty, empty, empty).tolist() == []


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_is_what_was_put_in(seed: int) -> None:
    noise = random.Random(seed)
    rows, expected, now = [], [], 0
    for _ in range(30):
        step, name, took = noise.randint(1, 3), noise.randint(0, 2), noise.randint(0, 9)
        came = [now + noise.randint(0, 50) for _ in range(4)]
        now = max(came) + took
        rows += [(rank, step, name, start, now) for rank, start in enumerate(came)]
        expected += [took] * 4
        now += 1
    order = noise.sample(range(len(rows)), len(rows))
    columns = np.array([rows[at] for at in order]).T
    assert transfer_times(*columns).tolist() == [expected[at] for at in order]


DATA = SHARED_DATA
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
        "matched": 3,
        "transfer": 13,  # 10, 10, 20
        "transfer at most": None,
        "transit": None,
        "wait": 12,  # 40 + 20 + 10 over six calls, rounded
        "overlapped": None,
        "exposed": None,
        "last rank": 1,
        "times last": 2,
        "bytes": 24_000,
        "median bytes": 4000,
        "algbw": 12_000 / 40,
        "busbw": 12_000 / 40,  # 2 (n - 1) / n is 1 of two
        "group size": 2,
        "ranks": 2,
        "doubt": None,
    }


def test_a_call_is_divided_and_what_no_other_rank_shares_is_unknown() -> None:
    alone = Call(0, 500, 7, operation="broadcast")
    calls = call_times(with_calls(Call(0, 0, 50), Call(1, 40, 10), alone))
    assert calls is not None
    rows = zip(calls.keys, calls.rank, calls.took_ns, calls.transfer_ns, calls.wait_ns, strict=True)
    assert sorted((key[0], *map(int, numbers)) for key, *numbers in rows) == [
        ("all_reduce", 0, 50, 10, 40),
        ("all_reduce", 1, 10, 10, 0),
        ("broadcast", 0, 7, 0, 0),
    ]
    assert call_times(loaded([Row("a", "stage", 1, 0, 5)])) is None


def test_the_longest_collectives_have_their_ranks_by_arrival() -> None:
    calls = [
        *(Call(0, 0, 50, bytes=3), Call(1, 40, 10, bytes=5)),
        *(Call(0, 100, 20), Call(1, 100, 20)),
        Call(1, 500, 30, "broadcast", None, bytes=None),
    ]
    found = call_times(with_calls(*calls))
    assert found is not None
    first, alone, even = found.longest(9)
    assert first == LongCall("all_reduce", "dp", 5, 10, None, 40, False, 1, [(0, 50), (1, 10)])
    assert alone == LongCall("broadcast", None, None, None, None, None, False, None, [(1, 30)])
    assert (even.transfer_ns, even.wait_ns, even.last_rank) == (20, 0, None)
    assert found.longest(1) == [first]
    lacking = call_times(with_calls(Call(0, 0, 50, size=4), Call(1, 40, 10, size=4)))
    assert lacking is not None
    (only,) = lacking.longest(6)
    assert (only.lacking, only.transfer_ns, only.last_rank) == (True, 10, None)


def test_where_two_ranks_came_last_as_often_none_is_named() -> None:
    row = one_of(with_calls(Call(0, 0, 5), Call(1, 0, 9), Call(0, 20, 9), Call(1, 20, 5)))
    assert (row["last rank"], row["times last"], row["matched"]) == (None, 1, 2)
    row = one_of(with_calls(Call(0, 0, 5), Call(1, 0, 5)))
    assert (row["last rank"], row["times last"], row["matched"]) == (None, 0, 1)


def test_groups_and_operations_do_not_meet_one_another() -> None:
    calls = [Call(0, 0, 5), Call(1, 0, 5, group="tp"), Call(2, 0, 5, operation="all_gather")]
    rows = rows_of(with_calls(*calls))
    assert [row["matched"] for row in rows] == [0, 0, 0]


def test_ranks_with_different_counts_are_not_matched_and_it_says_so() -> None:
    spans = with_calls(Call(0, 0, 9), Call(0, 10, 9), Call(1, 0, 9), Call(0, 50, 9, step=2))
    row = one_of(spans)
    assert (row["count"], row["matched"], row["transfer"], row["wait"]) == (
        4,
        0,
        None,
        None,
    )
    assert row["doubt"] == Doubt.NO_COUNTERPART


def test_a_group_that_was_not_recorded_as_a_whole_is_said() -> None:
    calls = [Call(rank, 10 * at, 5 + rank, size=8) for rank in (0, 1) for at in range(3)]
    note = communication(with_calls(*calls)).note
    assert "3 of 3 matched collectives lack ranks of their group" in note
    assert "lack ranks" not in communication(with_calls(Call(0, 0, 5), Call(1, 0, 5))).note


def test_numbered_meetings_whose_members_lie_apart_are_kept_and_counted() -> None:
    spans = with_calls(Call(0, 0, 50, number=4), Call(1, 900, 10, number=4))
    assert one_of(spans)["transfer"] == 10
    assert "1 of 1 matched collectives have equal numbers" in communication(spans).note


def test_one_rank_alone_has_durations_and_bytes_only() -> None:
    row = one_of(with_calls(Call(0, 0, 5), Call(0, 9, 7, bytes=None)))
    assert (row["total"], row["count"], row["bytes"], row["median bytes"]) == (12, 2, 1000, 1000)
    nothing = ("transfer", "wait", "last rank", "times last", "algbw")
    assert [row[name] for name in nothing] == [None] * 5


def test_sends_and_receives_meet_nobody() -> None:
    for operation in ("send", "recv", "send_recv"):
        calls = [Call(rank, 0, 5, operation, number=3) for rank in (0, 1)]
        assert one_of(with_calls(*calls))["matched"] == 0


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
    assert {name: (row["count"], row["matched"]) for name, row in found.items()} == {
        "all_reduce": (2, 1),
        "send_recv": (2, 0),
    }
    row = found["all_reduce"]
    assert (row["transfer"], row["wait"], row["last rank"], row["group"]) == (10, 20, 1, None)
    assert row["busbw"] is None
    assert "Taken from kernel names" in communication(spans).note


@pytest.mark.parametrize("name", ["collectives", "kernels"])
def test_it_abstains_without_collectives_and_says_what_could_not_be_read(name: str) -> None:
    empty = Table(name, columns("rank", "kernel", "stage", "start", "duration", "step"))
    assert communication(with_table(name, empty)).abstained == (
        "This run has no collectives. Capture a step with a profiler."
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
        st.sampled_from(["dp", "tp"]),  # `test_evidence.py` is about calls without one.
        st.none(),
        st.sampled_from([None, None, 1]),
        st.sampled_from([None, 0, 70, 80]),
        st.sampled_from(["actor_update", None]),
        st.sampled_from([1, 2, None]),
    ),
    min_size=1,
    max_size=14,
    unique_by=lambda call: (call.rank, call.start),
)


@settings(max_examples=examples(200), deadline=None)
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
        "matched": len(meetings),
        "transfer": half_up(shortest),
        "wait": half_up(waited),
        "last rank": best[0] if len(best) == 1 else None,
        "times last": max(last.values(), default=0) if meetings else None,
        "bytes": sum(sizes) if sizes else None,
        "algbw": moved / took if took else None,
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
    assert (row["operation"], row["count"], row["matched"]) == ("all_reduce", 8, 4)
    assert row["total"] == sum(map(sum, both))
    # These are two of the eight ranks that the links name.
    assert row["transfer at most"] == half_up([min(own) for own in both])
    assert (row["transfer"], row["wait"], row["doubt"]) == (None, None, Doubt.RANKS_MISSING)
    # CANN's own, a twentieth of it; some of its starts are rounded to the nanosecond beside ours.
    own = spans.table("communication")
    pairs = zip(own.column("group"), own.column("transfer"), strict=True)
    measured = [int(ns or 0) for group, ns in pairs if group == row["group"]]
    assert (len(measured), row["transit"]) == (8, half_up(measured))


@pytest.mark.skipif(not TWO_RANKS.is_dir(), reason="no real traces in ../shared/data/kineto")
def test_of_two_real_ranks_that_lost_calls_only_what_ended_together_meets() -> None:
    spans = load(TWO_RANKS)
    rows = {row["operation"]: (row["count"], row["matched"]) for row in rows_of(spans)}
    # The traces were thinned out by those who published them: the n-th of a step is not the n-th.
    assert rows == {"all_to_all": (8, 0), "all_reduce": (8, 2), "all_gather": (4, 2)}
    assert "12 of 20 calls have no counterpart" in communication(spans).note


MatchedCall = tuple[int, int, int, int, int, int]
"""Rank, what, number, step, start, duration."""


def met(calls: list[MatchedCall]) -> MatchedCollectives:
    rank, what, number, step, start, duration = np.array(calls, np.int64).reshape(-1, 6).T
    known, members = np.ones(len(rank), bool), np.full(len(rank), UNKNOWN)
    return match_calls(rank, what, number, step, start, start + duration, known, members, 0)


def of_one(*members: tuple[int, int, int]) -> MatchedCollectives:
    """Match (rank, start, duration) of one operation in one step without numbers."""
    return met([(rank, 0, UNKNOWN, 1, start, length) for rank, start, length in members])


def test_the_shortest_is_the_transfer_and_its_rank_came_last() -> None:
    found = of_one((0, 0, 50), (1, 40, 10), (2, 20, 30))
    assert found.collective.tolist() == [0, 0, 0]
    assert found.ranks.tolist() == [3]
    assert found.transfer_ns.tolist() == [10]
    assert found.last.tolist() == [1]
    assert found.apart.tolist() == [False]


def test_a_clock_that_is_off_changes_nothing() -> None:
    calls = [(0, 100 * at, 50) for at in range(5)] + [
        (1, 100 * at + 40, 10 + at) for at in range(5)
    ]
    right = of_one(*calls)
    off = of_one(*[(rank, start + 7_000 * rank, length) for rank, start, length in calls])
    for name in ("collective", "ranks", "transfer_ns", "last", "apart"):
        assert getattr(right, name).tolist() == getattr(off, name).tolist()
    assert right.ranks.tolist() == [2] * 5


def test_calls_that_lie_apart_meet_by_their_number_alone() -> None:
    assert of_one((0, 0, 5), (1, 90, 10)).collective.tolist() == [UNKNOWN] * 2
    found = met([(0, 0, 8, 1, 0, 5), (1, 0, 8, 1, 90, 10)])
    assert (found.collective.tolist(), found.apart.tolist()) == ([0, 0], [True])
    # One of four is not where the others say that its clock is.
    calls = [(rank, 100 * at + 30 * rank, 20) for rank in (0, 1) for at in range(3)]
    mixed = of_one(*calls, (0, 400, 20), (1, 900, 20))
    assert mixed.collective.tolist() == [0, 1, 2, 0, 1, 2, UNKNOWN, UNKNOWN]


def test_equal_numbers_meet_although_one_rank_was_recorded_later() -> None:
    calls = [(0, 0, number, 0, 10 * number, 5) for number in (1, 2, 3)]
    calls += [(1, 0, number, 0, 10 * number, 4) for number in (2, 3, 4)]
    assert met(calls).collective.tolist() == [UNKNOWN, 0, 1, 0, 1, UNKNOWN]
    unnumbered = [(*call[:2], UNKNOWN, *call[3:]) for call in calls[:-1]]
    assert met(unnumbered).collective.tolist() == [UNKNOWN] * 5  # three here, two there


def test_one_number_for_several_calls_counts_them_off() -> None:
    calls = [(rank, 0, 7, 0, start, 5) for rank in (0, 1) for start in (20, 10)]
    assert met(calls).collective.tolist() == [1, 0, 1, 0]


def test_numbers_are_not_mixed_up_with_steps() -> None:
    assert met([(0, 0, 3, 3, 0, 5), (1, 0, UNKNOWN, 3, 0, 5)]).collective.tolist() == [UNKNOWN] * 2


def test_where_two_are_equally_short_nobody_came_last() -> None:
    assert of_one((0, 0, 5), (1, 0, 5), (2, 0, 9)).last.tolist() == [UNKNOWN]


def test_one_rank_alone_and_nothing_at_all_meet_nobody() -> None:
    assert of_one((0, 0, 5), (0, 9, 5)).collective.tolist() == [UNKNOWN] * 2
    assert of_one().collective.tolist() == []


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*)", "broadcast"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_Reduce_Sum_f32", "reduce"),
        ("ncclDevKernel_Generic_4", "other"),
        ("void vllm::cross_device_reduce_1stage<float, 4>", "all_reduce"),
        ("hcom_allReduce__586_0_1", "all_reduce"),
        ("hcom_alltoallv__021_3_1", "all_to_all"),
        ("hcom_batchSendRecv__1", "send_recv"),
        ("hcom_receive__1_1", "recv"),
        ("reduce_scatter_tensor", "reduce_scatter"),
    ],
)
def test_the_operation_of_a_name(name: str, operation: str) -> None:
    assert operation_of(name) == operation


MATCHED_CALLS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from([UNKNOWN, UNKNOWN, 0, 1]),
        st.integers(0, 2),
        st.integers(0, 30),
        st.integers(0, 9),
    ),
    max_size=25,
    unique_by=lambda call: (call[0], call[4]),  # no two calls of a rank begin at once
)


@settings(max_examples=examples(300), deadline=None)
@given(MATCHED_CALLS)
def test_it_agrees_with_brute_force(calls: list[MatchedCall]) -> None:
    found = met(calls)
    meetings = matched_brute(calls)
    seen = defaultdict(set)
    for at, meeting in enumerate(found.collective.tolist()):
        if meeting != UNKNOWN:
            seen[meeting].add(at)
    assert {frozenset(members) for members in seen.values()} == set(meetings)
    for meeting, members in seen.items():
        lengths = sorted((calls[at][5], at) for at in members)
        assert found.ranks[meeting] == len(members)
        assert found.transfer_ns[meeting] == lengths[0][0]
        single = lengths[0][0] < lengths[1][0]
        assert found.last[meeting] == (lengths[0][1] if single else UNKNOWN)
        assert found.apart[meeting] == meetings[frozenset(members)]


def matched_brute(calls: list[MatchedCall]) -> dict[frozenset[int], bool]:
    """Return the meetings as sets of places in the list, and whether they lie apart."""
    places: dict[tuple[int, bool, int], dict[int, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for at in sorted(range(len(calls)), key=lambda at: calls[at][4]):
        rank, what, number, step = calls[at][:4]
        told = number != UNKNOWN
        places[what, told, number if told else step][rank].append(at)
    found = []
    for (_, told, _), ranks in sorted(places.items()):
        if len(ranks) > 1 and len({len(own) for own in ranks.values()}) == 1:
            found += [(told, members) for members in zip(*ranks.values(), strict=True)]
    late: dict[tuple[int, int], list[int]] = defaultdict(list)
    for _, members in found:
        for pair, _, end in measured(calls, members):
            late[pair].append(end)
    offset = {p: statistics.median_high(own) if len(own) > 2 else 0 for p, own in late.items()}
    return {
        frozenset(members): apart
        for told, members in found
        if not (apart := lies_apart(measured(calls, members), offset)) or told
    }


def measured(
    calls: list[MatchedCall], members: Sequence[int]
) -> list[tuple[tuple[int, int], int, int]]:
    """Return (ranks, start, end) of each member, by the end of the lowest rank's."""
    first = min(members, key=lambda at: calls[at][0])
    zero = sum(calls[first][4:])
    return [
        ((calls[first][0], calls[at][0]), calls[at][4] - zero, sum(calls[at][4:]) - zero)
        for at in members
    ]


def lies_apart(
    members: list[tuple[tuple[int, int], int, int]], offset: dict[tuple[int, int], int]
) -> bool:
    latest = max(start - offset[pair] for pair, start, _ in members)
    return latest > min(end - offset[pair] for pair, _, end in members)
