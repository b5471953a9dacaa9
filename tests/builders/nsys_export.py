"""Small SQLite exports of Nsight Systems for tests, laid out as nsys lays them out."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

EPOCH = 1_700_000_000_000_000_000
PID = 100
PUSHED, STARTED, MARK, CATEGORY, DOMAIN = 59, 60, 34, 33, 75
OWN, FOREIGN = 1, 0
CATEGORIES = {"stage": 1, "region": 2, "step": 3, "epoch": 4, "mark": 5}

_NVTX = (
    "start end eventType rangeId category color text globalTid endGlobalTid textId domainId "
    "uint64Value int64Value doubleValue uint32Value int32Value floatValue jsonTextId jsonText"
)
_ACTIVITY = "start end deviceId contextId streamId correlationId globalPid"
COLUMNS = {
    "NVTX_EVENTS": _NVTX,
    "StringIds": "id value",
    "ThreadNames": "nameId priority globalTid",
    "PROCESSES": "globalPid pid name",
    "META_DATA_EXPORT": "name value",
    "TARGET_INFO_SYSTEM_ENV": "globalVid devStateName name nameEnum value",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_ACTIVITY} demangledName shortName graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_ACTIVITY} bytes copyKind graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_ACTIVITY} bytes value graphNodeId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{_ACTIVITY} syncType",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_ACTIVITY} graphId",
    "GPU_METRICS": "timestamp typeId metricId value",
    "TARGET_INFO_GPU_METRICS": "typeId metricId metricName",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid",
}
_TEXTS = {"text", "value", "name", "metricName", "jsonText", "utcTime", "localTime", "devStateName"}


def global_pid(pid: int) -> int:
    return (1 << 56) | (pid << 24)


def global_tid(pid: int = PID, tid: int | None = None) -> int:
    return global_pid(pid) | (pid if tid is None else tid)


class NsysExport:
    """Rows by table; tables without rows are not written, as nsys does."""

    def __init__(self, path: Path, *, epoch: int | None = EPOCH) -> None:
        self.path = path
        self.columns = {table: names.split() for table, names in COLUMNS.items()}
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}
        self._declared: set[tuple[int, int, str]] = set()
        self.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2025.1.1")
        if epoch is not None:
            self.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=epoch)

    def add(self, table: str, **cells: Any) -> None:
        self.rows.setdefault(table, []).append(cells)

    def string(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self.add("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def nvtx(self, kind: int, name: str, start: int, end: Any = None, **more: Any) -> None:
        """Add an event; the name goes through StringIds, as nvtx's registered strings do."""
        cells = {"globalTid": global_tid(), "domainId": FOREIGN, "textId": self.string(name)}
        self.add("NVTX_EVENTS", start=start, end=end, eventType=kind, **{**cells, **more})

    def own(
        self,
        name: str,
        kind: str,
        start: int,
        end: Any = None,
        *,
        step: Any = None,
        pid: int = PID,
        tid: int | None = None,
        event: int = PUSHED,
        **more: Any,
    ) -> None:
        """Add a range of our domain as the recorder makes it: its step is the payload."""
        self.declare(pid, DOMAIN, "rlprof", domainId=OWN)
        self.declare(pid, CATEGORY, kind, domainId=OWN, category=CATEGORIES[kind])
        cells = {"globalTid": global_tid(pid, tid), "domainId": OWN, "int64Value": step}
        cells |= {"category": CATEGORIES[kind], **more}
        self.nvtx(MARK if kind == "mark" else event, name, start, end, **cells)

    def declare(self, pid: int, event: int, text: str, **cells: Any) -> None:
        """Add, once, the event that names a domain or a category."""
        if (pid, event, text) not in self._declared:
            self._declared.add((pid, event, text))
            cells |= {"text": text, "globalTid": global_tid(pid)}
            self.add("NVTX_EVENTS", start=-5, eventType=event, **cells)

    def said(self, name: str, payload: int, *, start: int = 0, pid: int = PID) -> None:
        """Add a mark of our domain that tells the rank or the clock: it has no category."""
        self.own(name, "mark", start, category=None, step=payload, pid=pid)

    def kernel(self, name: str, start: int, end: int, correlation: int, **more: Any) -> None:
        pid = more.pop("pid", PID)
        cells = {"deviceId": 0, "streamId": 7, "globalPid": global_pid(pid)}
        names = {"demangledName": self.string(name), "shortName": self.string(name[:4])}
        cells |= {"start": start, "end": end, "correlationId": correlation, **names, **more}
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", **cells)

    def call(
        self, start: int, number: int, pid: int = PID, tid: int | None = None, *, took: Any = 1
    ) -> None:
        """Add the call that launched what has this correlation; it took so long, or never ended."""
        end = None if took is None else start + took
        cells = {"start": start, "end": end, "correlationId": number}
        thread = global_tid(pid, tid)
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", globalTid=thread, eventClass=0, **cells)

    def write(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self.path)) as database:
            for table, rows in self.rows.items():
                names = self.columns[table]
                kinds = (f'"{name}" {"TEXT" if name in _TEXTS else "INTEGER"}' for name in names)
                if table == "GPU_METRICS":
                    kinds = (f'"{name}"' for name in names)
                database.execute(f'CREATE TABLE "{table}" ({", ".join(kinds)})')
                marks = ", ".join("?" * len(names))
                cells = [[row.get(name) for name in names] for row in rows]
                database.executemany(f'INSERT INTO "{table}" VALUES ({marks})', cells)
            database.commit()
        return self.path
