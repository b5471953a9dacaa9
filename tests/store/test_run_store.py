import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.run import Run
from lightning_rlprof.store import cache
from lightning_rlprof.store.run_store import Store
from lightning_rlprof.tables.spans import Spans
from tests.builders.reader import Reader
from tests.builders.runs import Row, grpo_rows, grpo_run, header, write_rank

COUNT = "select count(*) as n, sum(duration_ns) as total_ns from spans"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    grpo_run(tmp_path / "run", steps=3, ranks=2)
    return tmp_path / "run"


def truth(run: Path) -> list[tuple[int, int]]:
    spans = load(run)
    return [(len(spans), int(spans.duration_ns.sum()))]


def files(run: Path) -> list[Path]:
    return sorted((run / cache.CACHE_FOLDER).rglob("*.parquet"))


def test_the_second_time_the_run_is_not_read(run: Path) -> None:
    first, second = Reader(), Reader()
    assert list(Store(run, first).sql(COUNT).rows) == truth(run)
    assert list(Store(run, second).sql(COUNT).rows) == truth(run)
    assert (first.loads, second.loads) == (1, 0)
    names = [path.stem for path in files(run)]
    assert names == ["headers", "notes", "spans", "warnings"]


@pytest.mark.parametrize(("of_the_file", "of_the_cache"), [(0o600, 0o700), (0o644, 0o755)])
def test_a_cache_is_of_its_user_alone_if_the_rank_files_are(
    of_the_file: int, of_the_cache: int, run: Path
) -> None:
    for file in run.glob("rank-*.jsonl"):
        file.chmod(of_the_file)
    before = os.umask(0o022)
    try:
        Store(run, load).sql("select 1")
    finally:
        os.umask(before)
    (made,) = (run / cache.CACHE_FOLDER).iterdir()
    assert made.stat().st_mode & 0o777 == of_the_cache


def test_a_table_of_a_device_is_made_when_it_is_named(run: Path) -> None:
    reader = Reader()
    store = Store(run, reader)
    assert store.tables == ("spans", "headers", "notes", "warnings", "kernels", "memcpy")
    store.sql(COUNT)
    assert reader.kernels == 0
    query = 'select name, duration_ns from main."Kernels" order by name'
    for _ in range(2):
        assert list(store.sql(query).rows) == [("copy", None), ("gemm", 5)]
    again = Reader()
    assert len(Store(run, again).sql(query).rows) == 2
    assert (reader.loads, reader.kernels, again.loads) == (1, 1, 0)
    assert store.sql("from kernels", rows=1).note == "the first 1 of 2 rows; a note"


@pytest.mark.parametrize("query", ["show tables", " SHOW all\nTables ; "])
def test_all_tables_are_shown_and_none_is_made(query: str, run: Path, tmp_path: Path) -> None:
    reader = Reader()
    store = Store(run, reader)
    tables = [(name,) for name in sorted(store.tables)]
    assert list(store.sql(query).rows) == list(Run.of(reader(run)).sql(query).rows) == tables
    assert store.write(query, tmp_path / "t.csv") == len(tables)
    assert reader.kernels == 0


def test_a_table_that_abstained_is_an_error_and_not_empty(run: Path) -> None:
    for _ in range(2):
        with pytest.raises(TraceError, match="table memcpy has no data: none was traced"):
            Store(run, Reader()).sql("select count(*) from memcpy")
    assert list(Store(run, Reader()).sql("select 'memcpy'").rows) == [("memcpy",)]


def test_an_unknown_table_is_told_with_those_there_are(run: Path) -> None:
    text = r"Table with name spam does not exist! \(there are: spans, .*, memcpy\)"
    with pytest.raises(TraceError, match=text):
        Store(run, Reader()).sql("from spam")


def test_a_run_that_grew_is_read_again_and_its_old_cache_goes(run: Path) -> None:
    Store(run, load)
    write_rank(run, header(2, 3), grpo_rows(4))
    assert list(Store(run, load).sql(COUNT).rows) == truth(run)
    assert len(list((run / cache.CACHE_FOLDER).iterdir())) == 1


