"""What ``rlprof watch`` takes beside many ranks that write: ``python benchmarks/watch.py``.

Simulated ranks append a step of 40 spans a second each, in a process of their own. The view is in
another one: it reads, computes the tables and lays them out for a terminal of 160 columns and as
the page of ``rlprof serve``, once a second or less often, as the verbs do. Counted are the CPU time
of its process per second, with the search for problems in a thread, and the peak of memory, Python
included.
A refresh reads more than a second of steps on a busy machine. The first one, which reads the ends
of all files, is shown apart.

The control is the largest case measured twice.
"""

import argparse
import io
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from _measure import Bound, Report, options, verdict

from lightning_rlprof.cli.serve.live_page import view_as_json
from lightning_rlprof.loaders.live_run import LiveRun
from lightning_rlprof.records.run_directory import TraceWriter, rank_files
from lightning_rlprof.report.live_view import LiveScreen
from lightning_rlprof.report.terminal import render
from lightning_rlprof.testing import make_header

__all__ = ["main", "measured", "steps_of", "watched"]

SPANS, STAGES = 40, 12  # of a step
_MAX_BEFORE, _MAX_RANK_STEPS = 1_000, 64_000  # steps in the files at the start
_SECONDS = 20  # that are measured
_MOST_CORES, _MOST_MB = 1.0, 500.0
_PACES = 7  # that ranks have
_BAND = 0.25  # of the control
_FEWEST = 8  # refreshes
_Spawn = multiprocessing.get_context("spawn")


def steps_of(rank: int, first: int, count: int) -> bytes:
    """Return the lines of some steps of a second each."""
    lines: list[tuple[Any, ...]] = []
    for step in range(first, first + count):
        start = step * 10**9
        each = 10**9 // SPANS
        for at in range(SPANS - 1):
            kind = "stage" if at < STAGES else "region"
            memory = {"host_rss_bytes": 10**9 + step} if at < STAGES else None
            begin = start + at * each
            end, number = begin + each - rank % _PACES, step * 100 + at + 1
            span = ("span", f"{kind}_{at}", kind, step, begin, end, 7, number)
            lines.append((*span, step * 100, memory))
        whole = ("span", "step", "step", step, start, start + 10**9, 7, step * 100)
        lines.append((*whole, None, None))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _before(ranks: int) -> int:
    """Return how many steps are in the file of each rank at the start."""
    return min(_MAX_BEFORE, _MAX_RANK_STEPS // ranks)


def _write(run: Path, seconds: int, begins: Any, ended: Any) -> None:
    """Append a step to each file, once a second, after the first refresh."""
    begins.wait()
    files, begin = rank_files(run), time.monotonic()
    for second in range(seconds):
        data = steps_of(0, _before(len(files)) + 1 + second, 1)
        for path in files:
            with path.open("ab") as file:
                file.write(data)
        time.sleep(max(begin + second + 1 - time.monotonic(), 0))
    ended.set()


def watched(run: Path, begins: Any, ended: Any) -> dict[str, float]:
    """Watch a run until its ranks have written all, and return what it took."""
    from rich.console import Console

    live = LiveScreen(LiveRun(run))
    took: list[float] = []
    begin = spent = 0.0
    while not took or not ended.is_set():
        start = time.process_time()
        screen = Console(file=io.StringIO(), width=160, force_terminal=True)
        view = live.view()
        for table in view.tables:
            screen.print(render(table))
        view_as_json(run, view)
        took.append(time.process_time() - start)
        if len(took) == 1:
            begin, spent = time.monotonic(), time.process_time()
        begins.set()
        time.sleep(live.pause_s)
    last = max(each.last_step for each in live.run.ranks.values())
    steps = last - _before(len(live.run.ranks))
    return {
        "cores": (time.process_time() - spent) / (time.monotonic() - begin),
        "refresh_ms": median(took[1:]) * 1e3,
        "worst_ms": max(took[1:]) * 1e3,
        "first_ms": took[0] * 1e3,
        "mb": _peak_mb(),
        "steps": steps,
        "refreshes": len(took) - 1,
    }


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def _watch(run: Path, begins: Any, ended: Any, answer: Any) -> None:
    answer.put(watched(run, begins, ended))


def measured(ranks: int, seconds: int) -> dict[str, float]:
    """Return what watching so many ranks took; the simulated ones write meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        before = [steps_of(rank, 1, _before(ranks)) for rank in range(min(ranks, _PACES))]
        for rank in range(ranks):
            writer = TraceWriter(run, make_header(rank))
            writer.close()
            with writer.path.open("ab") as file:
                file.write(before[rank % _PACES])
        answer: Any = _Spawn.Queue()
        begins, ended = _Spawn.Event(), _Spawn.Event()
        writing = _Spawn.Process(target=_write, args=(run, seconds, begins, ended))
        watching = _Spawn.Process(target=_watch, args=(run, begins, ended, answer))
        for process in (writing, watching):
            process.start()
        found: dict[str, float] = answer.get(timeout=20 * seconds + 120)
        for process in (writing, watching):
            process.join()
        if found["steps"] < 1:
            raise AssertionError("nothing was appended while it was watched")
        return found


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    sizes, seconds = ((2, 16), 4) if chosen.quick else ((8, 64, 1_024), _SECONDS)
    rows, costs = [], []
    for name, ranks in [*((f"{size:,} ranks", size) for size in sizes), ("again (A/A)", sizes[-1])]:
        cost = measured(ranks, seconds)
        costs.append(cost)
        kept = [cost[key] for key in ("cores", "refresh_ms", "worst_ms", "first_ms", "mb")]
        rows.append([name, len(steps_of(0, 1, 1)) * ranks / 1e6, round(cost["refreshes"]), *kept])
    largest, again = costs[-2:]
    apart = abs(again["cores"] / largest["cores"] - 1)
    most = f"{sizes[-1]:,} ranks"
    bounds = [
        Bound(f"{most}, CPU", max(largest["cores"], again["cores"]), _MOST_CORES, "cores"),
        Bound(f"{most}, memory", max(largest["mb"], again["mb"]), _MOST_MB, "MB"),
    ]
    facts = [f"Each rank appends a step of {SPANS} spans a second, {STAGES} of them stages."]
    columns = (
        "watched",
        "MB/s",
        "refreshes",
        "cores",
        "refresh, ms",
        "worst, ms",
        "first, ms",
        "peak, MB",
    )
    control = f"{most} again: {apart:.0%} apart"
    often = min(largest["refreshes"], again["refreshes"]) >= _FEWEST
    quiet = apart < _BAND and often
    return verdict(Report("watch", columns, rows, bounds, control, quiet, facts), chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))
