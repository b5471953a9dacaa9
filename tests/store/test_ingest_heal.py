"""A damaged cache is rebuilt, or an error says which folder to delete."""

import os
import shutil
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.store import parquet
from lightning_rlprof.store.ingest import ingest, ingest_one
from lightning_rlprof.store.open_run import open_run, open_store
from lightning_rlprof.store.parquet import STAMP_NS
from lightning_rlprof.store.run_store import Store
from lightning_rlprof.tables.table import Table
from tests.builders.alike import assert_same_run
from tests.builders.ingest_traces import write_trace, write_traces

QUERY = "select rank, count(*) as n from kernels group by 1 order by 1"
ALL = [(0, 5), (1, 6), (2, 7)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_traces(tmp_path / "traces", 3)
    ingest([tmp_path / "traces"], jobs=1)
    return tmp_path / "traces"


def rot(path: Path, part: slice) -> None:
    """Turn bytes over and leave size, ends and time as they were, as a failing disk does."""
    data = bytearray(path.read_bytes())
    data[part] = bytes(each ^ 0x5A for each in data[part])
    path.write_bytes(data)
    os.utime(path, ns=(STAMP_NS, STAMP_NS))


def kernels(folder: Path, rank: int) -> Path:
    (path,) = folder.rglob(f"rank{rank}*/kernels.parquet")
    return path


@pytest.mark.deep
@pytest.mark.parametrize("part", [slice(4, -200), slice(-60, -8)], ids=["pages", "footer"])
def test_a_rotten_table_of_one_of_many_traces_is_an_error_that_says_what_to_delete(
    folder: Path, part: slice
) -> None:
    rot(kernels(folder, 1), part)
    with pytest.raises(TraceError, match=r"delete .*\.rlprof-cache|ingest"):
        open_store(folder).sql("select sum(start_ns), max(name) from kernels")
    shutil.rmtree(kernels(folder, 1).parent)
    assert list(open_store(folder).sql(QUERY).rows) == ALL


@pytest.mark.deep
def test_ingest_rebuilds_a_cache_whose_footer_is_rotten(folder: Path) -> None:
    rot(kernels(folder, 1), slice(-60, -8))
    made = ingest_one(str(folder / "rank1.pt.trace.json"))
    assert (made.state, made.why) == ("cached", None)


@pytest.mark.deep
def test_a_rotten_cache_that_cannot_be_removed_fails_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    rot(kernels(folder, 1), slice(-60, -8))
    monkeypatch.setattr(shutil, "rmtree", refused)
    made = ingest_one(str(folder / "rank1.pt.trace.json"))
    assert made.state == "failed"
    assert "cannot be written (Permission denied)" in str(made.why)


@pytest.mark.deep
def test_a_cache_that_goes_while_its_store_is_open_is_no_silent_hole(folder: Path) -> None:
    store = open_store(folder)
    assert list(store.sql(QUERY).rows) == ALL
    shutil.rmtree(kernels(folder, 2).parent)
    with pytest.raises(TraceError, match="run rlprof ingest to rebuild it"):
        store.sql(QUERY)
    assert list(open_store(folder).sql(QUERY).rows) == ALL


@pytest.mark.parametrize("text", ["", '{"schema": 2, "tab', '{"schema":2,"tables":[],"core":null}'])
def test_an_index_that_was_cut_makes_room_for_a_good_one(tmp_path: Path, text: str) -> None:
    path = write_trace(tmp_path / "rank0.pt.trace.json")
    assert ingest_one(str(path)).state == "cached"
    (index,) = tmp_path.rglob("index.json")
    index.write_text(text)
    assert [ingest_one(str(path)).state for _ in range(2)] == ["cached", "up to date"]


def test_what_a_killed_process_left_goes_after_a_day_and_never_counts(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "rank0.pt.trace.json")
    assert ingest_one(str(path)).state == "cached"
    kept = kernels(tmp_path, 0)
    for name in (".kernels-old.part", ".kernels-new.part"):
        (kept.parent / name).mkdir()
        (kept.parent / name / "00001-of-00009.parquet").write_bytes(bytes(10**6))
    os.utime(kept.parent / ".kernels-old.part", (0, 0))
    assert ingest_one(str(path)).state == "up to date"
    kept.unlink()
    assert ingest_one(str(path)).state == "cached"
    assert [each.name for each in kept.parent.glob(".*")] == [".kernels-new.part"]


def test_a_cache_that_only_others_may_write_lends_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_trace(tmp_path / "rank0.pt.trace.json")
    store = Store(path, load)
    shared = store._cache.folder
    real = parquet.write_table

    def refused(table: Table, name: str, to: Path) -> None:
        if to.is_relative_to(shared):
            raise PermissionError(13, "Permission denied", str(to))
        real(table, name, to)

    monkeypatch.setattr("lightning_rlprof.store.cache.write_table", refused)
    assert store.sql("select count(*) as n from kernels").column("n") == [5]
    assert not store._cache.folder.is_relative_to(tmp_path)


def test_a_fifo_in_the_place_of_a_table_is_no_table(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.parquet")
    assert not parquet.is_whole(tmp_path / "t.parquet")


def test_a_folder_whose_name_is_no_text_is_read_without_a_cache_there(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    path = write_trace(folder.parent / "rank0.pt.trace.json")
    folder.mkdir()
    path = path.rename(folder / path.name)
    assert Store(path, load).sql("select count(*) as n from kernels").column("n") == [5]
    assert ingest_one(str(path)).state == "failed"


@pytest.mark.deep
def test_a_trace_whose_name_is_no_text_has_a_cache(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "rank0\udcff.json")
    for state in ("cached", "up to date"):
        assert ingest([path], jobs=1).column("state") == [state]
    assert_same_run(open_run(path), load(path))
    rows = len(load(path).table("kernels").rows)
    assert open_store(path).sql("SELECT count(*) FROM kernels").rows[0][0] == rows
