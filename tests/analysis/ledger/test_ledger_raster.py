"""The ledger against a rasteriser, on runs that are small and as odd as can be."""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.ledger.ledger import category_breakdown, compute_accounts
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.raster import Kernel, raster
from tests.builders.runs import MAIN, Row, header, write_rank
from tests.effort import examples

NAMES = (
    "actor_update",
    "actor_generate",
    "compute_reward",
    "weight_sync",
    "validation",
    "data_fetch",
    "all_reduce",
    "all_gather",
    "barrier",
    "gc",
    "mine",
    "my own",
)
LAUNCHES = ("actor_update", "actor_generate", "weight_sync", "data_fetch", "mine", None)
KERNELS = ("gemm", "ncclDevKernel_AllReduce", "ncclDevKernel_AllGather", "ncclKernel_SendRecv")
COLUMNS = ("rank", "kernel", "start", "duration", "stage", "step")


class Job(NamedTuple):
    """A world and what was recorded of it."""

    world: int
    ranks: dict[int, list[Row]]
    kernels: list[Kernel]
    copies: list[Kernel]


def spans_of(folder: Path, job: Job) -> Spans:
    for rank, rows in job.ranks.items():
        write_rank(folder, header(rank, job.world), rows)
    tables = {}
    if job.kernels:
        tables["kernels"] = lambda: table_of("kernels", job.kernels)
        tables["memcpy"] = lambda: table_of("memcpy", job.copies)
    return replace(load(folder), tables=tables)


def table_of(name: str, kernels: list[Kernel]) -> Table:
    kinds = ("count", "text", "duration", "duration", "text", "count")
    names = ("rank", "kernel" if name == "kernels" else "kind", *COLUMNS[2:])
    columns = tuple(Column(*each) for each in zip(names, kinds, strict=True))
    rows = [(k.rank, k.name, k.start_ns, k.end_ns - k.start_ns, k.stage, k.step) for k in kernels]
    return Table(name, columns, rows)


def ledger_of(spans: Spans) -> Counter[tuple[int, int | None, Category]]:
    return cells_of(category_breakdown(compute_accounts(spans, per_rank=True), per_step=True), 2)


def together(spans: Spans) -> Counter[tuple[int | None, Category]]:
    """Return the same of all ranks as one."""
    return cells_of(category_breakdown(compute_accounts(spans), per_step=True), 1)


def cells_of(table: Table, keys: int) -> Counter[Any]:
    categories = {each.text: each for each in Category}
    found = Counter[Any]()
    for row in table.rows:
        key, (wall, *times) = row[:keys], row[keys:]
        assert wall == sum(map(int, filter(None, times)))
        for column, ns in zip(table.columns[keys + 1 :], times, strict=True):
            found[(*key, categories[column.name])] += int(ns or 0)
    return +found


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw up to four ranks, some without a file, and what their devices ran."""
    world = draw(st.integers(1, 4))
    recorded = draw(st.sets(st.integers(0, world - 1), min_size=1))
    ranks = {rank: [*draw(steps()), *draw(trees()), *draw(captures())] for rank in recorded}
    ranks[min(recorded)].append(Row("actor_update", "stage", 1, 3, 9, id=999))
    each = st.builds(
        lambda rank, name, start, length, stage, step: Kernel(
            rank, name, start, start + length, stage, step
        ),
        st.integers(0, world - 1),
        st.sampled_from(KERNELS),
        st.integers(0, 40),
        st.integers(0, 12),
        st.sampled_from(LAUNCHES),
        st.sampled_from([None, 1]),
    )
    return Job(world, ranks, draw(st.lists(each, max_size=8)), draw(st.lists(each, max_size=2)))


@st.composite
def steps(draw: st.DrawFn) -> list[Row]:
    """Draw steps with gaps and overlaps; some numbers are left out."""
    rows, now = [], draw(st.integers(0, 8))
    for number in range(1, draw(st.integers(0, 4)) + 1):
        length, shift = draw(st.integers(0, 12)), draw(st.integers(-3, 2))
        start = max(0, now + shift)
        now = start + length
        if draw(st.integers(0, 3)):
            rows.append(Row("step", "step", number, start, now, id=number))
    return rows


@st.composite
def trees(draw: st.DrawFn) -> list[Row]:
    """Draw spans that were opened in others; they may outlive them, as tasks do."""
    rows: list[Row] = []
    for number in range(100, 100 + draw(st.integers(0, 9))):
        kind = draw(st.sampled_from(["stage", "stage", "region", "mark"]))
        name, length = draw(st.sampled_from(NAMES)), draw(st.integers(0, 20))
        around = draw(st.sampled_from([None, *rows]))
        start = draw(st.integers(0, 40) if around is None else st.integers(0, 6))
        if around is not None:
            start += around.start_ns
            length = min(length, around.end_ns - start) if start == around.start_ns else length
        parent = None if around is None else around.id
        thread = draw(st.sampled_from([MAIN, 7]))
        end = start + (0 if kind == "mark" else length)
        step = draw(st.sampled_from([1, 1, 2]))
        rows.append(Row(name, kind, step, start, end, thread, parent, None, number))
    return rows


@st.composite
def captures(draw: st.DrawFn) -> list[Row]:
    """Draw captures, the last of which may never be closed."""
    rows, now = [], 0
    for number in range(200, 200 + draw(st.sampled_from([0, 0, 1, 2, 3]))):
        start = now + draw(st.integers(0, 9))
        now = start + draw(st.integers(0, 3))
        name = "rlprof close capture" if number % 2 else "rlprof open capture"
        rows.append(Row(name, "region", 1, start, now, id=number))
    return rows


@st.composite
def crowds(draw: st.DrawFn) -> Job:
    """Draw rollouts of many requests at once, around them a stage or none, and kernels."""
    around = [Row("actor_generate", "stage", 1, 0, 40, id=1)] if draw(st.booleans()) else []
    rows = []
    for number in range(2, 2 + draw(st.integers(3, 9))):
        start, length = draw(st.integers(0, 25)), draw(st.integers(0, 15))
        name = draw(st.sampled_from(["generate", "generate", "mine" if around else "gen"]))
        parent = 1 if around else None
        rows.append(Row(name, "stage", 1, start, start + length, 7, parent, None, number))
    update = Row("actor_update", "stage", 1, draw(st.integers(0, 40)), 41, id=99)
    kernel = Kernel(0, "gemm", 12, 12 + draw(st.integers(1, 9)), "actor_generate", 1)
    return Job(1, {0: [*around, *rows, update]}, draw(st.sampled_from([[], [kernel]])), [])


@settings(max_examples=examples(300), deadline=None)
@given(jobs())
def test_every_nanosecond_has_the_label_and_step_that_a_rasteriser_gives_it(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spans = spans_of(Path(folder) / "run", job)
    expected = raster(spans, range(job.world), job.kernels, job.copies if job.kernels else ())
    assert ledger_of(spans) == expected
    summed = Counter[Any]()
    for (_, step, category), ns in expected.items():
        summed[step, category] += ns
    assert together(spans) == summed


@settings(max_examples=examples(150), deadline=None)
@given(crowds())
def test_tails_of_rollouts_are_those_of_a_rasteriser(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spans = spans_of(Path(folder) / "run", job)
    assert ledger_of(spans) == raster(spans, [0], job.kernels)
