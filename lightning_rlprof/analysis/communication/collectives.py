"""Collectives of all ranks, matched across ranks, with transfer, wait, overlap and bandwidth.

A collective ends for all ranks when the last one has arrived and the data is through. So the
shortest of its durations is the transfer; what another rank spent beyond that, it waited; and the
rank with the shortest duration arrived last. Only durations are compared, never times of two ranks'
clocks. Times only separate calls that can't be one collective.

Calls that name no group are matched only if their ends agree. If ranks of a group were not
recorded, the shortest duration is the most that the transfer can take. See `Doubt`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.kernel_names import is_collective
from lightning_rlprof.analysis.device.timeline import DeviceTimeline, device_timeline
from lightning_rlprof.analysis.device.work import COMPUTE, NOT_RECORDED, optional_numbers
from lightning_rlprof.analysis.statistics.group_summary import mean, rows_by_group, summarize
from lightning_rlprof.analysis.steps.sync_points import uncertainty_ns
from lightning_rlprof.records.records import stated_world_size
from lightning_rlprof.tables.arrays import (
    UNKNOWN,
    Int64s,
    Mask,
    distinct_tuples,
    ended_together,
    group_sizes,
    group_starts,
    match_occurrences,
)
from lightning_rlprof.tables.intervals import covered_before, unions
from lightning_rlprof.tables.kernels import Coded, distinct
from lightning_rlprof.tables.spans import Spans, world_size
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_BY_NAME = "Taken from kernel names: process groups and bytes are unknown."

# A name that contains another one comes first.
_OPERATIONS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"),
    *("barrier", "send", "recv", "gather", "scatter", "reduce"),
)
_ALIASES = {"crossdevicereduce": "allreduce", "receive": "recv"}

PAIRWISE = frozenset({"send_recv", "send", "recv"})
"""Operations between two ranks."""
_COLUMNS = (
    *columns_of("text", "operation", "group", "stage"),
    Column("total", "duration", "ns"),
    *columns_of("count", "count", "matched"),
    *columns_of("duration", "transfer", "transfer at most", "transit", "wait", unit="ns"),
    *columns_of("duration", "overlapped", "exposed", unit="ns"),
    *columns_of("count", "last rank", "times last"),
    *columns_of("count", "bytes", "median bytes", unit="bytes"),
    *columns_of("number", "algbw", "busbw", unit="GB/s"),
    *columns_of("count", "group size", "ranks"),
    Column("doubt", "text"),
)
_EXPOSED = [column.name for column in _COLUMNS].index("exposed")
_FORMULA = (
    "transfer: shortest duration among the matched ranks. wait: the rest. Clock offsets don't "
    "affect either. last rank: the rank that arrived last most often (not proof that it is slow)."
)
_OVERLAP = "overlapped: compute of the same device ran too. exposed: the rest of the time."
_NO_COLLECTIVES = "This run has no collectives. Capture a step with a profiler."
_MEASURED = "transit: the transfer of a call as CANN measured it."
# Ends of one collective differ by less than this part of its time, or by the noise of clocks.
_END_PART, _END_NOISE_NS = 20, 5_000
_ONE_WAY = {"all_gather", "reduce_scatter", "all_to_all"}
_PLAIN = {"broadcast", "reduce", *PAIRWISE}


class Doubt(str, Enum):
    """Why the transfer and the wait of collectives are unknown, at most, or doubtful.

    Example::

        >>> Doubt("ranks-missing").text.partition(":")[0]
        'matched collectives lack ranks of their group'
    """

    text: str

    def __new__(cls, value: str, text: str) -> "Doubt":
        """Return a member that is its own code, with what follows a count of them."""
        member = str.__new__(cls, value)
        member._value_, member.text = value, text
        return member

    RANKS_MISSING = (
        "ranks-missing",
        "matched collectives lack ranks of their group: transfer is at most the shortest duration, "
        "as it may include waiting for them.",
    )
    NO_GROUP = (
        "no-group",
        "calls name no group, and their ends don't show which ranks met: their transfer and wait "
        "are unknown.",
    )
    NO_COUNTERPART = (
        "no-counterpart",
        "calls have no counterpart on other ranks: their transfer and wait are unknown.",
    )
    APART = (
        "apart",
        "matched collectives have equal numbers, but one rank ended before another began.",
    )


@dataclass(frozen=True, eq=False)
class Calls:
    """Collectives of all ranks as columns of one length.

    Attributes:
        rank: Rank of each call.
        device: Its device, or `NOT_RECORDED`.
        start_ns: When it started, on the run's timeline.
        end_ns: When it ended.
        step: RL step, 0 if unknown.
        number: The profiler's sequence number in the group, or `UNKNOWN`.
        bytes: Its size, or `UNKNOWN`.
        members: Number of ranks of its group, or `UNKNOWN`.
        stream: Stream of its device, or `NOT_RECORDED`.
        transit_ns: The transfer as the profiler's own analysis has it, or `UNKNOWN`.
        operation: `operation_of` names, or the profiler's name.
        group: Process group; `UNKNOWN` as its code without one.
        stage: RL stage, likewise.
        remark: What to know of the source, empty for the best one.
    """

    rank: Int64s
    device: Int64s
    start_ns: Int64s
    end_ns: Int64s
    step: Int64s
    number: Int64s
    bytes: Int64s
    members: Int64s
    stream: Int64s
    transit_ns: Int64s
    operation: Coded
    group: Coded
    stage: Coded
    remark: str = ""


@dataclass(frozen=True, eq=False)
class MatchedCollectives:
    """Matched collectives: calls by the collective that they are part of.

    Attributes:
        collective: Collective of each call, or `UNKNOWN`; shape (calls,).
        ranks: Ranks of each collective, at least two; shape (collectives,), like the rest.
        transfer_ns: The shortest of its durations.
        last: The call with that duration, `UNKNOWN` if several have it.
        apart: Whether a rank ended before another started, though their numbers are equal.
        unproven: Calls with counterparts that nothing proves; shape (calls,).
        lacking: Whether ranks of its group are missing, or may be.
    """

    collective: Int64s
    ranks: Int64s
    transfer_ns: Int64s
    last: Int64s
    apart: Mask
    unproven: Mask
    lacking: Mask

    def doubts(self, at: Int64s | slice = slice(None)) -> Iterator[tuple[Doubt, int, int]]:
        """Yield what is doubtful of some calls, how often, and of how many: the gravest first."""
        own = self.collective[at]
        met, unproven = np.unique(own[own != UNKNOWN]), self.unproven[at]
        alone = (own == UNKNOWN) & ~unproven
        for doubt, found in (
            (Doubt.RANKS_MISSING, self.lacking[met]),
            (Doubt.NO_GROUP, unproven),
            (Doubt.NO_COUNTERPART, alone),
            (Doubt.APART, self.apart[met]),
        ):
            if count := int(np.count_nonzero(found)):
                yield doubt, count, len(found)


def operation_of(name: str) -> str:
    """Return the collective of a kernel's or function's name; "other" for unknown ones.

    Example::

        >>> operation_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL"), operation_of("hcom_receive__1")
        ('all_reduce', 'recv')
    """
    plain = name.lower().replace("_", "")
    for alias, usual in _ALIASES.items():
        plain = plain.replace(alias, usual)
    return next((each for each in _OPERATIONS if each.replace("_", "") in plain), "other")


def read_calls(spans: Spans, remarks: list[str]) -> Calls | None:
    """Read the table ``collectives``, else kernels by their names; None if neither has any."""
    table = spans.try_table("collectives", remarks)
    if table is not None and len(table.rows):
        return _with_transit(_calls_of(table), spans.try_table("communication", []))
    table = spans.try_table("kernels", remarks)
    if table is None:
        return None
    codes, names = table.texts("kernel")
    keep = np.array([*map(is_collective, names), False])[codes]
    operation = distinct(codes[keep], [operation_of(name) for name in names])
    return _calls_of(table, operation, keep) if keep.any() else None


def _calls_of(
    table: Table, operation: Coded | None = None, keep: slice | Mask = slice(None)
) -> Calls:
    """Return the rows of a table ``collectives`` as calls, or kernels whose operation is given."""
    start, took = table.numbers("start")[keep], table.numbers("duration")[keep]
    stage, stages = table.texts("stage")
    unknown, listed = np.full(len(start), UNKNOWN), operation is None
    number, size, members = (
        table.numbers(name, UNKNOWN) if listed else unknown
        for name in ("number", "bytes", "group size")
    )
    return Calls(
        table.numbers("rank")[keep],
        optional_numbers(table, "device")[keep],
        start,
        start + took,
        optional_numbers(table, "step", 0)[keep],
        number,
        size,
        members,
        optional_numbers(table, "stream")[keep],
        unknown,
        table.texts("operation") if operation is None else operation,
        table.texts("group") if listed else (unknown, []),
        (stage[keep], stages),
        "" if listed else _BY_NAME,
    )


def _with_transit(calls: Calls, measured: Table | None) -> Calls:
    """Return calls with the transfer that CANN measured, if its table has one at their start.

    The two were rounded apart from each other, so starts can differ by a nanosecond.
    """
    if measured is None or not len(measured.rows):
        return calls
    names = ("rank", "start", "transfer")
    rank, start, transit = (measured.numbers(name, UNKNOWN) for name in names)
    every, own = np.append(calls.rank, rank), np.full(len(calls.rank), UNKNOWN)
    for off in (0, -1, 1):
        keys = np.stack([every, np.append(calls.start_ns + off, start)])
        place = distinct_tuples(keys)[1]
        found = np.full(int(place.max()) + 1, UNKNOWN)
        found[place[len(own) :]] = transit
        own = np.where(own == UNKNOWN, found[place[: len(own)]], own)
    return replace(calls, transit_ns=own)


def match_collectives(spans: Spans, calls: Calls) -> tuple[MatchedCollectives, Calls]:
    """Match calls, and return them with one stage per collective: perhaps only one rank has it.

    Sends and receives aren't matched: profilers don't record the other rank.
    """
    what = (calls.group[0] + 1) * (len(calls.operation[1]) + 1) + calls.operation[0] + 1
    between = np.array([operation_of(name) in PAIRWISE for name in calls.operation[1]], bool)
    alone = np.append(between, False)[calls.operation[0]]
    what = np.where(alone, int(what.max(initial=0)) + 1 + np.arange(len(what)), what)
    times = (calls.start_ns, calls.end_ns)
    whole = stated_world_size(spans.headers.values())
    named = (calls.group[0] != UNKNOWN) | (calls.members == whole)
    columns = (calls.rank, what, calls.number, calls.step, *times, named, calls.members)
    found = match_calls(*columns, uncertainty_ns(spans))
    members = np.full(len(found.ranks), UNKNOWN)
    at = np.flatnonzero(found.collective != UNKNOWN)
    np.maximum.at(members, found.collective[at], calls.members[at])
    others = len(np.unique(calls.rank)) < world_size(spans)
    few = np.where(members == UNKNOWN, others, found.ranks < members)
    found = replace(found, lacking=few)
    known = np.full(len(found.ranks), UNKNOWN)
    np.maximum.at(known, found.collective[at], calls.stage[0][at])
    stage = calls.stage[0].copy()
    stage[at] = known[found.collective[at]]
    return found, replace(calls, stage=(stage, calls.stage[1]))


def match_calls(
    rank: Int64s,
    what: Int64s,
    number: Int64s,
    step: Int64s,
    start_ns: Int64s,
    end_ns: Int64s,
    named: Mask,
    members: Int64s,
    unsure_ns: int | None,
) -> MatchedCollectives:
    """Match calls across ranks by equal numbers, or without numbers by their order in a step.

    See `match_occurrences`. Calls without numbers that lie apart in time are not matched, either.
    Nor are calls of more ranks than their group has, and those of no known group whose ends differ.
    Takes O(n log n) time.

    Args:
        rank: Rank of each call; shape (n,), as all others.
        what: Code of its group and operation.
        number: Its sequence number in the group, or `UNKNOWN`.
        step: RL step, any one value if unknown.
        start_ns: When the rank arrived.
        end_ns: When it continued.
        named: Whether its group is known: by name, or as all ranks of the job.
        members: Number of ranks of its group, or `UNKNOWN`.
        unsure_ns: Clock uncertainty, None if it is unknown.
    """
    known = number != UNKNOWN
    place = np.where(known, number, step)
    order, heads = match_occurrences((what, known, place), rank, start_ns)
    size = group_sizes(heads, len(order))
    apart = _apart(rank[order], start_ns[order], end_ns[order], heads, size)
    kept = known[order[heads]] | ~apart
    order, size, apart = order[np.repeat(kept, size)], size[kept], apart[kept]
    heads, unproven = np.cumsum(size) - size, np.zeros(len(rank), dtype=bool)
    proven = named[order[heads]]
    if not proven.all():
        columns = (what[order], rank[order], start_ns[order], end_ns[order])
        proven |= _proven(*columns, heads, size, unsure_ns)
    most = np.maximum.reduceat(members[order], heads)
    proven &= (most == UNKNOWN) | (size <= most)
    unproven[order[np.repeat(~proven, size)]] = True
    order, size, apart = order[np.repeat(proven, size)], size[proven], apart[proven]
    collective, last = np.full(len(rank), UNKNOWN), np.full(len(size), UNKNOWN)
    collective[order] = np.repeat(np.arange(len(size)), size)
    took = (end_ns - start_ns)[order]
    least = np.minimum.reduceat(took, np.cumsum(size) - size)
    shortest = order[took == np.repeat(least, size)]
    last[collective[shortest]] = shortest
    last[np.bincount(collective[shortest], minlength=len(size)) > 1] = UNKNOWN
    lacking = np.zeros(len(size), dtype=bool)
    return MatchedCollectives(collective, size, least, last, apart, unproven, lacking)


def _apart(rank: Int64s, came: Int64s, went: Int64s, heads: Int64s, size: Int64s) -> Mask:
    """Mark collectives that one rank left before another arrived, after correcting clock offsets.

    All ranks leave a collective at about the same time. So the median difference between the ends
    of two ranks, from three collectives on, is the offset of their clocks.
    """
    late = went - np.repeat(went[heads], size)
    pair = np.stack([np.repeat(rank[heads], size), rank])
    order = np.lexsort((late, *pair))
    first = group_starts(*pair[:, order])
    count = group_sizes(first, len(order))
    offset = np.where(count > 2, late[order][first + count // 2], 0)
    shift = np.empty_like(late)
    shift[order] = np.repeat(offset, count)
    latest = np.maximum.reduceat(came - shift, heads)
    return np.asarray(latest > np.minimum.reduceat(went - shift, heads))


def _proven(
    what: Int64s,
    rank: Int64s,
    came: Int64s,
    went: Int64s,
    heads: Int64s,
    size: Int64s,
    unsure_ns: int | None,
) -> Mask:
    """Mark collectives whose ends prove that their ranks met, as members of one end together.

    Ends agree if they differ by a twentieth of the time at most, clocks included. Between clocks
    that are too uncertain for that, `ended_together` shows it. Two ranks whose ends agree in half
    of the calls of a kind or less did not meet in them: some ends agree by chance.
    """
    starts, ends = (each - np.repeat(each[heads], size) for each in (came, went))
    least = np.repeat(np.minimum.reduceat(went - came, heads), size)
    limit = np.maximum(least // _END_PART, _END_NOISE_NS)
    agree = np.zeros(len(ends), dtype=bool)
    pair = (np.repeat(rank[heads], size), rank)
    for rows in rows_by_group(*pair):
        agree[rows] = ended_together(starts[rows], ends[rows])
    if unsure_ns is not None:
        agree &= abs(ends) <= limit + unsure_ns
        agree |= abs(ends) + unsure_ns <= limit
    for rows in rows_by_group(what, *pair):
        agree[rows] &= 2 * np.count_nonzero(agree[rows]) > len(rows)
    agree[heads] = True
    return np.logical_and.reduceat(agree, heads)


def transfer_times(
    rank: Int64s,
    step: Int64s,
    name: Int64s,
    start_ns: Int64s,
    end_ns: Int64s,
    unsure_ns: int | None = 0,
) -> Int64s:
    """Return the duration of the transfer at the end of each collective, or `UNKNOWN`.

    Calls of a name in a step are matched by `match_occurrences`; unmatched calls are `UNKNOWN`. So
    are calls that one rank left before another arrived, by more than ``unsure_ns``, the clock
    uncertainty; None doesn't check that. Columns have one row per call.

    Example::

        >>> rank, zeros, came, went = np.array([[0, 1], [0, 0], [0, 7], [10, 10]])
        >>> transfer_times(rank, zeros, zeros, came, went).tolist()
        [3, 3]
    """
    found = np.full(len(rank), UNKNOWN, dtype=np.int64)
    order, heads = match_occurrences((step, name), rank, start_ns)
    came, went = start_ns[order], end_ns[order]
    least = np.minimum.reduceat(went - came, heads)
    if unsure_ns is not None:
        early = np.maximum.reduceat(came, heads) - np.minimum.reduceat(went, heads)
        least[early > unsure_ns] = UNKNOWN
    found[order] = np.repeat(least, group_sizes(heads, len(order)))
    return found


def communication(spans: Spans) -> Table:
    """Match collectives across ranks; return transfer, wait, overlap and bandwidth per group.

    The n-th collective of a group and operation is the same on all its ranks: by the profiler's
    sequence number, else by order within a step. ``total`` is the time of all ``count`` calls,
    ``transfer`` the mean over ``matched`` collectives, ``wait`` the mean over their calls. Both are
    None if ranks of a group are missing; then ``transfer at most`` is the mean of the shortest
    durations. ``transit`` is the mean transfer of a call by CANN's own analysis. ``doubt`` is the
    gravest `Doubt` of the row.
    ``last rank`` is the rank that was most often the last arrival, ``times last`` how often; no
    rank if two share that. ``overlapped`` and ``exposed`` divide the time in which at least one
    call of the row ran, by whether its device computed; those of calls on no known device are None.
    Rows that ran at the same time count it each. ``median bytes`` is per call. ``algbw`` is bytes
    by transfer time, ``busbw`` that times `bus_factor`. Sends and receives have durations only, and
    so has what only one rank recorded.

    Abstains if no profiler recorded a collective.
    """
    return communication_of(spans, device_timeline(spans))


def communication_of(spans: Spans, timeline: DeviceTimeline) -> Table:
    """Return `communication` of a run whose device timeline is known already."""
    remarks: list[str] = []
    calls = read_calls(spans, remarks)
    if calls is None:
        reason = " ".join([_NO_COLLECTIVES, *remarks])
        return Table("communication", _COLUMNS, abstained=reason)
    found, calls = match_collectives(spans, calls)
    rows = _rows(calls, found, timeline)
    remarks += [calls.remark, *doubt_texts(found), _FORMULA]
    if (calls.transit_ns != UNKNOWN).any():
        remarks.append(_MEASURED)
    if any(row[_EXPOSED] is not None for row in rows):
        remarks += [_OVERLAP, *timeline.notes]
    return Table("communication", _COLUMNS, rows, " ".join(filter(None, remarks)))


def bus_factor(operation: str, ranks: int) -> float | None:
    """Return busbw divided by algbw, None if unknown.

    NCCL's factors: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

    Example::

        >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("barrier", 8)
        (1.75, 0.875, None)
    """
    if ranks < 2:
        return None
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in _ONE_WAY:
        return (ranks - 1) / ranks
    return 1.0 if operation in _PLAIN else None


class LongCall(NamedTuple):
    """One collective as its ranks saw it, or a call without a counterpart.

    Attributes:
        operation: As in `communication`, like ``group``.
        group: Its process group.
        bytes: Its size, if it was recorded.
        transfer_ns: Its transfer, the most that it can be if ``lacking``; None if unknown.
        transit_ns: The transfer as the profiler's own analysis has it, if it has.
        wait_ns: How long the rank waited that waited longest, at least so long if ``lacking``.
        lacking: Whether ranks of its group are missing, or may be.
        last_rank: The rank that arrived last, None if that is unknown.
        ranks: Each rank and how long it was in the call, the first to arrive first.
    """

    operation: str | None
    group: str | None
    bytes: int | None
    transfer_ns: int | None
    transit_ns: int | None
    wait_ns: int | None
    lacking: bool
    last_rank: int | None
    ranks: list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class CallTimes:
    """The calls of collectives, each divided into transfer and wait; the rest is unknown.

    If ranks of a group are missing, a transfer is the most that it can be, a wait the least.

    Attributes:
        keys: Operation, group and stage of each call, as in `communication`.
        rank: Rank of each call; shape (calls,), like all times.
        took_ns: Its duration.
        transfer_ns: The time until the data was through, from when the last rank arrived.
        wait_ns: The time before that.
        bytes: Its size, or `UNKNOWN`.
        transit_ns: The transfer as the profiler's own analysis has it, or `UNKNOWN`.
        matched: Which calls are one collective.
    """

    keys: list[tuple[str | None, ...]]
    rank: Int64s
    took_ns: Int64s
    transfer_ns: Int64s
    wait_ns: Int64s
    bytes: Int64s
    transit_ns: Int64s
    matched: MatchedCollectives

    def longest(self, top: int) -> list[LongCall]:
        """Return the collectives that a rank spent most time in, its calls together."""
        found = self.matched
        alone = len(found.ranks) + np.arange(len(self.rank))
        place = np.where(found.collective == UNKNOWN, alone, found.collective)
        longest = np.zeros(len(alone) + len(found.ranks), np.int64)
        np.maximum.at(longest, place, self.took_ns)
        order = np.argsort(-longest, kind="stable")[: min(top, len(np.unique(place)))]
        return [self._long_call(int(at), np.flatnonzero(place == at)) for at in order]

    def _long_call(self, at: int, rows: Int64s) -> LongCall:
        found, is_met = self.matched, at < len(self.matched.ranks)
        rows = rows[np.argsort(-self.took_ns[rows], kind="stable")]
        lacking = is_met and bool(found.lacking[at])
        last = int(found.last[at]) if is_met and not lacking else UNKNOWN
        size, transit = (int(each[rows].max()) for each in (self.bytes, self.transit_ns))
        operation, group, _ = self.keys[rows[0]]
        return LongCall(
            operation,
            group,
            None if size == UNKNOWN else size,
            int(self.transfer_ns[rows[0]]) if is_met else None,
            None if transit == UNKNOWN else transit,
            int(self.wait_ns[rows[0]]) if is_met else None,
            lacking,
            None if last == UNKNOWN else int(self.rank[last]),
            [*zip(self.rank[rows].tolist(), self.took_ns[rows].tolist(), strict=True)],
        )


def call_times(spans: Spans) -> CallTimes | None:
    """Divide each call of a collective; None if no profiler recorded any."""
    calls = read_calls(spans, [])
    if calls is None:
        return None
    found, calls = match_collectives(spans, calls)
    took, met = calls.end_ns - calls.start_ns, found.collective != UNKNOWN
    transfer = np.where(met, np.append(found.transfer_ns, 0)[found.collective], 0)
    columns = [
        [[*names, None][code] for code in codes.tolist()]
        for codes, names in (calls.operation, calls.group, calls.stage)
    ]
    keys = [*zip(*columns, strict=True)]
    wait = np.where(met, took - transfer, 0)
    return CallTimes(keys, calls.rank, took, transfer, wait, calls.bytes, calls.transit_ns, found)


def doubt_texts(found: MatchedCollectives) -> list[str]:
    """Return a sentence for each doubt of a run's collectives, with how many it concerns."""
    return [f"{count} of {whole} {doubt.text}" for doubt, count, whole in found.doubts()]


