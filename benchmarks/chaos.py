"""What survives faults: ``python benchmarks/chaos.py``; 100,000 mutants take the most of it.

Trainings are killed, their disks fail, threads and forks crowd, every function of rlprof raises
once, and files are damaged, by the same trials that `tests/chaos` runs in small numbers. Counted
are trials that kept the promise of docs/reliability.md, steps that ended and are not in the run,
the time from the last recorded step to the last one, and how long the run takes to be read.
"""

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from _measure import Bound, Report, options, verdict

sys.path.insert(0, str(Path(__file__).parents[1]))
chaos: Any = {
    name: importlib.import_module(f"tests.chaos.{name}")
    for name in ("crowds", "disks", "injections", "kills", "mutants")
}

__all__ = ["faults", "main"]

COLUMNS = ("fault", "tried", "survived", "steps lost", "ms lost", "s to read")
Trials = Iterable[Any]
"""Outcomes, as `tests.chaos.outcomes` has them."""


def faults(kills: int, crowds: int, part: int) -> dict[str, Callable[[], Trials]]:
    """Return trials by the fault: so many kills, crowds, and every n-th function that raises."""
    return {
        "SIGKILL, 1 rank": lambda: (chaos["kills"].killed(seed, 1) for seed in range(kills)),
        "SIGKILL, 2 gloo ranks": lambda: (chaos["kills"].killed(seed, 2) for seed in range(kills)),
        "SIGKILL within a write": lambda: (
            chaos["kills"].killed_while_it_writes(call, share)
            for call in range(max(kills // 20, 1))
            for share in (0.0, 0.5, 1.0)
        ),
        "disk: a write fails once": lambda: _disks("once", "half, once"),
        "disk: all writes fail from one on": lambda: _disks("for good", "half, then for good"),
        **{
            f"{name} that mark at once": partial(_crowded, name, crowds)
            for name in chaos["crowds"].CROWDS
        },
        "an exception in a function of rlprof": lambda: _injections(part),
    }


def _crowded(name: str, number: int) -> Trials:
    work = chaos["crowds"].CROWDS[name]
    return (chaos["crowds"].crowded(work) for _ in range(number))


def _disks(*kinds: str) -> Trials:
    disks = chaos["disks"]
    writes = disks.count_calls()
    for error in disks.ERRORS:
        for fault in kinds:
            for call in range(writes):
                may_lose = fault.endswith("good") or call == writes - 1
                disk = disks.Disk(("write",), call, fault, error)
                yield disks.trained_on(disk, may_lose=may_lose)


def _injections(part: int) -> Trials:
    injections = chaos["injections"]
    for program in injections.PROGRAMS:
        losses = injections.losses_of(program)
        for place in injections.places(program)[::part]:
            yield injections.injected(program, place, losses)


def _row(fault: str, trials: Trials) -> tuple[list[Any], list[str]]:
    found = [*trials]
    read = max(each.readable_s for each in found)
    lost = [max(each.lost for each in found), max(each.lost_ms for each in found)]
    row = [fault, len(found), sum(not each.broken for each in found), *lost, read or None]
    return row, [f"{fault}: {each.broken}" for each in found if each.broken]


def main() -> int:
    """Try every fault and print what survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="trainings to kill, for 1 and 2")
    parser.add_argument("--mutants", type=int, default=100_000, help="damaged files to read")
    chosen = options(parser)
    if chosen.quick:
        chosen.kills, chosen.mutants = min(chosen.kills, 3), min(chosen.mutants, 60)
    logging.disable(logging.CRITICAL)  # every fault is logged
    warnings.simplefilter("ignore")
    rows: list[list[Any]] = []
    broken: list[str] = []
    for fault, trials in faults(chosen.kills, *((1, 40) if chosen.quick else (20, 1))).items():
        print(f"{fault} …", file=sys.stderr)
        row, why = _row(fault, trials())
        rows.append(row)
        broken += why
    print("damaged files …", file=sys.stderr)
    damaged = chaos["mutants"].all_damaged(chosen.mutants)
    others = [each for name, each in damaged.items() if name != "native"]
    kinds = {"damaged rank file": [damaged["native"]], "damaged file of another tool": others}
    for name, mutants in kinds.items():
        failed = {where: what for each in mutants for where, what in each.failed.items()}
        if not (number := sum(each.tried for each in mutants)):
            continue
        slowest_s = max(each.slowest_s for each in mutants)
        rows.append([name, number, number - len(failed), None, None, slowest_s])
        broken += [f"{where}: {what}" for where, what in failed.items()]
    tried, survived = (sum(int(row[at]) for row in rows) for at in (1, 2))
    bounds = [Bound("survived", survived, tried, "trials", at_least=True)]
    facts = [f"{survived:,} of {tried:,} trials survived", *broken]
    return verdict(Report("chaos", COLUMNS, rows, bounds, "none", True, facts), chosen)


if __name__ == "__main__":
    sys.exit(main())
