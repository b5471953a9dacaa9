"""Events of a trace_view.json as columns: what was asked for and nothing else.

What a trace_view.json can be asked for, and what is decoded of one event.

A trace_view.json read as a stream, and who is who in it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.units import LARGEST_TIME, stream_number, units, whole_number
from lightning_rlprof.loaders.chrome.byte_source import Source
from lightning_rlprof.loaders.chrome.decoding import nanoseconds
from lightning_rlprof.loaders.chrome.event_stream import SIZE, ChromeStream
from lightning_rlprof.loaders.host_calls import NPU_PRODUCTS
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN

Id = int | float | str | None
"""As found in traces: 7, "937", "Group 0 Communication", null."""

COMMUNICATION = ("HCCL", "Communication")
"""Process of the collectives, in older and in newer versions."""

LANES = ("Computing", "Communication", "Communication(Not Overlapped)", "Free")
"""Threads of the process that says what overlapped with what; its rows have the same names."""

COPIES = ("MEMCPY_ASYNC", "PCIE_DMA_SQE", "SDMA_SQE")
"""What tasks that copy are called, or their types."""

QUEUE = ("enqueue", "dequeue")
"""Categories of the two ends of torch_npu's queue."""

WAITS = re.compile(r"Synchronize|aclrtMemcpy$")
"""Of names of calls of CANN that wait for the device."""


class Kept:
    """What of a trace can be asked for.

    Attributes:
        MARKS: Ranges and marks of MSTX.
        SHADOWS: What ranges became on the device that went through a stream.
        STEPS: ``ProfilerStep#N`` as torch's operators show it.
        OPERATORS: torch's operators, steps among them.
        MODULES: ``nn.Module: ...``, the only Python functions that are kept.
        DEVICE: Tasks of the device, its collectives, and what overlapped with what.
        FLOWS: Arrows between rows.
        COLLECTIVES: The collectives of the device, which then are none of its tasks.
        WAITS: Calls of CANN that wait for the device.
        COPIES: Tasks of the device that copy, which then are none of its others.
        CALLS: All that the host called, which then is nothing else.
        SHAPES: Matrix products with the shapes of their inputs, which then are nothing else.
        QUEUE: Both ends of the queue between the thread that calls and the one that launches.
    """

    MARKS, SHADOWS, STEPS, OPERATORS, MODULES, DEVICE, FLOWS, COLLECTIVES, WAITS = range(9)
    COPIES, CALLS, SHAPES, QUEUE = range(9, 13)


class Flow:
    """Kinds of arrows that are kept.

    Attributes:
        TORCH: From an operator of torch; its id is the start of the task on the device.
        LAUNCH: From a call of CANN; its id is the connection.
        TASK: To a task on the device; its id is the connection.
        MARK: From a range of MSTX.
        SHADOW: To what that became on the device.
    """

    TORCH, LAUNCH, TASK, MARK, SHADOW = range(5)


class AscendArgs(msgspec.Struct, gc=False):
    """What is decoded of the arguments of an event."""

    event_type: Id = None
    domain: Id = None
    mark_id: Id = None
    connection: Id = msgspec.field(default=None, name="connection_id")
    stream: Id = msgspec.field(default=None, name="Physic Stream Id")
    task: Id = msgspec.field(default=None, name="Task Type")
    type: Id = msgspec.field(default=None, name="data_type")
    count: Id = None
    size: Id = msgspec.field(default=None, name="size(B)")
    operation: Id = None
    sequence: Id = msgspec.field(default=None, name="Sequence number")
    forward: Id = msgspec.field(default=None, name="Fwd thread id")
    level: Id = None
    correlation: Id = msgspec.field(default=None, name="correlation_id")
    name: Id = None
    labels: Id = None
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")


class AscendEvent(msgspec.Struct, gc=False):
    """What is decoded of one event; times stay as they are written."""

    name: Id = ""
    ph: str = ""
    cat: str | None = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    pid: Id = None
    tid: Id = None
    id: Id = None
    args: AscendArgs | None = None


