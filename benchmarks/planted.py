"""Faults that rlprof names of faults that are planted: ``python benchmarks/planted.py``.

Each program trains with one fault, and once without any. A fault is found if it is one of the first
three problems or ideas of ``rlprof findings``, which is all that an agent has to read. Problems of
a training without a fault are false alarms.

Programs are those of `planted_programs` and the demo. Lightning's and TRL's know nothing of
rlprof: ``rlprof run`` records them. A machine with other work adds waiting for a CPU to every
program, which is then named, too, and first: the control without a fault shows it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from _measure import Bound, Report, options, verdict

__all__ = ["FAULTS", "Fault", "first_three", "main", "report"]

FOLDER = Path(__file__).parent / "planted_programs"
RLPROF = (sys.executable, "-m", "lightning_rlprof")
_TIMEOUT_S = 600


class Fault(NamedTuple):
    """A fault in a program.

    Attributes:
        program: ``demo``, or the name of a file of `planted_programs`.
        name: What is planted, an argument of the program; empty for none.
        expected: The problem that `rlprof findings` must name; any of several, after a comma.
        words: Further words of a command line of the demo.
    """

    program: str
    name: str
    expected: str
    words: tuple[str, ...] = ()


_OF_PLAIN = "reward untraced weight-sync rollout-tail garbage-collection cpu-contention"
FAULTS = (
    Fault("demo", "slow-step", "outlier-step"),
    Fault("demo", "shift", "slower-since"),
    Fault("demo", "hang", "hang"),
    Fault("demo", "oom", "out-of-memory"),
    Fault("demo", "leak", "memory-growth"),
    Fault("demo", "slow-rank", "straggler", ("--ranks", "2", "--slow-rank", "1", "--steps", "60")),
    *(Fault("plain", name, name) for name in _OF_PLAIN.split()),
    Fault("plain", "slower-over-time", "slower-over-time,slower-since"),
    Fault("plain", "", ""),
    *(
        Fault("lightning_module", name, name)
        for name in ("data-wait", "checkpoint-eval", "logging", "memory-growth")
    ),
    Fault("lightning_module", "", ""),
    *(Fault("trl_grpo", name, name) for name in ("reward", "checkpoint-eval")),
    Fault("trl_grpo", "", ""),
)
_NEEDS = {"demo": "reasoning_gym", "lightning_module": "lightning", "trl_grpo": "trl"}


def first_three(fault: Fault, folder: Path) -> list[str]:
    """Train with a fault in a folder; return the ids of what comes first, at most three."""
    if fault.program == "demo":
        words = fault.words or ("--inject", fault.name)
        command = [*RLPROF, "demo", "--quiet", *words]
    else:
        program = [sys.executable, str(FOLDER / f"{fault.program}.py"), fault.name]
        recorded = fault.program == "plain"
        command = program if recorded else [*RLPROF, "run", "--", *program]
    # A training that is to hang or to fail ends with an error.
    subprocess.run(command, cwd=folder, timeout=_TIMEOUT_S, capture_output=True, check=False)
    done = subprocess.run(
        [*RLPROF, "findings", "--json"], cwd=folder, capture_output=True, check=True
    )
    found = json.loads(done.stdout)
    return [each["id"] for each in (*found["problems"], *found["ideas"])][:3]


def report(found: dict[Fault, list[str]], left_out: list[str]) -> Report:
    """Return the table of faults, and how many were found."""
    rows, hits, alarms = [], 0, 0
    for fault, ids in found.items():
        place = next((at for at, each in enumerate(ids) if each in fault.expected.split(",")), None)
        hits += place is not None
        alarms += not fault.name and bool({*ids} - {"rollout", "critic", "clipped-responses"})
        line = "**missed**" if place is None else f"line {place + 1}"
        said = ", ".join(ids) or "nothing"
        program = fault.program.partition("_")[0]
        rows.append((program, fault.name or "(none)", line if fault.name else "", said))
    planted = sum(bool(fault.name) for fault in found)
    controls = len(found) - planted
    return Report(
        "planted faults",
        ("program", "planted", "found in", "first three of `rlprof findings`"),
        rows,
        [Bound("faults found", hits, round(0.9 * planted), f"of {planted}", at_least=True)],
        f"{alarms} of {controls} programs without a fault have a problem",
        alarms == 0,
        [f"{hits} of {planted} planted faults are in the first three lines", *left_out],
    )


def main() -> int:
    """Plant each fault; return 1 if fewer than nine of ten are found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="programs or faults by their names")
    chosen = options(parser)
    found: dict[Fault, list[str]] = {}
    left_out = []
    wanted = [
        each for each in FAULTS if not chosen.only or {each.program, each.name} & {*chosen.only}
    ]
    for fault in wanted[: 3 if chosen.quick else None]:
        if (needs := _NEEDS.get(fault.program)) and find_spec(needs) is None:
            left_out.append(f"left out: {fault.program} {fault.name}, {needs} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[fault] = first_three(fault, Path(folder))
        print(fault.program, fault.name or "(none)", found[fault], file=sys.stderr, flush=True)
    return verdict(report(found, left_out), chosen)


if __name__ == "__main__":
    sys.exit(main())
