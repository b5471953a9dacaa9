"""Events of a trace_view.json as columns: what was asked for and nothing else."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lightning_rlprof.loaders.ascend_kept import (
    COMMUNICATION,
    COPIES,
    LANES,
    QUEUE,
    WAITS,
    AscendArgs,
    AscendEvent,
    Flow,
    Id,
    Kept,
)
from lightning_rlprof.loaders.ascend_times import (
    LARGEST_TIME,
    stream_number,
    units,
    whole_number,
)
from lightning_rlprof.loaders.chrome_events import nanoseconds
from lightning_rlprof.loaders.kernels import UNKNOWN
from lightning_rlprof.loaders.products import NPU_PRODUCTS
from lightning_rlprof.spans import Int64s

__all__ = ["AscendColumns", "Codes"]

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
