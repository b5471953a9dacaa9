"""Kineto → Parquet beside what the peers do with the same file, interleaved, a process each."""

import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from _measure import Bound, Report
from _peers import Run, alone
from _read_traces import tiled_trace

__all__ = ["AGAIN", "BAND", "OURS", "Trace", "bounds", "measure", "real", "report", "traces"]

OURS, AGAIN, ORJSON = "rlprof", "rlprof again (A/A)", "gzip + orjson"
BAND = (0.8, 1.25)
_LARGE = 500.0  # megabytes from which on the peers are asked once: they take a minute each


@dataclass
class Trace:
    """One file, or some read one after the other, and what each way of reading took.

    Attributes:
        name: As the table says it.
        paths: The files.
        megabytes: JSON in them, unpacked.
        judged: Bounds are about it.
        runs: By way, one of each round; None where it was left out of a round.
    """

    name: str
    paths: list[Path]
    megabytes: float
    judged: bool = True
    runs: dict[str, list[Run | None]] = field(default_factory=dict)

    def typical(self, way: str, key: str = "seconds") -> float:
        """Return the median of one way."""
        return float(median(getattr(run, key) for run in self.runs[way] if run is not None))

    def ratio(self, way: str, key: str = "seconds") -> float:
        """Return the median of one way by ours of the same round."""
        rounds = zip(self.runs[way], self.runs[OURS], strict=True)
        pairs = [(getattr(a, key), getattr(b, key)) for a, b in rounds if a and b]
        return float(median(theirs / ours for theirs, ours in pairs))

    @property
    def speed(self) -> float:
        """Megabytes of JSON that we read in a second of one core."""
        return self.megabytes / self.typical(OURS, "cpu")


def traces(folder: Path, sizes: list[float]) -> list[Trace]:
    """Return generated traces, packed and, up to 100 MB, plain, too; those that are there stay."""
    found = []
    for size in sizes:
        for end in ("json.gz", "json") if size <= 100 else ("json.gz",):
            path = folder / f"{size:g}-{end.replace('.', '-')}" / f"rank-0.{end}"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f"part-{path.name}")
                tiled_trace(part, size)
                part.replace(path)
            found.append(Trace(f"{size:g} MB, .{end}", [path], size))
    return found


def real(folder: Path, copies: Path) -> Trace | None:
    """Return the real traces of a folder, copied, as reading leaves a cache; None without any."""
    files = sorted(folder.glob("**/*.json.gz")) if folder.is_dir() else []
    if not files:
        return None
    import gzip

    paths, size = [], 0
    for number, file in enumerate(files):
        path = copies / "real" / str(number) / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, path)
        size += len(gzip.decompress(path.read_bytes()))
        paths.append(path)
    return Trace(f"{len(paths)} real ones", paths, size / 1e6, judged=False)


def measure(
    traces: list[Trace], peers: Mapping[str, str], python: Path | None, rounds: int
) -> None:
    """Read every trace in every way, as often as there are rounds, in a random order."""
    noise = random.Random(0)
    for trace in traces:
        packed = trace.paths[0].suffix == ".gz"
        for number in range(rounds):
            ways = [OURS, AGAIN, *(peers if packed else ())]
            for way in noise.sample(ways, len(ways)):
                kept = trace.runs.setdefault(way, [])
                if way in peers and number and trace.megabytes >= _LARGE:
                    kept.append(None)
                    continue
                own = python if way in peers else None
                kept.append(alone(OURS if way == AGAIN else way, trace.paths, own))


def bounds(traces: list[Trace]) -> list[Bound]:
    """Return what is promised of generated traces; of peers, of those that took part."""
    found = []
    for trace in traces:
        if not trace.judged:
            continue
        name = trace.name
        found.append(Bound(f"{name}: JSON by core and second", trace.speed, 150, "MB/s", True))
        found.append(Bound(f"{name}: peak above Python", trace.typical(OURS, "above"), 120, "MB"))
        hta = [trace.ratio(way) for way in trace.runs if way.startswith("HTA")]
        if hta:
            found.append(Bound(f"{name}: HTA's fastest by ours", min(hta), 9, "times", True))
        if ORJSON in trace.runs:
            ratio = trace.ratio(ORJSON)
            found.append(Bound(f"{name}: gzip + orjson by ours", ratio, 4, "times", True))
    return found


def report(traces: list[Trace], facts: list[str]) -> Report:
    """Lay out what was measured."""
    rows: list[list[object]] = []
    for trace in traces:
        for way in trace.runs:
            speed = trace.megabytes / trace.typical(way)
            numbers = [trace.typical(way, key) for key in ("seconds", "cpu", "above", "grown")]
            row = [f"{trace.name}: {way}", *numbers[:2], round(speed), trace.ratio(way)]
            rows.append([*row, trace.ratio(way, "cpu"), *map(round, numbers[2:])])
    controls = {trace.name: trace.ratio(AGAIN) for trace in traces}
    control = ", ".join(f"{name} {ratio:.2f}" for name, ratio in controls.items())
    control = f"again by first: {control} (band {BAND[0]} to {BAND[1]})"
    quiet = all(BAND[0] <= ratio <= BAND[1] for ratio in controls.values())
    heads = ["trace: way", "s", "CPU s", "MB/s", "x ours", "x CPU", "above Python, MB", "grown, MB"]
    return Report("read, Kineto to Parquet", heads, rows, bounds(traces), control, quiet, facts)
