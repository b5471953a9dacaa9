"""What the length of a step hangs on inside of a rank: the host, launches, kernels, copies."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from lightning_rlprof.analysis.device.launch_queue import UNKNOWN, Queue, queues
from lightning_rlprof.analysis.device.wait_chain import GAP, HOST, LATENCY_NS, LAUNCH, Walk, Way
from lightning_rlprof.analysis.stages.partition import paint, sum_cells
from lightning_rlprof.analysis.step_selection import captures
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.tables.arrays import Int64s, differs
from lightning_rlprof.tables.intervals import edges
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_COLUMNS = (
    Column("part", "text"),
    Column("name", "text"),
    Column("stage", "text"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("on path", "share"),
    Column("count", "count"),
)
_LONG = GAP - 1
_PARTS = {HOST: "host", LAUNCH: "launch latency", GAP: "kernel gap", _LONG: "unattributed delay"}
_OTHERS = "others"
_NO_WORK = "no device tool recorded kernels"
_NO_STEP = "no step that was watched launched work of a device"
_NO_CALLS = "for what the host waited is not known: its calls were not recorded"

_AT_ONCE = 1 << 15  # calls
_Coded = tuple[Int64s, Int64s, Int64s]
_Key = tuple[str, str | None, str | None]


def device_critical_path(
    spans: Spans, *, top: int | None = 20, ranks: Collection[int] | None = None
) -> Table:
    """Tell what the length of the steps hung on: host, launches, kernels, copies; sums exactly.

    The way back from the end of each step: device work waited for its launch, for what ran before
    it on its stream, or on another one; the host waited, in a call that waits for the device, for
    what ended last in it. See `Walk`. ``share`` is of all ways: from where a step begins, or the
    way before ended if that is later, to where its host ends and all that it launched. ``on path``
    is which part of that work's time lies on the way: making it faster helps little at 0.1.

    Args:
        spans: The run.
        top: So many rows, the rest as one; None for all.
        ranks: Only these; None for all.

    Raises:
        RlprofError: ``top`` is below 1.
    """
    if top is not None and top < 1:
        raise RlprofError(f"top={top}: device_path shows 1 or more rows, or all of them (None)")
    remarks: list[str] = []
    totals, ways, silent = _all_ways(spans, ranks, remarks)
    if not totals:
        of = "" if ranks is None else f" of ranks {sorted(ranks)}"
        why = _NO_CALLS if silent else _NO_STEP if ways else _NO_WORK + of
        return Table("device_critical_path", _COLUMNS, abstained="; ".join([why, *remarks]))
    remarks = [_summary(ways, totals), *remarks]
    remarks += [f"Of {silent} ranks no calls were recorded: they are left out."] if silent else []
    return Table("device_critical_path", _COLUMNS, _rows(totals, top), " ".join(remarks))


def _all_ways(
    spans: Spans, ranks: Collection[int] | None, remarks: list[str]
) -> tuple[dict[_Key, list[int]], list[set[int]], int]:
    """Return time on the ways, by rank the steps that have one, and how many ranks told no calls.

    A rank without steps has the step -1.
    """
    totals: dict[_Key, list[int]] = {}
    ways: list[set[int]] = []
    silent = 0
    for rank, queue in queues(spans, ranks, remarks):
        if queue is None:
            silent += 1
            continue
        found = [*_stretches(spans, rank, queue)]
        if found:
            _add(totals, spans, rank, queue, [stretch for stretch, _ in found])
        ways.append({step for _, step in found})
    return totals, ways, silent


def _summary(ways: Sequence[set[int]], totals: Mapping[_Key, Sequence[int]]) -> str:
    """Say how much of all ways each part is, and how many there are."""
    ways = [each for each in ways if each]
    count = sum(map(len, ways))
    steps = f"{count} steps" if count > 1 else "1 step"
    steps = steps if all(min(each) >= 0 for each in ways) else "what was recorded"
    parts: Counter[str] = Counter()
    for (part, _, _), (total, _, _) in totals.items():
        parts[part] += total
    shares = [f"{part} {total / parts.total():.1%}" for part, total in parts.most_common()]
    shares = [share for share in shares if not share.endswith(" 0.0%")]
    of = f" on {len(ways)} ranks" if len(ways) > 1 else ""
    return f"Of the way through {steps}{of}: {', '.join(shares)}."


def _hosts(spans: Spans, rank: int, queue: Queue) -> Iterator[tuple[int, int, int]]:
    """Yield from when to when the host was in a step that somebody watched, or a part, and which.

    -1 is all that was recorded, where there are no steps.
    """
    rows, begun = spans.rows(kind="step", rank=rank), queue.launch
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    if not len(rows):
        own = spans.rows(rank=rank)
        start = np.append(begun, spans.start_ns[own]).min()[None]
        end = np.append(queue.end, spans.end_ns[own]).max()[None]
        rows = np.array([-1])
    header, known = spans.headers.get(rank), captures(spans, rank, queue.start)
    if known is None and header is not None and header.config:  # a tool beside spans of our own
        known = begun.min()[None], queue.end.max()[None]
    if known is None:
        known = start[:1], end.max()[None]
    for low, high in zip(*(each.tolist() for each in known), strict=True):
        for at in np.flatnonzero((start < high) & (end > low)).tolist():
            yield max(low, int(start[at])), min(high, int(end[at])), int(rows[at])


def _stretches(spans: Spans, rank: int, queue: Queue) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Yield where the way through each step begins and ends, what ends there, and the step.

    A step ends when its host does and all that it launched; the next begins no earlier.
    """
    order, over = np.argsort(queue.launch, kind="stable"), None
    launches = queue.launch[order]
    for start, end, step in _hosts(spans, rank, queue):
        own = order[slice(*np.searchsorted(launches, [start, end]).tolist())]
        if len(own):
            last = int(own[np.argmax(queue.end[own])])
            high = int(queue.end[last])
            low = start if over is None else max(start, over)
            over = max(high, end, low)
            if low < over:
                yield (low, over, last if high == over else HOST), step


