"""Ended spans and notes of one rank on their way to its file.

What one step spent on its stages, on one thread.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.errors import ConfigError, described
from lightning_rlprof.recording.budget import Budget
from lightning_rlprof.recording.open_spans import ExpertTokens, Line, opened
from lightning_rlprof.recording.recorders.base import Counters, Late, is_for_the_process, numbers_of
from lightning_rlprof.records.histograms import EXPERTS
from lightning_rlprof.records.records import OVER_BUDGET, VALIDATIONS, Header, Number, as_number
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.records.shadow_steps import SHADOW
from lightning_rlprof.system.plain_text import plain

_MOST = 1 << 16  # intervals of a stage that are kept apart
_LARGEST = 1e300  # beyond it, and where it is not a number, a counter is unknown


class Spent(NamedTuple):
    """What a step spent on one stage.

    Attributes:
        ns: Nanoseconds in which at least one span of the stage was open.
        counters: Sum of each counter.
        counted_ns: The same time of only those spans that carry that counter.
        spans: How many these are.
    """

    ns: int
    counters: dict[str, Number]
    counted_ns: dict[str, int]
    spans: dict[str, int]


class StepTotals(NamedTuple):
    """What is known of a step that ended.

    Attributes:
        ns: How long it took without validations, in nanoseconds; 0 where no step has ended, or
            where it was a shadow step.
        captured: Whether a capture was open in it.
        stages: What it spent on each stage of the thread that trains.
    """

    ns: int
    captured: bool
    stages: dict[str, Spent]


class Tally:
    """Adds up the spans of a step.

    Args:
        thread: Identity of the thread whose spans count.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._step: tuple[int, int] | None = None
        self._captured = False
        self._times: dict[tuple[str, str], _Union] = {}
        self._sums: dict[tuple[str, str], Number] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._apart = _Union()  # validations

    def follow(self, thread: int) -> None:
        """Let the spans of another thread count from now on."""
        self._thread = thread

    def add(self, lines: Sequence[Line]) -> None:
        """Add spans in the order in which they ended; those before the step are left out.

        So are those in validations.
        """
        own = [line for line in lines if line[6] == self._thread]
        began = 0
        for _, _, kind, _, start, end, _, _, _, counters in own:
            if kind == "step" and SHADOW not in (counters or {}):
                began = max(began, start)
                self._step, self._captured = (start, end), "capture" in (counters or {})
        for line in own:
            if line[1] in VALIDATIONS:
                self._apart.add(line[4], line[5])
        for _, name, _, _, start, end, _, _, _, counters in _trained(own):
            if end > began:
                self._add(name, start, end, counters or {})

    def totals(self) -> StepTotals:
        """Return what the step spent on each stage; what lies before or after it is cut off."""
        if self._step is None:
            return StepTotals(0, False, {})
        low, high = self._step
        stages = {}
        for (stage, counter), union in self._times.items():
            if not counter:
                stages[stage] = Spent(union.within(low, high), {}, {}, {})
        for (stage, counter), value in self._sums.items():
            stages[stage].counters[counter] = value
            stages[stage].counted_ns[counter] = self._times[stage, counter].within(low, high)
            stages[stage].spans[counter] = self._counts[stage, counter]
        return StepTotals(high - low - self._apart.within(low, high), self._captured, stages)

    def _add(self, stage: str, start: int, end: int, counters: dict[str, Any]) -> None:
        self._times.setdefault((stage, ""), _Union()).add(start, end)
        for counter, told in counters.items():
            value = as_number(told)
            if value is not None and abs(value) < _LARGEST:
                key = stage, counter
                self._times.setdefault(key, _Union()).add(start, end)
                self._sums[key] = self._sums.get(key, 0) + value
                self._counts[key] = self._counts.get(key, 0) + 1


def _trained(lines: Sequence[Line]) -> list[Line]:
    """Return the stages that are not in a validation."""
    apart = [(line[4], line[5]) for line in lines if line[1] in VALIDATIONS]
    return [
        line
        for line in lines
        if line[2] == "stage" and not any(low <= line[4] and line[5] <= high for low, high in apart)
    ]


