"""Kernels of small exports, joined to their launches and to the ranges of those."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.table import Table
from tests.builders.nsys_export import EPOCH, PID, NsysExport, global_tid

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"


@pytest.fixture
def export(tmp_path: Path) -> NsysExport:
    """Step 3 with a stage from 100 to 500 and a region inside, 200 to 300, on the main thread."""
    made = NsysExport(tmp_path / "x_rank0.sqlite")
    made.own("step", "step", 0, 1000, step=3)
    made.own("actor_update", "stage", 100, 500, step=3)
    made.own("micro_batch", "region", 200, 300, step=3)
    return made


def told(table: Table) -> list[tuple[Any, ...]]:
    """Return kernel (or kind), stage, step and range of each row."""
    names = [column.name for column in table.columns]
    columns = [name for name in ("kernel", "kind", "stage", "step", "range") if name in names]
    return list(zip(*(table.column(name) for name in columns), strict=True))


def test_a_kernel_belongs_to_the_ranges_of_its_launch_not_of_its_run(export: NsysExport) -> None:
    export.nvtx(59, "aten::mm", 210, 230)
    launches = {"in mm": 220, "in batch": 290, "in stage": 300, "in step": 500, "outside": 1000}
    for number, (name, start) in enumerate(launches.items()):
        export.kernel(name, 5000 + number, 5010, number)
        export.call(start, number)

    table = load(export.write()).table("kernels")

    assert told(table) == [
        ("in mm", "actor_update", 3, "aten::mm"),
        ("in batch", "actor_update", 3, "micro_batch"),
        ("in stage", "actor_update", 3, "actor_update"),
        ("in step", None, 3, "step"),
        ("outside", None, None, None),
    ]
    assert table.column("start") == [5000, 5001, 5002, 5003, 5004]
    assert table.column("duration") == [10, 9, 8, 7, 6]
    assert set(table.column("device")) == {0}
    assert set(table.column("stream")) == {7}
    assert table.note == ""


def test_launches_are_matched_inside_their_process(export: NsysExport) -> None:
    export.own("critic_update", "stage", 100, 500, step=9, pid=200)
    for pid in (PID, 200):
        export.kernel(f"of {pid}", 600, 700, 1, pid=pid)
        export.call(150, 1, pid)

    spans = load(export.write())

    assert told(spans.table("kernels")) == [
        ("of 100", "actor_update", 3, "actor_update"),
        ("of 200", "critic_update", 9, "critic_update"),
    ]


def test_ranks_are_those_of_the_processes_and_rows_are_sorted(export: NsysExport) -> None:
    for pid, rank in ((PID, 1), (200, 0)):
        export.said("rlprof.rank", rank, pid=pid)
        for start in (900, 700, 800):
            export.kernel("k", start, start + 5, start, pid=pid)

    table = load(export.write()).table("kernels")

    assert table.column("rank") == [0, 0, 0, 1, 1, 1]
    assert table.column("start") == [700, 800, 900] * 2


def test_threads_that_mark_nothing_borrow_from_the_one_that_trains(export: NsysExport) -> None:
    export.own("prefetch", "region", 100, 900, step=4, tid=150)
    export.nvtx(59, "backward", 240, 260, globalTid=global_tid(PID, 160))
    for number, (tid, start) in enumerate(((160, 250), (160, 400), (150, 250), (170, 2000))):
        export.kernel(f"{number}", 5000 + number, 5010, number)
        export.call(start, number, PID, tid)

    spans = load(export.write())
    table = spans.table("kernels")

    assert told(table) == [
        ("0", "actor_update", 3, "backward"),
        ("1", "actor_update", 3, "actor_update"),
        ("2", None, 4, "prefetch"),
        ("3", None, None, None),
    ]
    assert table.note.startswith("2 kernels were launched by threads without marks")
    assert [s.step for s in spans if s.name == "backward"] == [3]


def test_kernels_without_a_recorded_launch_are_there_and_counted(export: NsysExport) -> None:
    export.kernel("known", 600, 610, 1)
    export.kernel("orphan", 620, 630, 2)
    export.kernel("nameless", 640, 650, 3, correlationId=None)
    export.call(150, 1)
    export.call(150, 2, pid=999)
    export.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=150, globalTid=global_tid())

    table = load(export.write()).table("kernels")

    assert told(table)[1:] == [("orphan", None, None, None), ("nameless", None, None, None)]
    assert table.note.startswith("2 kernels have no recorded launch")


def test_of_two_calls_with_one_correlation_the_first_is_the_launch(export: NsysExport) -> None:
    export.kernel("k", 600, 610, 1)
    export.call(450, 1)
    export.call(250, 1)

    assert told(load(export.write()).table("kernels")) == [("k", "actor_update", 3, "micro_batch")]


def test_graph_replays_are_counted(export: NsysExport) -> None:
    export.kernel("in graph", 600, 610, 1, graphNodeId=77)
    export.kernel("plain", 620, 630, 2, graphNodeId=None)
    for number in (1, 2):
        export.call(150, number)
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=700, end=800, graphId=5)

    note = load(export.write()).table("kernels").note

    assert "1 kernels ran in CUDA graph replays and belong to the stage of the launch" in note
    assert "1 CUDA graph replays: kernels inside CUDA graphs aren't visible" in note


def test_replays_are_numbered_by_their_beginning_in_each_rank(tmp_path: Path) -> None:
    export = NsysExport(tmp_path / "x.sqlite")
    for pid, rank, numbers in ((PID, 0, (4, 9, 5)), (200, 1, (9, 5, 4))):
        export.said("rlprof.rank", rank, pid=pid)
        for at, number in ((700, 1), (600, 0), (610, 0), (800, 1), (900, 2)):
            export.kernel("in graph", at, at + 5, numbers[number], pid=pid, graphNodeId=1)
        export.kernel("plain", 650, 660, 9, pid=pid)
        export.call(150, 9, pid)  # the others' kernels have no recorded launch

    table = load(export.write()).table("kernels")

    assert table.column("graph") == [0, 0, None, 1, 1, 2] * 2


def test_a_name_falls_back_to_the_short_one_then_to_none(export: NsysExport) -> None:
    export.kernel("long", 600, 610, 1)
    export.kernel("elementwise", 620, 630, 2, demangledName=999)
    export.kernel("gone", 640, 650, 3, demangledName=None, shortName="x")

    table = load(export.write()).table("kernels")

    assert table.column("kernel") == ["long", "elem", None]


def test_rows_that_cannot_be_true_are_left_out_and_counted(export: NsysExport) -> None:
    export.kernel("kept", 600, 610, 1)
    export.kernel("backwards", 620, 615, 2)
    export.kernel("text", "soon", 630, 3)  # type: ignore[arg-type]
    export.kernel("far", 2**61, 2**62, 4)
    export.kernel("nobody", 640, 650, 5, globalPid=None)
    export.kernel("endless", 640, None, 6)  # type: ignore[arg-type]

    table = load(export.write()).table("kernels")

    # Its only process is that of the report.
    assert table.column("kernel") == ["kept", "nobody"]
    assert table.note.startswith("4 rows are left out: their times or their process are invalid")


def test_columns_that_are_not_there_read_as_not_known(export: NsysExport) -> None:
    export.kernel("k", 600, 610, 1)
    for name in ("deviceId", "streamId", "correlationId", "demangledName", "graphNodeId"):
        export.columns[KERNELS].remove(name)
    export.columns["NVTX_EVENTS"].remove("text")

    table = load(export.write()).table("kernels")

    assert list(table.rows) == [(0, None, None, "k", 600, 10, *(None,) * 7)]


def test_launches_tell_their_length_and_their_thread(export: NsysExport) -> None:
    for number, took in ((1, 25), (2, None), (3, -4)):
        export.kernel("k", 5000 + number, 6000, number)
        export.call(210, number, tid=None if number == 1 else 177, took=took)
    export.kernel("unlaunched", 5010, 6000, 4)

    spans = load(export.write())

    table = spans.table("kernels")
    assert table.column("launch") == [210, 210, 210, None]
    assert table.column("launch duration") == [25, None, None, None]
    assert table.column("thread") == [spans.threads[0].ident, 177, 177, None]
    assert table.column("graph") == [None] * 4


def test_tables_that_are_not_there_are_not_offered_and_their_absence_is_noted(
    export: NsysExport,
) -> None:
    spans = load(export.write())

    assert dict(spans.tables) == {}
    assert "no kernels: CUDA was not traced or not used" in [n.text for n in spans.notes]
    with pytest.raises(TraceError, match="has no table 'kernels'"):
        spans.table("kernels")


def test_without_nvtx_the_axis_begins_with_the_first_activity(tmp_path: Path) -> None:
    made = NsysExport(tmp_path / "x_rank2.sqlite")
    made.kernel("k", 620, 630, 1)
    made.kernel("first", 600, 610, 1)

    spans = load(made.write())

    assert (len(spans), spans.ranks, spans.unix_ns) == (0, (2,), EPOCH + 600)
    assert spans.table("kernels").column("start") == [0, 20]
    assert "no NVTX ranges: NVTX was not traced or not used" in [n.text for n in spans.notes]


@pytest.mark.parametrize("seed", range(5))
def test_the_join_agrees_with_brute_force(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    made = NsysExport(tmp_path / "x_rank0.sqlite")
    made.own("step", "step", -1, 10_000, step=2)
    starts = random.permutation(2000)[:40].tolist()
    ranges = [(start, start + int(random.integers(1, 400)), f"r{start}") for start in starts]
    for start, end, name in ranges:
        made.own(name, "stage", start, end, step=2)
    moments = random.integers(0, 2500, 60).tolist()
    for number, moment in enumerate(moments):
        made.kernel(f"{number}", 3000 + number, 4000, number)
        made.call(moment, number)

    table = load(made.write()).table("kernels")

    expected = [
        max(((start, name) for start, end, name in ranges if start <= at < end), default=(0, None))[
            1
        ]
        for at in moments
    ]
    assert table.column("stage") == expected
    assert set(table.column("step")) == {2}
