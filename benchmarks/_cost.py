"""What an analysis of a large synthetic job costs: seconds and the peak of a process of its own."""

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from _job import synthetic_job
from _measure import CORE, Bound, Report, quiet_enough

from lightning_rlprof.tables.spans import Spans

__all__ = [
    "BAND",
    "LIMITS",
    "STEPS",
    "Cost",
    "alone",
    "bounds",
    "control",
    "large",
    "measure",
    "reported",
]

LIMITS = {64: (2.0, 500), 1_024: (60.0, 2_000)}
"""Seconds and megabytes by ranks, of a job of 1,000 steps."""

STEPS, TRIES = 1_000, 3
BAND = (0.8, 1.25)
"""Of every second run as a multiple of the others: beyond it the machine was too noisy."""


@dataclass
class Cost:
    """What one job took.

    Attributes:
        ranks: Ranks of the job.
        spans: Spans of the job.
        seconds: Each run of the analysis.
        megabytes: Peak of the process.
        core: CPU time of the process by wall time.
    """

    ranks: int
    spans: int
    seconds: list[float]
    megabytes: float
    core: float

    @property
    def again(self) -> float:
        """Every second run as a multiple of the others."""
        return median(self.seconds[1::2]) / median(self.seconds[::2])

    @property
    def quiet(self) -> bool:
        """Whether both controls are inside of their bands."""
        return BAND[0] <= self.again <= BAND[1] and self.core >= CORE


def measure(analysis: Callable[[Spans], Any], ranks: int, steps: int, repeats: int) -> Cost:
    """Run an analysis some times in this process."""
    spans = synthetic_job(ranks, steps)
    analysis(synthetic_job(1, 10))  # imports and first calls
    seconds, wall, cpu = [], time.perf_counter(), time.process_time()
    for _ in range(repeats):
        start = time.perf_counter()
        analysis(spans)
        seconds.append(time.perf_counter() - start)
    core = (time.process_time() - cpu) / (time.perf_counter() - wall)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    megabytes = peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
    return Cost(ranks, len(spans), seconds, megabytes, core)


def alone(analysis: Callable[[Spans], Any], ranks: int, steps: int, repeats: int) -> Cost:
    """Measure in a fresh process, whose peak of memory is this job's."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(measure, analysis, ranks, steps, repeats).result()


def large(analysis: Callable[[Spans], Any], repeats: tuple[int, int], *, quick: bool) -> list[Cost]:
    """Measure on the jobs of `LIMITS`, again where the machine was too noisy."""
    found = []
    for ranks, times in zip(LIMITS, repeats, strict=True):
        once = partial(alone, analysis, ranks, 20 if quick else STEPS, times)
        found.append(quiet_enough(once, lambda cost: cost.quiet, 1 if quick else TRIES))
    return found


def bounds(costs: list[Cost]) -> list[Bound]:
    """Return what each job may take."""
    found = []
    for cost in costs:
        seconds, megabytes = LIMITS[cost.ranks]
        found.append(Bound(f"{cost.ranks:,} ranks", median(cost.seconds), seconds, "s"))
        found.append(Bound(f"{cost.ranks:,} ranks", cost.megabytes, megabytes, "MB"))
    return found


def reported(
    name: str, costs: Mapping[str, list[Cost]], facts: list[str], more: Sequence[Bound] = ()
) -> Report:
    """Return what a benchmark found of several analyses, with more bounds behind theirs."""
    promised = [
        Bound(f"{one}, {bound.text}", bound.value, bound.limit, bound.unit)
        for one, each in costs.items()
        for bound in bounds(each)
    ]
    rows = [
        [f"{one}, {cost.ranks:,} ranks", cost.spans, median(cost.seconds), round(cost.megabytes)]
        for one, each in costs.items()
        for cost in each
    ]
    told = "; ".join(f"{one}: {control(each)}" for one, each in costs.items())
    quiet = all(cost.quiet for each in costs.values() for cost in each)
    heads = ["analysis", "spans", "seconds", "peak, MB"]
    return Report(name, heads, rows, [*promised, *more], told, quiet, facts)


def control(costs: list[Cost]) -> str:
    """Return what the A/A control gave, in words."""
    return "; ".join(
        f"{cost.ranks:,} ranks: again by first {cost.again:.2f} (band {BAND[0]} to {BAND[1]}), "
        f"{cost.core:.0%} of a core (at least {CORE:.0%})"
        for cost in costs
    )
