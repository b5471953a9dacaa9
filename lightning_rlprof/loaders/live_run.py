"""A run that a training may still write: the last steps of its ranks, and what its files say last.

`LiveRun` follows a run: each `LiveRun.refresh` reads what was appended. `progress` looks once at
the ends of the files, `hang_evidence` also at what processes left about a hang.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import msgspec
import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.iterations import StepEvidence, iteration_of, steps_per_iteration
from lightning_rlprof.loaders.native import (
    COLUMNS,
    RankColumns,
    check_header,
    checked_header,
    read_window,
)
from lightning_rlprof.records.hang_reports import (
    FOLDER,
    Collective,
    HangReport,
    RankEvidence,
    as_collectives,
    brief,
    dump_file,
    read_beat,
    read_plain_pickle,
    read_report,
    read_reports,
)
from lightning_rlprof.records.records import (
    KINDS,
    OPTIMIZER_STEP,
    PHASES,
    SHADOW,
    Header,
    Note,
    stated_world_size,
)
from lightning_rlprof.records.run_directory import (
    RankReader,
    RankTrace,
    SpanLine,
    is_inside,
    rank_files,
    read_header,
)
from lightning_rlprof.system.process import process_state
from lightning_rlprof.tables.spans import Spans

LATELY = 200
"""Steps of each rank that are kept."""

RECENT = 20
"""Steps of each rank by which metrics are computed: they have to follow a change."""

_TAIL_BYTES = 1 << 18  # Bytes; they contain some 50 steps of 40 spans.
_MAX_FIRST_BYTES = 1 << 22  # Bytes that are read first of a file; they contain the steps to keep.
_MAX_BYTES = 1 << 26  # Bytes; all ranks share them.
_MIN_BYTES_PER_RANK = 1 << 16
_MAX_SPANS = 1 << 19  # All ranks share them, and their columns take 33 MB.
_MIN_SPANS_PER_RANK = 800  # That are 20 steps of 40 spans.
_MAX_METRICS = 64
_MAX_NOTES = 16
_MAX_CHARACTERS = 400
_MEMORY = frozenset(
    {
        "host_rss_bytes",
        "children_rss_bytes",
        "host_limit_bytes",
        "device_allocated_bytes",
        "device_reserved_bytes",
        "device_used_bytes",
        "device_total_bytes",
    }
)
_NOT_USUAL = ("interrupted", "capture", SHADOW)
_STEP = KINDS.index("step")


class LiveRank:
    """What is known of one rank while it records; its memory is bounded.

    Attributes:
        path: Its file.
        trace: What its file says besides spans; None while its header is not whole.
        columns: The spans of its last steps.
        evidence: Which of its steps are one iteration.
        last_step: The last step whose end was written; 0 before the first.
        last_stage: The stage that ended last, or phase of Lightning if the rank has no stages;
            ``""`` before the first.
        memory: Last value of each counter of memory, in bytes.
        metrics: Last value of each background metric.
        notes: The last warnings and errors.
        wrote_at: When something was last appended, on the clock of `LiveRun`.
        is_whole: Whether ``columns`` begin with the first step of the run.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._reader = path, RankReader(path)
        self.wrote_at = 0.0
        self._begin(None)

    def _begin(self, trace: RankTrace | None) -> None:
        self.trace, self.columns = trace, RankColumns()
        self.last_step, self.last_stage = 0, ""
        self.memory: dict[str, int] = {}
        self.metrics: dict[str, float] = {}
        self.notes: deque[Note] = deque(maxlen=_MAX_NOTES)
        self._has_stages = self._has_dropped = False
        if trace is not None:
            check_header(self.path, trace.header)
            trace.header = checked_header(trace.header, [])
            self.evidence = StepEvidence(trace.header)

    @property
    def rank(self) -> int:
        """Its number."""
        return self._reader.rank

    @property
    def header(self) -> Header | None:
        """First line of its file; None while that is not whole."""
        return None if self.trace is None else self.trace.header

    @property
    def role(self) -> str:
        """Its role; ``""`` while its header is not whole."""
        return "" if self.trace is None else self.trace.header.role

    @property
    def status(self) -> str | None:
        """How it ended; None while it records, or if it was killed."""
        status = None if self.trace is None else self.trace.status
        return None if status is None else status[:_MAX_CHARACTERS]

    @property
    def is_whole(self) -> bool:
        """Whether its columns begin with the first step of the run."""
        return not (self._has_dropped or self._reader.has_skipped)

    def read(self, most: int, now: float, unix: float, kept: "_Kept") -> None:
        """Take what was appended, the last ``most`` bytes of it.

        Where steps are those of an optimizer, all of it is read: which of them are one iteration is
        seen from the first one on.

        Raises:
            OSError: The file cannot be read.
            TraceError: It is not a rank file.
        """
        reader, changed_ns = self._reader, self._reader.changed_ns
        is_new = not reader.size
        if is_new:
            most = min(most, _MAX_FIRST_BYTES)
        header = self.header
        if is_new:
            with suppress(TraceError):  # It may be written right now.
                header = read_header(self.path)
        counts = header is not None and header.step_unit == OPTIMIZER_STEP
        more = True
        while more:
            more = reader.read(None if counts else most)
            self._take(kept)
        if is_new:
            self.wrote_at = now - max(unix - reader.changed_ns / 1e9, 0.0)
        elif reader.changed_ns != changed_ns:
            self.wrote_at = now

    def _take(self, kept: "_Kept") -> None:
        """Keep what is needed of the lines that were read."""
        trace = self._reader.trace
        if trace is None:
            return
        if trace is not self.trace:
            self._begin(trace)
        before = len(self.columns)
        self.columns.take(trace.spans)
        self._take_last(trace.spans)
        own = {name: self.columns.column(name)[before:] for name in COLUMNS}
        self.evidence.take(own, self.columns.counters, self.columns.names)
        for line in trace.metrics:
            for metric, value in {**line.rates, **line.values}.items():
                # One rank samples several engines, which have numbers.
                has_number = line.device is not None and metric.startswith("engine_")
                name = f"{metric}_{line.device}" if has_number else metric
                known = name in self.metrics or len(self.metrics) < _MAX_METRICS
                if known and value is not None and isfinite(value):
                    self.metrics[name[:_MAX_CHARACTERS]] = float(value)
        for note in trace.notes:
            if note.level in ("warning", "error"):
                self.notes.append(msgspec.structs.replace(note, text=note.text[:_MAX_CHARACTERS]))
        for lines in (trace.spans, trace.metrics, trace.notes, trace.samples):
            lines.clear()
        self._drop(kept)

    def _take_last(self, lines: Sequence[SpanLine]) -> None:
        for line in lines:
            if line.kind == "step":
                self.last_step = line.step
            elif line.kind == "stage" or (line.name in PHASES and not self._has_stages):
                self.last_stage = line.name[:_MAX_CHARACTERS]
                self._has_stages |= line.kind == "stage"
            if line.counters:
                for name in _MEMORY & line.counters.keys():
                    value = line.counters[name]
                    if isinstance(value, int) and 0 <= value < 2**63:
                        self.memory[name] = value

    def _drop(self, kept: "_Kept") -> None:
        """Forget the spans before the last steps that were neither captured nor interrupted."""
        own = self.columns
        steps = np.flatnonzero(own.column("kind") == _STEP)
        row = _first_kept(own, kept.steps_per_iteration, LATELY)
        least = len(own) - kept.spans
        if row < least:  # Spans are dropped up to the end of a step, if there is one.
            at = int(np.searchsorted(steps, least))
            row = int(steps[at]) + 1 if at < len(steps) else least
        if row > 0 and self.trace is not None:
            self._has_dropped = True
            own.drop_before(row)
            first = int(own.column("id").min(initial=2**63 - 1))
            late = self.trace.late
            for number in [each for each in late if each < first]:
                del late[number]