def _hidden(
    calls: Calls, key: Int64s, timeline: DeviceTimeline
) -> dict[int, tuple[int | None, int | None]]:
    """Return the overlapped and the exposed time of the calls by key, if their device is known."""
    sums = np.zeros((2, int(key.max(initial=-1)) + 1), np.int64)
    for lane in timeline.lanes:
        device = NOT_RECORDED if lane.device is None else lane.device
        here = (calls.rank == lane.rank) & (calls.device == device)
        zero = int(min(lane.start_ns, calls.start_ns[here].min(initial=lane.start_ns)))
        own = (calls.start_ns[here] - zero, calls.end_ns[here] - zero)
        owner, first, last = unions(key[here], *own)
        work = [each[lane.work.kind == COMPUTE] - zero for each in lane.work[:2]]
        _, begin, over = unions(np.zeros_like(work[0]), *work)
        computed = covered_before(begin, over, last) - covered_before(begin, over, first)
        for each, ns in zip(sums, (computed, last - first - computed), strict=True):
            np.add.at(each, owner, ns)
    known = np.flatnonzero(sums.any(axis=0))
    pairs = zip(*sums[:, known].tolist(), strict=True)
    return dict(zip(known.tolist(), pairs, strict=True))


def _rows(
    calls: Calls, found: MatchedCollectives, timeline: DeviceTimeline
) -> list[tuple[Cell, ...]]:
    """Sum the calls by operation, group and stage; those that take longest first."""
    columns = [calls.operation, calls.group, calls.stage]
    widths = [len(names) + 1 for _, names in columns]
    every = np.ravel_multi_index([codes + 1 for codes, _ in columns], widths)
    hidden = _hidden(calls, every, timeline)
    rows: list[tuple[Cell, ...]] = []
    for at in rows_by_group(every):
        key = [names[codes[at[0]]] if codes[at[0]] >= 0 else None for codes, names in columns]
        overlap = hidden.get(int(every[at[0]]), (None, None))
        rows.append((*key, *_figures(calls, found, at, operation_of(key[0] or ""), overlap)))
    return sorted(rows, key=lambda row: -row[3])  # type: ignore[operator]


