"""The rule on communication: small messages that use little of what the same group can move."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_rlprof.analysis.cells import numbers, read, texts
from lightning_rlprof.analysis.claims import MEDIUM, Claim, Place, Undecided, place_at, quoted
from lightning_rlprof.analysis.communication import communication
from lightning_rlprof.analysis.device_runs import DeviceRuns
from lightning_rlprof.analysis.overlap import overlapped
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Table

__all__ = ["COUNTS", "FASTER", "FEWEST", "LARGER", "SMALL", "transfer_claims"]

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
    met = [row for row in _rows(communication(spans)) if row["typical"]]
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
    if row["total"] < least or row["group size"] == 1 or row["typical"] >= SMALL:
        return None
    if row["transfer"] is None or row["meetings"] * row["ranks"] < _MATCHED * row["count"]:
        return Undecided(_SUBJECT, f"as wait and transfer of {what} are not told apart")
    if row["meetings"] < FEWEST:
        return Undecided(_SUBJECT, f"of {row['meetings']} meetings of {what}")
    larger = [each for each in met if _compares(each, row)]
    if not larger:
        return Undecided(_SUBJECT, f"as nothing {LARGER}x as large compares with {what}")
    best = max(larger, key=lambda each: float(each["algorithm GB/s"]))
    ratio = float(best["algorithm GB/s"]) / float(row["algorithm GB/s"])
    low, effect, high = _priced(row, *exposed)
    if ratio < FASTER or high < least:
        return None
    if low < least:
        return Undecided(_SUBJECT, f"as {what} may wait for peers while nothing computes")
    return _claim(spans, row, (effect, low, high), f"{what}: 1/{ratio:.0f} of the bandwidth")


def _compares(other: _Row, row: _Row) -> bool:
    """Tell whether another collective shows what the same ranks can move."""
    same = other["group"] == row["group"] and other["algorithm GB/s"] is not None
    enough = row["algorithm GB/s"] is not None and other["meetings"] >= FEWEST
    return bool(same and enough and other["typical"] >= LARGER * row["typical"])


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
        f"{row['meetings']:,} meetings of {row['ranks']} ranks, typically {row['typical']:,} bytes "
        f"at {row['algorithm GB/s']:.3g} GB/s",
        f"select * from collectives where {' and '.join(where)} order by rank, start_ns",
        _first(spans, row),
        "rlprof show RUN communication",
    )


def _first(spans: Spans, row: _Row) -> Place | None:
    """Return where the first of its calls is."""
    table = read(spans, "collectives", [])
    if table is None:
        return None
    keep = np.ones(len(table.rows), bool)
    for name in _KEYS:
        code, names = texts(table, name)
        keep &= code == (-1 if row[name] is None else names.index(row[name]))
    rank, start, took = (numbers(table, name)[keep] for name in ("rank", "start", "duration"))
    if not len(rank):
        return None
    at = int(np.argmin(start))
    return place_at(spans, int(rank[at]), int(start[at]), int(start[at] + took[at]))
