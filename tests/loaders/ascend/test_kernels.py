"""Kernels of Ascend captures: what they belong to, in both formats, however they were launched."""

from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.loaders.ascend.reader import read_ascend
from lightning_rlprof.tables.spans import Spans
from tests.builders.ascend_output import (
    CONNECTION,
    EPOCH,
    MAIN,
    QUEUE,
    DatabaseRows,
    TraceEvents,
    capture_folder,
    tid,
    us,
)

AUTOGRAD = 5_005
WINDOW = {"rlprof_window": "step-000003"}


def kernel_rows(run: Spans) -> list[tuple[Any, ...]]:
    table = run.table("kernels")
    wanted = ("kernel", "stage", "step", "range")
    return [*zip(*(table.column(name) for name in wanted), strict=True)]


def marked(trace: TraceEvents, thread: int = MAIN) -> None:
    trace.mark("step", 0, 100_000, thread=thread)
    trace.mark("actor_update", 1_000, 40_000, thread=thread)
    trace.mark("inner", 2_000, 10_000, domain="default", thread=thread)


def save(trace: TraceEvents, parent: Path) -> Path:
    output = capture_folder(parent, metadata=WINDOW)
    return trace.write(output / "trace_view.json").parent.parent


def test_a_kernel_belongs_to_what_its_operator_was_launched_in(tmp_path: Path) -> None:
    trace = TraceEvents()
    marked(trace)
    # Launched by the queue's thread when the stage is over, and run later still.
    trace.task("Mul", 80_000, 90_000, torch=(3_000, MAIN), cann=(50_000, QUEUE))
    trace.task("Add", 95_000, 96_000, torch=(20_000, AUTOGRAD), cann=(60_000, QUEUE))

    run = read_ascend(save(trace, tmp_path))

    assert kernel_rows(run) == [
        ("Mul", "actor_update", 3, "inner"),
        ("Add", "actor_update", 3, "actor_update"),
    ]
    assert run.table("kernels").note == (
        "1 kernels were launched by threads without marks, such as autograd's: they belong to "
        "the stage of the training thread"
    )


def test_ranges_that_went_through_a_stream_tell_by_the_thread_that_launches(
    tmp_path: Path,
) -> None:
    trace = TraceEvents()
    marked(trace, QUEUE)
    # torch called it before the range went through the queue, on a thread that marks nothing.
    trace.task("Mul", 80_000, 90_000, torch=(500, MAIN), cann=(3_000, QUEUE))

    run = read_ascend(save(trace, tmp_path))

    assert kernel_rows(run) == [("Mul", "actor_update", 3, "inner")]
    assert run.table("kernels").note == ""


def test_without_a_launch_the_range_on_the_device_tells_and_then_the_host(tmp_path: Path) -> None:
    trace = TraceEvents()
    trace.mark("step", 0, 100_000)
    trace.mark("actor_generate", 1_000, 2_000, shadow=(50_000, 60_000))
    trace.mark("actor_update", 3_000, 40_000)
    trace.task("OnDevice", 55_000, 56_000)
    trace.task("OnHost", 5_000, 6_000)
    trace.task("Nowhere", 70_000, 71_000)

    run = read_ascend(save(trace, tmp_path))

    assert kernel_rows(run) == [
        ("OnHost", "actor_update", 3, "actor_update"),
        ("OnDevice", "actor_generate", 3, "actor_generate"),
        ("Nowhere", None, None, None),
    ]
    note = run.table("kernels").note
    assert "1 kernels have no recorded launch: assigned to the range on the device" in note
    assert "1 kernels have no recorded launch: assigned to the host's stage" in note
    assert "1 kernels have no recorded launch: their stage may be unknown" in note


