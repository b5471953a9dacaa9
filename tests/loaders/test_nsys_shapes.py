"""Exports whose tables have other names or lack columns are read by what they contain."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from tests.builders.nsys_export import EPOCH, NsysExport, global_pid, global_tid

PIDS = (100, 200)


def export(path: Path, *, shared_numbers: bool = False) -> Path:
    """Write two processes, each with a range and five kernels that it launched."""
    made = NsysExport(path, epoch=EPOCH)
    for place, pid in enumerate(PIDS):
        made.own("step", "step", 0, 1_000, step=1, pid=pid)
        for number in range(5):
            start, code = number * 150, number + (0 if shared_numbers else 100 * place)
            call = {"globalTid": global_tid(pid), "correlationId": code}
            made.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=start + 5, **call)
            named = {"demangledName": made.string("gemm"), "globalPid": global_pid(pid)}
            where = {"deviceId": place, "streamId": 7, "correlationId": code}
            times = {"start": start + 10, "end": start + 110}
            made.add("CUPTI_ACTIVITY_KIND_KERNEL", **times, **where, **named)
    return made.write()


def change(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)
    return path


def facts(run: Spans) -> tuple[object, ...]:
    kernels = run.table("kernels")
    names = ("rank", "device", "start", "duration", "kernel", "launch", "step")
    return [*run], [kernels.column(name) for name in names]


def tables_of(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return [name for (name,) in database.execute("SELECT name FROM sqlite_master")]


@pytest.mark.parametrize("version", [2, 3, 11])
def test_tables_with_a_version_in_their_names_are_read_alike(tmp_path: Path, version: int) -> None:
    expected = facts(load(export(tmp_path / "a.sqlite")))
    path = export(tmp_path / "b.sqlite")
    names = [name for name in tables_of(path) if not name.startswith("sqlite_")]
    change(path, *(f'ALTER TABLE "{name}" RENAME TO "{name}_V{version}"' for name in names))

    assert facts(load(path)) == expected


def test_of_two_versions_the_newer_is_read_and_the_plain_name_first(tmp_path: Path) -> None:
    kernel = "CUPTI_ACTIVITY_KIND_KERNEL"
    copy = "CREATE TABLE {0}_V{1} AS SELECT * FROM {0}_V10 WHERE 0"
    path = export(tmp_path / "a.sqlite")
    change(path, f"ALTER TABLE {kernel} RENAME TO {kernel}_V10", copy.format(kernel, 9))
    assert len(load(path).table("kernels").rows) == 10

    change(path, f"CREATE TABLE {kernel} AS SELECT * FROM {kernel}_V10 LIMIT 3")
    assert len(load(path).table("kernels").rows) == 3


@pytest.mark.parametrize(
    "change_of_it",
    ["ALTER TABLE {} DROP COLUMN globalPid", "UPDATE {} SET globalPid = NULL"],
)
def test_rows_without_a_process_belong_to_that_of_their_call(
    tmp_path: Path, change_of_it: str
) -> None:
    expected = facts(load(export(tmp_path / "a.sqlite")))
    path = change(export(tmp_path / "b.sqlite"), change_of_it.format("CUPTI_ACTIVITY_KIND_KERNEL"))

    assert facts(load(path)) == expected


def test_where_two_processes_share_a_number_no_process_is_guessed(tmp_path: Path) -> None:
    path = export(tmp_path / "a.sqlite", shared_numbers=True)
    change(path, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = NULL")

    kernels = load(path).table("kernels")

    assert (len(kernels.rows), len(kernels.losses)) == (0, 1)


def test_the_only_process_of_a_report_has_all_its_rows(tmp_path: Path) -> None:
    path = export(tmp_path / "a.sqlite")
    tables = ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME")
    other = [f"DELETE FROM {table} WHERE globalTid = {global_tid(200)}" for table in tables]
    change(path, *other, "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN globalPid")

    run = load(path)

    assert (run.ranks, len(run.table("kernels").rows)) == ((0,), 10)