_FLOWS = {
    ("async_npu", "s"): Flow.TORCH,
    ("HostToDevice", "s"): Flow.LAUNCH,
    ("HostToDevice", "f"): Flow.TASK,
    ("MsTx", "s"): Flow.MARK,
    ("MsTx", "f"): Flow.SHADOW,
}
_OF_MARKS = (Flow.MARK, Flow.SHADOW)
_MODULE, _STEP = "nn.Module: ", "ProfilerStep#"
_ROWS = ("start_ns", "lane", "name", "end_ns")
_TASK = (*_ROWS, "kind", "stream", "connection")
_COLUMNS: Mapping[int, tuple[str, ...]] = {
    Kept.MARKS: (*_ROWS, "kind", "domain"),
    Kept.SHADOWS: _ROWS,
    Kept.STEPS: _ROWS,
    Kept.OPERATORS: _ROWS,
    Kept.MODULES: _ROWS,
    Kept.DEVICE: _TASK,
    Kept.FLOWS: ("start_ns", "lane", "kind", "id"),
    Kept.COLLECTIVES: (*_ROWS, "kind", "count"),
    Kept.WAITS: _ROWS,
    Kept.COPIES: (*_TASK, "bytes", "direction"),
    Kept.CALLS: (*_ROWS, "kind", "sequence", "forward"),
    Kept.SHAPES: (*_ROWS, "dims", "types"),
    Kept.QUEUE: (*_ROWS, "kind", "number"),
}
# Columns whose values may have 64 bits; the others take half of the memory.
_WIDE = {"start_ns", "end_ns", "connection", "id", "count", "bytes"}
_WIDE |= {"sequence", "forward", "number"}
_CALLED = ("cpu_op", "python_function", *QUEUE)  # and CANN's, which have a level


_NO_ARGS = AscendArgs()


class Codes(dict[Any, int]):
    """Numbers for values in the order in which they come."""

    def __missing__(self, value: Any) -> int:
        code = self[value] = len(self)
        return code


