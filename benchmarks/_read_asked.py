"""Questions to what was read once: analyses of a trace out of its cache, and ten million spans."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from _measure import Bound, Report
from _peers import Run, alone
from _read_columns import QUESTIONS, write_spans
from _read_parse import BAND

from lightning_rlprof.analysis.catalog import ANALYSES

__all__ = ["Asked", "ask_columns", "ask_trace", "report"]

_LIMITS = {"percentiles, SQL": (0.8, 500.0), "union": (0.8, 500.0)}
_READING = {"union": "three columns"}  # the sweep is judged, which columns in memory wait for
_WARM_S = 1.0


@dataclass
class Asked:
    """What each question took.

    Attributes:
        name: What was asked.
        runs: By question, one of each round, and one more of the first question as a control.
        limits: Seconds and megabytes by question.
    """

    name: str
    runs: dict[str, list[Run]] = field(default_factory=dict)
    again: list[Run] = field(default_factory=list)
    limits: dict[str, tuple[float, float | None]] = field(default_factory=dict)

    def typical(self, question: str, key: str = "seconds") -> float:
        """Return the median of one question."""
        return float(median(getattr(run, key) for run in self.runs[question]))

    @property
    def control(self) -> float:
        """The first question asked again, by its first time."""
        first = self.runs[next(iter(self.runs))]
        pairs = zip(self.again, first, strict=True)
        return median(again.seconds / run.seconds for again, run in pairs)


def ask_trace(path: Path, rounds: int) -> Asked:
    """Ask every analysis of one trace out of its cache, each in a process of its own."""
    alone("rlprof", [path])
    asked = Asked(f"{path.parent.name}, out of its cache")
    asked.limits = dict.fromkeys(ANALYSES, (_WARM_S, None))
    _ask(asked, {name: f"analysis:{name}" for name in ANALYSES}, path, rounds)
    return asked


def ask_columns(folder: Path, spans: int, rounds: int) -> Asked:
    """Ask ten million spans on disk, each question in a process of its own."""
    path = folder / f"spans-{spans}.parquet"
    if not path.exists():
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:  # its memory is not kept
            pool.submit(write_spans, path, spans).result()
    asked = Asked(f"{spans:,} spans", limits=dict(_LIMITS))
    _ask(asked, {name: f"columns:{name}" for name in QUESTIONS}, path, rounds)
    return asked


def _ask(asked: Asked, ways: dict[str, str], path: Path, rounds: int) -> None:
    for _ in range(rounds):
        for name, way in ways.items():
            asked.runs.setdefault(name, []).append(alone(way, [path]))
        asked.again.append(alone(next(iter(ways.values())), [path]))


def report(asked: Asked) -> Report:
    """Lay out what was measured."""
    rows, bounds = [], []
    for name in asked.runs:
        keys = ("seconds", "cpu", "above")
        seconds, cpu, above = (asked.typical(name, key) for key in keys)
        rows.append([name, seconds, cpu, round(above), asked.runs[name][0].rows])
        if name in asked.limits:
            limit, most = asked.limits[name]
            text = f"{asked.name}: {name}"
            if name in _READING:
                text += f", less {_READING[name]}"
                seconds -= asked.typical(_READING[name])
            bounds.append(Bound(text, seconds, limit, "s"))
            if most is not None:
                bounds.append(Bound(f"{asked.name}: {name}, peak", above, most, "MB"))
    control = (
        f"{next(iter(asked.runs))} again by first {asked.control:.2f} (band {BAND[0]} to {BAND[1]})"
    )
    quiet = BAND[0] <= asked.control <= BAND[1]
    heads = [asked.name, "s", "CPU s", "above Python, MB", "rows"]
    return Report(f"read, {asked.name}", heads, rows, bounds, control, quiet)
