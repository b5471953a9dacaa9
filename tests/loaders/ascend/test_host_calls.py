"""Calls of the host in Ascend captures: the same rows from texts and from databases."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.device.work import device_work
from lightning_rlprof.analysis.operators import operators
from lightning_rlprof.loaders.ascend.reader import read_ascend
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.run_directory import rank_directory
from lightning_rlprof.tables.intervals import SLACK_NS
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
from tests.builders.ascend_recorded import ABSENT, CAPTURES, DATA, DATABASE, TEXT
from tests.builders.runs import Row, header, write_rank

recorded = pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)
AUTOGRAD = 4_090

# Category, name, thread, start, end, sequence number, thread of the forward pass.
CALLS = [
    ("cpu_op", "ProfilerStep#7", MAIN, 0, 90_000, None, None),
    ("python_function", "main.py(3): train", MAIN, 1_000, 80_000, None, None),
    ("python_function", "nn.Module: Linear_0", MAIN, 2_000, 20_000, None, None),
    ("cpu_op", "aten::addmm", MAIN, 2_000, 18_000, 11, 0),
    ("cpu_op", "aten::linear", MAIN, 2_000, 20_000, None, None),
    ("enqueue", "Enqueue", MAIN, 5_000, 6_000, None, None),
    ("dequeue", "Dequeue@aclnnAddmm", QUEUE, 7_000, 9_000, None, None),
    ("cann", "aclnnAddmm", QUEUE, 7_500, 8_500, None, None),
    ("cpu_op", "AddmmBackward0", AUTOGRAD, 30_000, 40_000, 11, 1),
    ("cann", "aclrtSynchronizeStream", MAIN, 50_000, 60_000, None, None),
]
EXPECTED = [
    # kind, name, thread, start, duration, place of the parent, place of the forward operator
    ("python", "main.py(3): train", MAIN, 1_000, 79_000, None, None),
    ("module", "Linear_0", MAIN, 2_000, 18_000, 0, None),
    ("operator", "aten::linear", MAIN, 2_000, 18_000, 1, None),
    ("operator", "aten::addmm", MAIN, 2_000, 16_000, 2, None),
    ("runtime", "Enqueue", MAIN, 5_000, 1_000, 3, None),
    ("runtime", "aclrtSynchronizeStream", MAIN, 50_000, 10_000, 0, None),
    ("runtime", "Dequeue@aclnnAddmm", QUEUE, 7_000, 2_000, None, None),
    ("runtime", "aclnnAddmm", QUEUE, 7_500, 1_000, None, None),
    ("operator", "AddmmBackward0", AUTOGRAD, 30_000, 10_000, None, 3),
]


def text(parent: Path) -> Path:
    made = TraceEvents()
    made.mark("step", 0, 100_000)
    made.mark("actor_update", 1_500, 45_000)
    for category, name, thread, start, end, sequence, forward in CALLS:
        if category == "cann":
            args: dict[str, Any] = {"level": "acl", "id": name}
            made.row(f"AscendCL@{name}", made.pid("CANN"), thread, start, end, args=args)
        else:
            args = {"Sequence number": -1 if sequence is None else sequence}
            args |= {"Fwd thread id": forward or 0}
            made.row(name, PID, thread, start, end, cat=category, args=args)
    made.task("Mul", 60_000, 61_000)
    made.write(capture_folder(parent) / "trace_view.json")
    return parent


def database(parent: Path) -> Path:
    rows = DatabaseRows()
    rows.mark("step", 0, 100_000)
    rows.mark("actor_update", 1_500, 45_000)
    types = {"cpu_op": 50_001, "python_function": 50_003, "enqueue": 50_002, "dequeue": 50_002}
    for category, name, thread, start, end, sequence, forward in CALLS:
        times = (EPOCH + start, EPOCH + end)
        cells: dict[str, Any] = {"globalTid": tid(thread), "name": name}
        if category == "cann":
            rows.add("CANN_API", startNs=times[0], endNs=times[1], type=20_000, **cells)
        else:
            cells |= {"sequenceNumber": sequence, "fwdThreadId": forward, "type": types[category]}
            rows.add("PYTORCH_API", startNs=str(times[0]), endNs=str(times[1]), **cells)
    rows.write(capture_folder(parent) / "ascend_pytorch_profiler_0.db")
    return parent


both = pytest.mark.parametrize("made", [text, database])


def rows_of(path: Path) -> list[dict[str, Any]]:
    table = load(path).table("calls")
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


@both
def test_calls_come_by_thread_and_start_with_what_is_around_them(tmp_path: Path, made: Any) -> None:
    rows = rows_of(made(tmp_path))

    places = {row["id"]: at for at, row in enumerate(rows)}
    assert list(places) == [*range(1, len(rows) + 1)]
    found = [
        (
            *(row[name] for name in ("kind", "name", "thread", "start", "duration")),
            *(places.get(row[name]) for name in ("parent", "forward")),
        )
        for row in rows
    ]
    assert found == EXPECTED


@both
def test_stage_and_step_are_those_around_the_start(tmp_path: Path, made: Any) -> None:
    found = {row["name"]: (row["stage"], row["step"]) for row in rows_of(made(tmp_path))}

    assert found["main.py(3): train"] == (None, 1)
    assert found["aten::addmm"] == found["AddmmBackward0"] == ("actor_update", 1)
    assert found["aclrtSynchronizeStream"] == (None, 1)


def test_numbers_of_a_second_capture_count_on(tmp_path: Path) -> None:
    for at in range(2):
        (tmp_path / f"{at}").mkdir()
        text(tmp_path / f"{at}")
        for events in (tmp_path / "1").rglob("trace_view.json"):  # some time later
            events.write_text(events.read_text().replace('"17364088830', '"17364088831'))

    rows = rows_of(tmp_path)

    half = len(rows) // 2
    assert [row["id"] for row in rows[:half]] == [*range(1, half + 1)]
    for name in ("id", "parent", "forward"):
        first, second = ([row[name] for row in part] for part in (rows[:half], rows[half:]))
        assert second == [None if each is None else each + half + 1 for each in first]


def test_a_run_of_our_own_tells_stage_and_step_where_the_capture_does_not(tmp_path: Path) -> None:
    rows = [Row("critic_update", "stage", 4, 100, 60_000), Row("step", "step", 4, 0, 90_000)]
    write_rank(tmp_path, header(1, 2, unix_ns=EPOCH), rows)
    made = TraceEvents()
    made.operator("aten::mul", 2_000, 3_000)
    made.write(capture_folder(rank_directory(tmp_path, 1) / "x") / "trace_view.json")

    (row,) = rows_of(tmp_path)

    assert (row["rank"], row["stage"], row["step"], row["start"]) == (1, "critic_update", 4, 2_000)


def test_calls_that_cannot_be_true_are_none(tmp_path: Path) -> None:
    rows = DatabaseRows()
    for start, end in ((EPOCH, EPOCH + 5), (EPOCH + 5, EPOCH), (0, 5), (EPOCH, 2**62)):
        cells = {"globalTid": tid(MAIN), "type": 50_001, "sequenceNumber": -1}
        rows.add("PYTORCH_API", startNs=str(start), endNs=str(end), name="aten::mul", **cells)
    rows.mark("step", 0, 9)
    path = rows.write(capture_folder(tmp_path) / "ascend_pytorch_profiler_0.db")

    assert read_ascend(path).table("calls").column("duration") == [5]


def test_without_torchs_calls_those_of_cann_are_told(tmp_path: Path) -> None:
    rows = DatabaseRows()
    times = {"startNs": EPOCH + 5, "endNs": EPOCH + 9}
    rows.add("CANN_API", name="aclrtMemcpy", globalTid=tid(QUEUE), type=20_000, **times)
    rows.task("Mul", 10, 20, connection=1)
    path = rows.write(capture_folder(tmp_path) / "ascend_pytorch_profiler_0.db")

    table = read_ascend(path).table("calls")

    found = [table.column(name) for name in ("kind", "name", "thread", "duration", "parent")]
    assert found == [["runtime"], ["aclrtMemcpy"], [QUEUE], [4], [None]]


@recorded
@pytest.mark.parametrize("folder", CAPTURES, ids=lambda folder: folder.name)
def test_real_calls_lie_in_their_parents(folder: Path) -> None:
    table = read_ascend(folder).table("calls")
    columns = [table.column(each) for each in ("thread", "start", "duration", "parent", "kind")]

    inside = 0
    for thread, start, length, parent, _ in zip(*columns, strict=True):
        if parent is not None:
            around = [column[parent - 1] for column in columns]
            assert around[0] == thread
            assert around[4] != "runtime"
            assert around[1] <= start
            assert start + length <= around[1] + around[2] + SLACK_NS
            inside += 1
    assert inside > 2_400


@recorded
def test_real_texts_and_databases_tell_the_same_calls() -> None:
    counts = []
    for folder in (TEXT[0], DATABASE):
        table = read_ascend(folder).table("calls")
        named = zip(table.column("kind"), table.column("name"), strict=True)
        # CANN's calls are not the same in two runs, and Python's have line numbers of the tools.
        counts.append(Counter(each for each in named if each[0] in ("operator", "module")))
    assert counts[0] == counts[1]


@recorded
@pytest.mark.parametrize("folder", CAPTURES, ids=lambda folder: folder.name)
def test_operators_of_a_real_capture_take_all_of_the_devices_time(folder: Path) -> None:
    run = read_ascend(folder)
    work = device_work(run)

    table = operators(run)

    assert sum(table.column("device self")) == int(work.duration.sum())
    rows = {row[0]: row for row in table.rows}
    assert rows["HcclAllreduce"][6] == 4
    assert "ConvolutionBackward0" in rows
    assert rows["unattributed"][2] < int(work.duration.sum()) / 50


@pytest.mark.parametrize("start", [-(2**63) + 5, 0, 2**63 - 1])
def test_a_call_at_no_time_launches_at_none_and_is_no_row(tmp_path: Path, start: int) -> None:
    rows = DatabaseRows()
    rows.mark("step", 0, 100_000)
    rows.task("Mul", 1_000, 2_000, connection=7)
    rows.add("CANN_API", connectionId=7, startNs=start, endNs=start, globalTid=tid(MAIN), name="x")
    rows.write(capture_folder(tmp_path) / "ascend_pytorch_profiler_0.db")
    table = load(tmp_path).table("kernels")
    assert [table.column(name)[0] for name in ("launch", "thread")] == [None, None]
    assert len(load(tmp_path).table("calls").rows) == 0
