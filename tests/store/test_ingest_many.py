"""A directory with one trace per rank, asked in SQL from the caches of its traces."""

import os
import resource
import shutil
from pathlib import Path

import duckdb
import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.run import Run
from lightning_rlprof.store.cache import Cache, place, sources
from lightning_rlprof.store.ingest import ingest
from lightning_rlprof.store.open_run import open_store
from lightning_rlprof.store.run_store import Part, Source, joined_table
from lightning_rlprof.store.sql import answer
from lightning_rlprof.tables.table import Column, Table
from tests.builders.chrome import BASE
from tests.builders.ingest_traces import cached_files, write_trace, write_traces
from tests.store.test_cache import small

QUERY = "select * from {} order by all"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with three ranks, each a second later than the one before."""
    for rank, path in enumerate(write_traces(tmp_path / "traces", 3)):
        later = path.read_bytes().replace(str(BASE).encode(), str(BASE + rank * 10**9).encode())
        path.write_bytes(later)
    return tmp_path / "traces"


def test_sql_sees_all_ranks_on_one_axis_as_the_joined_run_does(folder: Path) -> None:
    joined = Run.of(load(folder))
    ingest([folder], jobs=1)
    store = open_store(folder)
    assert set(store.tables) == {"spans", "headers", "notes", "warnings", *joined.tables}
    for name in store.tables:
        query = QUERY.format(name)
        found, wanted = store.sql(query), joined.sql(query)
        assert sorted(each.name for each in found.columns) == sorted(
            each.name for each in wanted.columns
        )
        for column in wanted.columns:
            assert found.column(column.name) == wanted.column(column.name), (name, column)
    (spread,) = store.sql("select max(start_ns) - min(start_ns) from kernels").rows
    assert spread[0] > 2 * 10**9
    own = {name for name in cached_files(folder) if name.startswith("run/")}
    whole = ("clocks", "spans", "headers", "notes", "warnings")
    assert own == {f"run/{name}.parquet" for name in whole}


def test_without_the_caches_of_all_it_is_one_run_too(folder: Path) -> None:
    ingest([folder / "rank0.pt.trace.json"], jobs=1)
    query = "select rank, count(*) from kernels group by 1 order by 1"
    assert list(open_store(folder).sql(query).rows) == [(0, 5), (1, 6), (2, 7)]
    assert list(open_store(folder).sql(query).rows) == [(0, 5), (1, 6), (2, 7)]


@pytest.mark.deep
def test_of_two_traces_of_one_rank_one_counts(folder: Path) -> None:
    write_trace(folder / "rank2-again.pt.trace.json", 2, 3)
    ingest([folder], jobs=1)
    query = "select rank, count(*) from kernels group by 1 order by 1"
    assert list(open_store(folder).sql(query).rows) == [(0, 5), (1, 6), (2, 7)]


def test_a_table_that_is_deleted_while_the_store_is_open_is_no_silent_hole(folder: Path) -> None:
    ingest([folder], jobs=1)
    store = open_store(folder)
    for path in folder.rglob("rank1*/kernels.parquet"):
        path.unlink()
    query = "select distinct rank from kernels order by 1"
    with pytest.raises(TraceError, match="run rlprof ingest to rebuild it"):
        store.sql(query)


def part(folder: Path, rank: int | None, later_ns: int, table: Table) -> Part:
    folder.mkdir()
    path = folder / "t.json"
    path.write_text("{}")
    cache = place(path, sources(path), small(t=table))
    cache.add(table, "t")
    return Part(cache, rank, later_ns)


def test_a_column_that_some_lack_is_not_known_there_and_the_rank_is_the_parts(
    tmp_path: Path,
) -> None:
    time = Column("time", "time", "ns")
    one = Table("t", (time, Column("length", "duration", "ns")), [(5, 7)], note="a note")
    two = Table("t", (time, Column("more", "text")), [(6, "x")])
    none = Table("t", (time,), abstained="nothing was traced")
    parts = [
        part(tmp_path / f"{at}", at, at * 100, each) for at, each in enumerate([one, two, none])
    ]
    found = joined_table("t", parts)
    assert isinstance(found, Source)
    assert found.note == "rank 0: a note; rank 2: nothing was traced"
    with duckdb.connect() as connection:
        found.attach(connection)
        rows = connection.execute("from t order by time_ns").fetchall()
    assert rows == [(0, 5, 7, None), (1, 106, None, "x")]
    assert joined_table("t", parts[2:]) == "rank 2: nothing was traced"
    assert joined_table("u", parts) == "no trace contains it"


def test_more_files_are_asked_than_a_process_may_open_by_itself(tmp_path: Path) -> None:
    """That is 1,024 in most places, and DuckDB opens dozens ahead on each core."""
    one = part(tmp_path / "0", 0, 0, Table("t", (Column("n", "count"),), [(7,)]))
    parts = []
    for rank in range(300):
        shutil.copytree(one.cache.folder, copy := tmp_path / f"copy-{rank}")
        parts.append(one._replace(cache=Cache(copy, one.cache.tables), rank=rank))
    table = joined_table("t", parts)
    assert isinstance(table, Source)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        found = answer("select sum(n) as n, max(rank) as last from t", table.attach, table.files)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [*found.rows] == [(2_100, 299)]


def test_a_cache_that_goes_while_it_is_asked_is_an_error(tmp_path: Path) -> None:
    one = part(tmp_path / "a", 0, 0, Table("t", (Column("n", "count"),), [(1,)]))
    file = one.cache.file("t")
    stamp = file.stat().st_mtime_ns
    file.write_bytes(b"PAR1" + bytes(20) + b"PAR1")
    os.utime(file, ns=(stamp, stamp))
    with pytest.raises(TraceError, match="a cached table cannot be read"):
        joined_table("t", [one])
