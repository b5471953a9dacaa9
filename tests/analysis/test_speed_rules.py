"""A low MFU of training is a finding only where FLOPs and hardware are told."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_rlprof.analysis.claims import Claim, Undecided
from lightning_rlprof.analysis.speed_rules import speed_claims
from lightning_rlprof.spans import Spans
from tests.analysis.scripted import without
from tests.runs import MAIN, Row, header, loaded

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


def said(spans: Spans) -> list[Claim | Undecided]:
    return list(speed_claims(spans))


@pytest.mark.parametrize("inside", [(), TRAINING, ("mini-batch", *TRAINING)])
def test_it_fires_with_what_the_threshold_would_save(inside: Sequence[str]) -> None:
    spans = trained([0.05] * 11 + [0.04], inside=inside)
    (claim,) = said(spans)
    assert isinstance(claim, Claim)
    assert claim.text == "training reaches 5% of what its devices compute: actor_update"
    assert claim.effect == pytest.approx(12e9 * (1 - (0.59 / 12) / 0.2), rel=1e-6)
    assert claim.low is not None
    assert claim.high is not None
    assert claim.low <= claim.effect <= claim.high
    assert claim.confidence == "high"
    found = spans.sql(claim.query)
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
    assert said(spans) == []


@pytest.mark.parametrize(
    ("mfus", "why"),
    [
        ([0.05] * 4, "of 4 steps"),
        ([0.05, 0.35] * 6, "where 20% counts"),
        ([0.05] * 11 + [1.2], "above 100 %"),
    ],
)
def test_it_abstains_where_steps_are_few_or_differ_or_cannot_be_true(
    mfus: list[float], why: str
) -> None:
    (found,) = said(trained(mfus))
    assert isinstance(found, Undecided)
    assert why in found.why


@pytest.mark.parametrize("seed", range(20))
def test_deleting_a_fifth_of_the_events_accuses_no_fast_training(seed: int) -> None:
    spans = without(trained([0.25, 0.3, 0.35] * 8), 0.2, seed)
    assert not [each for each in said(spans) if isinstance(each, Claim)]