def test_copies_waits_and_parts_of_collectives_are_no_kernels(tmp_path: Path) -> None:
    trace = TraceEvents()
    for at, kind in enumerate(("EVENT_WAIT_SQE", "PCIE_DMA_SQE", "SDMA", "Notify Wait")):
        trace.task("other", at * 10, at * 10 + 5, kind=kind)
    trace.task("Cast", 100, 105, kind="AI_CPU")
    trace.collective("hcom_allReduce__1_0_1", 200, 300)
    trace.row("Notify_Record", trace.pid("HCCL", 0), 1, 210, 220, args={"connection_id": 1})
    trace.row("AscendCL@aclrtMalloc", trace.pid("CANN"), MAIN, 0, 5, args={"connection_id": 3})

    table = read_ascend(save(trace, tmp_path)).table("kernels")

    assert table.column("kernel") == ["Cast", "hcom_allReduce__1_0_1"]
    assert table.column("stream") == [2, None]
    assert table.column("device") == [0, 0]


def sheet(output: Path, header: str, *rows: str) -> None:
    text = "\r\n".join([header, *rows, ""])
    (output / "kernel_details.csv").write_text(text, newline="")


def test_the_sheet_of_level0_takes_streams_and_launches_from_the_trace(tmp_path: Path) -> None:
    trace = TraceEvents()
    marked(trace)
    trace.task("Mul", 80_000, 90_000, stream=7, torch=(3_000, MAIN))
    folder = save(trace, tmp_path)
    header = (
        "Device_id,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us),Block Num"
    )
    mul = f"4,Mul,Mul,AI_CORE,{us(EPOCH + 80_000)}\t,9.5,0,1"
    # Its start is rounded the other way.
    collective = f"4,hcom_send,hcom_send,COMMUNICATION,{us(EPOCH + 80_001)}\t,20,0,0"
    sheet(folder / "ASCEND_PROFILER_OUTPUT", header, mul, collective)

    table = read_ascend(folder).table("kernels")

    assert table.column("kernel") == ["Mul", "hcom_send"]
    assert table.column("duration") == [9_500, 20_000]
    assert table.column("stream") == [7, 7]
    assert table.column("device") == [4, 4]
    assert table.column("range") == ["inner", "inner"]


def test_the_sheet_alone_still_gives_the_kernels_and_their_step(tmp_path: Path) -> None:
    output = capture_folder(tmp_path, metadata=WINDOW)
    header = "Step Id,Name,Stream ID,Start Time(us),Duration(us)"
    sheet(output, header, f"3,Mul,2,{us(EPOCH + 5)}\t,1.5", f"4,Mul,N/A,{us(EPOCH + 9)}\t,1.5")

    table = read_ascend(output.parent).table("kernels")

    assert table.column("step") == [3, 4]
    assert table.column("stream") == [2, None]
    assert "launches are unknown: there is no trace_view.json" in table.note


def filled() -> DatabaseRows:
    rows = DatabaseRows()
    rows.mark("step", 0, 100_000)
    rows.mark("actor_update", 1_000, 40_000)
    rows.task("Mul", 80_000, 90_000, connection=900)
    rows.add("PYTORCH_API", startNs=str(EPOCH + 3_000), endNs="0", globalTid=tid(MAIN))
    rows.rows["PYTORCH_API"][-1] |= {"connectionId": 1, "type": 50001}
    rows.add("CONNECTION_IDS", id=1, connectionId=900)
    rows.add("CANN_API", startNs=EPOCH + 50_000, globalTid=tid(QUEUE), connectionId=900)
    return rows


def test_a_database_joins_kernels_to_operators_and_collectives(tmp_path: Path) -> None:
    rows = filled()
    rows.task("Unlaunched", 5_000, 6_000, connection=901)
    collective = {"startNs": EPOCH + 91_000, "endNs": EPOCH + 99_000, "connectionId": 900}
    rows.add("COMMUNICATION_OP", opName="hcom_allReduce__1_0_1", groupName="tp", **collective)
    output = capture_folder(tmp_path, metadata=WINDOW)
    rows.write(output / "ascend_pytorch_profiler_0.db")

    run = read_ascend(output.parent)

    assert kernel_rows(run) == [
        ("Unlaunched", "actor_update", 3, "actor_update"),
        ("Mul", "actor_update", 3, "actor_update"),
        ("hcom_allReduce__1_0_1", "actor_update", 3, "actor_update"),
    ]
    table = run.table("kernels")
    assert table.column("stream") == [2, 2, None]
    assert table.column("device") == [0, 0, 0]


