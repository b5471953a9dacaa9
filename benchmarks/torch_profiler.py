"""What a torch.profiler capture costs, loop to file: ``python benchmarks/torch_profiler.py``.

One process, one thread for torch, on the CPU. The work is optimizer steps of a small MLP, without
Lightning. Two measurements:

- The loop: turns of 50 steps, which our recorder watches with other contents each time, or not at
  all; interleaved in random order, medians. A turn has one span per step. Beside the steps stands
  what the end of the capture takes on the training thread (stop, write, free), per step.
- The file: a capture is written plain, and that file compressed by isal, as our exporter does it,
  and by Python's gzip at its level 6. Another capture of as many steps goes through torch's own
  export to ``.json.gz``, which writes and compresses at once; torch writes a capture only once.
  In turns, medians over several of each.

Two controls: a second turn of each round runs without a profiler, and the process must have had
most of a core. Outside of their bands the machine is too noisy: up to three tries, then it fails.
"""

import argparse
import gzip
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _measure import CORE, Bound, Report, options, quiet_enough, verdict
from spans import make_work
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.recorders.torch_profiler import (
    TorchProfilerRecorder,
    compress,
    release,
)
from lightning_rlprof.testing import make_header

__all__ = ["Costs", "bounds", "main"]

TRIES = 3
BAND = (0.9, 1.1)
STEPS = 50
NO_PROFILER, AGAIN = "no profiler", "no profiler again (A/A)"
PLAIN, ALL = "cpu", "cpu, shapes, memory, stack"
CONTENTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "cpu, shapes": {"profile_record_shapes": True},
    "cpu, memory": {"profile_with_memory": True},
    "cpu, stack": {"with_stack": True},
    ALL: {
        "profile_record_shapes": True,
        "profile_with_memory": True,
        "with_stack": True,
    },
}
WRITE, ISAL, GZIP, TORCH = "write plain", "isal, level 1", "gzip, level 6", "torch's own .json.gz"
STOP, FREE = "stop", "free"
_EVENT = b'"ph": "X"'


@dataclass
class Costs:
    """What was measured.

    Attributes:
        steps: Microseconds per step in the loop, by who watches.
        ends: Microseconds per step that the end of the capture takes, by contents.
        events: Events per step, by contents.
        parts: Microseconds per event, by part of the way into the file.
        sizes: Bytes per event in the file, by who compresses.
        core: CPU time of the process by wall time.
    """

    steps: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    events: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    core: float = 1.0

    @property
    def control(self) -> float:
        """The second unwatched turn by the first."""
        return self.steps[AGAIN] / self.steps[NO_PROFILER]

    @property
    def quiet(self) -> bool:
        """Whether both controls are inside of their bands."""
        return BAND[0] <= self.control <= BAND[1] and self.core >= CORE


def bounds(costs: Costs) -> list[Bound]:
    """Return what a capture may cost."""
    parts, ours = costs.parts, costs.parts[WRITE] + costs.parts[ISAL]
    return [
        Bound(
            "loop with host activity", costs.steps[PLAIN] / costs.steps[NO_PROFILER], 1.5, "times"
        ),
        Bound("torch's own export, by plain and isal", parts[TORCH] / ours, 8.0, "times", True),
        Bound("gzip by isal", parts[GZIP] / parts[ISAL], 5.0, "times", True),
        Bound("isal's file by gzip's", costs.sizes[ISAL] / costs.sizes[GZIP], 1.5, "times"),
    ]


def _measure(quick: bool) -> Costs:
    costs, work = Costs(), make_work()
    rounds, captures, steps = (2, 1, 100) if quick else (20, 5, 400)
    for _ in range(STEPS):
        work()
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        _measure_loop(costs, work, rounds, Path(folder))
        _measure_file(costs, work, captures, steps, Path(folder))
    costs.core = (time.process_time() - cpu) / (time.perf_counter() - wall)
    return costs


def _measure_loop(costs: Costs, work: Callable[[], None], rounds: int, folder: Path) -> None:
    who = [NO_PROFILER, AGAIN, *CONTENTS]
    steps: dict[str, list[float]] = {name: [] for name in who}
    ends: dict[str, list[float]] = {name: [] for name in CONTENTS}
    for number in range(rounds):
        for name in random.sample(who, len(who)):
            if name not in CONTENTS:
                steps[name].append(_timed(partial(_loop, work)))
                continue
            recorder = _recorder(name)
            recorder.open(folder / f"{number} {name}")
            steps[name].append(_timed(partial(_loop, work, recorder)))
            ends[name].append(_timed(recorder.close))
            recorder.finish()
    for name in who:
        costs.steps[name] = median(steps[name]) / STEPS
    for name in CONTENTS:
        costs.ends[name] = median(ends[name]) / STEPS
        (file,) = (folder / f"0 {name}").iterdir()
        costs.events[name] = gzip.decompress(file.read_bytes()).count(_EVENT) / STEPS


