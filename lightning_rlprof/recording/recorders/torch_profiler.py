"""Capture torch.profiler traces: one per window, or one per cycle of mini-batches in it.

A window starts and stops torch's profiler, shows spans as rows, and ends early if it would hold too
many events, whose number is estimated from allocated memory. Traces are written on the training
thread, and compressed on others in bounded memory.
"""

import ctypes
import gc
import logging
import math
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerAction, ProfilerActivity, record_function
from torch.profiler.profiler import _KinetoProfile

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError, described
from lightning_rlprof.recording.background.readings import HostFiles, host_parts
from lightning_rlprof.recording.open_spans import OwnName
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.records.notes import Code, Fact, Level, Notes
from lightning_rlprof.records.records import STAGES, Header, Kind
from lightning_rlprof.records.run_directory import make_capture_folder
from lightning_rlprof.system.process import give_back, resident_bytes

log = logging.getLogger(__name__)

_INJECTION = "NVTX_INJECTION64_PATH"
_KEEP = ("RLPROF_KEEP_NVTX_INJECTION", "VERL_KEEP_NVTX_INJECTION")
_NOWHERE = "/nonexistent/set-aside-by-rlprof.so"

_DEVICE_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}

# Ranks of a host if no launcher says how many: few hosts have more than 8 devices.
_RANKS_PER_HOST = 8
_MAX_EVENTS = 20_000_000
_CURE = (
    "at {}; the events so far are kept. Capture fewer steps, one stage or "
    "torch_profiler.schedule, or leave out stacks and shapes"
)
_CHECK_S = 0.2  # A check takes up to 2 ms.

# These stages step no optimizer.
_NO_MINI_BATCHES = set(STAGES) - {"actor_update", "critic_update"}

_PROBE = 1 << 16

# Underscores separate the fields of a name, so they are replaced in a folder's and a role's name.
_FOREIGN = re.compile(r"[^0-9A-Za-z.=+-]+")
_MAX_NAME = 80

# Level 1 compresses a trace of 400 MB to 1/12 at 1,150 MB/s. Level 0 reaches 1/10 and is not
# faster; level 3 is not smaller, at 180 MB/s. Python's gzip at level 6 reaches 1/17 at 52 MB/s,
# and torch's own export 1/19 at 9 MB/s.
_LEVEL = 1
_GZIP = 31  # It asks zlib for gzip's header and check sum.

# Bytes. After each block it waits for the interpreter, which a busy training releases every 5 ms.
_BLOCK = 4 << 20
_TAIL = 64
_KERNEL = b'"cat": "kernel"'
Plan = Callable[[int], ProfilerAction]
"""What to do during a mini-batch, by its number in the window (from 0)."""


def refuse_nsys(environment: MutableMapping[str, str] = os.environ) -> None:
    """Raise where Nsight Systems traces CUDA in this process.

    Raises:
        RecorderError: It does; the text says what to change.
    """
    # The second variable is set by nsys only if it traces CUDA.
    if "NSYS_PROFILING_SESSION_ID" in environment and environment.get("CUDA_INJECTION64_PATH"):
        raise RecorderError(
            "torch.profiler cannot record the GPU under an nsys that traces CUDA: CUPTI serves one "
            "profiler per process; start nsys without cuda in --trace, remove one of the two, "
            "or set integrated.profile_with_npu (device) to false"
        )


