"""What the timeline of the HTML report shows: as many whole steps as a bounded file can hold.

Under a rank whose step was captured is what its devices did, in columns of time.
"""

import json
import math
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.breakdown import COMPUTE_CLASSES, IDLE, WORK, DeviceParts
from lightning_rlprof.analysis.steps.sync_points import uncertainty_ns
from lightning_rlprof.records.records import KINDS, SHADOW, bin_in_name
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans

# Bytes of JSON for all steps. A browser reads that in some 20 ms, and the file can be mailed.
_BYTES = 600_000
# Longest spans of one step; a screen cannot show more, and drawing would pause.
_SPANS_PER_STEP = 6_000

# Columns of time of the devices of one step, and of one device.
_DEVICE_COLUMNS, _COLUMNS_OF_DEVICE = 4_096, 240

DEVICE_WORK = dict(zip(WORK, (*COMPUTE_CLASSES, "communication", "copy"), strict=True))
"""The class of each part of a device's time in which something ran."""

# Recorders flag spans that differ from the rest of a run with these counters.
_DOUBTS = ("capture", "interrupted", SHADOW)
_STEP, _EPOCH, _STAGE = (KINDS.index(kind) for kind in ("step", "epoch", "stage"))


class _Step(NamedTuple):
    """One RL step over all ranks; ``first`` and ``last`` bound its rows in the sorted order."""

    number: int
    rows: Int64s
    start_ns: int
    end_ns: int
    duration_ns: int  # Duration on the slowest rank.


def timeline(spans: Spans) -> dict[str, Any]:
    """Return the chosen steps with their spans in lanes, as plain data for JSON.

    The slowest, median, first, last and fastest step come first, then steps spread evenly over the
    run until `_BYTES` are used; ``total`` tells how many there were to choose from.

    Example::

        >>> from pathlib import Path
        >>> none = np.empty(0, dtype=np.int64)
        >>> empty = Spans(Path("run"), (), (), *[none] * 9)
        >>> timeline(empty)["steps"]
        []
    """
    steps = _steps(spans)
    single = sorted(name for name in spans.counters if bin_in_name(name) is None)
    counters = {name: at for at, name in enumerate(single)}
    return {
        "steps": _choose(spans, steps, counters),
        "work": [*DEVICE_WORK.items()],
        "total": sum(step.number > 0 for step in steps),
        "ranks": len(spans.ranks),
        "aligned": _aligned(spans, steps),
        "names": list(spans.names),
        "kinds": list(KINDS),
        "counters": [*counters],
    }


def _choose(spans: Spans, steps: list[_Step], counters: dict[str, int]) -> list[dict[str, Any]]:
    """Return as many steps as `_BYTES` hold, one at least, by number."""
    labels = _labels(steps)
    doubts = [(set(spans.step[spans.flagged(name)].tolist()), name) for name in _DOUBTS]
    chosen: list[dict[str, Any]] = []
    used, devices = 0, DeviceParts(spans)
    for at in _order(len(steps), labels):
        drawn = _draw(spans, steps[at], counters)
        drawn["devices"] = _devices(devices, drawn["bounds"], steps[at].start_ns)
        used += len(json.dumps(drawn, separators=(",", ":")))
        if chosen and used > _BYTES:
            break
        doubtful = [name for numbers, name in doubts if steps[at].number in numbers]
        chosen.append({**drawn, "labels": labels.get(at, []) + doubtful})
    return sorted(chosen, key=lambda step: int(step["number"]))


def _steps(spans: Spans) -> list[_Step]:
    """Return every step that has spans, by number; 0 stands for what is outside steps."""
    rows = np.flatnonzero(spans.kind != _EPOCH)
    if not len(rows):
        return []
    rows = rows[np.argsort(spans.step[rows], kind="stable")]
    numbers, firsts = np.unique(spans.step[rows], return_index=True)
    starts = np.minimum.reduceat(spans.start_ns[rows], firsts).tolist()
    ends = np.maximum.reduceat(spans.end_ns[rows], firsts).tolist()
    lengths = np.where(spans.kind[rows] == _STEP, spans.took_ns(rows), 0)
    longest = np.maximum.reduceat(lengths, firsts).tolist()
    parts = np.split(rows, firsts[1:])
    return [
        _Step(number, part, start, end, length or end - start)
        for number, part, start, end, length in zip(
            numbers.tolist(), parts, starts, ends, longest, strict=True
        )
    ]


def _aligned(spans: Spans, steps: list[_Step]) -> str:
    """Return why ranks should be drawn from their step's start: ``hosts``, ``drift`` or nothing."""
    if uncertainty_ns(spans) is None:
        return "hosts"
    spreads = [
        (step.end_ns - step.start_ns) / max(1, step.duration_ns) for step in steps if step.number
    ]
    return "drift" if spreads and median(spreads) > 1.5 else ""


