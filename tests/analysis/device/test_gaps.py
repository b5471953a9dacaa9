"""Gaps of devices one by one: their sums are those of the tables, and the host's call is right."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from lightning_rlprof.analysis.catalog import ANALYSES
from lightning_rlprof.analysis.device.gaps import CAUSES, IN_REPLAY, gaps_of, longest_gaps
from lightning_rlprof.analysis.device.timeline import LATENCY_NS, device_timeline
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of
from tests.builders.calls import Call, Copy, Kernel, run
from tests.builders.device_jobs import jobs
from tests.builders.device_work import Job, Work, devices, spans_of
from tests.builders.runs import Row
from tests.places import SHARED_DATA

KINETO = SHARED_DATA / "kineto"


def sums_of(spans: Spans) -> tuple[Counter[str], int]:
    """Return idle time by cause, and the other time without work."""
    idle, unknown = Counter[str](), 0
    for lane in device_timeline(spans).lanes:
        gaps = gaps_of(lane)
        for start, end, cause in zip(*(each.tolist() for each in gaps[:3]), strict=True):
            if cause < IN_REPLAY:
                idle[CAUSES[cause]] += end - start
            else:
                unknown += end - start
    return idle, unknown


def sums_of_tables(spans: Spans) -> tuple[Counter[str], int]:
    idle, broken = Counter[str](), ANALYSES["breakdown"].run(spans)
    for row in rows_of(ANALYSES["idle"].run(spans)):
        idle[row["kind"]] += row["total"]
    return idle, rows_of(broken)[-1]["unknown"] if broken.rows else 0


@given(jobs())
def test_gaps_are_disjoint_and_add_up_to_breakdown_and_idle_to_the_nanosecond(job: Job) -> None:
    spans = spans_of(job)
    assert sums_of(spans) == sums_of_tables(spans)
    for lane in device_timeline(spans).lanes:
        gaps = gaps_of(lane)
        assert (gaps.start_ns < gaps.end_ns).all()
        assert (gaps.end_ns[:-1] <= gaps.start_ns[1:]).all()
        busy = {
            now
            for now, *_ in devices(spans, job)[lane.rank, lane.device].states()
            if devices(spans, job)[lane.rank, lane.device].running(now)
        }
        without = {
            now
            for start, end in zip(gaps.start_ns.tolist(), gaps.end_ns.tolist(), strict=True)
            for now in range(start, end)
        }
        assert without == {*range(lane.start_ns, lane.end_ns)} - busy


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
@pytest.mark.parametrize(
    "name", ["h100_qwen1.5-0.5b.json.gz", "two_ranks", "sglang_qwen3-8b_decode.json.gz"]
)
def test_gaps_of_real_traces_add_up(name: str) -> None:
    spans = load(KINETO / name)
    assert sums_of(spans) == sums_of_tables(spans)


def test_time_in_a_graph_replay_is_a_cause_of_its_own() -> None:
    work = [Work("compute", 10, 20, graph=5), Work("compute", 30, 40, graph=5)]
    (lane,) = device_timeline(spans_of(Job({0: [Row("r", "region", 1, 0, 60)]}, work))).lanes
    start, end, cause, follows = (column.tolist() for column in gaps_of(lane))
    assert (start, end) == ([0, 20, 40], [10, 30, 60])
    replay, idle = "inside graph replays", "unattributed idle"
    assert [CAUSES[each] for each in cause] == [idle, replay, idle]
    assert follows == [0, 1, 2]


def test_the_host_is_in_the_innermost_call_over_more_than_half_of_a_gap() -> None:
    long = 10 * LATENCY_NS
    kernels = [
        Kernel("a", 0, 100, -50),
        Kernel("b", long, long + 100, long - 10),
        Kernel("c", 3 * long, 3 * long + 100, 3 * long - 10, thread=None),
    ]
    calls = [
        Call("train", -100, 4 * long, "python"),
        Call("load", 50, long - 100, "python"),
        Call("short", 200, long // 3, "python"),
        Call("wait", 60, long - 90, "python", thread=8),
        Call("cudaLaunchKernel", long - 10, long - 5, "runtime"),
    ]
    spans = run(calls, kernels)
    timeline = device_timeline(spans)
    gaps = [gaps_of(lane) for lane in timeline.lanes]
    found = longest_gaps(spans, timeline, gaps, 2)
    assert [(gap.end_ns - gap.start_ns, gap.row, gap.call) for gap in found] == [
        (2 * long - 100, 2, "train"),
        (long - 100, 1, "load"),
    ], "only a thread that launches is asked what the host did"
    alone = replace(spans, tables={"kernels": spans.tables["kernels"]})
    assert [gap.call for gap in longest_gaps(alone, timeline, gaps, 2)] == [None, None]


def test_the_longest_gaps_of_all_devices_come_first() -> None:
    kernels = [Kernel("k", at * at * 100, at * at * 100 + 10) for at in range(6)]
    other = [each._replace(rank=1, end=each.start + 20) for each in kernels]
    spans = run(None, kernels + other, [Copy("HtoD", 5_000, 5_010)])
    timeline = device_timeline(spans)
    gaps = [gaps_of(lane) for lane in timeline.lanes]
    found = longest_gaps(spans, timeline, gaps, 3)
    lengths = [gap.end_ns - gap.start_ns for gap in found]
    every = sorted(
        (length for own in gaps for length in (own.end_ns - own.start_ns).tolist()), reverse=True
    )
    assert lengths == every[:3]
