"""Seeded device traces in memory, each with a known reason to idle or none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.runs import Row, loaded

KERNEL = ("rank", "device", "stream", "kernel", "start", "duration", "stage", "step")
KERNELS = (*KERNEL, "range", "launch", "launch duration", "thread", "graph")
CALLS = ("rank", "thread", "name", "kind", "start", "duration", "id", "parent", "stage", "step")
_TEXTS = {"kernel", "name", "kind", "stage", "range", "operation", "group", "dtype", "component"}
_TIMES = {"start", "duration", "launch", "launch duration", "time"}

Cells = Mapping[str, object]


@dataclass(frozen=True)
class Feed:
    """How a host feeds a device, in nanoseconds.

    Attributes:
        pieces: Kernels that are launched, one after the other.
        kernel: How long each runs.
        every: From one launch to the next.
        stall: How long the host does something else after each hundredth launch.
        ahead: How long before the first kernel starts the host begins: how deep the queue is.
        until: After so many kernels the host is fast: it launches them a nanosecond apart.
        known: Whether launches were recorded.
    """

    pieces: int = 2_000
    kernel: int = 5_000
    every: int = 10_000
    stall: int = 0
    ahead: int = 3_000
    until: int = 10**9
    known: bool = True


def feed(how: Feed, seed: int = 0) -> tuple[list[Cells], list[Cells]]:
    """Return the rows of kernels and of calls of one rank; times vary by a tenth."""
    random = np.random.default_rng(seed)
    kernels: list[Cells] = []
    calls: list[Cells] = []
    now, free = 1_000, 1_000 + how.ahead
    for at in range(how.pieces):
        took = int(how.kernel * random.uniform(0.9, 1.1))
        start = max(now + 2_000, free)
        named = {"rank": 0, "device": 0, "stream": 7, "kernel": f"gemm_{at % 10}", "step": 1}
        launch = now if how.known else None
        kernels.append({**named, "start": start, "duration": took, "launch": launch})
        calls.append({"rank": 0, "name": "cudaLaunchKernel", "start": now, "duration": 500})
        free = start + took
        now += int(how.every * random.uniform(0.9, 1.1)) if at < how.until else 1
        now += how.stall if at % 100 == 99 else 0
    return kernels, [{**call, "kind": "runtime"} for call in calls]


def table(name: str, columns: Sequence[str], rows: Sequence[Cells]) -> Table:
    """Return a table as a loader makes it, without the columns that say nothing."""
    heads = tuple(
        Column(
            each,
            "text" if each in _TEXTS else "duration" if each in _TIMES else "count",
            "ns" if each in _TIMES else "",
        )
        for each in columns
    )
    return Table(name, heads, [tuple(row.get(each) for each in columns) for row in rows])  # type: ignore[misc]


def traced(kernels: Sequence[Cells], calls: Sequence[Cells] = ()) -> Spans:
    """Return one rank with one step around all that its device ran."""
    last = max(int(str(row["start"])) + int(str(row["duration"])) for row in kernels) + 1_000
    spans = loaded([Row("step", "step", 1, 0, last)])
    tables = {"kernels": lambda: table("kernels", KERNELS, kernels)}
    if calls:
        tables["calls"] = lambda: table("calls", CALLS, calls)
    return replace(spans, tables=tables)


def thinned(rows: Sequence[Cells], share: float, seed: int) -> list[Cells]:
    """Lose a share of all rows, whichever they are."""
    keep = np.random.default_rng(seed).random(len(rows)) >= share
    return [row for row, stays in zip(rows, keep, strict=True) if stays]
