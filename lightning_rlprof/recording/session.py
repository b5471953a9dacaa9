"""One rank's recording: buffer spans, open captures, tell recorders, outlive failures."""

import functools
import logging
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.util import Finalize
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, ClassVar, TypeVar

import msgspec

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.stages import WrapRule
from lightning_rlprof.errors import ConfigError, described
from lightning_rlprof.recording import annotations, capture, compiled_code
from lightning_rlprof.recording.accelerator import allocator_bytes, device_memory
from lightning_rlprof.recording.background.sampler import Background, CpuWait, HostMemory, Sampler
from lightning_rlprof.recording.capture import GENERATION, Capture, TokenWindow
from lightning_rlprof.recording.capture_requests import CaptureRequests
from lightning_rlprof.recording.clock_sync import Exchange
from lightning_rlprof.recording.end_remarks import (
    ChildMarks,
    chosen_stages,
    how_to_mark,
    misspelled,
    never_marked,
    never_reached,
)
from lightning_rlprof.recording.method_wrapping import Wraps
from lightning_rlprof.recording.open_spans import (
    Owner,
    Span,
    innermost,
    new_span,
    set_apart,
)
from lightning_rlprof.recording.recorders.base import Late, Recorder, is_for_the_process
from lightning_rlprof.recording.span_buffer import Buffer, StageSums, StepTotals, open_writer
from lightning_rlprof.recording.watchdog import Watchdog
from lightning_rlprof.records.capture_request import steps_ahead
from lightning_rlprof.records.notes import Code, Fact, Level, Remark, level_of
from lightning_rlprof.records.records import SHADOW, STEP_END, Header, Kind, Number, is_shadow
from lightning_rlprof.records.run_directory import EndLine, note_line, rank_directory

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])

_STEP = annotations.Marker("step", "step")
_IDLE = annotations.Marker("idle", "stage")
_PAUSE = annotations.Marker("garbage_collection", "region")
_MAX_STEPS_KEPT = 1_000  # Steps whose starts are kept for spans that are recorded late.
_MAX_STEP_TIMES = 200
_STEPS_OF_A_MEDIAN = 19  # A requested capture learns from them how long the next steps take.
_READ_EVERY_NS = 100_000_000  # Nanoseconds between two readings of memory and of the CPU wait.
_ALLOCATOR_STAGE_NS = 50_000_000  # Shorter stages do not ask torch's allocator, which takes 50 µs.
_NUMBERS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_UNWRITTEN_NS = 1_000_000_000  # A stage that ends this long after a write is written at once.


class _Process:
    """The one thing that is global to a process: which session records, if any.

    The lock is held while a session begins: two threads may want one at the same time.
    """

    session: "Session | None" = None
    notes: ClassVar[list[Remark]] = []  # Every later run of this process gets them, too.
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


def is_recording() -> bool:
    """Return whether a session records in this process, of any thread."""
    return _Process.session is not None


def note_in_all_runs(code: Code, text: str, **facts: Fact) -> None:
    """Log what this process cannot record, and note it in the run and in those that follow."""
    with _Process.lock:
        _Process.notes.append(Remark(code, text, facts))
        if _Process.session is not None:
            _Process.session.note(code, text, **facts)
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


_harmless = _guarded("failed")  # After a failure of a mark, the recording continues.
_ends_recording = _guarded("give_up")  # After a failure of a step, it ends.


@dataclass(frozen=True)
class Loop:
    """What a session knows of the loop that it records.

    Attributes:
        follows_threads: Whether steps are of the thread whose stages they contain, rather than of
            the one that ends them.
        idles: Whether the time between two steps is idle, as of an actor that waits for a call.
        object_rules: Rules that mark methods of an object, which `Session.wrap` gets.
        end_if_left: Ends the session if what it records has ended without a word; called before
            another session begins.
        yields: Whether a session of another door takes the place of this one.
        give_up: Ends the recording after a failure of rlprof's own in the steps.
    """

    follows_threads: bool = False
    idles: bool = False
    object_rules: Sequence[WrapRule] = ()
    end_if_left: Callable[[], object] | None = None
    yields: bool = False
    give_up: Callable[[Exception], object] | None = None


