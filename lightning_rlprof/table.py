"""The answer of one analysis as a value: columns with units, rows, a note, or why it abstained."""

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

__all__ = ["Cell", "Column", "ColumnRows", "PartRows", "Table", "figure"]

_SHOWN = 50

Cell = str | int | float | None
"""What a table holds; None means "not known", which is never zero."""


@dataclass(frozen=True, slots=True)
class Column:
    """Name of a column, the unit of its cells, and how a reader should see them.

    Attributes:
        name: Heading, unique in its table; the key in JSON.
        kind: ``text``, ``count`` (an integer), ``duration`` (integer nanoseconds), ``share``
            (0 to 1, shown in per cent), ``ratio`` (shown as 1.25x) or ``number``.
        unit: ``ns`` for durations; whatever the number counts otherwise.
    """

    name: str
    kind: Literal["text", "count", "duration", "share", "ratio", "number"]
    unit: str = ""


class ColumnRows(Sequence[tuple[Cell, ...]]):
    """Rows over columns, made one by one when they are asked for: for tables of millions.

    Args:
        columns: Each either an array of numbers, or ``(codes, values)``: an array of integers and
            what they stand for; a code below 0 stands for None.

    Raises:
        ValueError: The columns differ in length.

    Example::

        >>> rows = ColumnRows([np.array([5, 7]), (np.array([0, -1]), ["gemm"])])
        >>> list(rows), len(rows[1:])
        ([(5, 'gemm'), (7, None)], 1)
    """

    def __init__(
        self, columns: Sequence[np.ndarray[Any, Any] | tuple[np.ndarray[Any, Any], Sequence[Cell]]]
    ) -> None:
        self.columns = tuple(columns)
        sizes = {len(column[0] if isinstance(column, tuple) else column) for column in columns}
        if len(sizes) > 1:
            raise ValueError(f"columns of one table differ in length: {sorted(sizes)}")
        self._length = sizes.pop() if sizes else 0

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    @property
    def width(self) -> int:
        """How many cells a row has."""
        return len(self.columns)

    def __getitem__(self, at: Any) -> Any:
        """Return one row as a tuple, or a slice of rows as a list of tuples."""
        if not isinstance(at, slice):
            at = range(self._length)[at]
            return next(self._rows(slice(at, at + 1)))
        return list(self._rows(at))

    def __iter__(self) -> Iterator[tuple[Cell, ...]]:
        """Yield the rows; some ten thousand at a time become Python objects."""
        for start in range(0, self._length, 65_536):
            yield from self._rows(slice(start, start + 65_536))

    def __eq__(self, other: object) -> bool:
        """Tell whether another sequence has the same rows."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def column(self, at: int, rows: slice = slice(None)) -> list[Cell]:
        """Return the cells of one column."""
        column = self.columns[at]
        if not isinstance(column, tuple):
            return list(column[rows].tolist())
        codes, values = column
        return [values[code] if code >= 0 else None for code in codes[rows].tolist()]

    def _rows(self, rows: slice) -> Iterator[tuple[Cell, ...]]:
        return zip(*(self.column(at, rows) for at in range(len(self.columns))), strict=True)


class PartRows(ColumnRows):
    """Rows of which some are read at a time, from wherever they lie; see `parts`.

    Asking for ``columns`` reads all of them, and keeps them.

    Args:
        length: Number of rows.
        read: Returns the rows from one number to another, that one left out.
    """

    def __init__(self, length: int, read: Callable[[int, int], ColumnRows]) -> None:
        self._length, self._read = length, read

    @property
    def width(self) -> int:
        """How many cells a row has."""
        return self._read(0, 0).width

    @cached_property
    def columns(self) -> Any:  # type: ignore[override]
        """All columns."""
        return self._read(0, self._length).columns

    def parts(self, rows: int) -> Iterator[ColumnRows]:
        """Yield so many rows at a time; nothing of them is kept."""
        for low in range(0, self._length, rows):
            yield self._read(low, min(low + rows, self._length))

    def _rows(self, rows: slice) -> Iterator[tuple[Cell, ...]]:
        low, high, step = rows.indices(self._length)
        if step != 1:
            return super()._rows(rows)
        part = self._read(low, max(low, high))
        return zip(*(part.column(at) for at in range(len(part.columns))), strict=True)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns; an analysis that lacks its evidence says so in ``abstained``.

    Raises:
        ValueError: A row is not as long as ``columns``.

    Example::

        >>> table = Table("stages", (Column("stage", "text"), Column("total", "duration", "ns")),
        ...               [("actor_generate", 5)])
        >>> table.column("total")
        [5]
    """

    name: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Cell, ...]] = ()
    note: str = ""
    abstained: str | None = None

    def __post_init__(self) -> None:
        """Reject rows that do not fit under the columns."""
        widths = self.rows
        if isinstance(widths, ColumnRows):  # all alike: the first tells of all
            widths = [tuple(range(widths.width))] if len(widths) else []
        for row in widths:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.name}: row {row!r} has {len(row)} cells for "
                    f"{len(self.columns)} columns"
                )

    def column(self, name: str) -> list[Cell]:
        """Return the cells under one heading; raises KeyError naming the headings there are."""
        names = [column.name for column in self.columns]
        if name not in names:
            raise KeyError(f"table {self.name} has no column {name!r}, only {', '.join(names)}")
        at = names.index(name)
        if isinstance(self.rows, ColumnRows):
            return self.rows.column(at)
        return [row[at] for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: columns with kinds and units, rows as lists."""
        return {
            "name": self.name,
            "columns": [asdict(column) for column in self.columns],
            "rows": [list(row) for row in self.rows],
            "note": self.note,
            "abstained": self.abstained,
        }

    def to_numpy(self) -> dict[str, Any]:
        """Return an array per column; see `lightning_rlprof.frames.to_numpy`."""
        from lightning_rlprof.frames import to_numpy

        return to_numpy(self)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame``; raises RlprofError where pandas is not installed."""
        from lightning_rlprof.frames import to_pandas

        return to_pandas(self)

    def to_polars(self) -> Any:
        """Return a ``polars.DataFrame``; raises RlprofError where polars is not installed."""
        from lightning_rlprof.frames import to_polars

        return to_polars(self)

    def to_arrow(self) -> Any:
        """Return a ``pyarrow.Table``; raises RlprofError where pyarrow is not installed."""
        from lightning_rlprof.frames import to_arrow

        return to_arrow(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the first rows, how many there are, and the note."""
        title = f"<strong>{html.escape(self.name)}</strong>"
        if self.abstained is not None:
            return f"<p>{title}: not told, {html.escape(self.abstained)}</p>"
        heads = "".join(f"<th>{html.escape(_heading(each))}</th>" for each in self.columns)
        body = "".join(
            f"<tr>{''.join(map(_html_cell, row, self.columns))}</tr>" for row in self.rows[:_SHOWN]
        )
        rest = len(self.rows) - _SHOWN
        remarks = [f"and {rest:,} more rows"] * (rest > 0) + [self.note] * bool(self.note)
        notes = "".join(f"<p>{html.escape(each)}</p>" for each in remarks)
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        return f"<div>{title}{table}{notes}</div>"


def figure(number: float) -> str:
    """Return a number for people, with four significant digits, or all before the point.

    Example::

        >>> [figure(number) for number in (0.012345, 53_281.4, 1e30)]
        ['0.01235', '53,281', '1e+30']
    """
    return f"{number:,.0f}" if 1e3 <= abs(number) < 1e15 else f"{number:,.4g}"


def _heading(column: Column) -> str:
    return f"{column.name} ({column.unit})" if column.unit else column.name


def _html_cell(cell: Cell, column: Column) -> str:
    if cell is None:
        return "<td>-</td>"
    if isinstance(cell, str):
        return f'<td style="text-align: left">{html.escape(cell)}</td>'
    if column.kind == "share":
        return f"<td>{cell:.1%}</td>"
    return f"<td>{cell:,}</td>" if isinstance(cell, int) else f"<td>{figure(cell)}</td>"
