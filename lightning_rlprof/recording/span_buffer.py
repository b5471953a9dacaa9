"""Ended spans and notes of one rank on their way to its file; what steps spent on their stages."""

import logging
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lightning_rlprof.errors import ConfigError, described
from lightning_rlprof.recording.open_spans import ExpertTokens, Span, line_of, opened
from lightning_rlprof.recording.recorders.base import Counters, Late, is_for_the_process, numbers_of
from lightning_rlprof.records.notes import NO_FACTS, Code, Fact
from lightning_rlprof.records.records import EXPERTS, SHADOW, VALIDATIONS, Header, Number, as_number
from lightning_rlprof.records.run_directory import (
    CountLine,
    EndLine,
    ExpertsLine,
    MetricsLine,
    SampleLine,
    ThreadLine,
    TraceWriter,
    note_line,
    plain_item,
)
from lightning_rlprof.system.location import plain

log = logging.getLogger(__name__)

_MAX_INTERVALS = 1 << 16  # Of more intervals of one stage, only the sum is kept.
_MAX_COUNTER = 1e300  # Sums of larger numbers may overflow, so that such a counter is unknown.

# Nanoseconds that steps may stay in memory; SIGKILL loses at most this long of them. A write costs
# a step of 7 ms 44 µs, and 8 µs if 14 steps share it.
_WRITE_NS = 100_000_000
_MAX_RECENT_SPANS = 300
_STEPS_WITH_NAMES = 100  # Later steps have spans of the same names, which need no second look.
_MAX_NAMES = 10_000
_MAX_LATE_SPANS = 1 << 14  # Late spans are asked for their numbers at the end of every step.
_RESERVED = 8  # An eighth of a limited file is for notes and for the end of the run.
_OF_STEPS: set[type] = {SampleLine, CountLine, ExpertsLine, MetricsLine}
_RETURNED = "numbers that a recorder should have returned:"

RATE = "_tokens_per_s"
"""End of the names of metrics that are sums over ranks."""


class Counted(NamedTuple):
    """A counter of a stage.

    Attributes:
        total: Its sum.
        ns: Nanoseconds in which at least one span that carries it was open.
    """

    total: Number = 0
    ns: int = 0


class StepTotals(NamedTuple):
    """What is known of a step that ended.

    Attributes:
        ns: How long it took without validations, in nanoseconds; 0 where no step has ended, or
            where it was a shadow step.
        captured: Whether a capture was open in it.
        stages: Nanoseconds of each stage of the thread that trains: one span at least was open.
        counts: Counters of these, by stage and name.
    """

    ns: int
    captured: bool
    stages: dict[str, int]
    counts: dict[tuple[str, str], Counted]


