"""What the length of a step hangs on inside of a rank: the host, launches, kernels, copies."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device_queue import UNKNOWN, Queue, queues
from lightning_rlprof.analysis.device_walk import GAP, HOST, LATENCY_NS, LAUNCH, Walk
from lightning_rlprof.analysis.partition import paint
from lightning_rlprof.analysis.sweep import edges
from lightning_rlprof.analysis.windows import captures
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["device_path"]

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
_PARTS = {HOST: "host", LAUNCH: "launch latency", GAP: "between two", _LONG: "unknown"}
_OTHERS = "others"
_NO_WORK = "no device tool recorded kernels"
_NO_CALLS = "for what the host waited is not known: its calls were not recorded"

_Key = tuple[str, str | None, str | None]


class _Way(NamedTuple):
    """Pieces of the ways through all steps of a rank; see `Piece`. ``next`` is what follows."""

    start: Int64s
    end: Int64s
    what: Int64s
    next: Int64s


def device_path(
    spans: Spans, *, top: int | None = 20, ranks: Collection[int] | None = None
) -> Table:
    """Tell what the length of the steps hung on: host, launches, kernels, copies; sums exactly.

    The way back from the end of each step: device work waited for its launch, for what ran before
    it on its stream, or on another one; the host waited, in a call that waits for the device, for
    what ended last in it. See `Walk`. ``share`` is of all ways, whose lengths add up to the time
    from the first step's beginning to the end of what the last one launched. ``on path`` is which
    part of that work's time lies on the way: 0.1 says that making it faster helps little.

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
    totals: dict[_Key, list[int]] = {}
    silent, ways = 0, []
    for rank, queue in queues(spans, ranks, remarks):
        stretches = [] if queue is None else [*_stretches(spans, rank, queue)]
        silent += queue is None
        if queue is not None and stretches:
            _add(totals, spans, rank, queue, stretches)
            ways.append(len(stretches))
    if not totals:
        why = _NO_CALLS if silent else _NO_WORK
        return Table("device_path", _COLUMNS, abstained="; ".join([why, *remarks]))
    remarks = [_summary(spans, ways, totals), *remarks]
    remarks += [f"Of {silent} ranks no calls were recorded: they are left out."] if silent else []
    return Table("device_path", _COLUMNS, _rows(totals, top), " ".join(remarks))


def _summary(spans: Spans, ways: Sequence[int], totals: Mapping[_Key, Sequence[int]]) -> str:
    """Say how much of all ways each part is, and how many there are."""
    steps = f"{sum(ways)} steps" if sum(ways) > 1 else "1 step"
    steps = steps if len(spans.rows(kind="step")) else "what was recorded"
    parts: Counter[str] = Counter()
    for (part, _, _), (total, _, _) in totals.items():
        parts[part] += total
    shares = [f"{part} {total / parts.total():.1%}" for part, total in parts.most_common()]
    shares = [share for share in shares if not share.endswith(" 0.0%")]
    of = f" on {len(ways)} ranks" if len(ways) > 1 else ""
    return f"Of the way through {steps}{of}: {', '.join(shares)}."


def _hosts(spans: Spans, rank: int, queue: Queue) -> Iterator[tuple[int, int]]:
    """Yield from when to when the host was in a step that somebody watched, all of it or a part."""
    rows, begun = spans.rows(kind="step", rank=rank), queue.launch
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    if not len(rows):
        own = spans.rows(rank=rank)
        start = np.array([min(int(begun.min()), *spans.start_ns[own].tolist())])
        end = np.array([max(int(queue.end.max()), *spans.end_ns[own].tolist())])
    header, known = spans.headers.get(rank), captures(spans, rank, queue.start)
    if known is None and header is not None and header.config:  # a tool beside spans of our own
        known = begun.min()[None], queue.end.max()[None]
    if known is None:
        known = start[:1], end.max()[None]
    for low, high in zip(*(each.tolist() for each in known), strict=True):
        for at in np.flatnonzero((start < high) & (end > low)).tolist():
            yield max(low, int(start[at])), min(high, int(end[at]))


def _stretches(spans: Spans, rank: int, queue: Queue) -> Iterator[tuple[int, int, int]]:
    """Yield where the way through each step begins and ends, and what ends there.

    A step ends when its host does and all that it launched; the next begins no earlier.
    """
    order, over = np.argsort(queue.launch, kind="stable"), None
    for start, end in _hosts(spans, rank, queue):
        own = order[slice(*np.searchsorted(queue.launch[order], [start, end]).tolist())]
        if len(own):
            last = int(own[np.argmax(queue.end[own])])
            high = int(queue.end[last])
            low = start if over is None else max(start, over)
            over = max(high, end)
            if low < over:
                yield low, over, last if high >= end else HOST


def _way(queue: Queue, stretches: Sequence[tuple[int, int, int]]) -> _Way:
    walk = Walk(*queue[:4], queue.waits, UNKNOWN)
    rows: list[tuple[int, int, int, int]] = []
    for stretch in stretches:
        after = HOST
        for piece in walk.back(*stretch):
            rows.append((*piece, after))
            after = piece.what
    return _Way(*np.array(rows, np.int64).reshape(-1, 4).T)


