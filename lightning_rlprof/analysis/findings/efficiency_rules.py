"""The rule on communication: small messages that use little of what the same group can move.

The rule on training that reaches little of what its devices can compute.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_rlprof.analysis.collectives import communication
from lightning_rlprof.analysis.device.timeline import DeviceRuns
from lightning_rlprof.analysis.device.utilization import overlapped
from lightning_rlprof.analysis.efficiency.peak_flops import kind_of, peak_of
from lightning_rlprof.analysis.findings.finding import (
    HIGH,
    MEDIUM,
    Claim,
    Place,
    Undecided,
    bounds,
    place_at,
    place_of,
    quoted,
    spans_query,
)
from lightning_rlprof.analysis.step_selection import states
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.interval_nesting import NONE, enclosing
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

REACHED = 0.2
"""MFU of training below which is a finding; what dense models reach is 0.35 to 0.5."""

SPEED_RULES_FEWEST = 5
"""Steps below which nothing is said."""

_SHOWN = 3
_SPEED_RULES_SUBJECT = "MFU of training"


def speed_claims(spans: Spans) -> Iterator[Claim | Undecided]:
    """Yield the MFU of training where that is low; nothing where FLOPs or hardware are not told.

    The price is what reaching `REACHED` would save. Only spans that counted ``flops`` themselves,
    in complete steps and in stages whose name means training: a decoding engine is bound by memory,
    and its MFU is low when all is well. Any above 100 % makes the rule abstain.
    """
    rows, done = _counted(spans)
    peak = _peaks(spans, rows)
    rows, done, peak = rows[peak > 0], done[peak > 0], peak[peak > 0]
    if not len(rows):
        return
    took = spans.duration_ns[rows].astype(np.float64)
    numbers, place = np.unique(spans.step[rows], return_inverse=True)
    used, could = _sums(place, done / 1_000), _sums(place, took * peak)
    if len(numbers) < SPEED_RULES_FEWEST:
        yield Undecided(_SPEED_RULES_SUBJECT, f"of {len(numbers)} steps that counted flops")
        return
    if (done / 1_000 > took * peak).any():
        yield Undecided(
            _SPEED_RULES_SUBJECT, "as some of it is above 100 %: see the integrity sheet"
        )
        return
    low, high = bounds(used, could)
    if low > REACHED:
        return
    if high >= REACHED:
        yield Undecided(_SPEED_RULES_SUBJECT, f"{low:.0%} to {high:.0%} where {REACHED:.0%} counts")
        return
    order = np.argsort(done / (took * peak))
    reached = (low, float(used.sum() / could.sum()), high)
    yield _speed_rules_claim(spans, rows[order], float(took.sum()), reached)


def _counted(spans: Spans) -> tuple[Int64s, Float64s]:
    """Return the spans of training in complete steps that counted flops, and how many."""
    rows, values = spans.amounts("flops")
    trains = np.array([kind_of(name) == "training" for name in spans.names], dtype=bool)
    keep = trains[spans.name[rows]] & (values > 0) & (spans.duration_ns[rows] > 0)
    steps = spans.rows(kind="step")
    whole = np.unique(spans.step[steps[states(spans, steps) == 0]])
    keep &= np.isin(spans.step[rows], whole)
    rows, values = rows[keep], values[keep]
    thread, start, end = spans.thread[rows], spans.start_ns[rows], spans.end_ns[rows]
    order = np.lexsort((spans.id[rows], -end, start, thread))
    once = order[enclosing(thread[order], start[order], end[order]) == NONE]  # nested: counted once
    return rows[once], values[once]


def _peaks(spans: Spans, rows: Int64s) -> Float64s:
    """Return the peak of the device of each span in TFLOP/s, 0 where it is not known."""
    known = {rank: peak_of(head.hardware) or 0.0 for rank, head in spans.headers.items()}
    return np.array([known.get(rank, 0.0) for rank in spans.rank[rows].tolist()])


def _sums(place: Int64s, values: Float64s) -> Float64s:
    return np.bincount(place, values).astype(np.float64)


def _speed_rules_claim(
    spans: Spans, rows: Int64s, took: float, mfu: tuple[float, float, float]
) -> Claim:
    """Return the claim; the lowest MFU comes first in ``rows``."""
    low, middle, high = mfu
    effect, least, most = (int(took * (1 - share / REACHED)) for share in (middle, high, low))
    names = sorted({spans.names[code] for code in spans.name[rows].tolist()})
    return Claim(
        f"training reaches {middle:.0%} of what its devices compute: {', '.join(names)}",
        *(effect, least, most),
        HIGH if high < REACHED / 2 else MEDIUM,
        "rlprof show RUN breakdown and idle say whether the devices wait or compute slowly; then "
        "a larger micro-batch, packed sequences, BF16",
        "the flops that were counted leave out a part of the work, or the work is not in BF16",
        f"MFU {low:.1%} to {high:.1%} by counted flops; lowest spans (rank/id): "
        + ", ".join(f"{spans.rank[row]}/{spans.id[row]}" for row in rows[:_SHOWN].tolist())
        + f"; the price is what {REACHED:.0%} would save",
        spans_query(spans, rows[:_SHOWN].tolist()),
        place_of(spans, rows),
        "rlprof show RUN throughput",
    )


COUNTS = 0.05
"""Share of the devices' observed time from which on exposed small messages are a finding."""

