"""What one span costs, beside the timers that people use today: ``python benchmarks/spans.py``.

One process, one thread for torch; contenders interleaved in random order; medians, less what an
empty block in the same place takes.

- warm: a tight loop.
- cold: one span after each piece of 1-2 ms of real torch work (forward, backward and optimizer step
  of a small MLP). Caches and branch predictors have forgotten most of the span by then: this is
  what a training loop feels. Contenders take turns of four spans; the first does not count.
- 2 threads: wall time per span while two threads make spans.
- asyncio: per span of two tasks that take turns inside their spans.
- kept: bytes of memory per span until it is written (tracemalloc).

A span that is recorded must also be encoded and written. That happens once per step and is measured
on its own, in steps of 11 spans.

Two controls: the floor is measured twice, and the process must have had most of a core (CPU time by
wall time). Outside of their bands the machine is too noisy: up to three tries, then it fails.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns

import torch
from _contenders import AGAIN, FLOOR, OFF, OURS, SIMPLE, VERL, contenders
from _measure import CORE, Bound, Report, options, quiet_enough, verdict
from _timing import Timed, interleaved

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import Session
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.records.run_directory import rank_files

__all__ = ["Costs", "bounds", "main", "make_work"]

TRIES = 3
BAND = (0.9, 1.1)
SPANS_PER_STEP = 11
COLUMNS = ("warm", "cold", "2 threads", "asyncio", "kept, bytes")


@dataclass
class Costs:
    """What was measured, in nanoseconds per span unless said otherwise.

    Attributes:
        columns: Column to contender to number.
        writing: Encoding and writing at the end of a step, ``warm`` and ``cold``.
        file_bytes: Bytes of a span on the disk.
        piece_ms: The work between two cold spans.
        core: CPU time of the process by wall time, while one thread was at work.
    """

    columns: dict[str, dict[str, float]] = field(default_factory=dict)
    writing: dict[str, float] = field(default_factory=dict)
    file_bytes: float = 0.0
    piece_ms: float = 0.0
    core: float = 1.0

    @property
    def control(self) -> dict[str, float]:
        """The floor measured a second time, as a multiple of the first."""
        return {
            name: self.columns[name][AGAIN] / self.columns[name][FLOOR] for name in ("warm", "cold")
        }

    @property
    def quiet(self) -> bool:
        """Whether both controls are inside of their bands."""
        in_band = all(BAND[0] <= ratio <= BAND[1] for ratio in self.control.values())
        return in_band and self.core >= CORE


def bounds(costs: Costs) -> list[Bound]:
    """Return what a span may cost."""
    warm, cold = costs.columns["warm"], costs.columns["cold"]
    return [
        Bound("not recording, warm", warm[OFF] / 1e3, 0.15, "µs"),
        Bound("recording, async-safe, warm", warm[OURS] / 1e3, 1.0, "µs"),
        Bound("recording, cold, by the floor", cold[OURS] / cold[FLOOR], 2.5, "times"),
        Bound("verl's formula, cold, by recording", cold[VERL] / cold[OURS], 2.0, "times", True),
        Bound("recording, cold, by SimpleProfiler", cold[OURS] / cold[SIMPLE], 1.0, "times"),
    ]


def make_work() -> Callable[[], None]:
    """Return a piece of 1-2 ms of real work: one optimizer step of a small MLP."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(192, 128)

    def work() -> None:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()

    return work


def _measure(session: Session, quick: bool) -> Costs:
    timed = [Timed(one) for one in contenders(session)]
    # 2,000 spans take about 2 ms: most loops end before the scheduler takes the core away.
    warm, cold, few = (20, 30, 5) if quick else (300, 500, 20)
    work, costs = make_work(), Costs()
    interleaved(timed, lambda one: one.cold(work), cold // 20 + 1)
    with _core(costs):
        costs.piece_ms = median(_duration(work) for _ in range(cold)) / 1e6
        costs.columns["warm"] = interleaved(timed, lambda one: one.warm(2_000), warm)
        costs.columns["cold"] = interleaved(timed, lambda one: one.cold(work), cold)
        _measure_writing(session, cold, costs)
    costs.columns["2 threads"] = interleaved(timed, lambda one: one.threads(10_000), few)
    costs.columns["asyncio"] = interleaved(timed, lambda one: one.tasks(1_000), warm // 4)
    costs.columns["kept, bytes"] = {one.name: one.kept(2_000) for one in timed}
    return costs


def _measure_writing(session: Session, steps: int, costs: Costs) -> None:
    work, file = make_work(), rank_files(session.run)[0]
    for name in ("warm", "cold"):
        size, ends = file.stat().st_size, []
        for step in range(1, steps + 1):
            session.begin_step(step)
            for _ in range(SPANS_PER_STEP):
                with stage("actor_update"):
                    pass
            if name == "cold":
                work()
            ends.append(_duration(session.end_step))
        costs.writing[name] = median(ends) / SPANS_PER_STEP
        costs.file_bytes = (file.stat().st_size - size) / steps / (SPANS_PER_STEP + 1)


def _duration(action: Callable[[], object]) -> int:
    start = perf_counter_ns()
    action()
    return perf_counter_ns() - start


@contextmanager
def _core(costs: Costs) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    costs.core = (time.process_time() - cpu) / (time.perf_counter() - wall)


def _report(costs: Costs) -> Report:
    both = {name: costs.columns[name][OURS] + costs.writing[name] for name in ("warm", "cold")}
    facts = [
        f"Encoding and writing at the end of a step of {SPANS_PER_STEP} spans takes "
        f"{costs.writing['warm']:,.0f} ns per span warm, {costs.writing['cold']:,.0f} ns cold; "
        f"with it a recorded span costs {both['warm']:,.0f} ns warm, {both['cold']:,.0f} ns cold.",
        f"A span takes {costs.file_bytes:.0f} bytes in the file.",
        f"Cold: a piece of work takes {costs.piece_ms:.2f} ms.",
    ]
    again = ", ".join(f"{name} {ratio:.3f}" for name, ratio in costs.control.items())
    control = (
        f"the floor again by the floor {again} (band {BAND[0]} to {BAND[1]}); "
        f"the process had {costs.core:.0%} of a core (at least {CORE:.0%})"
    )
    headings = ["ns per span", "warm", "x floor", "cold", "x floor", *COLUMNS[2:]]
    return Report("spans", headings, _rows(costs), bounds(costs), control, costs.quiet, facts)


def _rows(costs: Costs) -> list[list[object]]:
    rows: list[list[object]] = []
    for name in costs.columns["warm"]:
        numbers = {column: costs.columns[column][name] for column in COLUMNS}
        row: list[object] = [name]
        for column in ("warm", "cold"):
            row += [round(numbers[column]), numbers[column] / costs.columns[column][FLOOR]]
        rows.append(row + [round(numbers[column]) for column in COLUMNS[2:]])
    return rows


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = ProfilerConfig.build(profile_save_path=folder)
        with start_session(config) as session:
            costs = quiet_enough(
                lambda: _measure(session, chosen.quick),
                lambda one: one.quiet,
                1 if chosen.quick else TRIES,
            )
    return verdict(_report(costs), chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
