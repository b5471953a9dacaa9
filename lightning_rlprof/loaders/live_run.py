"""A run that a training may still write: how far each rank has come, from the ends of its files.

`progress` looks once. `LiveRun` follows: each call of `LiveRun.refresh` reads what was appended.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple

import msgspec

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.records.hang_reports import FOLDER, HangReport, read_report
from lightning_rlprof.records.records import PHASES, Header
from lightning_rlprof.records.run_directory import rank_files
from lightning_rlprof.records.shadow_steps import SHADOW
from lightning_rlprof.system.files import open_file

LATELY = 20
"""Steps whose times count, of each rank."""

_TAIL = 1 << 18  # bytes; some 250 steps of 40 spans
_HEAD = 1 << 16  # bytes that hold the header and the first step
_AT_ONCE = 1 << 26  # bytes of all ranks together
_LEAST = 1 << 16  # bytes of each rank
_MOST_SPANS = 4_096  # of a step
_MOST_NAMES = 64  # of stages in a step, or of metrics
_LEAST_AMOUNT, _MOST_AMOUNT = 1e-6, 1e30  # of a counter in a span; others come of damage
_MOST_NOTES = 16
_LONGEST = 400  # characters of a note or a name
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
_NOT_USUAL = frozenset(("interrupted", "capture", SHADOW))
_LIMITS = ("host_limit_bytes", "device_total_bytes")
_COUNTS = ("tokens", "samples", "flops")
_WANTED = (b'["span"', b'["note"', b'["metrics"', b'["end"')
# Of reports of hangs: 1,024 of them would fill the memory.
_NOT_SHOWN: dict[str, Any] = {
    "spans": (),
    "threads": (),
    "collectives": (),
    "groups": {},
    "children": (),
    "remarks": (),
}

_decode = msgspec.json.Decoder().decode
_decode_header = msgspec.json.Decoder(Header).decode


@dataclass(frozen=True)
class RankProgress:
    """How far a rank has come.

    Attributes:
        rank: Its number.
        path: Its file.
        size: Bytes of it that were read.
        last_step: The last step whose end was written; 0 before the first.
        step_ns: Median time of the last steps; None if there is none.
        status: How it ended; None while it records, or if it was killed.
    """

    rank: int
    path: Path
    size: int
    last_step: int
    step_ns: float | None
    status: str | None


def progress(run: Path) -> list[RankProgress]:
    """Return how far the ranks of a run have come, by rank; those that can't be read are left out.

    It reads the last 256 KB of each file.
    """
    found = []
    for path in rank_files(run):
        try:
            found.append(_progress(path))
        except OSError:
            continue
    return found


def _progress(path: Path) -> RankProgress:
    lines, size = new_lines(path, max(path.stat().st_size - _TAIL, 0))
    steps = [step for line in lines if (step := step_of(line)) is not None]
    ends = [line[2] for line in lines if line[0] == "end" and len(line) > 2]
    times = [ns for _, ns in steps[-LATELY:]]
    return RankProgress(
        rank=int(path.stem[5:]),
        path=path,
        size=size,
        last_step=steps[-1][0] if steps else 0,
        step_ns=median(times) if times else None,
        status=str(ends[-1]) if ends else None,
    )


def new_lines(path: Path, start: int) -> tuple[list[list[object]], int]:
    """Return the complete lines of a rank file from an offset on, and where they end.

    What is not a line of a rank file is left out, as is half a line at the start.

    Raises:
        OSError: The file cannot be read.
    """
    with open_file(path) as file:
        file.seek(start)
        data = file.read(os.fstat(file.fileno()).st_size - start)
    end = data.rfind(b"\n") + 1
    found = []
    for line in data[:end].splitlines():
        try:
            read = _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(read, list) and read:
            found.append(read)
    return found, start + end


def step_of(line: list[object]) -> tuple[int, int] | None:
    """Return the number and the ns of the step whose line this is; None of another line."""
    if line[0] != "span" or len(line) < 6 or line[2] != "step":
        return None
    step, start, end = line[3:6]
    if type(step) is int and type(start) is int and type(end) is int:
        return step, end - start
    return None


class LiveStep(NamedTuple):
    """A step that has ended: its number, its length, and the time of each stage in it.

    The times are exclusive: a stage inside a stage counts to the inner one. ``counts`` are those
    of `LiveRank.counts`.
    """

    number: int
    ns: int
    stages: Mapping[str, int]
    counts: Mapping[tuple[str, str], tuple[float, int]]


@dataclass
class LiveRank:
    """What is known of one rank while it records; its memory is bounded.

    Attributes:
        rank: Its number.
        path: Its file.
        header: First line of the file; None while that can't be read.
        last_step: The last step whose end was written; 0 before the first.
        last_stage: The stage that ended last, or phase of Lightning if the rank has no stages;
            ``""`` before the first.
        steps: The last steps that were neither captured nor interrupted.
        stage_ns: Sum of each stage over these steps.
        memory: Last value of each counter of memory, in bytes.
        metrics: Last value of each background metric.
        notes: Level and text of the last warnings and errors.
        status: How it ended; None while it records, or if it was killed.
        wrote_at: When something was last appended, on the clock of `LiveRun`.
    """

    rank: int
    path: Path
    header: Header | None = None
    last_step: int = 0
    last_stage: str = ""
    steps: deque[LiveStep] = field(default_factory=deque)
    stage_ns: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    notes: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_MOST_NOTES))
    status: str | None = None
    wrote_at: float = 0.0
    _size: int = -1  # bytes that were read; -1 before the first time
    _changed_ns: int = 0
    _has_stages: bool = False
    _spans: dict[int, tuple[Any, str, str, int, int, int]] = field(default_factory=dict)
    _counted: dict[tuple[str, str], list[tuple[int, int, float]]] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """Its role; ``""`` while its header can't be read."""
        return self.header.role if self.header is not None else ""

    @property
    def step_ns(self) -> float | None:
        """Median time of the last steps; None if there is none."""
        return median(step.ns for step in self.steps) if self.steps else None

    @property
    def counts(self) -> dict[tuple[str, str], tuple[float, int]]:
        """What stages counted in these steps, by stage and counter.

        The counters are tokens, samples and flops. With each sum comes the time, in ns, in which
        at least one span of the stage that counts it was open.
        """
        found: dict[tuple[str, str], tuple[float, int]] = {}
        for step in self.steps:
            for key, (amount, ns) in step.counts.items():
                before = found.get(key, (0, 0))
                found[key] = before[0] + amount, before[1] + ns
        return found

    def read(self, budget: int, now: float, unix: float) -> None:
        """Take what was appended, the last ``budget`` bytes of it.

        Raises:
            OSError: The file cannot be read.
        """
        found = self.path.stat()
        if found.st_size == self._size and found.st_mtime_ns == self._changed_ns:
            return
        is_new = self._size < 0
        if is_new:
            self.wrote_at = now - max(unix - found.st_mtime, 0.0)
        elif found.st_mtime_ns != self._changed_ns:
            self.wrote_at = now
        with open_file(self.path) as file:
            # A full disk lets a rank write its end into spaces behind its header only.
            if self.header is None or found.st_size <= self._size:
                self._read_head(file)
            if found.st_size < self._size:
                self._size = 0  # truncated
            start = max(self._size, found.st_size - budget, 0)
            file.seek(start)
            data = file.read(found.st_size - start)
        end = data.rfind(b"\n") + 1
        self._size, self._changed_ns = start + end, found.st_mtime_ns
        self._take(data[:end])

    def _read_head(self, file: BinaryIO) -> None:
        lines = file.read(_HEAD).split(b"\n")
        for line in lines[:2]:
            with suppress(*NOT_JSON):
                self.header = _decode_header(line)
                break
        for read in _all_lines(lines[1:-1]):
            if read[0] == "span" and len(read) > 9 and isinstance(read[9], dict):
                self._remember({name: read[9].get(name) for name in _LIMITS})
            elif read[0] == "end" and len(read) > 2:
                self.status = str(read[2])[:_LONGEST]

    def _take(self, data: bytes) -> None:
        for line in _all_lines([raw for raw in data.split(b"\n") if raw.startswith(_WANTED)]):
            match line:
                case ["span", str() as name, str() as kind, int() as step, start, end, *_]:
                    if len(line) > 9 and all(map(_fits, (step, start, end))):
                        self._take_span(line, name[:_LONGEST], kind, step)
                case ["note", _, "warning" | "error" as level, str() as text, *_]:
                    self.notes.append((level, text[:_LONGEST]))
                case ["metrics", _, _, device, dict() as rates, dict() as values, *_]:
                    self._take_metrics(device, {**rates, **values})
                case ["end", _, status, *_]:
                    self.status = str(status)[:_LONGEST]

    def _take_span(self, line: list[Any], name: str, kind: str, step: int) -> None:
        start, end, thread, number, parent, counters = line[4:10]
        if isinstance(counters, dict):
            self._remember(counters)
        if kind == "step":
            self.last_step = step
            kept = not (isinstance(counters, dict) and counters.keys() & _NOT_USUAL)
            if kept and end > start:
                own = {key: _total(spans) for key, spans in self._counted.items()}
                self._add(LiveStep(step, end - start, self._exclusive(step, thread), own))
            self._spans.clear()
            self._counted.clear()
        elif kind in ("stage", "region") and type(number) is int:
            self._has_stages |= kind == "stage"
            if kind == "stage" or (name in PHASES and not self._has_stages):
                self.last_stage = name
            if len(self._spans) < _MOST_SPANS:
                self._spans[number] = parent, name, kind, step, end - start, thread
                if kind == "stage" and isinstance(counters, dict):
                    self._count(name, start, end, counters)

    def _count(self, stage: str, start: int, end: int, counters: dict[str, Any]) -> None:
        for name in _COUNTS:
            amount = counters.get(name)
            if not isinstance(amount, int | float) or isinstance(amount, bool):
                continue
            if amount and not _LEAST_AMOUNT <= amount <= _MOST_AMOUNT:
                continue
            known = (stage, name) in self._counted or len(self._counted) < _MOST_NAMES
            if known and end > start:
                self._counted.setdefault((stage, name), []).append((start, end, amount))

    def _exclusive(self, step: int, thread: Any) -> dict[str, int]:
        """Return the time of stages on the training thread; without stages, Lightning's phases."""
        own = [each for each in self._spans.values() if each[3] == step and each[5] == thread]
        kinds = "stage" if any(each[2] == "stage" for each in own) else "region"
        found: dict[str, int] = {}
        for parent, name, kind, _, ns, _ in own:
            if kind != kinds or (kind == "region" and name not in PHASES):
                continue
            if name in found or len(found) < _MOST_NAMES:
                found[name] = found.get(name, 0) + ns
            around = self._around(parent, kinds)
            if around is not None and (around in found or len(found) < _MOST_NAMES):
                found[around] = found.get(around, 0) - ns
        return {name: max(ns, 0) for name, ns in found.items()}

    def _around(self, parent: Any, kinds: str) -> str | None:
        """Return the name of the innermost stage around a span, whose parent is given."""
        for _ in range(len(self._spans)):  # parents of a damaged file may form a circle
            span = self._spans.get(parent) if type(parent) is int else None
            if span is None:
                return None
            if span[2] == kinds and (kinds == "stage" or span[1] in PHASES):
                return span[1]
            parent = span[0]
        return None

    def _add(self, step: LiveStep) -> None:
        self.steps.append(step)
        for name, ns in step.stages.items():
            self.stage_ns[name] = self.stage_ns.get(name, 0) + ns
        if len(self.steps) > LATELY:
            for name, ns in self.steps.popleft().stages.items():
                self.stage_ns[name] -= ns
                if not any(name in each.stages for each in self.steps):
                    del self.stage_ns[name]

    def _remember(self, counters: Mapping[str, Any]) -> None:
        for name in _MEMORY & counters.keys():
            if _fits(counters[name]) and counters[name] >= 0:
                self.memory[name] = counters[name]

    def _take_metrics(self, device: Any, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            known = name in self.metrics or len(self.metrics) < _MOST_NAMES
            if known and (_fits(value) or (isinstance(value, float) and isfinite(value))):
                self.metrics[name[:_LONGEST]] = float(value)


class LiveRun:
    """Follow a run: `refresh` reads what its ranks have appended since the last time.

    It keeps the last 20 steps of each rank, some 30 KB. Files are read by offset, and are open
    only while they are read. What is appended faster than 64 MB per refresh, all ranks together,
    is skipped but for its end.

    Attributes:
        ranks: By number.
        hangs: The last report of each rank that made no progress, without its stacks.

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
        self._reports: set[str] = set()

    def refresh(self) -> None:
        """Read what was appended; a file that can't be read now is tried again the next time."""
        files = rank_files(self.run)
        budget = min(max(_AT_ONCE // max(len(files), 1), _LEAST), _AT_ONCE // 4)
        now, unix = self.clock(), self._wall()
        for path in files:
            number = int(path.stem[5:])
            rank = self.ranks.get(number) or LiveRank(number, path)
            with suppress(OSError):
                rank.read(min(budget, _TAIL) if number not in self.ranks else budget, now, unix)
                self.ranks[number] = rank
        self._read_hangs()

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
        return max(
            (each.header.world_size for each in self.ranks.values() if each.header), default=0
        )

    def _read_hangs(self) -> None:
        for path in sorted(self.run.glob(f"{FOLDER}/rank-*-*.json")):
            if path.name in self._reports:
                continue
            if (report := read_report(self.run, path)) is not None:
                self._reports.add(path.name)
                self.hangs[report.rank] = replace(report, **_NOT_SHOWN)


def _all_lines(lines: Sequence[bytes]) -> list[list[Any]]:
    """Return what lines hold, without those that are damaged."""
    try:  # all at once: several times as fast as line by line
        found = _decode(b"[" + b",".join(lines) + b"]")
    except NOT_JSON:
        found = [read for line in lines if (read := _line(line)) is not None]
    return [line for line in found if isinstance(line, list) and line]


def _total(spans: list[tuple[int, int, float]]) -> tuple[float, int]:
    """Return the sum of what spans counted, and how long at least one of them was open."""
    ns, until = 0, -(2**63)
    for start, end, _ in sorted(spans):
        ns += max(end - max(start, until), 0)
        until = max(until, end)
    return sum(amount for _, _, amount in spans), ns


def _fits(value: object) -> bool:
    """Return whether a value is an integer of 64 bits: what a file holds may be anything."""
    return type(value) is int and -(2**63) <= value < 2**63


def _line(raw: bytes) -> Any:
    try:
        return _decode(raw)
    except NOT_JSON:
        return None
