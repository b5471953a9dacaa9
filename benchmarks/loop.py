"""What recording costs a training step of about 7 ms: ``python benchmarks/loop.py``.

One Lightning fit with manual optimisation, a small model and one torch thread. A step does 11
pieces of work, which a contender marks as 11 stages. Contenders take turns within the fit, in
random order in each block. A turn is eight steps, of which the last four count, as a training pays
them all the time. The first ones bring back into the caches what the others have driven out, and
cost half as much again: the second one has a column of its own, "after a change". A turn is
compared with the turn of the same block without a profiler: a machine that is slow for a while is
slow for all. Reported is the median of the differences, as a share and in µs per step, with a
bootstrap interval of 95 %, and in CPU time of the training thread, which neighbours on the machine
disturb less.

A step is timed from one call of Lightning's ``epoch_loop.advance`` to the next. That is all of it:
fetching the batch, every hook with Lightning's own dispatch of it, the training step, the end of
the step with the write to the disk. Only the change of contenders happens between the two clocks,
at a place where no profiled action is open.

Our callback must be there on some steps and absent on others. It goes through Lightning's own
``setup`` once. What that left behind is noted: the callback in ``trainer.callbacks``, its hooks in
torch's two global tables, its methods on ``trainer.profiler``. Between turns exactly these are put
back or taken away; of profilers there are two, the covered one and one like it. So the callback
keeps what a long run has (its session, its open file, the actions that it has learnt) and pays on
its own steps for all that it pays there. The first step of its turn is begun at the change; in a
run of its own, the end of the step before begins it. At the end the trace is read: it must hold
every stage of every step that was ours, and no other.

"Floor" is the least that a callback can do: it marks the same stages with two readings of the clock
and one ContextVar each, so that they nest right under asyncio, and keeps them as long as ours are.

"No profiler" runs with Lightning's own PassThroughProfiler, as every Trainer does by default. It is
a generator per action, 12 per step here; the callback covers it with something cheaper.

Two controls: "no profiler" is measured twice, and the process must have had most of a core (CPU
time by wall time). Outside of their bands the machine is too noisy: the run is repeated once, then
fails.
"""

import argparse
import logging
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytorch_lightning as pl
import torch
from _measure import CORE, Bound, Report, bootstrap, options, quiet_enough, verdict
from _switch import AGAIN, CONTENDERS, NO_PROFILER, OURS, SIMPLE, STAGES, Policy, Switch

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.records.run_directory import rank_files, read_trace

__all__ = ["Costs", "Difference", "bounds", "main"]

TRIES = 2
BAND_US = 15.0
STEPS_PER_TURN = 8
_LATER, _AFTER = slice(4, 8), slice(1, 2)


@dataclass(frozen=True)
class Difference:
    """What a contender adds to a step without a profiler.

    Attributes:
        share: Median over blocks, as a share of the step.
        low: Lower end of its 95 % interval.
        high: Upper end.
        us: The share in µs per step.
        cpu_us: The same in CPU time.
        after_us: What it adds to the second step after a change.
    """

    share: float
    low: float
    high: float
    us: float
    cpu_us: float
    after_us: float


@dataclass(frozen=True)
class Costs:
    """What was measured.

    Attributes:
        step_ms: Median of the steps without a profiler.
        by_name: Contender to what it adds.
        core: CPU time of the process by wall time.
    """

    step_ms: float
    by_name: dict[str, Difference]
    core: float

    @property
    def quiet(self) -> bool:
        """Whether both controls are inside of their bands."""
        return abs(self.by_name[AGAIN].us) <= BAND_US and self.core >= CORE


def bounds(costs: Costs) -> list[Bound]:
    """Return what a step may cost."""
    ours, simple = costs.by_name[OURS].us, costs.by_name[SIMPLE].us
    return [
        Bound("the callback with everything it hooks, per step", ours, 120.0, "µs"),
        Bound("the same as SimpleProfiler's or less", ours, simple, "µs"),
    ]


