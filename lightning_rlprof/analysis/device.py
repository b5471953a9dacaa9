"""Host time of each stage beside the time that the device took for it."""

import numpy as np

from lightning_rlprof.analysis.counted import counted
from lightning_rlprof.analysis.partition import home
from lightning_rlprof.analysis.statistics import mean
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["device"]

_COLUMNS = (
    Column("stage", "text"),
    Column("host mean", "duration", "ns"),
    Column("device mean", "duration", "ns"),
    Column("device by host", "ratio"),
    Column("measured", "count"),
    Column("count", "count"),
)
_NOTE = (
    "Device time runs from where the device reached the stage to where it had done the work that "
    "the stage queued. Far above the host's, the stage left work behind that later stages wait "
    "for; far below, the device waited for the host."
)
_COUNTER = "device_ns"


def device(spans: Spans) -> Table:
    """Compare per stage the mean host time of a span with the mean device time of the same spans.

    ``measured`` counts the spans that have a device time, ``count`` all of them; means are over the
    measured ones, inclusive, over all ranks. The host's longest stage comes first.

    Abstains where no span has a device time.
    """
    if _COUNTER not in spans.counters:
        reason = "no device time was recorded: it takes an accelerator, and device_time not false"
        return Table("device", _COLUMNS, abstained=reason)
    steps = spans.rows(kind="step")
    choice = counted(spans, steps)
    rows = spans.rows(kind="stage")
    step = home(spans, steps, rows, spans.thread)
    rows = rows[(step >= 0) & choice.mask[step]] if len(steps) else rows
    at, nanoseconds = spans.amounts(_COUNTER, np.int64)
    known = np.isin(at, rows)
    at, nanoseconds = at[known], nanoseconds[known]
    lines = _lines(spans, rows, at, nanoseconds)
    return Table("device", _COLUMNS, lines, f"{choice.note} {_NOTE}".strip())


def _lines(spans: Spans, rows: Int64s, at: Int64s, device_ns: Int64s) -> list[tuple[Cell, ...]]:
    size = len(spans.names)
    counts = np.bincount(spans.name[rows], minlength=size)
    measured = np.bincount(spans.name[at], minlength=size)
    host, device = np.zeros(size, np.int64), np.zeros(size, np.int64)
    np.add.at(host, spans.name[at], spans.duration_ns[at])
    np.add.at(device, spans.name[at], device_ns)
    lines: list[tuple[Cell, ...]] = []
    for code in np.argsort(-host, kind="stable").tolist():
        number = int(measured[code])
        if number:
            ratio = int(device[code]) / int(host[code]) if host[code] else None
            own, its = (mean(int(total[code]), number) for total in (host, device))
            lines.append((spans.names[code], own, its, ratio, number, int(counts[code])))
    return lines