def _add(
    totals: dict[_Key, list[int]],
    spans: Spans,
    rank: int,
    queue: Queue,
    stretches: Sequence[tuple[int, int, int]],
) -> None:
    """Add time on the way, count, and time at all of each part, name and stage."""
    way = Walk(*queue[:4], queue.waits, UNKNOWN).ways(stretches)
    _add_work(totals, queue, way, stretches)
    _add_delays(totals, queue, way)
    rows = way.what == HOST
    for call, stage, *told in _by_call(spans, rank, queue, way.start[rows], way.end[rows]):
        key = (_PARTS[HOST], _text(queue.called, call), _text(spans.names, stage))
        _count(totals, key, told)


def _add_work(
    totals: dict[_Key, list[int]],
    queue: Queue,
    way: Way,
    stretches: Sequence[tuple[int, int, int]],
) -> None:
    device = way.what >= 0
    work, length = way.what[device], (way.end - way.start)[device]
    low, high = (np.array([each[at] for each in stretches], np.int64) for at in range(2))
    there = _inside(low, high, queue.end) - _inside(low, high, queue.start)
    sizes = len(queue.names), len(queue.stages)
    whole = sum_cells(queue.name, queue.stage, there, *sizes)
    columns = (whole.step, whole.name, whole.ns)
    at_all = {
        (name, stage): ns
        for name, stage, ns in zip(*(each.tolist() for each in columns), strict=True)
    }
    for name, stage, *told in _pairs(queue.name[work], queue.stage[work], length, *sizes):
        key = (*queue.names[name], _text(queue.stages, stage))
        _count(totals, key, [*told, at_all[name, stage]])


def _add_delays(totals: dict[_Key, list[int]], queue: Queue, way: Way) -> None:
    length, delayed = way.end - way.start, (way.what == LAUNCH) | (way.what == GAP)
    kind = np.where(delayed & (length > LATENCY_NS), _LONG, way.what)
    for what in (LAUNCH, GAP, _LONG):
        rows = kind == what
        after = queue.stage[way.of[rows]]
        for _, stage, *told in _pairs(after * 0, after, length[rows], 1, len(queue.stages)):
            _count(totals, (_PARTS[what], None, _text(queue.stages, stage)), told)


