"""How long the command line takes to answer, from outside: ``python benchmarks/start.py``.

Each answer is a process of its own, as a person starts it; commands take turns. Reported is the
least wall time of each, which other work on the machine disturbs least, and its processor time.
The run is small: 20 steps of three stages. `rlprof summary` is measured on a copy without a cache,
and once more with it.

The control is an interpreter that does nothing, measured twice.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from _measure import Bound, Report, options, quiet_enough, verdict

from lightning_rlprof import ProfilerConfig, stage, start_session
from lightning_rlprof.records.run_directory import CACHE_FOLDER

__all__ = ["main"]

BAND = (0.9, 1.1)
TRIES = 3
ROUNDS = 15
BARE, AGAIN = "python -c pass", "python -c pass, again (A/A)"
FIRST, CACHED = "rlprof summary RUN, first", "rlprof summary RUN, cached"
PROGRAM = "rlprof run -- true"
LIMITS_MS = {
    "rlprof --version": 150,
    "rlprof --help": 150,
    "rlprof summary --help": 150,
    "rlprof su<Tab>": 150,
    PROGRAM: 250,
    CACHED: 400,
}

_RLPROF = ("-m", "lightning_rlprof")
_TAB = {"_RLPROF_COMPLETE": "complete_bash", "COMP_WORDS": "rlprof su", "COMP_CWORD": "1"}


def small_run(folder: Path) -> Path:
    """Record the run that is read."""
    config = ProfilerConfig.build(profile_save_path=str(folder))
    with start_session(config, name="small", rank=0, world_size=1) as session:
        for step in range(1, 21):
            session.begin_step(step)
            for name in ("actor_generate", "compute_reward", "actor_update"):
                with stage(name):
                    sum(range(1000))
            session.end_step()
    return folder / "small"


def _answer(words: tuple[str, ...], variables: dict[str, str]) -> tuple[float, float]:
    """Return the wall and processor milliseconds of one process."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        begun = perf_counter()
        process = os.posix_spawn(
            sys.executable,
            (sys.executable, *words),
            {**os.environ, **variables},
            file_actions=[(os.POSIX_SPAWN_DUP2, nowhere, each) for each in (1, 2)],
        )
        _, status, used = os.wait4(process, 0)
        wall = perf_counter() - begun
    finally:
        os.close(nowhere)
    if status:
        raise SystemExit(f"{' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    return wall * 1e3, (used.ru_utime + used.ru_stime) * 1e3


def measure(run: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the least wall and processor milliseconds of each command."""
    commands: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        BARE: (("-c", "pass"), {}),
        "rlprof --version": ((*_RLPROF, "--version"), {}),
        "rlprof --help": ((*_RLPROF, "--help"), {}),
        "rlprof summary --help": ((*_RLPROF, "summary", "--help"), {}),
        "rlprof su<Tab>": (_RLPROF, _TAB),
        PROGRAM: ((*_RLPROF, "run", "--", "true"), {}),
        FIRST: ((*_RLPROF, "summary", str(run)), {}),
        CACHED: ((*_RLPROF, "summary", str(run)), {}),
        AGAIN: (("-c", "pass"), {}),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, (words, variables) in commands.items():
            if name == FIRST:
                shutil.rmtree(run / CACHE_FOLDER, ignore_errors=True)
            found[name].append(_answer(words, variables))
    return {
        name: (min(wall for wall, _ in times), min(used for _, used in times))
        for name, times in found.items()
    }


def main(chosen: argparse.Namespace) -> int:
    """Measure and judge; return the exit status."""

    def control(found: dict[str, tuple[float, float]]) -> float:
        return found[AGAIN][0] / found[BARE][0]

    def quiet(found: dict[str, tuple[float, float]]) -> bool:
        return BAND[0] <= control(found) <= BAND[1]

    with tempfile.TemporaryDirectory() as folder:
        run = small_run(Path(folder))
        rounds = 1 if chosen.quick else ROUNDS
        found = quiet_enough(lambda: measure(run, rounds), quiet, 1 if chosen.quick else TRIES)
    rows = [[name, round(wall), round(used)] for name, (wall, used) in found.items()]
    bounds = [Bound(name, found[name][0], limit, "ms") for name, limit in LIMITS_MS.items()]
    text = f"{control(found):.2f}"
    return verdict(
        Report("start", ["command", "ms", "CPU ms"], rows, bounds, text, quiet(found)), chosen
    )


if __name__ == "__main__":
    sys.exit(main(options(__doc__.partition("\n")[0])))
