"""The answer of one analysis as a value: columns with units, rows, a note, or why it abstained."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Cell", "Column", "Table"]

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
        for row in self.rows:
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
