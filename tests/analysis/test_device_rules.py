"""A device that waits for its host is found, priced as `idle` does, and never where it is busy."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.claims import Claim, Undecided
from lightning_rlprof.analysis.device_rules import _waits, device_claims
from lightning_rlprof.analysis.device_runs import device_runs
from lightning_rlprof.analysis.idle import idle
from lightning_rlprof.analysis.unpaired import unpaired
from lightning_rlprof.spans import Spans
from tests.analysis.device_jobs import jobs
from tests.analysis.device_trace import KERNELS, Cells, Feed, feed, table, thinned, traced
from tests.analysis.device_work import Job, spans_of
from tests.runs import Row, loaded

SHORT = "devices wait for the launches of short work"
LONG = "devices run empty until the host launches again"
BUSY = Feed(kernel=50_000)


def said(spans: Spans) -> list[Claim | Undecided]:
    return list(device_claims(spans, device_runs(spans), unpaired(spans)))


def of(how: Feed) -> list[Claim | Undecided]:
    return said(traced(*feed(how)))


def host_bound(spans: Spans) -> int:
    table = idle(spans)
    kinds = zip(table.column("kind"), table.column("total"), strict=True)
    return sum(int(total or 0) for kind, total in kinds if kind == "host bound")


@pytest.mark.parametrize(
    ("how", "text"), [(Feed(), SHORT), (Feed(kernel=9_900, stall=1_500_000), LONG)]
)
def test_it_fires_on_a_host_that_is_late_and_tells_short_gaps_from_long(
    how: Feed, text: str
) -> None:
    spans = traced(*feed(how))
    (claim,) = said(spans)
    assert isinstance(claim, Claim)
    assert claim.text == text
    assert claim.effect == host_bound(spans)
    assert claim.low is not None
    assert claim.high is not None
    assert claim.low <= claim.effect <= claim.high
    assert claim.confidence == "medium", "nobody knows what the profiler cost"


def test_its_link_returns_just_the_gaps_that_it_counted() -> None:
    spans = traced(*feed(Feed()))
    (claim,) = said(spans)
    assert isinstance(claim, Claim)
    ((rank, device, gaps, ns),) = spans.sql(claim.query).rows
    assert (rank, device) == (0, 0)
    assert f" {gaps:,} gaps" in claim.evidence
    assert int(str(ns)) <= (claim.effect or 0)


def test_the_link_of_a_long_gap_returns_what_stands_around_it() -> None:
    spans = traced(*feed(Feed(kernel=9_900, stall=1_500_000)))
    (claim,) = said(spans)
    assert isinstance(claim, Claim)
    assert claim.place is not None
    before, after = spans.sql(claim.query).rows
    assert int(str(before[4])) + int(str(before[5])) == claim.place.from_ns
    assert after[4] == claim.place.to_ns
    assert claim.place.step == 1


@pytest.mark.parametrize("how", [BUSY, Feed(kernel=9_000, ahead=5_000_000)])
def test_it_is_silent_where_the_device_is_busy(how: Feed) -> None:
    assert of(how) == []


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (Feed(until=600), "of the time where 20% counts"),
        (Feed(pieces=199), "of 199 pieces of device work"),
        (Feed(known=False), "0% to "),
    ],
)
def test_it_abstains_where_it_cannot_know(how: Feed, why: str) -> None:
    (found,) = of(how)
    assert isinstance(found, Undecided)
    assert why in found.why


def test_it_abstains_where_launches_lack_their_kernels() -> None:
    kernels, calls = feed(Feed())
    (found,) = said(traced(thinned(kernels, 0.2, 0), calls))
    assert found == Undecided("devices that wait for the host", found[1])
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
    (found,) = said(spans)
    assert isinstance(found, Undecided) == (confidence is None)
    if isinstance(found, Claim):
        assert found.confidence == confidence
        assert found.low == pytest.approx((share or 0) * 20_000_000, rel=0.05)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("how", [BUSY, Feed(kernel=12_000), Feed(kernel=30_000, ahead=10**6)])
def test_deleting_a_fifth_of_the_events_never_accuses_the_host(how: Feed, seed: int) -> None:
    kernels, calls = feed(how, seed)
    lost = thinned(kernels, 0.2, seed)
    for kept in (thinned(calls, 0.2, seed + 100), no_calls()):
        assert not [each for each in said(traced(lost, kept)) if isinstance(each, Claim)]


def no_calls() -> Sequence[Cells]:
    return ()


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_what_waits_for_the_host_is_what_idle_says(job: Job) -> None:
    spans = spans_of(job)
    lanes = [lane for lane in device_runs(spans).lanes if len(lane.known[0])]
    assert sum(_waits(lane).late.sum() for lane in lanes) == host_bound(spans)