def _measure(quick: bool) -> Costs:
    blocks, first = (8, 1) if quick else (400, 4)
    turns = [
        name for _ in range(first + blocks) for name in random.sample(CONTENDERS, len(CONTENDERS))
    ]
    plan = [name for name in turns for _ in range(STEPS_PER_TURN)]
    with tempfile.TemporaryDirectory() as folder:
        switch, core = _fit(plan, Path(folder))
    skip = first * len(CONTENDERS)
    wall, cpu, after = (
        _by_name(turns[skip:], _per_step(times, part)[skip:])
        for times, part in (
            (switch.wall, _LATER),
            (switch.cpu, _LATER),
            (switch.wall, _AFTER),
        )
    )
    by_name = {name: _difference(wall, cpu, after, name) for name in CONTENDERS[1:]}
    return Costs(median(wall[NO_PROFILER]) / 1e6, by_name, core)


def _fit(plan: Sequence[str], folder: Path) -> tuple[Switch, float]:
    """Train through the plan; also return how much of a core the process had."""
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[ProfilerCallback(profile_save_path=str(folder))],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    policy = Policy()
    switch = Switch(trainer, policy, plan)
    batches: list[torch.Tensor] = [torch.randn(96, 128)] * (len(plan) + 1)
    data: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.fit(policy, data)
    core = (time.process_time() - cpu) / (time.perf_counter() - wall)
    _check_trace(folder, plan)
    return switch, core


def _check_trace(folder: Path, plan: Sequence[str]) -> None:
    (run,) = folder.iterdir()
    spans = read_trace(rank_files(run)[0]).spans
    found = [(span.step, span.name) for span in spans if span.kind == "stage"]
    ours = [step for step, name in enumerate([*plan, OURS], 1) if name == OURS]
    if found != [(step, name) for step in ours for name in STAGES]:
        raise RuntimeError(
            f"the trace has {len(found)} stages, not 11 of each of {len(ours)} steps"
        )


def _per_step(times: Sequence[int], part: slice) -> list[float]:
    """Return the mean time of some steps of each turn."""
    starts = range(0, len(times), STEPS_PER_TURN)
    return [fmean(times[start : start + STEPS_PER_TURN][part]) for start in starts]


def _by_name(turns: Sequence[str], times: Sequence[float]) -> dict[str, list[float]]:
    named = list(zip(turns, times, strict=True))
    return {name: [time for one, time in named if one == name] for name in CONTENDERS}


def _difference(
    wall: dict[str, list[float]],
    cpu: dict[str, list[float]],
    after: dict[str, list[float]],
    name: str,
) -> Difference:
    shares, *others = (
        [time / usual - 1 for time, usual in zip(times[name], times[NO_PROFILER], strict=True)]
        for times in (wall, wall, cpu, after)
    )
    us, cpu_us, after_us = (
        median(own) * median(times[NO_PROFILER]) / 1e3
        for own, times in zip(others, (wall, cpu, after), strict=True)
    )
    return Difference(median(shares), *bootstrap(shares), us, cpu_us, after_us)


def _report(costs: Costs) -> Report:
    rows = [
        [
            name,
            f"{100 * one.share:+.2f} %",
            f"{100 * one.low:+.2f} … {100 * one.high:+.2f} %",
            f"{one.us:+.0f}",
            f"{one.cpu_us:+.0f}",
            f"{one.after_us:+.0f}",
        ]
        for name, one in costs.by_name.items()
    ]
    control = (
        f"no profiler again {costs.by_name[AGAIN].us:+.0f} µs (band ±{BAND_US:.0f}); "
        f"the process had {costs.core:.0%} of a core (at least {CORE:.0%})"
    )
    headings = [f"on a step of {costs.step_ms:.1f} ms", "slower by", "95 %", "µs", "CPU µs"]
    headings.append("after a change, µs")
    return Report("loop", headings, rows, bounds(costs), control, costs.quiet)


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    torch.set_num_threads(1)
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    tries = 1 if chosen.quick else TRIES
    costs = quiet_enough(lambda: _measure(chosen.quick), lambda one: one.quiet, tries)
    return verdict(_report(costs), chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
