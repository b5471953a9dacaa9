"""Captures that are cut off, damaged, not analysed, or made to hurt."""

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.reader import read_ascend
from lightning_rlprof.tables.spans import Spans
from tests.builders.ascend_output import EPOCH, MAIN, DatabaseRows, TraceEvents, capture_folder, us


def whole() -> TraceEvents:
    trace = TraceEvents()
    trace.mark("step", 0, 90_000)
    trace.mark("actor_update", 1_000, 40_000, shadow=(50_000, 60_000))
    trace.operator("aten::mul", 2_000, 3_000)
    trace.module("Linear_0", 2_000, 9_000)
    for at in range(8):
        trace.task("Mul", 80_000 + at, 80_001 + at, torch=(3_000, MAIN), cann=(3_100, MAIN))
    trace.collective("hcom_send", 81_000, 82_000)
    return trace


def every_table(run: Spans) -> dict[str, int]:
    """Read all there is: nothing of it may raise."""
    return {name: len(run.table(name).rows) for name in run.tables}


def test_a_trace_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    path = whole().write(capture_folder(tmp_path) / "trace_view.json")
    data = path.read_bytes()
    kernels = []
    for cut in range(2_000, len(data), 131):
        path.write_bytes(data[:cut])
        run = read_ascend(tmp_path)
        assert any("truncated" in problem.text for problem in run.warnings)
        assert run.statuses == {0: None}
        kernels.append(every_table(run)["kernels"])
    assert kernels == sorted(kernels)
    assert kernels[-1] == 8  # the name of the collective's lane stands last


def test_the_names_of_processes_may_be_lost_and_kernels_stay(tmp_path: Path) -> None:
    trace = whole()
    path = trace.write(capture_folder(tmp_path) / "trace_view.json")
    trace.events = [event for event in trace.events if event["ph"] != "M"]
    path.write_text(json.dumps(trace.events))

    assert every_table(read_ascend(tmp_path))["kernels"] == 8


HOSTILE: list[Any] = [
    None,
    7,
    "text",
    [],
    {},
    {"ph": "X"},
    {"ph": "X", "name": ["a"], "ts": "1.000", "args": {"event_type": "marker"}},
    {"ph": "X", "name": "a", "ts": {}, "dur": [], "args": {"event_type": "marker"}},
    {"ph": "X", "name": "a", "ts": "1e400", "dur": 1, "args": {"event_type": "marker"}},
    {"ph": "X", "name": "a", "ts": "NaN", "dur": 1, "args": {"event_type": 5, "domain": 6}},
    {"ph": "X", "name": "a", "ts": us(EPOCH), "dur": -1, "args": {"event_type": "start/end"}},
    {"ph": "X", "name": "a", "ts": us(EPOCH), "dur": 1e300, "args": {"event_type": "start/end"}},
    {"ph": "X", "name": "a", "ts": us(EPOCH), "dur": 1, "args": [1], "pid": [2]},
    {"ph": "X", "name": "a", "ts": us(EPOCH), "dur": 1, "args": {"Task Type": [1]}},
    {"ph": "X", "name": "Free", "ts": us(EPOCH), "dur": 1, "pid": None, "tid": 1e300},
    {"ph": "s", "cat": "MsTx", "id": "9" * 99, "ts": us(EPOCH)},
    {"ph": "f", "cat": "HostToDevice", "id": -(2**80), "ts": us(EPOCH)},
    {"ph": "s", "cat": "async_npu", "id": 1e308, "ts": us(EPOCH), "tid": "x"},
    {"ph": "M", "name": "process_name", "args": None},
    {"ph": "M", "name": "thread_name", "pid": {}, "args": {"name": {}}},
]


