"""Small outputs of torch_npu.profiler for tests, laid out as it and CANN's exporter lay them out.

The layout follows real captures of a 910B, and what real torch_npu 2.13.0 writes on a CANN double;
the numbers are invented.
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

EPOCH = 1_736_408_883_000_000_000
PID, MAIN, QUEUE = 4_001, 4_001, 4_077  # the thread that trains, and the one that launches
CONNECTION = 4_000_000_001  # the first that MSTX gives
_LAYERS = {"CANN": 7, "Ascend Hardware": 13, "HCCL": 15, "Overlap Analysis": 23, "python": 6}

DATABASE = {
    "STRING_IDS": "id INTEGER PRIMARY KEY, value TEXT",
    "MSTX_EVENTS": (
        "startNs INTEGER, endNs INTEGER, eventType INTEGER, rangeId INTEGER, category INTEGER, "
        "message INTEGER, globalTid INTEGER, endGlobalTid INTEGER, domainId INTEGER, "
        "connectionId INTEGER"
    ),
    "TASK": (
        "startNs INTEGER, endNs INTEGER, deviceId INTEGER, connectionId INTEGER, "
        "globalTaskId INTEGER, globalPid INTEGER, taskType INTEGER, streamId INTEGER"
    ),
    "COMPUTE_TASK_INFO": (
        "name INTEGER, globalTaskId INTEGER, taskType INTEGER, opType INTEGER, blockDim INTEGER, "
        "inputShapes INTEGER, inputDataTypes INTEGER, inputFormats INTEGER, "
        "outputShapes INTEGER, outputFormats INTEGER"
    ),
    "TASK_PMU_INFO": "globalTaskId INTEGER, name INTEGER, value NUMERIC",
    "COMMUNICATION_TASK_INFO": "globalTaskId INTEGER",
    "MEMCPY_INFO": "globalTaskId INTEGER, size INTEGER, memcpyOperation INTEGER",
    "ENUM_MEMCPY_OPERATION": "id INTEGER PRIMARY KEY, name TEXT",
    "COMMUNICATION_OP": (
        "opName INTEGER, startNs INTEGER, endNs INTEGER, connectionId INTEGER, groupName INTEGER, "
        "dataType INTEGER, count NUMERIC, opType INTEGER"
    ),
    "CANN_API": (
        "startNs INTEGER, endNs INTEGER, type INTEGER, globalTid INTEGER, connectionId INTEGER, "
        "name INTEGER"
    ),
    "PYTORCH_API": (
        "startNs TEXT, endNs TEXT, globalTid INTEGER, connectionId INTEGER, name INTEGER, "
        "sequenceNumber INTEGER, fwdThreadId INTEGER, inputDtypes INTEGER, inputShapes INTEGER, "
        "type INTEGER"
    ),
    "CONNECTION_IDS": "id INTEGER, connectionId INTEGER",
    "RANK_DEVICE_MAP": "rankId INTEGER, deviceId INTEGER",
    "ENUM_HCCL_DATA_TYPE": "id INTEGER PRIMARY KEY, name TEXT",
    "META_DATA": "name TEXT, value TEXT",
    "HOST_INFO": "hostUid TEXT, hostName TEXT",
}
_NAMES = {"message", "domainId", "name", "opName", "groupName", "opType", "taskType"}
_NAMES |= {"inputDtypes", "inputShapes", "inputDataTypes", "inputFormats"}
_NAMES |= {"outputShapes", "outputFormats"}


def us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def tid(thread: int, pid: int = PID) -> int:
    return (pid << 32) | thread


class TraceEvents:
    """Events of a ``trace_view.json``; times are nanoseconds after `EPOCH`."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._connection = CONNECTION
        self.named("Python", PID, {MAIN: f"Thread {MAIN}"})

    def named(self, process: str, pid: int, threads: Mapping[int, str] | None = None) -> None:
        self.events.append(
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
        )
        for thread, name in (threads or {}).items():
            args = {"name": name}
            self.events.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": args}
            )

    def pid(self, process: str, device: int = 31) -> int:
        return ((PID << 10) | (_LAYERS[process] << 5) | device) % 2**32

    def row(self, name: str, pid: int, thread: int, start: int, end: int, **more: Any) -> None:
        times = {"ts": us(EPOCH + start), "dur": (end - start) / 1000, "ph": "X"}
        self.events.append({"name": name, "pid": pid, "tid": thread, **times, **more})

    def arrow(self, cat: str, ph: str, number: Any, pid: int, thread: int, at: int) -> None:
        where = {"pid": pid, "tid": thread, "ts": us(EPOCH + at), "cat": cat}
        self.events.append({"ph": ph, "name": f"{cat}{number}", "id": number, **where})

    def operator(self, name: str, start: int, end: int, thread: int = MAIN) -> None:
        self.row(name, PID, thread, start, end, cat="cpu_op", args={"Sequence number": -1})

    def module(self, name: str, start: int, end: int) -> None:
        args = {"Python id": 1, "Python parent id": 0}
        self.row(f"nn.Module: {name}", PID, MAIN, start, end, cat="python_function", args=args)

    def mark(
        self,
        name: str,
        start: int,
        end: int | None = None,
        *,
        domain: str | None = "rlprof",
        thread: int = MAIN,
        shadow: tuple[int, int] | None = None,
    ) -> None:
        pid, number = self.pid("python"), self._connection << 28
        self._connection += 1
        kind = "marker" if end is None else "start/end"
        args = {"event_type": kind} | ({} if domain is None else {"domain": domain})
        self.row(name, pid, thread, start, start if end is None else end, args=args)
        self.arrow("MsTx", "s", str(number), pid, thread, start)
        if shadow is not None:
            device = self.pid("Ascend Hardware", 0)
            self.row(name, device, 2, *shadow, args={"Physic Stream Id": 2, "Task Id": 9})
            self.arrow("MsTx", "f", str(number), device, 2, shadow[0])

    def task(
        self,
        name: str,
        start: int,
        end: int,
        *,
        kind: str = "AI_CORE",
        stream: int = 2,
        torch: tuple[int, int] | None = None,
        cann: tuple[int, int] | None = None,
        **more: Any,
    ) -> None:
        pid, number = self.pid("Ascend Hardware", 0), len(self.events)
        args = {"Model Id": 4294967295, "Task Type": kind, "Physic Stream Id": stream, **more}
        self.row(name, pid, stream, start, end, args={**args, "connection_id": number})
        if torch is not None:
            self.arrow("async_npu", "s", EPOCH + start, PID, torch[1], torch[0])
            self.arrow("async_npu", "f", EPOCH + start, pid, stream, start)
        if cann is not None:
            self.arrow("HostToDevice", "s", str(number << 48), self.pid("CANN"), cann[1], cann[0])
            self.arrow("HostToDevice", "f", str(number << 48), pid, stream, start)

    def collective(self, name: str, start: int, end: int) -> None:
        args = {"connection_id": 1175, "data_type": "FP32", "count": 4}
        self.row(name, self.pid("HCCL", 0), 0, start, end, args=args)

    def write(self, path: Path) -> Path:
        """Write all of it; the names of CANN's processes stand behind their rows, as there."""
        self.named("python", self.pid("python"))
        self.named("CANN", self.pid("CANN"))
        self.named("Ascend Hardware", self.pid("Ascend Hardware", 0), {2: "Stream 2"})
        self.named("HCCL", self.pid("HCCL", 0), {0: "Group 0 Communication", 1: "Plane 0"})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.events))
        return path


