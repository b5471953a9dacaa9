"""Exports that Nsight Systems wrote: two H100, a T4, and CPU recordings of two old versions."""

import hashlib
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.nsys import read_nsys
from tests.places import SHARED_DATA

DATA = SHARED_DATA / "nsys"
H100, T4 = DATA / "h100_2gpu_1s.sqlite", DATA / "t4_power_iteration.sqlite"
CPU = DATA / "cpu_only"
VERSIONS = ("2022.4.2", "2023.4.4")

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the recorded exports are not here")

JOIN = "r.correlationId = k.correlationId AND (r.globalTid & -16777216) = k.globalPid"


def ask(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as database:
        return database.execute(sql).fetchall()


@pytest.mark.parametrize(
    ("path", "spans", "kernels", "copies", "syncs", "unlaunched"),
    [(H100, 16_782, 3_442, 904 + 22, 244, 1_810), (T4, 786, 3_689, 89, 90, 0)],
)
def test_every_range_and_every_row_is_there(
    path: Path, spans: int, kernels: int, copies: int, syncs: int, unlaunched: int
) -> None:
    run = load(path)

    assert len(run) == spans
    assert sorted(run.tables) == ["kernels", "memcpy", "sync"]
    table = run.table("kernels")
    assert [len(run.table(name).rows) for name in sorted(run.tables)] == [kernels, copies, syncs]
    assert (f"{unlaunched} kernels have no recorded launch" in table.note) is (unlaunched > 0)
    assert table.column("range").count(None) >= unlaunched
    assert [problem.text.partition(",")[0] for problem in run.warnings] == ["ranks are guessed"]


@pytest.mark.parametrize("path", [H100, T4], ids=["h100", "t4"])
def test_times_names_and_bytes_are_those_of_the_file(path: Path) -> None:
    run = load(path)
    table, copies = run.table("kernels"), run.table("memcpy")
    kernel = "CUPTI_ACTIVITY_KIND_KERNEL"

    (total, first, names), *_ = ask(
        path,
        f"SELECT SUM(end - start), MIN(start), COUNT(DISTINCT s.value) FROM {kernel} "
        "JOIN StringIds s ON s.id = demangledName",
    )
    (size,), *_ = ask(path, "SELECT SUM(bytes) FROM CUPTI_ACTIVITY_KIND_MEMCPY")
    if path == H100:
        size += ask(path, "SELECT SUM(bytes) FROM CUPTI_ACTIVITY_KIND_MEMSET")[0][0]
    (zero,), *_ = ask(path, "SELECT MIN(start) FROM NVTX_EVENTS WHERE end IS NOT NULL")
    (epoch,), *_ = ask(path, "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
    assert sum(table.column("duration")) == total  # type: ignore[arg-type]
    assert min(table.column("start")) == first - zero  # type: ignore[type-var]
    assert len(set(table.column("kernel"))) == names
    assert sum(copies.column("bytes")) == size  # type: ignore[arg-type]
    assert run.unix_ns == epoch + zero


@pytest.mark.parametrize("path", [H100, T4], ids=["h100", "t4"])
def test_the_range_of_every_seventh_kernel_agrees_with_a_query(path: Path) -> None:
    codes, texts = read_nsys(path, rank=0).table("kernels").texts("range")
    name = "COALESCE(text, (SELECT value FROM StringIds WHERE id = textId))"
    innermost = (
        f"SELECT {name} FROM NVTX_EVENTS n WHERE n.eventType IN (59, 60) AND "
        "n.globalTid = r.globalTid AND n.start <= r.start AND n.end > r.start "
        "ORDER BY n.start DESC, n.end LIMIT 1"
    )

    rows = ask(
        path,
        f"SELECT k.rowid % 7, CASE WHEN k.rowid % 7 = 0 THEN ({innermost}) END "
        f"FROM CUPTI_ACTIVITY_KIND_KERNEL k LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON {JOIN} "
        "ORDER BY k.start, k.rowid",
    )
    found = [texts[code] if code >= 0 else None for code in codes.tolist()]
    asked = [
        (mine, theirs and theirs.partition(", op_id = ")[0])
        for mine, (skip, theirs) in zip(found, rows, strict=True)
        if not skip
    ]
    assert [mine for mine, _ in asked] == [theirs for _, theirs in asked]
    assert sum(theirs is not None for _, theirs in asked) > 200


@pytest.mark.parametrize("path", [H100, T4], ids=["h100", "t4"])
def test_launches_and_their_threads_agree_with_a_query(path: Path) -> None:
    run = load(path)
    table = run.table("kernels")

    columns = "r.start - ?, r.end - r.start, r.globalTid & 16777215".replace(
        "?",
        str(run.unix_ns - ask(path, "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")[0][0]),
    )
    rows = ask(
        path,
        f"SELECT {columns} FROM CUPTI_ACTIVITY_KIND_KERNEL k "
        f"LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON {JOIN} ORDER BY k.globalPid, k.start, k.rowid",
    )
    names = ("launch", "launch duration", "thread")
    assert list(zip(*(table.column(name) for name in names), strict=True)) == rows
    assert set(table.column("graph")) == {None}
    idents = {thread.ident for thread in run.threads}
    assert idents & set(table.column("thread"))


@pytest.mark.parametrize("path", [H100, T4], ids=["h100", "t4"])
def test_spans_lie_inside_their_parents_on_one_thread(path: Path) -> None:
    run = load(path)

    keys = zip(run.rank.tolist(), run.id.tolist(), strict=True)
    row = {key: at for at, key in enumerate(keys)}
    children = np.flatnonzero(run.parent >= 0)
    parents = [row[int(run.rank[at]), int(run.parent[at])] for at in children.tolist()]
    assert (run.start_ns[parents] <= run.start_ns[children]).all()
    assert (run.end_ns[parents] >= run.end_ns[children]).all()
    assert (run.thread[parents] == run.thread[children]).all()
    assert len(children) > 0.2 * len(run)


def test_two_processes_are_two_ranks_with_a_device_each() -> None:
    run = load(H100)
    table = run.table("kernels")

    assert [(rank, head.pid, head.device) for rank, head in run.headers.items()] == [
        (0, 111, "cuda"),
        (1, 112, "cuda"),
    ]
    assert set(zip(table.column("rank"), table.column("device"), strict=True)) == {(0, 0), (1, 1)}
    assert np.bincount(run.rank).tolist() == [8_391, 8_391]
    assert {thread.name for thread in run.threads} == {"python3"}
    assert {head.versions["nsys"] for head in run.headers.values()} == {"2026.2.1.210"}


def test_sixteen_thousand_ranges_and_their_kernels_are_read_at_once() -> None:
    begin = time.process_time()
    load(H100).table("kernels")
    assert time.process_time() - begin < 2  # 0.15 s on an idle core


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("capture", [1, 2])
def test_the_wall_clock_agrees_with_what_the_program_read(version: str, capture: int) -> None:
    path = CPU / f"cpu_capture.{capture}.nsys-{version}.sqlite"
    run = load(path)

    read = [unix for (unix,) in ask(path, "SELECT int64Value FROM NVTX_EVENTS WHERE eventType=34")]
    late = run.start_ns + run.unix_ns - np.array(read)
    assert [span.name for span in run] == ["s"] * 5
    assert {span.kind for span in run} == {"mark"}
    assert np.abs(late).max() < 500_000


@pytest.mark.parametrize("version", VERSIONS)
def test_ranges_on_two_threads_of_old_versions(version: str) -> None:
    run = load(CPU / f"cpu_rl.nsys-{version}.sqlite")

    names = {span.id: span.name for span in run}
    assert [(s.name, names.get(-1 if s.parent is None else s.parent)) for s in run][1:] == [
        *[("iter", None), ("rollout", "iter"), ("reward", "iter"), ("update", "iter")] * 3,
        ("weight_sync", None),
        ("env_worker", None),
        ("done", None),
        ("default_domain", None),
    ]
    assert [s.step for s in run if s.name == "iter"] == [0, 1, 2]
    assert [s.step for s in run if s.name == "weight_sync"] == [7]
    assert [s.kind for s in run if s.name in {"weight_sync", "done"}] == ["stage", "mark"]
    assert len({s.thread for s in run}) == 2
    assert "no kernels: CUDA was not traced or not used" in [n.text for n in run.notes]
    assert {head.device for head in run.headers.values()} == {"cpu"}


@pytest.mark.parametrize("path", sorted(DATA.rglob("*.sqlite")), ids=lambda path: path.stem)
def test_every_export_is_read_and_left_as_it_was(path: Path) -> None:
    before = hashlib.sha256(path.read_bytes()).digest(), sorted(path.parent.iterdir())

    run = load(path)
    sizes = [len(run.table(name).rows) for name in run.tables]

    assert all(sizes)
    assert len(run) > 0
    assert before == (hashlib.sha256(path.read_bytes()).digest(), sorted(path.parent.iterdir()))
