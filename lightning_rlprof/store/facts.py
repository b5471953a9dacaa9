"""What a run holds beside its tables, as JSON: with it the tables are the whole run again."""

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_rlprof.store.columns import occurring
from lightning_rlprof.store.rows import counter_columns

if TYPE_CHECKING:
    from lightning_rlprof.spans import Spans

__all__ = ["facts_of"]


def facts_of(spans: "Spans", path: Path) -> bytes:
    """Return JSON of names, threads, headers, notes, problems, and how to find the counters.

    ``names`` and ``threads`` are all that the run has, in its order; the codes in the file of the
    spans count those that occur, which ``used_names`` and ``used_threads`` tell. Of each counter
    there is ``[name, column, type]``, and where no column of 64 bits holds it exactly,
    ``[name, null, type, rows, values]``.

    Args:
        spans: The run.
        path: What was asked for; ``path`` leads from there to what was read.
    """
    facts = {
        "path": os.path.relpath(spans.path, path),
        "names": spans.names,
        "threads": spans.threads,
        "used_names": np.flatnonzero(occurring(spans.name, spans.names)).tolist(),
        "used_threads": np.flatnonzero(occurring(spans.thread, spans.threads)).tolist(),
        "unix_ns": spans.unix_ns,
        "moved": sorted(spans.wall_off),
        "headers": [
            [rank, {each.name: getattr(header, each.name) for each in dataclasses.fields(header)}]
            for rank, header in spans.headers.items()
        ],
        "statuses": list(spans.statuses.items()),
        "notes": spans.notes,
        "problems": spans.problems,
        "counters": _counters(spans),
    }
    return json.dumps(facts, default=_plain).encode()


def _counters(spans: "Spans") -> list[list[Any]]:
    columns = counter_columns(spans)
    found: list[list[Any]] = []
    for name, (rows, values) in spans.counters.items():
        if name in columns and _fits(values):
            found.append([name, columns[name], values.dtype.str])
        else:
            found.append([name, None, values.dtype.str, rows.tolist(), values.tolist()])
    return found


def _fits(values: Any) -> bool:
    """Tell whether a column of SQL holds every number as it is; NaN it takes for not known."""
    small = values.dtype.kind in "if" and values.dtype.itemsize <= 8
    return small and not (values.dtype.kind == "f" and np.isnan(values).any())


def _plain(value: Any) -> Any:
    """Return a number of NumPy's as Python's, a mapping as a dictionary, else its text."""
    if hasattr(value, "items") and not hasattr(value, "item"):
        return dict(value)
    return value.item() if hasattr(value, "item") else str(value)
