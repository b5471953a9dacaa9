"""Tables of Ascend captures: rows of several captures under the same columns, on one time axis."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture import OpenCapture
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, distinct, end_to_end, known
from lightning_rlprof.tables.table import Column, ColumnRows, Table

Cells = Int64s | npt.NDArray[np.float64] | Coded
"""One column: integers with `UNKNOWN`, numbers with NaN, or texts."""

Frame = Mapping[str, Cells]
"""Columns of one capture by name; times are nanoseconds since 1970."""


class TableReader(NamedTuple):
    """Reads one table of a capture.

    Attributes:
        columns: Columns of the table, without the rank in front.
        available: Returns whether a capture may have rows; cheap.
        read: Returns the rows of a capture, and remarks; may take seconds.
        row_numbers: Columns that refer to rows of the table, from 1 in each capture.
    """

    columns: tuple[Column, ...]
    available: Callable[[OpenCapture], bool]
    read: Callable[[OpenCapture], tuple[Frame, list[str]]]
    row_numbers: frozenset[str] = frozenset()


def read_table(
    name: str, reader: TableReader, captures: Sequence[OpenCapture], zero_ns: int
) -> Table:
    """Read one table of all captures that have it; unreadable captures are named in its note.

    Args:
        name: Name of the table.
        reader: Reads it.
        captures: Captures in the order of the rows.
        zero_ns: Wall-clock time of zero on the time axis.
    """
    columns = (Column("rank", "count"), *reader.columns)
    frames: list[dict[str, Cells]] = []
    remarks: list[str] = []
    for opened in filter(reader.available, captures):
        try:
            frame, own_remarks = reader.read(opened)
            frames.append(_complete(frame, reader, opened, sum(len(f["rank"]) for f in frames)))
        except TraceError as error:
            own_remarks = [str(error)]
        path = opened.capture.path
        for text in own_remarks:
            named = len(captures) == 1 or str(path) in text
            remarks.append(text if named else f"{path.name}: {text}")
    if not frames:
        return Table(name, columns, abstained="; ".join(remarks))
    cells = [
        _joined([frame[column.name] for frame in frames], zero_ns * (column.kind == "time"))
        for column in columns
    ]
    return Table(name, columns, ColumnRows(cells), note="; ".join(dict.fromkeys(remarks)))


def texts_of(column: Coded) -> list[str]:
    """Return the text of each row, "" if it is unknown."""
    codes, texts = column
    return [texts[code] if code >= 0 else "" for code in codes.tolist()]


def coded_texts(texts: Sequence[str]) -> Coded:
    """Return texts as a column in which "" is unknown."""
    codes, names = distinct(np.arange(len(texts)), texts)
    return np.where(np.array(texts, object) == "", -1, codes), names


def _complete(
    frame: Frame, reader: TableReader, opened: OpenCapture, rows_before: int
) -> dict[str, Cells]:
    """Add the rank, its device and missing columns; continue numbers of rows."""
    first = next(iter(frame.values()))
    count = len(first[0] if isinstance(first, tuple) else first)
    missing: dict[str, Cells] = {
        "text": (np.full(count, -1), []),
        "number": np.full(count, np.nan),
    }
    complete: dict[str, Cells] = {"rank": np.full(count, opened.rank)}
    for column in reader.columns:
        cells: Any = frame.get(column.name, missing.get(column.kind, np.full(count, UNKNOWN)))
        if column.name == "device":
            cells = np.where(cells == UNKNOWN, opened.device, cells)
        if column.name in reader.row_numbers:
            cells = np.where(cells == UNKNOWN, UNKNOWN, cells + rows_before)
        complete[column.name] = cells
    return complete


def _joined(parts: list[Any], zero_ns: int) -> Any:
    """Join one column of all captures, with None for unknown cells."""
    if isinstance(parts[0], tuple):
        return end_to_end(parts)
    joined = np.concatenate(parts)
    if joined.dtype.kind == "f":
        values, at = np.unique(joined, return_inverse=True)
        return np.where(np.isnan(joined), -1, at), values.tolist()
    return known(np.where(joined == UNKNOWN, UNKNOWN, joined - zero_ns))