def _recorder(contents: str) -> TorchProfilerRecorder:
    config = ProfilerConfig.build(profile=True, **CONTENTS[contents])
    return TorchProfilerRecorder(config, make_header())


def _loop(work: Callable[[], None], recorder: TorchProfilerRecorder | None = None) -> None:
    for _ in range(STEPS):
        if recorder is None:
            work()
        else:
            token = recorder.enter("actor_update", "stage", 1)
            work()
            recorder.exit(token)


def _measure_file(
    costs: Costs, work: Callable[[], None], captures: int, steps: int, folder: Path
) -> None:
    times: dict[str, list[float]] = {name: [] for name in (STOP, WRITE, ISAL, GZIP, TORCH, FREE)}
    for _ in range(captures):
        for way in random.sample((_our_way, _torchs_way), 2):
            trace = _KinetoProfile(activities=[ProfilerActivity.CPU])
            trace.start()
            for _ in range(steps):
                work()
            times[STOP].append(_timed(trace.stop))
            held = [trace]
            del trace
            found, sizes, events = way(held, folder)
            found[FREE] = _timed(partial(release, held))
            times[STOP][-1] /= events
            costs.sizes |= {name: size / events for name, size in sizes.items()}
            for name, value in found.items():
                times[name].append(value / events)
    costs.parts |= {name: median(values) for name, values in times.items()}


_Way = tuple[dict[str, float], dict[str, int], int]


def _our_way(held: list[Any], folder: Path) -> _Way:
    """Write plain, then compress; return times, sizes of the files, and the number of events."""
    plain, packed = folder / "plain.json", folder / "packed.json.gz"
    times = {WRITE: _timed(partial(held[0].export_chrome_trace, str(plain)))}
    sizes = {}
    ways: dict[str, Callable[[Path, Path], object]] = {ISAL: compress, GZIP: _gzip}
    for name in random.sample(sorted(ways), len(ways)):
        times[name] = _timed(partial(ways[name], plain, packed))
        sizes[name] = packed.stat().st_size
    return times, sizes, plain.read_bytes().count(_EVENT)


def _torchs_way(held: list[Any], folder: Path) -> _Way:
    """Write and compress at once; return the same."""
    packed = folder / "torch.json.gz"
    times = {TORCH: _timed(partial(held[0].export_chrome_trace, str(packed)))}
    events = gzip.decompress(packed.read_bytes()).count(_EVENT)
    return times, {TORCH: packed.stat().st_size}, events


def _gzip(plain: Path, packed: Path) -> None:
    with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _timed(action: Callable[[], object]) -> float:
    """Return the microseconds that an action takes."""
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e6


def _report(costs: Costs) -> Report:
    rows: list[list[object]] = []
    for name, step in costs.steps.items():
        row: list[object] = [name, round(step), step / costs.steps[NO_PROFILER]]
        if name in CONTENTS:
            end = costs.ends[name]
            row += [round(costs.events[name]), round(end), (step + end) / costs.steps[NO_PROFILER]]
        rows.append([*row, *[None] * (6 - len(row))])
    parts = ", ".join(f"{name} {value:.2f}" for name, value in costs.parts.items())
    sizes = ", ".join(f"{name} {value:.0f}" for name, value in costs.sizes.items())
    facts = [
        f"Per event, in µs: {parts}. On the training thread: {STOP}, {WRITE} and {FREE}.",
        f"In the file, in bytes per event: {sizes}.",
    ]
    control = (
        f"no profiler, again by first, {costs.control:.3f} (band {BAND[0]} to {BAND[1]}); "
        f"the process had {costs.core:.0%} of a core (at least {CORE:.0%})"
    )
    headings = [
        "contents",
        "loop, µs/step",
        "x no profiler",
        "events/step",
        "end, µs/step",
        "x, all",
    ]
    return Report("torch_profiler", headings, rows, bounds(costs), control, costs.quiet, facts)


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    torch.set_num_threads(1)
    costs = quiet_enough(
        lambda: _measure(chosen.quick), lambda one: one.quiet, 1 if chosen.quick else TRIES
    )
    return verdict(_report(costs), chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