def _labels(steps: list[_Step]) -> dict[int, list[str]]:
    """Return what is remarkable about a step, by position, the most telling first."""
    inside = [at for at, step in enumerate(steps) if step.number > 0]
    if not inside:
        return {}
    ranked = sorted(inside, key=lambda at: steps[at].duration_ns)
    labels: dict[int, list[str]] = {}
    for at, label in (
        (ranked[-1], "slowest"),
        (ranked[(len(ranked) - 1) // 2], "median"),
        (inside[0], "first"),
        (inside[-1], "last"),
        (ranked[0], "fastest"),
    ):
        labels.setdefault(at, []).append(label)
    return labels


def _order(count: int, first: dict[int, list[str]]) -> Iterable[int]:
    """Return every position once: the labelled, 0, then halves, quarters, eighths … of the run."""
    found, stride = dict.fromkeys(first), 1 << count.bit_length()
    while stride:
        found |= dict.fromkeys(range(0, count, stride))
        stride //= 2
    return found


def _draw(spans: Spans, step: _Step, counters: dict[str, int]) -> dict[str, Any]:
    kinds = spans.kind[step.rows]
    bounds = step.rows[kinds == _STEP]
    rows = step.rows[kinds != _STEP]
    longest = np.argsort(-spans.took_ns(rows), kind="stable")
    rows, cut = rows[longest[:_SPANS_PER_STEP]], rows[longest[_SPANS_PER_STEP:]]
    # Regions get their id when they end, so at one start the longer span is the outer one.
    order = (spans.id[rows], -spans.end_ns[rows], spans.start_ns[rows], spans.rank[rows])
    rows = rows[np.lexsort(order)]
    trains = set(spans.thread[bounds].tolist())
    lanes, items = _lanes(spans, rows, step.start_ns, counters, trains)
    return {
        "number": step.number,
        "start_ns": step.start_ns,
        "duration_ns": step.duration_ns,
        "left_out": len(cut),
        # If a stage is cut, time outside stages is unknown.
        "hatched": not np.any(spans.kind[cut] == _STAGE),
        "bounds": [
            [int(spans.rank[row]), int(spans.start_ns[row]) - step.start_ns,
             int(spans.end_ns[row]) - step.start_ns]
            for row in bounds
        ],
        "lanes": lanes,
        "spans": items,
    }  # fmt: skip


def _devices(devices: DeviceParts, bounds: list[list[int]], zero_ns: int) -> list[list[Any]]:
    """Return what each device did between the bounds of a step on its rank, if it was recorded.

    That is rank, device, start, length, number of columns, and by column the time of each part of
    `WORK`, then idle time. Of a part that the device did not do there is an empty list.
    """
    count = max(1, devices.count({rank for rank, _, _ in bounds}))
    columns = min(_COLUMNS_OF_DEVICE, max(1, _DEVICE_COLUMNS // count))
    found: list[list[Any]] = []
    for rank, start, end in bounds:
        for own in devices.columns(rank, start + zero_ns, end + zero_ns, columns):
            idle = own.ns[:, len(WORK) : len(WORK) + len(IDLE)].sum(axis=1)
            parts = np.vstack([own.ns[:, : len(WORK)].T, idle])
            times = [each.tolist() if each.any() else [] for each in parts]
            found.append([rank, own.device, start, end - start, len(own.ns), times])
    return found


def _lanes(
    spans: Spans, rows: Int64s, zero_ns: int, counters: dict[str, int], trains: set[int]
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return the lanes (rank, thread, height), one per thread, and the spans with their place.

    The thread that trains has the first lane of its rank, also where nothing is in it. A span sits
    below the one that it was opened in; asyncio tasks that overlap on a thread get rows of their
    own, so that no bar hides another.
    """
    ends: dict[int, list[int]] = {thread: [] for thread in trains}  # End of the last span per row.
    places: dict[tuple[int, int], tuple[int, int]] = {}  # This maps (rank, id) to (thread, row).
    items: list[list[Any]] = []
    for row in rows.tolist():
        rank, thread = int(spans.rank[row]), int(spans.thread[row])
        start, end = int(spans.start_ns[row]), int(spans.end_ns[row])
        over = places.get((rank, int(spans.parent[row])))
        lowest = over[1] + 1 if over and over[0] == thread else 0
        at = _free(ends.setdefault(thread, []), lowest, start, end)
        places[rank, int(spans.id[row])] = thread, at
        name, kind = int(spans.name[row]), int(spans.kind[row])
        numbers = _numbers(spans, row, counters)
        items.append([name, kind, thread, at, start - zero_ns, end - start, *numbers])
    threads = sorted(ends, key=lambda t: (spans.threads[t].rank, t not in trains, t))
    for item in items:
        item[2] = threads.index(item[2])
    about = [(spans.threads[thread], len(ends[thread]) or 1) for thread in threads]
    return [[thread.rank, thread.name, height] for thread, height in about], items


def _free(ends: list[int], lowest: int, start: int, end: int) -> int:
    """Return the first row, from ``lowest`` on, that is free at ``start``; it is then taken."""
    at = next((at for at in range(lowest, len(ends)) if ends[at] <= start), max(lowest, len(ends)))
    ends.extend([start] * (at + 1 - len(ends)))
    ends[at] = end
    return at


def _numbers(spans: Spans, row: int, counters: dict[str, int]) -> list[Any]:
    """Return one list of counter, value, counter, value … or nothing; NaN becomes text."""
    found: list[Any] = []
    for name, value in (spans.counters_of(row) or {}).items():
        plain = isinstance(value, int) or math.isfinite(value)  # Integers may exceed a float.
        if name in counters:  # Bins of histograms are left out.
            found += [counters[name], value if plain else str(value)]
    return [found] if found else []