def test_same_size_and_time_with_another_inode_is_another_file(run: Path) -> None:
    Store(run, load)
    file = run / "rank-00000.jsonl"
    stat, data = file.stat(), file.read_bytes()
    (run / "new").write_bytes(data.replace(b"actor_update", b"actor_UPDATE"))
    os.utime(run / "new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (run / "new").replace(file)
    query = "select count(*) > 0 from spans where name = 'actor_UPDATE'"
    assert list(Store(run, load).sql(query).rows) == [(1,)]


def test_what_our_own_commands_write_into_a_run_does_not_touch_its_cache(run: Path) -> None:
    Store(run, load)
    for name in ("report.html", "otlp.jsonl"):
        (run / name).write_text("new")
    reader = Reader()
    Store(run, reader)
    assert reader.loads == 0


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "changed", "linked"])
def test_a_damaged_file_is_made_anew(damage: str, run: Path, tmp_path: Path) -> None:
    Store(run, load)
    file = next(path for path in files(run) if path.stem == "spans")
    data, stamp = file.read_bytes(), file.stat().st_mtime_ns
    file.unlink()
    if damage == "linked":
        (tmp_path / "other").write_bytes(data)
        os.utime(tmp_path / "other", ns=(stamp, stamp))
        file.symlink_to(tmp_path / "other")
    elif damage != "gone":
        middle = len(data) // 2
        changed = data[:middle] + bytes(64) + data[middle + 64 :]
        file.write_bytes({"cut": data[:-9], "empty": b"", "changed": changed}[damage])
    reader = Reader()
    assert list(Store(run, reader).sql(COUNT).rows) == truth(run)
    assert reader.loads == 1
    assert not file.is_symlink()


def test_a_file_whose_damage_shows_only_when_it_is_read_is_made_anew(run: Path) -> None:
    Store(run, load)
    file = next(path for path in files(run) if path.stem == "spans")
    stat, data = file.stat(), file.read_bytes()
    file.write_bytes(data[:4] + bytes(len(data) - 8) + data[-4:])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    reader = Reader()
    store = Store(run, reader)
    assert list(store.sql(COUNT).rows) == truth(run)
    assert reader.loads == 1


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"schema": 1, "tables": ["../../x"]}'])
def test_a_broken_index_is_made_anew(index: str, run: Path) -> None:
    Store(run, load)
    next((run / cache.CACHE_FOLDER).rglob("index.json")).write_text(index)
    reader = Reader()
    assert list(Store(run, reader).sql(COUNT).rows) == truth(run)
    assert reader.loads == 1


def test_a_cache_of_another_version_is_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(run, load)
    monkeypatch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
    reader = Reader()
    Store(run, reader)
    assert reader.loads == 1


def test_a_run_that_changes_while_it_is_read_leaves_no_cache(run: Path) -> None:
    def slow(path: Path) -> Spans:
        spans = load(path)
        write_rank(run, header(2, 3), grpo_rows(1))
        return spans

    assert Store(run, slow).sql(COUNT).rows[0][0] == 38
    assert files(run) == []
    assert list(Store(run, load).sql(COUNT).rows) == truth(run)


def test_a_table_of_a_run_that_changed_meanwhile_does_not_join_the_old_ones(run: Path) -> None:
    store = Store(run, Reader())
    shared = files(run)
    write_rank(run, header(2, 3), grpo_rows(1))
    assert len(store.sql("from kernels").rows) == 2
    assert list(store.sql(COUNT).rows) == truth(run)
    assert files(run) == shared


def test_where_the_place_cannot_be_written_the_cache_is_temporary(run: Path) -> None:
    (run / cache.CACHE_FOLDER).write_text("a file is in the way, for root as well")
    store = Store(run, Reader())
    assert list(store.sql(COUNT).rows) == truth(run)
    assert len(store.sql("from kernels").rows) == 2
    folder = store._cache.folder
    assert folder.is_dir()
    assert run not in folder.parents
    del store
    assert not folder.exists()


