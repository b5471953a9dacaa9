"""Small messages are a finding where the same group shows that it can move more, and only there.

A low MFU of training is a finding only where FLOPs and hardware are told.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_rlprof.analysis.findings.device_evidence import small_collectives
from lightning_rlprof.analysis.findings.finding import Finding, NotChecked, RunData
from lightning_rlprof.analysis.findings.run_evidence import low_mfu
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import Spans
from tests.builders.device_trace import KERNELS, Cells, table, thinned
from tests.builders.runs import MAIN, Row, header, loaded
from tests.builders.scripted import without

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


def mfu_results(spans: Spans) -> list[Finding | NotChecked]:
    return list(low_mfu(RunData(spans)))


@pytest.mark.parametrize("inside", [(), TRAINING, ("mini-batch", *TRAINING)])
def test_it_fires_with_what_the_threshold_would_save(inside: Sequence[str]) -> None:
    spans = trained([0.05] * 11 + [0.04], inside=inside)
    (claim,) = mfu_results(spans)
    assert isinstance(claim, Finding)
    assert claim.title == "Training MFU is low: 5% in actor_update"
    assert claim.cost == pytest.approx(12e9 * (1 - (0.59 / 12) / 0.2), rel=1e-6)
    assert claim.low is not None
    assert claim.high is not None
    assert claim.low <= claim.cost <= claim.high
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
    assert mfu_results(spans) == []


def test_a_forward_in_a_validation_is_no_training() -> None:
    rows: list[Row] = []
    for step in range(1, 13):
        times = (step, step * STEP_NS, (step + 1) * STEP_NS, MAIN)
        rows += [Row("step", "step", *times), Row("validation", "region", *times)]
        rows += [Row("actor_update", "stage", *times, None, {"flops": 0.05 * PEAK})]
    spans = loaded(rows)
    assert mfu_results(replace(spans, headers={0: replace(header(0, 1), device=H100)})) == []


@pytest.mark.parametrize(
    ("mfus", "why"),
    [
        ([0.05] * 4, "needs 5 steps with counted FLOPs, has 4"),
        ([0.05, 0.35] * 6, "includes the threshold of 20%"),
        ([0.05] * 11 + [1.2], "above 100%"),
    ],
)
def test_it_abstains_where_steps_are_few_or_differ_or_cannot_be_true(
    mfus: list[float], why: str
) -> None:
    (found,) = mfu_results(trained(mfus))
    assert isinstance(found, NotChecked)
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


def traced(rows: list[Cells], *, hidden: bool = False) -> Spans:
    spans = loaded(*([Row("step", "step", 1, 0, 10**8)] for _ in range(2)))
    kernels = [{**row, "kernel": "ncclDevKernel_AllReduce"} for row in rows]
    kernels += [{**row, "kernel": "gemm", "stream": 7} for row in rows if hidden]
    tables = {
        "kernels": lambda: table("kernels", KERNELS, kernels),
        "collectives": lambda: table("collectives", COLUMNS, rows),
    }
    return replace(spans, tables=tables)


def collective_results(spans: Spans, seen_ns: int) -> list[Finding | NotChecked]:
    run = RunData(spans)
    run.__dict__["observed_ns"] = seen_ns
    return small_collectives(run)


def results(rows: list[Cells], seen_ns: int = 30_000_000) -> list[Finding | NotChecked]:
    return collective_results(traced(rows), seen_ns)


def test_it_fires_with_what_they_cost_and_the_link_returns_the_calls() -> None:
    mixed = [{**row, "stage": "small" if row["bytes"] == SMALL else "large"} for row in calls()]
    spans = traced(mixed)
    (claim,) = collective_results(spans, 30_000_000)
    assert isinstance(claim, Finding)
    assert claim.title.startswith(
        "Small collectives run at low bandwidth: all_reduce of group dp in small reaches 1/"
    )
    assert (claim.low, claim.cost, claim.high) == (16_000_000,) * 3
    found = Run.of(spans).sql(claim.query)
    assert len(found.rows) == 400
    assert set(found.column("bytes")) == {SMALL}
    assert claim.place is not None
    assert claim.place.step == 1


def staged(rows: list[Cells]) -> list[Cells]:
    return [{**row, "stage": "small" if row["bytes"] == SMALL else "large"} for row in rows]


def test_it_is_silent_where_they_are_few_or_hidden_or_none_are_recorded() -> None:
    assert results(staged(calls(took=1_000))) == []
    assert results(staged(calls()), seen_ns=10**10) == []
    assert (collective_results(traced(staged(calls()), hidden=True), 30_000_000)) == []
    assert (collective_results(loaded([Row("step", "step", 1, 0, 9)]), 10**9)) == []


def test_it_is_silent_where_they_use_as_much_of_the_link_as_larger_ones() -> None:
    fast = [{**row, "bytes": 10**6, "stage": "small"} for row in calls(large=0, took=10_000)]
    slow = [{**row, "stage": "large"} for row in calls(small=0)]
    assert results([*fast, *slow]) == []


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (calls(large=0), "no collective 8x as large to compare with"),
        (calls(small=19, took=400_000), "needs 20 matched collectives, has 19"),
        (calls(ranks=(0,)), "to separate wait and transfer"),
    ],
)
def test_it_abstains_without_a_comparison_or_a_peer(rows: list[Cells], why: str) -> None:
    found = results(staged(rows))
    assert found
    assert all(isinstance(each, NotChecked) for each in found)
    assert any(why in each[1] for each in found)


def test_what_is_waited_is_not_charged_to_the_messages() -> None:
    (claim,) = results(staged(calls(late=100_000)))
    assert isinstance(claim, Finding)
    assert claim.cost == 16_000_000, "rank 0 waits as long again for rank 1"


def test_it_abstains_where_all_that_is_exposed_may_be_waiting() -> None:
    rows = staged(calls(large=40, late=100_000))
    spans = traced(rows)
    kernels = [{**row, "kernel": "ncclDevKernel_AllReduce"} for row in rows]
    kernels += [{**row, "kernel": "gemm", "stream": 7, "duration": 40_000} for row in rows]
    told = {**spans.tables, "kernels": lambda: table("kernels", KERNELS, kernels)}
    (found,) = collective_results(replace(spans, tables=told), 30_000_000)
    assert isinstance(found, NotChecked)
    assert "may be waiting for peers" in found.why


@pytest.mark.parametrize("seed", range(10))
def test_deleting_a_fifth_of_the_calls_accuses_nothing_large(seed: int) -> None:
    for found in results(staged(thinned(calls(), 0.2, seed))):
        assert isinstance(found, NotChecked) or "in small" in found.title
