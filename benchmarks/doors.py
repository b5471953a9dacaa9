"""What `rlprof run` costs a step of a framework: ``python benchmarks/doors.py -- python train.py``.

The command prints a line per step; the time of a step is that between two such lines. Each round
runs the command three times in turn: plain, under `rlprof run`, and plain again, which is the A/A
control. A run counts by its median step, without the first steps. Reported are the median of the
rounds and their range, in milliseconds and as a share of the plain step. Nothing is promised: two
CPU cores are noisier than what is measured, so read the overhead next to the control.

Without a command it measures the example of codetiming.
"""

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _measure import Report, options, verdict

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
SKIPPED = 2
RLPROF = (sys.executable, "-m", "lightning_rlprof", "run", "--")


def step_ms(command: list[str], line: str, per: int) -> float:
    """Run a command; return its median step, in milliseconds.

    Args:
        command: Program and arguments.
        line: Pattern of a line that ends a step. If it has a group, that is a number which counts
            on; the time of ``per`` of it is one step.
        per: How much of that number is one step.
    """
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    seen: list[tuple[float, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command, env=environ, cwd=folder, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process,
    ):  # fmt: skip
        for text in process.stdout or ():
            if found := re.search(line, text):
                number = float(found[1]) / per if found.groups() else len(seen)
                seen.append((number, time.perf_counter() * 1e3))
    if process.returncode or len(seen) < SKIPPED + 3:
        raise SystemExit(
            f"{' '.join(command)}: status {process.returncode}, {len(seen)} lines match {line}"
        )
    if re.compile(line).groups:
        (first, begun), (last, ended) = seen[SKIPPED], seen[-1]
        return (ended - begun) / (last - first)
    ends = [at for _, at in seen[SKIPPED:]]
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def main(chosen: argparse.Namespace) -> int:
    """Measure and print; return the exit status."""
    example = [sys.executable, str(ROOT / "examples" / "codetiming" / "train.py")]
    command = chosen.command or example
    found: list[tuple[float, float, float]] = []
    for _ in range(1 if chosen.quick else chosen.rounds):
        plain = step_ms(command, chosen.line, chosen.per)
        recorded = step_ms([*RLPROF, *command], chosen.line, chosen.per)
        found.append((plain, recorded, step_ms(command, chosen.line, chosen.per)))
    step = statistics.median(each for plain, _, again in found for each in (plain, again))
    overheads = [recorded - (plain + again) / 2 for plain, recorded, again in found]
    control = [again - plain for plain, _, again in found]
    rows = [
        [name, *(round(at, 2) for at in (middle, min(values), max(values))),
         round(100 * middle / step, 1)]
        for name, values in (("rlprof run", overheads), ("plain again (A/A)", control))
        for middle in [statistics.median(values)]
    ]  # fmt: skip
    columns = ["against plain", "median ms", "least ms", "most ms", "% of step"]
    fact = f"A plain step takes {step:.1f} ms; {len(found)} rounds."
    text = f"{statistics.median(control):+.2f} ms"
    report = Report("doors", columns, rows, [], text, quiet=True, facts=[fact])
    return verdict(report, chosen)


def _chosen() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", nargs="*", help="program and arguments, after --")
    parser.add_argument("--line", default="^step ", help="pattern of a line that ends a step")
    parser.add_argument("--per", type=int, default=1, help="how much of its number is a step")
    parser.add_argument("--rounds", type=int, default=5)
    return options(parser)


if __name__ == "__main__":
    sys.exit(main(_chosen()))
