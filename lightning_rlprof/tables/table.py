"""A table as a value: columns with kinds and units, rows, a note, or the reason for no data."""

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar, Literal

import numpy as np

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.notes import Code, Fact
from lightning_rlprof.tables.arrays import Int64s

_SHOWN = 50
_INT64_LIMIT = 2**63

FORMULA = "=+-@\t\r"
"""What a spreadsheet runs begins with one of these."""

Kind = Literal["text", "count", "time", "duration", "share", "ratio", "number"]
"""How a reader should see the cells of a column; see `Column`."""

Cell = str | int | float | None
"""What a table holds; None means "not known", which is never zero."""


@dataclass(frozen=True, slots=True)
class Column:
    """Name of a column, the unit of its cells, and how a reader should see them.

    Attributes:
        name: Heading, unique in its table; the key in JSON.
        kind: ``text``, ``count`` (an integer), ``time`` (integer nanoseconds since the start of the
            timeline), ``duration`` (integer nanoseconds), ``share`` (0 to 1, shown in percent),
            ``ratio`` (shown as 1.25x) or ``number``.
        unit: ``ns`` for times and durations; what the number counts otherwise.
    """

    name: str
    kind: Kind
    unit: str = ""


def columns_of(kind: Kind, *names: str, unit: str = "") -> tuple[Column, ...]:
    """Return columns of one kind and unit.

    Example::

        >>> [column.name for column in columns_of("duration", "mean", "max", unit="ns")]
        ['mean', 'max']
    """
    return tuple(Column(name, kind, unit) for name in names)


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


class PackedRows(ColumnRows):
    """Rows of long tables: columns stay in the fewest bytes, and are handed out with 64 bits.

    Args:
        columns: As `packed` returns them.

    Example::

        >>> rows = PackedRows([packed(np.array([5, 7])), packed((np.array([0, -1]), ["gemm"]))])
        >>> rows.columns[0].dtype, list(rows)
        (dtype('int64'), [(5, 'gemm'), (7, None)])
    """

    def __init__(self, columns: Sequence[Any]) -> None:
        super().__init__(columns)
        self._packed = ColumnRows(columns)
        self.columns: Any = _Unpacked(self._packed.columns)

    def column(self, at: int, rows: slice = slice(None)) -> list[Cell]:
        """Return the cells of one column, without a wide copy of it."""
        return self._packed.column(at, rows)


class _Unpacked(Sequence[Any]):
    """Columns of `PackedRows`, each made when it is asked for."""

    def __init__(self, columns: Sequence[Any]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns)

    def __getitem__(self, at: Any) -> Any:
        column = self._columns[at]
        if isinstance(column, tuple):
            return column[0].astype(np.int64), column[1]
        return column.astype(np.int64) if column.dtype.kind == "i" else column


def packed(column: Any) -> Any:
    """Return a column of a table with integers of the fewest bytes that hold all of them.

    Example::

        >>> packed(np.array([5, 300])).dtype, packed((np.array([0, -1]), ["gemm"]))[0].dtype
        (dtype('int16'), dtype('int8'))
    """
    if isinstance(column, tuple):
        return packed(column[0]), column[1]
    if column.dtype.kind != "i" or not len(column):
        return column
    data = np.ma.getdata(column)
    low, high = int(data.min()), int(data.max())
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return column.astype(kind)
    return column.astype(np.int64)


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
        """Yield ``rows`` rows at a time; none of them is kept."""
        for low in range(0, self._length, rows):
            yield self._read(low, min(low + rows, self._length))

    def _rows(self, rows: slice) -> Iterator[tuple[Cell, ...]]:
        low, high, step = rows.indices(self._length)
        if step != 1:
            return super()._rows(rows)
        part = self._read(low, max(low, high))
        return zip(*(part.column(at) for at in range(len(part.columns))), strict=True)


class Loss(str):
    """A text that says which rows a loader could not read; in a note it is one text of several.

    Args:
        text: For people.
        facts: The same for programs.
    """

    code: ClassVar[Code] = Code.ROWS_LEFT_OUT
    facts: Mapping[str, Fact]

    def __new__(cls, text: str, **facts: Fact) -> "Loss":
        """Return a text with its facts."""
        made = super().__new__(cls, text)
        made.facts = facts
        return made

    @property
    def rows(self) -> int:
        """How many rows are left out, 0 if that is not known."""
        return sum(int(self.facts.get(name, 0)) for name in ("rows", "untimed"))


