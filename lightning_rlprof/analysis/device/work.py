"""What devices ran, as columns: kernels and copies with the texts of their names and stages."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.records.records import copy_name
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans

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
        table = spans.try_table(table_name, remarks)
        if table is None:
            continue
        name, own = table.texts(column)
        if table_name == "memcpy":
            name, own = np.where(name < 0, len(own), name), [*map(copy_name, (*own, None))]
        stage, of = table.texts("stage")
        places = [stages.setdefault(text, len(stages)) for text in of]
        rank = table.numbers("rank")
        columns = (
            rank,
            np.where(name < 0, -1, name + len(names)),
            table.numbers("duration"),
            np.array([*places, -1], np.int64)[stage],
            table.numbers("step"),
        )
        keep = slice(None) if ranks is None else np.isin(rank, list(ranks))
        parts.append([each[keep] for each in columns])
        names += own
    rank, code, duration, place, step = map(np.concatenate, zip(*parts, strict=True))
    return Work(rank, code, duration, place, step, names, list(stages))
