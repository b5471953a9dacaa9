"""How well shadow steps measure what recording costs: ``python benchmarks/shadow.py``.

First on runs whose truth is known: recorded steps take 0 or 1.38 % longer. The noise of a step
has heavy tails (Student's t with three degrees of freedom), a slow drift (AR(0.999)), and one step
in a hundred takes three times as long. Reported is the error that 95 % of the runs stay below.

Then on a real loop with 11 stages and one torch thread. The estimate of one run with
``measure_overhead`` stands beside an A/B of the same loop: blocks of steps with and without a
session take turns, and the medians of neighboring blocks are compared.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time_ns

import numpy as np
import torch
from _measure import CORE, Bound, Report, bootstrap, options, verdict
from _switch import STAGES

from lightning_rlprof.analysis.diagnosis.data_quality import Overhead, measured_overhead
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import Session
from lightning_rlprof.records.records import SHADOW, STEP_END, is_shadow
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.testing import make_header

__all__ = ["main", "simulated"]

TRUTHS = (0.0, 0.0138)
PAIRS = (1_000, 2_000)
_AIM = 0.3  # points
_STEP_NS, _SCALE = 7_000_000, 0.026  # a pair's ratio then scatters by 4.7 % (1.4826 MAD)
_BLOCK, _FIRST = 60, 5  # steps of the A/B; of each block, the first ones bring back the caches


def simulated(folder: Path, pairs: int, truth: float, seed: int) -> Overhead:
    """Return what is found in a run with a known truth."""
    draw = np.random.default_rng(seed)
    count = 2 * pairs + 1
    noise = _SCALE * draw.standard_t(3, count)
    drift = np.zeros(count)
    for at, change in enumerate(0.002 * draw.standard_normal(count - 1), start=1):
        drift[at] = 0.999 * drift[at - 1] + change
    slow = np.where(draw.random(count) < 0.01, 3.0, 1.0)
    work = _STEP_NS * np.exp(np.clip(noise + drift, -0.9, 2.0)) * slow
    writer = TraceWriter(folder / "run", make_header())
    now, lines = 0, []
    for step, length in enumerate(work.tolist(), start=1):
        shadow = is_shadow(step)
        end = now + round(length * (1.0 if shadow else 1.0 + truth))
        counters = {STEP_END: 0, **({SHADOW: 1} if shadow else {})}
        lines.append(("span", "step", "step", step, now, end, 1, step, None, counters))
        now = end
    writer.write([*lines, ("end", now, "finished")])
    writer.close()
    found = measured_overhead(load(folder / "run"))
    assert found is not None
    return found


def _errors(pairs: int, runs: int) -> tuple[float, float]:
    """Return in points the error that 95 % of the runs stay below, and the mean error."""
    errors = []
    for seed in range(runs):
        truth = TRUTHS[seed % len(TRUTHS)]
        with tempfile.TemporaryDirectory() as folder:
            found = simulated(Path(folder), pairs, truth, seed)
        errors.append(100 * (found.share - truth))
    return float(np.percentile(np.abs(errors), 95)), float(np.mean(errors))


def _loop(session: Session | None, work: Callable[[], object], steps: int) -> list[int]:
    """Return the nanoseconds of each step, rlprof's end of it included."""
    took = []
    for step in range(1, steps + 1):
        start = perf_counter_ns()
        if session is not None:
            session.begin_step(step)
        for name in STAGES:
            with stage(name):
                work()
        if session is not None:
            session.end_step()
        took.append(perf_counter_ns() - start)
    return took


def _work() -> Callable[[], object]:
    layer, batch = torch.nn.Linear(128, 256), torch.randn(96, 128)

    def run() -> None:
        with torch.no_grad():
            for _ in range(4):
                layer(batch)

    return run


def _estimate(work: Callable[[], object], steps: int) -> Overhead:
    with tempfile.TemporaryDirectory() as folder:
        config = ProfilerConfig(measure_overhead=True)
        with Session(config, Path(folder) / "run", make_header()) as session:
            _loop(session, work, steps)
        found = measured_overhead(load(Path(folder) / "run"))
    assert found is not None
    return found


def _compared(work: Callable[[], object], blocks: int) -> tuple[float, float, float]:
    """Return by how much the loop is longer with a session, and the 95 % interval."""
    ratios = []
    for block in range(blocks):
        medians: dict[bool, float] = {}
        for records in (True, False) if block % 2 else (False, True):
            if not records:
                medians[records] = median(_loop(None, work, _BLOCK)[_FIRST:])
                continue
            with (
                tempfile.TemporaryDirectory() as folder,
                Session(ProfilerConfig(), Path(folder) / "run", make_header()) as session,
            ):
                medians[records] = median(_loop(session, work, _BLOCK)[_FIRST:])
        ratios.append(medians[True] / medians[False] - 1)
    return median(ratios), *bootstrap(ratios)


def _report(quick: bool) -> Report:
    runs, steps, blocks = (3, 100, 2) if quick else (40, 4_000, 40)
    rows = []
    for pairs in PAIRS:
        worst, bias = _errors(pairs, runs)  # judged below is the last: most pairs
        rows.append([f"{pairs:,} pairs", f"{worst:.2f}", f"{bias:+.2f}"])
    work = _work()
    _loop(None, work, _BLOCK)
    wall, cpu = perf_counter_ns(), process_time_ns()
    found, (share, low, high) = _estimate(work, steps), _compared(work, blocks)
    core = (process_time_ns() - cpu) / (perf_counter_ns() - wall)
    facts = [
        f"Real loop, shadow steps: {100 * found.share:+.2f} points "
        f"({100 * found.low:+.2f} … {100 * found.high:+.2f}, {found.pairs:,} pairs)",
        f"Real loop, A/B: {100 * share:+.2f} points ({100 * low:+.2f} … {100 * high:+.2f})",
    ]
    columns = [f"{runs} runs with known truth", "error of 95 % of them, points", "mean error"]
    control = f"the process had {core:.0%} of a core (at least {CORE:.0%})"
    bounds = [
        Bound(f"error of 95 % of {runs} runs of {PAIRS[-1]:,} pairs", worst, _AIM, "points"),
        Bound("mean error of them", abs(bias), _AIM / 3, "points"),
    ]
    return Report("shadow", columns, rows, bounds, control, core >= CORE, facts)


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    torch.set_num_threads(1)
    return verdict(_report(chosen.quick), chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
