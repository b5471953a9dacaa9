"""Calls of CANN in which the host waits for the device."""

import re
from typing import Any

import numpy as np

from lightning_rlprof.loaders.ascend_kept import WAITS, Kept
from lightning_rlprof.loaders.ascend_parts import Frame, Opened, Part, coded
from lightning_rlprof.loaders.ascend_trace import read_trace_view
from lightning_rlprof.loaders.kernels import distinct
from lightning_rlprof.table import Column

__all__ = ["SYNC"]

_TABLE, _COLUMNS = "CANN_API", ("startNs", "endNs", "name")
_LEVEL = re.compile(r"^\w+@")  # AscendCL@aclrtSynchronizeStream


def _sync(opened: Opened) -> tuple[Frame, list[str]]:
    """Read one row per call that waits."""
    if opened.has(_TABLE, *_COLUMNS):
        database: Any = opened.database
        rows, remarks = database.numbers(_TABLE, *_COLUMNS), []
        start, end = rows["startNs"], rows["endNs"]
        code, names = coded(database, rows["name"])
    else:
        view = read_trace_view(opened.capture.trace, Kept.WAITS)  # type: ignore[arg-type]
        table, remarks = view.tables[Kept.WAITS], view.problems
        start, end = table["start_ns"], table["end_ns"]
        code, names = distinct(table["name"], view.names)
    waits = np.array([*(WAITS.search(name) is not None for name in names), False])
    keep = waits[code] & (start > 0) & (end >= start)
    kinds = distinct(code[keep], [_LEVEL.sub("", name) for name in names])
    return {"kind": kinds, "start": start[keep], "duration": (end - start)[keep]}, remarks


SYNC = Part(
    (
        Column("kind", "text"),
        Column("start", "duration", "ns"),
        Column("duration", "duration", "ns"),
    ),
    lambda opened: opened.has(_TABLE, *_COLUMNS) or opened.capture.trace is not None,
    _sync,
)
"""Waits of the host for the device, by the call."""