class DatabaseRows:
    """Rows by table of an ``ascend_pytorch_profiler.db``; tables without rows are not written."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}

    def add(self, table: str, **cells: Any) -> None:
        """Add a row; texts under columns that name a text are put into STRING_IDS."""
        for column in _NAMES & cells.keys():
            if isinstance(cells[column], str) and not table.startswith(("META_DATA", "ENUM_")):
                cells[column] = self._strings.setdefault(cells[column], len(self._strings))
        self.rows.setdefault(table, []).append(cells)

    def mark(
        self, name: str, start: int, end: int | None = None, *, domain: str = "rlprof", **more: Any
    ) -> None:
        self.add(
            "MSTX_EVENTS",
            startNs=EPOCH + start,
            endNs=EPOCH + (start if end is None else end),
            eventType=0 if end is None else 2,
            message=name,
            domainId=domain,
            **{"globalTid": tid(MAIN), "connectionId": CONNECTION, **more},
        )

    def task(self, name: str, start: int, end: int, connection: int, stream: int = 2) -> None:
        number = len(self.rows.get("TASK", ()))
        times = {"startNs": EPOCH + start, "endNs": EPOCH + end, "deviceId": 0}
        self.add(
            "TASK",
            **times,
            connectionId=connection,
            globalTaskId=number,
            taskType="KERNEL_AICORE",
            streamId=stream,
        )
        self.add(
            "COMPUTE_TASK_INFO", name=name, globalTaskId=number, taskType="AI_CORE", opType=name
        )

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        for text, number in self._strings.items():
            self.rows.setdefault("STRING_IDS", []).append({"id": number, "value": text})
        with closing(sqlite3.connect(path)) as database, database:
            for table, rows in self.rows.items():
                database.execute(f"CREATE TABLE {table} ({DATABASE[table]})")
                for row in rows:
                    marks = ", ".join("?" * len(row))
                    names = ", ".join(row)
                    database.execute(
                        f"INSERT INTO {table} ({names}) VALUES ({marks})", [*row.values()]
                    )
        return path


def capture_folder(
    parent: Path,
    *,
    rank: int | str | None = 0,
    pid: int = PID,
    metadata: Mapping[str, Any] | None = None,
    activities: Iterable[str] = ("ProfilerActivity.CPU", "ProfilerActivity.NPU"),
) -> Path:
    """Make a ``*_ascend_pt`` directory with what describes it, and return its output folder."""
    folder = parent / f"node-7_{pid}_20250109074803340_ascend_pt"
    output = folder / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    info = {
        "config": {
            "common_config": {"activities": list(activities)},
            "experimental_config": {"_profiler_level": "Level1"},
        },
        "start_info": {"start_monotonic": 1_000},
        "end_info": {"collectionTimeEnd": EPOCH + 9_000, "MonotonicTimeEnd": 2_000},
        "torch_npu_version": "2.7.1",
    }
    name = "profiler_info.json" if rank is None else f"profiler_info_{rank}.json"
    described = info | ({} if rank is None else {"rank_id": rank})
    (folder / name).write_text(json.dumps(described))
    (folder / "profiler_metadata.json").write_text(json.dumps(metadata or {}))
    return output