class _Union:
    """Intervals that come in the order of their ends, to ask for how long one at least is open."""

    def __init__(self) -> None:
        self._apart: list[tuple[int, int]] = []
        self._done_ns = 0

    def add(self, start: int, end: int) -> None:
        apart = self._apart
        while apart and apart[-1][1] > start:
            start = min(start, apart.pop()[0])
        apart.append((start, end))
        if len(apart) > _MOST:
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


log = logging.getLogger(__name__)

# How long steps may stay in memory: encoding and writing costs a step of 7 ms 44 µs, and 8 µs if 14
# steps share one write. SIGKILL loses at most this long of them.
_WRITE_NS = 100_000_000
_RECENT = 300
_MOST_LATE = 1 << 14  # spans whose numbers are waited for; each is asked at the end of every step
_RETURNED = "numbers that a recorder should have returned:"
_thread_of = itemgetter(6)


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


class Buffer:
    """Collect lines in memory, and append them to the file when a step or a long stage ends.

    Steps that end within 100 ms of the last write wait for the next one. Any thread may add spans
    with `append`, and flush.

    Attributes:
        keeps_stages: Whether to keep the names of all stages.
        stages_seen: These names.

    Args:
        writer: The file; a disk that takes nothing costs lines, never a run.
        clock: Monotonic nanoseconds.
        budget: What of all lines is written.
    """

    def __init__(
        self, writer: TraceWriter, clock: Callable[[], int], budget: Budget | None = None
    ) -> None:
        self._writer, self._clock = writer, clock
        self._name = plain(str(writer.path))
        self._budget = budget or Budget()
        if self._budget.is_limited:
            writer.limit = self._budget.to_write
        self._spans: list[Line] = []
        self.append = self._spans.append
        self._unwritten: list[Line] = []  # of steps that have ended
        self._written_ns = clock() - _WRITE_NS
        self._others: list[tuple[Any, ...]] = []
        # A signal's handler may mark something while its thread writes, and must not wait for it.
        self._lock = threading.RLock()
        self._writes = False
        self._threads: set[int] = set()
        self._knows = self._threads.issuperset
        self._lost = 0
        self._refused_ns: int | None = None  # since when the disk takes nothing
        self._damage: set[str] = set()
        self._flushed: list[Line] = []  # of the step that continues
        self._thread = threading.get_ident()
        self._tally = Tally(self._thread)  # of that step, too: more lines than are kept
        self._last: tuple[list[Line], Tally] = ([], self._tally)
        self._late: list[tuple[Line, Late]] = []
        self._experts: list[tuple[Line, Callable[[], ExpertTokens | None]]] = []
        self._numbers_lost = False
        self.keeps_stages, self.stages_seen = False, set[str]()

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
                if text := self._budget.after_step(step):
                    log.warning("%s: %s", self._name, self._note("warning", text))
            self._last = self._flushed, self._tally
            self._flushed, self._tally = [], Tally(self._thread)

    def flush(self) -> None:
        """Append everything to the file."""
        with self._lock:
            self._flush_once()

    def flush_to_the_end(self) -> None:
        """Append everything to the file, with what the budget kept in memory: the process ends."""
        with self._lock:
            self._flush_once()
            if self._budget.is_full:
                self._append_newest(last=True)
            if summary := self._budget.summary():
                self._note("warning", summary)
                self._flush_once()

    def _append_newest(self, *, last: bool) -> None:
        if data := self._budget.newest(self._writer.size, last=last):
            self._try(partial(self._writer.append, data), data.count(b"\n"))

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

    def recent(self) -> list[Line]:
        """Return the last spans that ended, in that order: some hundred of this step and the last.

        Any thread may ask.
        """
        parts = self._last[0], self._flushed, self._spans
        return [line for part in parts for line in part[-_RECENT:]]

    def _look(self) -> None:
        """Say once what was done to the file from outside: in the log, and in the file."""
        with suppress(
            OSError
        ):  # that it is closed, in a forked child, or that it cannot be written
            damage = self._writer.damage()
            if damage and damage not in self._damage:
                self._damage.add(damage)
                log.warning("%s", self._note("error", f"{self._name} {damage}"))

    def _flush(self) -> None:
        self._look()
        self._collect()
        spans, self._unwritten = self._unwritten, []
        # No Python loop: this runs once per step, when the caches have forgotten all of it.
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
        if self.keeps_stages:
            self.stages_seen.update(line[1] for line in spans if line[2] == "stage")
        if len(self._flushed) > _MOST:
            self._tally.add(self._flushed)
            self._flushed.clear()

    def add(self, line: tuple[Any, ...]) -> None:
        """Add a line of another kind."""
        self._others.append(line)

    def last_stages(self, since_ns: int, names: Collection[str]) -> tuple[Line | None, Line | None]:
        """Return the stage of this thread that ended last, and the last one with a given name.

        Stages that ended before ``since_ns`` or in an earlier step do not count.
        """
        last, thread = None, threading.get_ident()
        for lines in (self._spans, self._flushed):
            for line in reversed(lines):
                if line[5] < since_ns:
                    return last, None
                if line[2] == "stage" and line[6] == thread:
                    last = last or line
                    if line[1] in names:
                        return last, line
        return last, None

    def around(self, intervals: Sequence[tuple[int, int, int]]) -> list[int | None]:
        """Return of intervals of this step the id of the innermost span around each, or None.

        Spans that are still open count if they are of the calling thread.

        Args:
            intervals: Thread, start and end of each, ascending in time.
        """
        lines, open_ = [*self._flushed, *self._spans], opened.get()
        while open_ is not None:
            lines += [open_[0]] if open_[0][5] is None else []
            open_ = open_[1]
        starts = [start for _, start, _ in intervals]
        found = [(-1, -1)] * len(starts)  # start and id of the span around it
        for _, _, kind, _, start, end, thread, number, _, _ in lines:
            if kind not in ("stage", "region"):
                continue
            at = bisect_left(starts, start)
            while at < len(starts) and (end is None or starts[at] < end):
                own, _, last = intervals[at]
                if own == thread and (end is None or last <= end):
                    found[at] = max(found[at], (start, number))
                at += 1
        return [None if number < 0 else number for _, number in found]

    def follow(self) -> int:
        """Return the thread whose stages count in this step, and let them be those of its totals.

        It is the one before, unless it has no stage and others have: then the one with most.
        """
        spent: dict[int, int] = {}
        for line in (*self._flushed, *self._spans):
            if line[2] == "stage":
                spent[line[6]] = spent.get(line[6], 0) + line[5] - line[4]
        if spent and self._thread not in spent:
            self._thread = max(spent, key=spent.__getitem__)
            self._tally.follow(self._thread)
        return self._thread

    def has_stages(self) -> bool:
        """Return whether a stage has ended since the step began; those in validations are none."""
        return bool(_trained([*self._flushed, *self._spans]))

    def last_step(self) -> Sequence[Line]:
        """Return the spans of the last step that ended: all of them, up to 65,536."""
        return self._last[0]

    @property
    def stage_count(self) -> int:
        """How many stages ended in the last step."""
        return sum(line[2] == "stage" for line in self._last[0])

    def take_back(self, line: Line) -> bool:
        """Remove an ended span, to be continued; return whether it was not yet written."""
        with self._lock:
            for at in reversed(range(len(self._spans))):
                if self._spans[at] is line:
                    del self._spans[at]
                    return True
        return False

    def join_late(self, line: Line) -> None:
        """Let the late numbers of a span and of what it continues be one sum."""
        own = [ask for span, ask in self._late if span[7] == line[7]]
        if len(own) > 1:
            self._late = [each for each in self._late if each[0][7] != line[7]]
            self._late.append((line, partial(_summed, own, {})))

    def later(self, span: Line, asks: Iterable[Late]) -> None:
        """Write a span's further numbers once they are known: after its step, or at the end."""
        self._late += [(span, ask) for ask in asks]

    def later_experts(self, span: Line, ask: Callable[[], ExpertTokens | None]) -> None:
        """Write the tokens of experts in a span once they are known."""
        self._experts.append((span, ask))

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self._ask_late()
            end = [line for line in self._others if line[0] == "end"]
            if comes_last := self._budget.is_full:  # after what is in memory
                self._others[:] = [line for line in self._others if line[0] != "end"]
            self.flush_to_the_end()
            if comes_last:
                self._others += end
                self.flush()
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
        self._lock, self._writes = threading.RLock(), True  # another thread may have held the lock
        self._close_file()

    def totals(self) -> StepTotals:
        """Return what the last step spent on the stages of the thread that made this."""
        lines, tally = self._last
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
                    self.add(("experts", span[7], tokens))
            except Exception as error:
                self._lose_numbers(f"{EXPERTS} of <{span[2]} {span[1]}>: {described(error)}")
        del self._experts[:-_MOST_LATE]
        asked, self._late = self._late, []
        for span, ask in asked:
            try:
                numbers = ask()
                if numbers is None:
                    self._late.append((span, ask))
                elif told := numbers_of(numbers):
                    self.add(("count", span[7], told))
            except BaseException as error:
                if is_for_the_process(error):
                    raise
                self._lose_numbers(f"{_RETURNED} of <{span[2]} {span[1]}> ({described(error)})")
        if len(self._late) > _MOST_LATE:
            self._lose_numbers(
                f"{_RETURNED} of more than {_MOST_LATE} spans, as they are never told"
            )
            del self._late[:-_MOST_LATE]

    def _lose_numbers(self, which: str) -> None:
        """Say it once, as it may come with every span."""
        if not self._numbers_lost:
            log.warning("%s", self._note("error", f"lost {which}"))
        self._numbers_lost = True

    def _write(self, news: list[Any], spans: list[Line], others: Sequence[tuple[Any, ...]]) -> None:
        budget = self._budget
        if not budget.is_full:
            lines = [*news, *spans, *others] if news or others else spans
            self._try(partial(self._writer.write, lines), len(lines))
            if not budget.is_full:
                return
        rare = [*news, *(line for line in others if not budget.is_of_steps(line))]
        if rare:
            self._try(partial(self._writer.write, rare, always=True), len(rare))
        lines = [*spans, *filter(budget.is_of_steps, others)]
        self._try(partial(self._writer.write, lines), len(lines))
        if any(map(_is_worth_keeping, (*spans, *others))):
            self._append_newest(last=False)

    def _try(self, write: Callable[[], None], lines: int) -> None:
        try:
            write()
        except OSError as error:
            if self._refused_ns is None:
                text = "cannot write %s: %s; the newest lines wait in memory"
                log.warning(text, self._name, error)
                self._refused_ns = self._clock()
        except Exception as error:  # what no file can hold
            if not self._lost:
                log.warning("cannot write %s, spans are lost: %s", self._name, error)
            self._lost += lines
        else:
            if self._refused_ns is not None:
                seconds = (self._clock() - self._refused_ns) / 1e9
                text = (
                    f"the disk took nothing for {seconds:.1f} s; what waited in memory is written"
                )
                self._note("warning", text)
                if self._writer.dropped:
                    self._threads.clear()  # their names may be among what was lost
            self._refused_ns = None
            self._lost += self._writer.dropped
            self._writer.dropped = 0

    def _note(self, level: str, text: str) -> str:
        """Add a note, which may quote names from anywhere; return it as it may be logged."""
        text = plain(text)
        self.add(("note", self._clock(), level, text))
        return text

    def _note_of_lost(self) -> tuple[Any, ...]:
        text = f"{self._lost} lines were lost, because they could not be written"
        return "note", self._clock(), "error", text

    def _write_with_news(self, spans: list[Line]) -> None:
        """Put names of new threads and the count of lost lines around the spans."""
        others = self._others[:]
        del self._others[: len(others)]
        new = set(map(_thread_of, spans)) - self._threads
        alive = {thread.ident: thread.name for thread in threading.enumerate()}
        lines: list[Any] = [("thread", i, alive.get(i, f"thread {i}")) for i in sorted(new)]
        if self._lost and self._refused_ns is None:  # else the note may be lost, too
            lines.append(self._note_of_lost())
            self._lost = 0
        self._threads |= new
        self._write(lines, spans, others)


def _is_worth_keeping(line: Sequence[Any]) -> bool:
    """Return whether a line is of a captured step, or a warning such as that of a hang."""
    if line[0] == "note":
        return line[2] != "info" and not str(line[3]).startswith(OVER_BUDGET)
    return line[0] == "span" and line[2] == "step" and "capture" in (line[9] or ())
