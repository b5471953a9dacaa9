"""What one NVTX range of the recorder costs, beside nvtx.annotate: ``python benchmarks/ranges.py``.

A range is one call of the recorder's ``enter`` and one of its ``exit``, warm, in a tight loop, less
what the empty loop takes. Without a tool that is what a run pays in which Nsight Systems is not
there. The tool here is a real one that does nothing: gcc builds it from
``tests/doubles/nvtx/listener.c``. Without gcc that column is left out, and its bounds with it.

NVTX looks for a tool once, at the first call of a process. So each column comes from three
processes of its own, turn by turn with those of the other; inside each, contenders are interleaved
in random order, and what is reported is the median over the three of their medians.

Two controls: the recorder is measured twice in each process, and the processes must have had most
of a core. Outside of their bands the machine is too noisy: up to three tries, then it fails.
"""

# Not named nvtx.py: beside the other benchmarks that would hide the package nvtx from all of them.

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from _measure import CORE, Bound, Report, options, quiet_enough, verdict
from _ranges import AGAIN, INSIDE, MOVING, OURS

__all__ = ["NO_TOOL", "TOOL", "Costs", "bounds", "main"]

TRIES = 3
ROUNDS = 3
BAND = (0.9, 1.1)
NO_TOOL, TOOL = "no tool", "a tool that does nothing"

_SOURCE = Path(__file__).parents[1] / "tests" / "doubles" / "nvtx" / "listener.c"
_FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-DSILENT")


@dataclass(frozen=True)
class Costs:
    """What was measured.

    Attributes:
        columns: Tool to contender to nanoseconds per range.
        core: The smallest share of a core that a process had.
    """

    columns: Mapping[str, Mapping[str, float]]
    core: float

    @property
    def control(self) -> dict[str, float]:
        """The recorder measured a second time, as a multiple of the first, by tool."""
        return {tool: costs[AGAIN] / costs[OURS] for tool, costs in self.columns.items()}

    @property
    def quiet(self) -> bool:
        """Whether both controls are inside of their bands."""
        in_band = all(BAND[0] <= ratio <= BAND[1] for ratio in self.control.values())
        return in_band and self.core >= CORE


def bounds(costs: Costs) -> list[Bound]:
    """Return what a range may cost."""
    limits = {NO_TOOL: (0.2, (OURS,)), TOOL: (0.6, (OURS, MOVING, INSIDE))}
    return [
        Bound(f"{name}, {tool}", found[name] / 1e3, limits[tool][0], "µs")
        for tool, found in costs.columns.items()
        for name in limits[tool][1]
    ]


def _build(folder: Path) -> Path | None:
    """Return the tool that does nothing, or None with a message if there is no gcc."""
    gcc = shutil.which("gcc")
    if gcc is None:
        print(f"NOT MEASURED: {TOOL}: no gcc to build it with", file=sys.stderr)
        return None
    library = folder / "silent.so"
    subprocess.run([gcc, *_FLAGS, "-o", str(library), str(_SOURCE)], check=True)
    return library


def _in_a_process(library: Path | None, repeats: int) -> tuple[dict[str, float], float]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("NVTX")}
    if library is not None:
        variables["NVTX_INJECTION64_PATH"] = str(library)
    command = [sys.executable, str(Path(__file__).with_name("_ranges.py")), str(repeats)]
    done = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    found, core = json.loads(done.stdout)
    return found, core


def _measure(library: Path | None, quick: bool) -> Costs:
    rounds, repeats = (1, 20) if quick else (ROUNDS, 300)
    tools = {NO_TOOL: None} | ({TOOL: library} if library else {})
    found: dict[str, list[dict[str, float]]] = {tool: [] for tool in tools}
    cores = []
    for _ in range(rounds):
        for tool, path in tools.items():
            costs, core = _in_a_process(path, repeats)
            found[tool].append(costs)
            cores.append(core)
    return Costs({tool: _medians(costs) for tool, costs in found.items()}, min(cores))


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(costs[name] for costs in rounds) for name in rounds[0]}


def _report(costs: Costs) -> Report:
    rows = [
        [name, *(round(found[name]) for found in costs.columns.values())]
        for name in costs.columns[NO_TOOL]
    ]
    again = ", ".join(f"{tool} {ratio:.3f}" for tool, ratio in costs.control.items())
    control = (
        f"the recorder again by the recorder: {again} (band {BAND[0]} to {BAND[1]}); "
        f"each process had at least {costs.core:.0%} of a core (at least {CORE:.0%})"
    )
    missing = [] if TOOL in costs.columns else [f"NOT MEASURED: {TOOL} (no gcc)."]
    headings = ["ns per range", *costs.columns]
    return Report("ranges", headings, rows, bounds(costs), control, costs.quiet, missing)


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        library = _build(Path(folder))
        costs = quiet_enough(
            lambda: _measure(library, chosen.quick),
            lambda one: one.quiet,
            1 if chosen.quick else TRIES,
        )
    return verdict(_report(costs), chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
