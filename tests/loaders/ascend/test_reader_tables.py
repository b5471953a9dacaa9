"""Tables of Ascend captures where real ones have nothing to show: other versions, other levels."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.loaders.ascend.reader import ascend_tables, read_ascend
from tests.builders.ascend_output import (
    CONNECTION,
    EPOCH,
    DatabaseRows,
    TraceEvents,
    capture_folder,
    us,
)

WINDOW = {"rlprof_window": "step-000003"}
REDUCE = '{"opName": "hcom_allReduce", "count": "8", "dataType": "fp16", "groupName": "tp"}'


def rows_of(path: Path, table: str) -> list[dict[str, Any]]:
    found = read_ascend(path).table(table)
    names = [column.name for column in found.columns]
    rows = (dict(zip(names, row, strict=True)) for row in found.rows)
    return [{name: cell for name, cell in row.items() if cell is not None} for row in rows]


def analysis(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)


def test_steps_of_a_window_are_rl_steps_on_every_device(tmp_path: Path) -> None:
    output = capture_folder(tmp_path, metadata=WINDOW)
    (output / "step_trace_time.csv").write_text(
        "Device_id,Step,Computing,Communication(Not Overlapped),Free,Stage\n"
        "4,3,1.5,2.25,3,6.75\n5,4,1.5,2.25,3,\n4,,1,1,1,3\n"
    )

    found = rows_of(tmp_path, "step_trace")

    assert [(row.get("step"), row["device"]) for row in found] == [(3, 4), (4, 5), (None, 4)]
    assert found[0]["communication not overlapped"] == 2_250
    assert [row.get("stage") for row in found] == [6_750, None, 3_000]


def test_the_databases_steps_may_lack_a_device_and_a_step(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    rows = DatabaseRows()
    rows.mark("step", 0, 9)
    rows.add("RANK_DEVICE_MAP", rankId=0, deviceId=6)
    rows.write(output / "ascend_pytorch_profiler_0.db")
    analysis(
        output / "analysis.db",
        "CREATE TABLE StepTraceTime (step TEXT, computing NUMERIC, stage NUMERIC)",
        "INSERT INTO StepTraceTime VALUES (NULL, 8903.431, 132233.522), ('7', 1, NULL)",
    )

    assert rows_of(tmp_path, "step_trace") == [
        {"rank": 0, "device": 6, "computing": 8_903_431, "stage": 132_233_522},
        {"rank": 0, "device": 6, "step": 7, "computing": 1_000},
    ]


def test_below_level1_the_database_knows_collectives_by_their_operators(tmp_path: Path) -> None:
    rows = DatabaseRows()
    rows.add("ENUM_HCCL_DATA_TYPE", id=4, name="FP32")
    cells = {"groupName": "tp", "dataType": 4, "startNs": EPOCH, "endNs": EPOCH + 9}
    rows.add("COMMUNICATION_OP", opName="hcom_send", count=1_000, **cells)
    rows.add("COMMUNICATION_OP", opName="hcom_recv", **{**cells, "dataType": 99})

    path = rows.write(tmp_path / "ascend_pytorch_profiler_0.db")

    first, second = rows_of(path, "communication")
    assert first == {
        **{"rank": 0, "operator": "hcom_send", "group": "tp", "start": 0, "duration": 9},
        "size": 4_000,
    }
    assert "size" not in second
    assert "from level1 on" in read_ascend(path).table("communication").note


def test_below_level1_the_trace_knows_collectives_by_their_lane(tmp_path: Path) -> None:
    trace = TraceEvents()
    trace.collective("hcom_send", 100, 300)
    path = trace.write(tmp_path / "trace_view.json")

    assert rows_of(path, "communication") == [
        {"rank": 0, "device": 0, "operator": "hcom_send", "start": 0, "duration": 200}
    ]


@pytest.mark.parametrize("form", ["text", "database"])
def test_waits_of_the_host_are_calls_of_cann(tmp_path: Path, form: str) -> None:
    calls = ["aclrtSynchronizeStream", "aclnnMm", "aclrtMemcpy", "aclrtMemcpyAsync"]
    if form == "text":
        trace = TraceEvents()
        for at, name in enumerate(calls):
            args = {"Mode": "acl", "connection_id": at}
            trace.row(f"AscendCL@{name}", trace.pid("CANN"), 9, 10 * at, 10 * at + 7, args=args)
        trace.task("MatMulV2", 5, 9)
        path = trace.write(tmp_path / "trace_view.json")
    else:
        rows = DatabaseRows()
        for at, name in enumerate(calls):
            times = {"startNs": EPOCH + 10 * at, "endNs": EPOCH + 10 * at + 7}
            rows.add("CANN_API", name=name, globalTid=9, **times)
        rows.add("CANN_API", name="aclrtSynchronizeEvent", startNs=EPOCH + 9, endNs=EPOCH)
        path = rows.write(tmp_path / "ascend_pytorch_profiler_0.db")
    waits = rows_of(path, "sync")
    assert [(row["kind"], row["duration"]) for row in waits] == [
        ("aclrtSynchronizeStream", 7),
        ("aclrtMemcpy", 7),
    ]
    assert waits[1]["start"] - waits[0]["start"] == 20


@pytest.mark.parametrize("form", ["text", "database"])
def test_with_markers_alone_collectives_are_what_hccl_marks_of_itself(
    tmp_path: Path, form: str
) -> None:
    if form == "text":
        trace = TraceEvents()
        trace.mark("step", 0, 9_000)
        trace.mark(REDUCE, 1_000, 2_000, domain="communication", shadow=(3_000, 7_000))
        trace.mark(REDUCE, 4_000, 5_000, domain="communication")
        trace.write(capture_folder(tmp_path) / "trace_view.json")
    else:
        rows = DatabaseRows()
        rows.mark("step", 0, 9_000)
        rows.mark(REDUCE, 1_000, 2_000, domain="communication", connectionId=CONNECTION)
        rows.mark(REDUCE, 4_000, 5_000, domain="communication", connectionId=CONNECTION + 1)
        times = {"startNs": EPOCH + 3_000, "endNs": EPOCH + 7_000}
        rows.add("TASK", connectionId=CONNECTION, **times)
        rows.write(capture_folder(tmp_path) / "ascend_pytorch_profiler.db")

    told = {"rank": 0, "operator": "hcom_allReduce", "group": "tp", "size": 16}
    assert rows_of(tmp_path, "communication") == [
        {**told, "start": 3_000, "duration": 4_000},
        {**told, "start": 4_000, "duration": 1_000},
    ]
    assert "only MSTX tells" in read_ascend(tmp_path).table("communication").note


def test_bytes_of_a_link_that_sdma_contains_count_once_and_rdma_counts_too(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    link = {"Transit Size(MB)": 8.0, "Transit Time(ms)": 2.0}
    links = {"HCCS": link, "SDMA": link, "RDMA": {**link, "Transit Time(ms)": 6.0}, "PCIE": "?"}
    times = {"Start Timestamp(us)": 1736408883000000.5, "Elapse Time(ms)": 9, "Wait Time(ms)": None}
    own = {"Communication Time Info": times, "Communication Bandwidth Info": links}
    steps = {"step2": {"p2p": {"hcom_send@7": own, "Total Op Info": own}, "collective": {}}}
    (output / "communication.json").write_text(json.dumps(steps))
    TraceEvents().write(output / "trace_view.json")

    (row,) = rows_of(tmp_path, "communication")

    assert (row["kind"], row["group"], row["step"]) == ("p2p", "7", 2)
    assert (row["size"], row["bandwidth"], row["duration"]) == (16_000_000, 2.0, 9_000_000)
    assert "wait" not in row


def test_operators_take_from_torch_npus_list_what_the_device_did(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    names = "Host Self Duration(us),Host Total Duration(us),Device Self Duration(us)"
    (output / "operator_details.csv").write_text(
        f"Name,{names},Device Total Duration(us)\n"
        "aten::mul,1.5,2.5,7,8\naten::add,4,4,0,0\naten::mul,1.5,2.5,7,8\n"
    )
    TraceEvents().write(output / "trace_view.json")

    assert rows_of(tmp_path, "operators") == [
        {
            **{"rank": 0, "operator": "aten::add", "calls": 1, "total": 4_000, "self": 4_000},
            **{"device total": 0, "device self": 0},
        },
        {
            **{"rank": 0, "operator": "aten::mul", "calls": 2, "total": 5_000, "self": 3_000},
            **{"device total": 16_000, "device self": 14_000},
        },
    ]


def test_an_operators_own_time_is_without_those_inside_on_its_thread(tmp_path: Path) -> None:
    trace = TraceEvents()
    trace.operator("ProfilerStep#0", 0, 100)
    trace.operator("outer", 0, 100)
    trace.operator("inner", 10, 40)
    trace.operator("leaf", 10, 20)
    trace.operator("elsewhere", 10, 90, thread=77)
    trace.module("Linear_0", 0, 100)
    trace.module("ReLU_0", 5, 10)
    path = trace.write(tmp_path / "trace_view.json")

    assert {row["operator"]: row["self"] for row in rows_of(path, "operators")} == {
        **{"outer": 70, "inner": 20, "leaf": 10, "elsewhere": 80}
    }
    assert [(row["module"], row["self"]) for row in rows_of(path, "modules")] == [
        ("Linear_0", 95),
        ("ReLU_0", 5),
    ]


def test_tables_of_several_captures_follow_one_another_on_one_axis(tmp_path: Path) -> None:
    for rank in (1, 0):
        output = capture_folder(tmp_path / f"r{rank}", rank=rank)
        (output / "memory_record.csv").write_text(
            "Component,Timestamp(us),Total Allocated(MB),Device Type\n"
            f"PTA,{us(EPOCH + 1_000 * rank)}\t,1.5,NPU:{rank}\n"
        )
        trace = TraceEvents()
        trace.mark("step", 500 * rank, 900)
        trace.write(output / "trace_view.json")

    assert rows_of(tmp_path, "memory") == [
        {
            "rank": rank,
            "device": rank,
            "component": "PTA",
            "time": 1_000 * rank,
            "allocated": 3 << 19,
        }
        for rank in (0, 1)
    ]


def test_a_run_gets_its_tables_on_its_own_axis_with_its_own_ranks(tmp_path: Path) -> None:
    trace = TraceEvents()
    trace.collective("hcom_send", 100, 300)
    output = capture_folder(tmp_path, rank=0)
    trace.write(output / "trace_view.json")

    tables = ascend_tables({output.parent: 6}, EPOCH - 50, lambda kernels: kernels)

    assert "kernels" not in tables
    table = tables["communication"]()
    assert (table.column("rank"), table.column("start")) == ([6], [150])
    own = tables["collectives"]()
    assert (own.column("rank"), own.column("start")) == ([6], [150])
