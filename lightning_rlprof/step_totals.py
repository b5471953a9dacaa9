"""What one step spent on its stages, on one thread."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_rlprof.model import Number, as_number
from lightning_rlprof.nodes import Line

__all__ = ["Spent", "StepTotals", "Tally"]

_MOST = 1 << 16  # intervals of a stage that are kept apart
_LARGEST = 1e300  # beyond it, and where it is no number, a counter is not known


class Spent(NamedTuple):
    """What a step spent on one stage.

    Attributes:
        ns: Nanoseconds in which at least one span of the stage was open.
        counters: Sum of each counter.
        counted_ns: The same time of only those spans that carry that counter.
    """

    ns: int
    counters: dict[str, Number]
    counted_ns: dict[str, int]


class StepTotals(NamedTuple):
    """What is known of a step that ended.

    Attributes:
        ns: How long it took, in nanoseconds; 0 where no step has ended.
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

    def add(self, lines: Sequence[Line]) -> None:
        """Add spans in the order in which they ended; those before the step are left out."""
        began = max((line[4] for line in lines if line[2] == "step"), default=0)
        for _, name, kind, _, start, end, thread, _, _, counters in lines:
            if thread == self._thread and kind == "step":
                self._step, self._captured = (start, end), "capture" in (counters or {})
            elif thread == self._thread and kind == "stage" and end > began:
                self._add(name, start, end, counters or {})

    def totals(self) -> StepTotals:
        """Return what the step spent on each stage; what lies before or after it is cut off."""
        if self._step is None:
            return StepTotals(0, False, {})
        low, high = self._step
        stages = {}
        for (stage, counter), union in self._times.items():
            if not counter:
                stages[stage] = Spent(union.within(low, high), {}, {})
        for (stage, counter), value in self._sums.items():
            stages[stage].counters[counter] = value
            stages[stage].counted_ns[counter] = self._times[stage, counter].within(low, high)
        return StepTotals(high - low, self._captured, stages)

    def _add(self, stage: str, start: int, end: int, counters: dict[str, Any]) -> None:
        self._times.setdefault((stage, ""), _Union()).add(start, end)
        for counter, told in counters.items():
            value = as_number(told)
            if value is not None and abs(value) < _LARGEST:
                key = stage, counter
                self._times.setdefault(key, _Union()).add(start, end)
                self._sums[key] = self._sums.get(key, 0) + value


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
