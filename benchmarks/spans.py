"""What one span costs, beside the timers that people use today: ``python benchmarks/spans.py``.

One process, one thread for torch; contenders interleaved in random order, medians reported.

- warm: a tight loop, the empty loop subtracted.
- cold: one span between pieces of 1-2 ms of real torch work (forward, backward and optimizer step
  of a small MLP), an empty block in the same place subtracted. Caches and branch predictors have
  forgotten the span by then: this is what a training loop feels.
- 2 threads: wall time per span while two threads make spans.
- asyncio: per span of two tasks that take turns inside their spans, the same without spans
  subtracted.
- kept: bytes of memory per span until it is written (tracemalloc).

A span that is recorded must also be encoded and written. That happens once per step and is measured
on its own, in steps of 11 spans.

The control is the floor measured twice. Outside of its band the machine is too noisy: the run is
repeated up to three times and then fails.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
from _contenders import Contender, Span, contenders
from _measure import Bound, Report, fresh, options, quiet_enough, verdict

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.marking import stage
from lightning_rlprof.run import start_session
from lightning_rlprof.session import Session

__all__ = ["Costs", "bounds", "control", "main"]

Costs = dict[str, dict[str, float]]
"""Column to contender to number."""

TRIES = 3
BAND = {"warm": (0.9, 1.1), "cold": (0.9, 1.1)}
SPANS_PER_STEP = 11
OURS, COUNTED, OFF = "stage(), recording", "stage(tokens=…), recording", "stage(), not recording"
VERL, SIMPLE = "verl marked_timer formula", "Lightning SimpleProfiler"
FLOOR, AGAIN = "floor", "floor again (A/A)"


# ---- what is timed; each contender gets its own copy of these functions


def _loop(span: Span, name: str, number: int) -> int:
    start = perf_counter_ns()
    for _ in itertools.repeat(None, number):
        with span(name):
            pass
    return perf_counter_ns() - start


def _loop_counted(span: Span, name: str, number: int) -> int:
    start = perf_counter_ns()
    for _ in itertools.repeat(None, number):
        with span(name, tokens=64):
            pass
    return perf_counter_ns() - start


def _loop_empty(number: int) -> int:
    start = perf_counter_ns()
    for _ in itertools.repeat(None, number):
        pass
    return perf_counter_ns() - start


def _once(span: Span) -> int:
    start = perf_counter_ns()
    with span("actor_update"):
        pass
    return perf_counter_ns() - start


def _once_counted(span: Span) -> int:
    start = perf_counter_ns()
    with span("actor_update", tokens=64):
        pass
    return perf_counter_ns() - start


def _once_empty(span: Span) -> int:
    start = perf_counter_ns()
    return perf_counter_ns() - start


async def _turns(span: Span, name: str, number: int) -> None:
    for _ in itertools.repeat(None, number):
        with span(name):
            await asyncio.sleep(0)


async def _turns_counted(span: Span, name: str, number: int) -> None:
    for _ in itertools.repeat(None, number):
        with span(name, tokens=64):
            await asyncio.sleep(0)


async def _turns_empty(span: Span, name: str, number: int) -> None:
    for _ in itertools.repeat(None, number):
        await asyncio.sleep(0)


# ---- how it is timed


class _Timed:
    """A contender with its own copies of the timed functions."""

    def __init__(self, contender: Contender) -> None:
        self.name, self.span, self.drop = contender.name, contender.span, contender.drop
        self.loop = fresh(_loop_counted if contender.counted else _loop)
        self.once = fresh(_once_counted if contender.counted else _once)
        self.turns = fresh(_turns_counted if contender.counted else _turns)

    def warm(self, number: int) -> float:
        """Return nanoseconds per span in a tight loop, the loop included."""
        return self.loop(self.span, "actor_update", number) / number

    def threads(self, number: int) -> float:
        """Return nanoseconds of wall time per span of two threads."""
        gate = threading.Barrier(3)

        def work(name: str) -> None:
            gate.wait()
            self.loop(self.span, name, number)

        workers = [threading.Thread(target=work, args=(f"stage_{one}",)) for one in range(2)]
        for worker in workers:
            worker.start()
        gate.wait()
        start = perf_counter_ns()
        for worker in workers:
            worker.join()
        return (perf_counter_ns() - start) / (2 * number)

    def tasks(self, number: int, turns: Callable[..., Any] | None = None) -> float:
        """Return nanoseconds per span of two tasks that take turns, the turns included."""

        async def both() -> int:
            start = perf_counter_ns()
            names = ("stage_0", "stage_1")
            await asyncio.gather(*((turns or self.turns)(self.span, one, number) for one in names))
            return perf_counter_ns() - start

        return asyncio.run(both()) / (2 * number)

    def kept(self, number: int) -> float:
        """Return the bytes that a span holds until it is written."""
        self.drop()
        tracemalloc.start()
        self.loop(self.span, "actor_update", number)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self.drop()
        return max(0.0, held / number)


def _interleaved(
    timed: Sequence[_Timed], measure: Callable[[_Timed], float], repeats: int
) -> dict[str, float]:
    """Return the median of each contender, all measured in random order in every repeat."""
    found: dict[str, list[float]] = {one.name: [] for one in timed}
    for _ in range(repeats):
        for one in random.sample(timed, len(timed)):
            found[one.name].append(measure(one))
        for one in timed:
            one.drop()
    return {name: median(values) for name, values in found.items()}


def _less(costs: Mapping[str, float], empty: float) -> dict[str, float]:
    return {name: cost - empty for name, cost in costs.items()}


def make_work() -> Callable[[], None]:
    """Return a piece of 1-2 ms of real work: one optimizer step of a small MLP."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 128)

    def work() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return work


