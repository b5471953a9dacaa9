"""One rank's recording: buffer spans, open captures, tell recorders, outlive failures."""

import functools
import logging
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from multiprocessing.util import Finalize
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, ClassVar, TypeVar

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.wrap_rules import WrapRule
from lightning_rlprof.errors import ConfigError, described
from lightning_rlprof.recording import annotations, compiled_code
from lightning_rlprof.recording.accelerator import allocator_bytes, device_memory
from lightning_rlprof.recording.background.host_usage import CpuWait, HostMemory
from lightning_rlprof.recording.background.sampler import Background
from lightning_rlprof.recording.budget import Budget
from lightning_rlprof.recording.captures import capture
from lightning_rlprof.recording.captures.capture import GENERATION, Capture, TokenWindow
from lightning_rlprof.recording.captures.requests import CaptureRequests
from lightning_rlprof.recording.clock_sync import Exchange
from lightning_rlprof.recording.end_remarks import (
    ChildMarks,
    chosen_stages,
    how_to_mark,
    never_marked,
    never_reached,
)
from lightning_rlprof.recording.method_wrapping import Wraps
from lightning_rlprof.recording.open_spans import Line, Open, innermost, made
from lightning_rlprof.recording.owner import Owner, set_apart
from lightning_rlprof.recording.recorders.base import Late, Recorder, is_for_the_process
from lightning_rlprof.recording.span_buffer import Buffer, StepTotals, open_writer
from lightning_rlprof.recording.stage_sums import StageSums
from lightning_rlprof.recording.watchdog.watchdog import Watchdog
from lightning_rlprof.records.capture_request import steps_ahead
from lightning_rlprof.records.records import Header, Kind, Number
from lightning_rlprof.records.run_directory import rank_directory
from lightning_rlprof.records.shadow_steps import SHADOW, STEP_END, is_shadow
from lightning_rlprof.system.plain_text import plain

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])

_STEP = annotations.Marker("step", "step")
_IDLE = annotations.Marker("idle", "stage")
_PAUSE = annotations.Marker("garbage_collection", "region")
_MOST_STEPS = 1_000  # whose starts are kept for intervals that are recorded late
_MOST_TIMES, _LATELY = 200, 19  # steps
_ASKED_NS = 50_000_000
_STAGE_NS = 1_000_000_000  # what took minutes is written when it ends, before its step does


class _Process:
    """The one thing that is global to a process: which session records, if any.

    The lock is held while a session begins: two threads may want one at the same time.
    """

    session: "Session | None" = None
    notes: ClassVar[list[str]] = []  # what no run of this process contains
    lock = threading.RLock()
    watches_forks = False


class AlreadyRecordingError(ConfigError):
    """Another session, the attribute ``session``, records in this process."""

    def __init__(self, session: "Session") -> None:
        super().__init__(f"a session already records into {session.run}; close it first")
        self.session = session


def current() -> "Session | None":
    """Return the session that records the calling thread, or None."""
    session = _Process.session
    return session if session is not None and session.owner.has_thread() else None


def running() -> "Session | None":
    """Return the session that records in this process, of any thread, or None.

    One whose owner has ended without a word is ended first.
    """
    with _Process.lock:
        if _Process.session is not None:
            _Process.session.end_if_left()
        return _Process.session


def note_in_all_runs(text: str) -> None:
    """Log what this process cannot record, and note it in the run and in those that follow."""
    with _Process.lock:
        _Process.notes.append(text)
        if _Process.session is not None:
            _Process.session.note("warning", text)
        else:
            log.warning("%s", text)


def request_capture(
    steps: int = 1,
    ranks: Sequence[int] | None = None,
    stages: Sequence[str] = (),
    why: str = "request_capture()",
) -> int:
    """Capture coming steps of this training, when a condition of your own holds.

    Call it on one rank: all ranks of the run capture the same steps, or those in ``ranks``. Whole
    steps are captured unless ``stages`` are given. ``why`` is kept in the run, which serves 20
    requests of at most 100 steps each.

    Returns:
        The first step that is captured, some 1.2 s ahead, so that no rank has begun it; 0 if
        nothing is being recorded in this process, or a note in the run says what is wrong.

    Example::

        >>> request_capture(steps=2, why="the reward fell to 0")
        0
    """
    session = current()
    return session.request_capture(steps, ranks, stages, why) if session is not None else 0


