"""The lines of code at which samples of the training thread's stack were taken."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.records.hang_reports import STACK
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import innermost
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table

_AROUND = (KINDS.index("stage"), KINDS.index("region"))
_FEWEST = 3  # samples, below which a line is not named

_COLUMNS = (
    Column("rank", "count"),
    Column("share", "share"),
    Column("samples", "count"),
    Column("in", "text"),
    Column("line", "text"),
)


class StackLine(NamedTuple):
    """A line at which samples were taken.

    Attributes:
        inside: The innermost stage or region; ``""`` outside of all.
        place: Function, file and line.
        samples: How many.
        of: How many were taken in all.
    """

    inside: str
    place: str
    samples: int
    of: int

    def __str__(self) -> str:
        where = f"in {self.inside}" if self.inside else "outside of stages"
        count = f"{self.samples} of {self.of} samples"
        return f"{self.samples / self.of:.0%} {where}: {self.place} ({count})"


def stack_lines(
    samples: Sequence[tuple[int, str]], spans: Sequence[tuple[str, int, int]]
) -> list[StackLine]:
    """Count samples by line and by the innermost span around them; the most frequent one first.

    Args:
        samples: Time and place of each, all of one thread.
        spans: Name, start and end of the stages and regions of that thread.

    Example::

        >>> fetch, train = "Data.decode train.py:27", "main train.py:40"
        >>> spans = [("data_fetch", 10, 40)]
        >>> str(stack_lines([(11, fetch), (50, train), (12, fetch), (13, fetch)], spans)[0])
        '75% in data_fetch: Data.decode train.py:27 (3 of 4 samples)'
    """
    around = innermost(
        np.zeros(len(spans), dtype=np.int64),
        np.array([start for _, start, _ in spans], dtype=np.int64),
        np.array([end for _, _, end in spans], dtype=np.int64),
        np.zeros(len(samples), dtype=np.int64),
        np.array([at for at, _ in samples], dtype=np.int64),
    )
    return _counted(around, [name for name, _, _ in spans], [place for _, place in samples])


def _counted(around: Int64s, names: Sequence[str], places: Sequence[str]) -> list[StackLine]:
    """Count places by the span around each, a row of ``names`` or below 0."""
    inside = [names[at] if at >= 0 else "" for at in around.tolist()]
    counts = Counter(zip(inside, places, strict=True))
    every = counts.total()
    return [StackLine(*key, number, every) for key, number in counts.most_common()]


def stack_table(lines: Iterable[tuple[int, StackLine]]) -> Table:
    """Return a row per line, of which the rank is given."""
    rows = [
        (rank, each.samples / each.of, each.samples, each.inside or None, each.place)
        for rank, each in lines
    ]
    return Table("stacks", _COLUMNS, rows)


def line_in_steps(spans: Spans, first: int, last: int) -> StackLine | None:
    """Return the most frequent line in a range of steps, None below 3 samples."""
    wanted = [code for code, name in enumerate(spans.names) if name.startswith(STACK)]
    marks = spans.rows(kind="mark") if wanted else np.zeros(0, dtype=np.int64)
    step = spans.step[marks]
    marks = marks[np.isin(spans.name[marks], wanted) & (first <= step) & (step <= last)]
    if len(marks) < _FEWEST:
        return None
    rows = np.flatnonzero(
        np.isin(spans.kind, _AROUND) & np.isin(spans.thread, np.unique(spans.thread[marks]))
    )
    around = innermost(
        spans.thread[rows],
        spans.start_ns[rows],
        spans.end_ns[rows],
        spans.thread[marks],
        spans.start_ns[marks],
    )
    names = [spans.names[code] for code in spans.name[rows].tolist()]
    places = [spans.names[code].removeprefix(STACK) for code in spans.name[marks].tolist()]
    return _counted(around, names, places)[0]
