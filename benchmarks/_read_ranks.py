"""Runs of our own with many ranks and steps, and what each verb takes of them."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from _measure import CORE, Bound, Report

from lightning_rlprof.records.records import FORMAT, Header
from lightning_rlprof.records.run_directory import CACHE_FOLDER

__all__ = ["COMMANDS", "measure", "report", "write_run"]

_RLPROF = ("-m", "lightning_rlprof")
_END = "import sys, pathlib; from lightning_rlprof.integrations.end_of_run import print_summary; "
_END += "print_summary(pathlib.Path(sys.argv[1]), 'finished')"
COMMANDS = {
    "end of fit": ("-c", _END, "{run}"),
    "summary, first": (*_RLPROF, "summary", "{run}"),
    "ingest": (*_RLPROF, "ingest", "{run}"),
    "summary, cached": (*_RLPROF, "summary", "{run}"),
    "report, cached": (*_RLPROF, "report", "{run}", "-o", "{page}", "--force"),
}
"""What is measured of a run, in this order."""

_LIMITS = {
    "end of fit": (2.0, 200.0),
    "summary, first": (8.0, 700.0),
    "summary, cached": (2.0, 300.0),
    "report, cached": (10.0, 500.0),
}

_MS = 1_000_000
_STAGES = {
    "weight_sync": 2,
    "actor_generate": 50,
    "compute_reward": 3,
    "actor_compute_log_prob": 9,
    "compute_advantage": 1,
    "actor_update": 40,
}
"""Stages of a step, and how many milliseconds each takes."""
_GAP_NS = 20_000
_TOKENS = 4_096
_THREAD = 7_001


def write_run(folder: Path, ranks: int, steps: int) -> Path:
    """Write a run of GRPO of which all ranks leave the update together; return where it is."""
    run = folder / f"{ranks}x{steps}"
    if run.exists():
        return run
    run.mkdir(parents=True)
    random, names = np.random.default_rng(0), list(_STAGES)
    usual = np.array([*_STAGES.values()]) * _MS
    common = usual * random.normal(1, 0.02, (steps, len(usual))).clip(0.9)
    began = (np.arange(steps) * (usual.sum() * 1.2)).astype(np.int64)
    for rank in range(ranks):
        header = Header(
            FORMAT, "job", rank, ranks, "actor", "host", 1, "cpu", 10**18, 0, {"spans": True}
        )
        took = (common * random.normal(1, 0.01, common.shape)).astype(np.int64)
        ends = began[:, None] + np.cumsum(took + _GAP_NS, axis=1)
        ends[:, -1] = began + int(usual.sum() * 1.15)  # They leave together.
        starts = np.column_stack([began + _GAP_NS, ends[:, :-1] + _GAP_NS])
        tokens = random.integers(_TOKENS, 2 * _TOKENS, steps).tolist()
        rows = zip(starts.tolist(), ends.tolist(), tokens, began.tolist(), strict=True)
        with (run / f"rank-{rank:05d}.jsonl").open("wb") as file:
            file.write(msgspec.json.encode(header) + b"\n")
            file.write(f'["thread",{_THREAD},"MainThread"]\n'.encode())
            for step, (start, end, count, first) in enumerate(rows, start=1):
                number = (step - 1) * (len(names) + 1)
                file.write(_step(names, step, start, end, count, first, number).encode())
            file.write(f'["end",{ends[-1, -1] + _MS},"finished"]\n'.encode())
    return run


def _step(
    names: list[str], step: int, start: list[int], end: list[int], count: int, first: int, own: int
) -> str:
    lines = []
    for at, name in enumerate(names):
        counters = f'{{"tokens":{count}}}' if name == "actor_generate" else "null"
        lines.append(
            f'["span","{name}","stage",{step},{start[at]},{end[at]},{_THREAD},'
            f"{own + at + 2},{own + 1},{counters}]\n"
        )
    last = end[-1] + _GAP_NS
    lines.append(f'["span","step","step",{step},{first},{last},{_THREAD},{own + 1},null,null]\n')
    return "".join(lines)


@dataclass(frozen=True)
class Took:
    """What one process took.

    Attributes:
        seconds: By the clock.
        cpu: On all cores.
        peak: Of its memory, in megabytes.
    """

    seconds: float
    cpu: float
    peak: float


def measure(folder: Path, sizes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[Took]]:
    """Return what each of `COMMANDS` takes of runs of some ranks and steps, one after another."""
    found = {}
    for ranks, steps in sizes:
        run = write_run(folder, ranks, steps)
        shutil.rmtree(run / CACHE_FOLDER, ignore_errors=True)
        page = folder / "report.html"
        words = [[word.format(run=run, page=page) for word in each] for each in COMMANDS.values()]
        found[ranks, steps] = [*map(_alone, words)]
    return found


def _alone(words: Sequence[str]) -> Took:
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process.stderr:
        said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # Popen can't ask for it again.
    if process.returncode:
        raise SystemExit(f"{words}: failed: {said[-2000:]}")
    seconds = time.perf_counter() - start
    return Took(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6)


def report(found: dict[tuple[int, int], list[Took]]) -> Report:
    """Lay out what was measured; the bounds are of the largest run."""
    rows = [
        [f"{ranks} × {steps:,}: {name}", took.seconds, took.cpu, round(took.peak)]
        for (ranks, steps), own in found.items()
        for name, took in zip(COMMANDS, own, strict=True)
    ]
    ranks, steps = max(found)
    largest = dict(zip(COMMANDS, found[ranks, steps], strict=True))
    bounds = []
    for name, (seconds, megabytes) in _LIMITS.items():
        text, took = f"{ranks} × {steps:,}, {name}", largest[name]
        bounds.append(Bound(text, took.cpu, seconds, "s of CPU"))
        bounds.append(Bound(f"{text}, peak", took.peak, megabytes, "MB"))
    share = sum(took.cpu for took in largest.values())
    share /= sum(took.seconds for took in largest.values())
    control = f"the processes had {share:.0%} of a core (at least {CORE:.0%})"
    heads = ["ranks × steps: command", "s", "CPU s", "peak, MB"]
    return Report("read, ranks", heads, rows, bounds, control, share >= CORE)
