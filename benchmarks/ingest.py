"""What ingesting the traces of many ranks takes: ``python benchmarks/ingest.py --full``.

Traces of torch.profiler, one per rank, are written just before they are ingested and removed
afterwards, 64 at a time, so that a disk of a few gigabytes is enough for 1,024 ranks. Timed is each
rank in its worker, from the file to all tables in its cache. Memory is the largest sum over all
processes of ``Pss``, which counts what they share once; this process and its interpreter included.

The promise is that a rank costs the same whether it is the first or the last, and that memory does
not grow with their number. The control is the spread inside of the first quarter.
"""

import argparse
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from _measure import Bound, Report, verdict

from lightning_rlprof.store.ingest import ingest

__all__ = ["Cost", "main", "plot", "write_rank"]

RANKS, EVENTS = 1_024, 100_000
SMALL = (8, 2_000)
BATCH = 64
LIMIT_MB = 1_000
FLAT = 1.25
_PERIOD_S = 0.2
_WRITTEN = 1_000

_HEAD = (
    '{{"schemaVersion": 1, "distributedInfo": {{"rank": {rank}, "world_size": {ranks}}},\n'
    '"deviceProperties": [{{"id": 0, "name": "synthetic"}}],\n"traceEvents": [\n'
)
_TAIL = '{"ph": "i", "name": "end", "pid": 1, "tid": 1, "ts": 0.0, "s": "g"}],\n'
_BASE = '"baseTimeNanoseconds": 1700000000000000000}\n'
_STEP = (
    '{{"ph": "X", "cat": "user_annotation", "name": "{name}", "pid": 1, "tid": 1, '
    '"ts": {at}.000, "dur": {us}.000}},\n'
)
# An operator, the call that it makes, and the kernel that this launches.
_LAUNCH = (
    '{{"ph": "X", "cat": "cpu_op", "name": "aten::op_{name}", "pid": 1, "tid": 1, '
    '"ts": {at}.125, "dur": 9.500, "args": {{"External id": {id}, "Sequence number": {id}}}}},\n'
    '{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, '
    '"ts": {at}.250, "dur": 4.750, "args": {{"External id": {id}, "correlation": {id}}}}},\n'
    '{{"ph": "X", "cat": "kernel", "name": "void kernel_{name}<float, 4>(float*, int)", "pid": 0, '
    '"tid": 7, "ts": {at}.500, "dur": 8.625, "args": {{"device": 0, "stream": 7, '
    '"correlation": {id}, "grid": [64, 1, 1], "block": [256, 1, 1]}}}},\n'
)