def _cold(timed: Sequence[_Timed], blocks: int) -> tuple[dict[str, float], float]:
    """Return nanoseconds per span between pieces of work, and milliseconds per piece."""
    work, empty = make_work(), _Timed(Contender("empty", nullcontext))
    empty.once = fresh(_once_empty)
    pieces: list[int] = []

    def measure(one: _Timed) -> float:
        start = perf_counter_ns()
        work()
        pieces.append(perf_counter_ns() - start)
        return one.once(one.span)

    _interleaved([*timed, empty], measure, max(1, blocks // 20))
    pieces.clear()
    costs = _interleaved([*timed, empty], measure, blocks)
    return _less(costs, costs.pop("empty")), median(pieces) / 1e6


def _writing(session: Session, steps: int) -> dict[str, float]:
    """Return nanoseconds per span that the end of a step takes, warm and cold, and bytes on disk."""
    work, path = make_work(), session.run / "rank-00000.jsonl"
    found: dict[str, float] = {}
    for name, before in (("warm", lambda: None), ("cold", work)):
        size, ends = path.stat().st_size, []
        for step in range(1, steps + 1):
            session.begin_step(step)
            for _ in range(SPANS_PER_STEP):
                with stage("actor_update"):
                    pass
            before()
            start = perf_counter_ns()
            session.end_step()
            ends.append(perf_counter_ns() - start)
        found[name] = median(ends) / SPANS_PER_STEP
        found["bytes"] = (path.stat().st_size - size) / steps / (SPANS_PER_STEP + 1)
    return found


def _measure(session: Session, quick: bool) -> Costs:
    timed = [_Timed(one) for one in contenders(session)]
    many, repeats, blocks = (2_000, 5, 60) if quick else (20_000, 25, 1_500)
    empty = median(_loop_empty(many) / many for _ in range(repeats))
    sleeping = fresh(_turns_empty)
    turns = median(timed[0].tasks(many // 4, sleeping) for _ in range(repeats))
    warm = _less(_interleaved(timed, lambda one: one.warm(many), repeats), empty)
    cold, piece_ms = _cold(timed, blocks)
    threads = _interleaved(timed, lambda one: one.threads(many // 2), max(3, repeats // 3))
    tasks = _interleaved(timed, lambda one: one.tasks(many // 4), max(3, repeats // 3))
    return {
        "warm": warm,
        "cold": cold,
        "threads": threads,
        "asyncio": _less(tasks, turns),
        "kept": {one.name: one.kept(2_000) for one in timed},
        "writing": _writing(session, blocks),
        "piece": {"ms": piece_ms},
    }


def control(costs: Costs) -> dict[str, float]:
    """Return the floor measured a second time as a multiple of the first, warm and cold."""
    return {column: costs[column][AGAIN] / costs[column][FLOOR] for column in BAND}


def _is_quiet(costs: Costs) -> bool:
    return all(BAND[name][0] <= ratio <= BAND[name][1] for name, ratio in control(costs).items())


def bounds(costs: Costs) -> list[Bound]:
    """Return what a span may cost."""
    warm, cold = costs["warm"], costs["cold"]
    return [
        Bound("not recording, warm", warm[OFF] / 1e3, 0.15, "µs"),
        Bound("recording, async-safe, warm", warm[OURS] / 1e3, 1.0, "µs"),
        Bound("recording, cold, against the floor", cold[OURS] / cold[FLOOR], 2.5, "times"),
        Bound("verl's formula against recording, cold", cold[VERL] / cold[OURS], 2, "times", True),
        Bound("recording against SimpleProfiler, cold", cold[OURS] / cold[SIMPLE], 1, "times"),
    ]


def _rows(costs: Costs) -> list[list[object]]:
    rows: list[list[object]] = []
    for name in costs["warm"]:
        row: list[object] = [name]
        for column in ("warm", "cold"):
            row += [costs[column][name], costs[column][name] / costs[column][FLOOR]]
        rows.append(row + [costs[column][name] for column in ("threads", "asyncio", "kept")])
    return rows


def _report(costs: Costs) -> Report:
    writing, ratios = costs["writing"], control(costs)
    total = {column: costs[column][OURS] + writing[column] for column in ("warm", "cold")}
    facts = [
        f"Encode and write at the end of a step of {SPANS_PER_STEP} spans, per span: "
        f"{writing['warm']:,.0f} ns warm, {writing['cold']:,.0f} ns cold; with it a recorded span "
        f"costs {total['warm']:,.0f} ns warm, {total['cold']:,.0f} ns cold.",
        f"A span takes {writing['bytes']:.0f} bytes in the file.",
        f"Cold: one span between pieces of {costs['piece']['ms']:.2f} ms of work (median).",
    ]
    columns = ["ns per span", "warm", "× floor", "cold", "× floor"]
    return Report(
        "spans",
        [*columns, "2 threads", "asyncio", "kept, bytes"],
        _rows(costs),
        bounds(costs),
        ", ".join(
            f"{name} {ratio:.3f} (band {BAND[name][0]}-{BAND[name][1]})"
            for name, ratio in ratios.items()
        ),
        _is_quiet(costs),
        facts,
    )


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = ProfilerConfig.build(profile_save_path=folder)
        with start_session(config) as session:
            costs = quiet_enough(lambda: _measure(session, chosen.quick), _is_quiet, TRIES)
    return verdict(_report(costs), chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
