"""One window of torch.profiler: its cycles of mini-batches, its rows, and its early end."""

import gc
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerAction, record_function

from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording.recorders.torch_profiler.event_budget import Budget, soon
from lightning_rlprof.records.records import STAGES, Kind

Plan = Callable[[int], ProfilerAction]
"""What to do during a mini-batch, by its number in the window (from 0)."""

_LOOK_S = 0.2
# By what everybody means by these stages, they step no optimizer.
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
        over: Why it ends before its time.
        device_full: Whether the device's part ends early, for its buffer was full.
        taken: Whether another profiler ended it: torch dies where its events are asked for then.
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
    """What a window needs of its recorder.

    Attributes:
        profiler: Makes a torch profiler.
        budget: Makes the budget of one that starts now.
        written: Writes a cycle that is stopped; on the training thread or the watching one.
        note: Tells the run's reader what went wrong.
    """

    profiler: Callable[[], Any]
    budget: Callable[[], Budget]
    written: Callable[[Cycle], object]
    note: Callable[[str, str], None]


@dataclass(eq=False)
class _Row:
    """A span's row, in every cycle that the span reaches into."""

    text: str
    row: Any = None

    def begin(self) -> None:
        row = record_function(self.text)
        row.__enter__()
        self.row = row

    def end(self) -> None:
        row, self.row = self.row, None
        if row is not None:
            row.__exit__(None, None, None)


class TorchWindow:
    """Collect from now until `close`, or only the mini-batches that a plan names.

    Each cycle has a torch profiler of its own. While it collects, a thread looks at its size five
    times a second. One that grows too big is stopped at the next span, or, since a rollout may go
    on for minutes, between two instructions; the window collects nothing more then.

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
        self._cut: deque[Cycle] = deque()
        self._rows: list[_Row] = []
        self._entered = self._switching = False
        self._on_main = threading.current_thread() is threading.main_thread()
        self._move()
        self._thread = threading.get_ident()
        self._hook = register_optimizer_step_post_hook(self._after_step) if plan else None
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rlprof-budget", daemon=True)
        self._watcher.start()

    @property
    def scheduled(self) -> bool:
        """Whether a plan chooses among the mini-batches of this window."""
        return self._hook is not None

    def enter(self, name: str, kind: Kind, step: int) -> _Row:
        """Open a row; a step's is called ``ProfilerStep#3``, which other tools look for."""
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
        """Put in a row without length."""
        if self._is_recording():
            with record_function(name):
                pass

    def close(self) -> None:
        """Stop; what was collected so far is kept, also in the middle of a cycle."""
        if self._hook is not None:
            self._hook.remove()
        self._closed.set()
        self._watcher.join()
        self._plan = _nothing
        cycle = self._cycle
        if cycle is not None and not cycle.recording:
            cycle.profiler.start_trace()  # torch has no other way out of a warm-up
            self._stop(cycle)
        elif cycle is not None and self._stop(cycle):
            self._tools.written(cycle)
        self._hand_over_cut()

    def _is_recording(self) -> bool:
        cycle = self._cycle  # read once: `_halt` may come in between
        return cycle is not None and cycle.recording

    def _collect_whole(self) -> None:
        """Follow no plan: this window is a stage without mini-batches, and would stay empty."""
        if self._hook is not None:
            self._hook.remove()
            self._hook, self._plan = None, _whole
            self._move()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Go on to the next mini-batch; torch calls it in every optimizer step of the process."""
        if threading.get_ident() != self._thread or _is_capturing():
            return  # a step that is captured into a graph does not happen
        self._end_if_over()
        try:
            is_last = self._plan(self.mini_batches) is ProfilerAction.RECORD_AND_SAVE
            self.mini_batches += 1
            cycle = self._cycle
            if is_last and cycle is not None and self._stop(cycle):
                self._tools.written(cycle)
            self._move()
        except Exception as error:
            self._plan, self._cycle = _nothing, None
            self._tools.note("error", f"torch.profiler failed between mini-batches ({error})")

    def _move(self) -> None:
        """Prepare or start what the plan says of this mini-batch."""
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
            raise RecorderError("another torch profiler is active; stop it or drop this capture")
        cycle = Cycle(self._tools.profiler(), self.mini_batches)
        cycle.profiler.prepare_trace()
        return cycle

    def _start(self, cycle: Cycle) -> None:
        cycle.first, cycle.budget = self.mini_batches, self._tools.budget()
        cycle.profiler.start_trace()
        cycle.recording = self.reached = True
        for row in self._rows:
            row.begin()

    def _stop(self, cycle: Cycle) -> bool:
        """Stop a cycle, unless it was halted just now."""
        self._switching = True
        try:
            if cycle is not self._cycle:
                return False
            for row in reversed(self._rows):
                row.end()
            _end_rows_of_others()
            cycle.recording, self._cycle = False, None
            if self.scheduled:
                last = self.mini_batches - 1  # the one that goes on is not counted
                cycle.batches = f"mb{cycle.first}" + (f"-{last}" if last > cycle.first else "")
            cycle.device_full = _device_is_full()
            cycle.taken = not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            if not cycle.taken:  # which torch 2.6 refuses to stop once more
                cycle.profiler.stop_trace()
            return True
        finally:
            self._switching = False

    # ---- ending early

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            self._hand_over_cut()
            cycle = self._cycle
            if cycle is not None and cycle.recording and cycle.budget is not None:
                cycle.over = cycle.budget.exceeded()
                if cycle.over and self._on_main:
                    soon(self._halt)

    def _end_if_over(self) -> None:
        self._halt()
        self._hand_over_cut()

    def _halt(self) -> None:
        """Stop for good; wherever the training is, so it takes no lock and tells nobody."""
        cycle = self._cycle
        if cycle is None or not (cycle.over and cycle.recording) or self._switching:
            return
        if not _is_capturing():  # stopping waits for the device, which would end that
            self._plan = _nothing
            self._stop(cycle)
            self._cut.append(cycle)

    def _hand_over_cut(self) -> None:
        while self._cut:
            try:
                cycle = self._cut.popleft()
            except IndexError:  # the other thread was quicker
                return
            self._tools.written(cycle)


def _is_capturing() -> bool:
    """Tell whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _end_rows_of_others() -> None:
    """End every row that is open now, ``Optimizer.step#…`` for one; ending it again does nothing.

    A row that outlives its profiler writes its end into freed memory, or into the events of the
    next one. The search takes 46 ms among a million objects.
    """
    for one in gc.get_referrers(record_function):
        if type(one) is record_function and one.record is not None:
            one.__exit__(None, None, None)


def _device_is_full() -> bool:
    return bool(getattr(torch.autograd, "_is_kineto_stopped", bool)())