def set_injection_aside(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Keep a leftover NVTX tool from taking CUPTI, and say so in the log; must come before CUDA.

    Images and Ray workers inherit ``NVTX_INJECTION64_PATH`` from an earlier profiling. The library
    that it names subscribes to CUPTI first, and traces of torch.profiler hold no kernel then, which
    no error tells. ``RLPROF_KEEP_NVTX_INJECTION=1`` leaves it, as verl's
    ``VERL_KEEP_NVTX_INJECTION=1`` does; so does nsys, whose own variable it is.

    Returns:
        What was done, for the run's notes; None where there was nothing to do.
    """
    named = environment.get(_INJECTION)
    kept = any(environment.get(key) == "1" for key in _KEEP)
    if not named or named == _NOWHERE or kept or "NSYS_PROFILING_SESSION_ID" in environment:
        return None
    environment[_INJECTION] = _NOWHERE
    text = (
        f"{_INJECTION}={named} was replaced: its tool would take CUPTI from torch.profiler; "
        f"{_KEEP[0]}=1 keeps it"
    )
    log.warning("%s", text)
    return text


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank.

    Raises:
        RecorderError: Nothing can be watched here, or nsys has the GPU's events.
    """
    return TorchProfilerRecorder(config, header)


class TorchProfilerRecorder(Recorder):
    """Write one Chrome trace per window, ``<window>_<role>_rank0-of-8_pid4.pt.trace.json.gz``.

    With a schedule it is one per cycle of mini-batches, ``…_pid4_mb3-4.pt.trace.json.gz``. Each
    span is a row. Stopping and writing take 5 to 8 µs per event on the training thread; a thread of
    its own compresses, and `finish` awaits it. What fails there is noted, and costs that trace
    alone.

    Args:
        config: What to capture.
        header: Whose files they are.
        max_events: A capture ends early at about this number.

    Raises:
        RecorderError: No activity is left to capture on this device, or nsys traces CUDA.
    """

    def __init__(
        self, config: ProfilerConfig, header: Header, max_events: int = _MAX_EVENTS
    ) -> None:
        self._config, self._header, self._max_events = config, header, max_events
        block, device = config.integrated, header.device
        self._on_device = block.profile_with_npu and device in _DEVICE_ACTIVITIES
        self.activities = [ProfilerActivity.CPU] if block.profile_with_cpu else []
        self.activities += [_DEVICE_ACTIVITIES[device]] if self._on_device else []
        if not self.activities:
            raise RecorderError(
                f"torch.profiler has nothing to capture on {device!r}: "
                "set integrated.profile_with_cpu or integrated.profile_with_npu (device) to true"
            )
        self._remark: str | None = None
        if self._on_device and device == "cuda":
            refuse_nsys()
            self._remark = set_injection_aside()
        self._out = Path()
        self._window: TorchWindow | None = None
        self._used = memory_count()
        self._exporter = TraceExporter(self._tell)

    def __reduce__(self) -> tuple[Callable[..., Recorder], tuple[ProfilerConfig, Header, int]]:
        return (TorchProfilerRecorder, (self._config, self._header, self._max_events))

    def open(self, out: Path) -> None:
        """Start the profiler, unless another one is active in this process."""
        if self._remark is not None:
            self.note(Code.INJECTION_REPLACED, self._remark)
            self._remark = None
        self._out = out
        make_capture_folder(out)
        self._window = TorchWindow(self, self.plan())

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Open a row; without host activity there are none."""
        if self._window is None or ProfilerActivity.CPU not in self.activities:
            return None
        return self._window.enter(name, kind, step)

    def exit(self, token: object) -> None:
        """Close the row."""
        if self._window is not None and token is not None:
            self._window.exit(token)  # type: ignore[arg-type]

    def mark(self, name: str, step: int) -> None:
        """Put in a row without length."""
        if self._window is not None and ProfilerActivity.CPU in self.activities:
            self._window.mark(name)

    def close(self) -> None:
        """Stop the profiler and write the trace."""
        window, self._window = self._window, None
        if window is None:
            return
        window.close()
        if window.scheduled and not window.reached:
            plan = self._config.torch_profiler.schedule
            self.note(
                Code.CAPTURE_WITHOUT_TRACE,
                f"{self._out.name} has no trace: torch_profiler.schedule starts after "
                f"{plan.skip_first + plan.wait + plan.warmup} mini-batches (skip_first, wait, "
                f"warmup), and there were {window.mini_batches} (optimizer steps)",
                capture=self._out.name,
            )

    def finish(self) -> None:
        """Wait for the files."""
        self._exporter.finish()

    def _tell(self, code: Code | Level, text: str, /, **facts: Fact) -> None:
        """Keep a note where the session wants it by then: it puts its own function here later."""
        self.note(code, text, **facts)

    def plan(self) -> "Plan | None":
        """Return torch's schedule, or None where everything is collected."""
        schedule = self._config.torch_profiler.schedule
        if not schedule.active:
            return None
        with warnings.catch_warnings():
            # A schedule without a warm-up causes a warning, but the user chose it.
            warnings.simplefilter("ignore")
            plan: Plan = torch.profiler.schedule(**schedule.model_dump())
        return plan

    def new_profiler(self) -> Any:
        """Return a torch profiler that is not started."""
        block = self._config.integrated
        # A torch.profiler.profile is in a reference cycle, and would keep its events, 1.4 kB each,
        # until Python's garbage collector runs.
        return _KinetoProfile(
            activities=self.activities,
            record_shapes=block.profile_record_shapes,
            profile_memory=block.profile_with_memory,
            # The option with_modules is for TorchScript, and warns since 2.15.
            with_stack=self._with_stack,
        )

    @property
    def _with_stack(self) -> bool:
        """Whether Python calls are watched; torch sees modules outside of TorchScript by them."""
        return self._config.with_stack or self._config.integrated.profile_with_module

    def new_budget(self) -> "Budget":
        """Return the budget of a profiler that starts now."""
        shapes = self._config.integrated.profile_record_shapes
        size = event_bytes(with_stack=self._with_stack, record_shapes=shapes)
        return Budget(self._used, size, self._max_events, self.max_bytes())

    def max_bytes(self) -> int | None:
        """Return the most that stopping may take: this rank's part of half of what is available."""
        available = available_bytes()
        told = os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = int(told) if told.isdigit() else min(self._header.world_size, _RANKS_PER_HOST)
        return None if available is None else available // 2 // max(1, ranks)

    def written(self, cycle: "Cycle") -> None:
        """Write the trace of a cycle that has stopped."""
        header, window = self._header, self._out.name
        name = trace_name(window, header.role, header.rank, header.world_size, cycle.batches)
        if cycle.over:
            text = f"{window} ended early, {_CURE.format(cycle.over)}"
            self.note(Code.CAPTURE_CUT_SHORT, text, capture=window)
        if cycle.device_full and self._on_device:
            self.note(
                Code.CAPTURE_WITHOUT_KERNELS,
                f"{name}: kernels are missing from its end, since torch's buffer for them was "
                "full; take fewer steps, one stage or torch_profiler.schedule",
                trace=name,
            )
        held, cycle.profiler = [cycle.profiler], None
        if cycle.taken:
            text = f"{name} was not written: another torch profiler ran during the capture"
            self.note(Code.TRACE_LOST, text, trace=name)
            release(held)
            return
        self._exporter.write(held, self._out / name, kernels=self._on_device)


def _whole(_: int) -> ProfilerAction:
    return ProfilerAction.RECORD


def _nothing(_: int) -> ProfilerAction:
    return ProfilerAction.NONE


@dataclass(eq=False)
class Cycle:
    """One torch profiler on its way from its warm-up to its trace.

    Attributes:
        profiler: The profiler.
        first: Number of the first mini-batch in it.
        batches: The mini-batches in it (``mb3-4``); empty where no plan chooses among them.
        recording: Whether it is past its warm-up and not stopped.
        budget: How many events it may hold.
        over: Why it ended early.
        device_full: Whether the end of the device's events is missing, because a buffer was full.
        taken: Whether another profiler ended it: torch crashes if its events are read then.
    """

    profiler: Any
    first: int
    batches: str = ""
    recording: bool = False
    budget: "Budget | None" = None
    over: str | None = None
    device_full: bool = False
    taken: bool = False


@dataclass(eq=False)
class _Row:
    """A span's row, in every cycle that the span reaches into."""

    text: str
    row: Any = None

    def begin(self) -> None:
        row = record_function(OwnName(self.text))
        row.__enter__()
        self.row = row

    def end(self) -> None:
        row, self.row = self.row, None
        if row is not None:
            row.__exit__(None, None, None)


class TorchWindow:
    """Collect from now until `close`, or only the mini-batches that a plan selects.

    Each cycle has its own torch profiler. Its size is checked where spans begin and end and at
    optimizer steps. If it is too large it is stopped, and the window collects nothing more.

    Args:
        recorder: Makes profilers and their budgets, and writes what has stopped.
        plan: The schedule; None collects everything.

    Raises:
        RecorderError: Another profiler is active in this process.
    """

    def __init__(self, recorder: TorchProfilerRecorder, plan: Plan | None) -> None:
        self._recorder = recorder
        self._plan = plan or _whole
        self.mini_batches = 0
        self.reached = False
        self._cycle: Cycle | None = None
        self._rows: list[_Row] = []
        self._entered = False
        self._next_check = 0.0
        self._move()
        self._thread = threading.get_ident()
        self._hook = register_optimizer_step_post_hook(self._after_step) if plan else None

    @property
    def scheduled(self) -> bool:
        """Whether a plan chooses among the mini-batches of this window."""
        return self._hook is not None

    def enter(self, name: str, kind: Kind, step: int) -> _Row:
        """Open a row; a step is named ``ProfilerStep#3``, which other tools look for."""
        if not self._entered:
            self._entered = True
            if kind == "stage" and name in _NO_MINI_BATCHES:
                self._collect_whole()
        self._end_if_over()
        row = _Row(f"ProfilerStep#{step}" if kind == "step" else name)
        self._rows.append(row)
        if self._is_recording():
            row.begin()
        return row

    def exit(self, row: _Row) -> None:
        """Close a row."""
        self._end_if_over()
        if row in self._rows:
            self._rows.remove(row)
            row.end()

    def mark(self, name: str) -> None:
        """Add a row of zero length."""
        if self._is_recording():
            with record_function(OwnName(name)):
                pass

    def close(self) -> None:
        """Stop; the events so far are kept, even in the middle of a cycle."""
        if self._hook is not None:
            self._hook.remove()
        self._plan = _nothing
        cycle = self._cycle
        if cycle is not None and not cycle.recording:
            cycle.profiler.start_trace()  # A warm-up of torch cannot be ended in another way.
            self._stop(cycle)
        elif cycle is not None:
            self._stop(cycle)
            self._recorder.written(cycle)

    def _is_recording(self) -> bool:
        return self._cycle is not None and self._cycle.recording

    def _collect_whole(self) -> None:
        """Ignore the plan: this stage has no mini-batches, so its capture would stay empty."""
        if self._hook is not None:
            self._hook.remove()
            self._hook, self._plan = None, _whole
            self._move()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Move on to the next mini-batch; torch calls this after every optimizer step."""
        if threading.get_ident() != self._thread or _is_capturing():
            return  # A step that is captured into a graph is not executed.
        self._end_if_over()
        try:
            is_last = self._plan(self.mini_batches) is ProfilerAction.RECORD_AND_SAVE
            self.mini_batches += 1
            cycle = self._cycle
            if is_last and cycle is not None:
                self._stop(cycle)
                self._recorder.written(cycle)
            self._move()
        except Exception as error:
            self._plan, self._cycle = _nothing, None
            text = f"torch.profiler failed between mini-batches ({error})"
            self._recorder.note(Code.TRACE_LOST, text)

    def _move(self) -> None:
        """Do what the plan says for this mini-batch."""
        action = self._plan(self.mini_batches)
        if action is ProfilerAction.NONE:
            return
        if self._cycle is None:
            self._cycle = self._prepared()
        if action is not ProfilerAction.WARMUP and not self._cycle.recording:
            self._start(self._cycle)

    def _prepared(self) -> Cycle:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            # This is true for torch_npu's profiler, too.
            raise RecorderError(
                "another torch profiler is active; stop it, or turn this capture off"
            )
        cycle = Cycle(self._recorder.new_profiler(), self.mini_batches)
        cycle.profiler.prepare_trace()
        return cycle

    def _start(self, cycle: Cycle) -> None:
        cycle.first, cycle.budget = self.mini_batches, self._recorder.new_budget()
        cycle.profiler.start_trace()
        cycle.recording = self.reached = True
        for row in self._rows:
            row.begin()

    def _stop(self, cycle: Cycle) -> None:
        for row in reversed(self._rows):
            row.end()
        _end_open_rows()
        cycle.recording, self._cycle = False, None
        if self.scheduled:
            # The current mini-batch is not complete, so it does not count.
            last = self.mini_batches - 1
            cycle.batches = f"mb{cycle.first}" + (f"-{last}" if last > cycle.first else "")
        cycle.device_full = bool(getattr(torch.autograd, "_is_kineto_stopped", bool)())
        cycle.taken = not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        if not cycle.taken:  # If another profiler has ended it, torch 2.6 refuses to stop it.
            cycle.profiler.stop_trace()

    def _end_if_over(self) -> None:
        """Stop for good if the capture has too many events."""
        cycle = self._cycle
        if cycle is None or not cycle.recording or cycle.budget is None:
            return
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _CHECK_S
        over = cycle.budget.exceeded()
        # A stop synchronizes the device, which would break a graph capture.
        if over and not _is_capturing():
            cycle.over, self._plan = over, _nothing
            self._stop(cycle)
            self._recorder.written(cycle)


def _is_capturing() -> bool:
    """Tell whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _end_open_rows() -> None:
    """End all open rows of other code, such as ``Optimizer.step#…``; a second end does nothing.

    A row that ends after its profiler writes into freed memory, or into the next profiler's
    events. The search takes 46 ms among a million objects.
    """
    for one in gc.get_referrers(record_function):
        if type(one) is record_function and one.record is not None:
            one.__exit__(None, None, None)


def event_bytes(*, with_stack: bool, record_shapes: bool) -> tuple[int, int]:
    """Return the bytes of an event while it is recorded, and those that stopping adds.

    Measured with torch 2.13 on 0.1 to 1.7 million events each, of a small MLP and of a transformer:
    144 to 206 and 1,280 to 1,500 without shapes, 243 to 462 and 2,300 to 3,090 with them.
    """
    if record_shapes:
        return (260, 2_500) if with_stack else (460, 3_000)
    return (150, 1_450) if with_stack else (200, 1_300)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the host memory in bytes that this process could still get; None if not on Linux.

    That is the host's available memory, or the rest of the container's limit if that is less.

    Args:
        root: Where ``/proc`` and ``/sys`` are.
    """
    files, found = HostFiles(root), dict[str, float]()
    for part in host_parts(files):
        if part.name in ("host memory", "memory limit"):
            with suppress(OSError, KeyError, ValueError):
                found |= part.read().values
    files.close()
    free = found.get("host_available_bytes", math.inf)
    limit = found.get("container_memory_limit_bytes", math.inf)
    least = min(free, max(limit - found.get("container_memory_bytes", 0), 0))
    return None if least == math.inf else int(least)


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def release(held: list[Any]) -> None:
    """Clear a list and return its memory to the host.

    Freeing a stopped capture takes about 1 µs per event and holds the GIL. Without
    `give_back` glibc would keep nearly all of the memory.
    """
    held.clear()
    give_back()


def memory_count() -> Callable[[], int | None]:
    """Return what counts the bytes that this process has, in 0.03 to 2 ms; None if not on Linux.

    glibc's count is exact. It excludes large blocks (above 128 KiB to 32 MiB) that are mapped one
    by one: a training's tensors are such blocks, events never are. With another allocator, the
    resident memory is used. That was up to 17 times too high: it includes the gaps between blocks.
    """
    return _glibc() or resident_bytes


def _glibc() -> Callable[[], int] | None:
    """Return glibc's count, or None if another allocator is in use."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Mallinfo
    before = ask().uordblks
    probe = ctypes.create_string_buffer(_PROBE)
    grown = ask().uordblks - before
    return (lambda: int(ask().uordblks)) if grown >= len(probe) else None


class Budget:
    """The maximum number of events of one capture, which starts now.

    Args:
        used: Counts the memory of this process, see `memory_count`.
        size: Bytes per event, from `event_bytes`.
        max_events: Maximum number of events.
        max_bytes: Maximum bytes that stopping may allocate; None for no limit.
    """

    def __init__(
        self,
        used: Callable[[], int | None],
        size: tuple[int, int],
        max_events: int,
        max_bytes: int | None,
    ) -> None:
        self._used, self._size = used, size
        self._max_events, self._max_bytes = max_events, max_bytes
        self._start = used()

    def exceeded(self) -> str | None:
        """Return which limit is exceeded, as text; None while the events fit."""
        now = self._used()
        if now is None or self._start is None:
            return None
        recorded, stopped = self._size
        events = max(0, now - self._start) // recorded
        if events > self._max_events:
            return f"about {events:,} events (at most {self._max_events:,})"
        if self._max_bytes is not None and events * stopped > self._max_bytes:
            return (
                f"about {events:,} events, whose writing takes {events * stopped / 1e9:.1f} GB of "
                f"host memory (allowed here: {self._max_bytes / 1e9:.1f} GB)"
            )
        return None


def label(text: str) -> str:
    """Return a text as one field of a file name: ``[0-9A-Za-z.=+-]``, 80 characters at most.

    Example::

        >>> label("update actor/2")
        'update-actor-2'
    """
    return _FOREIGN.sub("-", text)[:_MAX_NAME]


def trace_name(window: str, role: str, rank: int, world_size: int, batches: str = "") -> str:
    """Return the name of a trace of this process; TensorBoard's plugin needs its ending.

    Args:
        window: Name of the window's folder.
        role: Role of the process.
        rank: Its global rank.
        world_size: Number of ranks.
        batches: The mini-batches in it (``mb3-4``), where a window has several traces.

    Example::

        >>> trace_name("step-000003", "value_model", 3, 8)  # doctest: +ELLIPSIS
        'step-000003_value-model_rank3-of-8_pid...pt.trace.json.gz'
    """
    place = f"rank{rank}-of-{world_size}"
    fields = [label(window), label(role), place, f"pid{os.getpid()}", batches]
    return "_".join(field for field in fields if field) + ".pt.trace.json.gz"


class TraceExporter:
    """Write traces on the calling thread, and compress them on threads that end with them.

    torch holds the interpreter's lock while it writes a trace (322 of 327 ms for 250,000 events).
    Another thread would stop the training as well, only later, in a step outside the capture.
    Written at once, the events (1.4 kB each) are freed before the next capture begins.
    Compressing needs no lock, reads 4 MiB at a time, and is faster than the next trace comes.

    Args:
        note: Tells the run's reader what went wrong; from any thread.
    """

    def __init__(self, note: Notes) -> None:
        self._note = note
        self._last: threading.Thread | None = None
        self._told = False

    def write(self, held: list[Any], path: Path, *, kernels: bool) -> None:
        """Write a trace; what fails is noted.

        Args:
            held: The stopped torch profiler, alone in a list that is emptied when it is written.
            path: Where to.
            kernels: It should hold some, and its reader is told where it does not.
        """
        plain = path.with_suffix("")
        try:
            held[0].export_chrome_trace(str(plain))
        except Exception as error:
            self._lost(path, error)
            return
        finally:
            release(held)
        self._last = threading.Thread(
            target=self._compress, args=(plain, path, kernels, self._last), name="rlprof-compress"
        )
        self._last.start()

    def finish(self) -> None:
        """Wait until everything is compressed."""
        if self._last is not None and self._last.is_alive():
            log.info("waiting until all traces are compressed")
            self._last.join()

    def _compress(
        self, plain: Path, path: Path, kernels: bool, before: threading.Thread | None
    ) -> None:
        if before is not None:
            before.join()
        part = path.with_name(f"{path.name}.part")
        try:
            found = compress(plain, part, needle=_KERNEL if kernels else b"")
            part.replace(path)
        except Exception as error:
            self._lost(path, error)
        else:
            if not found:
                self._tell_no_kernel(path)
        finally:
            for leftover in (plain, part):
                with suppress(OSError):  # The folder itself may be gone.
                    leftover.unlink()

    def _lost(self, path: Path, error: Exception) -> None:
        text = f"{path.name} was not written ({described(error)})"
        self._note(Code.TRACE_LOST, text, trace=path.name)

    def _tell_no_kernel(self, path: Path) -> None:
        """Note it once: a run whose first trace has no kernel seldom has one in the others."""
        if self._told:
            return
        self._told = True
        text = (
            f"{path.name} has no kernels: the device was idle, or another profiler in "
            "this process uses CUPTI (an nsys, an NVTX_INJECTION64_PATH, a monitor like DCGM)"
        )
        self._note(Code.CAPTURE_WITHOUT_KERNELS, text, trace=path.name)


def compress(plain: Path, part: Path, needle: bytes = b"") -> bool:
    """Compress a trace block by block; tell whether ``needle`` is in it.

    Raises:
        OSError: It cannot be read or written, or ends in the middle: torch does not tell when it
            runs out of disk.
    """
    found, tail = not needle, b""
    packer = isal_zlib.compressobj(_LEVEL, wbits=_GZIP)
    with plain.open("rb") as source, part.open("wb") as target:
        while block := source.read(_BLOCK):
            target.write(packer.compress(block))
            found = found or needle in tail + block
            tail = (tail + block[-_TAIL:])[-_TAIL:]
        target.write(packer.flush())
    if not tail.rstrip().endswith(b"}"):
        raise OSError("the file is truncated; is the disk full?")
    return found
