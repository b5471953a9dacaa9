"""How often verdicts are right: ``python benchmarks/verdicts.py``.

First, of slow ranks: ours beside the peers' formulas. Seeded windows of 8 ranks are played with a
known culprit or none, and each formula is asked who it is. Timed are our verdicts on large jobs, as
`benchmarks/ledger.py` times the ledger. Then the operating curves of all verdicts, under the law
that they fit (`_curves`) and under that of real engines (`_engine`).
No seed was used while thresholds were chosen.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from _cost import bounds as limits
from _cost import control, large
from _curves import CURVES, CURVES_OF_ENGINES, Point, measured
from _curves import bounds as promises
from _engine import ENGINE_CURVES
from _measure import Bound, Report, options, verdict

from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
peers: Any = importlib.import_module("tests.peers.harness")  # the tests play the same windows

__all__ = ["bounds", "main", "peers", "without_cached_answers"]

FIRST_SEED, WINDOWS = 1_000_000, 200
MOST_FALSE, LEAST_FOUND = 1.0, 95.0  # per cent


def bounds(found: Mapping[str, Mapping[str, Any]], short: Any) -> list[Bound]:
    """Return what we promise: no healthy rank is accused, and no slow rank is missed."""
    promised = []
    for case, by_formula in found.items():
        own = by_formula[peers.OURS]
        false = 100 * own.false / own.windows
        promised.append(Bound(f"{case}: accused a healthy rank", false, MOST_FALSE, "%"))
        if peers.CASES[case].slow:
            share = 100 * own.found / own.windows
            promised.append(Bound(f"{case}: found", share, LEAST_FOUND, "%", at_least=True))
    accused = 100 * (short.found + short.false) / short.windows
    return [*promised, Bound("8 ranks x 8 steps: accused any rank", accused, 0.0, "%")]


def without_cached_answers(spans: Spans) -> Table:
    """Return our verdicts on a fresh copy of the run, as answers are cached."""
    return stragglers(replace(spans))


def _cell(score: Any) -> str:
    right, false = (round(100 * count / score.windows) for count in (score.right, score.false))
    return f"{right} ({false})"


def main(chosen: argparse.Namespace) -> int:
    """Ask all, print, and return the exit status."""
    seeds = range(FIRST_SEED, FIRST_SEED + (5 if chosen.quick else WINDOWS))
    found = {case: peers.scores(script, seeds) for case, script in peers.CASES.items()}
    short = peers.scores(peers.TOO_SHORT, seeds)[peers.OURS]
    costs = large(without_cached_answers, (6, 2), quick=chosen.quick)
    formulas = [peers.OURS, *peers.FORMULAS]
    rows = [[case, *(_cell(by[name]) for name in formulas)] for case, by in found.items()]
    times = ", ".join(
        f"{cost.ranks:,} ranks in {median(cost.seconds):.2f} s and {cost.megabytes:.0f} MB"
        for cost in costs
    )
    facts = [
        f"Of {len(seeds)} windows each, from seed {FIRST_SEED:,}: per cent in which exactly the "
        "slow ranks were accused, and in brackets those in which a healthy one was.",
        "Windows have 8 ranks, 24 steps (16 in the third row) and 2 % noise; the formulas are "
        "rewritten from what their tools publish, see tests/peers.",
        f"Ours on jobs of 1,000 steps x 20 spans: {times}.",
    ]
    promised, quiet = [*bounds(found, short), *limits(costs)], all(cost.quiet for cost in costs)
    heads = ["case", *formulas]
    report = Report("verdicts", heads, rows, promised, control(costs), quiet, facts)
    engines = [*CURVES_OF_ENGINES, *ENGINE_CURVES]
    curves = [
        _curves(chosen, "operating curves", CURVES),
        _curves(chosen, "operating curves under the law of engines", engines),
    ]
    return max(verdict(report, chosen), *curves)


def _curves(chosen: argparse.Namespace, name: str, curves: Sequence[Point]) -> int:
    """Measure operating curves, print them, and return the exit status."""
    runs = 2 if chosen.quick else WINDOWS
    found = [measured(point, runs) for point in curves]
    rows = [
        [
            point.verdict,
            point.case,
            str(point.steps),
            f"{value:.1f}",
            f"{'≥' if point.at_least else '≤'} {point.limit:g}",
        ]
        for point, value in zip(curves, found, strict=True)
    ]
    facts = [f"Per cent of {runs} seeded runs each, or pairs of runs."]
    heads = ["verdict", "runs", "steps", "%", "promised"]
    report = Report(name, heads, rows, promises(curves, found), "seeded", True, facts)
    without_file = argparse.Namespace(**vars(chosen) | {"json": None})
    return verdict(report, without_file)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
