"""Write a table as Parquet, one file or a folder of files, and read it back column by column."""

import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.duckdb_tables import (
    Texts,
    Told,
    close,
    code_name,
    given,
    quoted,
    reader,
    sql_name,
    sql_type,
    writer,
)
from lightning_rlprof.store.sql import text_literal
from lightning_rlprof.tables.table import Cell, Column, ColumnRows, Loss, PartRows, Table

STAMP_NS = 946_684_800 * 10**9
"""Modification time of every cache file, the year 2000: a file with another one was changed."""

About = dict[str, Any]
"""What a file tells beside its rows: ``note``, ``abstained``, and of each of the ``columns``
``name``, ``kind``, ``unit``, ``type`` (of an array) and ``texts`` (that its codes stand for)."""

AT_ONCE = 49_152
"""Rows of `PartRows` that are in memory at a time; a table of more is a folder of files."""

# Files after which DuckDB is restarted, in 20 ms; every file takes 2 MB more of its memory.
_FEW = 8
_MAGIC = b"PAR1"
_SHOWN = 8

# Groups of rows are small: DuckDB's default of 122,880 takes 40 MB more while they are written.
# DuckDB also keeps 1 kB or more for each column of each group until the file ends. Dictionaries are
# small, too: DuckDB begins one for every column, up to a fifth of a group, and drops most of them.
_FORM = (
    "FORMAT parquet, COMPRESSION snappy, USE_TMP_FILE false, DICTIONARY_SIZE_LIMIT 256, "
    "ROW_GROUP_SIZE 8192"
)


def write_table(table: Table, name: str, path: Path) -> None:
    """Write a table, its bytes on the disk when this returns; the same table is the same bytes.

    Of `PartRows` a part at a time is in memory. More than `AT_ONCE` of them become a folder of
    files: memory is the same for any number of rows.

    Raises:
        OSError: The disk does not take it.
        TraceError: It holds what no column can.
    """
    import duckdb

    if os.fsencode(path).decode(errors="replace") != str(path):
        raise OSError(None, "its name is not valid text, and DuckDB can't open it", str(path))
    try:
        if isinstance(table.rows, PartRows) and len(table.rows) > AT_ONCE:
            _write_parts(table, table.rows, path)
        else:
            _write(table, path)
    except duckdb.IOException as error:
        raise OSError(None, " ".join(str(error).split()), str(path)) from error
    except duckdb.Error as error:
        text = " ".join(str(error).split())
        raise TraceError(f"table {name} cannot be written as columns ({text})") from error


