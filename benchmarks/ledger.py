"""What the ledger of a large job takes: ``python benchmarks/ledger.py``.

Jobs are made in memory, each in a process of its own: ranks x 1,000 steps x 20 spans, nested, with
collectives that match. Timed is the analysis alone, from `Spans` to the table; memory is the peak
of the whole process, the spans and the interpreter included.

The control is the same analysis timed twice in turns, and the process must have had most of a core.
"""

import argparse
import sys
from statistics import median

from _cost import STEPS, bounds, control, large
from _job import SPANS_PER_STEP
from _measure import Report, options, verdict

from lightning_rlprof.analysis.ledger import ledger
from lightning_rlprof.spans import Spans

__all__ = ["balanced", "main"]


def balanced(spans: Spans) -> None:
    """Make the ledger; the sum must be right each time."""
    ranks = len(spans.ranks)
    whole = int(spans.end_ns.max() - spans.start_ns.min()) * ranks
    if sum(int(ns or 0) for ns in ledger(spans).column("total")) != whole:
        raise AssertionError(f"{ranks} ranks: the labels do not add up to {whole} ns")


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    steps = 20 if chosen.quick else STEPS
    costs = large(balanced, (10, 2), quick=chosen.quick)
    rows = [[f"{c.ranks:,}", c.spans, median(c.seconds), round(c.megabytes)] for c in costs]
    facts = [f"A step has {SPANS_PER_STEP} spans on each rank, a job {steps:,} steps."]
    quiet = all(cost.quiet for cost in costs)
    headings = ["ranks", "spans", "seconds", "peak, MB"]
    report = Report("ledger", headings, rows, bounds(costs), control(costs), quiet, facts)
    return verdict(report, chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
