"""What the ledger and the findings of a large job take: ``python benchmarks/ledger.py``.

Jobs are made in memory, each in a process of its own: ranks x 1,000 steps x 20 spans, nested, with
collectives that match. Timed is each analysis alone, from `Spans` to the table; memory is the peak
of the whole process, the spans and the interpreter included.

The control is the same analysis timed twice in turns, and the process must have had most of a core.
"""

import argparse
import sys
from dataclasses import replace

from _cost import STEPS, large, reported
from _job import SPANS_PER_STEP
from _measure import options, verdict

from lightning_rlprof.analysis.diagnosis.diagnosis import findings
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.tables.spans import Spans

__all__ = ["found", "main", "timed_ledger"]


def found(spans: Spans) -> None:
    """Look for all findings, and keep no answer for the next time."""
    if findings(replace(spans)).abstained:
        raise AssertionError("findings abstain")


def timed_ledger(spans: Spans) -> None:
    """Make the ledger; the sum must be right each time."""
    ranks = len(spans.ranks)
    whole = int(spans.end_ns.max() - spans.start_ns.min()) * ranks
    if sum(int(ns or 0) for ns in ledger(spans).column("total")) != whole:
        raise AssertionError(f"{ranks} ranks: the categories do not add up to {whole} ns")


ASKED = {"ledger": (timed_ledger, (10, 2)), "findings": (found, (10, 2))}


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    steps = 20 if chosen.quick else STEPS
    costs = {name: large(one, times, quick=chosen.quick) for name, (one, times) in ASKED.items()}
    facts = [f"A step has {SPANS_PER_STEP} spans on each rank, a job {steps:,} steps."]
    return verdict(reported("ledger", costs, facts), chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
