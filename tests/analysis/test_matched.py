"""Matching calls across ranks by number or by order, against brute force; names of kernels."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.matched import (
    NO_NUMBER,
    NOBODY,
    UNMATCHED,
    Meetings,
    meet,
    operation_of,
)

Call = tuple[int, int, int, int, int, int]
"""Rank, what, number, step, start, duration."""


def met(calls: list[Call]) -> Meetings:
    rank, what, number, step, start, duration = np.array(calls, np.int64).reshape(-1, 6).T
    return meet(rank, what, number, step, start, start + duration)


def of_one(*members: tuple[int, int, int]) -> Meetings:
    """Match (rank, start, duration) of one operation in one step without numbers."""
    return met([(rank, 0, NO_NUMBER, 1, start, length) for rank, start, length in members])


def test_the_shortest_is_the_transfer_and_its_rank_came_last() -> None:
    found = of_one((0, 0, 50), (1, 40, 10), (2, 20, 30))
    assert found.meeting.tolist() == [0, 0, 0]
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
    for name in ("meeting", "ranks", "transfer_ns", "last", "apart"):
        assert getattr(right, name).tolist() == getattr(off, name).tolist()
    assert right.ranks.tolist() == [2] * 5


def test_calls_that_lie_apart_meet_by_their_number_alone() -> None:
    assert of_one((0, 0, 5), (1, 90, 10)).meeting.tolist() == [UNMATCHED] * 2
    found = met([(0, 0, 8, 1, 0, 5), (1, 0, 8, 1, 90, 10)])
    assert (found.meeting.tolist(), found.apart.tolist()) == ([0, 0], [True])
    # One of four is not where the others say that its clock is.
    calls = [(rank, 100 * at + 30 * rank, 20) for rank in (0, 1) for at in range(3)]
    mixed = of_one(*calls, (0, 400, 20), (1, 900, 20))
    assert mixed.meeting.tolist() == [0, 1, 2, 0, 1, 2, UNMATCHED, UNMATCHED]


def test_equal_numbers_meet_although_one_rank_was_recorded_later() -> None:
    calls = [(0, 0, number, 0, 10 * number, 5) for number in (1, 2, 3)]
    calls += [(1, 0, number, 0, 10 * number, 4) for number in (2, 3, 4)]
    assert met(calls).meeting.tolist() == [UNMATCHED, 0, 1, 0, 1, UNMATCHED]
    unnumbered = [(*call[:2], NO_NUMBER, *call[3:]) for call in calls[:-1]]
    assert met(unnumbered).meeting.tolist() == [UNMATCHED] * 5  # three here, two there


def test_one_number_for_several_calls_counts_them_off() -> None:
    calls = [(rank, 0, 7, 0, start, 5) for rank in (0, 1) for start in (20, 10)]
    assert met(calls).meeting.tolist() == [1, 0, 1, 0]


def test_numbers_are_not_mixed_up_with_steps() -> None:
    assert met([(0, 0, 3, 3, 0, 5), (1, 0, NO_NUMBER, 3, 0, 5)]).meeting.tolist() == [UNMATCHED] * 2


def test_where_two_are_equally_short_nobody_came_last() -> None:
    assert of_one((0, 0, 5), (1, 0, 5), (2, 0, 9)).last.tolist() == [NOBODY]


def test_one_rank_alone_and_nothing_at_all_meet_nobody() -> None:
    assert of_one((0, 0, 5), (0, 9, 5)).meeting.tolist() == [UNMATCHED] * 2
    assert of_one().meeting.tolist() == []


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


CALLS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from([NO_NUMBER, NO_NUMBER, 0, 1]),
        st.integers(0, 2),
        st.integers(0, 30),
        st.integers(0, 9),
    ),
    max_size=25,
    unique_by=lambda call: (call[0], call[4]),  # no two calls of a rank begin at once
)


@settings(max_examples=300, deadline=None)
@given(CALLS)
def test_it_agrees_with_brute_force(calls: list[Call]) -> None:
    found = met(calls)
    meetings = brute(calls)
    seen = defaultdict(set)
    for at, meeting in enumerate(found.meeting.tolist()):
        if meeting != UNMATCHED:
            seen[meeting].add(at)
    assert {frozenset(members) for members in seen.values()} == set(meetings)
    for meeting, members in seen.items():
        lengths = sorted((calls[at][5], at) for at in members)
        assert found.ranks[meeting] == len(members)
        assert found.transfer_ns[meeting] == lengths[0][0]
        single = lengths[0][0] < lengths[1][0]
        assert found.last[meeting] == (lengths[0][1] if single else NOBODY)
        assert found.apart[meeting] == meetings[frozenset(members)]


def brute(calls: list[Call]) -> dict[frozenset[int], bool]:
    """Return the meetings as sets of places in the list, and whether they lie apart."""
    places: dict[tuple[int, bool, int], dict[int, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for at in sorted(range(len(calls)), key=lambda at: calls[at][4]):
        rank, what, number, step = calls[at][:4]
        told = number != NO_NUMBER
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


def measured(calls: list[Call], members: Sequence[int]) -> list[tuple[tuple[int, int], int, int]]:
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
