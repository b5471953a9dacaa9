"""Cells of Ascend's profilers: exact numbers from decimals, and CSV files as columns by heading."""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.chrome_events import nanoseconds, scaled
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded
from lightning_rlprof.tables.table import Cut, Loss

_PRIME = 2**62 - 57
_ROWS = 16_384  # Rows in memory as Python objects.
_EMPTY = ("", "N/A")
_TRUNCATED = "is truncated"
Convert = Callable[[list[str]], Int64s]


def since_1970(texts: Sequence[bytes]) -> Int64s:
    r"""Convert microseconds to nanoseconds, other texts to `UNKNOWN`; quotes may be around them.

    A double is not exact enough: at 1.7e15 microseconds since 1970 its steps are 0.25. A tab in
    CSV keeps spreadsheets from rounding.

    Example::

        >>> since_1970([b'"1736408883688177.930"', b"1736408883643.212\t", b"N/A"])[:2].tolist()
        [1736408883688177930, 1736408883643212]
    """
    return nanoseconds([bytes(text).strip(b' \t\r\n"') for text in texts])


def whole_number(value: object) -> int:
    """Return an integer, also of a text; `UNKNOWN` if it is not an integer of 0 or more.

    Connections of the exporter have up to 68 bits. Modulo a prime they stay distinct.

    Example::

        >>> whole_number("937"), whole_number(7.0), whole_number("-1") == UNKNOWN
        (937, 7, True)
    """
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 40 else None
    if not isinstance(value, int | float) or not 0 <= value < 1e39:
        return UNKNOWN
    return int(value) % _PRIME


whole: Convert = partial(scaled, factor=1)


mebibytes: Convert = partial(scaled, factor=2**20)


class Sheet:
    """Columns of one file by heading.

    Attributes:
        problems: What was lost.
        length: Number of rows.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.length = 0
        self._parts: dict[str, list[Int64s]] = {}
        self._codes: dict[str, dict[str, int]] = {}

    def number(self, name: str) -> Int64s:
        """Return a column of integers, `UNKNOWN` for other cells and if the file lacks it."""
        parts = self._parts.get(name, [np.full(self.length, UNKNOWN)])
        return np.concatenate([np.empty(0, np.int64), *parts])

    def text(self, name: str) -> Coded:
        """Return a column of texts, -1 for an empty cell or "N/A" and if the file lacks it."""
        codes = self.number(name)
        return np.where(codes == UNKNOWN, -1, codes), list(self._codes.get(name, ()))

    def add(self, name: str, cells: list[str], convert: Convert | None) -> int:
        """Add cells to a column, and return how many of them cannot be read."""
        if convert is None:
            codes = self._codes.setdefault(name, {})
            found = (
                UNKNOWN if text in _EMPTY else codes.setdefault(text, len(codes))
                for text in map(str.strip, cells)
            )
            column = np.fromiter(found, np.int64, len(cells))
            unread = 0
        else:
            column = convert(cells)
            empty = sum(cell.strip() in _EMPTY for cell in cells)
            unread = int(np.count_nonzero(column == UNKNOWN)) - empty
        self._parts.setdefault(name, []).append(column)
        return unread


def microseconds(cells: list[str]) -> Int64s:
    """Convert microseconds to nanoseconds."""
    return since_1970([cell.encode() for cell in cells])


def device(cells: list[str]) -> Int64s:
    """Convert texts such as "NPU:0" to the number of the device."""
    return whole([cell.rpartition(":")[2] for cell in cells])


def read_sheet(
    path: Path, columns: Mapping[str, Convert | None], needed: Iterable[str] = ()
) -> Sheet:
    """Read columns of a file, complete or cut off.

    Args:
        path: The file.
        columns: How to convert each column, None for texts, by its heading in lower case without
            blanks and underscores, as versions differ in those.
        needed: Columns that every version writes; missing ones are problems.

    Raises:
        TraceError: The file cannot be read.
    """
    sheet = Sheet()
    lines = _lines(path, sheet.problems)
    headings = next(lines, [])
    if headings:
        sheet.problems += [f"has no column {name}" for name in needed if name not in headings]
    place = {name: at for at, name in enumerate(headings)}  # The last of two equal names counts.
    unread: Counter[str] = Counter()
    sound = _whole_rows(lines, len(headings), sheet.problems)
    while rows := list(islice(sound, _ROWS)):
        sheet.length += len(rows)
        for name in filter(place.__contains__, columns):
            cells = [row[place[name]] for row in rows]
            unread[name] += sheet.add(name, cells, columns[name])
    rows_read = Cut(f"{_TRUNCATED}: {sheet.length:,} rows were read, the rest is missing")
    sheet.problems = [rows_read if text == _TRUNCATED else text for text in sheet.problems]
    sheet.problems += [
        Loss(f"skipped {n} cells of {name} that cannot be read") for name, n in unread.items() if n
    ]
    return sheet


def _whole_rows(rows: Iterator[list[str]], width: int, problems: list[str]) -> Iterator[list[str]]:
    lost = 0
    for row in rows:
        if len(row) < 2 and not "".join(row).strip():  # Blank lines do not count as lost.
            continue
        if len(row) < width or "".join(row[width:]).strip():
            lost += 1
        else:
            yield row
    if lost:
        problems.append(Loss(f"skipped {lost} rows that are cut off or damaged"))


def _lines(path: Path, problems: list[str]) -> Iterator[list[str]]:
    """Yield the headings, then the rows; a last line without an end is cut off and skipped."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            rows: Any = csv.reader(_whole_lines(file, problems))
            first: list[str] = next(rows, [])
            if not first:
                problems.append("is empty")
            while first and not first[-1].strip():  # A comma may end the line.
                first.pop()
            yield ["".join(cell.lower().replace("_", " ").split()) for cell in first]
            yield from rows
    except csv.Error as error:
        problems.append(Cut(f"is damaged; read up to the damage ({error})"))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def _whole_lines(file: TextIO, problems: list[str]) -> Iterator[str]:
    for line in file:
        if not line.endswith(("\n", "\r")):
            problems.append(_TRUNCATED)
            return
        yield line
