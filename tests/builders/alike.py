"""Whether two runs in memory are the same in everything but how texts are numbered."""

from typing import Any

import numpy as np

from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

_SHORT = {"kind", "thread", "id", "parent"}
"""Columns that nothing multiplies, so that they may have fewer than 64 bits."""

_NUMBERS = ("kind", "rank", "step", "start_ns", "end_ns", "id", "parent")


def assert_same_run(found: Spans, wanted: Spans) -> None:
    assert found.path == wanted.path
    assert found.names == wanted.names
    assert found.threads == wanted.threads
    for name in (*_NUMBERS, "name", "thread"):
        column, own = getattr(found, name), getattr(wanted, name)
        assert column.dtype == np.int64 or (name in _SHORT and column.dtype.kind == "i")
        assert column.tolist() == own.tolist(), name
    assert list(found.headers.items()) == list(wanted.headers.items())
    assert list(found.statuses.items()) == list(wanted.statuses.items())
    assert (found.notes, found.warnings) == (wanted.notes, wanted.warnings)
    assert found.unix_ns == wanted.unix_ns
    assert_same_counters(found, wanted)
    assert list(found.tables) == list(wanted.tables)


def assert_same_counters(found: Spans, wanted: Spans) -> None:
    assert list(found.counters) == list(wanted.counters)
    for name, (rows, values) in wanted.counters.items():
        assert found.counters[name].rows.tolist() == rows.tolist()
        assert found.counters[name].values.dtype == values.dtype
        assert exact(found.counters[name].values.tolist()) == exact(values.tolist())


def assert_same_table(found: Table, wanted: Table) -> None:
    assert (found.name, found.columns) == (wanted.name, wanted.columns)
    assert (found.note, found.abstained) == (wanted.note, wanted.abstained)
    assert len(found.rows) == len(wanted.rows)
    for mine, own in zip(found.rows, wanted.rows, strict=True):
        assert exact(mine) == exact(own), (mine, own)


def exact(cells: Any) -> list[tuple[type, str]]:
    """Return what tells 1 from 1.0, and takes a NaN for a NaN.

    No 0.0 is told from -0.0: a dictionary of DuckDB before 2.0 has one of both.
    """
    return [(type(cell), repr(cell + 0 if isinstance(cell, float) else cell)) for cell in cells]
