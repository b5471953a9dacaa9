"""Overlap of collectives and compute, against a rasteriser and against the breakdown."""

from collections import Counter
from dataclasses import replace
from itertools import cycle

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.communication.collectives import communication
from lightning_rlprof.analysis.device.breakdown import breakdown
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table, columns_of
from tests.builders.device_jobs import jobs
from tests.builders.device_work import Job, Work, devices, spans_of
from tests.builders.runs import Row
from tests.effort import examples

RUN = {0: [Row("run", "region", 1, 0, 1_000)]}
OPERATIONS = ("all_reduce", "all_gather", None)
Name = tuple[str | None, str | None]


def told(spans: Spans) -> dict[tuple[object, ...], tuple[object, ...]]:
    """Return (overlapped, exposed) by operation, group and stage."""
    found = communication(spans)
    names = ("operation", "group", "stage", "overlapped", "exposed")
    columns = map(found.column, names)
    return {row[:3]: row[3:] for row in zip(*columns, strict=True)}


def listed(job: Job, rows: list[tuple[object, ...]]) -> Spans:
    """Add a table of collectives to a job, from (rank, device, start, end, operation, group)."""
    texts, counts = ("operation", "group", "stage"), ("number", "bytes", "group size")
    columns = (
        *columns_of("count", "rank", "device"),
        *columns_of("duration", "start", "duration", unit="ns"),
        *columns_of("text", *texts),
        *columns_of("count", "step", *counts),
    )
    cells = [
        (rank, device, start, end - start, *names, None, 1, *[None] * len(counts))
        for rank, device, start, end, *names in rows
    ]
    spans = spans_of(job)
    own = {"collectives": lambda: Table("collectives", columns, cells)}
    return replace(spans, tables={**spans.tables, **own})


def with_collectives(job: Job, names: list[Name]) -> Spans:
    """Add the job's own communication as collectives under these names, in turn."""
    own = [work for work in job.kernels if work.kind == "communication"]
    places = [(work.rank, work.device, work.start_ns, work.end_ns) for work in own]
    return listed(job, [(*place, *name) for place, name in zip(places, cycle(names), strict=False)])


@settings(max_examples=examples(200), deadline=None)
@given(
    jobs(),
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(["0", "1", None])), min_size=1),
)
def test_every_nanosecond_of_a_row_is_overlapped_or_exposed(job: Job, names: list[Name]) -> None:
    own = [work for work in job.kernels if work.kind == "communication"]
    expected: dict[tuple[object, ...], Counter[bool]] = {}
    for place, device in devices(spans_of(job), job).items():
        times: dict[tuple[object, ...], set[int]] = {}
        for work, name in zip(own, cycle(names), strict=False):
            if (work.rank, work.device) == place:
                ran = range(work.start_ns, work.end_ns)
                times.setdefault((*name, None), set()).update(ran)
        for key, every in times.items():
            hidden = ("compute" in device.running(now) for now in every)
            expected.setdefault(key, Counter()).update(hidden)
    found = told(with_collectives(job, names))
    for key, cells in found.items() if own else ():
        sums = expected.get(key, Counter())
        assert cells == ((sums[True], sums[False]) if sums.total() else (None, None))


@settings(max_examples=examples(60), deadline=None)
@given(jobs())
def test_one_kind_of_collective_agrees_with_the_breakdown(job: Job) -> None:
    cells = breakdown(spans_of(job))
    if cells.abstained is None:
        names = ("overlapped communication", "exposed communication")
        whole = tuple(cells.column(name)[-1] for name in names)
        found = told(with_collectives(job, [("all_reduce", "0")]))
        assert all(tuple(ns or 0 for ns in own) == whole for own in found.values())


def test_copies_hide_nothing_and_compute_does() -> None:
    work = [Work("communication", 0, 100), Work("copy", 50, 80), Work("compute", 90, 120)]
    spans = with_collectives(Job(RUN, work), [("all_reduce", "0")])
    assert told(spans) == {("all_reduce", "0", None): (10, 90)}


def test_rows_that_run_at_the_same_time_count_it_each() -> None:
    work = [
        Work("compute", 0, 100),
        Work("communication", 50, 120),
        Work("communication", 110, 300),
    ]
    spans = with_collectives(Job(RUN, work), [("all_reduce", "0"), ("all_gather", "0")])
    assert told(spans) == {
        ("all_gather", "0", None): (0, 190),
        ("all_reduce", "0", None): (50, 20),
    }


def test_calls_on_no_known_device_have_neither() -> None:
    job = Job(RUN, [Work("compute", 0, 10)])
    assert told(listed(job, [(0, None, 0, 5, "barrier", None)])) == {
        ("barrier", None, None): (None, None)
    }