@dataclass(frozen=True)
class Helpers:
    """What runs beside a session.

    Attributes:
        background: Samples host and device.
        engines: Samples rollout engines.
        watchdog: Watches for a rank that makes no progress.
        exchange: Compares the clocks of several hosts after some steps.
    """

    background: Background | None = None
    engines: Sampler | None = None
    watchdog: Watchdog | None = None
    exchange: Exchange | None = None


@dataclass(slots=True)
class _Steps:
    """Where the steps are, on the clock of the run.

    Attributes:
        thread: Identity of the thread whose stages count in a step.
        ended: Number of the last step that ended.
        begun: Start and number of the last ones.
        start: Start of this step; None outside of steps.
        edge: Where the step before ended, if nothing came between.
        end_ns: How long the end of the step before took, if that is measured.
        totals: What the last step spent on its stages, once it is asked for.
        broken_by: The exception that left the last step.
    """

    thread: int
    ended: int = 0
    begun: list[tuple[int, int]] = field(default_factory=list)
    start: int | None = None
    edge: int | None = None
    end_ns: int | None = None
    totals: StepTotals | None = None
    broken_by: str = ""

    def begun_since(self, time_ns: int) -> bool:
        """Return whether a step has ended that began at this instant or later."""
        return bool(self.begun) and self.begun[-1][0] >= time_ns


@dataclass(slots=True)
class _Windows:
    """The captures of a session.

    Attributes:
        capture: Drives the recorders.
        requests: Captures that are asked for while the training runs.
        tokens: Counts the iterations of a generation.
        chosen: Stages that the configuration names.
        possible: Whether a window may open on this rank.
        step_token: Of the step, while it is mirrored.
        keep: Tells of a stage that ends whether its window stays open.
    """

    capture: Capture
    requests: CaptureRequests
    tokens: TokenWindow
    chosen: list[str]
    possible: bool
    step_token: object = None
    keep: Callable[[Span], bool] | None = None


@dataclass(slots=True)
class _Marking:
    """How markers behave now: the mode, whom they tell of stages, and whether steps are silent."""

    has_shadows: bool
    mode: str = ""
    told: Callable[[], object] | None = None


@dataclass(slots=True)
class _Ending:
    """What happens when the session ends, and what was said before.

    Attributes:
        at_exit: Writes what is in memory if the process ends first.
        children: Marks in child processes.
        before: Called before the last lines are written.
        after: Called when all files are complete.
        remarks: Notes that are made at the end.
        is_closed: Whether nothing is recorded any more.
        has_failed: Whether a failure of rlprof's own was noted.
        has_declined: Whether a training in another thread was noted.
        has_wrapped: Whether an object was marked.
    """

    at_exit: Finalize
    children: ChildMarks
    before: list[Callable[[], object]] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    is_closed: bool = False
    has_failed: bool = False
    has_declined: bool = False
    has_wrapped: bool = False


class _Memory:
    """Memory and the wait for a CPU, as counters of steps and stages.

    Steps that end within 100 ms of the last reading have none: it takes up to 40 µs.
    """

    def __init__(self, device: str) -> None:
        self._device, self._read_ns = device, 0
        self._host, self._cpu = HostMemory(), CpuWait()
        self._has_total = device == "cpu"

    def of_stage(self, span: Span) -> None:
        """Add the memory at the end of a stage to it."""
        found = self._host.own()
        if self._device != "cpu" and span.duration_ns > _ALLOCATOR_STAGE_NS:
            found |= allocator_bytes(self._device)
            if not self._has_total and (total := device_memory()[1]) is not None:
                found["device_total_bytes"] = total
            self._has_total = True
        if found:
            span.counters = {**(span.counters or {}), **found}

    def of_step(self, *, bare: bool) -> dict[str, int]:
        """Return the counters of a step; a shadow step has the wait for a CPU alone.

        That wait is of all steps since the last reading.
        """
        if not self.is_due():
            return {}
        self._read_ns = perf_counter_ns()
        return {**({} if bare else self._host.counters()), **self._cpu.counters()}

    def is_due(self) -> bool:
        """Return whether the last reading was long ago."""
        return perf_counter_ns() - self._read_ns >= _READ_EVERY_NS

    def read_next(self) -> None:
        """Read for the next step that ends, however short."""
        self._read_ns = 0

    def close(self) -> None:
        """Close its files."""
        self._host.close()
        self._cpu.close()


