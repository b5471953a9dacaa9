"""Columns that grow beyond what memory should hold lie in a temporary file without a name."""

import mmap
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

__all__ = ["HELD", "Grown", "Scratch"]

HELD = 1 << 22
"""Bytes of columns that stay in memory, of all columns of a trace together."""


_OWN = HELD // 4


class Scratch:
    """Put bytes aside in a file that goes with its last user, where TMPDIR has room for it."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
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
            data = array.view(np.uint8).data
            self._full = self._file.write(data) < len(data)
            self._full |= self._file.write(bytes(-len(data) % 8)) < -len(data) % 8
        except OSError:
            self._full = True
        if self._full:  # what is there is still read; all that follows stays in memory
            return -1
        at, self._end = self._end, self._end + len(data) + -len(data) % 8
        return at

    def read(self, kind: type[np.generic], rows: int, at: int) -> npt.NDArray[Any]:
        """Return what lies there, in memory of its own: what stays mapped would count as ours."""
        if self._file is None:
            raise ValueError("nothing was put aside")
        if not rows:
            return np.empty(0, kind)
        skip = at % mmap.ALLOCATIONGRANULARITY
        size = skip + rows * np.dtype(kind).itemsize
        number = self._file.fileno()
        with mmap.mmap(number, size, access=mmap.ACCESS_READ, offset=at - skip) as view:
            return np.frombuffer(view, kind, rows, skip).copy()


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
        # Per column: rows and where in the file they lie; they come before the parts.
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

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column in memory of its own."""
        return self.part(name, 0, len(self))

    def part(self, name: str, low: int, high: int) -> npt.NDArray[Any]:
        """Return some rows of one column, in memory of their own."""
        column = np.empty(high - low, kind := self.types[name])
        first = 0
        for rows, at in self._aside[name]:
            start, end = max(low, first), min(high, first + rows)
            if start < end:
                place = at + (start - first) * column.itemsize
                column[start - low : end - low] = self._scratch.read(kind, end - start, place)
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

    def parts(self, rows: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yield all columns, so many rows at a time."""
        for low in range(0, len(self), rows):
            yield self.rows(low, min(low + rows, len(self)))
