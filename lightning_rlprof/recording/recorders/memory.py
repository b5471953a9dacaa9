"""Memory of a capture: every allocation for torch's viewer, samples over time, numbers of spans."""

import inspect
import logging
import os
import pickle
import threading
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter_ns
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError, described
from lightning_rlprof.recording import accelerator
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.records.notes import Code, Fact, Notes
from lightning_rlprof.records.records import Header, Kind, Number
from lightning_rlprof.records.run_directory import make_capture_folder
from lightning_rlprof.system.process import resident_bytes

log = logging.getLogger(__name__)

_VIEWER = "https://docs.pytorch.org/memory_viz"
_FILE = "memory-timeline.jsonl"
_COLUMNS = (
    "device_allocated_bytes",
    "device_reserved_bytes",
    "device_used_bytes",
    "host_rss_bytes",
)
_WIDTH = 1 + len(_COLUMNS)
_UNKNOWN = -1
_INTERVAL_MS = 10.0
_STOP_S = 5.0
_ROWS_AT_ONCE = 10_000


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
        log.error("no memory snapshot of the out-of-memory error: %s", error, exc_info=error)


class MemorySnapshotRecorder(Recorder):
    """Write ``memory-snapshot_rank0_pid42.pickle`` per capture, and one when memory runs out.

    torch keeps the history of allocations only while a capture is open. The snapshot is taken and
    written on the training thread as the capture closes. torch forgets the history when it is
    switched off. Pickling holds the interpreter's lock, so another thread would only move the pause
    into later steps.

    When an allocation fails in a capture, a snapshot goes to ``oom-step-000003`` beside the
    captures' folders, once per step, before OutOfMemoryError is raised, unchanged.

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
        self._told: set[Code] = set()
        self._written: set[int] = set()
        self._unwatched = self._watch()

    def open(self, out: Path) -> None:
        """Start the history.

        Raises:
            RecorderError: Other code is recording it, and would lose it to this capture.
        """
        memory = self._memory()
        if memory is None:
            text = (
                f"memory.level: no snapshots on {self._kind!r}: "
                "torch does not record allocations there"
            )
            text = f"{text}; the timeline is still recorded"
            self._say_once(Code.SNAPSHOTS_UNSUPPORTED, text, device=self._kind)
            return
        if self._unwatched:
            self._say_once(Code.SNAPSHOTS_UNWATCHED, self._unwatched)
        is_on = getattr(torch._C, f"_{self._kind}_isHistoryEnabled", None)
        if is_on is not None and is_on():
            raise RecorderError(
                "another part of the program records allocations already; "
                "remove your own _record_memory_history, or memory.level: snapshot"
            )
        self._out = out
        record = memory._record_memory_history
        wanted = {"context": "all", "stacks": "python", "max_entries": self._max_entries}
        # Versions of torch since 2.6 accept different ones of these options.
        wanted["clear_history"] = True
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
        facts: dict[str, Fact] = {
            "device": f"{self._kind}:{index}",
            "wanted_bytes": size,
            "free_bytes": free,
        }
        if not self._recording:
            advice = "no snapshot, because no capture was open: add this step to `steps`"
            self._say_once(Code.OUT_OF_MEMORY, f"{what}; {advice}", **facts)
        elif self._step not in self._written:
            self._written.add(self._step)
            try:
                path = self._write(self._out.parent / f"oom-step-{self._step:06d}")
                text = f"see {path.parent.name}/{path.name} in {_VIEWER}"
            except Exception as error:
                text = f"the snapshot could not be written ({described(error)})"
            text = f"{what}, in step {self._step}; {text}"
            self.note(Code.OUT_OF_MEMORY, text, step=self._step, **facts)

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
        except Exception as error:  # Some allocators and devices have no observer.
            return f"no snapshot will be written on an out-of-memory error ({error})"
        _Process.watched.add(self._kind)
        return ""

    def _memory(self) -> Any:
        """Return torch's module that records allocations on this device, or None."""
        memory = getattr(getattr(torch, self._kind, None), "memory", None)
        return memory if hasattr(memory, "_record_memory_history") else None

    def _write(self, folder: Path) -> Path:
        """Write a snapshot, whole or not at all."""
        make_capture_folder(folder)
        path = folder / f"memory-snapshot_rank{self._rank}_pid{os.getpid()}.pickle"
        part = path.with_suffix(".part")
        snapshot = self._memory()._snapshot()
        for entry in _with_frames(snapshot):
            # Depth is not an option of torch, and a training's stacks are some hundred frames deep.
            entry["frames"] = entry["frames"][: self._stack_depth]
        try:
            with part.open("wb") as file:
                pickle.dump(snapshot, file)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path

    def _say_once(self, code: Code, text: str, **facts: Fact) -> None:
        if code not in self._told:
            self._told.add(code)
            self.note(code, text, **facts)


