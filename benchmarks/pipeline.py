"""The verdicts on a whole step, how fast and how right: ``python benchmarks/pipeline.py``.

Timed are `critical_path`, `whatif` and `compare` (of a job with itself) on the jobs of
`benchmarks/ledger.py`, each in a process of its own. Then scripted runs of known seeds,
not used while anything was tuned, are replayed: unchanged, with one piece longer or shorter,
and without their straggler.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from _cost import STEPS, large, reported
from _measure import Bound, options, verdict

from lightning_rlprof.analysis.comparison.compare import compare
from lightning_rlprof.analysis.critical_path.critical_path import critical_path
from lightning_rlprof.analysis.critical_path.replay import WORK, longest_path, replay
from lightning_rlprof.analysis.critical_path.step_graph import StepGraph, step_graph
from lightning_rlprof.analysis.whatif.whatif import whatif
from lightning_rlprof.tables.spans import Spans

sys.path.insert(0, str(Path(__file__).parents[1]))
scripted: Any = importlib.import_module("tests.builders.scripted")

__all__ = ["Right", "bounds", "main", "moved", "right", "with_itself"]

FIRST_SEED, SEEDS, PIECES = 3_000_000, 40, 50
MOST_OFF, MOST_ERROR = 1.0, 10.0  # per cent
BYTES = 9 * 8  # of a span: what the columns of a job take


class Right(NamedTuple):
    """What came out, in per cent: the worst and the median run, and the share of pieces.

    ``off``: how far the median step is off when it is replayed unchanged. ``moved``: pieces of
    which a change moved the step by just as much as it should. ``error``: of "no straggler".
    """

    off: float
    moved: float
    error: float


def with_itself(spans: Spans) -> object:
    """Compare a job with itself."""
    return compare(spans, spans)


VERDICTS: Mapping[str, tuple[Callable[[Spans], object], tuple[int, int]]] = {
    "critical_path": (critical_path, (10, 4)),
    "whatif": (whatif, (10, 4)),
    "compare": (with_itself, (6, 2)),
}


def _graph(spans: Spans) -> StepGraph:
    found = step_graph(spans)
    if isinstance(found, str):
        raise AssertionError(f"a scripted run abstains: {found}")
    return found


def _median(graph: StepGraph) -> float:
    return float(np.median(graph.wall_ns))


def moved(graph: StepGraph, seed: int, pieces: int) -> float:
    """Return of how many pieces, in per cent, a change moves the step as it should.

    On the path: longer by d, and then shorter by d, the step is longer and shorter by d. Beside it:
    longer by its slack and shorter by its all, the step is as it was.
    """
    measured = (graph.transfer_ns, graph.offset_ns)
    laps, found = (
        replay(graph.schedule, graph.ns, *measured),
        longest_path(graph.schedule, graph.ns, *measured),
    )
    own = np.flatnonzero((graph.schedule.sync_point == WORK) & (graph.ns > 0))
    random, fine = np.random.default_rng(seed), 0
    for piece in random.choice(own, pieces).tolist():
        on, d = bool(found.on[piece]), int(random.integers(1, 10**7))
        longer = graph.ns.copy()
        longer[piece] += d if on else found.slack[piece]
        shorter = longer.copy()
        shorter[piece] -= d if on else int(longer[piece])
        after = [
            replay(graph.schedule, each, *measured).interval_ns - laps.interval_ns
            for each in (longer, shorter)
        ]
        fine += [int(each.sum()) for each in after] == [d if on else 0, 0]
    return 100 * fine / pieces


def right(seeds: range) -> Right:
    """Play scripted runs again."""
    off, same, errors = [], [], []
    for seed in seeds:
        slow, even = (
            scripted.play(scripted.Script(listed=True, uneven=0.2, slow=who), seed).spans
            for who in ({seed % 8: 0.2}, {})
        )
        graph = _graph(slow)
        played = replay(graph.schedule, graph.ns, graph.transfer_ns, graph.offset_ns).interval_ns
        off.append(100 * abs(float(np.median(played)) / _median(graph) - 1))
        same.append(moved(graph, seed, PIECES))
        guess = {row[0]: row for row in whatif(slow).rows}["no straggler"][2]
        errors.append(100 * abs(float(guess or 0) / _median(_graph(even)) - 1))
    return Right(max(off), min(same), median(errors))


def bounds(found: Right) -> list[Bound]:
    """Return what we promise of being right."""
    return [
        Bound("unchanged, the worst run", found.off, MOST_OFF, "% off"),
        Bound("pieces that moved a step as they should", found.moved, 100.0, "%", at_least=True),
        Bound("without its straggler, the median run", found.error, MOST_ERROR, "% off"),
    ]


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    seeds = range(FIRST_SEED, FIRST_SEED + (2 if chosen.quick else SEEDS))
    found = right(seeds)
    costs = {name: large(one, times, quick=chosen.quick) for name, (one, times) in VERDICTS.items()}
    steps = 20 if chosen.quick else STEPS
    largest = max(cost.spans for each in costs.values() for cost in each)
    facts = [
        f"A job has {steps:,} steps x 20 spans on each rank, made in memory: no file is read.",
        f"Of the peak of the largest one {largest * BYTES / 1e6:,.0f} MB are its columns.",
        f"Accuracy: {len(seeds)} seeds from {FIRST_SEED:,}, {PIECES} pieces each.",
    ]
    return verdict(reported("pipeline", costs, facts, bounds(found)), chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
