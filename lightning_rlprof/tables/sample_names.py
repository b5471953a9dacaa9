"""What the samples of a run are called: one row per sample and rank that had it."""

from collections.abc import Mapping, Sequence

import numpy as np

from lightning_rlprof.records.run_directory import SampleLine
from lightning_rlprof.tables.table import Column, ColumnRows, Table

SAMPLE_NAMES = "sample_names"
"""Name of the table."""

_COLUMNS = (
    Column("rank", "count"),
    Column("sample", "count"),
    Column("prompt", "text"),
    Column("prompt group", "text"),
    Column("attempt", "count"),
)


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
    return Table(SAMPLE_NAMES, _COLUMNS, ColumnRows([*columns]))
