"""What devices ran, as columns: kernels and copies with the texts of their names and stages."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.cells import numbers, read, texts
from lightning_rlprof.model import copy_name
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["OTHERS", "Work", "device_work"]

OTHERS = "others"
"""Names the row of all names that are not among the top."""


class Work(NamedTuple):
    """Pieces of work as columns of one length, with the texts that two of them are codes of.

    ``name`` and ``stage`` are -1 where that is not known, ``step`` is 0 outside of steps.
    """

    rank: Int64s
    name: Int64s
    duration: Int64s
    stage: Int64s
    step: Int64s
    names: Sequence[str]
    stages: Sequence[str]


def device_work(spans: Spans, ranks: Collection[int] | None, remarks: list[str]) -> Work:
    """Return the kernels, then the copies, of some ranks or of all (None).

    What could not be read becomes a remark.
    """
    names: list[str] = []
    stages: dict[str, int] = {}
    parts = [[np.empty(0, np.int64)] * 5]
    for table_name, column in (("kernels", "kernel"), ("memcpy", "kind")):
        table = read(spans, table_name, remarks)
        if table is None:
            continue
        name, own = texts(table, column)
        if table_name == "memcpy":
            name, own = np.where(name < 0, len(own), name), [*map(copy_name, (*own, None))]
        stage, of = texts(table, "stage")
        places = [stages.setdefault(text, len(stages)) for text in of]
        rank = numbers(table, "rank")
        columns = (
            rank,
            np.where(name < 0, -1, name + len(names)),
            numbers(table, "duration"),
            np.array([*places, -1], np.int64)[stage],
            numbers(table, "step"),
        )
        keep = slice(None) if ranks is None else np.isin(rank, list(ranks))
        parts.append([each[keep] for each in columns])
        names += own
    rank, code, duration, place, step = map(np.concatenate, zip(*parts, strict=True))
    return Work(rank, code, duration, place, step, names, list(stages))
