"""What the ledger of a large job takes: ``python benchmarks/ledger.py``.

Jobs are made in memory, each in a process of its own: ranks x 1,000 steps x 20 spans, nested, with
collectives that match. Timed is the analysis alone, from `Spans` to the table; memory is the peak
of the whole process, the spans and the interpreter included.

The control is the same analysis timed twice in turns, and the process must have had most of a core.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median

from _job import SPANS_PER_STEP, synthetic_job
from _measure import CORE, Bound, Report, options, quiet_enough, verdict

from lightning_rlprof.analysis.ledger import ledger

__all__ = ["Cost", "bounds", "main", "measure"]

STEPS = 1_000
LIMITS = {64: (2.0, 500), 1_024: (60.0, 2_000)}
"""Seconds and megabytes by ranks."""

TRIES = 3
BAND = (0.8, 1.25)


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


def measure(ranks: int, steps: int, repeats: int) -> Cost:
    """Run the analysis some times in this process; the sum must be right each time."""
    spans = synthetic_job(ranks, steps)
    whole = int(spans.end_ns.max() - spans.start_ns.min()) * ranks
    ledger(synthetic_job(1, 10))  # imports and first calls
    seconds, wall, cpu = [], time.perf_counter(), time.process_time()
    for _ in range(repeats):
        start = time.perf_counter()
        table = ledger(spans)
        seconds.append(time.perf_counter() - start)
        if sum(int(ns or 0) for ns in table.column("total")) != whole:
            raise AssertionError(f"{ranks} ranks: the labels do not add up to {whole} ns")
    core = (time.process_time() - cpu) / (time.perf_counter() - wall)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    megabytes = peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
    return Cost(ranks, len(spans), seconds, megabytes, core)


def bounds(costs: list[Cost]) -> list[Bound]:
    """Return what each job may take."""
    found = []
    for cost in costs:
        seconds, megabytes = LIMITS[cost.ranks]
        found.append(Bound(f"{cost.ranks:,} ranks", median(cost.seconds), seconds, "s"))
        found.append(Bound(f"{cost.ranks:,} ranks", cost.megabytes, megabytes, "MB"))
    return found


def _alone(ranks: int, steps: int, repeats: int) -> Cost:
    """Measure in a fresh process, whose peak of memory is this job's."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(measure, ranks, steps, repeats).result()


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    steps, tries = (20, 1) if chosen.quick else (STEPS, TRIES)
    costs = []
    for ranks, repeats in ((64, 10), (1_024, 2)):
        once = partial(_alone, ranks, steps, repeats)
        costs.append(quiet_enough(once, lambda cost: cost.quiet, tries))
    rows = [[f"{c.ranks:,}", c.spans, median(c.seconds), round(c.megabytes)] for c in costs]
    control = "; ".join(
        f"{cost.ranks:,} ranks: again by first {cost.again:.2f} (band {BAND[0]} to {BAND[1]}), "
        f"{cost.core:.0%} of a core (at least {CORE:.0%})"
        for cost in costs
    )
    facts = [f"A step has {SPANS_PER_STEP} spans on each rank, a job {steps:,} steps."]
    quiet = all(cost.quiet for cost in costs)
    headings = ["ranks", "spans", "seconds", "peak, MB"]
    return verdict(Report("ledger", headings, rows, bounds(costs), control, quiet, facts), chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