def _write_parts(table: Table, rows: PartRows, path: Path) -> None:
    files = [path / name for name in _names(-(-len(rows) // AT_ONCE))]
    is_large = len(files) > _FEW
    parts = rows.parts(AT_ONCE)
    path.mkdir()
    texts: Texts | None = None
    types: list[str] | None = None
    try:
        for at, file in enumerate(files):
            if is_large and at % _FEW == 0:
                close()
            one = replace(table, rows=next(parts))
            texts, own = _write(one, file, texts, is_last=file == files[-1])
            del one  # The next part is read without this one in memory, which zip() would keep.
            if own != (types := types or own):
                raise TraceError(f"table {table.name}: its parts differ in type")
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        if is_large:
            close()


def _names(count: int) -> list[str]:
    """Return what the files of a folder are called, in order; they tell whether one lacks."""
    return [f"{at:05d}-of-{count:05d}.parquet" for at in range(1, count + 1)]


def _write(
    table: Table, path: Path, before: Texts | None = None, *, is_last: bool = True
) -> tuple[Texts, list[str]]:
    """Write a file; return the texts up to here, and the types of its columns."""
    with writer() as connection:
        select, columns, texts = given(connection, table, before)
        form, told = _FORM, []
        # Facts of the whole table are a parameter; in the statement, DuckDB would parse them.
        if is_last:
            form, told = f"{_FORM}, KV_METADATA {{rlprof: $1}}", [_about(table, columns, texts)]
        query = f"COPY ({select}) TO {text_literal(path)} ({form})"
        connection.execute(query, [*map(json.dumps, told)])
    with path.open("r+b") as file:  # Windows syncs only files that may be written.
        os.fsync(file.fileno())
    os.utime(path, ns=(STAMP_NS, STAMP_NS))
    return texts, [*map(sql_type, table.columns, columns)]


def _about(table: Table, cells: Sequence[Any], texts: Texts) -> About:
    columns = [
        {"name": column.name, "kind": column.kind, "unit": column.unit}
        | {"type": None if at in texts else own.dtype.str}
        | {"texts": _in_order(texts[at]) if at in texts else None}
        for at, (column, own) in enumerate(zip(table.columns, cells, strict=True))
    ]
    return {
        "note": table.note,
        "losses": table.losses,
        "rows_lost": table.rows_lost,
        "abstained": table.abstained,
        "columns": columns,
    }


def _in_order(told: Told) -> list[str]:
    """Return the texts that have a number, by that."""
    codes = np.argsort(told.number, kind="stable")[np.count_nonzero(told.number < 0) :]
    return [str(told.texts[code]) for code in codes.tolist()]


def files_of(path: Path) -> list[Path]:
    """Return the files of a table in the order of its rows: one, or those of its folder."""
    return sorted(path.iterdir()) if path.is_dir() else [path]


def source_of(files: Iterable[Path]) -> str:
    """Return files as SQL lists them."""
    return f"[{', '.join(map(text_literal, files))}]"


def is_whole(path: Path) -> bool:
    """Tell whether a table is as `write_table` left it, not cut, not changed; opens no DuckDB."""
    try:
        files = files_of(path)
        named = files == [path] or [file.name for file in files] == _names(len(files) or 1)
        return named and not path.is_symlink() and all(map(_is_whole, files))
    except OSError:
        return False


def _is_whole(path: Path) -> bool:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_mtime_ns != STAMP_NS:
        return False
    with path.open("rb") as file:
        head = file.read(len(_MAGIC))
        file.seek(-len(_MAGIC), os.SEEK_END)
        return head == file.read() == _MAGIC


def read_abouts(paths: Sequence[Path]) -> dict[Path, About]:
    """Return what each table tells beside its rows, in the order given.

    Raises:
        TraceError: One cannot be read.
    """
    import duckdb

    try:
        last = {path: files_of(path)[-1] for path in paths}
        source = source_of(last.values())
        query = f"SELECT file_name, value FROM parquet_kv_metadata({source}) WHERE key = 'rlprof'"
        with reader() as connection:
            found: dict[str, Any] = dict(connection.execute(query).fetchall())
        return {path: json.loads(found[str(file)]) for path, file in last.items()}
    except (duckdb.Error, OSError, ValueError, LookupError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise TraceError(
            f"a cached table cannot be read ({text}); run rlprof ingest to rebuild it"
        ) from error


def first_of(texts: Sequence[str]) -> str:
    """Return the first eight texts as one, and how many more there are."""
    more = [f"and {len(texts) - _SHOWN:,} more"] if len(texts) > _SHOWN else []
    return "; ".join([*texts[:_SHOWN], *more])


def row_count(paths: Iterable[Path]) -> int:
    """Return how many rows tables hold together; raises TraceError where one cannot be read."""
    import duckdb

    try:
        source = source_of(file for path in paths for file in files_of(path))
        with writer() as connection:
            query = f"SELECT sum(num_rows) FROM parquet_file_metadata({source})"
            return int(connection.execute(query).fetchall()[0][0])
    except duckdb.Error as error:
        raise TraceError(" ".join(str(error).split())) from error


_HEAD = 1_000
_MOST_CELLS = 1_000_000  # Of the columns that a table keeps: 8 MB.


def kept_table(path: Path, name: str) -> Table:
    """Return the table that `lightning_rlprof.store.parquet.write_table` wrote.

    Rows, columns, note and the reason to abstain are as they were, but for NaN, which comes back
    as not known. Texts are codes, as in the tables of loaders.

    Raises:
        TraceError: It cannot be read.
    """
    about = read_abouts([path])[path]
    columns = tuple(Column(each["name"], each["kind"], each["unit"]) for each in about["columns"])
    rows = KeptRows(_File(path, about, columns))
    texts = about.get("losses", ())  # Caches of older versions have no losses.
    counts = [about.get("rows_lost", 0)] + [0] * len(texts)
    losses = tuple(Loss(text, rows=count) for text, count in zip(texts, counts, strict=False))
    return Table(name, columns, rows, about["note"], about["abstained"], losses)


class KeptRows(ColumnRows):
    """Rows of a table's files; a column is read when asked for; the last ones stay in memory."""

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
        source = f"parquet_file_metadata({self._source})"
        found = self._ask(f"SELECT sum(num_rows)::BIGINT AS n FROM {source}")
        self.length = int(found["n"][0])

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, at: Any) -> Any:
        return next(self._kept([range(len(self))[at]]))

    def __iter__(self) -> Iterator[Any]:
        return self._kept(range(len(self)))

    def _kept(self, columns: Sequence[int]) -> Iterator[Any]:
        if missing := [at for at in columns if at not in self._read]:
            self._read |= self._fetch(missing, "")
        found = {at: self._read.pop(at) for at in dict.fromkeys(columns)}
        # Those asked for last stay: the columns of a large table are many times what one needs.
        most = max(1, _MOST_CELLS // max(self.length, 1))
        self._read = dict([*self._read.items(), *found.items()][-most:])
        return (found[at] for at in columns)

    def head(self, at: int) -> Any:
        """Return the first cells of a column."""
        if at in self._read:
            return self._read[at]
        if not self._heads:
            self._heads = self._fetch(range(len(self)), f" LIMIT {_HEAD}")
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
        return {at: self._cells(at, found[f"c{at}"]) for at in columns}

    def _ask(self, query: str) -> dict[str, Any]:
        import duckdb

        try:
            with reader() as connection:
                return connection.execute(query).fetchnumpy()
        except duckdb.Error as error:
            text = " ".join(str(error).split())
            raise TraceError(
                f"{self._path}: corrupt ({text}); delete it, and rlprof rebuilds it"
            ) from error
