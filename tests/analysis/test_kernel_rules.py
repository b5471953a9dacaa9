"""One kernel that takes most of the time is named with its exact price; nothing else is."""

import numpy as np
import pytest

from lightning_rlprof.analysis.claims import Claim, Undecided
from lightning_rlprof.analysis.kernel_rules import kernel_claims
from tests.analysis.device_trace import Cells, thinned, traced


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


def said(rows: list[Cells], seen_ns: int = 10_000_000) -> list[Claim | Undecided]:
    return list(kernel_claims(traced(rows), seen_ns))


def test_it_fires_with_the_exact_time_and_the_link_returns_its_launches() -> None:
    rows = kernels(0.6)
    (claim,) = said(rows)
    assert isinstance(claim, Claim)
    assert claim.text == "one kernel takes 60% of the kernels' time: it's a gemm"
    assert claim.effect == 500 * 6_000
    assert claim.low is not None
    assert claim.high is not None
    assert claim.low <= claim.effect <= claim.high + 1
    found = traced(rows).sql(claim.query)
    assert len(found.rows) == 500
    assert sum(int(str(ns)) for ns in found.column("duration_ns")) == claim.effect
    assert claim.place is not None
    assert claim.place.from_ns == found.column("start_ns")[0]


def test_it_is_silent_below_its_threshold_and_on_a_device_that_hardly_runs() -> None:
    assert said(kernels(0.3)) == []
    assert said(kernels(0.6), seen_ns=10**12) == []


def test_collectives_are_not_its_subject() -> None:
    rows = [{**row, "kernel": "ncclDevKernel_AllReduce"} for row in kernels(0.6)]
    assert said(rows) == []


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (kernels(0.42, drifts=True), "where 40% counts"),
        (kernels(0.6, count=199), "of 199 kernels"),
    ],
)
def test_it_abstains_where_the_share_changes_or_kernels_are_few(
    rows: list[Cells], why: str
) -> None:
    (found,) = said(rows)
    assert isinstance(found, Undecided)
    assert why in found.why


@pytest.mark.parametrize("seed", range(20))
def test_deleting_a_fifth_of_the_kernels_names_no_other(seed: int) -> None:
    share = float(np.random.default_rng(seed).uniform(0.2, 0.8))
    for found in said(thinned(kernels(share), 0.2, seed)):
        if isinstance(found, Claim):
            assert share > 0.38
            assert found.text.endswith(": it's a gemm")
