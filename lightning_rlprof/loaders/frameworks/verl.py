"""The log of verl's file logger: the time of each step, from the seconds of its timers."""

from collections.abc import Sequence
from pathlib import Path

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.frameworks.log_lines import (
    S,
    line,
    nanoseconds,
    objects,
    rank_trace,
    whole,
)
from lightning_rlprof.records.run_directory import RankTrace

_LONGEST_NS = 2**55  # a year: what is longer is an error, which would move all later steps
_STEP = "timing_s/step"
_ONLY_STEPS = (
    "the log has no times of day: its steps follow one another without a gap, and their stages are "
    "left out, as their order is unknown"
)


def read_verl(paths: Sequence[Path]) -> list[RankTrace]:
    """Read the steps in logs of verl's file logger (``trainer.logger=file``).

    Raises:
        TraceError: A file cannot be read, or has no time of a step.
    """
    return [_read(path) for path in paths]


def _read(path: Path) -> RankTrace:
    spans, lost, now = [], 0, 0
    for row in objects(path):
        data = None if row is None else row.get("data")
        step = None if row is None else whole(row.get("step"))
        lost += row is None
        if not isinstance(data, dict) or step is None:
            continue
        length = nanoseconds(data.get(_STEP), S)
        if length is not None and 0 <= length < _LONGEST_NS:
            spans.append(line("step", "step", now, now + length, step))
            now += length
    if not spans:
        raise TraceError(f"{path}: has no timings of a step")
    return rank_trace(path, spans, notes=[("info", _ONLY_STEPS)], lost=lost)
