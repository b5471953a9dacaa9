"""A table's files as the table that was written; a column is read when it is asked for."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.columns import code_name, quoted, sql_name
from lightning_rlprof.store.duck import reader
from lightning_rlprof.store.parquet import About, files_of, read_about, source_of
from lightning_rlprof.table import Cell, Column, ColumnRows, Table

__all__ = ["KeptRows", "kept_table"]

_HEAD = 1_000


def kept_table(path: Path, name: str) -> Table:
    """Return the table that `lightning_rlprof.store.parquet.write_table` wrote.

    Rows, columns, note and the reason to abstain are as they were, but for NaN, which comes back
    as not known. Texts are codes, as in the tables of loaders.

    Raises:
        TraceError: It cannot be read; deleting it is safe.
    """
    about = read_about(path)
    if about is None:
        raise TraceError(f"{path}: is damaged; delete it, and it is made anew")
    columns = tuple(Column(each["name"], each["kind"], each["unit"]) for each in about["columns"])
    rows = KeptRows(_File(path, about, columns))
    return Table(name, columns, rows, about["note"], about["abstained"])


class KeptRows(ColumnRows):
    """Rows of a table's files; a column is read when it is asked for, and then kept."""

    columns: "_File"  # type: ignore[assignment]

    def __init__(self, file: "_File") -> None:
        self.columns = file
        self._length = file.length

    def column(self, at: int, rows: slice = slice(None)) -> list[Cell]:
        """Return the cells of one column; for the first rows alone, the rest is not read."""
        few = rows.start in (None, 0) and rows.stop is not None and 0 <= rows.stop <= _HEAD
        column = self.columns.head(at) if few and rows.step in (None, 1) else self.columns[at]
        return ColumnRows([column]).column(0, rows)


class _File(Sequence[Any]):
    """Columns of a table's files as `ColumnRows` takes them: arrays, and codes with their texts."""

    def __init__(self, path: Path, about: About, columns: Sequence[Column]) -> None:
        self._path, self._source = path, source_of(files_of(path))
        self._about = about["columns"]
        self._names = [
            sql_name(column) if about["texts"] is None else code_name(at)
            for at, (column, about) in enumerate(zip(columns, self._about, strict=True))
        ]
        self._read: dict[int, Any] = {}
        self._heads: dict[int, Any] = {}
        self.length = self._rows()

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> list[Any]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return [self[each] for each in range(len(self))[at]]
        at = range(len(self))[at]
        if at not in self._read:
            self._read[at] = self._cells(at, self._fetch([at], "")[at])
        return self._read[at]

    def __iter__(self) -> Iterator[Any]:
        missing = [at for at in range(len(self)) if at not in self._read]
        if missing:
            found = self._fetch(missing, "")
            self._read |= {at: self._cells(at, array) for at, array in found.items()}
        return (self._read[at] for at in range(len(self)))

    def head(self, at: int) -> Any:
        """Return the first cells of a column."""
        if at in self._read:
            return self._read[at]
        if not self._heads:
            found = self._fetch(range(len(self)), f" LIMIT {_HEAD}")
            self._heads = {each: self._cells(each, array) for each, array in found.items()}
        return self._heads[at]

    def _cells(self, at: int, array: Any) -> Any:
        about = self._about[at]
        if about["texts"] is None:
            cells = array if np.ma.is_masked(array) else np.ma.getdata(array)
            return cells.astype(about["type"], copy=False)
        return np.ma.getdata(array).astype(np.int64), about["texts"]

    def _fetch(self, columns: Sequence[int], limit: str) -> dict[int, Any]:
        picks = ", ".join(f"{quoted(self._names[at])} AS c{at}" for at in columns)
        found = self._ask(f"SELECT {picks} FROM read_parquet({self._source}){limit}")
        return {at: found[f"c{at}"] for at in columns}

    def _rows(self) -> int:
        source = f"parquet_file_metadata({self._source})"
        return int(self._ask(f"SELECT sum(num_rows)::BIGINT AS n FROM {source}")["n"][0])

    def _ask(self, query: str) -> dict[str, Any]:
        import duckdb

        try:
            with reader() as connection:
                return connection.execute(query).fetchnumpy()
        except duckdb.Error as error:
            text = " ".join(str(error).split())
            raise TraceError(f"{self._path}: is damaged ({text}); delete it") from error
