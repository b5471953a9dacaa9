"""Steps that take unusually long, found while the training runs, and the ranks that show why."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.recording.open_spans import Span
from lightning_rlprof.records.records import Header
from lightning_rlprof.records.run_directory import RankReader, SpanLine, rank_files
from lightning_rlprof.records.stage_aliases import is_evaluation

_MIN_STEPS, _MAX_STEPS = 30, 200  # Steps from which the usual time is learned.
_REFRESH, _REFRESHES = 5, 8  # Learning takes 0.1 ms: every 5 steps at first, every 25 later.
_MIN_SCATTER = 0.01  # A machine that repeats a step to 1% is not disturbed by 2%.
_LEVEL, _OF, _LAST = math.log(1.2), 7, 8
_SPIKE, _HIGHER, _REMEMBERED = math.log(2.5), math.log(1.25), 1_500
_SILENT_STEPS = 200  # Steps after an anomaly that are not judged.
_MIN_SPREAD = math.log(1.05)  # Work that varies less does not show how the time depends on it.
_MAX_SLOPE = 2.0  # Attention takes four times the FLOPs for twice the length.
_WORK = ("tokens", "flops")

MOST_FOR_ALL = 4
"""Ranks of a run of which all are captured."""

_MAX_RANKS = 8
_LAST_STEPS = 8
_MIN_LATE_SHARE = 0.02
_TAIL_BYTES = 1 << 15  # Bytes of some 8 steps of 40 spans.
_MAX_STEP_NS = 10**18  # A damaged file may contain any number.
_BUDGET_NS = 200_000_000  # It is the training thread's time, at most 3 times an hour.
_LEFT_OUT = {"capture", "interrupted"}


@dataclass(frozen=True)
class Anomaly:
    """What was unusual.

    Attributes:
        step: The step that showed it.
        kind: ``spike``: this step alone; ``level``: the steps since some steps ago.
        ratio: Its time to the usual one.
        usual_ns: The usual time, of a step with as much work.
        work: The counter that says how much work that is; ``""`` if none is recorded.
    """

    step: int
    kind: str
    ratio: float
    usual_ns: float
    work: str = ""

    def __str__(self) -> str:
        which = f"step {self.step} took" if self.kind == "spike" else "the last steps took"
        equal = f" for as many {'FLOPs' if self.work == 'flops' else self.work}"
        usual = f"the usual {self.usual_ns / 1e6:,.0f} ms{equal * bool(self.work)}"
        return f"{which} {self.ratio:.1f} times {usual}"


class StepFacts(NamedTuple):
    """What the spans of a step say of its work.

    Attributes:
        evaluated: Whether it contained an evaluation or a checkpoint.
        counter: ``tokens`` if a stage counted them, else ``flops``; ``""`` without either.
        work: The sum of that counter over its stages.
    """

    evaluated: bool
    counter: str
    work: float


def facts_of(spans: Iterable[Span]) -> StepFacts:
    """Return what the spans of a step say: 0.1 µs each."""
    evaluated = False
    work: dict[str, float] = {}
    for span in spans:
        if is_evaluation(span.name):
            evaluated = True
        if span.counters and span.kind == "stage":
            for name in _WORK:
                if name in span.counters:
                    work[name] = work.get(name, 0) + _plain(span.counters[name])
    for name in _WORK:
        if 0 < work.get(name, 0) < math.inf:
            return StepFacts(evaluated, name, work[name])
    return StepFacts(evaluated, "", 1.0)


def _plain(value: object) -> float:
    """Return a number that is on the host; reading a tensor would wait for its device."""
    return value if type(value) in (int, float) else math.nan  # type: ignore[return-value]


class Anomalies:
    """Find steps that are slow for their work.

    Steps are compared with those that count the same: tokens, FLOPs, or neither.
    """

    def __init__(self) -> None:
        self._times: dict[str, StepTimes] = {}

    def add(self, step: int, ns: int, facts: StepFacts) -> Anomaly | None:
        """Return what a step shows; its time must be above 0."""
        times = self._times.setdefault(facts.counter, StepTimes(facts.counter))
        found = times.add(step, ns, facts.work)
        if found is not None:
            for each in self._times.values():
                each.be_silent()
        return found


class StepTimes:
    """Learn the usual time of a step, and find steps that exceed it.

    Times are compared by their logarithms. The usual one is the median of the last 200 steps; s is
    their scatter, 1.4826 MAD and at least 1%.

    If the work of steps is known, the usual time is that of a step with as much work. It is
    proportional to a power b of the work, 0 to 2: the slope between the medians of the thirds with
    the least and the most work. Beyond the work that was seen, less work may take as long, and
    more work at least in proportion: longer responses are not an anomaly.

    A spike is a step that exceeds the usual time by ln 2.5 and by 8 s. It must also be 1.25 times
    as long as the highest such step of the last 1,500: what recurs is found once. A
    lasting change is 7 of 8 steps that exceed it by ln 1.2 and by 2 s; the usual time is then
    learned from them. After a find, 200 steps are silent.

    Nothing was found in 150 runs of 2,000 healthy steps under AR(0.9) noise of 3%. A step of five
    times the usual time is found at once, a lasting change of 1.3 times at the seventh step.

    Args:
        counter: What the work is.

    Example::

        >>> times = StepTimes()
        >>> found = [times.add(step, 10_000_000) for step in range(1, 50)]
        >>> str(times.add(50, 60_000_000)), any(found)
        ('step 50 took 6.0 times the usual 10 ms', False)
    """

    def __init__(self, counter: str = "") -> None:
        self._counter = counter
        # Logarithms of work and time.
        self._steps: deque[tuple[float, float]] = deque(maxlen=_MAX_STEPS)
        self._spikes: deque[tuple[int, float]] = deque()
        self._count = self._silent_until = 0
        self._learn_at = _MIN_STEPS
        self._level = self._scatter = 0.0
        self._slope = self._middle = 0.0
        self._low, self._high = -math.inf, math.inf

    def be_silent(self) -> None:
        """Find nothing in the next 200 steps."""
        self._silent_until = self._count + _SILENT_STEPS

    def add(self, step: int, ns: int, work: float = 1.0) -> Anomaly | None:
        """Return what a step shows; its time and its work must be above 0."""
        now = math.log(work), math.log(ns)
        found = self._judge(step, now) if len(self._steps) >= _MIN_STEPS else None
        self._steps.append(now)
        self._count += 1
        if found is not None:
            self.be_silent()
            if found.kind == "level":
                self._raise(math.log(found.ratio))
        if self._count >= self._learn_at:
            self._learn()
        return found

    def _raise(self, change: float) -> None:
        """Let a new level count at once, else what lasts would be found again and again."""
        old = [(work, time + change) for work, time in self._steps][:-_LAST]
        last = list(self._steps)[-_LAST:]
        self._steps.clear()
        self._steps.extend([*old, *last])
        self._learn()

    def _learn(self) -> None:
        steps = self._steps
        self._learn_at = self._count + max(_REFRESH, len(steps) // _REFRESHES)
        if self._counter:
            self._learn_slope(sorted(steps))
            values = [time - self._shape(work) for work, time in steps]
        else:
            values = [time for _, time in steps]
        self._level = median(values)
        spread = median([abs(value - self._level) for value in values])
        self._scatter = max(1.4826 * spread, _MIN_SCATTER)

    def _learn_slope(self, ordered: Sequence[tuple[float, float]]) -> None:
        count = len(ordered)
        least, most = ordered[: count // 3], ordered[-(count // 3) :]
        low, high = least[len(least) // 2][0], most[len(most) // 2][0]
        self._middle = ordered[count // 2][0]
        if high - low < _MIN_SPREAD:
            self._slope, self._low, self._high = 0.0, low, high
            return
        rise = median(time for _, time in most) - median(time for _, time in least)
        self._slope = min(max(rise / (high - low), 0.0), _MAX_SLOPE)
        # A line is reliable only near the steps that it was fitted to.
        room = (high - low) / 2
        self._low = max(ordered[count // 20][0], low - room)
        self._high = min(ordered[-1 - count // 20][0], high + room)

    def _shape(self, work: float) -> float:
        """Return by how much the usual time of this work exceeds that of the middle one."""
        inside = min(max(work, self._low), self._high)
        beyond = max(work - self._high, 0.0) * max(self._slope, 1.0)
        return self._slope * (inside - self._middle) + beyond

    def _judge(self, step: int, now: tuple[float, float]) -> Anomaly | None:
        usual = self._level + (self._shape(now[0]) if self._counter else 0.0)
        above = now[1] - usual
        spike = above > max(_SPIKE, 8 * self._scatter) and self._is_highest(above)
        if self._count < self._silent_until:
            return None
        if spike:
            return Anomaly(step, "spike", math.exp(above), math.exp(usual), self._counter)
        limit = max(_LEVEL, 2 * self._scatter)
        if above <= limit:
            return None
        recent = [self._steps[at] for at in range(1 - _LAST, 0)]
        last = [time - self._level - self._shape(work) for work, time in recent] + [above]
        if sum(each > limit for each in last) >= _OF:
            ratio = math.exp(median(last))
            return Anomaly(step, "level", ratio, math.exp(usual), self._counter)
        return None

    def _is_highest(self, value: float) -> bool:
        while self._spikes and self._spikes[0][0] < self._count - _REMEMBERED:
            self._spikes.popleft()
        highest = max((each for _, each in self._spikes), default=-math.inf)
        self._spikes.append((self._count, value))
        return value > highest + _HIGHER


@dataclass(frozen=True)
class RankSteps:
    """What a rank did last.

    Attributes:
        rank: Its number.
        role: Its role.
        lengths: The nanoseconds of its last steps.
        ends: How long after the start of the step each stage ended, by step, name and occurrence.
    """

    rank: int
    role: str
    lengths: Mapping[int, int] = field(default_factory=dict)
    ends: Mapping[int, Mapping[tuple[str, int], int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """Which ranks to capture.

    Attributes:
        ranks: Their numbers; None means all.
        why: What is known of them, for people; ``""`` if all are captured.
    """

    ranks: list[int] | None
    why: str = ""


def choose(
    header: Header,
    run: Path,
    step: int,
    *,
    alone: bool,
    clock: Callable[[], int] = perf_counter_ns,
) -> Choice:
    """Return the ranks that a capture after an unusual step is for.

    Of up to 4 ranks these are all. Of more, the ends of their files say which one arrives last.
    Reading stops after 0.2 s.

    Args:
        header: Of the rank that asks.
        run: The run directory.
        step: The unusual step.
        alone: Whether that step alone was unusual, else those before it, too.
        clock: Monotonic nanoseconds.
    """
    paths = []
    with suppress(OSError):
        paths = rank_files(run)
    if max(header.world_size, len(paths)) <= MOST_FOR_ALL:
        return Choice(None)
    until, found = clock() + _BUDGET_NS, []
    own = [path for path in paths if int(path.stem[5:]) == header.rank]
    for path in [*own, *(path for path in paths if path not in own)]:
        if clock() > until:
            break
        if (read := read_steps(path)) is not None:
            found.append(read)
    steps = {step} if alone else set(range(step - _LAST_STEPS + 1, step + 1))
    choice = pick(found, steps, header.rank)
    if len(found) < len(paths):
        return replace(choice, why=f"{choice.why}, of {len(found)} ranks that were read")
    return choice


def pick(found: Iterable[RankSteps], steps: set[int], own: int) -> Choice:
    """Return the slowest of some ranks, a healthy one of its role, and one of each other role.

    The slowest one arrives last: in these steps its stages end later than the median of its role,
    by 2% of the step or more. If none does, or the ranks can't be compared, the rank that asks
    takes its place.

    Example::

        >>> def rank(number, end):
        ...     return RankSteps(number, "actor", {1: 100}, {1: {("compute_reward", 0): end}})
        >>> pick([rank(0, 50), rank(1, 51), rank(2, 90), rank(3, 50), rank(4, 49)], {1}, own=0)
        Choice(ranks=[0, 2], why='rank 2 arrives last, by 40% of the step')
    """
    roles: dict[str, list[RankSteps]] = defaultdict(list)
    for each in found:
        roles[each.role].append(each)
    late: dict[int, float] = {}
    for ranks in roles.values():
        late |= lateness(ranks, steps)
    slowest, why = max(late, key=late.__getitem__, default=own), "no rank is known to arrive late"
    if late.get(slowest, 0.0) >= _MIN_LATE_SHARE:
        why = f"rank {slowest} arrives last, by {late[slowest]:.0%} of the step"
    else:
        slowest = own
    chosen = [slowest]
    for ranks in sorted(roles.values(), key=lambda ranks: all(r.rank != slowest for r in ranks)):
        others = [each.rank for each in ranks if each.rank != slowest]
        if others:
            chosen.append(min(others, key=lambda rank: (abs(late.get(rank, 0.0)), rank)))
    return Choice(sorted(chosen[:_MAX_RANKS]), why)


def lateness(ranks: list[RankSteps], steps: set[int]) -> dict[int, float]:
    """Return by how much of a step each rank is late, at the stage where it is most so.

    Steps of ranks that work together start together, so that no clocks are compared. It is the
    median over the steps, of ranks that ran them.
    """
    shares: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        present = [each for each in ranks if step in each.ends]
        if len(present) < 3:  # With two ranks, either may be the late one.
            continue
        length = median(each.lengths[step] for each in present)
        stages = set.intersection(*(set(each.ends[step]) for each in present))
        usual = {stage: median(each.ends[step][stage] for each in present) for stage in stages}
        for each in present if stages else ():
            most = max(each.ends[step][stage] - usual[stage] for stage in stages)
            shares[each.rank].append(most / length)
    return {rank: median(values) for rank, values in shares.items()}


def read_steps(path: Path) -> RankSteps | None:
    """Return what the end of a rank's file says of its last steps; None if it can't be read.

    Steps that were captured or interrupted are left out.
    """
    reader = RankReader(path)
    try:
        while reader.read(_TAIL_BYTES):
            pass
    except (OSError, TraceError):
        return None
    if reader.trace is None:
        return None
    rank = RankSteps(int(path.stem[5:]), reader.trace.header.role, lengths := {}, ends := {})
    stages: list[SpanLine] = []  # Stages of the next step.
    for line in reader.spans:
        if line.kind == "stage":
            stages.append(line)
        elif line.kind == "step":
            length = line.end_ns - line.start_ns
            if _LEFT_OUT.isdisjoint(line.counters or ()) and 0 < length < _MAX_STEP_NS:
                lengths[line.step], ends[line.step] = length, _ends(stages, line)
            stages = []
    return rank


def _ends(stages: list[SpanLine], step: SpanLine) -> dict[tuple[str, int], int]:
    """Return the ends of stages in a step, with a number for those that come several times."""
    found: dict[tuple[str, int], int] = {}
    count: dict[str, int] = defaultdict(int)
    for stage in stages:
        if stage.thread == step.thread and step.start_ns <= stage.end_ns <= step.end_ns:
            found[stage.name, count[stage.name]] = stage.end_ns - step.start_ns
            count[stage.name] += 1
    return found
