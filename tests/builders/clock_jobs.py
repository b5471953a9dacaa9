"""Collectives of ranks whose clocks differ, with the true times beside what the clocks say."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.runs import header
from tests.loaders.test_join_ranks import spans_of

MS, SECOND = 10**6, 10**9
START = 1_000 * MS
Clock = Callable[[Int64s], Int64s]


def true(times: Int64s) -> Int64s:
    return times


class Job(NamedTuple):
    """Collectives of all ranks: columns by call, with true times."""

    rank: Int64s
    number: Int64s
    step: Int64s
    start: Int64s
    end: Int64s
    group: list[str]


def job_of(
    seed: int, groups: Sequence[tuple[int, ...]], meetings: int = 60, late_ns: float = 5.0 * MS
) -> Job:
    """Let the ranks of each group meet, 20 times a second; all leave within 20 µs."""
    noise = np.random.default_rng(seed)
    columns: list[list[int]] = [[] for _ in range(5)]
    names = []
    for at in range(meetings):
        for code, group in enumerate(groups):
            came = START + at * 50 * MS + code * 25 * MS + noise.exponential(late_ns, len(group))
            left = came.max() + 200_000 + noise.integers(0, 20_000, len(group))
            for rank, begun, ended in zip(group, came, left, strict=True):
                for column, value in zip(
                    columns, (rank, at, 1 + at // 10, int(begun), int(ended)), strict=True
                ):
                    column.append(value)
                names.append(f"group {code}")
    return Job(*(np.array(column, np.int64) for column in columns), names)


_COLUMNS = (
    *(Column(name, "count") for name in ("rank", "number", "step")),
    *(Column(name, "text") for name in ("operation", "group")),
    Column("start", "time", "ns"),
    Column("duration", "duration", "ns"),
)


def run_of(
    job: Job,
    hosts: Sequence[str],
    clocks: Sequence[Clock],
    *,
    how: str = "number",
    operation: str = "all_reduce",
    untold: bool = False,
) -> Spans:
    """Return the run as each rank's clock saw it, with a span per call and the collectives.

    ``how`` is what tells which calls met: ``number``, ``step``, or ``order`` alone; groups are
    told unless ``untold``.
    """
    times = np.stack([job.start, job.end])
    for rank, clock in enumerate(clocks):
        times[:, job.rank == rank] = clock(times[:, job.rank == rank])
    rank, (start, end) = job.rank.tolist(), times.tolist()
    took = [last - first for first, last in zip(start, end, strict=True)]
    rows = [(r, "x", s, t, None) for r, s, t in zip(rank, start, took, strict=True)]
    nothing = [None] * len(rank)
    number = job.number.tolist() if how == "number" else nothing
    step = nothing if how == "order" else job.step.tolist()
    cells = (rank, number, step, [operation] * len(rank), nothing if untold else job.group)
    table = Table("collectives", _COLUMNS, list(zip(*cells, start, took, strict=True)))
    headers = {rank: header(rank, len(hosts), host=host) for rank, host in enumerate(hosts)}
    spans = spans_of(rows, set(rank), SECOND)
    return replace(spans, headers=headers, tables={"collectives": lambda: table})


def drifting(seed: int) -> tuple[Clock, int]:
    """Return a clock that is up to 80 ms off, and drifts by up to 50 ppm."""
    noise = np.random.default_rng(seed)
    ahead, drift = int(noise.integers(-80 * MS, 80 * MS)), noise.uniform(-5e-5, 5e-5)
    return lambda times: times + ahead + np.rint(drift * times).astype(np.int64), ahead
