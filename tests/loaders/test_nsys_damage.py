"""Files that are no export, or a broken or hostile one: one line, or a counted loss."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from tests.builders.nsys_export import COLUMNS, PID, NsysExport, global_pid

HOSTILE = (
    "text",
    b"\x00\xff",
    1.5,
    None,
    2**63 - 1,
    -(2**63),
    -1,
    "9" * 40,
    "\ud800".encode("utf-8", "surrogatepass"),
)


def database(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as made:
        for statement in statements:
            made.execute(statement)
        made.commit()
    return path


def whole(path: Path) -> NsysExport:
    """Return an export with every table that is read."""
    made = NsysExport(path)
    made.said("rlprof.rank", 0)
    for number in range(30):
        made.own("actor_update", "stage", 10 * number, 10 * number + 9, step=number)
        made.kernel("gemm", 10 * number + 5, 10 * number + 8, number)
        made.call(10 * number + 1, number)
    cells = {"start": 1, "end": 2, "globalPid": global_pid(PID), "correlationId": 1}
    made.add("CUPTI_ACTIVITY_KIND_MEMCPY", copyKind=1, bytes=8, **cells)
    made.add("CUPTI_ACTIVITY_KIND_MEMSET", value=0, bytes=8, **cells)
    made.add("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=0, pid=PID)
    made.add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", syncType=1, **cells)
    made.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", graphId=1, **cells)
    made.add("GPU_METRICS", timestamp=1, typeId=1, metricId=1, value=1)
    made.add("TARGET_INFO_GPU_METRICS", typeId=1, metricId=1, metricName="m")
    made.add("TARGET_INFO_SYSTEM_ENV", name="Hostname", value="h")
    made.add("PROCESSES", globalPid=global_pid(PID), pid=PID, name="p")
    made.add("ThreadNames", nameId=made.string("t"), globalTid=global_pid(PID) + PID)
    return made


@contextmanager
def one_line() -> Iterator[None]:
    """Let a TraceError of one line pass, and nothing else."""
    try:
        yield
    except TraceError as error:
        if "\n" in str(error):
            raise AssertionError(str(error)) from error


def read_all(path: Path) -> None:
    with one_line():
        spans = load(path)
        for name in spans.tables:
            with one_line():
                list(spans.table(name).rows)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_bytes(b"QDSTRM"), "not an SQLite export"),
        (lambda path: path.write_bytes(b"SQLite format 3\0"), "cannot be read as SQLite"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + b"x" * 5000), "cannot be read as"),
        (lambda path: database(path, "CREATE TABLE b (x)", "CREATE TABLE a (x)"), r"tables: a, b"),
        (lambda path: database(path, "VACUUM"), "not an export of Nsight Systems"),
        (lambda path: database(path, "CREATE VIEW NVTX_EVENTS AS SELECT 1"), r"its tables: none"),
    ],
)
def test_what_is_no_export_is_one_line(tmp_path: Path, make: Any, reason: str) -> None:
    path = tmp_path / "x.sqlite"
    make(path)
    with pytest.raises(TraceError, match=reason) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_an_export_that_holds_nothing_is_a_run_without_ranks(tmp_path: Path) -> None:
    spans = load(NsysExport(tmp_path / "x.sqlite").write())

    assert (len(spans), spans.ranks, dict(spans.tables)) == (0, (), {})
    assert len(spans.notes) == 2


@pytest.mark.parametrize("part", range(1, 20))
def test_a_truncated_export_is_one_line(tmp_path: Path, part: int) -> None:
    path = whole(tmp_path / "x.sqlite").write()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * part // 20])

    read_all(path)


@pytest.mark.parametrize("table", COLUMNS)
def test_no_value_in_any_cell_is_a_crash(tmp_path: Path, table: str) -> None:
    made = whole(tmp_path / "x.sqlite")
    first = made.rows[table][-1]
    for column in made.columns[table]:
        for value in HOSTILE:
            made.add(table, **{**first, column: value})

    read_all(made.write())


@pytest.mark.parametrize("table", COLUMNS)
def test_no_missing_table_or_column_is_a_crash(tmp_path: Path, table: str) -> None:
    for number, column in enumerate([None, *COLUMNS[table].split()]):
        made = whole(tmp_path / f"{number}.sqlite")
        if column is None:
            del made.rows[table]
        elif len(made.columns[table]) > 1:
            made.columns[table].remove(column)
        read_all(made.write())


def test_hostile_cells_lose_only_their_row(tmp_path: Path) -> None:
    made = whole(tmp_path / "x.sqlite")
    for value in ("text", b"\xff", 1.5, None, -(2**63), 2**63 - 1):
        made.kernel("bad", value, 9, 1)  # type: ignore[arg-type]

    table = load(made.write()).table("kernels")

    assert len(table.rows) == 30
    assert "6 rows are left out" in table.note


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    path = whole(tmp_path / "x.sqlite").write()
    database(path, "UPDATE StringIds SET value = CAST(X'67ff' AS TEXT) WHERE value = 'gemm'")

    assert set(load(path).table("kernels").column("kernel")) == {"g�"}


def test_nothing_is_written_and_odd_names_are_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "a?b=c%41#d&mode=rw"
    path = database(whole(folder / "x ü'\".sqlite").write(), "PRAGMA journal_mode = WAL")
    before = path.read_bytes()
    for entry in (path, folder):
        entry.chmod(0o500 if entry is folder else 0o400)

    assert len(load(path).table("kernels").rows) == 30

    assert path.read_bytes() == before
    assert [entry.name for entry in folder.iterdir()] == [path.name]
    folder.chmod(0o700)


MS = 1_000_000


@pytest.mark.parametrize(
    ("start", "end", "took", "fact"),
    [
        (11 * MS, 3_400_000 * MS, [1] * 5 + [2] + [1] * 14, "bounded"),
        (0, 0, [1] * 19, "untimed"),
        (0, 12 * MS, [1] * 19, "untimed"),
        (40_000_000 * MS, 40_000_001 * MS, [1] * 19, "untimed"),
    ],
)
def test_times_that_cannot_be_true_are_in_no_sum(
    start: int, end: int, took: list[int], fact: str, tmp_path: Path
) -> None:
    made = NsysExport(tmp_path / "x_rank0.sqlite")
    made.nvtx(59, "train", MS // 2, 42 * MS)
    for at in range(20):
        began = (at * 2 + 1) * MS
        times = (start, end) if at == 5 else (began, began + MS)
        made.call(began - MS // 4, at)
        made.kernel("odd" if at == 5 else "gemm", *times, at)

    table = load(made.write()).table("kernels")

    assert table.column("duration") == [each * MS for each in took]
    assert len(table.losses) == 1
    assert table.losses[0].facts == {fact: 1}  # type: ignore[attr-defined]
    assert "odd" in table.losses[0]


def test_a_range_of_another_date_is_left_out(tmp_path: Path) -> None:
    made = NsysExport(tmp_path / "x_rank0.sqlite")
    for start in (MS, 2 * MS, 10**18):
        made.nvtx(59, "train", start, start + MS)
    made.nvtx(59, "train", MS, 10**17)

    spans = load(made.write())

    assert spans.end_ns.max() == 2 * MS
    assert [each.code for each in spans.warnings] == ["rows-left-out"]
