"""Record every allocation of a capture, for torch's memory viewer; also when memory runs out."""

import inspect
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from lightning_rlprof.errors import RecorderError, described
from lightning_rlprof.model import Kind
from lightning_rlprof.recorders.base import Recorder

__all__ = ["MemorySnapshotRecorder"]

log = logging.getLogger(__name__)

_VIEWER = "https://docs.pytorch.org/memory_viz"


class _Process:
    """What is global to a process: torch's observer is attached once and can never be detached."""

    watched: ClassVar[set[str]] = set()
    recorder: "MemorySnapshotRecorder | None" = None


def _out_of_memory(index: int, size: int, limit: int, free: int) -> None:
    """Serve torch's allocator, which calls this on any thread before it raises its error.

    Whatever leaves this function would be raised in the place of OutOfMemoryError.
    """
    try:
        if _Process.recorder is not None:
            _Process.recorder.out_of_memory(index, size, free)
    except Exception as error:
        log.error("no memory snapshot of running out of memory: %s", error, exc_info=error)


class MemorySnapshotRecorder(Recorder):
    """Write ``memory-snapshot_rank0_pid42.pickle`` per capture, and one when memory runs out.

    torch keeps the history of allocations only while a capture is open. The snapshot is taken and
    written on the training thread as the capture closes: torch forgets the history when it is
    switched off, and pickling holds the interpreter's lock, so that a thread of its own would only
    move the pause into the steps that follow.

    When an allocation fails in a capture, a snapshot goes to ``oom-step-000003`` beside the
    captures' folders, once per step, before OutOfMemoryError is raised; that goes on as it was.

    Args:
        kind: The kind of device; one whose allocations torch does not record is said once.
        rank: For the file's name.
        max_entries: Allocations and frees to remember; older ones go.
        stack_depth: Innermost Python frames to keep of each.
    """

    def __init__(self, kind: str, rank: int, *, max_entries: int, stack_depth: int) -> None:
        self._kind, self._rank = kind, rank
        self._max_entries, self._stack_depth = max_entries, stack_depth
        self._out = Path()
        self._step = 0
        self._recording = False
        self._told: set[str] = set()
        self._written: set[int] = set()
        self._unwatched = self._watch()

    def open(self, out: Path) -> None:
        """Start the history.

        Raises:
            RecorderError: Somebody else is recording it, and would lose it to this capture.
        """
        memory = self._memory()
        if memory is None:
            text = f"memory.level: torch records no allocations on {self._kind!r}, so no snapshot"
            self._say_once("info", f"{text}; the timeline is written")
            return
        if self._unwatched:
            self._say_once("warning", self._unwatched)
        is_on = getattr(torch._C, f"_{self._kind}_isHistoryEnabled", None)
        if is_on is not None and is_on():
            raise RecorderError(
                "the history of allocations is being recorded already; "
                "leave out your own _record_memory_history, or memory.level: snapshot"
            )
        self._out = out
        record = memory._record_memory_history
        wanted = {"context": "all", "stacks": "python", "max_entries": self._max_entries}
        wanted["clear_history"] = True  # torch >= 2.6 and later know different ones of these
        known = inspect.signature(record).parameters
        record(enabled="all", **{name: wanted[name] for name in wanted if name in known})
        self._recording = True

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Know which step it is."""
        self._step = step
        return None

    def close(self) -> None:
        """Write the snapshot and switch the history off."""
        if not self._recording:
            return
        try:
            self._write(self._out)
        finally:
            self._recording = False
            self._memory()._record_memory_history(enabled=None)

    def finish(self) -> None:
        """Watch no longer: what runs out of memory after the run is not the run's."""
        if _Process.recorder is self:
            _Process.recorder = None

    def out_of_memory(self, index: int, size: int, free: int) -> None:
        """Write a snapshot of a failed allocation of ``size`` bytes; called on any thread."""
        what = f"{self._kind}:{index} is out of memory: {size:,} bytes wanted, {free:,} free"
        if not self._recording:
            advice = "no capture was open, so there is no snapshot: add this step to `steps`"
            self._say_once("warning", f"{what}; {advice}", key="outside")
        elif self._step not in self._written:
            self._written.add(self._step)
            try:
                path = self._write(self._out.parent / f"oom-step-{self._step:06d}")
                text = f"see {path.parent.name}/{path.name} in {_VIEWER}"
            except Exception as error:
                text = f"the snapshot could not be written ({described(error)})"
            self.note("warning", f"{what}, in step {self._step}; {text}")

    def _watch(self) -> str:
        """Ask torch, once per process, to tell when memory runs out; return why it will not."""
        if self._memory() is None:
            return ""
        _Process.recorder = self
        if self._kind in _Process.watched:
            return ""
        name = f"_{self._kind}_attach_out_of_memory_observer"
        try:
            getattr(torch._C, name)(_out_of_memory)
        except Exception as error:  # not with every allocator, nor on every device
            return f"no snapshot will be written when memory runs out ({error})"
        _Process.watched.add(self._kind)
        return ""

    def _memory(self) -> Any:
        """Return torch's module that records allocations on this device, or None."""
        memory = getattr(getattr(torch, self._kind, None), "memory", None)
        return memory if hasattr(memory, "_record_memory_history") else None

    def _write(self, folder: Path) -> Path:
        """Write a snapshot, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"memory-snapshot_rank{self._rank}_pid{os.getpid()}.pickle"
        part = path.with_suffix(".part")
        snapshot = self._memory()._snapshot()
        for entry in _with_frames(snapshot):
            # torch takes no depth. Python stacks of a training are some hundred frames deep.
            entry["frames"] = entry["frames"][: self._stack_depth]
        try:
            with part.open("wb") as file:
                pickle.dump(snapshot, file)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path

    def _say_once(self, level: str, text: str, key: str = "") -> None:
        if (key or text) not in self._told:
            self._told.add(key or text)
            self.note(level, text)


def _with_frames(snapshot: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every part of a snapshot that has a stack."""
    for trace in snapshot["device_traces"]:
        yield from (entry for entry in trace if "frames" in entry)
    for segment in snapshot["segments"]:
        yield from (part for part in (segment, *segment["blocks"]) if "frames" in part)
