"""How often each verdict is right, by how the pace of a machine behaves: its operating curves.

Each question is asked under two laws: one that verdicts fit, and one of real engines. Seeds are
such that no threshold was chosen on.
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
from lightning_rlprof.tables.spans import Spans

sys.path.insert(0, str(Path(__file__).parents[1]))
engine: Any = importlib.import_module("tests.builders.engine")
paced: Any = importlib.import_module("tests.builders.paced")
pairs: Any = importlib.import_module("tests.builders.pairs")

__all__ = ["CURVES", "CURVES_OF_ENGINES", "Point", "bounds", "measured"]

_SEED = 90_000_000
_CHANGED = ("faster", "slower", "minor")
_STAGE = "actor_update"


class Law(NamedTuple):
    """How the time of a stage follows from its work.

    Attributes:
        play: Lets a job happen with a seed.
        job: The usual one.
        compared: The usual one of two that are compared.
        late: ``extra_ms`` of a rank 0 that takes 40 ms more in its reward.
        limits: Promises that are not those of the law that verdicts fit.
    """

    play: Callable[[Any, int], Spans]
    job: Any
    compared: Any
    late: Mapping[Any, float]
    limits: Mapping[str, float] = {}


# No stage holds the waiting for another one.
_MEETS = paced.Job(meets=("actor_generate", "actor_update"))
FITTED = Law(paced.play, paced.Job(), _MEETS, {(0, "compute_reward"): 40.0})
ENGINES = Law(
    engine.run,
    engine.Engine(),
    engine.Engine(),
    {(0, None, "compute_reward"): 40.0},
    {  # Its steps differ more: one long response decides a rollout, and ranks wait in an update.
        "compare: step +5% found, iid 5%": 75.0,
        "gate at 3%: A/A passes, t2 4%": 65.0,
    },
)


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


def _pair(law: Law, seed: int, regime: str, slower: Mapping[str, float] | None = None) -> Judgement:
    kind = paced.REGIMES[regime]
    after = replace(kind, length=1.3) if "x1.3" in regime else kind
    before = replace(law.compared, regime=kind)
    changed = replace(before, regime=after, slower=slower or {})
    return judge([law.play(before, 2 * seed)], [law.play(changed, 2 * seed + 1)])


def _alarm(law: Law, regime: str) -> Callable[[int], bool]:
    def ask(seed: int) -> bool:
        rows = _pair(law, seed, regime).rows
        return any(
            verdict(row).split()[0] in ("faster", "slower")  # also: than the rest
            for row in rows
            if not row.name.startswith("waiting")
        )

    return ask


def _found(law: Law, regime: str, stage: str, factor: float) -> Callable[[int], bool]:
    def ask(seed: int) -> bool:
        found = _pair(law, seed, regime, {stage: factor}).by_name
        row = found["step" if stage == "*" else stage]
        said = verdict(row).split()[0]
        return said in ("slower", "minor") if stage == "*" else said in _CHANGED

    return ask


def _gate(law: Law, regime: str, factor: float, result: str) -> Callable[[int], bool]:
    def ask(seed: int) -> bool:
        found = _pair(law, seed, regime, {"*": factor})
        return bool(gate(found, 0.03).result == result)

    return ask


def _repeats(law: Law) -> Callable[[int], bool]:
    """Three runs a side whose levels differ by 1% from run to run."""

    def ask(seed: int) -> bool:
        levels = np.exp(np.random.default_rng(seed).normal(0, 0.01, 6))
        job = replace(law.job, regime=paced.REGIMES["iid 2%"])
        runs = [
            law.play(replace(job, slower={"*": level}), 6 * seed + at)
            for at, level in enumerate(levels.tolist())
        ]
        return bool(gate(judge(runs[:3], runs[3:]), 0.03).result == PASS)

    return ask


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


def _verdicts(law: Law, job: Any, seed: int) -> set[tuple[object, object]]:
    table = stragglers(law.play(job, seed))
    if table.abstained is not None:
        return set()
    return set(zip(table.column("rank"), table.column("verdict"), strict=True))


def _accused(law: Law, job: Any) -> Callable[[int], bool]:
    calm = ("inconclusive", "no straggler", "load imbalance")
    return lambda seed: any(word not in calm for _, word in _verdicts(law, job, seed))


def _named(law: Law, job: Any, rank: int, word: str) -> Callable[[int], bool]:
    return lambda seed: (rank, word) in _verdicts(law, job, seed)


def _cleared(law: Law, job: Any) -> Callable[[int], bool]:
    return lambda seed: (None, "no straggler") in _verdicts(law, job, seed)


def _changed(law: Law, job: Any) -> Callable[[int], bool]:
    return lambda seed: bool(changes(law.play(job, seed)).rows)


def _level(law: Law, job: Any) -> Callable[[int], bool]:
    def ask(seed: int) -> bool:
        table = changes(law.play(job, seed))
        near = [
            abs(int(str(step)) - 1 - job.since) <= 3
            for change, step in zip(table.column("change"), table.column("step"), strict=True)
            if change == LEVEL
        ]
        return any(near)

    return ask


def _compare(law: Law) -> list[Point]:
    usual = ("iid 2%", "iid 5%", "t2 4%", "GC 10% x 200 ms", "lengths x1.3")
    wander = ("per-rank AR(.9) 3%", "common AR(.9) 3%", "common AR(.95) 5%", "thermal 8%")
    points = [
        Point("compare: false alarm, any row", regime, 60, _alarm(law, regime), limit, False)
        for regime in (*usual, *wander)
        for limit in (4.0 if ".95" in regime else 1.0,)
    ]
    points += [
        Point("compare: step +5% found", regime, 60, _found(law, regime, "*", 1.05), limit)
        for regime, limit in (("iid 2%", 95.0), ("iid 5%", 90.0), ("GC 10% x 200 ms", 85.0))
    ]
    points += [
        Point("compare: update +5% found", each, 60, _found(law, each, _STAGE, 1.05), 95.0)
        for each in ("common AR(.9) 3%", "common AR(.95) 5%", "thermal 8%")
    ]
    points += [
        Point("gate at 3%: A/A passes", regime, 60, _gate(law, regime, 1.0, PASS), limit)
        for regime, limit in (
            ("iid 2%", 95.0),
            ("iid 5%", 95.0),
            ("GC 10% x 200 ms", 90.0),
            ("t2 4%", 90.0),
        )
    ]
    points += [
        Point("gate at 3%: +10% fails", regime, 60, _gate(law, regime, 1.1, FAIL), 95.0)
        for regime in ("iid 2%", "GC 10% x 200 ms")
    ]
    what = "gate at 3%: A/A of 3 + 3 runs passes"
    return [*points, Point(what, "1% from run to run", 60, _repeats(law), 90.0)]


def _lawless() -> list[Point]:
    """Return what does not depend on work."""
    return [
        Point("compare: 89 against 19 ms is faster", shape, 24, _apart(shape), 99.0)
        for shape in ("burst", "ramp", "wander")
    ]


def _stragglers(law: Law) -> list[Point]:
    regimes = paced.REGIMES
    drift = regimes["per-rank AR(.9) 3%"]
    longer = replace(drift, own=(0.03, 0.95))
    wide = replace(law.job, ranks=8)
    points = [
        Point(
            "stragglers: healthy rank accused",
            name,
            steps,
            _accused(law, replace(wide, steps=steps, regime=regime)),
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
                law,
                replace(wide, steps=steps, regime=drift, slow_ranks={3: 1 + percent / 100}),
                3,
                "slow host",
            ),
            limit,
        )
        for percent, steps, limit in (
            (10, 24, 30.0),
            (10, 60, 70.0),
            (10, 100, 90.0),
            (20, 24, 90.0),
        )
    ]
    points += [
        Point(
            "stragglers: rank 0 +40 ms in reward is longer in it",
            name,
            60,
            _named(
                law,
                replace(wide, regime=regimes[name], extra_ms=law.late),
                0,
                "longer in compute_reward",
            ),
            98.0,
        )
        for name in ("iid 2%", "GC 10% x 200 ms")
    ]
    few = replace(law.job, ranks=2, steps=10, regime=regimes["iid 5%"], slow_ranks={1: 1.3})
    what = "stragglers: 30% slow rank called no straggler"
    return [*points, Point(what, "2 ranks", 10, _cleared(law, few), 2.0, False)]


def _healthy(law: Law) -> list[Point]:
    return [
        Point(
            "changes: healthy run",
            name,
            60,
            _changed(law, replace(law.job, regime=regime)),
            2.0 if "GC" in name else 1.0,
            False,
        )
        for name, regime in paced.REGIMES.items()
        if name not in ("t2 4%", "day/night 10%, 200 steps")
    ]


def _changes(law: Law) -> list[Point]:
    return [
        Point(
            f"changes: x{factor:g} halfway found",
            name,
            steps,
            _level(
                law,
                replace(
                    law.job,
                    steps=steps,
                    regime=paced.REGIMES[name],
                    slower={"*": factor},
                    since=steps // 2,
                ),
            ),
            limit,
        )
        for name in ("iid 5%", "GC 10% x 200 ms", "common AR(.9) 3%", "common AR(.95) 5%")
        for factor, steps, limit in ((2.0, 60, 99.0), (2.0, 24, 90.0), (1.3, 60, 90.0))
    ]


def _of(law: Law) -> list[Point]:
    return [*_compare(law), *_stragglers(law), *_healthy(law), *_changes(law)]


CURVES: Sequence[Point] = (*_of(FITTED), *_lawless())
"""All promises under the law that verdicts fit."""

CURVES_OF_ENGINES: Sequence[Point] = [
    point._replace(limit=ENGINES.limits.get(f"{point.verdict}, {point.case}", point.limit))
    for point in _of(ENGINES)
]
"""The same questions under the law of real engines."""


def measured(point: Point, runs: int) -> float:
    """Return in how many per cent of some runs the verdict was given."""
    return 100 * sum(point.ask(_SEED + seed) for seed in range(runs)) / runs


def bounds(curves: Sequence[Point], found: Sequence[float]) -> list[Bound]:
    """Return the promises beside what was measured."""
    return [
        Bound(
            f"{point.verdict}, {point.case}, {point.steps} steps",
            value,
            point.limit,
            "%",
            at_least=point.at_least,
        )
        for point, value in zip(curves, found, strict=True)
    ]