LARGER, FASTER = 8, 4
"""Messages are small where others of the group are so many times as large, and as fast."""

SMALL = 2**20
"""Bytes from which on a message is not small, whatever it is compared with."""

FEWEST = 20
"""Meetings below which nothing is said of a collective."""

_SUBJECT = "small messages"
_MATCHED = 0.9  # of the calls: of fewer, wait and transfer are not told apart

_KEYS = ("operation", "group", "stage")

_Row = dict[str, Any]


def transfer_claims(spans: Spans, devices: DeviceRuns, seen_ns: int) -> Iterator[Claim | Undecided]:
    """Yield what small messages cost; nothing where no collective tells its group and size.

    Args:
        spans: The run.
        devices: What its devices ran.
        seen_ns: How long somebody looked at its devices.
    """
    if "collectives" not in spans.tables:
        return
    met = [row for row in _rows(communication(spans)) if row["median bytes"]]
    if not met or not seen_ns:
        return
    exposed: dict[tuple[Any, Any], list[int]] = defaultdict(lambda: [0, 0])
    for row in _rows(overlapped(spans, devices)):
        sums = exposed[row["operation"], row["group"]]
        sums[0], sums[1] = sums[0] + row["exposed"], sums[1] + row["communication"]
    for row in met:
        found = _of_row(spans, row, met, exposed[row["operation"], row["group"]], COUNTS * seen_ns)
        if found is not None:
            yield found


def _rows(table: Table) -> list[_Row]:
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def _of_row(
    spans: Spans, row: _Row, met: list[_Row], exposed: list[int], least: float
) -> Claim | Undecided | None:
    """Return what one operation of a group in one stage costs, if that can be ``least``."""
    what = f"{row['operation']} of group {row['group']} in {row['stage'] or 'no stage'}"
    if row["total"] < least or row["group size"] == 1 or row["median bytes"] >= SMALL:
        return None
    if row["transfer"] is None or row["matched"] * row["ranks"] < _MATCHED * row["count"]:
        return Undecided(_SUBJECT, f"as wait and transfer of {what} are not told apart")
    if row["matched"] < FEWEST:
        return Undecided(_SUBJECT, f"of {row['matched']} matched {what}")
    larger = [each for each in met if _compares(each, row)]
    if not larger:
        return Undecided(_SUBJECT, f"as nothing {LARGER}x as large compares with {what}")
    best = max(larger, key=lambda each: float(each["algbw"]))
    ratio = float(best["algbw"]) / float(row["algbw"])
    low, effect, high = _priced(row, *exposed)
    if ratio < FASTER or high < least:
        return None
    if low < least:
        return Undecided(_SUBJECT, f"as {what} may wait for peers while nothing computes")
    return _claim(spans, row, (effect, low, high), f"{what}: 1/{ratio:.0f} of the bandwidth")


def _compares(other: _Row, row: _Row) -> bool:
    """Tell whether another collective shows what the same ranks can move."""
    same = other["group"] == row["group"] and other["algbw"] is not None
    enough = row["algbw"] is not None and other["matched"] >= FEWEST
    return bool(same and enough and other["median bytes"] >= LARGER * row["median bytes"])


def _priced(row: _Row, exposed: int, every: int) -> tuple[int, int, int]:
    """Return the exposed transfer of a row: at least, likely, and at most.

    What is exposed is known for the operation and group in all stages, and holds waiting, too.
    """
    total, transfer = int(row["total"]), min(int(row["transfer"] * row["count"]), int(row["total"]))
    low = max(0, exposed - (every - total) - (total - transfer))
    high = min(transfer, exposed)
    likely = round(transfer * exposed / every) if every else 0
    return low, min(high, max(low, likely)), high


def _claim(spans: Spans, row: _Row, price: tuple[int, int, int], what: str) -> Claim:
    where = [
        f'"{name}" is null' if row[name] is None else f'"{name}" = {quoted(row[name])}'
        for name in _KEYS
    ]
    return Claim(
        f"small messages, exposed: {what} of the group's larger ones",
        *price,
        MEDIUM,
        "larger buckets, or several tensors in one call",
        "one call of the same bytes in all takes as long",
        f"{row['matched']:,} collectives on {row['ranks']} ranks, "
        f"typically {row['median bytes']:,} bytes at {row['algbw']:.3g} GB/s",
        f"select * from collectives where {' and '.join(where)} order by rank, start_ns",
        _first(spans, row),
        "rlprof show RUN communication",
    )


def _first(spans: Spans, row: _Row) -> Place | None:
    """Return where the first of its calls is."""
    table = spans.try_table("collectives", [])
    if table is None:
        return None
    keep = np.ones(len(table.rows), bool)
    for name in _KEYS:
        code, names = table.texts(name)
        keep &= code == (-1 if row[name] is None else names.index(row[name]))
    rank, start, took = (table.numbers(name)[keep] for name in ("rank", "start", "duration"))
    if not len(rank):
        return None
    at = int(np.argmin(start))
    return place_at(spans, int(rank[at]), int(start[at]), int(start[at] + took[at]))
