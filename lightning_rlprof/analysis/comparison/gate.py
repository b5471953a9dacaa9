"""The gate of CI: whether a step is at most a share slower at equal work."""

import math
from typing import NamedTuple

from lightning_rlprof.analysis.comparison.compare import (
    INCONCLUSIVE,
    Judged,
    Judgement,
    ratios,
    smallest_change,
    steps_needed,
)
from lightning_rlprof.analysis.comparison.equal_work import Change
from lightning_rlprof.analysis.comparison.run_pair import HARDLY, STEP, UNTRACED

FAIL, PASS = "FAIL", "PASS"


class Gate(NamedTuple):
    """Result of the gate: ``PASS``, ``FAIL`` or ``INCONCLUSIVE``, why, and the slower stages."""

    result: str
    text: str
    slower: list[str]


_FAIL_CHANCE, _PASS_CHANCE = 0.0025, 0.05  # one-sided: for the step and all stages each; to pass


def gate(judged: Judgement, limit: float, noise: float = 0.0, score: float = 1.0) -> Gate:
    """Decide whether the step is at most a share slower at equal work.

    It fails if the step is slower than the limit with 99.75%, or a stage with as much over all
    stages. It passes if the step is not slower than the limit with 95% (non-inferiority).

    Args:
        judged: What is known.
        limit: Share, such as 0.03.
        noise: Spread between runs of one code, such as 0.01, for one run a side.
        score: Of `comparability`; runs that hardly compare never pass.
    """
    if judged.abstained is not None:
        return Gate(INCONCLUSIVE.upper(), judged.abstained, [])
    margin = math.log1p(limit)
    changes = {row.name: row.change for row in judged.rows if row.change is not None}
    for run in (*judged.baseline, *judged.candidate):
        for name in (UNTRACED, *run.waiting):
            changes.pop(name, None)
    if noise:
        spread = math.sqrt(2) * noise
        changes = {name: Change(each.known.widened(spread)) for name, each in changes.items()}
    stages = max(len(changes) - 1, 1)
    slower = [
        name
        for name, change in changes.items()
        if change.exceeds(margin, _FAIL_CHANCE / (1 if name == STEP else stages))
    ]
    if slower:
        texts = [f"{name} {_percent_change(judged.by_name[name])}" for name in slower]
        return Gate(FAIL, f"{', '.join(texts)}; the limit is {100 * limit:g}%", slower)
    if score < HARDLY:
        return Gate(INCONCLUSIVE.upper(), f"comparability score {score:.2f} is below {HARDLY}", [])
    return _passes(judged, changes.get(STEP), margin, limit)


def _passes(judged: Judgement, step: Change | None, margin: float, limit: float) -> Gate:
    undecided = INCONCLUSIVE.upper()
    if step is None:
        return Gate(undecided, "the step has too little data", [])
    if step.stays_below(margin, _PASS_CHANCE):
        text = f"step is at most {100 * limit:g}% slower at equal work"
        return Gate(PASS, f"{text}; no stage is significantly slower than that", [])
    least = math.expm1(margin + smallest_change(step, _FAIL_CHANCE))
    text = f"these runs would show a slowdown of {least:.1%} or more"
    if len(judged.baseline) == len(judged.candidate) == 1:
        steps = min(judged.baseline[0].steps, judged.candidate[0].steps)
        needed = steps_needed(step, steps, (margin, _PASS_CHANCE), (margin, _FAIL_CHANCE))
        text += (
            "; more steps do not help"
            if needed is None
            else f"; about {needed} steps a run would decide"
        )
    else:
        text += "; record more runs"
    return Gate(undecided, text, [])


def _percent_change(row: Judged) -> str:
    """Return a change with its interval: ``+12.0% (99% CI 8.0% to 15.1%)``."""
    low, high = ratios(row.change, row.chance)
    value, least, most = (float(each or 1) - 1 for each in (row.adjusted, low, high))
    return f"{value:+.1%} (99% CI {least:.1%} to {most:.1%})"
