"""A device that waits for its host is found, priced as `idle` does, and never where it is busy.

One kernel that takes most of the time is named with its exact price; nothing else is.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.device.timeline import device_timeline
from lightning_rlprof.analysis.device.utilization import idle
from lightning_rlprof.analysis.findings.device_evidence import (
    _host_wait,
    device_idle,
    dominant_kernel,
)
from lightning_rlprof.analysis.findings.finding import Finding, NotChecked, RunData
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import Spans
from tests.builders.device_jobs import jobs
from tests.builders.device_trace import KERNELS, Cells, Feed, feed, table, thinned, traced
from tests.builders.device_work import Job, spans_of
from tests.builders.runs import Row, loaded
from tests.effort import examples

SHORT = "Device idle between short kernels"
LONG = "Device idle: long gaps before launches"
BUSY = Feed(kernel=50_000)


def idle_results(spans: Spans) -> list[Finding | NotChecked]:
    return list(device_idle(RunData(spans)))


def of(how: Feed) -> list[Finding | NotChecked]:
    return idle_results(traced(*feed(how)))


def host_bound(spans: Spans) -> int:
    table = idle(spans)
    kinds = zip(table.column("kind"), table.column("total"), strict=True)
    return sum(int(total or 0) for kind, total in kinds if kind == "host-bound idle")


@pytest.mark.parametrize(
    ("how", "text"), [(Feed(), SHORT), (Feed(kernel=9_900, stall=1_500_000), LONG)]
)
def test_it_reports_a_late_host_and_separates_short_gaps_from_long(how: Feed, text: str) -> None:
    spans = traced(*feed(how))
    (claim,) = idle_results(spans)
    assert isinstance(claim, Finding)
    assert claim.title == text
    assert claim.cost == host_bound(spans)
    assert claim.low is not None
    assert claim.high is not None
    assert claim.low <= claim.cost <= claim.high
    assert claim.confidence == "medium", "the profiler overhead is unknown"


def test_its_link_returns_just_the_gaps_that_it_counted() -> None:
    spans = traced(*feed(Feed()))
    (claim,) = idle_results(spans)
    assert isinstance(claim, Finding)
    ((rank, device, gaps, ns),) = Run.of(spans).sql(claim.query).rows
    assert (rank, device) == (0, 0)
    assert f" {gaps:,} gaps" in claim.evidence
    assert int(str(ns)) <= (claim.cost or 0)


def test_the_link_of_a_long_gap_returns_what_stands_around_it() -> None:
    spans = traced(*feed(Feed(kernel=9_900, stall=1_500_000)))
    (claim,) = idle_results(spans)
    assert isinstance(claim, Finding)
    assert claim.place is not None
    before, after = Run.of(spans).sql(claim.query).rows
    assert int(str(before[4])) + int(str(before[5])) == claim.place.from_ns
    assert after[4] == claim.place.to_ns
    assert claim.place.step == 1


@pytest.mark.parametrize("how", [BUSY, Feed(kernel=9_000, ahead=5_000_000)])
def test_it_is_silent_where_the_device_is_busy(how: Feed) -> None:
    assert of(how) == []


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (Feed(until=600), "includes the threshold of 20%"),
        (Feed(pieces=199), "needs 200 kernels, has 199"),
        (Feed(known=False), "95% CI 0–"),
    ],
)
def test_it_abstains_where_it_cannot_know(how: Feed, why: str) -> None:
    (found,) = of(how)
    assert isinstance(found, NotChecked)
    assert why in found.why


def test_it_abstains_where_launches_lack_their_kernels() -> None:
    kernels, calls = feed(Feed())
    (found,) = idle_results(traced(thinned(kernels, 0.2, 0), calls))
    assert found == NotChecked("device idle between launches", found[1])
    assert "lost" in found[1]


@pytest.mark.parametrize(
    ("other_ns", "confidence", "share"),
    [(5_000_000, "high", 0.5), (4_000_000, "medium", 0.3), (3_000_000, None, None)],
)
def test_what_captured_steps_take_longer_than_others_is_not_charged_to_the_host(
    other_ns: int, confidence: str | None, share: float | None
) -> None:
    kernels, _ = feed(Feed())
    others = 5 * other_ns
    rows = [
        *(Row("step", "step", n + 1, n * other_ns, (n + 1) * other_ns) for n in range(5)),
        *(
            Row("step", "step", n + 6, start, start + 5_000_000, counters={"capture": 1})
            for n, start in enumerate(range(others, others + 20_000_000, 5_000_000))
        ),
    ]
    moved = [
        {**row, **{key: int(str(row[key])) + others for key in ("start", "launch")}}
        for row in kernels
    ]
    spans = replace(loaded(rows), tables={"kernels": lambda: table("kernels", KERNELS, moved)})
    (found,) = idle_results(spans)
    assert isinstance(found, NotChecked) == (confidence is None)
    if isinstance(found, Finding):
        assert found.confidence == confidence
        assert found.low == pytest.approx((share or 0) * 20_000_000, rel=0.05)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("how", [BUSY, Feed(kernel=12_000), Feed(kernel=30_000, ahead=10**6)])
def test_deleting_a_fifth_of_the_events_never_accuses_the_host(how: Feed, seed: int) -> None:
    kernels, calls = feed(how, seed)
    lost = thinned(kernels, 0.2, seed)
    for kept in (thinned(calls, 0.2, seed + 100), no_calls()):
        assert not [each for each in idle_results(traced(lost, kept)) if isinstance(each, Finding)]


def no_calls() -> Sequence[Cells]:
    return ()


@settings(max_examples=examples(60), deadline=None)
@given(jobs())
def test_what_waits_for_the_host_is_what_idle_says(job: Job) -> None:
    spans = spans_of(job)
    lanes = [lane for lane in device_timeline(spans).lanes if len(lane.profiled[0])]
    assert sum(_host_wait(lane).parts[0].sum() for lane in lanes) == host_bound(spans)


def kernels(share: float, count: int = 1_000, *, drifts: bool = False) -> list[Cells]:
    """Return kernels of ten names; the share of one is as given, or grows to twice that."""
    rows: list[Cells] = []
    now = 1_000
    for at in range(count):
        part = 2 * share * at / count if drifts else share
        gemm = at % 2 == 0
        took = round(10_000 * part) if gemm else round(10_000 * (1 - part))
        name = "it's a gemm" if gemm else f"copy_{at % 9}"
        place = {"rank": 0, "device": 0, "stream": 7, "kernel": name, "step": 1}
        rows.append({**place, "start": now, "duration": took})
        now += took
    return rows


def kernel_results(rows: list[Cells], seen_ns: int = 10_000_000) -> list[Finding | NotChecked]:
    run = RunData(traced(rows))
    run.__dict__["observed_ns"] = seen_ns
    return list(dominant_kernel(run))


def test_it_fires_with_the_exact_time_and_the_link_returns_its_launches() -> None:
    rows = kernels(0.6)
    (claim,) = kernel_results(rows)
    assert isinstance(claim, Finding)
    assert claim.title == "One kernel takes 60% of kernel time: it's a gemm"
    assert claim.cost == 500 * 6_000
    assert claim.low is not None
    assert claim.high is not None
    assert claim.low <= claim.cost <= claim.high + 1
    found = Run.of(traced(rows)).sql(claim.query)
    assert len(found.rows) == 500
    assert sum(int(str(ns)) for ns in found.column("duration_ns")) == claim.cost
    assert claim.place is not None
    assert claim.place.from_ns == found.column("start_ns")[0]


def test_the_name_of_a_kernel_is_whole_in_the_title() -> None:
    long = "void at::native::" + "x" * 300
    rows = [
        {**row, "kernel": str(row["kernel"]).replace("it's a gemm", long)} for row in kernels(0.6)
    ]
    (claim,) = kernel_results(rows)
    assert isinstance(claim, Finding)
    assert claim.title.endswith(long)


def test_it_is_silent_below_its_threshold_and_on_a_device_that_hardly_runs() -> None:
    assert kernel_results(kernels(0.3)) == []
    assert kernel_results(kernels(0.6), seen_ns=10**12) == []


def test_collectives_are_not_its_subject() -> None:
    rows = [{**row, "kernel": "ncclDevKernel_AllReduce"} for row in kernels(0.6)]
    assert kernel_results(rows) == []


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (kernels(0.42, drifts=True), "includes the threshold of 40%"),
        (kernels(0.6, count=199), "needs 200 kernels, has 199"),
    ],
)
def test_it_abstains_where_the_share_changes_or_kernels_are_few(
    rows: list[Cells], why: str
) -> None:
    (found,) = kernel_results(rows)
    assert isinstance(found, NotChecked)
    assert why in found.why


@pytest.mark.parametrize("seed", range(20))
def test_deleting_a_fifth_of_the_kernels_names_no_other(seed: int) -> None:
    share = float(np.random.default_rng(seed).uniform(0.2, 0.8))
    for found in kernel_results(thinned(kernels(share), 0.2, seed)):
        if isinstance(found, Finding):
            assert share > 0.38
            assert found.title.endswith(": it's a gemm")
