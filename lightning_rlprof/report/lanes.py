"""Spans of one thread dealt out to lanes in which they nest as they were opened."""

import numpy as np

from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import NO_PARENT, Int64s, Spans

__all__ = ["lanes"]

_MARK = KINDS.index("mark")
_LOOSE = tuple(KINDS.index(kind) for kind in ("epoch", "step", "region"))


class _Lane:
    """What is drawn in one lane, and the ends, ids and looseness of the spans still open there."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.open: list[tuple[int, int, bool]] = []

    def takes(self, start: int, end: int, parent: int, loose: bool) -> bool:
        """Tell whether a span nests here, in time and in who opened it."""
        while self.open and self.open[-1][0] <= start:
            self.open.pop()
        if not self.open:
            return True
        if self.open[-1][0] < end:
            return False
        for _, around, passes in reversed(self.open):
            if around == parent or not passes:
                return loose or around == parent
        return loose or parent == NO_PARENT


def lanes(spans: Spans, rows: Int64s) -> list[list[int]]:
    """Return the rows of one thread by lane, each in drawing order; the fewest lanes come first.

    A span is drawn on top of its parent only. A task that overlaps its sibling gets another lane,
    even where it happens to lie within it. Spans recorded with known ends (steps, epochs, regions
    without a parent) know no family and nest by time alone.
    """
    order = rows[np.lexsort((spans.id[rows], -spans.end_ns[rows], spans.start_ns[rows]))]
    known = np.isin(spans.parent[order], spans.id[rows])
    parents = np.where(known, spans.parent[order], NO_PARENT)
    loose = np.isin(spans.kind[order], _LOOSE) & (parents == NO_PARENT)
    columns = (spans.start_ns, spans.end_ns, spans.id, spans.kind)
    values = (column[order].tolist() for column in columns)
    found = [_Lane()]
    for row, free, parent, start, end, span_id, kind in zip(
        order.tolist(), loose.tolist(), parents.tolist(), *values, strict=True
    ):
        if kind == _MARK:  # an instant covers nothing
            found[0].rows.append(row)
            continue
        lane = _choose(found, start, end, parent, free)
        lane.rows.append(row)
        lane.open.append((end, span_id, free))
    return [lane.rows for lane in found if lane.rows]


def _choose(found: list[_Lane], start: int, end: int, parent: int, loose: bool) -> _Lane:
    """Return the first lane on top of the parent, else the first empty one, else a new one."""
    empty = None
    for lane in found:
        if lane.takes(start, end, parent, loose):
            if lane.open:
                return lane
            empty = empty or lane
    if empty is None:
        found.append(empty := _Lane())
    return empty
