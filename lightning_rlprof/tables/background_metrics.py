"""What was sampled of hosts and devices while a run recorded: one row per sample and metric."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_rlprof.records.records import BACKGROUND_METRICS
from lightning_rlprof.records.run_directory import MetricsLine
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import known
from lightning_rlprof.tables.table import Column, ColumnRows, Table

_COLUMNS = (
    Column("rank", "count"),
    Column("device", "count"),
    Column("metric", "text"),
    Column("time", "time", "ns"),
    Column("duration", "duration", "ns"),
    Column("value", "number"),
)
_NO_DEVICE = -1


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
    columns: list[list[Int64s]] = [[], [], [], [], []]
    values: list[float] = []
    for rank, lines in by_rank.items():
        rows: list[tuple[int, int, int, int]] = []
        for line in lines:
            device = _NO_DEVICE if line.device is None else line.device
            for start, found in ((line.since_ns, line.rates), (line.clock_ns, line.values)):
                for name, value in found.items():
                    if value is not None:
                        code = codes.setdefault(name, len(codes))
                        rows.append((device, code, start, line.clock_ns))
                        values.append(value)
        found_rows = np.array(rows, np.int64).reshape(-1, 4)
        start_ns, end_ns = (on_axis(rank, found_rows[:, at]) for at in (2, 3))
        columns[0].append(np.full(len(rows), rank, np.int64))
        columns[1].append(found_rows[:, 0])
        columns[2].append(found_rows[:, 1])
        columns[3].append(start_ns)
        columns[4].append(end_ns - start_ns)
    whole = [np.concatenate(column) for column in columns]
    cells: list[Any] = [
        whole[0],
        known(whole[1], nothing=_NO_DEVICE),
        (whole[2], [*codes]),
        *whole[3:],
        np.array(values, np.float64),
    ]
    return Table(BACKGROUND_METRICS, _COLUMNS, ColumnRows(cells))
