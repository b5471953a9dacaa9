"""Samples of the training thread's stack: on request, and while a step takes unusually long."""

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Protocol

import msgspec

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.recording.open_spans import Span, numbers
from lightning_rlprof.recording.stacks import open_now
from lightning_rlprof.records.hang_reports import (
    STACK,
    StackAnswer,
    StackRequest,
    is_own_code,
    read_stack_request,
    stack_request_file,
    write_stack_answer,
)
from lightning_rlprof.records.notes import Code, Notes
from lightning_rlprof.records.records import Header
from lightning_rlprof.records.run_directory import SpanLine, rank_file
from lightning_rlprof.system.files import owners_of, stamp_of

_IDLE_S = 0.25  # between looks at the request and at the step
_SAMPLE_S = 0.05
_SLOW, _HIGHEST = 3.0, 1.25  # times the usual step, and times the longest of the last ones
_LATELY, _FEWEST = 20, 10  # steps of which the usual one is the median
_SLOW_STEP_NS = 5_000_000_000  # for which a slow step is sampled
_PER_HOUR, _HOUR_NS = 12, 3_600_000_000_000
_MOST_FRAMES = 200
_LONGEST = 200  # characters


class Sampled(Protocol):
    """What the sampler needs of a session."""

    step: int
    waiting: bool

    @property
    def idles(self) -> bool:
        """Whether the time between two steps is idle."""

    @property
    def run(self) -> Path:
        """The run directory."""

    @property
    def header(self) -> Header:
        """The first line of the rank's file."""

    @property
    def clock(self) -> Callable[[], int]:
        """Monotonic nanoseconds."""

    @property
    def step_start_ns(self) -> int | None:
        """When the step began; None outside of steps."""

    @property
    def training_thread(self) -> int:
        """Identity of the thread whose stages count."""

    def add(self, line: msgspec.Struct, /) -> None:
        """Add a line that is not a span of the training."""

    @property
    def note(self) -> Notes:
        """What logs a remark and keeps it in the run."""

    def step_times_ns(self) -> list[int]:
        """Return how long the last steps took."""

    def flush_if_free(self) -> None:
        """Append everything to the file, unless another thread does it or is stuck in it."""


class StackSampler:
    """Sample the stack of the training thread 20 times a second while there is a reason to.

    A request is one, for as long as it says. A step is, for 5 s, that has taken 3 times the median
    of the last 20, and 1.25 times the longest of the last 200; at most 12 steps an hour. Otherwise
    it looks 4 times a second: it compares times, and asks whether a file has changed.

    Args:
        session: Whose thread is sampled.
        since: Spans with numbers up to it are of an earlier session.
        frames: What returns the innermost frame of each thread.
    """

    def __init__(
        self,
        session: Sampled,
        since: int,
        frames: Callable[[], Mapping[int, FrameType]] = sys._current_frames,
    ) -> None:
        self._session, self._since, self._frames = session, since, frames
        self._stamp = stamp_of(stack_request_file(session.run))
        self._owners = owners_of(rank_file(session.run, session.header.rank))
        self._refused: set[str] = set()
        self._request: StackRequest | None = None
        self._until_ns: int | None = None  # while it samples
        self._step = 0  # the slow one that was sampled last
        self._slow: deque[int] = deque(maxlen=_PER_HOUR)  # when slow steps were sampled
        self._samples: list[tuple[int, int, str]] = []  # time, step, place
        self._taken = 0
        self._folder = ""
        with suppress(OSError):
            self._folder = os.path.join(os.getcwd(), "")

    @property
    def wait_s(self) -> float:
        """How long to wait until the next look."""
        return _IDLE_S if self._until_ns is None else _SAMPLE_S

    def take_numbers(self) -> int:
        """Return how many numbers of spans it took since the last call."""
        taken, self._taken = self._taken, 0
        return taken

    def look(self) -> None:
        """Take one sample if there is a reason to; write them when it is over."""
        now = self._session.clock()
        if self._request is None and (request := self._new_request()) is not None:
            self.end()
            self._request, self._until_ns = request, now + round(request.seconds * 1e9)
        elif self._until_ns is None and self._is_slow(now):
            self._step, self._until_ns = self._session.step, now + _SLOW_STEP_NS
            self._slow.append(now)
        if self._until_ns is None:
            return
        is_over = self._request is None and self._session.step != self._step
        if not is_over and (place := self._place()):
            self._samples.append((now, self._session.step, place))
        if is_over or now >= self._until_ns:
            self.end()

    def end(self) -> None:
        """Write the samples and, if they were requested, the answer; wait for the next reason."""
        samples, self._samples = self._samples, []
        request, self._request, self._until_ns = self._request, None, None
        session = self._session
        thread = session.training_thread
        for at, step, place in samples:
            session.add(SpanLine(STACK + place, "mark", step, at, at, thread, next(numbers), None))
        self._taken += len(samples)
        if request is None:
            return
        session.flush_if_free()
        spans = tuple((span.name, span.start_ns) for span in self._open(thread))
        answer = StackAnswer(
            request.id, thread, tuple((at, place) for at, _, place in samples), spans
        )
        with suppress(OSError):  # who asked waits for it, and says so
            write_stack_answer(session.run, session.header.rank, answer)

    def _open(self, thread: int) -> list[Span]:
        kinds = ("stage", "region")
        return [one for one in open_now(self._since) if one.thread == thread and one.kind in kinds]

    def _new_request(self) -> StackRequest | None:
        stamp = stamp_of(stack_request_file(self._session.run))
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        if stamp is None:
            return None
        try:
            request = read_stack_request(self._session.run, self._owners)
        except (OSError, RlprofError) as error:
            if (text := f"no stacks are sampled on request: {error}") not in self._refused:
                self._refused.add(text)
                self._session.note(Code.STACKS_NOT_SAMPLED, text)
            return None
        is_asked = request.ranks is None or self._session.header.rank in request.ranks
        return request if is_asked else None

    def _is_slow(self, now: int) -> bool:
        """Return whether the step takes unusually long, and may be sampled."""
        session = self._session
        start = session.step_start_ns
        if start is None or session.step == self._step or (session.waiting and session.idles):
            return False
        if (passed := now - start) < _IDLE_S * 1e9:
            return False
        if len(self._slow) == _PER_HOUR and self._slow[0] > now - _HOUR_NS:
            return False
        times = session.step_times_ns()
        if len(times) < _FEWEST:
            return False
        return passed > max(_SLOW * median(times[-_LATELY:]), _HIGHEST * max(times))

    def _place(self) -> str:
        """Return function and line of the innermost frame of the training's own code.

        Without one, it is that of the innermost frame.
        """
        frame = innermost = self._frames().get(self._session.training_thread)
        for _ in range(_MOST_FRAMES):
            if frame is None or is_own_code(frame.f_code.co_filename):
                break
            frame = frame.f_back
        frame = frame or innermost
        if frame is None:
            return ""
        code, line = frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno
        name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
        file = code.co_filename
        if self._folder and file.startswith(self._folder):
            file = file[len(self._folder) :]
        else:
            file = os.path.basename(file)
        return f"{name} {file}:{line}"[-_LONGEST:]
