"""Runs with tables of calls, kernels and copies, and random ones for comparing with brute force."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from lightning_rlprof.tables.kernels import COLUMNS
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.runs import loaded

CALLS = (
    Column("rank", "count"),
    Column("thread", "count"),
    Column("name", "text"),
    Column("kind", "text"),
    Column("start", "time", "ns"),
    Column("duration", "duration", "ns"),
    Column("id", "count"),
    Column("parent", "count"),
    Column("stage", "text"),
    Column("step", "count"),
    Column("forward", "count"),
)
COPIES = (
    Column("rank", "count"),
    Column("device", "count"),
    Column("stream", "count"),
    Column("kind", "text"),
    Column("bytes", "count", "bytes"),
    Column("start", "time", "ns"),
    Column("duration", "duration", "ns"),
    Column("stage", "text"),
    Column("step", "count"),
    Column("launch", "time", "ns"),
    Column("launch duration", "duration", "ns"),
    Column("graph", "count"),
)


class Call(NamedTuple):
    """A call; its id is its place among those of its rank unless it is set."""

    name: str
    start: int
    end: int
    kind: str = "operator"
    thread: int = 7
    rank: int = 0
    forward: int | None = None
    id: int | None = None
    stage: str | None = None
    step: int | None = None


class Kernel(NamedTuple):
    """A kernel; `launch` is the launching call's start, None where it is not known."""

    name: str | None
    start: int
    end: int
    launch: int | None = None
    call: int | None = None
    thread: int | None = 7
    rank: int = 0
    stream: int | None = 0
    graph: int | None = None
    stage: str | None = None
    step: int | None = None


class Copy(NamedTuple):
    """A copy."""

    kind: str
    start: int
    end: int
    launch: int | None = None
    call: int | None = None
    rank: int = 0
    stream: int = 0
    graph: int | None = None


def run(
    calls: Sequence[Call] | None = None,
    kernels: Sequence[Kernel] | None = None,
    copies: Sequence[Copy] | None = None,
) -> Spans:
    """Return a run with these tables; None for a table that there is not."""
    tables = {}
    if calls is not None:
        tables["calls"] = Table("calls", CALLS, [_call(*pair) for pair in enumerate(calls)])
    if kernels is not None:
        tables["kernels"] = Table("kernels", COLUMNS, [_kernel(each) for each in kernels])
    if copies is not None:
        tables["memcpy"] = Table("memcpy", COPIES, [_copy(each) for each in copies])
    return replace(_nothing(), tables={name: lambda t=t: t for name, t in tables.items()})


@cache
def _nothing() -> Spans:
    return loaded([])


def _call(at: int, call: Call):
    number = at if call.id is None else call.id
    head = (call.rank, call.thread, call.name, call.kind, call.start, call.end - call.start)
    return (*head, number, None, call.stage, call.step, call.forward)


def _kernel(each: Kernel):
    head = (each.rank, 0, each.stream, each.name, each.start, each.end - each.start, each.stage)
    return (*head, each.step, None, each.launch, each.call, each.thread, each.graph)


def _copy(each: Copy):
    head = (each.rank, 0, each.stream, each.kind, 8, each.start, each.end - each.start)
    return (*head, None, None, each.launch, each.call, each.graph)


def nested(draw: st.DrawFn, names: str, most: int = 12) -> list[tuple[str, int, int]]:
    """Draw calls of one thread that nest; some begin or end together, some follow at once."""
    found = [(draw(st.sampled_from(names)), 0, 40)] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, most))):
        name = draw(st.sampled_from(names))
        first, last = sorted(draw(st.tuples(st.integers(0, 40), st.integers(0, 40))))
        if all(
            last <= start or end <= first or first <= start <= end <= last
            or start <= first <= last <= end
            for _, start, end in found
        ):  # fmt: skip
            found.append((name, first, last))
    return sorted(found, key=lambda each: (each[1], -each[2]))


def recorded(path: Path, **options: bool) -> Any:
    """Train a small model three times under torch.profiler, on CPU; return the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    inner = torch.nn.Sequential(torch.nn.Linear(64, 8))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), inner)
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        for _ in range(3):
            model(torch.ones(32, 64)).square().mean().backward()
    profiler.export_chrome_trace(str(path))
    return profiler


@st.composite
def traces(draw: st.DrawFn, kind: str = "operator") -> tuple[list[Call], list[Kernel]]:
    """Draw calls of two ranks and threads, scaled so that they nest by more than the slack."""
    calls = [
        Call(name, start * 10_000, end * 10_000, kind, thread, rank)
        for rank in (0, 1)
        for thread in (7, -3)
        for name, start, end in nested(draw, "abc")
    ]
    times = st.integers(-1, 41).map(lambda at: at * 10_000 + 5_000)
    one = st.builds(
        lambda launch, length, thread, rank: Kernel("k", 0, length, launch, 9, thread, rank),
        st.none() | times,
        st.integers(0, 50),
        st.sampled_from([7, -3, 99, None]),
        st.integers(0, 1),
    )
    return calls, draw(st.lists(one, max_size=8))
