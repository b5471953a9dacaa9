"""How often verdicts are right under the law of real engines alone, see `tests.builders.engine`.

`_curves` asks what can be asked under both laws.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _curves import Point

from lightning_rlprof.analysis.comparison.changes import LEVEL, OUTLIER, changes
from lightning_rlprof.analysis.comparison.compare import FAIL, Judgement, gate, judge, verdict
from lightning_rlprof.analysis.statistics.growth import LEAK, grows
from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.analysis.whatif.whatif import whatif

sys.path.insert(0, str(Path(__file__).parents[1]))
engine: Any = importlib.import_module("tests.builders.engine")
paced: Any = importlib.import_module("tests.builders.paced")

__all__ = ["ENGINE_CURVES"]

_REGIMES = paced.REGIMES
_README = paced.Regime(0.05, common=(0.08, 0.3))
_MOVED = ("faster", "slower")
_FOUND = ("faster", "slower", "minor")
_SYNC = "weight_sync"  # each rank waits in it, and does nothing


def _pair(a: Any, b: Any, seed: int) -> Judgement:
    return judge([engine.run(a, 2 * seed)], [engine.run(b, 2 * seed + 1)])


def _fails(job: Any) -> Callable[[int], bool]:
    return lambda seed: bool(gate(_pair(job, job, seed), 0.03).result == FAIL)


def _alarm(a: Any, b: Any, rows: Sequence[str] = ()) -> Callable[[int], bool]:
    """Whether a row that is the same code, or one of those named, is called faster or slower."""

    def ask(seed: int) -> bool:
        found = _pair(a, b, seed).rows
        return any(
            verdict(row).split()[0] in _MOVED
            for row in found
            if not row.name.startswith("waiting") and (not rows or row.name in rows)
        )

    return ask


def _called(a: Any, b: Any, stage: str, words: Sequence[str]) -> Callable[[int], bool]:
    return lambda seed: verdict(_pair(a, b, seed).by_name[stage]) in words


def _accused(job: Any, ranks: frozenset[int] = frozenset()) -> Callable[[int], bool]:
    """Whether exactly these ranks are accused; of none: whether any is."""
    calm = ("inconclusive", "no straggler", "load imbalance")

    def ask(seed: int) -> bool:
        table = stragglers(engine.run(job, seed))
        if table.abstained is not None:
            return False
        pairs = zip(table.column("rank"), table.column("verdict"), strict=True)
        named = {rank for rank, word in pairs if word not in calm}
        return named == ranks if ranks else bool(named)

    return ask


_HAS_OUTLIERS = ("t2 4%", "remote judge")
"""Regimes whose longest steps are outliers indeed: in these only changes that last are false."""


def _changed(job: Any, *, outliers: bool) -> Callable[[int], bool]:
    def ask(seed: int) -> bool:
        found = changes(engine.run(job, seed)).column("change")
        return any(outliers or what != OUTLIER for what in found)

    return ask


def _row(job: Any, kind: str, step: int, stage: str) -> Callable[[int], bool]:
    """Whether there is a row of this kind, near this step, that names the stage."""

    def ask(seed: int) -> bool:
        table = changes(engine.run(job, seed))
        rows = zip(*(table.column(name) for name in ("change", "step", "stage")), strict=True)
        return any(
            what == kind and abs(int(str(at)) - step) <= 3 and who == stage
            for what, at, who in rows
        )

    return ask


def _compare(run: Any) -> list[Point]:
    pauses = replace(run, regime=_REGIMES["GC 10% x 200 ms"])
    longer = replace(run, regime=replace(run.regime, length=1.5))
    fast = replace(run, slower={"actor_generate": 1 / 3})
    points = [
        Point("gate at 3%: A/A fails", "iid 2%", 60, _fails(run), 0.0, False),
        Point("gate at 3%: A/A fails", "GC 10% x 200 ms", 60, _fails(pauses), 0.0, False),
        Point("compare: false alarm, any row", "lengths x1.5", 60, _alarm(run, longer), 2.0, False),
        Point(
            "compare: update called faster or slower",
            "rollout 3x faster",
            60,
            _alarm(run, fast, ("actor_update",)),
            2.0,
            False,
        ),
        Point(
            "compare: update called faster",
            "rollout 3x faster",
            60,
            _called(run, fast, "actor_update", ("faster",)),
            0.0,
            False,
        ),
    ]
    points += [
        Point(
            f"compare: {stage} +5% found",
            "iid 2%",
            60,
            _called(run, replace(run, slower={stage: 1.05}), stage, _FOUND),
            limit,
        )
        for stage, limit in (
            ("actor_generate", 95.0),
            ("actor_compute_log_prob", 95.0),
            ("actor_update", 80.0),  # ranks wait in it, and only the last one's work is known
        )
    ]
    rough = replace(run, ranks=2, regime=_README)
    faster = {"actor_generate": 0.6}
    for steps, limit in ((60, 45.0), (200, 90.0)):
        a = replace(rough, steps=steps)
        points += [
            Point(
                f"compare: {stage} did not change: unchanged",
                "noise of README",
                steps,
                _called(a, replace(a, slower=faster), stage, ("unchanged", "as the rest")),
                limit,
            )
            for stage in ("actor_compute_log_prob", "actor_update")
        ]
        points += [
            Point(
                f"compare: {stage} +8% called unchanged",
                "noise of README",
                steps,
                _called(a, replace(a, slower={stage: 1.08, **faster}), stage, ("unchanged",)),
                2.0,
                False,
            )
            for stage in ("actor_compute_log_prob", "actor_update")
        ]
    return points


def _shapes(run: Any) -> Mapping[str, Any]:
    return {
        "iid 2%": run,
        "AR(.9) 3%": replace(run, regime=_REGIMES["per-rank AR(.9) 3%"]),
        "common AR(.95) 5%": replace(run, regime=_REGIMES["common AR(.95) 5%"]),
        "GC 10% x 200 ms": replace(run, regime=_REGIMES["GC 10% x 200 ms"]),
        "t2 4%": replace(run, regime=_REGIMES["t2 4%"]),
        "thermal 8%": replace(run, regime=_REGIMES["thermal 8%"]),
        "lasting spread 1.5%": replace(run, regime=_REGIMES["lasting spread 1.5%"]),
        "packed": replace(run, batches="packed"),
        "padded": replace(run, batches="padded"),
        "remote judge": replace(run, judge=True),
        "growing": replace(run, shape="growing"),
        "shrinking": replace(run, shape="shrinking"),
        "cosine": replace(run, shape="cosine"),
        "curriculum": replace(run, shape="curriculum"),
        "alternating batches": replace(run, alternating=True),
        "dynamic sampling": replace(run, dynamic=True),
        "evaluation each 10": replace(run, evaluation=10),
        "checkpoint each 10": replace(run, checkpoint=10),
        "compilation": replace(run, compiling=True),
    }


def _stragglers(run: Any) -> list[Point]:
    wide = replace(run, ranks=8)
    host = replace(run, ranks=16, per_host=4, slow_ranks=dict.fromkeys(range(8, 12), 1.1))
    one, two = {3: 1.1}, {3: 1.1, 6: 1.1}
    points = [
        Point("stragglers: a healthy rank accused", name, 60, _accused(job), 1.0, False)
        for name, job in _shapes(wide).items()
    ]
    points += [
        Point(
            "stragglers: a healthy rank accused",
            f"responses 1.6x longer, {counted} counted",
            60,
            _accused(replace(wide, lengths={2: 1.6}, counted=counted)),
            1.0,
            False,
        )
        for counted in ("lengths", "tokens")
    ]
    points += [
        Point(
            "stragglers: 10% slow found",
            "iid 2%",
            60,
            _accused(replace(wide, slow_ranks=one), frozenset(one)),
            95.0,
        ),
        Point(
            "stragglers: two of 8 found",
            "iid 2%",
            60,
            _accused(replace(wide, slow_ranks=two), frozenset(two)),
            95.0,
        ),
        Point(
            "stragglers: four of 16 on a host found",
            "iid 2%",
            60,
            _accused(host, frozenset(range(8, 12))),
            90.0,
        ),
    ]
    return points


def _changes(run: Any) -> list[Point]:
    points = [
        Point(
            "changes: healthy run",
            name,
            steps,
            _changed(replace(job, steps=steps), outliers=name not in _HAS_OUTLIERS),
            1.0,
            False,
        )
        for name, job in _shapes(run).items()
        for steps in (60, 200)
    ]
    reward = replace(run, slower={"compute_reward": 3.0}, since=30)
    generate = replace(run, steps=200, slower={"actor_generate": 1.15}, since=100)
    saved = replace(run, extra_ms={(None, 29, "save_checkpoint"): 5_000.0})
    judged = replace(run, extra_ms={(None, 29, "compute_reward"): 3_000.0})
    return [
        *points,
        Point(
            "changes: reward x3, 3% of the step",
            "iid 2%",
            60,
            _row(reward, LEVEL, 31, "compute_reward"),
            95.0,
        ),
        Point(
            "changes: rollout x1.15",
            "iid 2%",
            200,
            _row(generate, LEVEL, 101, "actor_generate"),
            90.0,
        ),
        Point(
            "changes: a checkpoint of 5 s is named",
            "iid 2%",
            60,
            _row(saved, OUTLIER, 30, "save_checkpoint"),
            95.0,
        ),
        Point(
            "changes: a reward of 3 s is named",
            "iid 2%",
            60,
            _row(judged, OUTLIER, 30, "compute_reward"),
            95.0,
        ),
    ]


_MIB = 2**20


def _memory_series(shape: str, steps: int, seed: int) -> tuple[Any, Any]:
    """Return bytes at the end of each step, and tokens where they are counted."""
    random, at = np.random.default_rng(seed), np.arange(steps)
    noise = random.normal(0, 3 * _MIB, steps)
    lengths = random.lognormal(0, 0.2, steps)
    growing = 14_400 * np.linspace(0.5, 1.6, steps) * lengths
    level = 14_400 * lengths
    size, tokens = {
        "leak of 1 MiB": (_MIB * at + noise / 3, None),
        "leak of 5 MiB": (5 * _MIB * at + noise, None),
        "leak of 5 MiB, lengths vary": (5 * _MIB * at + noise + 20_000 * level, level),
        "sawtooth with a leak of 1 MiB": (_MIB * (at + (at % 40) / 4), None),
        "level": (noise, None),
        "a cache fills, tau 10": (500 * _MIB * -np.expm1(-at / 10) + noise, None),
        "a cache fills, tau a third": (500 * _MIB * -np.expm1(-3 * at / steps) + noise, None),
        "random walk of 2.8 MiB": (np.cumsum(random.normal(0, 2.8 * _MIB, steps)), None),
        "follows growing lengths": (30_000 * growing + noise, growing),
        "follows lengths": (30_000 * level + noise, level),
        "sawtooth": (5 * _MIB * (at % 13) + noise, None),
    }[shape]
    return (2e9 + size).astype(np.int64), tokens


def _leaks(shape: str, steps: int) -> Callable[[int], bool]:
    def ask(seed: int) -> bool:
        size, tokens = _memory_series(shape, steps, seed)
        return bool(grows(np.arange(1, steps + 1), size, tokens).verdict == LEAK)

    return ask


def _memory() -> list[Point]:
    leaks = ("leak of 1 MiB", "leak of 5 MiB", "leak of 5 MiB, lengths vary")
    healthy = (
        "level",
        "a cache fills, tau 10",
        "a cache fills, tau a third",
        "random walk of 2.8 MiB",
        "follows growing lengths",
        "follows lengths",
        "sawtooth",
    )
    points = [
        Point("memory: leak found", shape, steps, _leaks(shape, steps), 98.0)
        for shape in (*leaks, "sawtooth with a leak of 1 MiB")
        for steps in (60, 200)
    ]
    points += [
        Point("memory: healthy called a leak", shape, steps, _leaks(shape, steps), 2.0, False)
        for shape in healthy
        for steps in (60, 200)
    ]
    return points


def _saves(update: float, change: tuple[str, float], what: str) -> Callable[[int], bool]:
    """Ask a simulator in which the change is made: to this run, or to one with other responses."""
    stage, speed = change

    def ask(seed: int) -> bool:
        now = {"actor_update": update}
        spans, before = engine.one_step_off(engine.OneStepOff(slower=now), 2 * seed)
        table = whatif(spans, speedup={stage: speed})
        if what == "abstains" or not table.rows:
            return what == "abstains" and table.abstained is not None
        row = dict(zip([each.name for each in table.columns], table.rows[0], strict=True))
        then = now | {stage: now.get(stage, 1.0) / speed}
        other = 2 * seed + (what == "covers")
        _, after = engine.one_step_off(engine.OneStepOff(slower=then), other)
        if what == "covers":
            return bool(row["CI low"] <= after <= row["CI high"])
        return bool(abs(row["share"] - (1 - after / before)) <= _POINTS)

    return ask


_POINTS = 0.06


def _whatif() -> list[Point]:
    return [
        Point(
            f"what-if of an asynchronous job: {what}",
            f"{stage} {speed:g}x faster, update x{update:g}",
            60,
            _saves(update, (stage, speed), what),
            limit,
            at_least,
        )
        for update in (1.0, 2.4, 4.0)
        for stage, speed in (("actor_generate", 2.0), ("actor_update", 2.0))
        for what, limit, at_least in (
            ("within 6 points", 95.0, True),
            ("covers", 90.0, True),
            ("abstains", 20.0, False),
        )
    ]


_RUN = engine.Engine()
ENGINE_CURVES: Sequence[Point] = (
    *_compare(_RUN),
    *_stragglers(_RUN),
    *_changes(_RUN),
    *_memory(),
    *_whatif(),
)
"""All promises under this law."""