def _guarded(told: str) -> Callable[[F], F]:
    """Keep a failure of rlprof's own from the code that calls a method of the session.

    What the call would do is lost. The method of the session by the name ``told`` gets the error.
    """

    def guard(method: F) -> F:
        @functools.wraps(method)
        def call(self: "Session", *args: Any, **options: Any) -> Any:
            try:
                return method(self, *args, **options)
            except Exception as error:
                if is_for_the_process(error):
                    raise
                getattr(self, told)(error)
                return None

        return call  # type: ignore[return-value]

    return guard


_harmless = _guarded("failed")  # of marks: the recording continues
_ends_recording = _guarded("give_up")  # of steps


class Session:
    """Record one rank from construction to `close`; one at a time in a process.

    Args:
        config: What to record.
        run: The run directory, common to all ranks.
        header: First line of this rank's file.
        recorders: What captures consist of.
        clock: Monotonic nanoseconds.
        owner: Whose spans it records; unset, those of the calling thread and what that starts.

    Raises:
        ConfigError: The run directory cannot be written.
        AlreadyRecordingError: A session is recording already.

    Example::

        >>> import tempfile
        >>> from lightning_rlprof.testing import make_header
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Session(ProfilerConfig(), Path(folder), make_header()) as session:
        ...         session.begin_step(1)
        ...         with annotations.stage("actor_update"):
        ...             pass
        ...         session.end_step()
    """

    def __init__(
        self,
        config: ProfilerConfig,
        run: Path,
        header: Header,
        recorders: Sequence[Recorder] = (),
        clock: Callable[[], int] = perf_counter_ns,
        owner: Owner | None = None,
    ) -> None:
        with _Process.lock:
            _refuse_a_second()
            try:
                self._begin(config, run, header, recorders, clock, owner or Owner())
            except BaseException:
                _remove_empty(run)
                raise
            _Process.session = self
        for text in _Process.notes:
            self.add(("note", clock(), "warning", text))

    def _begin(
        self,
        config: ProfilerConfig,
        run: Path,
        header: Header,
        recorders: Sequence[Recorder],
        clock: Callable[[], int],
        owner: Owner,
    ) -> None:
        _watch_forks()
        self.owner = owner
        owner.begin()
        self.config, self.run, self.header, self.clock = config, run, header, clock
        self.step = self._ended = 0
        self._steps: list[tuple[int, int]] = []  # start and number of the last ones
        budget = Budget(config.max_file_bytes)
        writer = open_writer(run, header)
        try:
            self._begin_parts(Buffer(writer, clock, budget), recorders)
        except BaseException:
            writer.discard()
            raise

    def _begin_parts(self, buffer: Buffer, recorders: Sequence[Recorder]) -> None:
        config, run, header, clock = self.config, self.run, self.header, self.clock
        self._buffer = buffer
        self.append, self.add = buffer.append, buffer.add
        self.last_stages, self.take_back = buffer.last_stages, buffer.take_back
        self.has_stages, self.join_late = buffer.has_stages, buffer.join_late
        self.recent, self.flush_if_free = buffer.recent, buffer.flush_if_free
        self.later_experts = buffer.later_experts
        self.flush_at_ns = clock() + _STAGE_NS
        self.silent_thread = 0  # in a shadow step
        self._has_shadows = config.measure_overhead and config.spans
        self._step_end_ns: int | None = None
        self._totals: StepTotals | None = None
        self.waiting = self._closed = self._failed = False
        self._step_start: int | None = None
        self._edge: int | None = None
        self._trainer_thread = threading.get_ident()
        # Whether the window of a stage stays open when it ends, until `close_kept_window`.
        # Whether steps are of the thread whose stages they contain, not of the one that ends them.
        self.follows_threads = False
        # Whether the time between two steps is idle: an actor that waits for its next call.
        self.idles = False
        self.before_close: list[Callable[[], object]] = []
        # Ends the session if what it records has ended without a word; asked before another begins.
        self.end_if_left: Callable[[], object] = self._end_if_left
        # Ends the recording after a failure of rlprof's own in the steps.
        self.give_up: Callable[[Exception], object] = self._give_up
        self._broken_by = ""  # the exception that left the last step
        self._declined = False
        self.wrap_rules: Sequence[WrapRule] = ()
        self.unwrapped = ""  # what to say if `wrap` is never called
        self.status = ""  # how it was closed
        self.keeps_window: Callable[[Line], bool] = _closes
        self.afterwards: Callable[[], object] = bool  # called when all files are complete
        self.exchange: Exchange | None = None  # where ranks on several hosts compare their clocks
        self.background: Background | None = None  # what samples host and device meanwhile
        self.watchdog: Watchdog | None = None  # of a rank that makes no progress
        self._mode = ""
        self._told: Callable[[], object] | None = None
        self._may_capture = config.captures and config.wants_rank(header.rank)
        self._mirrored_step: object = None
        self._tokens = TokenWindow(config)
        self._host = (HostMemory(), CpuWait())
        self._has_allocator = header.device != "cpu"
        self._has_total = False
        self._chosen = chosen_stages(config, header.rank)
        buffer.keeps_stages = bool(self._chosen)
        self.child_marks = ChildMarks()
        self.remarks: list[str] = []  # to be said at the end
        self._capture = Capture(self, rank_directory(run, header.rank), recorders)
        self._requests = CaptureRequests(self, clock)
        # `atexit` does not run in processes that multiprocessing starts; this runs there, too.
        self._at_exit = Finalize(None, buffer.flush_to_the_end, exitpriority=100)
        self._tune()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close("finished" if kind is None else f"interrupted by {kind.__name__}")

    # ---- steps

    @_ends_recording
    def begin_step(self, step: int) -> None:
        """Know that a step has begun; it counts from where the one before it ended."""
        step = int(step)  # of NumPy, too
        if self.idles and self.waiting and self._step_start is not None:
            self.append(made(_IDLE, step, self._step_start, self.clock(), None))
        if step != self.step or self._step_start is None:
            self._open_step(step)
        self.waiting = False

    @_ends_recording
    def expect_step(self, step: int) -> None:
        """Begin a step that may never come: if it does not, nothing of it stays."""
        self._open_step(step)
        self.waiting = True

    @_ends_recording
    def end_step(self) -> None:
        """End the step, write it, and expect the next one: what follows belongs to that."""
        start, is_shadow_step = self._step_start, self.silent_thread != 0
        self._broken_by = ""
        end = self._end_step(None)
        self._edge, self._ended, self._totals = end, self.step, None
        self._steps = [*self._steps[-_MOST_STEPS:], (self._step_start or end, self.step)]
        self.flush_at_ns = end + _STAGE_NS
        if self._may_capture:
            self._end_window()
        self._buffer.end_step(self.step, write=not is_shadow_step)
        if self.idles:  # what calls an actor may kill it at any time
            self._buffer.flush()
        if self.exchange is not None and self.exchange.after(self.step):
            self._edge = None
        self._ask_for_captures(start, end)
        self._open_step(self.step + 1)
        self.waiting = True
        if self._has_shadows and self._step_start is not None:
            self._step_end_ns = self.clock() - self._step_start

    def _ask_for_captures(self, start: int | None, end: int) -> None:
        if self._requests.learns and start is not None and not self._capture.saw(self.step):
            self._requests.learn(self.step, end - start, end, self._buffer.last_step())
        self._requests.after(self.step, end)

    def request_capture(
        self, steps: int, ranks: Sequence[int] | None, stages: Sequence[str], why: str
    ) -> int:
        """See the function `request_capture`."""
        times = self.step_times_ns()[-_LATELY:]
        first = self.step + steps_ahead(median(times) if times else None)
        chosen = None if ranks is None else [int(rank) for rank in ranks]
        asked = self._requests.ask(first, max(int(steps), 1), chosen, stages, why)
        return first if asked else 0

    @_ends_recording
    def abandon_step(self, *, interrupted: bool, error: str = "") -> None:
        """Leave a step that will not end; one that had begun stays in the run, marked as such.

        ``error`` is the name of the exception that leaves it.
        """
        self._broken_by = error
        if interrupted and not self.waiting:
            self._end_step({"interrupted": 1})
        elif self.waiting:
            self._capture.exit(self._mirrored_step)
            self._capture.forget(self.step)
        self._step_start = self._edge = self._step_end_ns = None
        self.waiting = False

    def _open_step(self, step: int) -> None:
        if self._edge is None:  # garbage collection before it is of no step
            self._end_of_background_step()
        self.step = step
        if self._may_capture:
            self._capture.exit(self._mirrored_step)  # of a step that was expected and never came
            self._move_window(step)
            if self._capture.is_open:
                self._mirrored_step = self._capture.enter("step", "step")
        self._step_start = self.clock() if self._edge is None else self._edge
        if self._has_shadows:
            self.silent_thread = self._trainer_thread if self._may_be_shadow(step) else 0

    def _may_be_shadow(self, step: int) -> bool:
        """Return whether to record the length of a step alone: unless a capture needs its stages.

        Nor if a span is open around it: what is inside of that one is recorded.
        """
        if not is_shadow(step) or self._capture.is_open or innermost() is not None:
            return False
        return not (self._may_capture and capture.arms_stages(self.config, self.header.rank, step))

    def _end_step(self, counters: dict[str, Number] | None) -> int:
        now, start = self.clock(), self._step_start
        late: list[Late] = []
        if self._may_capture and self._capture.saw(self.step):
            known = self._capture.exit(self._mirrored_step)
            counters = {**(counters or {}), **known.counters, "capture": 1}
            late = known.late
        if start is not None:
            counters = {**self._counters_of_step(), **(counters or {})}
            span = made(_STEP, self.step, start, now, counters or None)
            if self.follows_threads:
                span[6] = self._trainer_thread = self._buffer.follow()
            self.append(span)
            if self._may_capture:
                self._buffer.later(span, late)
        return now

    def _counters_of_step(self) -> dict[str, int]:
        memory, cpu = self._host
        found = {**cpu.counters(), **self._end_of_background_step()}  # since the step before
        if self._step_end_ns is not None:
            found[STEP_END], self._step_end_ns = self._step_end_ns, None
        return {**found, SHADOW: 1} if self.silent_thread else {**memory.counters(), **found}

    def switch(self, config: ProfilerConfig, recorders: Sequence[Recorder] | None) -> bool:
        """Capture the next steps as another configuration says, with other recorders.

        Returns:
            Whether that is possible now: it isn't while a capture is open.
        """
        if recorders is not None and self._capture.is_open:
            return False
        self._capture.use(recorders)
        self.config = config
        self._may_capture = config.captures and config.wants_rank(self.header.rank)
        self._tune()
        return True

    def _end_of_background_step(self) -> dict[str, int]:
        """Return the counters of garbage collection, and add its long pauses as regions."""
        if self.background is None:
            return {}
        counters, pauses = self.background.end_step()
        if not pauses:  # as in nearly all steps
            return counters
        for pause, parent in zip(pauses, self._buffer.around(pauses), strict=True):
            line = made(_PAUSE, self.step_at(pause.start_ns), pause.start_ns, pause.end_ns, None)
            line[6], line[8] = pause.thread, parent
            self.append(line)
        return counters

    def _move_window(self, step: int) -> None:
        action = capture.at_step(self.config, self.header.rank, step, is_open=self._capture.is_open)
        if action == "open":
            self._capture.open(step, None)
        elif action == "close":
            self._capture.close()
        if action != "keep":
            self._edge = None
        self._tune()

    def _end_window(self) -> None:
        rank, is_open = self.header.rank, self._capture.is_open
        if capture.after_step(self.config, rank, self.step, is_open=is_open) == "close":
            self._capture.close()
            self._edge = None
            self._tune()

    @property
    def step_start_ns(self) -> int | None:
        """When the step began; None outside of steps."""
        return self._step_start

    def step_times_ns(self) -> list[int]:
        """Return how long the last 200 steps took, from start to start; any thread may ask."""
        starts = [start for start, _ in self._steps[-_MOST_TIMES:]]
        return [later - earlier for earlier, later in pairwise(starts)]

    @property
    def next_step(self) -> int:
        """The number of the next step that begins, where nothing else numbers them."""
        return self._ended + 1

    def step_at(self, time_ns: int) -> int:
        """Return the step in which an instant lies, of the last ones; 0 before the first."""
        if self._step_start is not None and time_ns >= self._step_start:
            return self.step
        at = bisect_right(self._steps, (time_ns, sys.maxsize)) - 1
        return self._steps[at][1] if at >= 0 else self.step if not self._steps else 0

    @property
    def training_thread(self) -> int:
        """Identity of the thread whose stages count in a step."""
        return self._trainer_thread

    @property
    def has_steps(self) -> bool:
        """Whether a step has ended."""
        return self._ended > 0

    def metrics(self) -> dict[str, float]:
        """Return the seconds, shares and tokens/s of the last step, by names for any logger.

        The names are those of `StageMetrics`; the values are of this rank.
        """
        return self._metrics() or {}

    @_harmless
    def _metrics(self) -> dict[str, float]:
        sums = StageSums()
        if self.step_totals.ns:
            sums.add(self.step_totals)
        return sums.metrics()

    @property
    def step_totals(self) -> StepTotals:
        """What the last step that ended spent on its stages, on the training thread."""
        if self._totals is None:
            self._totals = self._buffer.totals()
        return self._totals

    @_harmless
    def record(
        self,
        marker: annotations.Marker,
        start_ns: int,
        end_ns: int,
        counters: Mapping[str, Number] | None = None,
    ) -> None:
        """Add a span whose two ends are known; its parent is the span that is open now."""
        self.append(made(marker, self.step, start_ns, end_ns, counters))

    @_harmless
    def stage_ended(self, line: Line) -> None:
        """Add the memory at the end of a stage: resident memory, and that of torch's allocator.

        The first takes 2 µs. torch's statistics take some 50 µs, so that only stages of 50 ms or
        more have them.
        """
        found = self._host[0].own()
        if self._has_allocator and line[5] - line[4] > _ASKED_NS:
            found |= allocator_bytes(self.header.device)
            if not self._has_total and (total := device_memory()[1]) is not None:
                found["device_total_bytes"] = total
            self._has_total = True
        if found:
            line[9] = {**(line[9] or {}), **found}

    # ---- what markers call while a capture is open or may open

    @_harmless
    def enter(self, name: str, kind: Kind) -> object:
        """Open the capture that this stage asks for and tell the recorders."""
        if threading.get_ident() != self._trainer_thread:
            return None
        opens = kind == "stage" and not self._tokens.inside and self._opens_at(name)
        action = self._tokens.action(name, opens)
        if action == "open":
            self._capture.open(self.step, name if opens else GENERATION)
        elif action == "close":
            self._capture.close()
        return self._capture.enter(name, kind, closes=opens)

    def _opens_at(self, stage: str) -> bool:
        self._capture.seen.add(stage)
        is_open, rank = self._capture.is_open, self.header.rank
        return capture.at_stage(self.config, rank, self.step, stage, is_open=is_open) == "open"

    @_harmless
    def exit(self, span: Open) -> None:
        """Tell the recorders in reverse order; close the capture that this stage opened."""
        line, _, marker, token = span
        known = self._capture.exit(token, keep=self.keeps_window(line))
        if known.counters:
            own = line[9] or {}
            if isinstance(marker, annotations.LoopMarker):  # which may continue another span
                new = known.counters
                own = {**own, **{name: max(own[name], new[name]) for name in own.keys() & new}}
            line[9] = {**known.counters, **own}
        self._buffer.later(line, known.late)

    def wrap(self, root: object) -> None:
        """Mark the methods of an object that the configuration's ``wrap`` names, until the end.

        Raises:
            ConfigError: A target does not exist or cannot be marked; nothing stays marked.
        """
        wraps = Wraps(root, self.wrap_rules)
        self.unwrapped = ""

        def remove() -> None:
            wraps.remove()
            self.remarks += wraps.remarks()

        self.before_close.append(remove)

    def watch_stages(self, told: Callable[[], object] | None) -> None:
        """Call a function whenever a stage has begun or ended, on any thread; stop with None."""
        if not self._closed:
            self._told, self._mode = told, ""
            self._tune()

    def close_kept_window(self) -> None:
        """Close the capture that `keeps_window` left open."""
        self.keeps_window = _closes
        self._capture.close_kept()

    @property
    def stage_count(self) -> int:
        """How many stages ended in the last step."""
        return self._buffer.stage_count

    @property
    def mirrors(self) -> bool:
        """Whether recorders are told of spans now."""
        return self._capture.mirrors

    @_harmless
    def mark(self, name: str) -> None:
        """Tell the recorders of an instant."""
        if self._capture.mirrors and threading.get_ident() == self._trainer_thread:
            self._capture.mark(name)

    # ---- lines

    @_harmless
    def flush(self) -> None:
        """Append everything to the file, unless another thread does so, or is stuck in it."""
        self.flush_at_ns = self.clock() + _STAGE_NS
        self._buffer.flush_if_free()

    def note(self, level: str, text: str) -> None:
        """Log a remark and keep it in the run; below a warning only rank 0 logs.

        What it quotes may come from anywhere: control characters are escaped here.
        """
        text = plain(text)
        number: int = getattr(logging, level.upper())
        if self.header.rank == 0 or number > logging.INFO:
            log.log(number, "%s", text)
        self.add(("note", self.clock(), level, text))

    def failed(self, error: Exception) -> None:
        """Say once that rlprof failed where the training marks something."""
        if not self._failed:
            self._failed = True
            log.debug("rlprof failed", exc_info=error)
            text = f"an error in rlprof, the training continues: {described(error)}"
            self.note("error", text)

    def decline(self, what: str, *, is_training: bool = True) -> bool:
        """Let what begins in the calling thread have no run of its own, and say so.

        It is recorded as a part of this run in the owner's own thread, and in its other threads
        unless both are trainings. Elsewhere the thread is set apart, and nothing of it is recorded.

        Args:
            what: What begins, such as "a fit".
            is_training: Whether it is a framework's training.

        Returns:
            Whether the thread was set apart: `rejoin` ends that.
        """
        owner, thread = self.owner, threading.current_thread()
        if owner.has_thread() and not (owner.is_training and is_training and not owner.is_here):
            log.warning(
                "%s is already being recorded: %s in it gets no run of its own", self.run, what
            )
            return False
        set_apart()
        text = f"{what} in another thread, {thread.name}, is not recorded: a process records one"
        if not self._declined:
            self._declined = True
            self.add(("note", self.clock(), "warning", text))
        log.warning("%s is being recorded: %s", self.run, text)
        return True

    def _give_up(self, error: Exception) -> None:
        if self.status:  # it ends already
            return
        log.error("recording stopped, training continues: %s", described(error), exc_info=error)
        self.close(f"stopped by an error in rlprof: {type(error).__name__}")

    def end_at_once(self, status: str) -> None:
        """Write what is in memory, and how the run ends: the process ends within the second.

        What is still captured is lost. A signal's handler may call this in the middle of a step.
        """
        if self._closed:
            return
        self._closed, self.status = True, status
        if self._step_start is not None and not self.waiting:
            end = {"interrupted": 1}
            self.append(made(_STEP, self.step, self._step_start, self.clock(), end))
        self.add(("end", self.clock(), status))
        self._buffer.flush_to_the_end()

    def _end_if_left(self) -> None:
        if not self.owner.has_process and not self.owner.thread.is_alive():
            self.close("interrupted by the end of its thread")

    def saw(self, error: BaseException) -> None:
        """Know of an exception in the training: if no step follows, it is how the run ended."""
        self._broken_by = type(error).__name__

    @property
    def standing(self) -> str:
        """How the run would end now: ``finished``, unless an exception left the last step."""
        return f"interrupted by {self._broken_by}" if self._broken_by else "finished"

    def close(self, status: str = "finished") -> None:
        """Finish every file and stop listening; further calls do nothing.

        Args:
            status: ``finished`` or why the run ended early; it becomes the last line.
        """
        if self._closed or self.status:  # also of what fails while it ends
            return
        self.status = status
        try:
            for part in (self._end_background, self._stop_watchdog, *self.before_close):
                _safely(part, f"{part} could not be removed")
            _safely(partial(self._end_run, status))
        finally:
            annotations.listen(None)
            self._closed = True
            if _Process.session is self:
                _Process.session = None
            for part in (self._at_exit.cancel, self._buffer.close, self._close_host):
                _safely(part)
            _safely(self.afterwards)

    def _end_run(self, status: str) -> None:
        self.abandon_step(interrupted=status != "finished")
        if self.exchange is not None and status == "finished":
            self.exchange.meet(self._ended)
        self._capture.finish()
        for text in self._remarks():
            self.note("warning", text)
        self._requests.close()
        self.add(("end", self.clock(), status))

    def _remarks(self) -> list[str]:
        """Return what was asked for and did not happen."""
        config, rank = self.config, self.header.rank
        seen = self._buffer.stages_seen
        if reason := self._capture.why_nothing(config, rank, self._ended):
            missing = [name for name in self._chosen if seen and name not in seen]
            found = [". ".join([reason, *map(how_to_mark, missing[:1])])]
        else:
            found = never_marked(self._chosen, seen)
            if self._capture.has_captured:
                found += never_reached(config, self._ended)
        found += self._requests.unmet(self._ended) + compiled_code.remark()
        return [*found, *self.remarks, *self.child_marks.remark()]

    def discard(self) -> None:
        """End without a run: remove what this rank has written."""
        self._end_background()
        self._stop_watchdog()
        self.abandon_step(interrupted=False)
        self._capture.finish()
        self._requests.close()
        self._closed = True
        annotations.listen(None)
        if _Process.session is self:
            _Process.session = None
        self.child_marks.remark()
        self._at_exit.cancel()
        self._buffer.discard()
        self._close_host()
        _remove_empty(self.run)

    def leave(self) -> None:
        """Do nothing from now on, in a forked child: the run and its end are the parent's."""
        self._closed, self._may_capture, self.exchange = True, False, None
        self.append = lambda line: None  # of optimizers, which may go on for long
        self._at_exit.cancel()
        self._buffer.leave()
        if self.background is not None:
            self.background.leave()
            self.background = None
        self._close_host()

    def _end_background(self) -> None:
        if self.background is not None:
            self.background.stop()

    def _stop_watchdog(self) -> None:
        if self.watchdog is not None:
            self.watchdog.stop()

    def _close_host(self) -> None:
        for part in self._host:
            part.close()

    def _tune(self) -> None:
        """Choose how markers behave: mirrored only where a capture is or may be open."""
        armed = self._may_capture and capture.arms_stages(self.config, self.header.rank, self.step)
        mirrored = self._capture.mirrors or armed
        mode = "mirrored" if mirrored else "spans" if self.config.spans else "off"
        if mode != self._mode:  # a change makes the interpreter forget what it learned of markers
            self._mode = mode
            sink = None if mode == "off" else self
            annotations.listen(sink, mirrored=mirrored, shadows=self._has_shadows, told=self._told)


def _safely(part: Callable[[], object], what: str = "the run could not be finished") -> None:
    """Do a part of what ends a run; the others are done all the same."""
    try:
        part()
    except Exception as error:
        if is_for_the_process(error):
            raise
        log.error("%s: %s", what, described(error), exc_info=error)


def _remove_empty(run: Path) -> None:
    with suppress(OSError):  # files of other ranks, or of captures
        run.rmdir()


def _closes(line: Line) -> bool:
    return False


def _refuse_a_second() -> None:
    if other := running():
        raise AlreadyRecordingError(other)


def _watch_forks() -> None:
    if not _Process.watches_forks:
        os.register_at_fork(after_in_child=_leave_to_parent)
        _Process.watches_forks = True


def _leave_to_parent() -> None:
    """Stop recording in a forked child: the file belongs to the parent."""
    session, _Process.session = _Process.session, None
    _Process.lock = threading.RLock()  # another thread may have held it
    annotations.listen(None)
    if session is not None:
        session.leave()
        annotations.tell_first(session.child_marks.path, "forked child process")
