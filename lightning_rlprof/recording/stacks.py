"""What the threads and the child processes of this process are doing, and which spans are open.

Also samples of the training thread, on request and while a step takes unusually long.
"""

import gc
import linecache
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from statistics import median
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.recording.open_spans import Span, is_left, numbers
from lightning_rlprof.records.hang_reports import (
    STACK,
    ChildProcess,
    Frame,
    StackAnswer,
    StackRequest,
    ThreadStack,
    own_frame,
    read_stack_request,
    stack_request_file,
    write_stack_answer,
)
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.run_directory import SpanLine, rank_file
from lightning_rlprof.system.files import owners_of, stamp_of
from lightning_rlprof.system.process import child_states

if TYPE_CHECKING:
    from lightning_rlprof.recording.session import Session

_MAX_THREADS, _MAX_FRAMES, _MAX_CHILDREN = 100, 64, 64
_MAX_TEXT = 200
_LOOK_S = 0.5
_MAX_SPANS = 200
_IDLE_S = 0.25  # Seconds between looks at the request and at the step.
_SAMPLE_S = 0.05
_TIMES_USUAL, _TIMES_LONGEST = 3.0, 1.25  # A slow step takes longer than both.
_LATELY, _MIN_STEPS = 20, 10  # The usual step is the median of the last ones, if there are enough.
_SLOW_STEP_NS = 5_000_000_000  # Nanoseconds for which a slow step is sampled.
_PER_HOUR, _HOUR_NS = 12, 3_600_000_000_000
_MAX_PLACE = 200


def thread_stacks(training: int, end: threading.Event) -> tuple[ThreadStack, ...]:
    """Return the stack of each thread but the calling one, that of the training first.

    It takes half a second, in which the CPU time of the training thread is measured.
    """
    names = {each.ident: each.name for each in threading.enumerate()}
    own = threading.get_ident()
    found = [
        ThreadStack(names.get(ident, "?"), _frames(frame), ident == training)
        for ident, frame in sys._current_frames().items()
        if ident != own or ident == training
    ]
    found.sort(key=lambda each: not each.is_training)
    if not found or not found[0].is_training:
        return tuple(found[:_MAX_THREADS])
    return (replace(found[0], cpu_share=_cpu_share(training, end)), *found[1:_MAX_THREADS])


def _cpu_share(thread: int, end: threading.Event) -> float | None:
    """Return how much of a CPU a thread uses within half a second, or until ``end`` is set.

    Its stack does not tell: Python hands over between threads at the same line of a loop each time.
    """
    try:
        clock = time.pthread_getcpuclockid(thread)
        start, used = time.perf_counter(), time.clock_gettime(clock)
        end.wait(_LOOK_S)
        used, passed = time.clock_gettime(clock) - used, time.perf_counter() - start
    except (AttributeError, OSError):  # This is not Linux, or the thread has ended.
        return None
    return round(min(used / max(passed, 1e-9), 1.0), 3)


def _frames(frame: FrameType) -> tuple[Frame, ...]:
    found = []
    for code, line in _calls(frame):
        text = linecache.getline(code.co_filename, line).strip()[:_MAX_TEXT]
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no `co_qualname`.
        found.append(Frame(code.co_filename, line, name, text))
    return tuple(found)


def _calls(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """Return code and line of each frame: the frames themselves keep tensors alive."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        line: int | None = frame.f_lineno
        found.append((frame.f_code, line or frame.f_code.co_firstlineno))
        frame = frame.f_back
    return found


def child_processes() -> tuple[ChildProcess, ...]:
    """Return the processes that this one started, with their states; none off Linux."""
    found = child_states(_MAX_CHILDREN)
    return tuple(ChildProcess(pid, name, state) for pid, name, state in found)


def open_now(since: int) -> list[Span]:
    """Return open spans in the order in which they began, the first 200.

    Spans are left out whose surroundings have ended, as of a generator that is suspended, and those
    whose number is not above ``since``: what an earlier session left open.
    """
    spans = [each for each in gc.get_objects() if type(each) is Span]
    found = [each for each in spans if getattr(each, "end_ns", 0) is None and each.id > since]
    around = [each for each in found if not is_left(each)]
    return sorted(around, key=attrgetter("id"))[:_MAX_SPANS]


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
        session: "Session",
        since: int,
        frames: Callable[[], Mapping[int, FrameType]] = sys._current_frames,
    ) -> None:
        self._session, self._since, self._frames = session, since, frames
        self._stamp = stamp_of(stack_request_file(session.run))
        self._owners = owners_of(rank_file(session.run, session.header.rank))
        self._refused: set[str] = set()
        self._request: StackRequest | None = None
        self._until_ns: int | None = None  # It is set while it samples.
        self._step = 0  # The slow step that was sampled last.
        self._slow: deque[int] = deque(maxlen=_PER_HOUR)  # Times at which slow steps were sampled.
        self._samples: list[tuple[int, int, str]] = []  # Time, step and place of each sample.
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
        session.buffer.flush_if_free()
        spans = tuple(
            (span.name, span.start_ns)
            for span in open_now(self._since)
            if span.thread == thread and span.kind in ("stage", "region")
        )
        answer = StackAnswer(
            request.id, thread, tuple((at, place) for at, _, place in samples), spans
        )
        with suppress(OSError):  # The process that asked for stacks reports that none came.
            write_stack_answer(session.run, session.header.rank, answer)

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
        if start is None or session.step == self._step or (session.waiting and session.loop.idles):
            return False
        if (passed := now - start) < _IDLE_S * 1e9:
            return False
        if len(self._slow) == _PER_HOUR and self._slow[0] > now - _HOUR_NS:
            return False
        times = session.step_times_ns()
        if len(times) < _MIN_STEPS:
            return False
        return passed > max(_TIMES_USUAL * median(times[-_LATELY:]), _TIMES_LONGEST * max(times))

    def _place(self) -> str:
        """Return function and line of the innermost frame of the training's own code.

        Without one, it is that of the innermost frame.
        """
        innermost = self._frames().get(self._session.training_thread)
        frame = own_frame(innermost) or innermost
        if frame is None:
            return ""
        code, line = frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no `co_qualname`.
        file = code.co_filename
        if self._folder and file.startswith(self._folder):
            file = file[len(self._folder) :]
        else:
            file = os.path.basename(file)
        return f"{name} {file}:{line}"[-_MAX_PLACE:]
