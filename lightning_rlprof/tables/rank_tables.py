"""Tables of what ranks wrote beside their spans: background metrics, and names of samples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_rlprof.records.records import BACKGROUND_METRICS
from lightning_rlprof.records.run_directory import MetricsLine, SampleLine
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import known
from lightning_rlprof.tables.table import Column, ColumnRows, Table, columns_of

_METRIC_COLUMNS = (
    *columns_of("count", "rank", "device"),
    Column("metric", "text"),
    Column("time", "time", "ns"),
    Column("duration", "duration", "ns"),
    Column("value", "number"),
)
_NO_DEVICE = -1

SAMPLE_NAMES = "sample_names"
"""Name of the table with what samples are called."""

_NAME_COLUMNS = (
    *columns_of("count", "rank", "sample"),
    *columns_of("text", "prompt", "prompt group"),
    Column("attempt", "count"),
)


def background_metrics(
    by_rank: Mapping[int, Sequence[MetricsLine]], on_axis: Callable[[int, Int64s], Int64s]
) -> Table:
    """Return the table ``background_metrics``.

    A rate is the mean over its ``duration``, which begins at ``time``. Other values are of one
    instant: their duration is 0.

    Args:
        by_rank: Lines of each rank's file.
        on_axis: Puts times of a rank's clock onto the axis of the run.
    """
    codes: dict[str, int] = {}
    parts: list[tuple[Int64s, ...]] = [(np.zeros(0, np.int64),) * 5]
    values: list[float] = []
    for rank, lines in by_rank.items():
        rows: list[tuple[int, int, int, int, int]] = []
        for line in lines:
            device = _NO_DEVICE if line.device is None else line.device
            for start, found in ((line.since_ns, line.rates), (line.clock_ns, line.values)):
                for name, value in found.items():
                    if value is not None:
                        code = codes.setdefault(name, len(codes))
                        rows.append((rank, device, code, start, line.clock_ns))
                        values.append(value)
        ranks, devices, metrics, *times = np.array(rows, np.int64).reshape(-1, 5).T
        start_ns, end_ns = (on_axis(rank, each) for each in times)
        parts.append((ranks, devices, metrics, start_ns, end_ns - start_ns))
    ranks, devices, metrics, *times = map(np.concatenate, zip(*parts, strict=True))
    cells: list[Any] = [
        ranks,
        known(devices, nothing=_NO_DEVICE),
        (metrics, [*codes]),
        *times,
        np.array(values, np.float64),
    ]
    return Table(BACKGROUND_METRICS, _METRIC_COLUMNS, ColumnRows(cells))


def sample_names(by_rank: Mapping[int, Sequence[SampleLine]]) -> Table:
    """Return the table ``sample_names``; the counter ``sample`` of spans has its numbers."""
    lines = [line for own in by_rank.values() for line in own]
    ranks = np.repeat([*by_rank], [len(own) for own in by_rank.values()]).astype(np.int64)
    codes: dict[str, int] = {}
    prompts = np.array([codes.setdefault(line.prompt, len(codes)) for line in lines], np.int64)
    groups = np.array([codes.setdefault(line.group, len(codes)) for line in lines], np.int64)
    texts = [*codes]
    columns = (
        ranks,
        np.array([line.id for line in lines], np.int64),
        (prompts, texts),
        (groups, texts),
        np.array([line.attempt for line in lines], np.int64),
    )
    return Table(SAMPLE_NAMES, _NAME_COLUMNS, ColumnRows([*columns]))
