"""How the stages' times change over the steps, as bars that fit on a page."""

from typing import Any

import numpy as np

from lightning_rlprof.report.page_tables import FIRST_STAGE
from lightning_rlprof.table import Table

__all__ = ["shares"]

_MOST_BARS = 240  # on a page 1180 px wide a bar is then four pixels


def shares(steps: Table | None) -> dict[str, Any]:
    """Return stages and one bar per step, or per ``width`` steps, from the table of all steps.

    Bars hold integer nanoseconds of exclusive time, the mean over ranks and steps.

    Example::

        >>> shares(None)
        {'stages': [], 'bars': [], 'values': [], 'width': 1, 'states': []}
    """
    if steps is None or not steps.rows:
        return {"stages": [], "bars": [], "values": [], "width": 1, "states": []}
    times = np.array([row[FIRST_STAGE:] for row in steps.rows], dtype=np.int64)
    numbers, place, ranks = np.unique(
        np.array(steps.column("step")), return_inverse=True, return_counts=True
    )
    sums = np.zeros((len(numbers), times.shape[1]), dtype=np.int64)
    np.add.at(sums, place, times)
    width = -(-len(numbers) // _MOST_BARS)
    heads = np.arange(0, len(numbers), width)
    count = np.add.reduceat(ranks, heads)
    means = np.add.reduceat(sums, heads, axis=0) // count[:, None]
    last = np.append(heads[1:], len(numbers)) - 1
    return {
        "stages": [column.name for column in steps.columns[FIRST_STAGE:]],
        "bars": [[int(numbers[a]), int(numbers[b])] for a, b in zip(heads, last, strict=True)],
        "values": means.T.tolist(),
        "width": width,
        "states": _states(steps, place // width, len(heads)),
    }


def _states(steps: Table, bar: Any, bars: int) -> list[str]:
    """Return per bar what is not complete about it: ``capture``, ``interrupted`` or nothing."""
    found: list[set[str]] = [set() for _ in range(bars)]
    for at, state in zip(bar.tolist(), steps.column("state"), strict=True):
        if state != "complete":
            found[at].add(str(state))
    return [", ".join(sorted(states)) for states in found]
