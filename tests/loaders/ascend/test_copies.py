"""Copies of Ascend captures, as texts and databases tell them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.device.breakdown import breakdown
from lightning_rlprof.loaders.ascend.reader import read_ascend
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.run_directory import rank_directory
from tests.builders.ascend_output import (
    EPOCH,
    MAIN,
    PID,
    QUEUE,
    DatabaseRows,
    TraceEvents,
    capture_folder,
    tid,
)
from tests.builders.ascend_recorded import (
    ABSENT,
    CAPTURES,
    DATA,
    DATABASE,
    ask,
    column,
)
from tests.builders.runs import Row, header, write_rank

recorded = pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows without what is not known, and without the rank."""
    table = load(path).table("memcpy")
    names = [column.name for column in table.columns]
    rows = (dict(zip(names, row, strict=True)) for row in table.rows)
    return [{k: v for k, v in row.items() if v is not None and k != "rank"} for row in rows]


def copy(rows: DatabaseRows, number: int, start: int, end: int, kind: str = "MEMCPY_ASYNC") -> None:
    times = {"startNs": EPOCH + start, "endNs": EPOCH + end}
    place = {"deviceId": 0, "streamId": 2, "connectionId": 900 + number}
    rows.add("TASK", globalTaskId=number, taskType=kind, **times, **place)


def database(parent: Path, rows: DatabaseRows) -> Path:
    rows.mark("step", 0, 100_000)
    rows.mark("actor_update", 1_000, 40_000)
    output = capture_folder(parent, metadata={"rlprof_window": "step-000003"})
    rows.write(output / "ascend_pytorch_profiler_0.db")
    return parent


def test_a_database_tells_bytes_and_direction_and_the_launch_tells_the_stage(
    tmp_path: Path,
) -> None:
    rows = DatabaseRows()
    copy(rows, 7, 60_000, 60_500)
    copy(rows, 5, 50_000, 50_900, "PCIE_DMA_SQE")
    rows.add("MEMCPY_INFO", globalTaskId=7, size=4_096, memcpyOperation=2)
    rows.add("ENUM_MEMCPY_OPERATION", id=2, name="device to host")
    cells = {"startNs": EPOCH + 2_000, "endNs": EPOCH + 2_300, "globalTid": tid(MAIN)}
    rows.add("CANN_API", connectionId=907, **cells)

    place = {"device": 0, "stream": 2}
    assert rows_of(database(tmp_path, rows)) == [
        {**place, "kind": "PCIe", "start": 50_000, "duration": 900},
        {
            **{**place, "kind": "DtoH", "bytes": 4_096, "start": 60_000, "duration": 500},
            **{
                "stage": "actor_update",
                "step": 3,
                "launch": 2_000,
                "launch duration": 300,
                "thread": MAIN,
            },
        },
    ]


# Name, thread, start, end, what they share.
QUEUED = [
    ("Enqueue", MAIN, 9_000, 9_040, 9_884),  # of that number, but later
    ("Enqueue", MAIN, 2_000, 2_040, 9_884),
    ("Enqueue", MAIN, 6_900, 6_800, 9_887),  # ends before it begins
    ("Dequeue@acl_memcpy", QUEUE, 8_600, 8_900, 9_887),
    ("Dequeue@acl_memcpy", QUEUE, 5_000, 5_500, 9_884),
    ("Dequeue@acl_memcpy", QUEUE, 6_000, 6_500, 9_885),  # nobody handed it over
    ("Dequeue@acl_memcpy", QUEUE, 7_000, 7_500, None),  # not numbered
    ("Dequeue@acl_memcpy", MAIN, 8_000, 8_500, 9_884),  # another thread
]
LAUNCHES = (5_100, 6_100, 7_100, 8_100, 8_650)


def queued_text(parent: Path) -> Path:
    made = TraceEvents()
    for number, at in enumerate(LAUNCHES):
        times = (60_000 + number, 60_001 + number)
        made.task("MEMCPY_ASYNC", *times, kind="PCIE_DMA_SQE", cann=(at, QUEUE))
    for name, thread, start, end, number in QUEUED:
        made.row(
            name, PID, thread, start, end, cat=name[:7].lower(), args={"correlation_id": number}
        )
    made.mark("step", 0, 100_000)
    made.write(capture_folder(parent) / "trace_view.json")
    return parent


