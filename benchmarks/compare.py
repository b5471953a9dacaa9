"""Who tells a change from changed work, we or the usual: ``python benchmarks/compare.py``.

Seeded pairs of runs of 60 steps are played, with a known regression or none, while answers grow or
shrink; each formula is asked whether a stage got slower. The seeds were not used while our
thresholds were chosen. Timed is `compare` on large jobs.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _cost import bounds as limits
from _cost import control, large
from _measure import Bound, Report, options, verdict

from lightning_rlprof.analysis.comparison.compare import compare
from lightning_rlprof.tables.spans import Spans

sys.path.insert(0, str(Path(__file__).parents[1]))
pairs: Any = importlib.import_module("tests.builders.pairs")
peers: Any = importlib.import_module("tests.peers.diffs")

__all__ = ["CASES", "OURS", "Case", "bounds", "main", "played"]

OURS = "lightning_rlprof"
FIRST_SEED, PAIRS = 2_000_000, 400
MOST_FALSE, LEAST_FOUND = 1.0, 95.0  # per cent
STAGE, BY = "actor_update", 0.05


@dataclass(frozen=True)
class Case:
    """What B differs in: the length of its answers, and how much slower one stage is."""

    length: float = 1.0
    slower: float = 0.0


CASES: Mapping[str, Case] = {
    "A/A": Case(),
    "A/A, answers 30 % longer": Case(1.3),
    "A/A, answers 30 % shorter": Case(0.7),
    "5 % slower": Case(1.0, BY),
    "5 % slower, answers 30 % longer": Case(1.3, BY),
    "5 % slower, answers 30 % shorter": Case(0.7, BY),
}


def _ours(table: Any) -> tuple[str, bool]:
    """Return our verdict on the stage, and whether any other one is said to have changed."""
    told = dict(zip(table.column("stage"), table.column("verdict"), strict=True))
    own = told.pop(STAGE)
    del told["step"]  # the stage is part of it
    return own, bool({"faster", "slower"} & set(told.values()))


def played(case: Case, seeds: range) -> dict[str, tuple[float, float]]:
    """Return by formula how many per cent found the stage slower, and accused anything falsely."""
    found = dict.fromkeys([OURS, *peers.DIFFS], 0)
    false = dict.fromkeys(found, 0)
    for seed in seeds:
        half = pairs.Half(length=case.length, slower={STAGE: case.slower})
        a, b = pairs.scripted(pairs.Half(), 2 * seed), pairs.scripted(half, 2 * seed + 1)
        own, others = _ours(compare(a, b))
        told = {OURS: own} | {name: ask(a, b, STAGE) for name, ask in peers.DIFFS.items()}
        for name, what in told.items():
            wrong = what == "faster" or (what == "slower" and not case.slower)
            found[name] += what == "slower"
            false[name] += wrong or (name == OURS and others)
    share = 100 / len(seeds)
    return {name: (share * found[name], share * false[name]) for name in found}


def bounds(found: Mapping[str, Mapping[str, tuple[float, float]]]) -> list[Bound]:
    """Return what we promise: no change that is none, and none that is passed over."""
    promised = []
    for case, by in found.items():
        slower, false = by[OURS]
        promised.append(Bound(f"{case}: false alarms, all stages", false, MOST_FALSE, "%"))
        if CASES[case].slower:
            promised.append(Bound(f"{case}: found", slower, LEAST_FOUND, "%", at_least=True))
    return promised


def _cell(shares: tuple[float, float]) -> str:
    return f"{shares[0]:.0f} ({shares[1]:.1f})"


def _with_itself(spans: Spans) -> object:
    return compare(spans, spans)


def main(chosen: argparse.Namespace) -> int:
    """Ask all, print, and return the exit status."""
    seeds = range(FIRST_SEED, FIRST_SEED + (5 if chosen.quick else PAIRS))
    found = {name: played(case, seeds) for name, case in CASES.items()}
    costs = large(_with_itself, (6, 2), quick=chosen.quick)
    formulas = [OURS, *peers.DIFFS]
    rows = [
        [case, *(f"{by[f][0]:.0f} ({by[f][1]:.1f})" for f in formulas)]
        for case, by in found.items()
    ]
    times = ", ".join(
        f"{cost.ranks:,} ranks in {median(cost.seconds):.2f} s and {cost.megabytes:.0f} MB"
        for cost in costs
    )
    facts = [
        f"Of {len(seeds)} pairs each, from seed {FIRST_SEED:,}: per cent in which {STAGE} was "
        "called slower, and in brackets false alarms; ours of all stages, others' of this one.",
        "Runs have 60 steps, 2 % noise, and lengths that differ by 15 % from step to step.",
        f"A job of 1,000 steps x 20 spans compared with itself: {times}.",
    ]
    promised, quiet = [*bounds(found), *limits(costs)], all(cost.quiet for cost in costs)
    report = Report("compare", ["case", *formulas], rows, promised, control(costs), quiet, facts)
    return verdict(report, chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
