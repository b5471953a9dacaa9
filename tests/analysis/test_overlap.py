"""Overlap of communication and compute against a rasteriser and the breakdown."""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.breakdown import breakdown
from lightning_rlprof.analysis.overlap import overlap
from lightning_rlprof.spans import Spans
from tests.analysis.device_jobs import jobs
from tests.analysis.device_work import Job, Work, devices, rows_of, spans_of, table
from tests.runs import Row

RUN = {0: [Row("run", "region", 1, 0, 1_000)]}
OPERATIONS = ("all_reduce", "all_gather", None)


def told(spans: Spans) -> dict[tuple[object, ...], tuple[object, ...]]:
    """Return (communication, overlapped, exposed, count) by rank, device, operation and group."""
    found = {}
    for row in overlap(spans).rows:
        whole, hidden, exposed, share = row[4:8]
        assert (whole, share) == (hidden + exposed, hidden / whole)
        found[row[:4]] = (whole, hidden, exposed, row[8])
    return found


def with_collectives(job: Job, names: list[tuple[str | None, str | None]]) -> Spans:
    """Add a table of collectives: the job's own communication under these names, in turn."""
    own = [work for work in job.kernels if work.kind == "communication"]
    rows = rows_of(own)
    for at, row in enumerate(rows):
        row["operation"], row["group"] = names[at % len(names)]
    spans = spans_of(job)
    return replace(
        spans, tables={**spans.tables, "collectives": lambda: table("collectives", rows)}
    )


@settings(max_examples=200, deadline=None)
@given(
    jobs(),
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(["0", "1", None])), min_size=1),
)
def test_every_nanosecond_of_communication_is_overlapped_or_exposed(
    job: Job, names: list[tuple[str | None, str | None]]
) -> None:
    spans = with_collectives(job, names)
    own = [work for work in job.kernels if work.kind == "communication"]
    keys = {("all", None): own}
    for at, work in enumerate(own):
        keys.setdefault(names[at % len(names)], []).append(work)
    expected: dict[tuple[object, ...], tuple[int, ...]] = {}
    for place, device in devices(spans, job).items():
        for key, every in keys.items():
            mine = [w for w in every if (w.rank, w.device) == place]
            times = {now for w in mine for now in range(w.start_ns, w.end_ns)}
            hidden = sum("compute" in device.running(now) for now in times)
            count = len([w for w in mine if w.end_ns > w.start_ns])
            if times:
                expected[(*place, *key)] = (len(times), hidden, len(times) - hidden, count)

    assert told(spans) == expected


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_the_row_of_a_device_says_what_the_breakdown_says(job: Job) -> None:
    spans = spans_of(job)
    expected: Counter[tuple[object, ...]] = Counter()
    rows = breakdown(spans)
    for name in ("exposed communication", "overlapped communication"):
        columns = (rows.column(each) for each in ("rank", "device", name))
        for rank, device, ns in list(zip(*columns, strict=True))[:-1]:
            expected[rank, device, name] += int(ns or 0)

    found = {}
    for (rank, device, _, _), (_, hidden, exposed, _) in told(spans).items():
        found[rank, device, "exposed communication"] = exposed
        found[rank, device, "overlapped communication"] = hidden
    assert +Counter(found) == +expected


def test_the_most_exposed_operation_comes_first_after_the_device_itself() -> None:
    work = [
        Work("compute", 0, 100),
        Work("communication", 50, 120),
        Work("communication", 110, 300),
    ]
    spans = with_collectives(Job(RUN, work), [("all_reduce", "0"), ("all_gather", "0")])

    assert [row[2:] for row in overlap(spans).rows] == [
        ("all", None, 250, 50, 200, 0.2, 2),
        ("all_gather", "0", 190, 0, 190, 0.0, 1),
        ("all_reduce", "0", 70, 50, 20, 50 / 70, 1),
    ]
    assert "add up to more than all" in overlap(spans).note


def test_copies_hide_nothing() -> None:
    work = [Work("communication", 0, 100), Work("copy", 50, 80)]

    assert told(spans_of(Job(RUN, work))) == {(0, 0, "all", None): (100, 0, 100, 1)}


def test_without_communication_it_abstains() -> None:
    table = overlap(spans_of(Job(RUN, [Work("compute", 0, 10)], [])))

    assert table.abstained == "no communication was recorded"
    assert not table.rows