def _with_frames(snapshot: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every part of a snapshot that has a stack."""
    for trace in snapshot["device_traces"]:
        yield from (entry for entry in trace if "frames" in entry)
    for segment in snapshot["segments"]:
        yield from (part for part in (segment, *segment["blocks"]) if "frames" in part)


class MemoryTimelineRecorder(Recorder):
    """Write one ``memory-timeline.jsonl`` per capture.

    Its first line is an object that names columns and units; every other line is an array, one
    sample: ``clock_ns`` on the clock of the run's spans, then bytes, null where the device did not
    tell. A column that is never known, as those of a device on a CPU, is left out.

    Args:
        kind: The kind of device, as `accelerator.device_kind` names it.
        interval_ms: Time between two samples.
    """

    def __init__(self, kind: str, interval_ms: float) -> None:
        self._kind, self._interval_ms = kind, interval_ms
        self._out = Path()
        self._sampler: _Sampler | None = None

    def open(self, out: Path) -> None:
        """Start sampling the device that the calling thread uses."""
        self._out = out
        self._sampler = _Sampler(self._kind, self._interval_ms / 1000, self.note)
        self._sampler.thread.start()

    def close(self) -> None:
        """Stop sampling, sample once more, and write the file."""
        sampler, self._sampler = self._sampler, None
        if sampler is None:
            return
        sampler.stop()
        make_capture_folder(self._out)
        names, samples = sampler.known()
        units = [name.rpartition("_")[2] for name in names]
        head = {"columns": names, "units": units, "interval_ms": self._interval_ms}
        encode = msgspec.json.Encoder().encode_lines
        with (self._out / _FILE).open("wb") as file:
            file.write(encode([head]))
            for start in range(0, len(samples), _ROWS_AT_ONCE):
                rows = samples[start : start + _ROWS_AT_ONCE].tolist()
                file.write(encode([[None if n == _UNKNOWN else n for n in row] for row in rows]))


class _Sampler:
    """One capture's thread and its samples, ``_WIDTH`` numbers each."""

    def __init__(self, kind: str, interval_s: float, note: Notes) -> None:
        self._kind, self._interval_s, self._note = kind, interval_s, note
        self._index = accelerator.device_index()
        self._numbers = array("q")
        self._end = threading.Event()
        self._failed = False
        # A daemon, since it may be inside a driver that never answers when the process ends.
        self.thread = threading.Thread(target=self._run, name="rlprof-memory", daemon=True)

    def stop(self) -> None:
        """Take a last sample on this thread after the other one has ended."""
        self._end.set()
        self.thread.join(_STOP_S)
        if self.thread.is_alive():
            self._note(
                Code.MEMORY_TIMELINE_CUT,
                f"the memory timeline stopped: a call into the driver of {self._kind} "
                "does not return",
            )
        elif not self._failed:
            self._sample()

    def known(self) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Return the names of the columns of which anything is known, and the samples in these."""
        # The array is copied, as a thread that hangs may still add to it.
        samples = np.array(self._numbers, np.int64).reshape(-1, _WIDTH)
        known = [0, *np.flatnonzero((samples[:, 1:] != _UNKNOWN).any(axis=0)) + 1]
        return [("clock_ns", *_COLUMNS)[at] for at in known], samples[:, known]

    def _run(self) -> None:
        try:
            if self._index is not None:
                accelerator.use_device(self._kind, self._index)
            self._sample()
            while not self._end.wait(self._interval_s):
                self._sample()
        except Exception as error:
            self._failed = True
            text = f"the memory timeline ended early ({described(error)})"
            self._note(Code.MEMORY_TIMELINE_CUT, text)

    def _sample(self) -> None:
        found: dict[str, int | None] = {**accelerator.memory_bytes(self._kind)}
        found["host_rss_bytes"] = resident_bytes()
        values = (found.get(name) for name in _COLUMNS)
        known = (_UNKNOWN if value is None else value for value in values)
        self._numbers.extend((perf_counter_ns(), *known))


def build(config: ProfilerConfig, header: Header) -> list[Recorder]:
    """Return the recorders of this rank: of counters, and what ``memory.level`` adds to them."""
    wanted, kind = config.memory, header.device
    found: list[Recorder] = [MemoryRecorder(kind)]
    if wanted.level in ("timeline", "snapshot"):
        found.append(MemoryTimelineRecorder(kind, _INTERVAL_MS))
    if wanted.level == "snapshot":
        sizes = {"max_entries": wanted.max_entries, "stack_depth": wanted.stack_depth}
        found.append(MemorySnapshotRecorder(kind, header.rank, **sizes))
    return found


class MemoryRecorder(Recorder):
    """Store `device.memory_bytes` and ``host_rss_bytes`` with every span that ends in a capture.

    The allocator keeps one peak, so it is reset as spans begin and end, and a span's own peak is
    the highest of its pieces. A piece counts for every span that is open in it, so that tasks which
    interleave get their peaks as nested spans do.

    Args:
        kind: The kind of device, as `accelerator.device_kind` names it.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._peaks: dict[object, int] = {}

    def open(self, out: Path) -> None:
        """Begin with no span open."""
        self._peaks = {}

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Open the span's peak, which `exit` asks for by the token."""
        self._settle(accelerator.memory_bytes(self._kind))
        token = object()
        self._peaks[token] = 0
        return token

    def exit(self, token: object) -> Mapping[str, Number] | None:
        """Return the span's counters in bytes."""
        found: dict[str, Number] = dict(accelerator.memory_bytes(self._kind))
        self._settle(found)
        peak = self._peaks.pop(token)
        if "device_peak_bytes" in found:
            found["device_peak_bytes"] = peak
        if (rss := resident_bytes()) is not None:
            found["host_rss_bytes"] = rss
        return found

    def _settle(self, found: Mapping[str, Number]) -> None:
        """Give the piece that ends now to all open spans, and start the next."""
        if "device_peak_bytes" in found:
            piece = int(found["device_peak_bytes"])
            self._peaks = {token: max(peak, piece) for token, peak in self._peaks.items()}
            accelerator.reset_peak(self._kind)
