"""Why devices idled, against a rasteriser and against the breakdown."""

import sys
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.breakdown import breakdown
from lightning_rlprof.analysis.device_walk import LATENCY_NS
from lightning_rlprof.analysis.idle import idle
from lightning_rlprof.spans import Spans
from tests.analysis.device_jobs import jobs
from tests.analysis.device_work import UNSEEN, Job, Work, devices, spans_of
from tests.runs import Row

RUN = {0: [Row("run", "region", 1, 0, 10**6)]}


def told(spans: Spans) -> dict[tuple[object, ...], tuple[object, ...]]:
    """Return (total, count, median, longest) by rank, device, kind and stage."""
    return {row[:4]: row[5:] for row in idle(spans).rows}


def kinds(*work: Work, rows: dict[int, list[Row]] = RUN) -> dict[str, int]:
    """Return the time of each kind up to the last work, which is followed by unknown idle."""
    table = idle(spans_of(Job(rows, work, [])))
    found: Counter[str] = Counter()
    for kind, ns in zip(table.column("kind"), table.column("total"), strict=True):
        found[str(kind)] += int(ns or 0)
    found["unknown"] -= 10**6 - max(w.end_ns for w in work)
    return +found


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_every_idle_nanosecond_has_the_kind_and_stage_that_a_rasteriser_gives_it(job: Job) -> None:
    spans = spans_of(job)
    expected = {}
    for place, own in devices(spans, job).items():
        parts = defaultdict(list)
        for (_, kind, stage), ns in own.why(latency=4).items():
            parts[kind, stage or "untraced"].append(ns)
        for key, each in parts.items():
            middle = sorted(each)[(len(each) - 1) // 2]
            expected[(*place, *key)] = (sum(each), len(each), middle, max(each))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[idle.__module__], "LATENCY_NS", 4)
        assert told(spans) == expected


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_kinds_add_up_to_the_idle_time_of_the_breakdown_in_each_stage(job: Job) -> None:
    spans = spans_of(job)
    sums: Counter[tuple[object, ...]] = Counter()
    for rank, device, _, stage, share, total, *_ in idle(spans).rows:
        sums[rank, device, stage] += total
        assert 0 < share <= 1
    table = breakdown(spans)
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows[:-1]]

    assert sums == {(r["rank"], r["device"], r["stage"]): r["idle"] for r in rows if r["idle"]}


def test_a_launch_after_the_device_ran_empty_is_the_hosts_and_the_latency_with_it() -> None:
    work = [Work("compute", 0, 100), Work("compute", 20_000, 20_100, launch_ns=15_000)]

    assert kinds(*work) == {"host bound": 19_900}


def test_work_that_lay_launched_and_began_soon_is_launch_bound() -> None:
    work = [Work("compute", 0, 100), Work("compute", 100 + LATENCY_NS, 40_000, launch_ns=100)]

    assert kinds(*work) == {"launch bound": LATENCY_NS}


@pytest.mark.parametrize(
    ("kind", "name"), [("communication", "waiting for a collective"), ("compute", "unknown")]
)
def test_work_that_lay_launched_for_long_waits_for_something(kind: str, name: str) -> None:
    work = [Work("compute", 0, 100), Work(kind, 101 + LATENCY_NS, 40_000, launch_ns=50)]

    assert kinds(*work) == {name: LATENCY_NS + 1}


def test_a_late_launch_that_then_waits_is_the_hosts_until_the_launch_alone() -> None:
    work = [Work("compute", 0, 100), Work("communication", 90_000, 90_100, launch_ns=10_000)]

    assert kinds(*work) == {"host bound": 9_900, "waiting for a collective": 80_000}


@pytest.mark.parametrize("launch", [None, 50_001])
def test_a_launch_that_is_not_known_or_comes_after_its_work_is_never_the_hosts(
    launch: int | None,
) -> None:
    work = [Work("compute", 0, 100), Work("compute", 50_000, 50_100, launch_ns=launch)]

    assert kinds(*work) == {"unknown": 49_900}


def test_time_after_the_last_work_is_unknown_and_before_the_first_it_is_the_hosts() -> None:
    work = [Work("compute", 50_000, 50_100, launch_ns=45_000)]

    assert told(spans_of(Job(RUN, work))) == {
        (0, 0, "host bound", "untraced"): (50_000, 1, 50_000, 50_000),
        (0, 0, "unknown", "untraced"): (949_900, 1, 949_900, 949_900),
    }


def test_a_device_idles_only_where_none_of_its_streams_runs_and_the_next_to_begin_counts() -> None:
    work = [
        Work("compute", 0, 100),
        Work("compute", 50, 300),  # on another stream
        Work("copy", 400, 500, launch_ns=350),
        Work("compute", 400, 450, launch_ns=200),  # launched first: the host was not late
    ]

    assert kinds(*work) == {"launch bound": 100}


def test_a_gap_counts_in_each_stage_that_the_host_was_in() -> None:
    rows = {
        0: [*RUN[0], *(Row(n, "stage", 1, a, a + 400) for n, a in (("one", 200), ("two", 600)))]
    }
    work = [Work("compute", 0, 100), Work("compute", 900, 10**6, launch_ns=800)]

    assert told(spans_of(Job(rows, work))) == {
        (0, 0, "host bound", "one"): (400, 1, 400, 400),
        (0, 0, "host bound", "two"): (300, 1, 300, 300),
        (0, 0, "host bound", "untraced"): (100, 1, 100, 100),
    }


def test_the_first_kernel_of_a_replay_is_launched_by_the_call_that_replays() -> None:
    work = [
        Work("compute", 0, 100),
        Work("compute", 900, 1_000, launch_ns=800, graph=3),
        Work("compute", 1_100, 1_200, launch_ns=800, graph=3),  # within a replay: not idle
    ]

    assert kinds(*work) == {"host bound": 800}


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (Job(RUN), "no kernels and no copies of a device were recorded"),
        (Job(RUN, [Work("compute", 0, 9)], [], note=UNSEEN), "no device is known to have idled"),
        (Job(RUN, [Work("compute", 0, 10**6)], []), "no device is known to have idled"),
    ],
)
def test_without_idle_time_it_abstains(job: Job, reason: str) -> None:
    table = idle(spans_of(job))

    assert (table.abstained or "").startswith(reason)
    assert not table.rows
