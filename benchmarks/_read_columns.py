"""Questions to ten million spans, and the file that holds them."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.store.parquet import kept_table, write_table
from lightning_rlprof.store.sql import answer, text_literal
from lightning_rlprof.tables.intervals import unions
from lightning_rlprof.tables.table import Column, ColumnRows, Table

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["NAMES", "QUESTIONS", "RANKS", "write_spans"]

RANKS, NAMES, _STREAMS = 64, 300, 4

_PERCENTILES = """
SELECT rank, name, spans, total_ns, max_ns, q[1] AS p50_ns, q[2] AS p95_ns, q[3] AS p99_ns FROM (
    SELECT rank, name, count(*) AS spans, sum(duration_ns) AS total_ns, max(duration_ns) AS max_ns,
           quantile_disc(duration_ns, [0.5, 0.95, 0.99]) AS q
    FROM spans GROUP BY rank, name
)
"""


def write_spans(path: Path, spans: int, seed: int = 0) -> None:
    """Write spans of four streams a rank, by rank and start as in every run, names by chance."""
    random = np.random.default_rng(seed)
    rank = np.repeat(np.arange(RANKS), -(-spans // RANKS))[:spans]
    duration = random.lognormal(9, 1.2, spans).astype(np.int64) + 1
    gap = duration // _STREAMS + random.integers(0, 2_000, spans)
    start = np.cumsum(gap) - gap
    _, first = np.unique(rank, return_index=True)
    start -= start[first][rank]  # every rank begins at zero
    names = [f"operator_{number}" for number in range(NAMES)]
    columns = (
        Column("name", "text"),
        Column("rank", "count"),
        *(Column(each, "duration", "ns") for each in ("start_ns", "end_ns", "duration_ns")),
    )
    name = (random.integers(0, NAMES, spans), names)
    rows = ColumnRows([name, rank, start, start + duration, duration])
    write_table(Table("spans", columns, rows), "spans", path)


def _by_sql(path: Path) -> int:
    def view(connection: "DuckDBPyConnection") -> None:
        source = f"read_parquet({text_literal(path)})"
        connection.execute(f"CREATE VIEW spans AS SELECT * FROM {source}")

    return len(answer(_PERCENTILES, view, [path]).rows)


def _by_numpy(path: Path) -> int:
    table = kept_table(path, "spans")
    name, names = table.texts("name")
    name += table.numbers("rank") * len(names)
    return len(summarize(name, table.numbers("duration_ns")).group)


def _busy(path: Path) -> int:
    """Sum the time that each rank has a span open; one rank after the other takes least memory."""
    table = kept_table(path, "spans")
    rank, first, last = (table.numbers(each) for each in ("rank", "start_ns", "end_ns"))
    edges = np.searchsorted(rank, np.arange(RANKS + 1))
    busy = []
    for begin, end in pairwise(edges.tolist()):
        _, starts, ends = unions(rank[begin:end], first[begin:end], last[begin:end])
        busy.append(int((ends - starts).sum()))
    return len(busy)


def _read(path: Path) -> int:
    table = kept_table(path, "spans")
    return len([table.numbers(each) for each in ("rank", "start_ns", "end_ns")])


QUESTIONS: dict[str, Callable[[Path], int]] = {
    "percentiles, SQL": _by_sql,
    "percentiles, numpy": _by_numpy,
    "union": _busy,
    "three columns": _read,
}
"""Each reads what it needs from the file."""