def test_a_linked_place_is_not_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / cache.CACHE_FOLDER).symlink_to(tmp_path / "elsewhere")
    assert list(Store(run, load).sql(COUNT).rows) == truth(run)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_single_file_has_its_cache_beside_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    Store("rank-00001.jsonl", load)
    (folder,) = (run / cache.CACHE_FOLDER).iterdir()
    assert folder.name.startswith("rank-00001.jsonl-")
    reader = Reader()
    Store(run / "rank-00001.jsonl", reader)
    assert reader.loads == 0
    Store(run, load)
    assert len(list((run / cache.CACHE_FOLDER).iterdir())) == 2


def test_two_processes_may_make_it_at_once(run: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from lightning_rlprof.loaders.load import load\n"
        "from lightning_rlprof.store.run_store import Store\n"
        "def read(path):\n"
        "    spans = load(path); print('read', flush=True); sys.stdin.readline(); return spans\n"
        f"print(list(Store(Path({str(run)!r}), read).sql({COUNT!r}).rows))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for each in both:
        assert each.stdout.readline() == "read\n"
    told = [each.communicate("go\n", timeout=60)[0].strip() for each in both]
    assert told == [str(truth(run))] * 2
    assert [each.name[:4] for each in (run / cache.CACHE_FOLDER).iterdir()] == ["run-"]


def test_every_column_of_spans_is_there(tmp_path: Path) -> None:
    rows = [
        Row("step", "step", 1, 10, 90, counters={"peak_bytes": 2**60, "Rank": 7, "loss": 0.5}),
        Row("actor_update", "stage", 1, 20, 50, parent=1, thread=5),
    ]
    write_rank(tmp_path / "run", header(3, 4), rows, notes=[(40, "warning", "late")])
    store = Store(tmp_path / "run", load)
    table = store.sql("select * from spans order by id")
    assert [column.name for column in table.columns][11:] == ["counter_Rank", "loss", "peak_bytes"]
    assert list(table.rows) == [
        ("step", "step", 3, 1, 0, 80, 80, rows[0].thread, "Main", 1, None, 7, 0.5, 2**60),
        ("actor_update", "stage", 3, 1, 10, 40, 30, 5, "thread 5", 2, 1, None, None, None),
    ]
    assert store.sql("select rank, time_ns, level, text from notes").rows[:] == [
        (3, 30, "warning", "late")
    ]
    assert ("of 4 ranks, these have no trace: 0-2",) in list(
        store.sql("select text from warnings").rows
    )
    query = "select rank, world_size, host, status, config from headers"
    assert list(store.sql(query).rows) == [
        (3, 4, "node-a", "finished", '{"integrated": {"stage": "all"}}')
    ]


def test_spans_in_memory_answer_the_same_and_write_nothing(run: Path) -> None:
    spans = load(run)
    run_in_memory = Run.of(spans)
    query = "select * exclude (thread_name) from spans order by rank, id"
    assert list(run_in_memory.sql(query).rows) == list(Store(run, load).sql(query).rows)
    assert spans.table("warnings").rows == []
    shutil.rmtree(run / cache.CACHE_FOLDER)
    assert list(Run.of(load(run)).sql(COUNT).rows) == truth(run)
    assert not (run / cache.CACHE_FOLDER).exists()


def test_spans_in_memory_read_a_table_once_and_say_why_not(run: Path) -> None:
    reader = Reader()
    run_in_memory = Run.of(reader(run))
    for _ in range(2):
        assert list(run_in_memory.sql("select sum(duration_ns) from kernels").rows) == [(5,)]
    assert reader.kernels == 1
    with pytest.raises(TraceError, match="table memcpy has no data: none was traced"):
        run_in_memory.sql("from memcpy")
    assert list(run_in_memory.sql("select 'memcpy'").rows) == [("memcpy",)]
    assert run_in_memory.sql("from kernels").note == "a note"
    with pytest.raises(TraceError, match=r"\(there are: spans, headers, notes, warnings, kernels"):
        run_in_memory.sql("from spam")