def _first_kept(own: RankColumns, size: int, most: int) -> int:
    """Return the row behind the last step that is not kept: the last ``most`` iterations are."""
    steps = np.flatnonzero(own.column("kind") == _STEP)
    counters = (own.counters[name].rows for name in _NOT_USUAL if name in own.counters)
    flagged = np.concatenate([np.empty(0, np.int64), *counters])
    usual = steps[~np.isin(steps, flagged)]
    number = iteration_of(own.column("step")[usual], size)
    numbers = np.unique(number)
    if len(numbers) <= most:
        return 0
    first = usual[np.flatnonzero(number >= numbers[-most])[0]]
    at = int(np.searchsorted(steps, first))
    return int(steps[at - 1]) + 1 if at else 0


@dataclass
class _Kept:
    """How much of each rank is kept."""

    steps_per_iteration: int = 1
    spans: int = _MAX_SPANS


class LiveRun:
    """Follow a run: `refresh` reads what its ranks have appended since the last time.

    It keeps the last 200 steps of each rank, or as many as half a million spans contain. Files are
    read by offset, and are open only while they are read. What is appended faster than 64 MB per
    refresh, all ranks together, is skipped but for its end.

    Attributes:
        ranks: By number.
        hangs: The last report of each rank that made no progress, without its stacks.
        problems: Why files cannot be read, by the number in their names.

    Args:
        run: The run directory.
        clock: Seconds, monotonic.
        wall: Seconds since 1970, to know how old a file is that was never read before.

    Example::

        run = LiveRun(Path("profiler_data/my-run"))
        while not run.has_ended:
            run.refresh()
            print({rank: each.last_step for rank, each in run.ranks.items()})
            time.sleep(1)
    """

    def __init__(
        self,
        run: Path,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.run, self.clock, self._wall = run, clock, wall
        self.ranks: dict[int, LiveRank] = {}
        self.hangs: dict[int, HangReport] = {}
        self.problems: dict[int, str] = {}
        self._files: dict[Path, LiveRank] = {}
        self._kept = _Kept()
        self._reports: set[str] = set()
        self._spans: Spans | None = None

    def refresh(self) -> None:
        """Read what was appended; a file that can't be read now is tried again the next time."""
        self._read()
        size = steps_per_iteration({rank: each.evidence for rank, each in self.ranks.items()})
        if size != self._kept.steps_per_iteration:
            # More is kept of larger iterations, which happens once or twice in a run.
            self._kept.steps_per_iteration = size
            self._files.clear()
            self._read()
        self._spans = None
        self._read_hangs()

    def _read(self) -> None:
        files = rank_files(self.run)
        budget = min(max(_MAX_BYTES // max(len(files), 1), _MIN_BYTES_PER_RANK), _MAX_BYTES // 4)
        self._kept.spans = max(_MAX_SPANS // max(len(files), 1), _MIN_SPANS_PER_RANK)
        now, unix = self.clock(), self._wall()
        for path in files:
            rank = self._files.get(path) or LiveRank(path)
            try:
                rank.read(budget, now, unix, self._kept)
            except TraceError as error:
                self.problems[rank.rank] = str(error)
            except OSError:
                continue
            else:
                self.problems.pop(rank.rank, None)
                self._files[path] = rank
        known = (each for each in self._files.values() if each.trace is not None)
        self.ranks = {each.rank: each for each in sorted(known, key=lambda each: each.rank)}

    @property
    def spans(self) -> Spans | None:
        """The last steps of all ranks, as `load` returns a whole run; None before the first header.

        Steps are the same as there. Of each rank the last 200 are kept that were neither captured
        nor interrupted.
        """
        if self._spans is None and self.ranks:
            self._spans = self._window(LATELY)
        return self._spans

    @property
    def recent(self) -> Spans | None:
        """The last `RECENT` of these steps of each rank."""
        return self._window(RECENT) if self.ranks else None

    def _window(self, steps: int) -> Spans:
        ranks, is_whole = [], True
        for each in self.ranks.values():
            row = _first_kept(each.columns, self._kept.steps_per_iteration, steps)
            ranks += [] if each.trace is None else [(each.trace, each.columns.since(row))]
            is_whole &= each.is_whole and not row
        spans = read_window(self.run, ranks, self._kept.steps_per_iteration)
        return replace(spans, from_start=is_whole)

    def quiet_s(self, rank: LiveRank) -> float:
        """Return for how long a rank has written nothing, in seconds."""
        return max(self.clock() - rank.wrote_at, 0.0)

    @property
    def has_ended(self) -> bool:
        """Whether every rank that was found has written how it ended."""
        return bool(self.ranks) and all(each.status is not None for each in self.ranks.values())

    @property
    def world_size(self) -> int:
        """How many ranks the run has, by the headers; 0 if unknown."""
        return stated_world_size(each.header for each in self.ranks.values() if each.header)

    def _read_hangs(self) -> None:
        for path in sorted(self.run.glob(f"{FOLDER}/rank-*-*.json")):
            if path.name in self._reports:
                continue
            if (report := read_report(self.run, path)) is not None:
                self._reports.add(path.name)
                self.hangs[report.rank] = brief(report)


def last_steps(run: Path, most: int) -> Spans | None:
    """Return the last steps of a run that all of its ranks have, as `load` returns a whole run.

    None if no file can be read, or where steps are those of an optimizer: which of them are one
    iteration is seen from the first one on.

    Args:
        run: The run directory.
        most: How many bytes to read, all ranks together, beside the start of each file.
    """
    found: list[tuple[RankTrace, RankColumns]] = []
    first, files = 0, rank_files(run)
    for path in files:
        reader, own = RankReader(path), RankColumns()
        with suppress(OSError, TraceError):
            while reader.read(most // len(files)):
                pass
            trace = reader.whole()
            check_header(path, trace.header)
            trace.header = checked_header(trace.header, [])
            own.take(trace.spans)
            trace.spans.clear()
            found.append((trace, own))
            if reader.has_skipped:
                # The start of the file has the first steps; that of the rest is within a step.
                numbers = np.unique(own.column("step")[own.column("kind") == _STEP])
                gaps = np.flatnonzero(np.diff(numbers, prepend=-1) > 1)
                first = max(first, int(numbers[gaps[-1]]) + 1 if len(numbers) else 0)
    if not found or any(trace.header.step_unit == OPTIMIZER_STEP for trace, _ in found):
        return None
    for _, own in found:
        before = (own.column("kind") == _STEP) & (own.column("step") < first)
        own.drop_before(int(np.flatnonzero(before).max(initial=-1)) + 1)
    return replace(read_window(run, found, 1), from_start=not first)


def progress(run: Path) -> list[RankReader]:
    """Return how far the ranks of a run have come, by rank; those that can't be read are left out.

    Of each file the last 256 KB are read, unless it is shorter; the readers can go on from there.
    """
    found = []
    for path in rank_files(run):
        reader = RankReader(path)
        with suppress(OSError, TraceError):
            reader.read(_TAIL_BYTES)
            found += [reader] if reader.trace is not None else []
    return found


def hang_evidence(run: Path) -> tuple[RankEvidence, ...]:
    """Return what is known of each rank of a run, in order, also of those that have no file.

    Raises:
        TraceError: No file of a rank exists, or none can be read.
    """
    files = rank_files(run)
    found: dict[int, RankEvidence] = {}
    problems = [] if files else [f"{run} has no rank-*.jsonl"]
    for path in files:
        reader = RankReader(path)
        try:
            reader.read(_TAIL_BYTES)
            evidence = _evidence(run, reader.whole())
        except (OSError, TraceError) as error:
            problems.append(str(error))
            continue
        found[evidence.rank] = evidence
    if not found:
        raise TraceError(problems[0])
    first = next(iter(found.values())).header
    if first is not None and not first.open_world:
        for rank in range(min(first.world_size, 1 << 17)):
            found.setdefault(rank, RankEvidence(rank))
    return tuple(found[rank] for rank in sorted(found))


def _evidence(run: Path, trace: RankTrace) -> RankEvidence:
    header, rank = trace.header, trace.header.rank
    here = header.host == socket.gethostname()
    times = [line.end_ns for line in trace.spans] + [note.clock_ns for note in trace.notes]
    times += [] if trace.ended_ns is None else [trace.ended_ns]
    last = max(times, default=None)
    return RankEvidence(
        rank=rank,
        header=header,
        end=trace.status,
        last_ns=None if last is None else last - header.clock_ns + header.unix_ns,
        process=process_state(header.pid) if here and trace.status is None else "",
        beat=read_beat(run, rank),
        reports=read_reports(run, rank),
        dump=_dump(run, rank),
    )


def _dump(run: Path, rank: int) -> tuple[Collective, ...]:
    path = dump_file(run, rank)
    with suppress(TraceError):
        if path.exists() and is_inside(run, path):
            return tuple(as_collectives(read_plain_pickle(path)))
    return ()