def queued_database(parent: Path) -> Path:
    rows = DatabaseRows()
    for number, at in enumerate(LAUNCHES):
        copy(rows, number, 60_000 + number, 60_001 + number)
        times = {"startNs": EPOCH + at, "endNs": EPOCH + at + 50}
        rows.add("CANN_API", connectionId=900 + number, globalTid=tid(QUEUE), **times)
    for place, (name, thread, start, end, number) in enumerate(QUEUED):
        times = {"startNs": EPOCH + start, "endNs": EPOCH + end}
        cells = {"globalTid": tid(thread), "connectionId": place, "type": 50_002}
        rows.add("PYTORCH_API", name=name, **times, **cells)
        rows.add("CONNECTION_IDS", id=place, connectionId=number)
    return database(parent, rows)


@pytest.mark.parametrize("made", [queued_text, queued_database])
def test_a_copy_of_the_queue_belongs_to_the_call_that_handed_it_over(
    tmp_path: Path, made: Any
) -> None:
    found = rows_of(made(tmp_path))
    assert [(row["launch"], row["thread"]) for row in found] == [
        (2_000, MAIN),
        *((at, QUEUE) for at in LAUNCHES[1:]),
    ]
    lengths = [row.get("launch duration") for row in found]
    assert lengths == ([None] * 5 if made is queued_text else [40, 50, 50, 50, 50])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("host to host", "HtoH"), ("host to device", "HtoD"), ("device to host ex", "DtoH")),
        *(("device to device", "DtoD"), ("addr device to device", "DtoD"), ("other", None)),
    ],
)
def test_directions_are_as_everywhere(tmp_path: Path, name: str, kind: str | None) -> None:
    rows = DatabaseRows()
    copy(rows, 1, 10, 20)
    rows.add("MEMCPY_INFO", globalTaskId=1, size=-1, memcpyOperation=65_535)
    rows.add("ENUM_MEMCPY_OPERATION", id=65_535, name=name)

    (row,) = rows_of(database(tmp_path, rows))

    assert (row.get("kind"), row.get("bytes")) == (kind, None)


def test_tasks_that_are_parts_of_others_or_cannot_be_true_are_none(tmp_path: Path) -> None:
    rows = DatabaseRows()
    times = ((10, 20), (30, 40), (50, 60), (90, 80), (0, 2**61), (70, 75))
    for number, (start, end) in enumerate(times):
        copy(rows, number, start, end, "SDMA_SQE")
    rows.add("COMMUNICATION_TASK_INFO", globalTaskId=0)
    rows.add("COMPUTE_TASK_INFO", globalTaskId=1, name="Mul")
    copy(rows, 9, 100, 110, "SDMA")  # of a collective's plan

    found = [(row["start"], row["kind"]) for row in rows_of(database(tmp_path, rows))]

    assert found == [(50, "DtoD"), (70, "DtoD")]


def trace(*, marked: bool = True) -> TraceEvents:
    made = TraceEvents()
    if marked:
        made.mark("step", 0, 100_000)
        made.mark("actor_update", 1_000, 40_000)
    name, told = "MEMCPY_ASYNC", {"size(B)": 512, "operation": "host to device"}
    made.task("Mul", 41_000, 42_000)
    made.task(name, 60_000, 60_700, kind="SDMA_SQE", stream=3)
    made.task(name, 50_000, 50_700, kind="PCIE_DMA_SQE", torch=(3_000, MAIN), **told)
    made.task(name, 70_000, 70_700, kind="PCIE_DMA_SQE", cann=(90_000, QUEUE))
    made.collective("hcom_allReduce__586_0_1", 80_000, 80_900)
    return made


def test_a_trace_tells_the_engine_and_newer_ones_bytes_and_direction(tmp_path: Path) -> None:
    trace().write(capture_folder(tmp_path) / "trace_view.json")

    place = {"device": 0, "duration": 700}
    assert rows_of(tmp_path) == [
        {
            **{**place, "stream": 2, "kind": "HtoD", "bytes": 512, "start": 50_000},
            **{"stage": "actor_update", "step": 1, "launch": 3_000, "thread": MAIN},
        },
        {**place, "stream": 3, "kind": "DtoD", "start": 60_000},
        {
            **place,
            "stream": 2,
            "kind": "PCIe",
            "start": 70_000,
            "launch": 90_000,
            "step": 1,
            "thread": QUEUE,
        },
    ]
    kernels = load(tmp_path).table("kernels")
    assert kernels.column("kernel") == ["Mul", "hcom_allReduce__586_0_1"]


