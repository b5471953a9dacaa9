"""CSV files of torch_npu as columns, found by their headings."""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.units import scaled, units
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN

_ROWS = 16_384  # at a time as Python objects
_EMPTY = ("", "N/A")
Convert = Callable[[list[str]], Int64s]


class Sheet:
    """Columns of one file by heading.

    Attributes:
        numbers: Integers, `UNKNOWN` for other cells; headings that the file lacks are absent.
        texts: Code per row and the text of each code; -1 for an empty cell or "N/A".
        problems: What was lost.
        length: Number of rows.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, Int64s] = {}
        self.texts: dict[str, tuple[Int64s, list[str]]] = {}
        self.problems: list[str] = []
        self.length = 0

    def number(self, name: str) -> Int64s:
        """Return a column of integers, all `UNKNOWN` if the file lacks it."""
        return self.numbers.get(name, np.full(self.length, UNKNOWN))

    def text(self, name: str) -> tuple[Int64s, list[str]]:
        """Return a column of texts, all -1 if the file lacks it."""
        return self.texts.get(name, (np.full(self.length, -1), []))


def microseconds(cells: list[str]) -> Int64s:
    """Convert microseconds to nanoseconds."""
    return units([cell.encode() for cell in cells])


def whole(cells: list[str]) -> Int64s:
    """Convert texts to integers."""
    return scaled(cells, 1)


def kibibytes(cells: list[str]) -> Int64s:
    """Convert units of 1,024 bytes to bytes."""
    return scaled(cells, 2**10)


def mebibytes(cells: list[str]) -> Int64s:
    """Convert units of 1,048,576 bytes to bytes."""
    return scaled(cells, 2**20)


def read_sheet(
    path: Path,
    numbers: Mapping[str, Convert],
    texts: tuple[str, ...] = (),
    needed: Iterable[str] = (),
) -> Sheet:
    """Read columns of a file, complete or cut off.

    Args:
        path: The file.
        numbers: How to convert each column, by its heading in lower case without blanks and
            underscores, as versions differ in those.
        texts: Columns of texts, named the same way.
        needed: Columns that every version writes; missing ones are problems.

    Raises:
        TraceError: The file cannot be read.
    """
    sheet = Sheet()
    lines = _lines(path, sheet.problems)
    headings = next(lines, [])
    missing = [name for name in needed if name not in headings] if headings else []
    sheet.problems += [f"has no column {name}" for name in missing]
    _fill(sheet, _batches(lines, len(headings), sheet), headings, (numbers, texts))
    return sheet


def _fill(
    sheet: Sheet,
    batches: Iterator[list[list[str]]],
    headings: list[str],
    wanted: tuple[Mapping[str, Convert], tuple[str, ...]],
) -> None:
    numbers, texts = wanted
    place = {name: at for at, name in enumerate(headings)}  # of two with one name, the last
    codes: dict[str, dict[str, int]] = {name: {} for name in texts if name in place}
    parts: dict[str, list[Int64s]] = {name: [] for name in (*numbers, *texts) if name in place}
    unread: Counter[str] = Counter()
    for rows in batches:
        for name, columns in parts.items():
            cells = [row[place[name]] for row in rows]
            column = _coded(cells, codes[name]) if name in codes else numbers[name](cells)
            columns.append(column)
            unread[name] += 0 if name in codes else _unreadable(cells, column)
    sheet.problems += [
        f"skipped {n} cells of {name} that cannot be read" for name, n in unread.items() if n
    ]
    for name, columns in parts.items():
        joined = np.concatenate([np.empty(0, np.int64), *columns])
        if name in codes:
            sheet.texts[name] = (joined, list(codes[name]))
        else:
            sheet.numbers[name] = joined


def _batches(lines: Iterator[list[str]], width: int, sheet: Sheet) -> Iterator[list[list[str]]]:
    lost, rows = 0, []
    for row in lines:
        if not "".join(row).strip() and len(row) < 2:  # a blank line
            continue
        if "".join(row[width:]).strip() or len(row) < width:
            lost += 1
            continue
        rows.append(row)
        sheet.length += 1
        if len(rows) >= _ROWS:
            yield rows
            rows = []
    if rows:
        yield rows
    if lost:
        sheet.problems.append(f"skipped {lost} rows that are cut off or damaged")


def _unreadable(cells: list[str], read: Int64s) -> int:
    """Count the cells that are neither empty nor a number."""
    unknown = np.flatnonzero(read == UNKNOWN).tolist()
    return sum(cells[at].strip() not in _EMPTY for at in unknown)


def _coded(cells: list[str], codes: dict[str, int]) -> Int64s:
    texts = (cell.strip() for cell in cells)
    found = (-1 if text in _EMPTY else codes.setdefault(text, len(codes)) for text in texts)
    return np.fromiter(found, np.int64, len(cells))


def _lines(path: Path, problems: list[str]) -> Iterator[list[str]]:
    """Yield the headings, then the rows; a last line without an end is cut off and skipped."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            rows: Any = csv.reader(_whole_lines(file, problems))
            first: list[str] = next(rows, [])
            if not first:
                problems.append("is empty")
            while first and not first[-1].strip():  # a comma at the end
                first.pop()
            yield ["".join(cell.lower().replace("_", " ").split()) for cell in first]
            yield from rows
    except csv.Error as error:
        problems.append(f"is damaged; read up to the damage ({error})")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def _whole_lines(file: TextIO, problems: list[str]) -> Iterator[str]:
    for line in file:
        if not line.endswith(("\n", "\r")):
            problems.append("is cut off; skipped its last row")
            return
        yield line
