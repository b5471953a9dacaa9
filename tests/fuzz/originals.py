"""Files to damage: small ones of every tool, made up, and the beginnings of real ones.

Each is a function that writes into a folder, and returns the file to be damaged and what to read.
"""

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.builders.ascend_output import EPOCH, MAIN, DatabaseRows, TraceEvents, capture_folder, tid
from tests.builders.chrome import ChromeTrace
from tests.builders.nsys_export import PID, NsysExport, global_pid
from tests.builders.runs import Row, grpo_rows, header, write_rank
from tests.places import SHARED_DATA

DATA = SHARED_DATA
OUTPUT = "ASCEND_PROFILER_OUTPUT"
_SIZE = 60_000  # bytes kept of a real file of text

Original = Callable[[Path], tuple[Path, Path]]

US = 1_736_408_883_704_643
SHEETS = {
    "kernel_details": "Step Id,Task ID,Stream ID,Name,Type,Accelerator Core,Start Time(us),"
    "Duration(us),Wait Time(us),Block Dim,Input Shapes\n"
    f'50,11051,2,trans_0,TransData,AI_CORE,{US}.212\t,53.741,0,32,"""32,3"""\n'
    f"50,11052,2,hcom_send,hcom,HCCL,{US + 9}.1\t,6.54,104.2,8,N/A\n",
    "memory_record": "Component,Timestamp(us),Total Allocated(MB),Total Reserved(MB),Device Type\n"
    f"APP,{US}.9\t,,2109.6,NPU:0\nPTA,{US + 3}\t,954.25,1452.0,NPU:0\n",
    "step_trace_time": "Device_id,Step,Computing,Communication(Not Overlapped),Free,Stage\n"
    "0,50,8873.75,101963.203,25744.05,136581.0\n",
}
COLLECTIVE = {
    "Communication Time Info": {"Start Timestamp(us)": US + 0.5, "Elapse Time(ms)": 79.08},
    "Communication Bandwidth Info": {"HCCS": {"Transit Size(MB)": 28, "Transit Time(ms)": 0.2}},
}


def _chrome(folder: Path, ending: str) -> tuple[Path, Path]:
    trace = ChromeTrace(before={"schemaVersion": 1, "distributedInfo": {"rank": 0}})
    for number in range(12):
        at = 100 * number
        trace.mark(f"ProfilerStep#{number}", at, at + 90)
        trace.mark("actor_update", at, at + 80)
        args = {"Sequence number": number, "Input Dims": [[1, 2], []], "External id": number}
        trace.event("cpu_op", "aten::mm", at + 5, at + 60, 4000, 1, **args)
        python = {"Python id": number, "Python parent id": None}
        trace.event("python_function", "nn.Module: A_0", at + 4, at + 70, 4000, 1, **python)
        trace.shadow("actor_update", at + 20, at + 70)
        trace.launched(number, at + 10, **{"graph node id": number, "External id": number})
    names = {"Collective name": "_allgather_base", "In msg nelems": 8, "dtype": "Float"}
    names |= {"Group size": 2, "Process Group Name": "tp", "Out msg nelems": 16}
    trace.kernel(99, 500, 520, "ncclDevKernel_AllGather", **names)
    trace.event("gpu_memcpy", "Memcpy HtoD", 530, 540, 0, 7, **{"bytes": 64, "correlation": 3})
    memory = {"Device Type": 1, "Device Id": 0, "Bytes": 512, "Total Allocated": 4096}
    for ph, name in (("i", "[memory]"), ("C", "power"), ("M", "thread_name")):
        more = {"ph": ph, "name": name, "pid": 4000, "tid": 1, "ts": 3.5, "args": memory}
        trace.events.append(more)
    return _packed(trace.encode("compact"), folder / f"x{ending}")


def _packed(data: bytes, path: Path) -> tuple[Path, Path]:
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    path.write_bytes(data)
    return path, path