class Cut(Loss):
    """A text that says that a file was not read to its end, and how much was."""

    code: ClassVar[Code] = Code.FILE_CUT


class Damage(Loss):
    """A text that says how many events of a file are damaged; reading continued behind them."""

    code: ClassVar[Code] = Code.EVENTS_DAMAGED


class ImpossibleTimes(Loss):
    """A text that says of how many events a start or an end cannot be true."""

    code: ClassVar[Code] = Code.TIMES_IMPOSSIBLE


def with_name(name: str, text: str) -> str:
    """Return what is said of a file with its name before it; a loss stays one."""
    facts = text.facts if isinstance(text, Loss) else {}
    return type(text)(f"{name}: {text}", **facts)


def noted(remarks: Iterable[str]) -> dict[str, Any]:
    """Return note and losses of a table, by the names of its fields.

    Example::

        >>> noted(["no launches", Loss("3 rows are left out")])
        {'note': 'no launches; 3 rows are left out', 'losses': ('3 rows are left out',)}
    """
    texts = list(dict.fromkeys(remarks))
    losses = tuple(text for text in texts if isinstance(text, Loss))
    return {"note": "; ".join(texts), "losses": losses}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns; an analysis that lacks its evidence says so in ``abstained``.

    Attributes:
        name: Of the table.
        columns: Their names, kinds and units.
        rows: The cells.
        note: What must be known about them.
        abstained: Why it has no data; None if it has some.
        losses: Parts of the note that say which rows a loader could not read.
        recorded: False if no profiler recorded this table, so that nothing is lost without it.

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
    losses: tuple[str, ...] = ()
    recorded: bool = True

    @property
    def rows_lost(self) -> int:
        """How many rows the losses are about."""
        return sum(each.rows for each in self.losses if isinstance(each, Loss))

    def __post_init__(self) -> None:
        """Reject rows that do not fit under the columns."""
        widths = self.rows
        if isinstance(widths, ColumnRows):  # All rows have the same width.
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

    def arrays(self) -> list[Any]:
        """Return each column as an array of numbers, masked where not known, or as (codes, texts).

        A code below 0 is "not known". Integers beyond 64 bits become floats.
        """
        own = getattr(self.rows, "columns", None)
        if own is None:
            cells = ([row[at] for row in self.rows] for at in range(len(self.columns)))
            return [
                _cells(each, column.kind) for each, column in zip(cells, self.columns, strict=True)
            ]
        return [_coded(*each) if isinstance(each, tuple) else _plain(each) for each in own]

    def numbers(self, name: str, unknown: int = 0) -> Int64s:
        """Return a column of integers as an array, with ``unknown`` where one is not known."""
        column = self._codes(name)
        if not isinstance(column, tuple):
            filled: Int64s = np.ma.filled(column, unknown).astype(np.int64, copy=False)
            return filled
        codes, values = column
        own = [unknown if value is None else value for value in values]
        found: Int64s = np.array([*own, unknown], dtype=np.int64)
        return found[codes]

    def texts(self, name: str) -> tuple[Int64s, Sequence[str]]:
        """Return a column of texts as codes and distinct texts; code -1 means "not known".

        The codes may be the table's own: do not write to them.
        """
        codes, values = self._codes(name)
        places: dict[str, int] = {}
        own = [places.setdefault(str(value), len(places)) for value in values]
        # All texts are distinct, so the codes stay as they are.
        if len(places) == len(own) and codes.dtype == np.int64:
            return codes, list(places)
        return np.array([*own, -1], dtype=np.int64)[codes], list(places)

    def _codes(self, name: str) -> Any:
        """Return an array, or codes and what they stand for, whatever form the rows have."""
        at = [column.name for column in self.columns].index(name)
        if isinstance(self.rows, ColumnRows):
            return self.rows.columns[at]
        return _as_codes(row[at] for row in self.rows)

    def _known(self) -> dict[str, Any]:
        """Return the columns by name; raises RlprofError for a table without an answer."""
        if self.abstained is not None:
            raise RlprofError(f"table {self.name} has no data: {self.abstained}")
        names = [column.name for column in self.columns]
        return dict(zip(names, self.arrays(), strict=True))

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
        """Return an array per column: masked where a number is not known, texts as objects."""
        return {name: _array(cells) for name, cells in self._known().items()}

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame``; whole numbers stay whole where some are not known.

        Raises:
            RlprofError: pandas is not installed.
        """
        pandas = _library("pandas")

        def series(cells: Any) -> Any:
            array = _array(cells)
            if not isinstance(array, np.ma.MaskedArray):
                return array
            if array.dtype.kind == "f":
                return array.filled(np.nan)
            mask = np.ma.getmaskarray(array)
            return pandas.arrays.IntegerArray(array.data.astype(np.int64), mask)

        return pandas.DataFrame({name: series(cells) for name, cells in self._known().items()})

    def to_polars(self) -> Any:
        """Return a ``polars.DataFrame``.

        Raises:
            RlprofError: polars or pyarrow is not installed.
        """
        return _library("polars").from_arrow(self.to_arrow())

    def to_arrow(self) -> Any:
        """Return a ``pyarrow.Table``.

        Raises:
            RlprofError: pyarrow is not installed.
        """
        arrow, columns = _library("pyarrow"), self.to_numpy()
        kinds = (arrow.string() if array.dtype == object else None for array in columns.values())
        return arrow.table([*map(arrow.array, columns.values(), kinds)], [*columns])

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the first rows, how many there are, and the note."""
        title = f"<strong>{html.escape(self.name)}</strong>"
        if self.abstained is not None:
            return f"<p>{title}: no data. {html.escape(self.abstained)}</p>"
        heads = "".join(f"<th>{html.escape(_heading(each))}</th>" for each in self.columns)
        body = "".join(
            f"<tr>{''.join(map(_html_cell, row, self.columns))}</tr>" for row in self.rows[:_SHOWN]
        )
        rest = len(self.rows) - _SHOWN
        remarks = [f"{rest:,} more rows"] * (rest > 0) + [self.note] * bool(self.note)
        notes = "".join(f"<p>{html.escape(each)}</p>" for each in remarks)
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        return f"<div>{title}{table}{notes}</div>"