@pytest.mark.parametrize("at", range(len(HOSTILE)), ids=lambda at: repr(HOSTILE[at])[:60])
def test_no_event_of_any_shape_costs_another_one(tmp_path: Path, at: int) -> None:
    trace = whole()
    path = trace.write(capture_folder(tmp_path) / "trace_view.json")
    trace.events.insert(5, HOSTILE[at])
    path.write_text(json.dumps(trace.events))

    run = read_ascend(tmp_path)

    assert {"step", "actor_update"} <= set(run.names)
    assert every_table(run)["kernels"] >= 9


@pytest.mark.parametrize("content", ["", "[", "{}", "[]", "hello", "\0" * 99, '{"traceEvents": 1}'])
def test_a_file_without_events_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace_view.json"
    path.write_text(content)

    with pytest.raises(TraceError, match="not a Chrome trace") as error:
        read_ascend(path)
    assert "\n" not in str(error.value)


def full_database(path: Path) -> Path:
    rows = DatabaseRows()
    rows.mark("step", 0, 90_000)
    for at in range(300):
        rows.task(f"Mul_{at}", 1_000 + at, 1_001 + at, connection=at)
    return rows.write(path)


def test_a_damaged_database_gives_way_to_the_text(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    whole().write(output / "trace_view.json")
    (output / "ascend_pytorch_profiler_0.db").write_bytes(b"SQLite format 3\0" + b"\0" * 999)

    run = read_ascend(tmp_path)

    assert "cannot be read as SQLite" in run.warnings[0].text
    assert (len(run), every_table(run)["kernels"]) == (2, 9)


def test_a_database_with_broken_pages_never_raises_anything_else(tmp_path: Path) -> None:
    path = full_database(tmp_path / "ascend_pytorch_profiler_0.db")
    data = bytearray(path.read_bytes())
    chance = random.Random(4)
    outcomes: set[tuple[str, ...]] = set()
    for _ in range(60):
        broken = bytearray(data)
        for _ in range(20):
            broken[chance.randrange(100, len(data))] = chance.randrange(256)
        path.write_bytes(broken[: chance.randrange(len(data) // 2, len(data))])
        try:
            outcomes.add(tuple(sorted(every_table(read_ascend(path)))))
        except TraceError:
            outcomes.add(())
    assert len(outcomes) > 1


def test_columns_of_another_version_and_values_of_another_type_are_absent(tmp_path: Path) -> None:
    rows = DatabaseRows()
    rows.mark("step", 0, 9)
    rows.add("TASK", startNs="soon", endNs=2**70 * 1.0, deviceId=None, globalTaskId=1)
    rows.add("COMPUTE_TASK_INFO", name="Mul", globalTaskId=1)
    rows.add("PYTORCH_API", startNs="12x", endNs="", globalTid=1, name="aten::mul", type=50001)
    rows.add("RANK_DEVICE_MAP", rankId=-1, deviceId=-1)

    run = read_ascend(rows.write(tmp_path / "ascend_pytorch_profiler.db"))

    assert run.ranks == (0,)
    counts = every_table(run)
    assert (counts["kernels"], counts["calls"]) == (0, 0)
    assert "skipped 1 tasks" in run.table("kernels").note


def test_a_capture_that_is_not_parsed_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "node_1_20250109074803340_ascend_pt"
    (folder / "PROF_000001").mkdir(parents=True)

    with pytest.raises(TraceError, match=r"not parsed yet\. Run: rlprof ascend parse"):
        read_ascend(folder)

    whole().write(capture_folder(tmp_path, rank=1) / "trace_view.json")
    run = read_ascend(tmp_path)
    assert run.ranks == (1,)
    assert any("not parsed yet" in problem.text for problem in run.warnings)


def test_an_empty_output_is_refused_and_a_damaged_description_is_a_problem(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    with pytest.raises(TraceError, match="contains neither a trace nor a database"):
        read_ascend(tmp_path)

    whole().write(output / "trace_view.json")
    (output.parent / "profiler_info_0.json").write_text("{")
    (output.parent / "profiler_metadata.json").write_bytes(b"\xff" * 9)
    run = read_ascend(tmp_path)
    assert [problem.text for problem in run.warnings][:2] == [
        "profiler_info_0.json cannot be read (damaged or cut off)",
        "profiler_metadata.json cannot be read (damaged or cut off)",
    ]
    assert run.ranks == (0,)  # by the name of the file


def test_a_sheet_cut_off_loses_its_last_row_and_says_so(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    rows = "".join(f"Mul,{us(EPOCH + at)}\t,1.5\r\n" for at in range(5))
    (output / "kernel_details.csv").write_text(f"Name,Start Time(us),Duration(us)\r\n{rows}"[:-2])

    table = read_ascend(tmp_path).table("kernels")

    assert len(table.rows) == 4
    assert "kernel_details.csv: is truncated: 4 rows were read, the rest is missing" in table.note


def test_one_broken_file_leaves_the_other_tables_alone(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    whole().write(output / "trace_view.json")
    (output / "communication.json").write_text('{"step1": {"collective"')
    (output / "step_trace_time.csv").write_bytes(b"\0\xff\r\n" * 9)
    (output / "memory_record.csv").write_text("")

    run = read_ascend(tmp_path)

    assert "cannot be read: damaged or cut off" in (run.table("communication").abstained or "")
    assert every_table(run)["kernels"] == 9


def test_without_a_type_or_a_name_there_are_no_calls(tmp_path: Path) -> None:
    rows = DatabaseRows()
    rows.mark("step", 0, 9)
    rows.add("PYTORCH_API", startNs=str(EPOCH), endNs=str(EPOCH + 9), globalTid=MAIN, type=50001)
    path = rows.write(capture_folder(tmp_path) / "ascend_pytorch_profiler_0.db")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("ALTER TABLE PYTORCH_API DROP COLUMN name")

    assert "calls" not in read_ascend(tmp_path).tables


@pytest.mark.parametrize(
    "metadata",
    [{"role": ["actor", "rollout"]}, {"parallel_group_info": {"a": {"global_ranks": 5}}}],
)
def test_what_a_program_added_may_be_of_any_shape(tmp_path: Path, metadata: dict[str, Any]) -> None:
    whole().write(capture_folder(tmp_path, metadata=metadata) / "trace_view.json")

    assert every_table(read_ascend(tmp_path))["kernels"] == 9


def test_a_start_beyond_all_times_is_none(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    info = output.parent / "profiler_info_0.json"
    info.write_text(info.read_text().replace(str(EPOCH + 9_000), "1e300"))
    (output / "step_trace_time.csv").write_text("Step,Computing\n3,1.5\n")

    assert read_ascend(tmp_path).unix_ns == 0


MS = 1_000_000


@pytest.mark.parametrize("form", ["text", "database"])
@pytest.mark.parametrize(
    ("start", "end", "took", "fact"),
    [
        (11 * MS, 3_400_000 * MS, [1] * 5 + [2] + [1] * 14, "bounded"),
        (4_000_000 * MS, 4_000_001 * MS, [1] * 19, "untimed"),
    ],
)
def test_times_that_cannot_be_true_are_in_no_sum(
    form: str, start: int, end: int, took: list[int], fact: str, tmp_path: Path
) -> None:
    trace, database = TraceEvents(), DatabaseRows()
    for at in range(20):
        began = (at * 2 + 1) * MS
        times = (start, end) if at == 5 else (began, began + MS)
        trace.task("Odd" if at == 5 else "Mul", *times)
        database.task("Odd" if at == 5 else "Mul", *times, at)
    output = capture_folder(tmp_path)
    if form == "text":
        trace.write(output / "trace_view.json")
    else:
        database.write(output / "ascend_pytorch_profiler_0.db")

    table = read_ascend(output.parent).table("kernels")

    assert table.column("duration") == [each * MS for each in took]
    assert len(table.losses) == 1
    assert table.losses[0].facts == {fact: 1}  # type: ignore[attr-defined]
    assert "Odd" in table.losses[0]
