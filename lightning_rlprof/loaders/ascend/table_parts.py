"""Tables of Ascend captures: rows of several captures under one heading, on one axis."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture_folder import Capture
from lightning_rlprof.loaders.ascend.mstx import STRINGS
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, distinct, end_to_end, known
from lightning_rlprof.tables.table import Column, ColumnRows, Table

Cells = Int64s | npt.NDArray[np.float64] | Coded
"""One column: integers with `UNKNOWN`, numbers with NaN, or texts."""

Frame = Mapping[str, Cells]
"""Columns of one capture by heading; times are nanoseconds since 1970."""


@dataclass(frozen=True, eq=False)
class Opened:
    """One capture with its databases open.

    Attributes:
        capture: Where its parts lie.
        rank: Global rank.
        database: ``ascend_pytorch_profiler*.db``, if there is one that can be read.
        analysis: ``analysis.db``, likewise.
        device: Number of the rank's device, `UNKNOWN` where no database tells it.
        chip: What the device is, "" where no database tells it.
        host: Name of the host, "" where nothing tells it.
    """

    capture: Capture
    rank: int
    database: SqliteTables | None
    analysis: SqliteTables | None
    device: int = UNKNOWN
    chip: str = ""
    host: str = ""

    def has(self, table: str, *names: str) -> bool:
        """Tell whether the database has rows of a table with these columns."""
        return _has(self.database, table, *names)

    def analysed(self, table: str) -> bool:
        """Tell whether the analysis has rows of a table."""
        return _has(self.analysis, table)

    def steps(self, told: Int64s) -> Int64s:
        """Return steps as torch_npu counts them, `UNKNOWN` without; a window of a stage has one."""
        first, stage = self.capture.window
        return np.where((told >= 0) & (told < 2**60), told, first if stage else UNKNOWN)


def _has(database: SqliteTables | None, table: str, *names: str) -> bool:
    try:
        return database is not None and database.has(table, *names)
    except TraceError:  # a damaged page; whatever is read of the others may still be sound
        return False


class Part(NamedTuple):
    """One table.

    Attributes:
        columns: Of the table, without the rank in front.
        has: Tells whether a capture holds any of it; cheap.
        read: Reads it of one capture, with remarks.
        times: Columns that count from the beginning of the axis.
        rows: Columns that hold numbers of the table's rows, from 1 in each capture.
    """

    columns: tuple[Column, ...]
    has: Callable[[Opened], bool]
    read: Callable[[Opened], tuple[Frame, list[str]]]
    times: frozenset[str] = frozenset({"start"})
    rows: frozenset[str] = frozenset()


def part_table(name: str, part: Part, captures: Sequence[Opened], zero_ns: int) -> Table:
    """Read one table of all captures that have it; a capture that cannot be read is a remark.

    Args:
        name: Of the table.
        part: What to read.
        captures: Where from, in the order of the rows.
        zero_ns: Wall-clock time of zero on the axis.
    """
    columns = (Column("rank", "count"), *part.columns)
    frames: list[Frame] = []
    remarks: list[str] = []
    for opened in captures:
        if not part.has(opened):
            continue
        frame, own = _sound(part, opened)
        frames += [] if frame is None else [_numbered_on(frame, part, opened, frames)]
        remarks += _named(opened, own) if len(captures) > 1 else own
    if not frames:
        return Table(name, columns, abstained="; ".join(remarks))
    cells = [
        _finished([frame[column.name] for frame in frames], zero_ns * (column.name in part.times))
        for column in columns
    ]
    return Table(name, columns, ColumnRows(cells), note="; ".join(dict.fromkeys(remarks)))


def _sound(part: Part, opened: Opened) -> tuple[Frame | None, list[str]]:
    """Read from the best sources that can be read; what is damaged beside them is a remark."""
    problems: list[str] = []
    for less in _weaker(opened):
        if not part.has(less):
            continue
        try:
            frame, remarks = part.read(less)
        except TraceError as error:
            problems.append(str(error))
            continue
        return frame, [*dict.fromkeys(problems), *remarks]
    return None, list(dict.fromkeys(problems))


def _weaker(opened: Opened) -> Iterator[Opened]:
    """Yield a capture, then without a database, without the other, and its trace alone."""
    yield opened
    if opened.database is not None:
        yield replace(opened, database=None)
    if opened.analysis is not None:
        yield replace(opened, analysis=None)
        yield replace(opened, database=None, analysis=None)
    alone = replace(opened.capture, output=None)
    if opened.capture.trace is not None:
        yield replace(opened, database=None, analysis=None, capture=alone)


def _named(opened: Opened, remarks: list[str]) -> list[str]:
    name = opened.capture.path.name
    return [text if str(opened.capture.path) in text else f"{name}: {text}" for text in remarks]


def coded(database: SqliteTables, ids: Int64s, table: str = STRINGS, name: str = "value") -> Coded:
    """Return a column of numbers as the texts that a table of the database has for them."""
    strings = database.strings(ids, table, name)
    places = {number: at for at, number in enumerate(strings)}
    codes = np.array([places.get(each, -1) for each in ids.tolist()], np.int64)
    return distinct(codes, list(strings.values()))


def _complete(frame: Frame, part: Part, opened: Opened) -> dict[str, Cells]:
    """Add the rank, its device, and what a capture does not tell."""
    first = next(iter(frame.values()))
    count = len(first[0] if isinstance(first, tuple) else first)
    whole: dict[str, Cells] = {"rank": np.full(count, opened.rank)}
    if "device" not in frame:
        frame = {"device": np.full(count, opened.device), **frame}
    nothing: dict[str, Cells] = {
        "text": (np.full(count, -1), []),
        "number": np.full(count, np.nan),
    }
    for column in part.columns:
        whole[column.name] = frame.get(
            column.name, nothing.get(column.kind, np.full(count, UNKNOWN))
        )
    return whole


def _numbered_on(
    frame: Frame, part: Part, opened: Opened, before: Sequence[Frame]
) -> dict[str, Cells]:
    """Return a complete frame whose numbers of rows count on from those before it."""
    whole = _complete(frame, part, opened)
    count = sum(len(each["rank"]) for each in before)
    for name in part.rows:
        own: Any = whole[name]
        whole[name] = np.where(own == UNKNOWN, UNKNOWN, own + count)
    return whole


def _finished(parts: list[Any], zero_ns: int) -> Any:
    """Put one column of all captures together, with None for what is not known."""
    if isinstance(parts[0], tuple):
        return end_to_end(parts)
    joined = np.concatenate(parts)
    if joined.dtype.kind == "f":
        values, at = np.unique(joined, return_inverse=True)
        return np.where(np.isnan(joined), -1, at), values.tolist()
    return known(np.where(joined == UNKNOWN, UNKNOWN, joined - zero_ns))