def test_a_run_of_our_own_tells_stage_and_step_where_the_capture_does_not(tmp_path: Path) -> None:
    rows = [Row("critic_update", "stage", 4, 100, 60_000), Row("step", "step", 4, 0, 90_000)]
    write_rank(tmp_path, header(1, 2, unix_ns=EPOCH), rows)
    output = capture_folder(rank_directory(tmp_path, 1) / "x")
    trace(marked=False).write(output / "trace_view.json")

    table = load(tmp_path).table("memcpy")

    found = [table.column(name)[0] for name in ("rank", "stage", "step", "start", "launch")]
    assert found == [1, "critic_update", 4, 50_000, 3_000]


def test_a_link_to_a_capture_beside_it_is_no_other_capture(tmp_path: Path) -> None:
    write_rank(tmp_path, header(0), [Row("step", "step", 1, 0, 9)])
    output = queued_text(rank_directory(tmp_path, 0) / "x") / "latest_ascend_pt"
    (real,) = output.parent.glob("*_ascend_pt")
    output.symlink_to(real)
    (rank_directory(tmp_path, 0) / "elsewhere_ascend_pt").symlink_to(real)
    assert len(load(tmp_path).table("memcpy").rows) == len(LAUNCHES)
    moved = real.rename(tmp_path / "moved_ascend_pt")
    for link in (output, rank_directory(tmp_path, 0) / "elsewhere_ascend_pt"):
        link.unlink()
        link.symlink_to(moved)
    assert len(load(tmp_path).table("memcpy").rows) == len(LAUNCHES)


def test_a_capture_without_copies_says_that_there_were_none(tmp_path: Path) -> None:
    made = TraceEvents()
    made.mark("step", 0, 9_000)
    made.task("Mul", 1_000, 2_000)
    made.write(capture_folder(tmp_path) / "trace_view.json")

    run = load(tmp_path)

    assert (len(run.table("memcpy").rows), run.table("memcpy").note) == (0, "")
    assert breakdown(run).column("exposed memcpy") == [0, 0]


@recorded
def test_both_formats_tell_all_copies_of_the_device() -> None:
    query = (
        "SELECT COUNT(*), SUM(endNs - startNs) FROM TASK "
        "WHERE taskType = (SELECT id FROM STRING_IDS WHERE value = 'MEMCPY_ASYNC')"
    )
    copies = [read_ascend(folder).table("memcpy") for folder in CAPTURES]

    streams = [Counter(table.column("stream")) for table in copies]
    assert streams == [{2: 22, 3: 2}] * 3
    of_database = copies[CAPTURES.index(DATABASE)]
    assert ask(query) == [(len(of_database.rows), sum(of_database.column("duration")))]
    assert [Counter(table.column("kind")) for table in copies[:2]] == [{"PCIe": 14, "DtoD": 10}] * 2
    assert all(None not in table.column("launch") for table in copies)


@recorded
@pytest.mark.parametrize("folder", CAPTURES, ids=lambda folder: folder.name)
def test_both_formats_tell_the_operators_that_copied(folder: Path) -> None:
    run = read_ascend(folder)
    names = ("name", "kind", "thread", "start", "duration")
    operators = [
        (name, thread, start, start + duration)
        for name, kind, thread, start, duration in zip(
            *(column(run, "calls", each) for each in names), strict=True
        )
        if kind == "operator"
    ]
    found = Counter(
        [name for name, by, start, end in operators if by == thread and start <= launch < end][-1]
        for thread, launch in zip(
            column(run, "memcpy", "thread"), column(run, "memcpy", "launch"), strict=True
        )
    )
    assert found == {
        **{"ReduceSum": 10, "aclnnInplaceCopy": 10},
        **{"acl_memcpy_host_to_device": 2, "aclnnDropoutGenMaskV2": 2},
    }
