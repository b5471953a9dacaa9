"""Sort and store columns that may be larger than memory, in an unnamed temporary file.

`Grown` collects columns part by part; `in_order` sorts them externally, block by block.
"""

import bisect
import heapq
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from typing import Any

import numpy as np
import numpy.typing as npt

HELD = 1 << 22
"""Bytes of columns that stay in memory, of all columns of a trace together."""

ROWS = 1 << 14
"""Rows of a block; twenty arrays of that length are 2.6 MB."""

_OWN = HELD // 4
Columns = Mapping[str, npt.NDArray[Any]]
"""Some rows of a table: arrays of one length, by name."""

_STEP = 1 << 10  # Rows from one sample of a part's keys to the next.
_Keys = tuple[int, int]


class Scratch:
    """Put bytes aside in a file that goes with its last user, where TMPDIR has room for it."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._end = 0
        self._full = False

    def put(self, array: npt.NDArray[Any]) -> int:
        """Return where in the file an array lies now, -1 where it cannot be written."""
        if self._full:
            return -1
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            self._file.seek(self._end)
            self._full = self._file.write(array.view(np.uint8).data) < array.nbytes
        except OSError:
            self._full = True
        if self._full:  # Earlier rows can still be read; later rows stay in memory.
            return -1
        at, self._end = self._end, self._end + array.nbytes
        return at

    def read(self, into: npt.NDArray[Any], at: int) -> None:
        """Fill an array, not empty, with what lies there."""
        assert self._file is not None
        self._file.seek(at)
        self._file.readinto(into.data)


class Grown:
    """Columns of one kind of event that grow together, part by part.

    Args:
        types: Type of the numbers of each column; also an attribute.
        scratch: Where `put_aside` writes. Without one they have one of their own, and are put aside
            as soon as they take some megabytes.
    """

    def __init__(
        self, types: Mapping[str, type[np.generic]], scratch: Scratch | None = None
    ) -> None:
        self.types, self._scratch = types, scratch or Scratch()
        self._held, self._most = 0, _OWN if scratch is None else None
        self._parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in types}
        # Every column has numbers of rows and their places in the file; these rows precede the
        # parts.
        self._aside: dict[str, list[tuple[int, int]]] = {name: [] for name in types}

    def __len__(self) -> int:
        """Return the number of rows."""
        name = next(iter(self.types))
        return sum(map(len, self._parts[name])) + sum(rows for rows, _ in self._aside[name])

    def add(self, columns: Mapping[str, npt.NDArray[Any]]) -> int:
        """Add rows, given as all columns; returns how many bytes of memory they take."""
        for name, part in columns.items():
            self._parts[name].append(np.asarray(part, self.types[name]))
        added = sum(parts[-1].nbytes for parts in self._parts.values())
        self._held += added
        if self._most is not None and self._held > self._most:
            self.put_aside()
        return added

    def put_aside(self) -> None:
        """Write what is in memory to the file, where that is possible."""
        self._held = 0
        for name, parts in self._parts.items():
            joined = np.concatenate(parts) if parts else np.empty(0)
            if len(joined) and (at := self._scratch.put(joined)) >= 0:
                self._aside[name].append((len(joined), at))
                self._parts[name] = []

    def part(self, name: str, low: int, high: int) -> npt.NDArray[Any]:
        """Return some rows of one column, in memory of their own."""
        column = np.empty(high - low, self.types[name])
        first = 0
        for rows, at in self._aside[name]:
            start, end = max(low, first), min(high, first + rows)
            if start < end:
                place = at + (start - first) * column.itemsize
                self._scratch.read(column[start - low : end - low], place)
            first += rows
        for part in self._parts[name]:
            start, end = max(low, first), min(high, first + len(part))
            if start < end:
                column[start - low : end - low] = part[start - first : end - first]
            first += len(part)
        return column

    def rows(self, low: int = 0, high: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return some rows of all columns, or all of them, in memory of their own."""
        high = len(self) if high is None else high
        return {name: self.part(name, low, high) for name in self.types}

    def parts(self, rows: int = ROWS) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yield all columns, ``rows`` rows at a time."""
        for low in range(0, len(self), rows):
            yield self.rows(low, min(low + rows, len(self)))


class _Part:
    """One sorted part: its rows lie in a scratch file, samples of its first keys here."""

    def __init__(
        self, rows: Columns, keys: Sequence[str], limits: Sequence[str], scratch: Scratch
    ) -> None:
        rows = _sorted(rows, keys)
        self.grown = Grown({name: column.dtype.type for name, column in rows.items()}, scratch)
        self.grown.add(rows)
        self._limits = limits
        picked = (rows[key][::_STEP].tolist() for key in limits)
        self.samples: list[_Keys] = list(zip(*picked, strict=True))
        self._last = tuple(int(rows[key][-1]) for key in limits)
        self.grown.put_aside()

    def before(self, limit: _Keys) -> int:
        """Return the number of rows whose first keys come before some keys."""
        # Parts follow in time, so this holds for most.
        if not self.samples[0] < limit <= self._last:
            return len(self.grown) if limit > self._last else 0
        low = max(bisect.bisect_left(self.samples, limit) - 1, 0) * _STEP
        high = min(low + _STEP + 1, len(self.grown))
        first, second = (self.grown.part(name, low, high) for name in self._limits)
        start, end = (np.searchsorted(first, limit[0], side) for side in ("left", "right"))
        return low + int(start + np.searchsorted(second[start:end], limit[1]))


def in_order(
    parts: Iterable[Columns], *keys: str, whole: int = 2, rows: int = ROWS
) -> Iterator[Columns]:
    """Yield all rows by some of their columns, a block at a time.

    Rows that are alike in all keys stay in the order of the parts. Takes memory for a block and a
    part, and a sample of two keys for each thousand rows.

    Args:
        parts: Columns of the same names and types; one part at a time is in memory.
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
        high = [len(part.grown) if cut is None else part.before(cut) for part in done]
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
    pieces = [part.grown.rows(low, high) for part, low, high in ends if low < high]
    block = {name: np.concatenate([each[name] for each in pieces]) for name in pieces[0]}
    return _sorted(block, keys)


def _sorted(rows: Columns, keys: Sequence[str]) -> Columns:
    order = np.lexsort([rows[key] for key in reversed(keys)])
    if (order[1:] > order[:-1]).all():  # Most rows are sorted, as events are written in time.
        return rows
    return {name: column[order] for name, column in rows.items()}


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
