"""A writer of small torch.profiler traces; times are nanoseconds, written as torch writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from lightning_rlprof.loaders.chrome_events import (
    MAX_EVENT_BYTES,
    SIZE,
    ChromeStream,
    Event,
    Source,
)

PID = 4000
BASE = 1_719_853_884_000_000_000
AFTER = {"traceName": "a", "displayTimeUnit": "ms", "baseTimeNanoseconds": BASE}
Layout = Literal["torch", "spaced", "compact"]
_INDENT = {"torch": 2, "spaced": 0, "compact": -1}
Id = int | float | str | None


def microseconds(ns: int) -> msgspec.Raw:
    return msgspec.Raw(f"{'-' * (ns < 0)}{abs(ns) // 1000}.{abs(ns) % 1000:03d}".encode())


class ChromeTrace:
    """Events in order of writing, and what stands before and after them."""

    def __init__(self, before: Mapping[str, Any] | None = None, after: Any = AFTER) -> None:
        self.before = {"schemaVersion": 1} if before is None else before
        self.after = after
        self.events: list[dict[str, Any] | msgspec.Raw] = []

    def event(
        self, cat: str, name: str, start: int, end: int, pid: Id, tid: Id, **args: Any
    ) -> dict[str, Any]:
        found = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid}
        found |= {"ts": microseconds(start), "dur": microseconds(end - start), "args": args}
        self.events.append(found)
        return found

    def mark(self, name: str, start: int, end: int, tid: Id = 1, pid: Id = PID) -> None:
        self.event("user_annotation", name, start, end, pid, tid)

    def shadow(self, name: str, start: int, end: int, stream: int = 7, device: int = 0) -> None:
        self.event("gpu_user_annotation", name, start, end, device, stream)

    def call(
        self, number: int, at: int, tid: Id = 1, name: str = "cudaLaunchKernel", pid: Id = PID
    ) -> None:
        self.event("cuda_runtime", name, at, at + 5, pid, tid, correlation=number)

    def kernel(self, number: int, start: int, end: int, name: str = "gemm", **args: Any) -> None:
        args = {"device": 0, "stream": 7, "correlation": number, **args}
        self.event("kernel", name, start, end, args["device"], args["stream"], **args)

    def launched(self, number: int, at: int, tid: Id = 1, **args: Any) -> None:
        """Launch a kernel that runs at once, for 10 ns."""
        self.call(number, at, tid)
        self.kernel(number, at + 10, at + 20, **args)

    def encode(self, layout: Layout = "torch", *, bare: bool = False) -> bytes:
        events: Any = self.events
        top = events if bare else {**self.before, "traceEvents": events, **self.after}
        return msgspec.json.format(msgspec.json.encode(top), indent=_INDENT[layout])

    def write(self, path: Path, layout: Layout = "torch") -> Path:
        path.write_bytes(self.encode(layout))
        return path


def stream_of(
    path: Path, size: int = SIZE, most: int = MAX_EVENT_BYTES
) -> tuple[list[dict[str, Any]], ChromeStream[Event]]:
    """Read all events of a file as plain data."""
    found: list[dict[str, Any]] = []
    with Source(path) as source:
        stream = ChromeStream(source, msgspec.json.Decoder(list[Event]).decode, size, most)
        for batch in stream:
            found += [{"ph": e.ph, "name": e.name, "ts": bytes(e.ts)} for e in batch]
    return found, stream


def read_bytes(
    data: bytes, folder: Path, *bounds: int
) -> tuple[list[dict[str, Any]], ChromeStream[Event]]:
    path = folder / "trace.json"
    path.write_bytes(data)
    return stream_of(path, *bounds)


SENT = {"Collective name": "allreduce", "In msg nelems": 2**40, "dtype": "Float", "Group size": 8}


def written_of_all_kinds() -> ChromeTrace:
    """Return events of every kind that a loader takes."""
    trace, pid = ChromeTrace(), PID
    for number in range(12):
        trace.mark("actor_update", 0, 50)
        trace.shadow("x", 0, 50)
        trace.launched(number, 10, name="ncclKernel", **{"External id": number}, **SENT)
        numbers = {"Sequence number": number, "Fwd thread id": number % 2, "External id": number}
        trace.event("cpu_op", "record_param_comms", 5, 30, pid, 1, **numbers, **SENT)
        shapes = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"]}
        trace.event("cpu_op", "aten::mm", 31, 35, pid, 1, **shapes)
        trace.event("python_function", "nn.Module: A", 5, 30, pid, 1, **{"Python parent id": None})
        args = {"device": 0, "stream": 7, "correlation": number, "bytes": 7}
        trace.event("gpu_memcpy", "Memcpy HtoD (a -> b)", 10, 20, 0, 7, **args)
        args = {"Device Type": 1, "Device Id": 0, "Total Allocated": 5, "Total Reserved": 6}
        trace.event("cpu_instant_event", "[memory]", 10, 20, pid, 1, **args)["ph"] = "i"
        trace.event("", "power", 10, 20, 0, 1, value=5.5)["ph"] = "C"
    return trace