def test_of_several_operators_with_one_number_the_last_before_the_kernel_counts(
    tmp_path: Path,
) -> None:
    rows = filled()
    for number, start in ((2, 41_000), (3, 99_000)):
        rows.add("CONNECTION_IDS", id=number, connectionId=900)
        cells = {"connectionId": number, "type": 50001, "endNs": "0", "globalTid": tid(MAIN)}
        rows.add("PYTORCH_API", startNs=str(EPOCH + start), **cells)
    rows.add("CONNECTION_IDS", id=4, connectionId=900)
    queue = {"connectionId": 4, "type": 50002, "endNs": "0", "globalTid": tid(QUEUE)}
    rows.add("PYTORCH_API", startNs=str(EPOCH + 79_000), **queue)
    path = rows.write(tmp_path / "ascend_pytorch_profiler_0.db")

    run = read_ascend(path)
    kernels = run.table("kernels")

    assert kernels.column("launch") == [EPOCH + 41_000 - run.unix_ns]
    assert kernels.column("stage") == [None]  # behind the stage


def test_a_kernel_without_a_launch_has_neither_stage_nor_step(tmp_path: Path) -> None:
    rows = DatabaseRows()
    rows.task("Mul", 80_000, 90_000, connection=900)
    path = rows.write(tmp_path / "ascend_pytorch_profiler_0.db")

    run = read_ascend(path)
    kernels = run.table("kernels")

    assert (run.unix_ns, kernels.column("start")) == (EPOCH + 80_000, [0])
    assert [kernels.column(name) for name in ("launch", "step")] == [[None], [None]]
    assert kernels.note == ""


def test_a_range_of_the_device_in_a_database_is_the_task_of_its_connection(tmp_path: Path) -> None:
    rows = DatabaseRows()
    rows.mark("actor_generate", 1_000, 2_000, connectionId=CONNECTION)
    times = {"startNs": EPOCH + 50_000, "endNs": EPOCH + 60_000}
    rows.add("TASK", **times, connectionId=CONNECTION, globalTaskId=77)
    rows.task("Mul", 55_000, 56_000, connection=1)

    run = read_ascend(rows.write(tmp_path / "ascend_pytorch_profiler_0.db"))

    assert kernel_rows(run) == [("Mul", "actor_generate", None, "actor_generate")]


def test_captures_that_hold_none_say_so(tmp_path: Path) -> None:
    trace = TraceEvents()
    marked(trace)

    table = read_ascend(save(trace, tmp_path)).table("kernels")

    assert (list(table.rows), table.note) == (
        [],
        "this capture has no kernels; level0 and above record them",
    )


@pytest.mark.parametrize("label", ["NPU 5", "NPU"])
def test_the_device_is_what_the_trace_labels_else_what_the_process_number_ends_in(
    tmp_path: Path, label: str
) -> None:
    trace = TraceEvents()
    trace.task("Mul", 0, 10)
    pid = trace.pid("Ascend Hardware", 0)
    about = {"pid": pid, "tid": 0, "args": {"labels": label}}
    trace.events.append({"ph": "M", "name": "process_labels", **about})

    table = read_ascend(save(trace, tmp_path)).table("kernels")

    assert table.column("device") == [5 if label == "NPU 5" else 0]


def test_in_a_window_of_one_stage_all_kernels_are_of_its_step(tmp_path: Path) -> None:
    trace = TraceEvents()
    trace.mark("actor_update", 0, 10)
    trace.task("Mul", 70_000, 71_000)
    output = capture_folder(tmp_path, metadata={"rlprof_window": "step-000009-actor_update"})
    trace.write(output / "trace_view.json")

    assert kernel_rows(read_ascend(tmp_path)) == [("Mul", None, 9, None)]
