"""How often each verdict is right, by how the pace of a machine behaves: its operating curves.

The runs are those of `tests.builders.paced`, on seeds that no threshold was chosen on.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _measure import Bound

from lightning_rlprof.analysis.comparison.changes import LEVEL, changes
from lightning_rlprof.analysis.comparison.compare import FAIL, PASS, Judgement, gate, judge, verdict
from lightning_rlprof.analysis.stragglers.stragglers import stragglers

sys.path.insert(0, str(Path(__file__).parents[1]))
paced: Any = importlib.import_module("tests.builders.paced")
pairs: Any = importlib.import_module("tests.builders.pairs")

__all__ = ["CURVES", "Point", "bounds", "measured"]

_SEED = 90_000_000
_CHANGED = ("faster", "slower", "minor")
_STAGE = "actor_update"
_MEETS = ("actor_generate", "actor_update")  # so that no stage holds the waiting for another one


class Point(NamedTuple):
    """One promise: how often, in per cent, a verdict is given in a kind of runs.

    Attributes:
        verdict: Which verdict.
        case: In which runs.
        steps: Steps of each run.
        ask: Takes a seed, and returns whether the verdict was given.
        limit: Per cent.
        at_least: Whether it must be given that often, or at most.
    """

    verdict: str
    case: str
    steps: int
    ask: Callable[[int], bool]
    limit: float
    at_least: bool = True


def _pair(
    seed: int, regime: str, steps: int, slower: Mapping[str, float] | None = None
) -> Judgement:
    kind = paced.REGIMES[regime]
    after = replace(kind, length=1.3) if "x1.3" in regime else kind
    before = paced.Job(steps=steps, regime=kind, meets=_MEETS)
    changed = replace(before, regime=after, slower=slower or {})
    return judge([paced.play(before, 2 * seed)], [paced.play(changed, 2 * seed + 1)])


def _alarm(regime: str, steps: int) -> Callable[[int], bool]:
    def ask(seed: int) -> bool:
        rows = _pair(seed, regime, steps).rows
        return any(verdict(row) in ("faster", "slower") for row in rows)

    return ask


def _found(regime: str, steps: int, stage: str, factor: float) -> Callable[[int], bool]:
    def ask(seed: int) -> bool:
        row = _pair(seed, regime, steps, {stage: factor}).by_name["step" if stage == "*" else stage]
        return verdict(row) in ("slower", "minor") if stage == "*" else verdict(row) in _CHANGED

    return ask


def _gate(regime: str, steps: int, factor: float, result: str) -> Callable[[int], bool]:
    def ask(seed: int) -> bool:
        found = _pair(seed, regime, steps, {"*": factor})
        return bool(gate(found, 0.03).result == result)

    return ask


def _repeats(seed: int) -> bool:
    """Three runs a side whose levels differ by 1% from run to run."""
    levels = np.exp(np.random.default_rng(seed).normal(0, 0.01, 6))
    kind = paced.REGIMES["iid 2%"]
    runs = [
        paced.play(paced.Job(regime=kind, slower={"*": level}), 6 * seed + at)
        for at, level in enumerate(levels.tolist())
    ]
    return bool(gate(judge(runs[:3], runs[3:]), 0.03).result == PASS)


def _apart(shape: str) -> Callable[[int], bool]:
    """89 against 19 ms, in runs with a burst, a ramp or a slow wander."""

    def ask(seed: int) -> bool:
        random = np.random.default_rng(seed)
        pace = random.normal(0, 0.08, (2, 24))
        if shape == "burst":
            pace[0, 4:18] += np.log(2)
        elif shape == "ramp":
            pace += np.linspace(0.4, 0, 24)
        else:
            pace += paced.autoregression(random, (2, 24), 0.15, 0.97)
        times = np.array([[89e6], [19e6]]) * np.exp(pace)
        found = judge(*([pairs.run_of({"a": each})] for each in times))
        return verdict(found.by_name["a"]) == "faster"

    return ask


def _verdicts(job: Any, seed: int) -> set[tuple[object, object]]:
    table = stragglers(paced.play(job, seed))
    if table.abstained is not None:
        return set()
    return set(zip(table.column("rank"), table.column("verdict"), strict=True))


def _accused(job: Any) -> Callable[[int], bool]:
    calm = ("inconclusive", "no straggler", "load imbalance")
    return lambda seed: any(word not in calm for _, word in _verdicts(job, seed))


def _named(job: Any, rank: int, word: str) -> Callable[[int], bool]:
    return lambda seed: (rank, word) in _verdicts(job, seed)


def _cleared(job: Any) -> Callable[[int], bool]:
    return lambda seed: (None, "no straggler") in _verdicts(job, seed)


def _changed(job: Any) -> Callable[[int], bool]:
    return lambda seed: bool(changes(paced.play(job, seed)).rows)


def _level(job: Any) -> Callable[[int], bool]:
    def ask(seed: int) -> bool:
        table = changes(paced.play(job, seed))
        near = [
            abs(int(str(step)) - 1 - job.since) <= 3
            for change, step in zip(table.column("change"), table.column("step"), strict=True)
            if change == LEVEL
        ]
        return any(near)

    return ask


def _compare() -> list[Point]:
    usual = ("iid 2%", "iid 5%", "t2 4%", "GC 10% x 200 ms", "lengths x1.3")
    wander = ("per-rank AR(.9) 3%", "common AR(.9) 3%", "common AR(.95) 5%", "thermal 8%")
    points = [
        Point("compare: false alarm, any row", regime, 60, _alarm(regime, 60), limit, False)
        for regime in (*usual, *wander)
        for limit in (4.0 if ".95" in regime else 1.0,)
    ]
    points += [
        Point("compare: step +5% found", regime, 60, _found(regime, 60, "*", 1.05), limit)
        for regime, limit in (("iid 2%", 95.0), ("iid 5%", 90.0), ("GC 10% x 200 ms", 85.0))
    ]
    points += [
        Point("compare: one stage +5% found", each, 60, _found(each, 60, _STAGE, 1.05), 95.0)
        for each in ("common AR(.9) 3%", "common AR(.95) 5%", "thermal 8%")
    ]
    points += [
        Point("compare: 89 against 19 ms is faster", shape, 24, _apart(shape), 99.0)
        for shape in ("burst", "ramp", "wander")
    ]
    points += [
        Point("gate at 3%: A/A passes", regime, 60, _gate(regime, 60, 1.0, PASS), limit)
        for regime, limit in (
            ("iid 2%", 95.0),
            ("iid 5%", 95.0),
            ("GC 10% x 200 ms", 90.0),
            ("t2 4%", 90.0),
        )
    ]
    points += [
        Point("gate at 3%: +10% fails", regime, 60, _gate(regime, 60, 1.1, FAIL), 95.0)
        for regime in ("iid 2%", "GC 10% x 200 ms")
    ]
    return [
        *points,
        Point("gate at 3%: A/A of 3 + 3 runs passes", "1% from run to run", 60, _repeats, 90.0),
    ]


def _stragglers() -> list[Point]:
    regimes = paced.REGIMES
    drift = regimes["per-rank AR(.9) 3%"]
    longer = replace(drift, own=(0.03, 0.95))
    points = [
        Point(
            "stragglers: healthy rank accused",
            name,
            steps,
            _accused(paced.Job(ranks=8, steps=steps, regime=regime)),
            limit,
            False,
        )
        for name, regime, steps, limit in (
            ("iid 2%", regimes["iid 2%"], 60, 1.0),
            ("AR(.9) 3%", drift, 24, 2.0),
            ("AR(.9) 3%", drift, 60, 2.0),
            ("AR(.95) 3%", longer, 24, 3.0),
        )
    ]
    points += [
        Point(
            f"stragglers: {percent}% slow rank found",
            "AR(.9) 3%",
            steps,
            _named(
                paced.Job(ranks=8, steps=steps, regime=drift, slow_ranks={3: 1 + percent / 100}),
                3,
                "slow host",
            ),
            limit,
        )
        for percent, steps, limit in (
            (10, 24, 30.0),
            (10, 60, 60.0),
            (10, 100, 90.0),
            (20, 24, 90.0),
        )
    ]
    besides = {(0, "compute_reward"): 40.0}
    points += [
        Point(
            "stragglers: rank 0 +40 ms in reward is longer in it",
            name,
            60,
            _named(
                paced.Job(ranks=8, regime=regimes[name], extra_ms=besides),
                0,
                "longer in compute_reward",
            ),
            98.0,
        )
        for name in ("iid 2%", "GC 10% x 200 ms")
    ]
    few = paced.Job(ranks=2, steps=10, regime=regimes["iid 5%"], slow_ranks={1: 1.3})
    return [
        *points,
        Point(
            "stragglers: 30% slow rank called no straggler",
            "2 ranks",
            10,
            _cleared(few),
            2.0,
            False,
        ),
    ]


def _changes() -> list[Point]:
    points = [
        Point(
            "changes: healthy run",
            name,
            60,
            _changed(paced.Job(regime=regime)),
            2.0 if "GC" in name else 1.0,
            False,
        )
        for name, regime in paced.REGIMES.items()
        if name not in ("t2 4%", "day/night 10%, 200 steps")
    ]
    points += [
        Point(
            f"changes: x{factor:g} halfway found",
            name,
            steps,
            _level(
                paced.Job(
                    steps=steps, regime=paced.REGIMES[name], slower={"*": factor}, since=steps // 2
                )
            ),
            limit,
        )
        for name in ("iid 5%", "GC 10% x 200 ms", "common AR(.9) 3%", "common AR(.95) 5%")
        for factor, steps, limit in ((2.0, 60, 99.0), (2.0, 24, 90.0), (1.3, 60, 90.0))
    ]
    return points


CURVES: Sequence[Point] = (*_compare(), *_stragglers(), *_changes())
"""All promises."""


def measured(point: Point, runs: int) -> float:
    """Return in how many per cent of some runs the verdict was given."""
    return 100 * sum(point.ask(_SEED + seed) for seed in range(runs)) / runs


def bounds(found: Sequence[float]) -> list[Bound]:
    """Return the promises beside what was measured."""
    return [
        Bound(
            f"{point.verdict}, {point.case}, {point.steps} steps",
            value,
            point.limit,
            "%",
            at_least=point.at_least,
        )
        for point, value in zip(CURVES, found, strict=True)
    ]
