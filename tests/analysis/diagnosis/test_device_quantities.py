"""A device that waits for its host is found, priced as `idle` does, and never where it is busy.

One kernel that takes most of the time is named with its exact price; nothing else is.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.device.timeline import device_timeline, idle
from lightning_rlprof.analysis.diagnosis.device_quantities import _host_wait
from lightning_rlprof.analysis.diagnosis.evidence import Evidence
from lightning_rlprof.analysis.diagnosis.problem import Finding, Undecided
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import Spans
from tests.builders.device_jobs import jobs
from tests.builders.device_trace import KERNELS, Cells, Feed, feed, table, thinned, traced
from tests.builders.device_work import Job, spans_of
from tests.builders.diagnosed import judged
from tests.builders.runs import MAIN, Row, header, loaded
from tests.builders.scripted import without
from tests.effort import examples

SHORT, LONG = "short-gaps", "long-gaps"
BUSY = Feed(kernel=50_000)


def idle_results(spans: Spans) -> list[Finding | Undecided]:
    """Return what is found of gaps, else why it is undecided, which is the same of both."""
    return judged(spans, SHORT, LONG)[:1]


def of(how: Feed) -> list[Finding | Undecided]:
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
    assert claim.id == text
    captured = claim.by_name["of the captured time"]
    assert captured.value == pytest.approx(host_bound(spans) / Evidence(spans).observed_ns)
    assert claim.price is not None
    assert claim.price.low is not None
    assert claim.price.high is not None
    assert claim.price.low <= claim.price.share <= claim.price.high
    assert claim.confidence == "medium", "the profiler overhead is unknown"


def test_the_link_returns_what_stands_around_the_longest_gap() -> None:
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
        (Feed(until=600), "includes 20%"),
        (Feed(pieces=199), "199 kernels per device; 200 are needed"),
        (Feed(known=False), "includes 20%"),
    ],
)
def test_it_abstains_where_it_cannot_know(how: Feed, why: str) -> None:
    (found,) = of(how)
    assert isinstance(found, Undecided)
    assert why in found.why


def test_it_abstains_where_launches_lack_their_kernels() -> None:
    kernels, calls = feed(Feed())
    (found,) = idle_results(traced(thinned(kernels, 0.2, 0), calls))
    assert isinstance(found, Undecided)
    assert "launches have no kernel" in found.why


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
    assert isinstance(found, Undecided) == (confidence is None)
    if isinstance(found, Finding):
        assert found.confidence == confidence
        assert found.by_name["of the captured time"].low == pytest.approx(share or 0, rel=0.05)


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


def kernel_results(rows: list[Cells], seen_ns: int = 10_000_000) -> list[Finding | Undecided]:
    run = Evidence(traced(rows))
    run.__dict__["observed_ns"] = seen_ns
    return judged(run, "dominant-kernel")


def test_it_fires_with_the_exact_time_and_the_link_returns_its_launches() -> None:
    rows = kernels(0.6)
    (claim,) = kernel_results(rows)
    assert isinstance(claim, Finding)
    assert claim.by_name["kernel"].value == "it's a gemm"
    assert claim.by_name["of kernel time"].value == pytest.approx(0.6)
    assert (claim.kind, claim.price, claim.weight) == ("idea", None, 500 * 6_000)
    found = Run.of(traced(rows)).sql(claim.query)
    assert len(found.rows) == 500
    assert sum(int(str(ns)) for ns in found.column("duration_ns")) == claim.weight
    assert claim.place is not None
    assert claim.place.from_ns == found.column("start_ns")[0]


def test_the_heading_has_the_short_name_of_a_kernel_and_the_query_the_whole_one() -> None:
    long = "void at::native::" + "x" * 300
    rows = [
        {**row, "kernel": str(row["kernel"]).replace("it's a gemm", long)} for row in kernels(0.6)
    ]
    (claim,) = kernel_results(rows)
    assert isinstance(claim, Finding)
    assert f"{'x' * 20}…" in claim.heading
    assert long not in claim.heading
    assert long in claim.query


def test_it_is_silent_below_its_threshold_and_on_a_device_that_hardly_runs() -> None:
    assert kernel_results(kernels(0.3)) == []
    assert kernel_results(kernels(0.6), seen_ns=10**12) == []


def test_collectives_are_not_its_subject() -> None:
    rows = [{**row, "kernel": "ncclDevKernel_AllReduce"} for row in kernels(0.6)]
    assert kernel_results(rows) == []


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (kernels(0.42, drifts=True), "includes 40%"),
        (kernels(0.6, count=199), "199 kernels"),
    ],
)
def test_it_abstains_where_the_share_changes_or_kernels_are_few(
    rows: list[Cells], why: str
) -> None:
    (found,) = kernel_results(rows)
    assert isinstance(found, Undecided)
    assert why in found.why


@pytest.mark.parametrize("seed", range(20))
def test_deleting_a_fifth_of_the_kernels_names_no_other(seed: int) -> None:
    share = float(np.random.default_rng(seed).uniform(0.2, 0.8))
    for found in kernel_results(thinned(kernels(share), 0.2, seed)):
        if isinstance(found, Finding):
            assert share > 0.38
            assert found.by_name["kernel"].value == "it's a gemm"


# ---- FLOPs of training, and small collectives

STEP_NS = 10**9
PEAK = 989.4e12
H100 = "NVIDIA H100 80GB HBM3"
TRAINING = ("training_step",)


def trained(
    mfus: list[float],
    *,
    stage: str = "actor_update",
    device: str = H100,
    inside: Sequence[str] = (),
) -> Spans:
    """Return steps of one stage each, which counted FLOPs for such an MFU."""
    rows: list[Row] = []
    for at, mfu in enumerate(mfus):
        times, done = (at + 1, at * STEP_NS, (at + 1) * STEP_NS, MAIN), {"flops": mfu * PEAK}
        rows += [Row("step", "step", *times)]
        rows += [Row(stage, "stage", *times, None, done)]
        for name in inside:
            rows += [Row(name, "stage", *times, len(rows), done if name in TRAINING else None)]
    spans = loaded(rows)
    return replace(spans, headers={0: replace(header(0, 1), device=device)})


def mfu_results(spans: Spans) -> list[Finding | Undecided]:
    return judged(spans, "training-mfu")


@pytest.mark.parametrize("inside", [(), TRAINING, ("mini-batch", *TRAINING)])
def test_a_low_mfu_is_an_idea_without_a_price(inside: Sequence[str]) -> None:
    spans = trained([0.05] * 11 + [0.04], inside=inside)
    (claim,) = mfu_results(spans)
    assert isinstance(claim, Finding)
    assert claim.by_name["MFU"].value == pytest.approx(0.59 / 12)
    assert (claim.kind, claim.price) == ("idea", None)
    assert claim.confidence == "high"
    found = Run.of(spans).sql(claim.query)
    assert found.column("step")[0] in {12, 1, 2}
    assert len(found.rows) == 3
    assert claim.place is not None
    assert claim.place.step == 12, "the lowest"


@pytest.mark.parametrize(
    "spans",
    [
        trained([0.4] * 12),
        trained([0.01] * 12, stage="actor_generate"),
        trained([0.05] * 12, device="cpu"),
        loaded([Row("step", "step", 1, 0, 9)]),
    ],
)
def test_it_is_silent_where_mfu_is_fine_or_means_nothing_or_is_not_known(spans: Spans) -> None:
    assert not [each for each in mfu_results(spans) if isinstance(each, Finding)]


def test_a_forward_in_a_validation_is_no_training() -> None:
    rows: list[Row] = []
    for step in range(1, 13):
        times = (step, step * STEP_NS, (step + 1) * STEP_NS, MAIN)
        rows += [Row("step", "step", *times), Row("validation", "region", *times)]
        rows += [Row("actor_update", "stage", *times, None, {"flops": 0.05 * PEAK})]
    spans = loaded(rows)
    on_device = replace(spans, headers={0: replace(header(0, 1), device=H100)})
    assert not [each for each in mfu_results(on_device) if isinstance(each, Finding)]


@pytest.mark.parametrize(
    ("mfus", "why"),
    [
        ([0.05] * 4, "4 steps with counted FLOPs; 5 are needed"),
        ([0.05, 0.35] * 6, "includes 20%"),
        ([0.05] * 11 + [1.2], "above 100%"),
    ],
)
def test_it_abstains_where_steps_are_few_or_differ_or_cannot_be_true(
    mfus: list[float], why: str
) -> None:
    (found,) = mfu_results(trained(mfus))
    assert isinstance(found, Undecided)
    assert why in found.why


@pytest.mark.parametrize("seed", range(20))
def test_deleting_a_fifth_of_the_events_accuses_no_fast_training(seed: int) -> None:
    spans = without(trained([0.25, 0.3, 0.35] * 8), 0.2, seed)
    assert not [each for each in mfu_results(spans) if isinstance(each, Finding)]


COLLECTIVES = ("rank", "device", "stream", "operation", "group", "group size", "number", "bytes")
COLUMNS = (*COLLECTIVES, "dtype", "start", "duration", "stage", "step", "launch")
SMALL, LARGE = 4_000, 40_000_000


def calls(
    small: int = 200,
    large: int = 40,
    *,
    took: int = 40_000,
    late: int = 0,
    ranks: tuple[int, ...] = (0, 1),
) -> list[Cells]:
    """Return all_reduces of 4 kB and of 40 MB, one after the other; rank 1 comes later."""
    rows: list[Cells] = []
    for rank in ranks:
        now = 1_000
        for at in range(small + large):
            big = at >= small
            place = {"rank": rank, "device": rank, "stream": 9, "operation": "all_reduce"}
            group = {"group": "dp", "group size": 2, "number": at, "step": 1}
            length = 200_000 if big else took
            wait = late if rank == 0 and not big else 0
            time = {"start": now + (late - wait if not big else 0), "duration": length + wait}
            rows.append({**place, **group, **time, "bytes": LARGE if big else SMALL})
            now += length + (0 if big else late)
    return rows


def collectives(rows: list[Cells], *, hidden: bool = False) -> Spans:
    spans = loaded(*([Row("step", "step", 1, 0, 10**8)] for _ in range(2)))
    kernels = [{**row, "kernel": "ncclDevKernel_AllReduce"} for row in rows]
    kernels += [{**row, "kernel": "gemm", "stream": 7} for row in rows if hidden]
    tables = {
        "kernels": lambda: table("kernels", KERNELS, kernels),
        "collectives": lambda: table("collectives", COLUMNS, rows),
    }
    return replace(spans, tables=tables)


def collective_results(spans: Spans, seen_ns: int) -> list[Finding | Undecided]:
    run = Evidence(spans)
    run.__dict__["observed_ns"] = seen_ns
    return judged(run, "small-collectives")


def small_results(rows: list[Cells], seen_ns: int = 30_000_000) -> list[Finding | Undecided]:
    return collective_results(collectives(rows), seen_ns)


def test_it_fires_with_what_they_cost_and_the_link_returns_the_calls() -> None:
    mixed = [{**row, "stage": "small" if row["bytes"] == SMALL else "large"} for row in calls()]
    spans = collectives(mixed)
    (claim,) = collective_results(spans, 30_000_000)
    assert isinstance(claim, Finding)
    assert claim.by_name["collective"].value == "all_reduce of group dp in small"
    assert claim.by_name["of the captured time"].value == pytest.approx(16 / 30)
    found = Run.of(spans).sql(claim.query)
    assert len(found.rows) == 400
    assert set(found.column("bytes")) == {SMALL}


def staged(rows: list[Cells]) -> list[Cells]:
    return [{**row, "stage": "small" if row["bytes"] == SMALL else "large"} for row in rows]


def test_it_is_silent_where_they_are_few_or_hidden_or_none_are_recorded() -> None:
    assert small_results(staged(calls(took=1_000))) == []
    assert small_results(staged(calls()), seen_ns=10**10) == []
    assert (collective_results(collectives(staged(calls()), hidden=True), 30_000_000)) == []


def test_it_is_silent_where_they_use_as_much_of_the_link_as_larger_ones() -> None:
    fast = [{**row, "bytes": 10**6, "stage": "small"} for row in calls(large=0, took=10_000)]
    slow = [{**row, "stage": "large"} for row in calls(small=0)]
    assert small_results([*fast, *slow]) == []


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (calls(large=0), "no collective 8x as large to compare with"),
        (calls(small=19, took=400_000), "19 matched"),
        (calls(ranks=(0,)), "can't be separated (no-counterpart)"),
    ],
)
def test_it_abstains_without_a_comparison_or_a_peer(rows: list[Cells], why: str) -> None:
    found = small_results(staged(rows))
    assert found
    assert all(isinstance(each, Undecided) for each in found)
    assert any(why in each.why for each in found)


def test_what_is_waited_is_not_charged_to_the_messages() -> None:
    (claim,) = small_results(staged(calls(late=100_000)))
    assert isinstance(claim, Finding)
    share = claim.by_name["of the captured time"].value
    assert share == pytest.approx(16 / 30), "rank 0 waits as long again for rank 1"


def test_it_abstains_where_all_that_is_exposed_may_be_waiting() -> None:
    rows = staged(calls(large=40, late=100_000))
    spans = collectives(rows)
    kernels = [{**row, "kernel": "ncclDevKernel_AllReduce"} for row in rows]
    kernels += [{**row, "kernel": "gemm", "stream": 7, "duration": 40_000} for row in rows]
    told = {**spans.tables, "kernels": lambda: table("kernels", KERNELS, kernels)}
    (found,) = collective_results(replace(spans, tables=told), 30_000_000)
    assert isinstance(found, Undecided)
    assert "includes 5.0%" in found.why


@pytest.mark.parametrize("seed", range(10))
def test_deleting_a_fifth_of_the_calls_accuses_nothing_large(seed: int) -> None:
    for found in small_results(staged(thinned(calls(), 0.2, seed))):
        assert isinstance(found, Undecided) or "in small" in found.heading
