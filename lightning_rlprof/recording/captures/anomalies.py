"""Steps that take unusually long and memory that keeps growing, found while the training runs."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, NamedTuple

from lightning_rlprof.recording.open_spans import Span
from lightning_rlprof.records.records import VALIDATIONS

_FEWEST, _WINDOW = 30, 200  # steps that the usual time is learned from
_REFRESH, _REFRESHES = 5, 8  # every 5 steps at first, 25 later: it takes 0.1 ms
_SCATTER = 0.01  # at least: a machine that repeats a step to 1% is not disturbed by 2%
_LEVEL, _OF, _LAST = math.log(1.2), 7, 8
_SPIKE, _HIGHER, _REMEMBERED = math.log(2.5), math.log(1.25), 1_500
_SILENT = 200  # steps after a find

_SPREAD = math.log(1.05)  # of work, at least, to learn from it how the time depends on it
_STEEPEST = 2.0  # attention: four times the FLOPs for twice the length

_WORK = ("tokens", "flops")
_MEMORY = {"host_rss_bytes": "host memory", "device_allocated_bytes": "device memory"}
_BLOCK, _LONG, _BLOCKS = 25, 8, 17  # steps, blocks in a long one, and how many are compared
_GROWTH = 0.05  # of the memory
_LASTING = 0.9


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


@dataclass(frozen=True)
class Growth:
    """Memory that grew steadily.

    Attributes:
        step: The step that showed it.
        memory: ``host memory`` or ``device memory``.
        before: Bytes at the first of ``steps`` steps.
        after: Bytes at the last one.
        steps: Over how many steps it was seen.
    """

    kind: ClassVar[str] = "growth"
    step: int
    memory: str
    before: int
    after: int
    steps: int

    def __str__(self) -> str:
        before, after = self.before / 2**20, self.after / 2**20
        return f"{self.memory} grew from {before:,.0f} to {after:,.0f} MiB in {self.steps:,} steps"


class StepFacts(NamedTuple):
    """What the spans of a step say of its work and memory.

    Attributes:
        validated: Whether it contained a validation.
        counter: ``tokens`` if a stage counted them, else ``flops``; ``""`` without either.
        work: The sum of that counter over its stages.
        memory: The least of each memory at the end of a stage or the step, in bytes.
    """

    validated: bool
    counter: str
    work: float
    memory: dict[str, int]


def facts_of(spans: Iterable[Span]) -> StepFacts:
    """Return what the spans of a step say: 0.1 µs each."""
    validated = False
    work: dict[str, float] = {}
    memory: dict[str, int] = {}
    for span in spans:
        if span.name in VALIDATIONS:
            validated = True
        counters = span.counters
        if not counters:
            continue
        if span.kind == "stage":
            for name in _WORK:
                if name in counters:
                    work[name] = work.get(name, 0) + _plain(counters[name])
        for name in _MEMORY:
            size = counters.get(name)
            if type(size) is int:
                memory[name] = min(memory.get(name, size), size)
    for name in _WORK:
        if 0 < work.get(name, 0) < math.inf:
            return StepFacts(validated, name, work[name], memory)
    return StepFacts(validated, "", 1.0, memory)


def _plain(value: object) -> float:
    """Return a number that is on the host; reading a tensor would wait for its device."""
    return value if type(value) in (int, float) else math.nan  # type: ignore[return-value]


class Anomalies:
    """Find steps that are slow for their work, and memory that keeps growing.

    Steps are compared with those that count the same: tokens, FLOPs, or neither.
    """

    def __init__(self) -> None:
        self._times: dict[str, StepTimes] = {}
        self._memory = {name: MemoryGrowth(text) for name, text in _MEMORY.items()}

    def add(self, step: int, ns: int, facts: StepFacts) -> Anomaly | Growth | None:
        """Return what a step shows; its time must be above 0."""
        times = self._times.get(facts.counter)
        if times is None:
            times = self._times[facts.counter] = StepTimes(facts.counter)
        found: Anomaly | Growth | None = times.add(step, ns, facts.work)
        if found is not None:
            for each in self._times.values():
                each.be_silent()
        for name, size in facts.memory.items():
            growth = self._memory[name].add(step, size)
            found = found or growth
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
    as long as the highest such step of the last 1,500: periodic checkpoints are found once. A
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
        self._steps: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # ln work, ln time
        self._spikes: deque[tuple[int, float]] = deque()
        self._count = self._silent_until = 0
        self._learn_at = _FEWEST
        self._level = self._scatter = 0.0
        self._slope = self._middle = 0.0
        self._low, self._high = -math.inf, math.inf

    def be_silent(self) -> None:
        """Find nothing in the next 200 steps."""
        self._silent_until = self._count + _SILENT

    def add(self, step: int, ns: int, work: float = 1.0) -> Anomaly | None:
        """Return what a step shows; its time and its work must be above 0."""
        now = math.log(work), math.log(ns)
        found = self._judge(step, now) if len(self._steps) >= _FEWEST else None
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
        self._scatter = max(1.4826 * spread, _SCATTER)

    def _learn_slope(self, ordered: Sequence[tuple[float, float]]) -> None:
        count = len(ordered)
        least, most = ordered[: count // 3], ordered[-(count // 3) :]
        low, high = least[len(least) // 2][0], most[len(most) // 2][0]
        self._middle = ordered[count // 2][0]
        if high - low < _SPREAD:
            self._slope, self._low, self._high = 0.0, low, high
            return
        rise = median(time for _, time in most) - median(time for _, time in least)
        self._slope = min(max(rise / (high - low), 0.0), _STEEPEST)
        # A line says nothing far from what it was drawn through, such as of a few shorter steps.
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


class MemoryGrowth:
    """Find once that a memory grows with every step: 0.2 µs per step.

    Of each 25 steps the least memory counts, so that caches which are emptied in between don't.
    17 such floors must each exceed the one before it, by 5% in all. Their second half must rise by
    0.9 of the first at least: a cache that fills rises ever less. Floors of 200 steps are compared
    the same way, for slow leaks and those under longer cycles.

    Example::

        >>> growth = MemoryGrowth("host memory")
        >>> found = [growth.add(step, 1000 * 2**20 + step * 2**20) for step in range(1, 500)]
        >>> [str(each) for each in found if each]
        ['host memory grew from 1,001 to 1,401 MiB in 400 steps']
    """

    def __init__(self, memory: str) -> None:
        self._memory = memory
        self._count, self._least = 0, math.inf
        self._floors: deque[float] = deque(maxlen=_BLOCKS)
        self._long: deque[float] = deque(maxlen=_BLOCKS)
        self._found = False

    def add(self, step: int, size: int) -> Growth | None:
        """Return what a step shows."""
        self._least = min(self._least, size)
        self._count += 1
        if self._count % _BLOCK or self._found:
            return None
        self._floors.append(self._least)
        self._least = math.inf
        found = self._judge(step, self._floors, _BLOCK)
        if self._count % (_BLOCK * _LONG) == 0:
            self._long.append(min(list(self._floors)[-_LONG:]))
            found = found or self._judge(step, self._long, _BLOCK * _LONG)
        self._found = found is not None
        return found

    def _judge(self, step: int, floors: Sequence[float], block: int) -> Growth | None:
        if len(floors) < _BLOCKS:
            return None
        first, middle, last = floors[0], floors[_BLOCKS // 2], floors[-1]
        growth, count = last - first, _BLOCKS - 1
        if growth < _GROWTH * first or last - middle < _LASTING * (middle - first):
            return None
        if any(floors[at] >= floors[at + 1] for at in range(count)):
            return None
        return Growth(step, self._memory, int(first), int(last), count * block)
