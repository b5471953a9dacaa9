"""Fakes of what a GPU keeps of its memory; real ones need a GPU.

`FakeAllocator` stands in for `recording.accelerator`. `FakeHistory` is a strict fake of torch's
recording of allocations: its functions take what the installed torch's own signatures take and
nothing else, forget the history when it is switched off, and an observer that raises replaces the
error that it was told of, as in torch.
"""

import inspect
from typing import Any

import pytest
import torch

from lightning_rlprof.recording import accelerator
from lightning_rlprof.recording.recorders import memory

DEEP = 100
"""Frames of every stack."""


class FakeAllocator:
    """An allocator with one peak for everybody, as torch's."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def memory_bytes(self, kind: str) -> dict[str, int]:
        return {
            "device_allocated_bytes": self.allocated,
            "device_peak_bytes": self.peak,
            "device_reserved_bytes": 1000,
            "device_used_bytes": 5000,
            "device_other_bytes": 4000,
        }

    def reset_peak(self, kind: str) -> None:
        self.peak = self.allocated

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(accelerator, "memory_bytes", self.memory_bytes)
        patch.setattr(accelerator, "reset_peak", self.reset_peak)


class FakeHistory:
    """Records `allocate` while it is on; `run_out` is an allocation that fails."""

    def __init__(self) -> None:
        self.enabled: str | None = None
        self.asked: list[dict[str, Any]] = []
        self.trace: list[dict[str, Any]] = []
        self.observers: list[Any] = []

    def allocate(self, size: int, action: str = "alloc") -> None:
        if self.enabled:
            frames = [{"filename": "a.py", "line": at, "name": "f"} for at in range(DEEP)]
            self.trace.append({"action": action, "size": size, "frames": frames})
            self.trace = self.trace[-self.asked[-1]["max_entries"] :]

    def run_out(self, size: int) -> None:
        self.allocate(size, "oom")
        for observer in self.observers:
            observer(0, size, 80 << 30, 5)
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")

    def record(self, *args: Any, **kwargs: Any) -> None:
        given = _SIGNATURES["_record_memory_history"].bind(*args, **kwargs)
        given.apply_defaults()
        asked = dict(given.arguments)
        assert asked["enabled"] in (None, "state", "all")
        assert asked["context"] in (None, "state", "alloc", "all")
        assert asked["stacks"] in ("python", "all")
        assert asked["max_entries"] > 0
        self.asked.append(asked)
        self.enabled = asked["enabled"]
        if self.enabled is None or asked.get("clear_history", True):  # torch 2.6 always does
            self.trace = []

    def snapshot(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        _SIGNATURES["_snapshot"].bind(*args, **kwargs)
        block = {"size": 512, "state": "inactive", "frames": []}
        other = {"size": 1, "state": "inactive"}  # as allocated before the history was on
        segment = {"address": 1, "total_size": 513, "blocks": [block, other]}
        return {"segments": [segment], "device_traces": [list(self.trace), []]}

    def attach(self, observer: Any, /) -> None:
        self.observers.append(observer)

    def install(self, patch: pytest.MonkeyPatch, *, observes: bool = True) -> None:
        def record(*args: Any, **kwargs: Any) -> None:
            self.record(*args, **kwargs)

        record.__signature__ = _SIGNATURES["_record_memory_history"]  # type: ignore[attr-defined]
        patch.setattr(torch.cuda.memory, "_record_memory_history", record)
        patch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)
        patch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: bool(self.enabled), raising=False)
        attach = self.attach if observes else _refuses
        name = "_cuda_attach_out_of_memory_observer"
        patch.setattr(torch._C, name, attach, raising=False)
        patch.setattr(memory._Process, "watched", set())
        patch.setattr(memory._Process, "recorder", None)


def _refuses(observer: Any, /) -> None:
    raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver")


_SIGNATURES = {
    name: inspect.signature(getattr(torch.cuda.memory, name))
    for name in ("_record_memory_history", "_snapshot")
}
