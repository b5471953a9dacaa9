"""Rows of any number in order, in bounded memory: sorted parts aside, merged a block at a time."""

import bisect
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.chrome_scratch import Grown, Scratch
from lightning_rlprof.spans import Int64s

__all__ = ["ROWS", "Columns", "beside", "heads", "in_order"]

ROWS = 1 << 14
"""Rows of a block; twenty arrays of that length are 2.6 MB."""

Columns = Mapping[str, npt.NDArray[Any]]
"""Some rows of a table: arrays of one length, by name."""

_STEP = 1 << 10  # rows from one sample of a part's keys to the next
_Keys = tuple[int, int]


class _Part:
    """One sorted part: its rows lie in a scratch file, samples of its first keys here."""

    def __init__(
        self, rows: Columns, keys: Sequence[str], limits: Sequence[str], scratch: Scratch
    ) -> None:
        rows = _sorted(rows, keys)
        self._grown = Grown({name: column.dtype.type for name, column in rows.items()}, scratch)
        self._grown.add(rows)
        self._limits = limits
        picked = (rows[key][::_STEP].tolist() for key in limits)
        self.samples: list[_Keys] = list(zip(*picked, strict=True))
        self._last = tuple(int(rows[key][-1]) for key in limits)
        self._grown.put_aside()

    def __len__(self) -> int:
        return len(self._grown)

    def before(self, limit: _Keys) -> int:
        """Return the number of rows whose first keys come before some keys."""
        if not self.samples[0] < limit <= self._last:  # so for most: parts follow in time
            return len(self) if limit > self._last else 0
        low = max(bisect.bisect_left(self.samples, limit) - 1, 0) * _STEP
        high = min(low + _STEP + 1, len(self))
        first, second = (self._grown.part(name, low, high) for name in self._limits)
        start, end = (np.searchsorted(first, limit[0], side) for side in ("left", "right"))
        return low + int(start + np.searchsorted(second[start:end], limit[1]))

    def rows(self, low: int, high: int) -> Columns:
        return self._grown.rows(low, high)


def in_order(
    parts: Iterable[Columns], *keys: str, whole: int = 2, rows: int = ROWS
) -> Iterator[Columns]:
    """Yield all rows by some of their columns, a block at a time.

    Rows that are alike in all keys stay in the order of the parts. Takes memory for a block and a
    part, and a sample of two keys for each thousand rows.

    Args:
        parts: Columns of the same names and types; each part is in memory by itself.
        keys: Columns of integers, the one that decides first.
        whole: Rows that are alike in that many of the first keys, 1 or 2, are in one block, however
            many they are.
        rows: About how many rows a block has.

    Example::

        >>> parts = [{"a": np.array([3, 1])}, {"a": np.array([2])}]
        >>> [block["a"].tolist() for block in in_order(parts, "a")]
        [[1, 2, 3]]
    """
    scratch, limits = Scratch(), (keys[0], keys[:whole][-1])
    done = [_Part(part, keys, limits, scratch) for part in parts if len(part[keys[0]])]
    low = [0] * len(done)
    for cut in [*_cuts(done, rows), None]:
        high = [len(part) if cut is None else part.before(cut) for part in done]
        if low != high:
            yield _merged(zip(done, low, high, strict=True), keys)
        low = high


def _cuts(parts: Sequence[_Part], rows: int) -> Iterable[_Keys]:
    """Return keys between which there are about as many rows of all parts together."""
    samples = heapq.merge(*(part.samples for part in parts))
    every = max(rows // _STEP, 1)
    return dict.fromkeys(each for at, each in enumerate(samples) if at and at % every == 0)


def _merged(ends: Iterable[tuple[_Part, int, int]], keys: Sequence[str]) -> Columns:
    """Return the rows of some parts, from one number to another, in order."""
    pieces = [part.rows(low, high) for part, low, high in ends if low < high]
    block = {name: np.concatenate([each[name] for each in pieces]) for name in pieces[0]}
    return _sorted(block, keys)


def _sorted(rows: Columns, keys: Sequence[str]) -> Columns:
    order = np.lexsort([rows[key] for key in reversed(keys)])
    if (order[1:] > order[:-1]).all():  # most are, as events are written in time
        return rows
    return {name: column[order] for name, column in rows.items()}


def heads(*columns: npt.NDArray[Any]) -> Int64s:
    """Return where one of some sorted columns changes, its first row among these."""
    changes = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(np.append(True, changes))


def beside(
    own: Grown, others: Iterator[Columns], otherwise: Mapping[str, int], rows: int = ROWS
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield rows, some at a time, with columns of others beside them.

    Args:
        own: The rows.
        others: Columns, and ``row``: which row they stand beside, from 0, in that order.
        otherwise: The columns of the others, and what stands in them beside all other rows.
        rows: How many rows at a time.
    """
    waiting: list[Columns] = []
    low = 0
    for part in own.parts(rows):
        high = low + len(next(iter(part.values())))
        while (not waiting or waiting[-1]["row"][-1] < high) and (more := next(others, None)):
            waiting.append(more)
        for name, nothing in otherwise.items():
            part[name] = np.full(high - low, nothing)
        left: list[Columns] = []
        for each in waiting:
            cut = np.searchsorted(each["row"], high)
            for name in otherwise:
                part[name][each["row"][:cut] - low] = each[name][:cut]
            if cut < len(each["row"]):
                left.append({name: column[cut:] for name, column in each.items()})
        waiting, low = left, high
        yield part
