"""The six inputs: three stored runs, and one device job as three profilers write it.

The job has two ranks and twelve steps. Rank 1 computes 20% longer, so rank 0 waits in each
collective. All times are invented, in nanoseconds.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.builders import ascend_output as ascend
from tests.builders.chrome import ChromeTrace
from tests.builders.nsys_export import NsysExport, global_pid, global_tid
from tests.golden.runs.make import unpack

RUNS = ("demo", "slow", "async", "kineto", "nsys", "ascend")
_STEPS, _RANKS, _STEP_NS = 12, 2, 10_000_000
_STAGES = (("actor_generate", 0, 6_000_000), ("compute_reward", 6_000_000, 6_500_000))
_STAGES += (("actor_update", 6_500_000, 9_800_000),)


class _Piece(NamedTuple):
    """One kernel, copy or collective of the device, with the call that launches it."""

    kind: str
    name: str
    launch: int
    start: int
    end: int


def _pieces(rank: int, step: int) -> Iterator[_Piece]:
    """Yield what the device runs in a step: small kernels, a copy, gemms and a collective."""
    begin, slower = step * _STEP_NS, 1.2 if rank else 1.0
    for at in range(10):
        launch = begin + 100_000 + 550_000 * at
        took = int((150_000 + 10_000 * (step % 3)) * slower)
        yield _Piece("kernel", "decode", launch, launch + 20_000, launch + 20_000 + took)
    copy = begin + 6_600_000
    yield _Piece("copy", "Memcpy HtoD (Pageable -> Device)", copy, copy + 10_000, copy + 90_000)
    now = copy + 100_000
    for at in range(4):
        took = int(400_000 * slower)
        yield _Piece("kernel", "gemm", copy + 100_000 + 5_000 * at, now, now + took)
        now += took + 2_000
    end = copy + 2_800_000
    yield _Piece("collective", "ncclDevKernel_AllReduce_Sum_f32", copy + 200_000, now, end)


def _kineto(folder: Path) -> None:
    folder.mkdir()
    for rank in range(_RANKS):
        told = {"rank": rank, "world_size": _RANKS, "backend": "nccl"}
        trace, number = ChromeTrace(before={"schemaVersion": 1, "distributedInfo": told}), 0
        for step in range(1, _STEPS + 1):
            begin = step * _STEP_NS
            trace.mark(f"ProfilerStep#{step}", begin, begin + _STEP_NS - 1_000)
            for stage, start, end in _STAGES:
                trace.mark(stage, begin + start, begin + end)
            for piece in _pieces(rank, step):
                number += 1
                _kineto_piece(trace, piece, number, rank)
            memory = {"Device Type": 1, "Device Id": rank, "Total Allocated": 2**30 + step * 2**20}
            memory |= {"Total Reserved": 2**31}
            trace.event("cpu_instant_event", "[memory]", begin, begin, 4000, 1, **memory)["ph"] = (
                "i"
            )
        trace.write(folder / f"rank{rank}.pt.trace.json")


def _kineto_piece(trace: ChromeTrace, piece: _Piece, number: int, rank: int) -> None:
    stream = 8 if piece.kind == "collective" else 7
    place = {"device": rank, "stream": stream, "correlation": number, "External id": number}
    shapes = {"Input Dims": [[64, 32], [32, 64]], "Input type": ["float", "float"]}
    if piece.name == "gemm":
        around = piece.launch - 2_000, piece.launch + 6_000
        trace.event("cpu_op", "aten::mm", *around, 4000, 1, **shapes)
    trace.call(number, piece.launch)
    if piece.kind == "collective":
        place |= {"Collective name": "allreduce", "In msg nelems": 2**20, "Out msg nelems": 2**20}
        place |= {"dtype": "Float", "Group size": _RANKS, "Process Group Ranks": "[0, 1]"}
    if piece.kind == "copy":
        place |= {"bytes": 2**20}
    category = "gpu_memcpy" if piece.kind == "copy" else "kernel"
    trace.event(category, piece.name, piece.start, piece.end, rank, stream, **place)


def _nsys(folder: Path) -> None:
    for rank in range(_RANKS):
        export, number = NsysExport(folder / f"report_rank{rank}.sqlite"), 0
        for step in range(1, _STEPS + 1):
            begin = step * _STEP_NS
            export.own("step", "step", begin, begin + _STEP_NS - 1_000, step=step)
            for stage, start, end in _STAGES:
                export.own(stage, "stage", begin + start, begin + end, step=step)
            for piece in _pieces(rank, step):
                number += 1
                export.call(piece.launch, number, took=5_000)
                if piece.kind != "copy":
                    stream = 8 if piece.kind == "collective" else 7
                    export.kernel(piece.name, piece.start, piece.end, number, streamId=stream)
                    continue
                cells = {"start": piece.start, "end": piece.end, "globalPid": global_pid(100)}
                cells |= {"correlationId": number, "copyKind": 1, "bytes": 2**20, "deviceId": 0}
                export.add("CUPTI_ACTIVITY_KIND_MEMCPY", streamId=7, **cells)
            waits = {"start": begin + 9_000_000, "end": begin + 9_400_000, "syncType": 3}
            waits |= {"globalPid": global_pid(100), "correlationId": number, "deviceId": 0}
            export.add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", streamId=7, **waits)
            for at in range(2):
                sample = {"typeId": 1, "metricId": 1, "value": 40 + step + at}
                export.add("GPU_METRICS", timestamp=begin + at * 5_000_000, **sample)
        export.add("TARGET_INFO_GPU_METRICS", typeId=1, metricId=1, metricName="SMs Active")
        export.add("TARGET_INFO_SYSTEM_ENV", name="Hostname", value="node-1")
        export.add("ThreadNames", nameId=export.string("main"), globalTid=global_tid())
        export.write()


def _ascend(folder: Path) -> None:
    for rank in range(_RANKS):
        rows, number = ascend.DatabaseRows(), 0
        for step in range(1, _STEPS + 1):
            begin = step * _STEP_NS
            rows.mark("step", begin, begin + _STEP_NS - 1_000)
            for stage, start, end in _STAGES:
                rows.mark(stage, begin + start, begin + end)
            for piece in _pieces(rank, step):
                number += 1
                _ascend_piece(rows, piece, number)
        rows.add("ENUM_HCCL_DATA_TYPE", id=4, name="FP32")
        rows.add("ENUM_MEMCPY_OPERATION", id=1, name="host to device")
        rows.add("RANK_DEVICE_MAP", rankId=rank, deviceId=rank)
        rows.add("META_DATA", name="rlprof_window", value='"step-000001"')
        rows.add("HOST_INFO", hostUid="1", hostName="node-7")
        output = ascend.capture_folder(folder / f"rank{rank}", rank=rank)
        rows.write(output / "ascend_pytorch_profiler_0.db")


def _ascend_piece(rows: ascend.DatabaseRows, piece: _Piece, number: int) -> None:
    times = {"startNs": ascend.EPOCH + piece.start, "endNs": ascend.EPOCH + piece.end}
    call = {"startNs": ascend.EPOCH + piece.launch, "endNs": ascend.EPOCH + piece.launch + 5_000}
    thread = ascend.tid(ascend.MAIN)
    rows.add("CANN_API", connectionId=number, name="launch", globalTid=thread, **call)
    if piece.kind == "kernel":
        rows.task(piece.name, piece.start, piece.end, connection=number)
    elif piece.kind == "copy":
        task = {"taskType": "MEMCPY_ASYNC", "globalTaskId": 10**6 + number, "streamId": 2}
        rows.add("TASK", connectionId=number, deviceId=0, **task, **times)
        rows.add("MEMCPY_INFO", globalTaskId=10**6 + number, size=2**20, memcpyOperation=1)
    else:
        cells = {"groupName": "group", "dataType": 4, "count": 2**20, "opType": "hcom_allReduce_"}
        name = f"hcom_allReduce__1_{number}_1"
        rows.add("COMMUNICATION_OP", opName=name, connectionId=number, **cells, **times)


def write_inputs(folder: Path) -> None:
    """Write all six below a folder, each under its name."""
    unpack(folder)
    _kineto(folder / "kineto")
    _nsys(folder / "nsys")
    _ascend(folder / "ascend")