class AscendColumns:
    """Columns that grow with every batch of events; no event is kept.

    Args:
        wanted: Members of `Kept`.

    Attributes:
        names: Codes of names, domains and types.
        lanes: Codes of (process, thread).
        told: What the trace says of its processes and threads, by what it says and of whom.
        first_ns: Start of the first event of all, `UNKNOWN` without any.
        lost: Events left out because their times cannot be true.
    """

    def __init__(self, wanted: frozenset[int]) -> None:
        self.names, self.lanes, self.lost = Codes(), Codes(), 0
        self.told: dict[tuple[str, Id, Id], str] = {}
        self.first_ns = UNKNOWN
        self._wanted = wanted
        marks, device = Kept.MARKS in wanted, not wanted.isdisjoint({Kept.DEVICE, Kept.COPIES})
        self._flows = {
            key: flow for key, flow in _FLOWS.items() if (marks if flow in _OF_MARKS else device)
        }
        self._parts: dict[int, dict[str, list[Any]]] = {
            kind: {name: [] for name in columns} for kind, columns in _COLUMNS.items()
        }

    def add(self, events: Iterable[AscendEvent]) -> None:
        """Add what is wanted of a batch."""
        found: list[list[AscendEvent]] = [[] for _ in _COLUMNS]
        wanted, flows = self._wanted, self._flows
        for event in events:
            ph = event.ph
            if ph == "X":
                if self.first_ns == UNKNOWN:
                    self.first_ns = int(units([bytes(event.ts)])[0])
                kind = self._kind(event)
                if kind in wanted:
                    found[kind].append(event)
            elif (event.cat, ph) in flows:
                found[Kept.FLOWS].append(event)
            elif ph == "M":
                self._tell(event)
        for kind, own in enumerate(found):
            if own:
                self._take(kind, own)

    def rows(self, kind: int) -> dict[str, Int64s]:
        """Return the columns of one kind, in the order of the file, and forget them.

        Columns: start_ns, end_ns, lane and name. Of ``MARKS`` also kind (its type) and domain. Of
        ``DEVICE`` also kind (the type of a task, -1 for what is none), stream and connection. Of
        ``FLOWS`` instead start_ns, lane, kind (a member of `Flow`) and id. Of ``COLLECTIVES`` also
        kind (the type of an element) and count. Of ``COPIES`` those of ``DEVICE``, and bytes and
        direction (from where to where). Of ``CALLS`` also kind (the category, -1 for CANN's),
        sequence (autograd's number) and forward (the thread of its forward pass). Of ``SHAPES``
        also dims and types, texts of JSON as they stand there, "" without. Of ``QUEUE`` also kind
        (the category) and number (that both ends of one have).
        """
        parts, joined = self._parts.pop(kind), {}
        for column in _COLUMNS[kind]:
            empty = np.empty(0, np.int64 if column in _WIDE else np.int32)
            joined[column] = np.concatenate([empty, *parts.pop(column)]).astype(np.int64)
        return joined

    def _kind(self, event: AscendEvent) -> int:
        """Tell what an event is; -1 for what is never kept."""
        if Kept.CALLS in self._wanted:
            level = (event.args or _NO_ARGS).level
            return Kept.CALLS if event.cat in _CALLED or level is not None else -1
        if Kept.SHAPES in self._wanted:
            return Kept.SHAPES if event.cat == "cpu_op" and event.name in NPU_PRODUCTS else -1
        if not event.cat:
            if Kept.WAITS in self._wanted:
                return Kept.WAITS if WAITS.search(str(event.name)) else -1
            args = event.args or _NO_ARGS
            if args.event_type is not None or args.mark_id is not None:
                return Kept.MARKS
            if args.task is not None or event.name in LANES:
                copies = Kept.COPIES in self._wanted and {args.task, event.name} & {*COPIES}
                return Kept.COPIES if copies else Kept.DEVICE
            if args.stream is not None:
                return Kept.SHADOWS
            process = self.told.get(("process_name", event.pid, None), COMMUNICATION[0])
            group = args.connection is not None and process in COMMUNICATION
            own = Kept.COLLECTIVES if Kept.COLLECTIVES in self._wanted else Kept.DEVICE
            return own if group else -1
        if event.cat in QUEUE:
            return Kept.QUEUE
        if event.cat == "cpu_op":
            step = Kept.OPERATORS not in self._wanted and str(event.name).startswith(_STEP)
            return Kept.STEPS if step else Kept.OPERATORS
        module = event.cat == "python_function" and str(event.name).startswith(_MODULE)
        return Kept.MODULES if module else -1

    def _tell(self, event: AscendEvent) -> None:
        args = event.args or _NO_ARGS
        of_thread = event.name == "thread_name"
        key = (str(event.name), event.pid, event.tid if of_thread else None)
        if of_thread or event.name == "process_name":
            self.told[key] = str(args.name)
        elif event.name == "process_labels":
            self.told[key] = str(args.labels)

    def _take(self, kind: int, events: list[AscendEvent]) -> None:
        lanes, names = self.lanes, self.names
        start = units([bytes(event.ts) for event in events])
        sound = start != UNKNOWN
        found: dict[str, Any] = {
            "start_ns": start,
            "lane": [lanes[event.pid, event.tid] for event in events],
        }
        if kind == Kept.FLOWS:
            flows = self._flows
            found["kind"] = [flows[event.cat, event.ph] for event in events]  # type: ignore[index]
            found["id"] = [whole_number(event.id) for event in events]
        else:
            length = nanoseconds([event.dur for event in events])
            sound &= (length >= 0) & (length < LARGEST_TIME)
            found["end_ns"] = start + np.where(sound, length, 0)
            sound &= found["end_ns"] < LARGEST_TIME
            found["name"] = [names[str(event.name)] for event in events]
            if kind in (Kept.CALLS, Kept.QUEUE):
                found["kind"] = [self._code(event.cat) for event in events]
            found |= self._details(kind, [event.args or _NO_ARGS for event in events])
        lost = int(np.count_nonzero(~sound))
        self.lost += lost
        for column, values in found.items():
            array = np.asarray(values, np.int64 if column in _WIDE else np.int32)
            self._parts[kind][column].append(array[sound] if lost else array)

    def _details(self, kind: int, args: list[AscendArgs]) -> dict[str, Any]:
        names = self.names
        if kind == Kept.MARKS:
            return {
                "kind": [names[str(each.event_type)] for each in args],
                "domain": [names["" if each.domain is None else str(each.domain)] for each in args],
            }
        if kind == Kept.COLLECTIVES:
            return {
                "kind": [names["" if each.type is None else str(each.type)] for each in args],
                "count": [whole_number(each.count) for each in args],
            }
        if kind == Kept.CALLS:
            return {
                "sequence": [whole_number(each.sequence) for each in args],
                "forward": [whole_number(each.forward) for each in args],
            }
        if kind == Kept.QUEUE:
            return {"number": [whole_number(each.correlation) for each in args]}
        if kind == Kept.SHAPES:
            return {
                "dims": [names[str(each.dims, "utf-8", "replace")] for each in args],
                "types": [names[str(each.types, "utf-8", "replace")] for each in args],
            }
        return self._of_task(kind, args) if kind in (Kept.DEVICE, Kept.COPIES) else {}

    def _of_task(self, kind: int, args: list[AscendArgs]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kind": [self._code(each.task) for each in args],
            "stream": [stream_number(each.stream) for each in args],
            "connection": [whole_number(each.connection) for each in args],
        }
        if kind == Kept.COPIES:
            found["bytes"] = [whole_number(each.size) for each in args]
            found["direction"] = [self._code(each.operation) for each in args]
        return found

    def _code(self, text: Id) -> int:
        return -1 if text is None else self.names[str(text)]