class Buffer:
    """Collect lines in memory, and append them to the file when a step or a long stage ends.

    Steps that end within 100 ms of the last write wait for the next one. Any thread may add spans
    with `append`, and flush.

    Args:
        writer: The file; a disk that takes nothing costs lines, never a run.
        clock: Monotonic nanoseconds.
        limit: Bytes of the file, about, beyond which lines of steps are left out.
        all_names: Whether `stages_seen` has the names of all steps.
    """

    def __init__(
        self,
        writer: TraceWriter,
        clock: Callable[[], int],
        limit: int | None = None,
        *,
        all_names: bool = False,
    ) -> None:
        self._writer, self._clock = writer, clock
        self._name = plain(str(writer.path))
        self._limit = limit
        self._left_out = {"lines": 0, "steps": 0}  # They are counted once the file is full.
        self._left_from: int | None = None
        self._has_said_full = False
        self._spans: list[Span] = []
        self.append: Callable[[Span], object] = self._spans.append
        self._unwritten: list[Span] = []  # Spans of steps that have ended.
        self._written_ns = clock() - _WRITE_NS
        self._others: list[msgspec.Struct] = []
        # A signal's handler may mark something while its thread writes, and must not wait for it.
        self._lock = threading.RLock()
        self._writes = False
        self._threads: set[int] = set()
        self._knows = self._threads.issuperset
        self._lost = 0
        self._refused_ns: int | None = None  # The time since which the disk accepts no writes.
        self._damage: set[str] = set()
        self._flushed: list[Span] = []  # Spans of the steps since the last account.
        # Where the last step and this one begin in them, if the last one passed without an account.
        self._passed: tuple[int, int] | None = None
        self._thread = threading.get_ident()
        self._tally: Tally | None = None  # It sums up that step, if not all lines are kept.
        self._last: tuple[list[Span], Tally | None] = ([], None)
        self._late: list[tuple[Span, Late]] = []
        self._experts: list[tuple[Span, Callable[[], ExpertTokens | None]]] = []
        self._numbers_lost = False
        self._kinds_and_names: set[tuple[str, str]] = set()
        self._looks = -1 if all_names else _STEPS_WITH_NAMES

    def end_step(self, step: int, *, write: bool = True) -> None:
        """Close the account of a step, and write everything unless that was done just now.

        Without ``write``, as in a shadow step, it waits for the next one. What isn't a span, as
        that a capture was taken, is rare, and never waits.
        """
        if self._late or self._experts:
            self._ask_late()
        with self._lock:
            waits = not write or self._clock() - self._written_ns < _WRITE_NS
            if waits and not self._others:
                self._collect()
            else:
                self._flush_once()
                if self.is_full and not self._has_said_full:
                    self._has_said_full = True
                    first = step if self._left_from is None else self._left_from
                    text = (
                        f"over budget: the file has all of max_file_bytes={self._limit:,}; steps "
                        f"from {first} on are left out"
                    )
                    said = self._note(Code.OVER_BUDGET, text, {"step": first})
                    log.warning("%s: %s", self._name, said)
            own = self._flushed[self._passed[1] :] if self._passed else self._flushed
            self._last = own, self._tally
            self._flushed, self._tally, self._passed = [], None, None

    def waits(self, now_ns: int) -> bool:
        """Return whether a step that ends now has nothing to write."""
        if self._others or self._late or self._experts:
            return False
        return now_ns - self._written_ns < _WRITE_NS

    def pass_step(self) -> None:
        """Know that a step has ended for which `waits` is true; the next account includes it."""
        begin = self._passed[1] if self._passed else 0
        self._passed = begin, len(self._flushed) + len(self._spans)

    def flush(self) -> None:
        """Append everything to the file."""
        with self._lock:
            self._flush_once()

    def flush_to_the_end(self) -> None:
        """Append everything to the file, and how much was left out: the process ends."""
        with self._lock:
            self._flush_once()
            if self.is_full:
                text = (
                    "over budget: {lines:,} lines, {steps:,} steps among them, were not kept: "
                    "raise max_file_bytes={limit:,}"
                ).format(**self._left_out, limit=self._limit)
                self._note(Code.BUDGET_SUMMARY, text, self._left_out)
                self._flush_once()

    def end_at_once(
        self, step: Span | None, has_ended: Callable[[int], bool], end: EndLine
    ) -> None:
        """Append everything and the end to the file, on any thread; what comes later is lost.

        Args:
            step: The step that is interrupted, unless its own thread ends it meanwhile.
            has_ended: Returns whether a step that began at an instant or later has ended.
            end: The last line.
        """
        with self._lock:
            self._collect()
            known = [span.start_ns for span in self._flushed if span.kind == "step"]
            if step and not has_ended(step.start_ns) and max(known, default=-1) < step.start_ns:
                self._unwritten.append(step)
            self.add(end)
            self.flush_to_the_end()
            self._writes = True

    def flush_if_free(self) -> None:
        """Append everything to the file, unless another thread does so, or is stuck in it."""
        if self._lock.acquire(blocking=False):
            try:
                self._flush_once()
            finally:
                self._lock.release()

    def _flush_once(self) -> None:
        if self._writes:
            return
        self._writes = True
        try:
            self._flush()
        finally:
            self._writes = False
            self._written_ns = self._clock()

    def recent(self) -> list[Span]:
        """Return the last spans that ended, in that order: some hundred of this step and the last.

        Any thread may ask.
        """
        parts = self._last[0], self._flushed, self._spans
        return [span for part in parts for span in part[-_MAX_RECENT_SPANS:]]

    def _look(self) -> None:
        """Say once what was done to the file from outside: in the log, and in the file."""
        # In a forked child the file is closed; elsewhere it may not be writable.
        with suppress(OSError):
            damage = self._writer.damage()
            if damage and damage not in self._damage:
                self._damage.add(damage)
                log.warning("%s", self._note(Code.FILE_DAMAGED, f"{self._name} {damage}"))

    def _flush(self) -> None:
        self._look()
        self._collect()
        spans, self._unwritten = self._unwritten, []
        # A Python loop would be slow: this runs once per step, when the CPU caches are cold.
        if self._others or self._lost or not self._knows(map(_thread_of, spans)):
            self._write_with_news(spans)
        elif spans or self._refused_ns is not None:
            self._write([], spans, [])

    def _collect(self) -> None:
        """Move the spans that have ended to what is to be written, and to the step's account."""
        spans = self._spans[:]
        del self._spans[: len(spans)]
        self._unwritten += spans
        self._flushed += spans
        if self._looks and len(self._kinds_and_names) < _MAX_NAMES:
            self._looks -= 1
            self._kinds_and_names.update(map(_kind_and_name_of, spans))
        if len(self._flushed) > _MAX_INTERVALS:
            self._tally = self._tally or Tally(self._thread)
            self._tally.add(self._flushed)
            self._flushed.clear()
            self._passed = None

    def add(self, line: msgspec.Struct) -> None:
        """Add a line of another kind."""
        self._others.append(line)

    def last_stages(self, since_ns: int, names: Collection[str]) -> tuple[Span | None, Span | None]:
        """Return the stage of this thread that ended last, and the last one with a given name.

        Stages that ended before ``since_ns`` or in an earlier step do not count.
        """
        last, thread = None, threading.get_ident()
        for spans in (self._spans, self._flushed):
            for span in reversed(spans):
                if _ends(span)[1] < since_ns:
                    return last, None
                if span.kind == "stage" and span.thread == thread:
                    last = span if last is None else last
                    if span.name in names:
                        return last, span
        return last, None

    def around(self, intervals: Sequence[tuple[int, int, int]]) -> list[int | None]:
        """Return of intervals of this step the id of the innermost span around each, or None.

        Spans that are still open count if they are of the calling thread.

        Args:
            intervals: Thread, start and end of each, ascending in time.
        """
        spans, around = [*self._flushed, *self._spans], opened.get()
        while around is not None:
            spans += [around] if around.end_ns is None else []
            around = around.around
        starts = [start for _, start, _ in intervals]
        found = [(-1, -1)] * len(starts)  # Start and id of the span around each interval.
        for span in spans:
            if span.kind not in ("stage", "region"):
                continue
            at, end = bisect_left(starts, span.start_ns), span.end_ns
            while at < len(starts) and (end is None or starts[at] < end):
                thread, _, last = intervals[at]
                if thread == span.thread and (end is None or last <= end):
                    found[at] = max(found[at], (span.start_ns, span.id))
                at += 1
        return [None if number < 0 else number for _, number in found]

    def follow(self) -> int:
        """Return the thread whose stages count in this step, and let them be those of its totals.

        It is the one before, unless it has no stage and others have: then the one with most.
        """
        spent: dict[int, int] = {}
        for span in self._ended(self._passed[1] if self._passed else 0):
            if span.kind == "stage":
                spent[span.thread] = spent.get(span.thread, 0) + span.duration_ns
        if spent and self._thread not in spent:
            self._thread = max(spent, key=spent.__getitem__)
            if self._tally is not None:
                self._tally.thread = self._thread
        return self._thread

    @property
    def is_full(self) -> bool:
        """Whether lines were left out, as the file has its limit."""
        return bool(self._left_out["lines"])

    def has_stages(self) -> bool:
        """Return whether a stage has ended since the step began; those in validations are none."""
        spans = self._ended(self._passed[1] if self._passed else 0)
        return "stage" in map(_kind_of, spans) and bool(_trained(spans))

    def _ended(self, begin: int, end: int | None = None) -> list[Span]:
        """Return some of the spans since the last account; those of short steps are unflushed."""
        if not self._flushed:
            return self._spans[begin:end]
        return [*self._flushed, *self._spans][begin:end]

    def last_step(self) -> Sequence[Span]:
        """Return the spans of the last step that ended: all of them, up to 65,536."""
        return self._last[0] if self._passed is None else self._ended(*self._passed)

    @property
    def stages_seen(self) -> set[str]:
        """Names of stages: of the first steps, or of all."""
        return {name for kind, name in self._kinds_and_names if kind == "stage"}

    @property
    def stage_count(self) -> int:
        """How many stages ended in the last step."""
        return [*map(_kind_of, self.last_step())].count("stage")

    def take_back(self, span: Span) -> bool:
        """Remove an ended span, to be continued; return whether it was not yet written."""
        with self._lock:
            for at in reversed(range(len(self._spans))):
                if self._spans[at] is span:
                    del self._spans[at]
                    return True
        return False

    def join_late(self, span: Span) -> None:
        """Let the late numbers of a span and of what it continues be one sum."""
        own = [ask for other, ask in self._late if other.id == span.id]
        if len(own) > 1:
            self._late = [(other, ask) for other, ask in self._late if other.id != span.id]
            self._late.append((span, partial(_summed, own, {})))

    def later(self, span: Span, asks: Iterable[Late]) -> None:
        """Write a span's further numbers once they are known: after its step, or at the end."""
        self._late += [(span, ask) for ask in asks]

    def later_experts(self, span: Span, ask: Callable[[], ExpertTokens | None]) -> None:
        """Write the tokens of experts in a span once they are known."""
        self._experts.append((span, ask))

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self._ask_late()
            end = [line for line in self._others if isinstance(line, EndLine)]
            self.flush_to_the_end()
            self._lost += self._writer.waiting + self._writer.dropped
            if self._lost:
                text = "%s lacks %d lines that could not be written"
                log.warning(text, self._name, self._lost)
                with suppress(OSError):
                    self._writer.write_reserved([self._note_of_lost(), *end])
        finally:
            self._close_file()

    def _close_file(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            log.warning("%s may lack its last lines: %s", self._name, error)

    def discard(self) -> None:
        """Close the file and remove it."""
        self._writer.discard()

    def leave(self) -> None:
        """Lose everything from now on and say nothing, in a forked child: the file is another's."""
        self._lock, self._writes = threading.RLock(), True  # Another thread may have held the lock.
        self.append = bool  # It keeps nothing, as optimizers may add spans for a long time.
        self._close_file()

    def totals(self) -> StepTotals:
        """Return what the last step spent on the stages of the thread that made this."""
        lines, before = self._last if self._passed is None else (self.last_step(), None)
        tally = before or Tally(self._thread)
        if self._passed is None:
            self._last = [], tally
        tally.add(lines)
        return tally.totals()

    def _ask_late(self) -> None:
        experts, self._experts = self._experts, []
        for span, read in experts:
            try:
                if (tokens := read()) is None:
                    self._experts.append((span, read))
                else:
                    self.add(ExpertsLine(span.id, tokens))
            except Exception as error:
                self._lose_numbers(f"{EXPERTS} of <{span.kind} {span.name}>: {described(error)}")
        del self._experts[:-_MAX_LATE_SPANS]
        asked, self._late = self._late, []
        for span, ask in asked:
            try:
                numbers = ask()
                if numbers is None:
                    self._late.append((span, ask))
                elif told := numbers_of(numbers):
                    self.add(CountLine(span.id, {**told}))
            except BaseException as error:
                if is_for_the_process(error):
                    raise
                self._lose_numbers(f"{_RETURNED} of <{span.kind} {span.name}> ({described(error)})")
        if len(self._late) > _MAX_LATE_SPANS:
            self._lose_numbers(
                f"{_RETURNED} of more than {_MAX_LATE_SPANS} spans, as they are never told"
            )
            del self._late[:-_MAX_LATE_SPANS]

    def _lose_numbers(self, which: str) -> None:
        """Say it once, as it may come with every span."""
        if not self._numbers_lost:
            log.warning("%s", self._note(Code.NUMBERS_LOST, f"lost {which}"))
        self._numbers_lost = True

    def _write(
        self, news: list[msgspec.Struct], spans: list[Span], others: Sequence[msgspec.Struct]
    ) -> None:
        rows = [*map(line_of, spans)]
        if self._limit is not None and self._writer.size >= self._limit - self._limit // _RESERVED:
            rare = [line for line in others if type(line) not in _OF_STEPS]
            self._left_out["lines"] += len(rows) + len(others) - len(rare)
            steps = [span.step for span in spans if span.kind == "step"]
            self._left_out["steps"] += len(steps)
            if steps and self._left_from is None:
                self._left_from = min(steps)
            rows, others = [], rare
            # A server may start a thread for each request.
            news = [line for line in news if not isinstance(line, ThreadLine)]
        lines = [*news, *rows, *others] if news or others else rows
        try:
            if not self._writer.write(lines):  # Waiting spans must not keep tensors alive.
                for span in spans:
                    span.counters = plain_item(span.counters)
        except OSError as error:
            if self._refused_ns is None:
                text = "cannot write %s: %s; the newest lines wait in memory"
                log.warning(text, self._name, error)
                self._refused_ns = self._clock()
        except Exception as error:  # A line contains a value that cannot be encoded.
            if not self._lost:
                log.warning("cannot write %s, spans are lost: %s", self._name, error)
            self._lost += len(lines)
        else:
            if self._refused_ns is not None:
                seconds = (self._clock() - self._refused_ns) / 1e9
                text = (
                    f"the disk took nothing for {seconds:.1f} s; what waited in memory is written"
                )
                self._note(Code.DISK_REFUSED, text, {"seconds": round(seconds, 3)})
                if self._writer.dropped:
                    self._threads.clear()  # Their names may be among what was lost.
            self._refused_ns = None
            self._lost += self._writer.dropped
            self._writer.dropped = 0

    def _note(self, code: Code, text: str, facts: Mapping[str, Fact] = NO_FACTS) -> str:
        """Add a note; return its text as it may be logged."""
        line = note_line(self._clock(), code, text, facts)
        self.add(line)
        return line.text

    def _note_of_lost(self) -> msgspec.Struct:
        text = f"{self._lost} lines were lost, because they could not be written"
        return note_line(self._clock(), Code.LINES_LOST, text, {"lines": self._lost})

    def _write_with_news(self, spans: list[Span]) -> None:
        """Put names of new threads and the count of lost lines around the spans."""
        others = self._others[:]
        del self._others[: len(others)]
        new = set(map(_thread_of, spans)) - self._threads
        alive = {thread.ident: thread.name for thread in threading.enumerate()}
        lines: list[msgspec.Struct] = [
            ThreadLine(ident, alive.get(ident, f"thread {ident}")) for ident in sorted(new)
        ]
        if self._lost and self._refused_ns is None:  # The note would be lost, too.
            lines.append(self._note_of_lost())
            self._lost = 0
        self._threads |= new
        self._write(lines, spans, others)


class Tally:
    """Adds up the spans of a step.

    Args:
        thread: Identity of the thread whose spans count from now on.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self._step: tuple[int, int] | None = None
        self._captured = False
        self._spent: dict[tuple[str, str], _Union] = {}  # The counter "" is for all spans.
        self._apart = _Union()  # Validations are not training.

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans in the order in which they ended; those before the step are left out.

        So are those in validations.
        """
        own = [span for span in spans if span.thread == self.thread]
        began = 0
        for span in own:
            counters = span.counters or {}
            if span.kind == "step" and SHADOW not in counters:
                began = max(began, span.start_ns)
                self._step, self._captured = _ends(span), "capture" in counters
        for span in own:
            if span.name in VALIDATIONS:
                self._apart.add(*_ends(span))
        for span in _trained(own):
            start, end = _ends(span)
            if end > began:
                self._add(span.name, start, end, span.counters or {})

    def totals(self) -> StepTotals:
        """Return what the step spent on each stage; what lies before or after it is cut off."""
        if self._step is None:
            return StepTotals(0, False, {}, {})
        low, high = self._step
        stages, counts = dict[str, int](), dict[tuple[str, str], Counted]()
        for (stage, counter), spent in self._spent.items():
            ns = spent.within(low, high)
            if counter:
                counts[stage, counter] = Counted(spent.total, ns)
            else:
                stages[stage] = ns
        length = high - low - self._apart.within(low, high)
        return StepTotals(length, self._captured, stages, counts)

    def _add(self, stage: str, start: int, end: int, counters: dict[str, Any]) -> None:
        self._spent.setdefault((stage, ""), _Union()).add(start, end)
        for counter, told in counters.items():
            value = as_number(told)
            if value is not None and abs(value) < _MAX_COUNTER:
                self._spent.setdefault((stage, counter), _Union()).add(start, end, value)


def _ends(span: Span) -> tuple[int, int]:
    """Return start and end of a span that has ended."""
    assert span.end_ns is not None
    return span.start_ns, span.end_ns


def _trained(spans: Sequence[Span]) -> list[Span]:
    """Return the stages that are not in a validation."""
    apart = [_ends(span) for span in spans if span.name in VALIDATIONS]
    stages = [span for span in spans if span.kind == "stage"]
    if not apart:
        return stages
    return [
        span
        for span in stages
        if not any(low <= span.start_ns and _ends(span)[1] <= high for low, high in apart)
    ]


class _Union:
    """Intervals that come in the order of their ends, to ask for how long one at least is open.

    Attributes:
        total: Sum of their values.
    """

    def __init__(self) -> None:
        self.total: Number = 0
        self._apart: list[tuple[int, int]] = []
        self._done_ns = 0

    def add(self, start: int, end: int, value: Number = 0) -> None:
        self.total, apart = self.total + value, self._apart
        while apart and apart[-1][1] > start:
            start = min(start, apart.pop()[0])
        apart.append((start, end))
        if len(apart) > _MAX_INTERVALS:
            self._done_ns += sum(end - start for start, end in apart[:-1])
            del apart[:-1]

    def within(self, low: int, high: int) -> int:
        inside = (min(end, high) - max(start, low) for start, end in self._apart)
        return self._done_ns + sum(length for length in inside if length > 0)


def _summed(asks: list[Late], known: dict[Late, Counters]) -> dict[str, Number] | None:
    """Return the sums of late numbers, None until all of them are known."""
    for ask in asks:
        if ask not in known and (numbers := ask()) is not None:
            known[ask] = numbers_of(numbers)
    if len(known) < len(asks):
        return None
    names = {name for numbers in known.values() for name in numbers}
    return {name: sum(numbers.get(name, 0) for numbers in known.values()) for name in names}


_thread_of, _kind_of = attrgetter("thread"), attrgetter("kind")
_kind_and_name_of = attrgetter("kind", "name")


class RankTakenError(ConfigError):
    """The run directory has a file of this rank already."""


def open_writer(run: Path, header: Header) -> TraceWriter:
    """Open the file of a rank.

    Raises:
        RankTakenError: The run directory has this rank already.
        ConfigError: The run directory cannot be written.
    """
    try:
        return TraceWriter(run, header)
    except OSError as error:
        if isinstance(error, FileExistsError) and run.is_dir():
            raise RankTakenError(
                f"integrated.profile_save_path: {run} has rank {header.rank} already, of another "
                "process; give each process a rank of its own, or each training a run name"
            ) from error
        raise ConfigError(
            f"integrated.profile_save_path: {run} cannot be written ({error.strerror}); "
            "choose a directory that this process may write"
        ) from error


class StageSums:
    """What some steps spent, together.

    Attributes:
        steps: How many they are.
        stages: Nanoseconds of each stage.
        counts: Its counters, by stage and name.
    """

    def __init__(self, steps: Sequence[StepTotals]) -> None:
        self.steps, self._ns = len(steps), sum(step.ns for step in steps)
        self.stages = Counter[str]()
        self.counts: dict[tuple[str, str], Counted] = {}
        for step in steps:
            self.stages.update(step.stages)
            for key, counted in step.counts.items():
                total, ns = self.counts.get(key, Counted())
                self.counts[key] = Counted(total + counted.total, ns + counted.ns)

    def metrics(self) -> dict[str, float]:
        """Return means per step in seconds, shares, and tokens per second."""
        found = {}
        for stage, ns in self.stages.items():
            found[f"rlprof/{stage}_s"] = ns / self.steps / 1e9
            found[f"rlprof/{stage}_share"] = ns / self._ns
            tokens = self.counts.get((stage, "tokens"), Counted())
            if tokens.ns:
                found[f"rlprof/{stage}{RATE}"] = tokens.total / (tokens.ns / 1e9)
        if self.steps:  # The step comes after the stages, one of which may be called "step".
            found["rlprof/step_s"] = self._ns / self.steps / 1e9
        return found