def _add(
    totals: dict[_Key, list[int]],
    spans: Spans,
    rank: int,
    queue: Queue,
    stretches: Sequence[tuple[int, int, int]],
) -> None:
    """Add time on the way, count, and time at all of each part, name and stage."""
    way = _way(queue, stretches)
    _add_work(totals, queue, way, stretches)
    _add_delays(totals, queue, way)
    rows = way.what == HOST
    for call, stage, *told in _by_call(spans, rank, queue, way.start[rows], way.end[rows]):
        key = (_PARTS[HOST], _text(queue.called, call), _text(spans.names, stage))
        _count(totals, key, told)


def _add_work(
    totals: dict[_Key, list[int]],
    queue: Queue,
    way: _Way,
    stretches: Sequence[tuple[int, int, int]],
) -> None:
    device = way.what >= 0
    work, length = way.what[device], (way.end - way.start)[device]
    width = len(queue.stages) + 1
    keys = queue.name * width + queue.stage + 1
    whole = _inside(stretches, queue.end) - _inside(stretches, queue.start)
    on_way = np.zeros((3, len(queue.names) * width), np.int64)
    np.add.at(on_way[0], keys[work], length)
    np.add.at(on_way[1], keys[work], 1)
    np.add.at(on_way[2], keys, whole)
    for at in np.flatnonzero(on_way[1]).tolist():
        name, stage = divmod(at, width)
        _count(totals, (*queue.names[name], _text(queue.stages, stage - 1)), on_way[:, at])


def _add_delays(totals: dict[_Key, list[int]], queue: Queue, way: _Way) -> None:
    length, delayed = way.end - way.start, (way.what == LAUNCH) | (way.what == GAP)
    kind = np.where(delayed & (length > LATENCY_NS), _LONG, way.what)
    for what in (LAUNCH, GAP, _LONG):
        rows = kind == what
        after = queue.stage[way.next[rows]]
        for stage in np.unique(after).tolist():
            own = length[rows][after == stage]
            _count(totals, (_PARTS[what], None, _text(queue.stages, stage)), [own.sum(), len(own)])


def _count(totals: dict[_Key, list[int]], key: _Key, numbers: Sequence[int] | Int64s) -> None:
    found = totals.setdefault(key, [0, 0, 0])
    for at, number in enumerate(numbers):
        found[at] += int(number)


def _text(texts: Sequence[str], code: int) -> str | None:
    return texts[code] if code >= 0 else None


def _inside(stretches: Sequence[tuple[int, int, int]], times: Int64s) -> Int64s:
    """Return how much of the stretches lies before each time."""
    low, high = (np.array([each[at] for each in stretches], np.int64) for at in range(2))
    before = np.append(0, np.cumsum(high - low))
    at = np.searchsorted(low, times, "right") - 1
    return np.where(at >= 0, before[at] + np.minimum(times, high[at]) - low[at], 0)


def _by_call(
    spans: Spans, rank: int, queue: Queue, start: Int64s, end: Int64s
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the innermost call and stage in disjoint intervals, its time, and in how many.

    -1 stands for none.
    """
    rows = spans.rows(kind="stage", rank=rank)
    layers = ((start, end), queue.calls[:2], (spans.start_ns[rows], spans.end_ns[rows]))
    times = edges(*(np.sort(each) for layer in layers for each in layer))
    inside, call, stage = (_innermost(times, *layer) for layer in layers)
    cells = np.flatnonzero(inside >= 0)
    call = np.append(queue.calls[2], -1)[call[cells]]
    stage = np.append(spans.name[rows], -1)[stage[cells]]
    keys, key = np.unique(np.stack([call, stage]), axis=1, return_inverse=True)
    total = np.zeros(keys.shape[1], np.int64)
    np.add.at(total, key.ravel(), np.diff(times)[cells])
    pairs = np.unique(np.stack([key.ravel(), inside[cells]]), axis=1)[0]
    yield from zip(*keys.tolist(), total.tolist(), np.bincount(pairs).tolist(), strict=True)


def _innermost(times: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return which interval is the last to begin in each cell between two times, -1 for none."""
    order = np.lexsort((-end, start))
    first, last = (np.searchsorted(times, each[order]) for each in (start, end))
    return np.append(order, -1)[paint(first, last, max(len(times) - 1, 0))]


def _rows(totals: dict[_Key, list[int]], top: int | None) -> list[tuple[Cell, ...]]:
    whole = sum(total for total, _, _ in totals.values())
    ordered = sorted(totals.items(), key=lambda item: (-item[1][0], str(item[0])))
    rows: list[tuple[Cell, ...]] = [
        (*key, total / whole, total, total / at_all if at_all else None, count)
        for key, (total, count, at_all) in ordered[:top]
    ]
    if rest := ordered[len(rows) :]:
        total, count = (sum(each[at] for _, each in rest) for at in range(2))
        rows.append((None, _OTHERS, None, total / whole, total, None, count))
    return rows
