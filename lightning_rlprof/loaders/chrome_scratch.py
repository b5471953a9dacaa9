"""Columns that grow beyond what memory should hold lie in a temporary file without a name."""

import mmap
import tempfile
import weakref
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

__all__ = ["HELD", "Grown", "Scratch", "Settled"]

HELD = 1 << 23
"""Bytes of columns that stay in memory; of all columns of a trace together, or of a table."""


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

    def view(self) -> mmap.mmap:
        """Return all that was put aside; its pages are in memory only while somebody reads them."""
        if self._file is None:
            raise ValueError("nothing was put aside")
        return mmap.mmap(self._file.fileno(), self._end, access=mmap.ACCESS_READ)


class Grown:
    """Columns of one kind of event that grow together, part by part.

    Args:
        types: Type of the numbers of each column; also an attribute.
        scratch: Where parts are put aside.
    """

    def __init__(self, types: Mapping[str, type[np.generic]], scratch: Scratch) -> None:
        self.types, self._scratch = types, scratch
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
            self._parts[name].append(part)
        return sum(part.nbytes for part in columns.values())

    def put_aside(self) -> None:
        """Write what is in memory to the file, where that is possible."""
        for name, parts in self._parts.items():
            joined = np.concatenate(parts) if parts else np.empty(0)
            if len(joined) and (at := self._scratch.put(joined)) >= 0:
                self._aside[name].append((len(joined), at))
                self._parts[name] = []

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column in memory of its own."""
        column = np.empty(len(self), self.types[name])
        self.fill(name, column)
        return column

    def fill(self, name: str, column: npt.NDArray[Any]) -> None:
        """Write one column into an array of its length and type."""
        low = 0
        if self._aside[name]:
            with self._scratch.view() as view:
                for rows, at in self._aside[name]:
                    column[low : low + rows] = np.frombuffer(view, column.dtype, rows, at)
                    low += rows
        for part in self._parts[name]:
            column[low : low + len(part)] = part
            low += len(part)


class Settled:
    """Columns of a table that are ready: small ones in memory, large ones mapped from a file."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._columns: list[npt.NDArray[Any] | tuple[np.dtype[Any], int, int]] = []
        self._masks: list[npt.NDArray[np.bool_] | None] = []
        self._held = 0

    def add(self, column: npt.NDArray[Any], nothing: int | None = None) -> None:
        """Take a column, which the caller need not keep.

        Args:
            column: The numbers.
            nothing: The number that stands for what is not known, and will be masked.
        """
        mask = None if nothing is None else column == nothing
        self._masks.append(mask if mask is not None and mask.any() else None)
        if self._held + column.nbytes <= HELD:
            self._held += column.nbytes
        elif (at := self._scratch.put(np.ascontiguousarray(column))) >= 0:
            self._columns.append((column.dtype, len(column), at))
            return
        self._columns.append(column)

    def columns(self) -> list[npt.NDArray[Any]]:
        """Return the columns in the order in which they came, those of the file not writable."""
        aside = any(isinstance(each, tuple) for each in self._columns)
        view = self._scratch.view() if aside else b""
        found = [
            np.frombuffer(view, *each) if isinstance(each, tuple) else each
            for each in self._columns
        ]
        return [
            column if mask is None else np.ma.masked_array(column, mask)
            for column, mask in zip(found, self._masks, strict=True)
        ]