def _pairs(
    first: Int64s, second: Int64s, length: Int64s, firsts: int, seconds: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield each pair of codes, of which there are so many, its time and count; no time is 0."""
    sizes = (firsts, seconds)
    total, count = (
        sum_cells(first, second, each, *sizes) for each in (length, np.ones_like(length))
    )
    columns = (total.step, total.name, total.ns, count.ns)
    yield from zip(*(column.tolist() for column in columns), strict=True)


def _count(totals: dict[_Key, list[int]], key: _Key, numbers: Sequence[int] | Int64s) -> None:
    found = totals.setdefault(key, [0, 0, 0])
    for at, number in enumerate(numbers):
        found[at] += int(number)


def _text(texts: Sequence[str], code: int) -> str | None:
    return texts[code] if code >= 0 else None


def _inside(low: Int64s, high: Int64s, times: Int64s) -> Int64s:
    """Return how much of some intervals that follow one another lies before each time."""
    before = np.append(0, np.cumsum(high - low))
    at = np.searchsorted(low, times, "right") - 1
    return np.where(at >= 0, before[at] + np.minimum(times, high[at]) - low[at], 0)


def _by_call(
    spans: Spans, rank: int, queue: Queue, start: Int64s, end: Int64s
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the innermost call and stage in disjoint intervals, its time, and in how many pieces.

    -1 stands for none; a pair may come more than once. Some calls at a time: in the processor's
    cache they take half as long.
    """
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    rows = spans.rows(kind="stage", rank=rank)
    stages = _by_start(spans.start_ns[rows], spans.end_ns[rows], spans.name[rows])
    calls = _by_start(*queue.calls)
    parts = np.searchsorted(calls[0], start) // _AT_ONCE
    sizes = len(queue.called) + 1, len(spans.names)
    for part in np.split(np.arange(len(start)), np.flatnonzero(np.diff(parts)) + 1):
        own = start[part], end[part]
        call, stage, length = _innermost(own, _around(calls, *own), _around(stages, *own))
        for each, at, ns, count in _pairs(call, stage, length, *sizes):
            yield each - 1, at, ns, count


def _by_start(start: Int64s, end: Int64s, code: Int64s) -> _Coded:
    """Return intervals by start, those of one start by end downwards."""
    later, together = np.diff(start), np.diff(end) <= 0
    if ((later > 0) | ((later == 0) & together)).all():
        return start, end, code
    order = np.lexsort((-end, start))
    return start[order], end[order], code[order]


def _around(layer: _Coded, start: Int64s, end: Int64s) -> _Coded:
    """Return what of a layer may share time with some intervals that follow one another."""
    high = int(np.searchsorted(layer[0], end[-1])) if len(end) else 0
    rows = np.flatnonzero(layer[1][:high] > start[:1])
    return layer[0][rows], layer[1][rows], layer[2][rows]


def _innermost(
    own: tuple[Int64s, Int64s], calls: _Coded, stages: _Coded
) -> tuple[Int64s, Int64s, Int64s]:
    """Return call (0 for none), stage (-1) and length of each piece of some intervals.

    On an axis of theirs alone, on which what lies between them takes no time.
    """
    layers = [[_inside(*own, times) for times in layer[:2]] for layer in (calls, stages)]
    whole = _inside(*own, own[1][-1:])
    times = edges(whole - whole, whole, *(np.sort(each) for layer in layers for each in layer))
    call, stage = (
        np.append(code, -1)[
            paint(np.searchsorted(times, first), np.searchsorted(times, last), len(times) - 1)
        ]
        for (first, last), code in zip(layers, (calls[2], stages[2]), strict=True)
    )
    heads = np.flatnonzero(differs(call, stage))
    return call[heads] + 1, stage[heads], np.add.reduceat(np.diff(times), heads)


def _rows(totals: dict[_Key, list[int]], top: int | None) -> list[tuple[Cell, ...]]:
    whole = sum(total for total, _, _ in totals.values())
    ordered = sorted(totals.items(), key=lambda item: (-item[1][0], str(item[0])))
    rows: list[tuple[Cell, ...]] = [
        (*key, total / whole, total, total / at_all if at_all >= total else None, count)
        for key, (total, count, at_all) in ordered[:top]
    ]
    if rest := ordered[len(rows) :]:
        total, count = (sum(each[at] for _, each in rest) for at in range(2))
        rows.append((None, _OTHERS, None, total / whole, total, None, count))
    return rows