def _nsys(folder: Path) -> tuple[Path, Path]:
    made = NsysExport(folder / "x.sqlite")
    made.said("rlprof.rank", 0)
    for number in range(30):
        made.own("actor_update", "stage", 10 * number, 10 * number + 9, step=number)
        made.kernel("gemm", 10 * number + 5, 10 * number + 8, number)
        made.call(10 * number + 1, number)
    cells = {"start": 1, "end": 2, "globalPid": global_pid(PID), "correlationId": 1}
    made.add("CUPTI_ACTIVITY_KIND_MEMCPY", copyKind=1, bytes=8, **cells)
    made.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", graphId=1, **cells)
    made.add("GPU_METRICS", timestamp=1, typeId=1, metricId=1, value=1)
    made.add("TARGET_INFO_GPU_METRICS", typeId=1, metricId=1, metricName="m")
    made.add("TARGET_INFO_SYSTEM_ENV", name="Hostname", value="h")
    made.add("PROCESSES", globalPid=global_pid(PID), pid=PID, name="p")
    made.add("ThreadNames", nameId=made.string("t"), globalTid=global_pid(PID) + PID)
    return (path := made.write()), path


def _ascend_events(folder: Path) -> tuple[Path, Path]:
    trace = TraceEvents()
    trace.mark("step", 0, 90_000)
    trace.mark("actor_update", 1_000, 40_000, shadow=(50_000, 60_000))
    trace.operator("aten::mul", 2_000, 3_000)
    trace.module("Linear_0", 2_000, 9_000)
    for at in range(8):
        trace.task("Mul", 80_000 + at, 80_001 + at, torch=(3_000, 4_001), cann=(3_100, 4_001))
    copy = {"size(B)": 64, "operation": "device to host"}
    trace.task("MEMCPY_ASYNC", 80_100, 80_200, kind="PCIE_DMA_SQE", torch=(3_500, 4_001), **copy)
    sync, numbers = {"level": "acl"}, {"Sequence number": 3, "Fwd thread id": 1}
    trace.row("AscendCL@aclrtMemcpy", trace.pid("CANN"), 4_001, 5_000, 81_000, args=sync)
    trace.row("MulBackward0", 4_001, 4_001, 6_000, 7_000, cat="cpu_op", args=numbers)
    shapes = {"Input Dims": "8,16;\r\n16,4", "Input type": "float;\r\nfloat"}
    trace.row("aten::matmul", 4_001, 4_001, 2_500, 4_500, cat="cpu_op", args=shapes)
    trace.collective("hcom_send", 81_000, 82_000)
    output = capture_folder(folder, metadata={"rlprof_window": "step-000001"})
    return trace.write(output / "trace_view.json"), folder


def _ascend_database(folder: Path) -> tuple[Path, Path]:
    rows = DatabaseRows()
    rows.mark("step", 0, 90_000)
    for at in range(100):
        rows.task(f"Mul_{at % 7}", 1_000 + at, 1_001 + at, connection=at)
    rows.add("ENUM_HCCL_DATA_TYPE", id=4, name="FP32")
    cells = {"groupName": "tp", "dataType": 4, "startNs": 1, "endNs": 9, "opType": "hcom"}
    rows.add("COMMUNICATION_OP", opName="hcom_send", count=1_000, **cells)
    times = {"startNs": EPOCH + 2_000, "endNs": EPOCH + 3_000}
    rows.add("TASK", taskType="MEMCPY_ASYNC", globalTaskId=500, connectionId=500, **times)
    rows.add("MEMCPY_INFO", globalTaskId=500, size=64, memcpyOperation=1)
    rows.add("ENUM_MEMCPY_OPERATION", id=1, name="host to device")
    rows.add("CANN_API", connectionId=500, name="aclrtMemcpy", globalTid=tid(MAIN), **times)
    call = {"sequenceNumber": 3, "fwdThreadId": 1, "type": 50_001, "globalTid": tid(MAIN)}
    rows.add("PYTORCH_API", name="MulBackward0", **times, **call)
    shapes = {"inputShapes": "8,16;\r\n16,4", "inputDtypes": "float;\r\nfloat"}
    rows.add("PYTORCH_API", name="aten::mm", **times, **call, **shapes)
    rows.add("RANK_DEVICE_MAP", rankId=0, deviceId=6)
    rows.add("META_DATA", name="rlprof_window", value='"step-000001"')
    rows.add("HOST_INFO", hostUid="1", hostName="node-7")
    path = folder / "ascend_pytorch_profiler_0.db"
    return rows.write(path), path


def _ascend_folder(folder: Path, name: str) -> tuple[Path, Path]:
    """Write every part of a capture, of which one is to be damaged."""
    _ascend_events(folder)
    (output,) = folder.glob(f"*_ascend_pt/{OUTPUT}")
    for sheet, text in SHEETS.items():
        (output / f"{sheet}.csv").write_text(text)
    steps = {"step50": {"p2p": {}, "collective": {"hcom_allReduce__586_0_1@17": COLLECTIVE}}}
    (output / "communication.json").write_text(json.dumps(steps))
    found = next(iter([*output.glob(name), *output.parent.glob(name)]))
    return found, folder


