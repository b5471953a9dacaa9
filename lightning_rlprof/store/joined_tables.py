"""Join the cached tables of many traces into one SQL view, read only while a query runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.cache import Cache
from lightning_rlprof.store.duckdb_tables import quoted, reader, sql_columns
from lightning_rlprof.store.parquet import About, files_of, source_of
from lightning_rlprof.store.sql import text_literal
from lightning_rlprof.tables.table import Column

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


_FILE = "its file"
_FEW = 8


class Part(NamedTuple):
    """One trace of several.

    Attributes:
        cache: Of it, with all its tables.
        rank: Whose it is; None where it is of several.
        later_ns: How far its axis begins behind that of all.
    """

    cache: Cache
    rank: int | None
    later_ns: int


class JoinedTable(NamedTuple):
    """What is needed to ask a table of several traces.

    Attributes:
        name: Of the table.
        files: Those that hold it.
        columns: In SQL, in the order of the first file that has them, and whether they are times.
        parts: What each file is a part of.
        note: What the files say beside their rows.
    """

    name: str
    files: list[Path]
    columns: dict[str, bool]
    parts: list[Part]
    note: str

    def attach(self, connection: "DuckDBPyConnection") -> None:
        """Make it a view of its name: all rows on one axis, each with its rank."""
        about = {
            "file": np.array([*map(str, self.files)], dtype=object),
            "rank": np.array([-1 if part.rank is None else part.rank for part in self.parts]),
            "later": np.array([part.later_ns for part in self.parts], dtype=np.int64),
        }
        parts = f"{self.name} parts"
        connection.register(parts, about)
        options = f"union_by_name = true, filename = {text_literal(_FILE)}"
        connection.execute(
            f"CREATE TEMP VIEW {quoted(self.name)} AS SELECT {', '.join(self._picks())} "
            f"FROM read_parquet({source_of(self.files)}, {options}) d "
            f"JOIN {quoted(parts)} p ON d.{quoted(_FILE)} = p.file"
        )

    def _picks(self) -> list[str]:
        own = "nullif(p.rank, -1)"
        picks = [] if "rank" in self.columns else [f"{own} AS rank"]
        for column, is_time in self.columns.items():
            name = quoted(column)
            if is_time:
                picks.append(f"d.{name} + p.later AS {name}")
            else:
                value = f"coalesce(d.rank, {own})" if name == '"rank"' else f"d.{name}"
                picks.append(f"{value} AS {name}")
        return picks


def joined_table(name: str, parts: Sequence[Part]) -> JoinedTable | str:
    """Return the table of all parts that have it, or the reason for missing data.

    Args:
        name: Of the table.
        parts: All tables that they have are whole.

    Raises:
        TraceError: A file cannot be read.
    """
    there = {part.cache.file(name): part for part in parts if name in part.cache.tables}
    abouts = _abouts([*there]) if there else {}
    told = {path: about for path, about in abouts.items() if about["abstained"] is None}
    remarks: dict[str, None] = {}
    for path, about in abouts.items():
        text, rank = about["abstained"] or about["note"], there[path].rank
        if text:
            remarks[text if rank is None else f"rank {rank}: {text}"] = None
    note = "; ".join([*remarks][:_FEW])
    note += f"; and {len(remarks) - _FEW} more warnings" if len(remarks) > _FEW else ""
    if not told:
        return note or "no trace contains it"
    columns = {
        column.name: column.kind == "time"
        for about in told.values()
        for column in sql_columns(
            Column(each["name"], each["kind"], each["unit"]) for each in about["columns"]
        )
    }
    files = {file: there[path] for path in told for file in files_of(path)}
    return JoinedTable(name, [*files], columns, [*files.values()], note)


def _abouts(paths: Sequence[Path]) -> dict[Path, About]:
    """Return what each table tells beside its rows, in the order given."""
    import duckdb

    last = {path: files_of(path)[-1] for path in paths}
    source = source_of(last.values())
    query = f"SELECT file_name, value FROM parquet_kv_metadata({source}) WHERE key = 'rlprof'"
    try:
        with reader() as connection:
            found: dict[str, Any] = dict(connection.execute(query).fetchall())
        return {path: json.loads(found[str(file)]) for path, file in last.items()}
    except (duckdb.Error, ValueError, KeyError) as error:
        text = " ".join(str(error).split())
        raise TraceError(
            f"a cached table cannot be read ({text}); run rlprof ingest to rebuild it"
        ) from error
