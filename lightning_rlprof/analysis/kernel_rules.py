"""The rule on kernels: one that takes much of all their time."""

from collections.abc import Iterator

import numpy as np

from lightning_rlprof.analysis.cells import numbers, read, texts
from lightning_rlprof.analysis.claims import (
    HIGH,
    MEDIUM,
    Claim,
    Undecided,
    bounds,
    place_at,
    quoted,
)
from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.labels import Label, kernel_labels
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Table

__all__ = ["COUNTS", "DOMINATES", "FEWEST", "kernel_claims"]

DOMINATES = 0.4
"""Share of the kernels' time from which on a single name is a finding."""

COUNTS = 0.05
"""Share of the time seen below which it is not worth a word: the devices do next to nothing."""

FEWEST = 200
"""Kernels below which nothing is said."""

_PIECES = 20  # stretches with as many kernels each, of which the bootstrap draws
_LONGEST = 80  # letters of a name that a claim shows
_SUBJECT = "one kernel above all"


def kernel_claims(spans: Spans, seen_ns: int) -> Iterator[Claim | Undecided]:
    """Yield the kernel of compute that takes most, where that is much; nothing without kernels.

    Args:
        spans: The run.
        seen_ns: How long somebody looked at its devices.
    """
    table = read(spans, "kernels", [])
    if table is None or not len(table.rows):
        return
    code, names = texts(table, "kernel")
    if len(code) < FEWEST:
        yield Undecided(_SUBJECT, f"of {len(code)} kernels")
        return
    computes = np.append(kernel_labels(names), Label.OTHER)[code] == Label.COMPUTE
    if not computes.any():
        return
    duration = numbers(table, "duration")
    top = int(np.argmax(np.bincount(code[computes], duration[computes], len(names))))
    mine = np.flatnonzero(code == top)
    own, whole = _by_piece(numbers(table, "start"), duration, mine)
    low, high = bounds(own, whole)
    if high < DOMINATES or own.sum() < COUNTS * seen_ns:
        return
    if low > DOMINATES:
        yield _claim(spans, table, mine, (low, high))
        return
    why = f"{low:.0%} to {high:.0%} of the kernels' time where {DOMINATES:.0%} counts"
    yield Undecided(_SUBJECT, why)


def _claim(spans: Spans, table: Table, mine: Int64s, share: tuple[float, float]) -> Claim:
    """Return the claim on the kernels of one name."""
    code, names = texts(table, "kernel")
    rank, start, duration = (numbers(table, name) for name in ("rank", "start", "duration"))
    name, effect, whole = names[code[mine[0]]], int(duration[mine].sum()), int(duration.sum())
    longest = int(mine[np.argmax(duration[mine])])
    place = (int(rank[longest]), int(start[longest]), int(start[longest] + duration[longest]))
    low, high = share
    return Claim(
        f"one kernel takes {effect / whole:.0%} of the kernels' time: {_short(name)}",
        *(effect, int(low * whole), int(high * whole)),
        HIGH if low > (1 + DOMINATES) / 2 else MEDIUM,
        "Nsight Compute on its longest launch; a matrix product: its dtype, and sizes in multiples "
        "of 64; else fuse it with its neighbours",
        "it is at a limit of the device already, of FLOP/s or of memory bandwidth",
        f"{len(mine):,} of {len(code):,} kernels",
        f"select * from kernels where kernel = {quoted(name)} order by duration_ns desc",
        place_at(spans, *place),
        "rlprof show RUN kernels",
    )


def _short(name: str) -> str:
    """Return a name without what templates add beyond a line."""
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"


def _by_piece(start: Int64s, duration: Int64s, mine: Int64s) -> tuple[Floats, Floats]:
    """Return the time of some kernels, and of all, in stretches with as many kernels each."""
    piece = np.empty(len(start), np.int64)
    piece[np.argsort(start, kind="stable")] = np.arange(len(start)) * _PIECES // len(start)
    own: Floats = np.bincount(piece[mine], duration[mine], _PIECES).astype(np.float64)
    whole: Floats = np.bincount(piece, duration, _PIECES).astype(np.float64)
    return own, whole