COUNTED = {
    **{"tokens": 900, "samples": 8, "batch": 8, "sample": 3, "version": 1, "flops": 10**12},
    **{"device_ns": 5 * 10**6, "host_rss_bytes": 2**30, "generated_tokens": 700, "replicas": 1},
    **{f"device_{what}_bytes": 2**29 for what in ("allocated", "peak", "reserved")},
}


def _native(folder: Path) -> tuple[Path, Path]:
    """Write two ranks on two hosts whose clocks met, with all that a line can say."""
    for rank in range(2):
        rows = [
            row._replace(counters=COUNTED) if row.kind == "stage" else row for row in grpo_rows(12)
        ]
        steps = [row for row in rows if row.kind == "step"]
        rows += [Row("barrier", "region", r.step, r.end_ns - 3_000, r.end_ns - 9) for r in steps]
        ends = steps[-1].end_ns
        head = header(rank, 2, host=f"node-{rank}", device_name="NVIDIA H100 80GB HBM3")
        path = write_rank(folder / "run", head, rows, notes=[(5, "info", "hello")], status=None)
        met = [["clock", 0, [[at, at + 10, at + 20, at + 30]]] for at in (0, ends)]
        sampled = ["metrics", 0, ends, 0, {"device_power_watts": 9.5}, {"device_clock_mhz": 9}]
        more = [["count", 1, {"late": 2.5}], sampled, ["end", ends, "finished"]]
        lines = [*(met if rank else ()), *more]
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return path, path.parent


MADE: dict[str, Original] = {
    "native": _native,
    "chrome": partial(_chrome, ending=".json"),
    "chrome gz": partial(_chrome, ending=".json.gz"),
    "nsys": _nsys,
    "ascend events": _ascend_events,
    "ascend database": _ascend_database,
    "ascend communication": partial(_ascend_folder, name="communication.json"),
    "ascend description": partial(_ascend_folder, name="profiler_info_0.json"),
    **{f"ascend {name}": partial(_ascend_folder, name=f"{name}.csv") for name in SHEETS},
}


def _beginning(folder: Path, real: Path) -> tuple[Path, Path]:
    """Write as many events as fit, and what stands behind them."""
    data = json.loads(gzip.decompress(real.read_bytes()))
    events = data["traceEvents"]
    data["traceEvents"] = events[:: max(len(json.dumps(events)) // _SIZE, 1)]
    path = folder / real.name.removesuffix(".gz")
    path.write_text(json.dumps(data))
    return path, path


def _whole(folder: Path, real: Path) -> tuple[Path, Path]:
    shutil.copyfile(real, folder / real.name)
    return folder / real.name, folder / real.name


def _capture(folder: Path, real: Path) -> tuple[Path, Path]:
    """Write a capture of which one file is to be damaged; events and long sheets are cut."""
    shutil.copytree(real.parents[1], folder / "x_ascend_pt")
    path = folder / "x_ascend_pt" / OUTPUT
    for sheet in path.glob("*.csv"):
        lines = sheet.read_text().splitlines(keepends=True)
        sheet.write_text("".join(lines[:100]))
    trace = path / "trace_view.json"
    events = json.loads(trace.read_text())
    trace.write_text(json.dumps(events[:: max(trace.stat().st_size // _SIZE, 1)]))
    return path / real.name, folder


def _real() -> Iterator[tuple[str, Original]]:
    for real in sorted(DATA.glob("kineto/**/*.json.gz")):
        if real.stat().st_size < 150_000:
            yield f"real {real.name}", partial(_beginning, real=real)
    for real in sorted(DATA.glob("nsys/cpu_only/cpu_rl*.sqlite")):
        yield f"real {real.name}", partial(_whole, real=real)
    for real in sorted(DATA.glob("ascend/db_*/*/ascend*.db")):
        yield f"real {real.name}", partial(_whole, real=real)
    for real in sorted(DATA.glob(f"ascend/text_level1_rank0/{OUTPUT}/*")):
        yield f"real {real.name}", partial(_capture, real=real)


REAL: dict[str, Original] = dict(_real())
