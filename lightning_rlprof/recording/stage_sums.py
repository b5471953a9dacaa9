"""What steps spent on their stages, added up as metrics for any logger."""

from lightning_rlprof.recording.span_buffer import StepTotals
from lightning_rlprof.records.records import Number

RATE = "_tokens_per_s"
"""End of the names of metrics that are sums over ranks."""

_COUNTERS = ("tokens", "samples", "flops")


class StageSums:
    """What some steps spent, together.

    Attributes:
        steps: How many they are.
        stages: Nanoseconds of each stage.
        counts: By stage and counter, its sum, and the nanoseconds of the spans that counted.
        spans: By stage and counter, how many spans counted.
    """

    def __init__(self) -> None:
        self.steps = self._ns = 0
        self._memory_gb: float | None = None
        self.stages: dict[str, int] = {}
        self.counts: dict[tuple[str, str], tuple[Number, int]] = {}
        self.spans: dict[tuple[str, str], int] = {}

    def reach(self, memory_gb: float | None) -> None:
        """Add an amount of memory, of which the highest counts."""
        if memory_gb is not None:
            self._memory_gb = max(memory_gb, self._memory_gb or 0.0)

    def add(self, step: StepTotals) -> None:
        """Add a step."""
        self.steps += 1
        self._ns += step.ns
        for name, spent in step.stages.items():
            self.stages[name] = self.stages.get(name, 0) + spent.ns
            for counter in _COUNTERS:
                if counter in spent.counted_ns:
                    total, ns = self.counts.get((name, counter), (0, 0))
                    total += spent.counters[counter]
                    self.counts[name, counter] = total, ns + spent.counted_ns[counter]
                    number = self.spans.get((name, counter), 0)
                    self.spans[name, counter] = number + spent.spans[counter]

    def metrics(self) -> dict[str, float]:
        """Return means per step in seconds, shares, tokens per second, and memory."""
        found = {}
        for stage, ns in self.stages.items():
            found[f"rlprof/{stage}_s"] = ns / self.steps / 1e9
            found[f"rlprof/{stage}_share"] = ns / self._ns
            tokens, counted_ns = self.counts.get((stage, "tokens"), (0, 0))
            if counted_ns:
                found[f"rlprof/{stage}{RATE}"] = tokens / (counted_ns / 1e9)
        if self.steps:  # after them, as a stage may be called "step"
            found["rlprof/step_s"] = self._ns / self.steps / 1e9
        if self._memory_gb is not None:
            found["rlprof/peak_memory_gb"] = self._memory_gb
        return found
