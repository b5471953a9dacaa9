"""One capture of torch.profiler: start, stop, mini-batch cycles, rows for spans, early end."""

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerAction, record_function

from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording.open_spans import OwnName
from lightning_rlprof.recording.recorders.torch_profiler import Budget
from lightning_rlprof.records.notes import Code, Notes
from lightning_rlprof.records.records import STAGES, Kind

Plan = Callable[[int], ProfilerAction]
"""What to do during a mini-batch, by its number in the window (from 0)."""

_CHECK_S = 0.2  # a check takes up to 2 ms
# Stages that step no optimizer.
_NO_MINI_BATCHES = set(STAGES) - {"actor_update", "critic_update"}


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
    budget: Budget | None = None
    over: str | None = None
    device_full: bool = False
    taken: bool = False


@dataclass(frozen=True)
class Tools:
    """Functions that a window calls.

    Attributes:
        profiler: Creates a torch profiler.
        budget: Creates the budget of a profiler that starts now.
        written: Writes a stopped cycle.
        note: Adds a note to the run.
    """

    profiler: Callable[[], Any]
    budget: Callable[[], Budget]
    written: Callable[[Cycle], object]
    note: Notes


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
        tools: What it needs.
        plan: The schedule; None collects everything.

    Raises:
        RecorderError: Another profiler is active in this process.
    """

    def __init__(self, tools: Tools, plan: Plan | None) -> None:
        self._tools = tools
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
            cycle.profiler.start_trace()  # torch has no other way out of a warm-up
            self._stop(cycle)
        elif cycle is not None:
            self._stop(cycle)
            self._tools.written(cycle)

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
            return  # a step that is captured into a graph does not happen
        self._end_if_over()
        try:
            is_last = self._plan(self.mini_batches) is ProfilerAction.RECORD_AND_SAVE
            self.mini_batches += 1
            cycle = self._cycle
            if is_last and cycle is not None:
                self._stop(cycle)
                self._tools.written(cycle)
            self._move()
        except Exception as error:
            self._plan, self._cycle = _nothing, None
            text = f"torch.profiler failed between mini-batches ({error})"
            self._tools.note(Code.TRACE_LOST, text)

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
            # True for torch_npu's profiler, too.
            raise RecorderError(
                "another torch profiler is active; stop it, or turn this capture off"
            )
        cycle = Cycle(self._tools.profiler(), self.mini_batches)
        cycle.profiler.prepare_trace()
        return cycle

    def _start(self, cycle: Cycle) -> None:
        cycle.first, cycle.budget = self.mini_batches, self._tools.budget()
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
            last = self.mini_batches - 1  # without the current one, which is not complete
            cycle.batches = f"mb{cycle.first}" + (f"-{last}" if last > cycle.first else "")
        cycle.device_full = _device_is_full()
        cycle.taken = not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        if not cycle.taken:  # otherwise torch 2.6 refuses to stop it
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
        if over and not _is_capturing():  # stopping synchronizes, which would break a graph capture
            cycle.over, self._plan = over, _nothing
            self._stop(cycle)
            self._tools.written(cycle)


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


def _device_is_full() -> bool:
    return bool(getattr(torch.autograd, "_is_kineto_stopped", bool)())
