"""Rows of a ``trace_view.json`` as columns: only the wanted kinds, read as a stream."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.csv_sheets import since_1970, whole_number
from lightning_rlprof.loaders.chrome_events import (
    MAX_TIME,
    Id,
    nanoseconds,
    read_batches,
    read_first,
)
from lightning_rlprof.loaders.host_calls import NPU_PRODUCTS
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN
from lightning_rlprof.tables.table import Loss, with_name

COMMUNICATION = ("HCCL", "Communication")
"""Process of the collectives, in older and newer versions."""

COPIES = ("MEMCPY_ASYNC", "PCIE_DMA_SQE", "SDMA_SQE")
"""Names or types of tasks that copy."""

TRACE_NAMES = ("trace_view.json", "trace_view.json.gz")
"""Names of the file as torch_npu writes it, and as people compress it."""

STEP = "ProfilerStep#"
"""Prefix of the names of the steps that torch_npu.profiler marks."""
_TASK = ("task", "stream", "connection")

_NUMBERS = {"stream", "connection", "count", "bytes", "sequence", "forward", "number"}
# Values of these columns have up to 64 bits; codes use half of the memory.
_WIDE = {"start_ns", "end_ns", "id", *_NUMBERS}
_QUEUE = ("enqueue", "dequeue")

# Only torch_npu's traces have these processes; its parser takes their names from msprof.
_PROCESSES = {*COMMUNICATION, "Ascend Hardware", "CANN", "Overlap Analysis", "AI Core Freq"}
_OTHER_WRITERS = {"schemaVersion", "otherData"}  # Kineto and rlprof begin their traces with these.
_CALL_CATEGORIES = ("cpu_op", "python_function", *_QUEUE)  # Calls of CANN have a level instead.


class RowKind:
    """Kinds of rows that can be read from a trace.

    Attributes:
        MARKS: Ranges and marks of MSTX.
        DEVICE_RANGES: Ranges on the device, of those that went through a stream.
        STEPS: ``ProfilerStep#N`` among the operators of torch.
        DEVICE: Tasks and collectives of the device.
        FLOWS: Arrows between rows.
        COLLECTIVES: Collectives of the device; if wanted, they are not in ``DEVICE``.
        COPIES: Tasks of the device that copy; if wanted, they are not in ``DEVICE``.
        CALLS: All calls of the host; if wanted, no other row of the host is read.
        SHAPES: Matrix products with the shapes of their inputs; likewise.
        QUEUE: Calls at both ends of the queue between the calling and the launching thread.
    """

    MARKS, DEVICE_RANGES, STEPS, DEVICE, FLOWS, COLLECTIVES, COPIES, CALLS, SHAPES, QUEUE = range(
        10
    )


class FlowKind:
    """Kinds of arrows.

    Attributes:
        TORCH: From an operator of torch; its id is the start of the task on the device.
        LAUNCH: From a call of CANN; its id is the connection.
        TASK: To a task on the device; its id is the connection.
        MARK: From a range of MSTX.
        DEVICE_RANGE: To the same range on the device.
    """

    TORCH, LAUNCH, TASK, MARK, DEVICE_RANGE = range(5)


class TraceArgs(msgspec.Struct, gc=False):
    """Arguments of an event that are decoded, named as the columns of `TraceView.tables`."""

    event_type: Id = None
    domain: Id = ""
    connection: Id = msgspec.field(default=None, name="connection_id")
    stream: Id = msgspec.field(default=None, name="Physic Stream Id")
    task: Id = msgspec.field(default=None, name="Task Type")
    data_type: Id = None
    count: Id = None
    bytes: Id = msgspec.field(default=None, name="size(B)")
    direction: Id = msgspec.field(default=None, name="operation")
    sequence: Id = msgspec.field(default=None, name="Sequence number")
    forward: Id = msgspec.field(default=None, name="Fwd thread id")
    level: Id = None
    number: Id = msgspec.field(default=None, name="correlation_id")
    name: Id = None
    labels: Id = None
    dims: Any = msgspec.field(default=None, name="Input Dims")
    types: Any = msgspec.field(default=None, name="Input type")


class TraceEvent(msgspec.Struct, gc=False):
    """Fields of an event that are decoded; times stay text."""

    name: Id = ""
    ph: str = ""
    cat: str | None = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    pid: Id = None
    tid: Id = None
    id: Id = None
    args: TraceArgs | None = None


_FLOWS = {
    ("async_npu", "s"): FlowKind.TORCH,
    ("HostToDevice", "s"): FlowKind.LAUNCH,
    ("HostToDevice", "f"): FlowKind.TASK,
    ("MsTx", "s"): FlowKind.MARK,
    ("MsTx", "f"): FlowKind.DEVICE_RANGE,
}
_MARK_FLOWS = (FlowKind.MARK, FlowKind.DEVICE_RANGE)
# These columns come from the arguments of events.
_ARGS: Mapping[int, tuple[str, ...]] = {
    RowKind.MARKS: ("event_type", "domain"),
    RowKind.DEVICE: _TASK,
    RowKind.COLLECTIVES: ("data_type", "count"),
    RowKind.COPIES: (*_TASK, "bytes", "direction"),
    RowKind.CALLS: ("sequence", "forward"),
    RowKind.SHAPES: ("dims", "types"),
    RowKind.QUEUE: ("number",),
}
_NO_ARGS = TraceArgs()


def is_trace_view(path: Path) -> bool:
    """Return by its first events whether torch_npu wrote a trace, whatever its name.

    A file with torch_npu's name that says nothing else counts, so that reading it says why.
    """
    is_named = path.name in TRACE_NAMES
    try:
        top, events = read_first(path, msgspec.json.Decoder(list[TraceEvent]).decode)
    except TraceError:
        return is_named
    return _OTHER_WRITERS.isdisjoint(top) and (is_named or any(map(_is_of_npu, events)))


def _is_of_npu(event: TraceEvent) -> bool:
    args = event.args or _NO_ARGS
    if event.ph == "M":
        is_npu = event.name == "process_labels" and str(args.labels).startswith("NPU")
        return is_npu or (event.name == "process_name" and args.name in _PROCESSES)
    if (event.cat, event.ph) in _FLOWS or args.stream is not None or args.task is not None:
        return True
    # No other profiler writes times of calls as texts.
    is_call = event.cat in _CALL_CATEGORIES or args.level is not None
    return event.ph == "X" and is_call and bytes(event.ts).startswith(b'"')


class _TraceColumns:
    """Columns that grow with every batch of events."""

    def __init__(self, wanted: tuple[int, ...]) -> None:
        # Names and lanes are numbered in order of appearance.
        self.names: dict[str, int] = defaultdict(count().__next__)
        self.lanes: dict[tuple[Id, Id], int] = defaultdict(count().__next__)
        self.lost = 0
        self.metadata: dict[tuple[str, Id, Id], str] = {}
        self.first_ns = UNKNOWN
        self._wanted = wanted
        self._flows = {
            key: flow
            for key, flow in _FLOWS.items()
            if RowKind.FLOWS in wanted and (flow in _MARK_FLOWS) is (RowKind.MARKS in wanted)
        }
        self._parts: dict[int, dict[str, list[Any]]] = {kind: {} for kind in wanted}
        for kind in wanted:
            self._append(kind, [])

    def add(self, events: Iterable[TraceEvent]) -> None:
        """Add the wanted rows of a batch."""
        found: dict[int, list[TraceEvent]] = {kind: [] for kind in self._wanted}
        for event in events:
            ph = event.ph
            if ph == "X":
                if self.first_ns == UNKNOWN:
                    self.first_ns = int(since_1970([event.ts])[0])
                kind = self._kind(event)
                if kind in found:
                    found[kind].append(event)
            elif (event.cat, ph) in self._flows:
                found[RowKind.FLOWS].append(event)
            elif ph == "M":
                self._add_metadata(event)
        for kind, rows in found.items():
            if rows:
                self._append(kind, rows)

    def rows(self, kind: int) -> dict[str, Int64s]:
        """Return the columns of one kind in the order of the file, and release them."""
        columns = self._parts.pop(kind)
        return {name: np.concatenate(columns.pop(name)).astype(np.int64) for name in list(columns)}

    def _kind(self, event: TraceEvent) -> int:
        """Return the kind of an event; -1 for events that are never read."""
        if RowKind.CALLS in self._wanted:
            level = (event.args or _NO_ARGS).level
            return RowKind.CALLS if event.cat in _CALL_CATEGORIES or level is not None else -1
        if RowKind.SHAPES in self._wanted:
            return RowKind.SHAPES if event.cat == "cpu_op" and event.name in NPU_PRODUCTS else -1
        if not event.cat:
            args = event.args or _NO_ARGS
            if args.event_type is not None:
                return RowKind.MARKS
            if args.task is not None:
                copies = RowKind.COPIES in self._wanted and {args.task, event.name} & {*COPIES}
                return RowKind.COPIES if copies else RowKind.DEVICE
            if args.stream is not None:
                return RowKind.DEVICE_RANGES
            process = self.metadata.get(("process_name", event.pid, None), COMMUNICATION[0])
            if args.connection is None or process not in COMMUNICATION:
                return -1
            return RowKind.COLLECTIVES if RowKind.COLLECTIVES in self._wanted else RowKind.DEVICE
        if event.cat in _QUEUE:
            return RowKind.QUEUE
        step = event.cat == "cpu_op" and str(event.name).startswith(STEP)
        return RowKind.STEPS if step else -1

    def _add_metadata(self, event: TraceEvent) -> None:
        args, name = event.args or _NO_ARGS, str(event.name)
        if name in ("process_name", "process_labels", "thread_name"):
            key = (name, event.pid, event.tid if name == "thread_name" else None)
            self.metadata[key] = str(args.labels if name == "process_labels" else args.name)

    def _append(self, kind: int, events: list[TraceEvent]) -> None:
        start = since_1970([event.ts for event in events])
        sound = start != UNKNOWN
        found: dict[str, Any] = {
            "start_ns": start,
            "lane": [self.lanes[event.pid, event.tid] for event in events],
        }
        if kind == RowKind.FLOWS:
            found["kind"] = [self._flows[event.cat or "", event.ph] for event in events]
            found["id"] = [whole_number(event.id) for event in events]
        else:
            length = nanoseconds([event.dur for event in events])
            sound &= (length >= 0) & (length < MAX_TIME)
            found["end_ns"] = start + np.where(sound, length, 0)
            sound &= found["end_ns"] < MAX_TIME
            found["name"] = [self.names[str(event.name)] for event in events]
            if kind in (RowKind.CALLS, RowKind.QUEUE):
                found["category"] = [self._code(event.cat) for event in events]
            args = [event.args or _NO_ARGS for event in events]
            for name in _ARGS.get(kind, ()):
                convert = whole_number if name in _NUMBERS else self._code
                found[name] = [convert(getattr(each, name)) for each in args]
        self.lost += int(np.count_nonzero(~sound))
        for column, values in found.items():
            array = np.asarray(values, np.int64 if column in _WIDE else np.int32)
            self._parts[kind].setdefault(column, []).append(array[sound])

    def _code(self, value: Any) -> int:
        return -1 if value is None else self.names[str(value)]


@dataclass(frozen=True, eq=False)
class TraceView:
    """Rows of a trace; times are nanoseconds since 1970.

    Attributes:
        names: Texts of the codes in the columns.
        lanes: (process, thread) of each lane.
        metadata: Names and labels of processes and threads.
        tables: Columns by `RowKind`, in the order of the file. All kinds have start_ns and lane.
            ``FLOWS`` have kind (a member of `FlowKind`) and id; all others have end_ns, name and
            the arguments in `_ARGS`; ``CALLS`` and ``QUEUE`` have category. Of what an event lacks,
            codes are -1 and numbers `UNKNOWN`.
        first_ns: Start of the first event in the file, `UNKNOWN` without any.
        problems: What was lost, and where the file is cut off.
        complete: Whether it was read to its end.
    """

    names: list[str]
    lanes: list[tuple[Id, Id]]
    metadata: Mapping[tuple[str, Id, Id], str]
    tables: Mapping[int, dict[str, Int64s]]
    first_ns: int
    problems: list[str]
    complete: bool

    def process(self, lane: int) -> str | None:
        """Return the name of a lane's process, None if it has none."""
        return self.metadata.get(("process_name", self.lanes[lane][0], None))

    def thread(self, lane: int) -> str | None:
        """Return the name of a lane's thread, None if it has none."""
        return self.metadata.get(("thread_name", *self.lanes[lane]))

    def label(self, lane: int) -> str:
        """Return the label of a lane's process, such as "NPU 0"."""
        return self.metadata.get(("process_labels", self.lanes[lane][0], None), "")

    def lanes_of(self, *processes: str | None) -> Int64s:
        """Return the lanes of processes with one of these names; None means without a name."""
        found = [lane for lane in range(len(self.lanes)) if self.process(lane) in processes]
        return np.array(found, np.int64)

    def threads(self) -> Int64s:
        """Return the thread id of each lane, a number below 0 if it is not a number."""
        numbers = [
            tid if isinstance(tid, int) and 0 <= tid < 1 << 62 else -1 - lane
            for lane, (_, tid) in enumerate(self.lanes)
        ]
        return np.array([*numbers, -1], np.int64)[:-1]


def read_trace_view(path: Path, *wanted: int) -> TraceView:
    """Read some kinds of rows of a trace, complete or cut off; takes about 5 ms per MB.

    Memory depends on the wanted rows only: 24 to 44 bytes each.

    Args:
        path: The file.
        wanted: Members of `RowKind`.

    Raises:
        TraceError: It cannot be read, or is not a trace.
    """
    columns = _TraceColumns(wanted)
    stream = read_batches(path, msgspec.json.Decoder(list[TraceEvent]).decode, columns.add)
    texts = [
        (stream.lost, Loss(f"skipped {stream.lost} events that cannot be read")),
        (columns.lost, Loss(f"skipped {columns.lost} events with impossible times")),
    ]
    return TraceView(
        list(columns.names),
        list(columns.lanes),
        columns.metadata,
        {kind: columns.rows(kind) for kind in wanted},
        columns.first_ns,
        [with_name(path.name, text) for text in stream.problems]
        + [text for count, text in texts if count],
        stream.complete,
    )