def _figures(
    calls: Calls,
    found: MatchedCollectives,
    at: Int64s,
    operation: str,
    overlap: tuple[int | None, int | None],
) -> Iterator[Cell]:
    """Yield the cells of a row behind its names; ``at`` are its calls."""
    collective = found.collective[at]
    met, own = np.unique(collective[collective != UNKNOWN], return_inverse=True)
    shared = at[collective != UNKNOWN]
    took, transfer = calls.end_ns - calls.start_ns, found.transfer_ns[met]
    waited = int((took[shared] - transfer[own]).sum())
    sure = len(met) > 0 and not found.lacking[met].any()
    shortest = mean(int(transfer.sum()), len(met)) if len(met) else None
    transit = calls.transit_ns[at][calls.transit_ns[at] != UNKNOWN]
    yield from (int(took[at].sum()), len(at), len(met))
    yield from (shortest, None) if sure else (None, shortest)
    yield mean(int(transit.sum()), len(transit)) if len(transit) else None
    yield mean(waited, len(shared)) if sure else None
    yield from overlap
    last = found.last[met] if sure else np.empty(0, np.int64)
    ranks, times = np.unique(calls.rank[last[last != UNKNOWN]], return_counts=True)
    most = int(times.max(initial=0))
    often = ranks[times == most]
    yield from (int(often[0]) if len(often) == 1 else None, most if sure else None)
    sizes = calls.bytes[at][calls.bytes[at] != UNKNOWN]
    yield int(sizes.sum()) if len(sizes) else None
    yield int(summarize(sizes * 0, sizes).p50[0]) if len(sizes) else None
    payload = np.full(len(met), UNKNOWN)
    np.maximum.at(payload, own, calls.bytes[shared])
    known = (payload > 0) & (transfer > 0) & sure
    speed = int(payload[known].sum()) / int(transfer[known].sum()) if known.any() else None
    members = int(calls.members[at].max())
    factor = bus_factor(operation, max(members, 0))
    yield speed  # Bytes per ns are GB/s.
    yield speed * factor if speed is not None and factor is not None else None
    yield from (None if members == UNKNOWN else members, len(np.unique(calls.rank[at])))
    yield next((doubt.value for doubt, _, _ in found.doubts(at)), None)