def rows_of(table: Table) -> list[dict[str, Any]]:
    """Return the rows of a table, each by column name."""
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def no_formula(cell: Cell) -> Cell:
    """Return a cell for CSV: a text that a spreadsheet would run begins with an apostrophe.

    Example::

        >>> no_formula("=1+1"), no_formula(-1), no_formula("gemm")
        ("'=1+1", -1, 'gemm')
    """
    return f"'{cell}" if isinstance(cell, str) and cell.startswith((*FORMULA,)) else cell


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


def _plain(cells: Any) -> Any:
    return cells if cells.dtype.kind in "iuf" else _cells(cells.tolist(), "text")


def _coded(codes: Any, values: Sequence[Any]) -> Any:
    """Keep texts as codes; numbers that are coded because some are not known become a column."""
    if not len(values) or any(isinstance(value, str) for value in values):
        return codes, [str(value) for value in values]
    known = np.array(_numbers(values))
    return np.ma.masked_array(known[codes], mask=codes < 0)


def _cells(cells: list[Any], kind: str) -> Any:
    if kind == "text" or any(isinstance(cell, str) for cell in cells):
        return _as_codes(None if cell is None else str(cell) for cell in cells)
    known = _numbers([0 if cell is None else cell for cell in cells])
    mask = np.array([cell is None for cell in cells], dtype=bool)
    return np.ma.masked_array(np.array(known, dtype=None if known else np.int64), mask=mask)


def _as_codes(cells: Iterable[Cell]) -> tuple[Int64s, list[Cell]]:
    places: dict[Cell, int] = {}
    codes = [-1 if cell is None else places.setdefault(cell, len(places)) for cell in cells]
    return np.array(codes, dtype=np.int64), list(places)


def _numbers(cells: Sequence[Any]) -> list[Any]:
    """Return numbers that one array can hold: floats where one is, or is beyond 64 bits."""
    if all(isinstance(cell, int) and -_INT64_LIMIT <= cell < _INT64_LIMIT for cell in cells):
        return [int(cell) for cell in cells]
    return [float(cell) for cell in cells]


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise RlprofError(f"{name} is not installed here; pip install {name}") from error


def _array(cells: Any) -> Any:
    """Return one column as one array, texts as objects."""
    if not isinstance(cells, tuple):
        return cells if np.ma.is_masked(cells) else np.ma.getdata(cells)
    codes, texts = cells
    return np.array([*texts, None], dtype=object)[np.where(codes < 0, len(texts), codes)]