@dataclass
class Cost:
    """What the ranks took.

    Attributes:
        seconds: Of each rank, in order.
        megabytes: Peak of each batch, over all processes.
        size: Bytes of one trace.
    """

    seconds: list[float]
    megabytes: list[float]
    size: int

    @property
    def growth(self) -> float:
        """Median of the last quarter of the ranks by that of the first."""
        quarter = max(len(self.seconds) // 4, 1)
        return median(self.seconds[-quarter:]) / median(self.seconds[:quarter])


def write_rank(path: Path, rank: int, ranks: int, events: int) -> int:
    """Write a trace with about that number of events, a third of them kernels; return its bytes."""
    with path.open("w") as file:
        file.write(_HEAD.format(rank=rank, ranks=ranks))
        for first in range(0, events // 3, _WRITTEN):
            last = min(first + _WRITTEN, events // 3)
            at, us, step = first * 10, (last - first) * 10, 1 + first // _WRITTEN
            file.write(_STEP.format(name=f"ProfilerStep#{step}", at=at, us=us))
            file.write(_STEP.format(name="actor_update", at=at, us=us))
            file.writelines(
                _LAUNCH.format(name=(each * 7 + rank) % 400, at=each * 10, id=each + 1)
                for each in range(first, last)
            )
        file.write(_TAIL + _BASE)
    return path.stat().st_size


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    ranks, events = (RANKS, EVENTS) if chosen.full else SMALL
    cost = _measure(chosen.ranks or ranks, chosen.events or events, chosen.jobs)
    if chosen.plot:
        chosen.plot.write_text(plot(cost))
    chosen.quick = not chosen.full
    rows = [
        [f"{first + 1} to {first + len(own)}", median(own), max(own), round(peak)]
        for (first, own), peak in zip(_batches(cost.seconds), cost.megabytes, strict=True)
    ]
    bounds = [
        Bound("peak of all processes", max(cost.megabytes), LIMIT_MB, "MB"),
        Bound("the last quarter of the ranks by the first", cost.growth, FLAT, ""),
    ]
    rate = cost.size / median(cost.seconds) / 1e6
    facts = [f"A trace has {cost.size / 1e6:.1f} MB, read and kept at {rate:.0f} MB/s per process."]
    quarter = sorted(cost.seconds[: max(len(cost.seconds) // 4, 1)])
    spread = quarter[len(quarter) * 3 // 4] / quarter[len(quarter) // 4]
    control = f"upper by lower quartile of the first quarter {spread:.2f} (up to {FLAT})"
    headings = ["ranks", "median, s", "slowest, s", "peak, MB"]
    return verdict(Report("ingest", headings, rows, bounds, control, spread <= FLAT, facts), chosen)


def plot(cost: Cost) -> str:
    """Return a picture of the seconds per rank, one dot each, as SVG."""
    top, count = max(cost.seconds) * 1.1, len(cost.seconds)
    dots = "".join(
        f'<circle cx="{60 + 620 * at / count:.1f}" cy="{260 - 230 * each / top:.1f}" r="1.5"/>'
        for at, each in enumerate(cost.seconds)
    )
    text = 'font-family="sans-serif" font-size="13" fill="#888"'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 300">'
        f'<path d="M60 30V260H680" fill="none" stroke="#888"/><g fill="#2f8f83">{dots}</g>'
        f'<text x="60" y="20" {text}>seconds per rank, up to {top:.2f}</text>'
        f'<text x="60" y="285" {text}>rank 1</text>'
        f'<text x="620" y="285" {text}>rank {count:,}</text></svg>\n'
    )


def _measure(ranks: int, events: int, jobs: int) -> Cost:
    cost = Cost([], [], 0)
    for first in range(0, ranks, BATCH):
        folder = Path(tempfile.mkdtemp(prefix="rlprof-ingest-"))
        try:
            for rank in range(first, min(first + BATCH, ranks)):
                cost.size = write_rank(folder / f"rank{rank:04}.json", rank, ranks, events)
            with _peak() as peak:
                table = ingest([folder], jobs=jobs)
        finally:
            shutil.rmtree(folder)
        if set(table.column("state")) != {"cached"}:
            raise AssertionError(f"not all ranks were made: {table.column('why')}")
        cost.seconds += [float(each or 0) for each in table.column("seconds")]
        cost.megabytes.append(peak[0])
    return cost


def _batches(seconds: Sequence[float]) -> Iterator[tuple[int, Sequence[float]]]:
    for first in range(0, len(seconds), BATCH):
        yield first, seconds[first : first + BATCH]


@contextmanager
def _peak() -> Iterator[list[float]]:
    """Watch this process and all below it; the list then holds their largest sum in MB."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(_PERIOD_S):
            peak[0] = max(peak[0], sum(map(_pss_mb, _tree())))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def _tree() -> list[int]:
    """Return the ids of this process and all below it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdigit() else ""
        except OSError:  # ended meanwhile
            continue
        if stat:
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _pss_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    text = f"{RANKS:,} ranks of {EVENTS:,} events; unset, see that it runs, judge nothing"
    parser.add_argument("--full", action="store_true", help=text)
    parser.add_argument("--ranks", type=int, help="number of ranks")
    parser.add_argument("--events", type=int, help="number of events in each")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it as SVG")
    page = "docs/internals/performance.md"
    parser.add_argument("--markdown", action="store_true", help=f"print the tables of {page}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_options()))