class Session:
    """Record one rank from construction to `close`; one at a time in a process.

    Attributes:
        owner: Whose spans it records.
        config: What is recorded now: a requested capture has a configuration of its own.
        run: The run directory.
        header: First line of the rank's file.
        clock: Monotonic nanoseconds.
        loop: The loop that it records.
        buffer: Spans on their way to the file.
        append: Where ended spans go.
        helpers: What runs beside it.
        step: Number of the step.
        waiting: Whether the step is expected, and has not begun.
        silent_thread: Identity of the thread that records no spans, in a shadow step; else 0.
        flush_at_ns: When an outermost span that ends is worth a write of its own.
        status: How it was closed; empty until then.

    Args:
        config: What to record.
        run: The run directory, common to all ranks.
        header: First line of this rank's file.
        recorders: What captures consist of.
        clock: Monotonic nanoseconds.
        owner: Whose spans it records; unset, those of the calling thread and what that starts.
        loop: The loop that it records.
        helpers: Starts what runs beside it.

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
        loop: Loop | None = None,
        helpers: Callable[["Session"], Helpers] | None = None,
    ) -> None:
        with _Process.lock:
            if other := running():
                raise AlreadyRecordingError(other)
            _watch_forks()
            self.owner = owner or Owner()
            self.owner.begin()
            self.config, self.run, self.header, self.clock = config, run, header, clock
            self.loop, self.helpers = loop or Loop(), Helpers()
            self.step, self.waiting, self.status = 0, False, ""
            self.silent_thread, self.flush_at_ns = 0, clock() + _UNWRITTEN_NS
            self._steps = _Steps(threading.get_ident())
            self._marking = _Marking(config.measure_overhead)
            with ExitStack() as undo:
                undo.callback(_remove_empty, run)
                writer = open_writer(run, header)
                undo.callback(writer.discard)
                chosen = chosen_stages(config, header.rank)
                self.buffer = Buffer(writer, clock, config.max_file_bytes, all_names=bool(chosen))
                self.append = self.buffer.append
                self._memory = _Memory(header.device)
                self._windows = _Windows(
                    Capture(self, rank_directory(run, header.rank), recorders),
                    CaptureRequests(self, clock),
                    TokenWindow(config),
                    chosen,
                    config.captures and config.wants_rank(header.rank),
                )
                # `atexit` does not run in processes that multiprocessing starts; this does.
                at_exit = Finalize(None, self.buffer.flush_to_the_end, exitpriority=100)
                self._ending = _Ending(at_exit, ChildMarks())
                self._tune()
                undo.pop_all()
            _Process.session = self
        for code, text, facts in _Process.notes:
            self.add(note_line(clock(), code, text, facts))
        if helpers is not None:
            try:
                self.helpers = helpers(self)
            except BaseException:
                self.discard()
                raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close("finished" if kind is None else f"interrupted by {kind.__name__}")

    # ---- steps

    @_ends_recording
    def begin_step(self, step: int) -> None:
        """Know that a step has begun; it counts from where the one before it ended."""
        step = int(step)  # It may be an integer of NumPy.
        start = self._steps.start
        if self.loop.idles and self.waiting and start is not None:
            self.append(new_span(_IDLE, step, start, self.clock(), None))
        if step != self.step or start is None:
            self._open_step(step)
        self.waiting = False

    @_ends_recording
    def expect_step(self, step: int) -> None:
        """Begin a step that may never come: if it does not, nothing of it stays."""
        self._open_step(step)
        self.waiting = True

    @_ends_recording
    def end_step(self, end_ns: int | None = None) -> None:
        """End the step, write it, and expect the next one: what follows belongs to that.

        Args:
            end_ns: When it ended; unset, now.
        """
        steps, windows, exchange = self._steps, self._windows, self.helpers.exchange
        start, is_shadow_step = steps.start, self.silent_thread != 0
        steps.broken_by = ""
        now = self.clock()
        if is_quiet := self._is_quiet(now):
            end = now if end_ns is None else end_ns
            if start is not None:
                span = new_span(_STEP, self.step, start, end, None)
                if self.loop.follows_threads:
                    span.thread = steps.thread
                self.append(span)
        else:
            end = self._end_step(None, end_ns)
        steps.edge, steps.ended, steps.totals = end, self.step, None
        steps.begun.append((start or end, self.step))
        if len(steps.begun) > 2 * _MAX_STEPS_KEPT:  # A copy at each step would slow short steps.
            steps.begun = steps.begun[-_MAX_STEPS_KEPT:]
        self.flush_at_ns = end + _UNWRITTEN_NS
        if is_quiet:
            self.buffer.pass_step()
        else:
            if windows.possible:
                self._end_window()
            self.buffer.end_step(self.step, write=not is_shadow_step)
            if self.loop.idles:  # The caller of an actor may kill it at any time.
                self.buffer.flush()
            if exchange is not None and exchange.after(self.step):
                steps.edge = None
            self._ask_for_captures(start, end)
        self._open_step(self.step + 1)
        self.waiting = True
        if self._marking.has_shadows and steps.start is not None:
            steps.end_ns = self.clock() - steps.start

    def _is_quiet(self, now_ns: int) -> bool:
        """Return whether nothing is due at the end of this step, as after most short ones."""
        windows, loop = self._windows, self.loop
        if windows.possible or self._marking.has_shadows or windows.requests.is_due(now_ns):
            return False
        if loop.idles or self.helpers.exchange is not None:
            return False
        return self.buffer.waits(now_ns) and not self._memory.is_due()

    def _ask_for_captures(self, start: int | None, end: int) -> None:
        requests = self._windows.requests
        if (
            requests.learned is not None
            and start is not None
            and not self._windows.capture.saw(self.step)
        ):
            requests.learn(self.step, end - start, end, self.buffer.last_step())
        requests.after(self.step, end)

    def request_capture(
        self, steps: int, ranks: Sequence[int] | None, stages: Sequence[str], why: str
    ) -> int:
        """See the function `request_capture`."""
        times = self.step_times_ns()[-_STEPS_OF_A_MEDIAN:]
        first = self.step + steps_ahead(median(times) if times else None)
        chosen = None if ranks is None else [int(rank) for rank in ranks]
        asked = self._windows.requests.ask(first, max(int(steps), 1), chosen, stages, why)
        return first if asked else 0

    @_ends_recording
    def abandon_step(self, *, interrupted: bool, error: str = "") -> None:
        """Leave a step that will not end; one that had begun stays in the run, marked as such.

        ``error`` is the name of the exception that leaves it.
        """
        steps, windows = self._steps, self._windows
        steps.broken_by = error
        if interrupted and not self.waiting:
            self._memory.read_next()
            self._end_step({"interrupted": 1})
        elif self.waiting:
            windows.capture.exit(windows.step_token)
            windows.capture.forget(self.step)
        steps.start = steps.edge = steps.end_ns = None
        self.waiting = False

    def _open_step(self, step: int) -> None:
        steps, windows = self._steps, self._windows
        if steps.edge is None:  # Garbage collection before this step belongs to no step.
            self._end_of_background_step()
        self.step = step
        if windows.possible:
            windows.capture.exit(windows.step_token)  # The step was expected, but never began.
            self._move_window(step)
            if windows.capture.is_open:
                windows.step_token = windows.capture.enter("step", "step")
        steps.start = self.clock() if steps.edge is None else steps.edge
        if self._marking.has_shadows:
            self.silent_thread = steps.thread if self._may_be_shadow(step) else 0

    def _may_be_shadow(self, step: int) -> bool:
        """Return whether to record the length of a step alone: unless a capture needs its stages.

        Nor if a span is open around it: what is inside of that one is recorded.
        """
        windows = self._windows
        if not is_shadow(step) or windows.capture.is_open or innermost() is not None:
            return False
        return not (windows.possible and capture.arms_stages(self.config, self.header.rank, step))

    def _end_step(self, counters: dict[str, Number] | None, end_ns: int | None = None) -> int:
        steps, windows = self._steps, self._windows
        now = self.clock() if end_ns is None else end_ns
        start, late = steps.start, list[Late]()
        if windows.possible and windows.capture.saw(self.step):
            known = windows.capture.exit(windows.step_token)
            counters = {**(counters or {}), **known.counters, "capture": 1}
            late = known.late
        if start is not None:
            counters = {**self._counters_of_step(), **(counters or {})}
            span = new_span(_STEP, self.step, start, now, counters or None)
            if self.loop.follows_threads:
                span.thread = steps.thread = self.buffer.follow()
            self.append(span)
            if windows.possible:
                self.buffer.later(span, late)
        return now

    def _counters_of_step(self) -> dict[str, int]:
        steps, is_shadow_step = self._steps, self.silent_thread != 0
        found = self._memory.of_step(bare=is_shadow_step)
        found |= self._end_of_background_step()  # They count from the end of the step before.
        if steps.end_ns is not None:
            found[STEP_END], steps.end_ns = steps.end_ns, None
        return found | {SHADOW: 1} if is_shadow_step else found

    def switch(self, config: ProfilerConfig, recorders: Sequence[Recorder] | None) -> bool:
        """Capture the next steps as another configuration says, with other recorders.

        Returns:
            Whether that is possible now: it isn't while a capture is open.
        """
        windows = self._windows
        if recorders is not None and windows.capture.is_open:
            return False
        windows.capture.use(recorders)
        self.config = config
        windows.possible = config.captures and config.wants_rank(self.header.rank)
        self._tune()
        return True

    def _end_of_background_step(self) -> dict[str, int]:
        """Return the counters of garbage collection, and add its long pauses as regions."""
        if self.helpers.background is None:
            return {}
        counters, pauses = self.helpers.background.end_step()
        if not pauses:  # Nearly all steps have none.
            return counters
        for pause, parent in zip(pauses, self.buffer.around(pauses), strict=True):
            span = new_span(
                _PAUSE, self.step_at(pause.start_ns), pause.start_ns, pause.end_ns, None
            )
            span.thread, span.parent = pause.thread, parent
            self.append(span)
        return counters

    def _move_window(self, step: int) -> None:
        own = self._windows.capture
        action = capture.at_step(self.config, self.header.rank, step, is_open=own.is_open)
        if action == "open":
            own.open(step, None)
        elif action == "close":
            own.close()
        if action != "keep":
            self._steps.edge = None
        self._tune()

    def _end_window(self) -> None:
        own, rank = self._windows.capture, self.header.rank
        if capture.after_step(self.config, rank, self.step, is_open=own.is_open) == "close":
            own.close()
            self._steps.edge = None
            self._tune()

    @property
    def step_start_ns(self) -> int | None:
        """When the step began; None outside of steps."""
        return self._steps.start

    def step_times_ns(self) -> list[int]:
        """Return how long the last 200 steps took, from start to start; any thread may ask."""
        starts = [start for start, _ in self._steps.begun[-_MAX_STEP_TIMES:]]
        return [later - earlier for earlier, later in pairwise(starts)]

    @property
    def next_step(self) -> int:
        """The number of the next step that begins, where nothing else numbers them."""
        return self._steps.ended + 1

    def step_at(self, time_ns: int) -> int:
        """Return the step in which an instant lies, of the last ones; 0 before the first."""
        start, begun = self._steps.start, self._steps.begun
        if start is not None and time_ns >= start:
            return self.step
        at = bisect_right(begun, (time_ns, sys.maxsize)) - 1
        return begun[at][1] if at >= 0 else 0 if begun else self.step

    @property
    def training_thread(self) -> int:
        """Identity of the thread whose stages count in a step."""
        return self._steps.thread

    @property
    def has_steps(self) -> bool:
        """Whether a step has ended."""
        return self._steps.ended > 0

    def metrics(self) -> dict[str, float]:
        """Return the seconds, shares and tokens/s of the last step, by names for any logger.

        The names are those of `StageMetrics`; the values are of this rank.
        """
        return self._metrics() or {}

    @_harmless
    def _metrics(self) -> dict[str, float]:
        return StageSums([self.step_totals] if self.step_totals.ns else []).metrics()

    @property
    def step_totals(self) -> StepTotals:
        """What the last step that ended spent on its stages, on the training thread."""
        if self._steps.totals is None:
            self._steps.totals = self.buffer.totals()
        return self._steps.totals

    # ---- spans and lines

    def add(self, line: msgspec.Struct, /) -> None:
        """Add a line of another kind."""
        self.buffer.add(line)

    @_harmless
    def record(
        self,
        marker: annotations.Marker,
        start_ns: int,
        end_ns: int,
        counters: dict[str, Number] | None = None,
    ) -> None:
        """Add a span whose two ends are known; its parent is the span that is open now."""
        self.append(new_span(marker, self.step, start_ns, end_ns, counters))

    @_harmless
    def stage_ended(self, span: Span) -> None:
        """Add the memory at the end of a stage: resident memory, and that of torch's allocator.

        The first takes 2 µs. torch's statistics take some 50 µs, so that only stages of 50 ms or
        more have them.
        """
        self._memory.of_stage(span)

    # ---- what markers call while a capture is open or may open

    @_harmless
    def enter(self, name: str, kind: Kind) -> object:
        """Open the capture that this stage asks for and tell the recorders."""
        if threading.get_ident() != self._steps.thread:
            return None
        own, tokens = self._windows.capture, self._windows.tokens
        opens = kind == "stage" and not tokens.inside and self._opens_at(name)
        action = tokens.action(name, opens)
        if action == "open":
            own.open(self.step, name if opens else GENERATION)
        elif action == "close":
            own.close()
        return own.enter(name, kind, closes=opens)

    def _opens_at(self, stage: str) -> bool:
        own = self._windows.capture
        own.seen.add(stage)
        rank, is_open = self.header.rank, own.is_open
        return capture.at_stage(self.config, rank, self.step, stage, is_open=is_open) == "open"

    @_harmless
    def exit(self, span: Span) -> None:
        """Tell the recorders in reverse order; close the capture that this stage opened."""
        keep = self._windows.keep
        known = self._windows.capture.exit(span.token, keep=keep is not None and keep(span))
        if known.counters:
            own = span.counters or {}
            if isinstance(span.marker, annotations.LoopMarker):  # It may continue another span.
                new = known.counters
                own = {**own, **{name: max(own[name], new[name]) for name in own.keys() & new}}
            span.counters = {**known.counters, **own}
        self.buffer.later(span, known.late)

    def wrap(self, root: object) -> None:
        """Mark the methods of an object that the configuration's ``wrap`` names, until the end.

        Raises:
            ConfigError: A target does not exist or cannot be marked; nothing stays marked.
        """
        wraps = Wraps(root, self.loop.object_rules)
        self._ending.before.append(partial(self._unwrap, wraps))
        self._ending.has_wrapped = True

    @property
    def has_wrapped(self) -> bool:
        """Whether `wrap` has marked an object."""
        return self._ending.has_wrapped

    def _unwrap(self, wraps: Wraps) -> None:
        wraps.remove()
        self.note_at_end(*wraps.remarks())

    def watch_stages(self, told: Callable[[], object] | None) -> None:
        """Call a function whenever a stage has begun or ended, on any thread; stop with None."""
        if not self._ending.is_closed:
            self._marking.told, self._marking.mode = told, ""
            self._tune()

    def keep_windows(self, keep: Callable[[Span], bool]) -> None:
        """Let the windows of some stages stay open when they end, until `close_kept_window`."""
        self._windows.keep = keep

    def close_kept_window(self) -> None:
        """Close the capture that `keep_windows` left open."""
        self._windows.keep = None
        self._windows.capture.close_kept()

    @property
    def mirrors(self) -> bool:
        """Whether recorders are told of spans now."""
        return self._windows.capture.mirrors

    @_harmless
    def mark(self, name: str) -> None:
        """Tell the recorders of an instant."""
        if self.mirrors and threading.get_ident() == self._steps.thread:
            self._windows.capture.mark(name)

    # ---- notes

    @_harmless
    def flush(self) -> None:
        """Append everything to the file, unless another thread does so, or is stuck in it."""
        self.flush_at_ns = self.clock() + _UNWRITTEN_NS
        self.buffer.flush_if_free()

    def note(self, code: Code | Level, text: str, /, **facts: Fact) -> None:
        """Log a remark and keep it in the run; below a warning only rank 0 logs.

        What it quotes may come from anywhere: control characters are escaped here.

        Args:
            code: What the note says; a level instead is for recorders of a user's own.
            text: For people.
            **facts: Numbers and names that belong to the code.
        """
        line, number = note_line(self.clock(), code, text, facts), _NUMBERS[level_of(code)]
        if self.header.rank == 0 or number > logging.INFO:
            log.log(number, "%s", line.text)
        self.add(line)

    def note_at_end(self, *remarks: Remark) -> None:
        """Note these when the training is over."""
        self._ending.remarks += remarks

    def failed(self, error: Exception) -> None:
        """Say once that rlprof failed where the training marks something."""
        if not self._ending.has_failed:
            self._ending.has_failed = True
            log.debug("rlprof failed", exc_info=error)
            text = f"an error in rlprof, the training continues: {described(error)}"
            self.note(Code.RECORDING_FAILED, text)

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
        if not self._ending.has_declined:
            self._ending.has_declined = True
            facts = {"thread": thread.name}
            self.add(note_line(self.clock(), Code.THREAD_NOT_RECORDED, text, facts))
        log.warning("%s is being recorded: %s", self.run, text)
        return True

    # ---- the end

    def at_close(self, *parts: Callable[[], object]) -> None:
        """Call these in their order when it closes, before the last lines are written."""
        self._ending.before += parts

    def after_close(self, part: Callable[[], object]) -> None:
        """Call this when all files are complete, after those that were given before."""
        self._ending.after.append(part)

    def give_up(self, error: Exception) -> None:
        """End the recording after a failure of rlprof's own in the steps."""
        if self.loop.give_up is not None:
            self.loop.give_up(error)
        elif not self.status:  # With a status, it is ending already.
            log.error("recording stopped, training continues: %s", described(error), exc_info=error)
            self.close(f"stopped by an error in rlprof: {type(error).__name__}")

    def end_if_left(self) -> None:
        """End if what is recorded has ended without a word."""
        if self.loop.end_if_left is not None:
            self.loop.end_if_left()
        elif not self.owner.has_process and not self.owner.thread.is_alive():
            self.close("interrupted by the end of its thread")

    def end_at_once(self, status: str) -> None:
        """Write what is in memory, and how the run ends: the process ends within the second.

        What is still captured is lost. A signal's handler may call this in the middle of a step.
        """
        if self._ending.is_closed:
            return
        self._ending.is_closed, self.status = True, status
        start = self._steps.start
        step = None
        if start is not None and not self.waiting:
            step = new_span(_STEP, self.step, start, self.clock(), {"interrupted": 1})
        self.buffer.end_at_once(step, self._steps.begun_since, EndLine(self.clock(), status))

    def saw(self, error: BaseException) -> None:
        """Know of an exception in the training: if no step follows, it is how the run ended."""
        self._steps.broken_by = type(error).__name__

    @property
    def standing(self) -> str:
        """How the run would end now: ``finished``, unless an exception left the last step."""
        broken_by = self._steps.broken_by
        return f"interrupted by {broken_by}" if broken_by else "finished"

    def close(self, status: str = "finished") -> None:
        """Finish every file and stop listening; further calls do nothing.

        Args:
            status: ``finished`` or why the run ended early; it becomes the last line.
        """
        ending = self._ending
        if ending.is_closed or self.status:  # A part that fails may ask for the end, too.
            return
        self.status = status
        try:
            for part in (self._stop_helpers, *ending.before):
                _safely(part, f"{part} could not be removed")
            _safely(partial(self._end_run, status))
        finally:  # This is inline, as the failure of a function would end the training.
            annotations.listen(None)
            ending.is_closed = True
            if _Process.session is self:
                _Process.session = None
            for part in (ending.at_exit.cancel, self.buffer.close, self._memory.close):
                _safely(part)
            for part in ending.after:
                _safely(part)

    def _stop_helpers(self) -> None:
        for part in (self.helpers.background, self.helpers.engines, self.helpers.watchdog):
            if part is not None:
                _safely(part.stop, f"{part} could not be stopped")

    def _end_run(self, status: str) -> None:
        self.abandon_step(interrupted=status != "finished")
        if self.helpers.exchange is not None and status == "finished":
            self.helpers.exchange.meet(self._steps.ended)
        self._windows.capture.finish()
        for code, text, facts in self._remarks():
            self.note(code, text, **facts)
        self._windows.requests.close()
        self.add(EndLine(self.clock(), status))

    def _remarks(self) -> list[Remark]:
        """Return what was asked for and did not happen."""
        config, windows, ended = self.config, self._windows, self._steps.ended
        seen = self.buffer.stages_seen
        if reason := windows.capture.why_nothing(config, self.header.rank, ended):
            missing = [name for name in windows.chosen if seen and name not in seen]
            text = ". ".join([reason, *map(how_to_mark, missing[:1])])
            found = [Remark(Code.NOTHING_CAPTURED, text, {"ended": ended})]
        else:
            found = never_marked(windows.chosen, seen)
            if windows.capture.has_captured:
                found += never_reached(config, ended)
        found += windows.requests.unmet(ended) + compiled_code.remark()
        found += misspelled(seen, [*config.custom_stages, *windows.chosen])
        return [*found, *self._ending.remarks, *self._ending.children.remark()]

    def discard(self) -> None:
        """End without a run: remove what this rank has written."""
        self._stop_helpers()
        self.abandon_step(interrupted=False)
        self._windows.capture.finish()
        self._windows.requests.close()
        annotations.listen(None)
        self._ending.is_closed = True
        if _Process.session is self:
            _Process.session = None
        self._ending.children.remark()
        self._ending.at_exit.cancel()
        self.buffer.discard()
        self._memory.close()
        _remove_empty(self.run)

    def leave(self) -> str:
        """Do nothing from now on, in a forked child: the run and its end are the parent's.

        Returns:
            The file for the first mark in such a child.
        """
        self._ending.is_closed, self._windows.possible = True, False
        self._ending.at_exit.cancel()
        self.buffer.leave()
        self.append = self.buffer.append
        for part in (self.helpers.background, self.helpers.engines):
            if part is not None:
                part.leave()
        self.helpers = Helpers()
        self._memory.close()
        return self._ending.children.path

    def _tune(self) -> None:
        """Choose how markers behave: mirrored only where a capture is or may be open."""
        windows, marking = self._windows, self._marking
        armed = windows.possible and capture.arms_stages(self.config, self.header.rank, self.step)
        mirrored = windows.capture.mirrors or armed
        mode = "mirrored" if mirrored else "spans"
        # A change makes the interpreter drop the code that it has specialized for markers.
        if mode != marking.mode:
            marking.mode = mode
            shadows, told = marking.has_shadows, marking.told
            annotations.listen(self, mirrored=mirrored, shadows=shadows, told=told)


def _safely(part: Callable[[], object], what: str = "the run could not be finished") -> None:
    """Do a part of what ends a run; the others are done all the same."""
    try:
        part()
    except Exception as error:
        if is_for_the_process(error):
            raise
        log.error("%s: %s", what, described(error), exc_info=error)


def _remove_empty(run: Path) -> None:
    with suppress(OSError):  # It stays if other ranks or captures have files there.
        run.rmdir()


def _watch_forks() -> None:
    if not _Process.watches_forks:
        os.register_at_fork(after_in_child=_leave_to_parent)
        _Process.watches_forks = True


def _leave_to_parent() -> None:
    """Stop recording in a forked child: the file belongs to the parent."""
    session, _Process.session = _Process.session, None
    _Process.lock = threading.RLock()  # Another thread may have held it.
    annotations.listen(None)
    if session is not None:
        annotations.tell_first(session.leave(), "forked child process")