@dataclass(frozen=True, eq=False)
class TraceView:
    """What was asked for of a trace; times are nanoseconds since 1970.

    Attributes:
        names: Texts that the columns name, domains and types among them.
        lanes: (process, thread) of each lane.
        told: What the trace says of its processes and threads.
        tables: Columns by `Kept`, as `AscendColumns.rows` returns them.
        first_ns: Start of the first event of all, `UNKNOWN` without any.
        problems: What was lost, and how the file ended, where that was not its end.
        complete: Whether it was read to its end.
    """

    names: list[str]
    lanes: list[tuple[Id, Id]]
    told: Mapping[tuple[str, Id, Id], str]
    tables: Mapping[int, dict[str, Int64s]]
    first_ns: int
    problems: list[str]
    complete: bool

    def process(self, lane: int) -> str | None:
        """Return the name of a lane's process, None where the trace does not tell it."""
        return self.told.get(("process_name", self.lanes[lane][0], None))

    def thread(self, lane: int) -> str | None:
        """Return the name of a lane's thread, None where the trace does not tell it."""
        return self.told.get(("thread_name", *self.lanes[lane]))

    def label(self, lane: int) -> str:
        """Return what stands beside the process's name, such as "NPU 0"."""
        return self.told.get(("process_labels", self.lanes[lane][0], None), "")

    def lanes_of(self, *processes: str | None) -> Int64s:
        """Return the lanes of processes with one of these names; None is one without a name."""
        found = [lane for lane in range(len(self.lanes)) if self.process(lane) in processes]
        return np.array(found, np.int64)

    def threads(self) -> Int64s:
        """Return the system's number of each lane's thread, a number below 0 where it is none."""
        numbers = [
            tid if isinstance(tid, int) and 0 <= tid < 1 << 62 else -1 - lane
            for lane, (_, tid) in enumerate(self.lanes)
        ]
        return np.array([*numbers, -1], np.int64)[:-1]


def read_trace_view(path: Path, *wanted: int) -> TraceView:
    """Read what is wanted of a trace, complete or cut off; takes about 5 ms per MB.

    Memory is that of the columns, 24 to 44 bytes per row that is kept, whatever the file's size.
    What is wanted are members of `Kept`.

    Raises:
        TraceError: It cannot be read or is no such trace.
    """
    columns = AscendColumns(frozenset(wanted))
    with Source(path) as source:
        stream = ChromeStream(source, msgspec.json.Decoder(list[AscendEvent]), SIZE)
        if not stream.open():
            why = f" ({source.problem})" if source.problem else ""
            raise TraceError(f"{path}: is no trace: it has no array of events{why}")
        for batch in stream:
            columns.add(batch)
    texts = [
        (stream.lost, f"{stream.lost} events are left out: they cannot be read"),
        (columns.lost, f"{columns.lost} events are left out: their times are out of range"),
    ]
    return TraceView(
        list(columns.names),
        list(columns.lanes),
        columns.told,
        {kind: columns.rows(kind) for kind in wanted},
        columns.first_ns,
        [*stream.problems, *(text for count, text in texts if count)],
        stream.complete,
    )
