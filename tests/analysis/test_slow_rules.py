"""A verdict that accuses becomes a claim about just that rank; what is not sure accuses nobody."""

from typing import Any

import pytest

from lightning_rlprof.analysis.slow_rules import _claim, slow_claims
from lightning_rlprof.analysis.verdicts import SLOW_HOST, SLOW_OR_UNEVEN
from tests.analysis.scripted import Script, play, without

ROW: dict[str, Any] = {
    "rank": None,
    "verdict": SLOW_HOST,
    "effect": None,
    "stages": "not known",
    "lost by others": 5_000,
    "steps": "2-9",
    "low": None,
    "high": None,
    "chance": 0.001,
    "group": "actor ranks 1, 2",
}


def test_it_fires_on_the_slow_rank_with_a_price_and_a_link_to_its_stages() -> None:
    spans = play(Script(slow={3: 0.2}), 5).spans
    (claim,) = slow_claims(spans)
    assert claim.text.startswith("rank 3 makes the others wait: slow")
    assert claim.effect is not None
    assert claim.low is not None
    assert claim.high is not None
    assert claim.low < claim.effect < claim.high
    found = spans.sql(claim.query)
    assert set(found.column("rank")) == {3}
    assert set(found.column("kind")) == {"stage"}
    assert claim.place is not None
    assert (claim.place.rank, claim.place.from_ns) == (3, found.column("start_ns")[0])


@pytest.mark.parametrize("script", [Script(), Script(uneven=0.3), Script(more={2: 1.5})])
def test_it_is_silent_where_nobody_is_slow_or_the_work_is_uneven(script: Script) -> None:
    assert list(slow_claims(play(script, 5).spans)) == []


def test_it_abstains_with_too_few_steps() -> None:
    assert list(slow_claims(play(Script(slow={3: 0.3}, steps=8), 5).spans)) == []


def test_where_one_of_several_is_meant_all_are_named_and_it_is_less_sure() -> None:
    spans = play(Script(ranks=4, steps=12), 1).spans
    claim = _claim(spans, ROW)
    assert claim.text == "one of ranks 1, 2 makes the others wait: slow host"
    assert (claim.effect, claim.low, claim.high, claim.confidence) == (5_000, None, None, "medium")
    found = spans.sql(claim.query)
    assert set(found.column("rank")) == {1, 2}
    assert set(found.column("step")) == set(range(2, 10))
    single = _claim(spans, {**ROW, "rank": 1, "verdict": SLOW_OR_UNEVEN, "group": "actor"})
    assert single.confidence == "medium", "the work was not counted"


@pytest.mark.parametrize("seed", range(5))
def test_deleting_a_fifth_of_the_events_of_a_healthy_run_accuses_nobody(seed: int) -> None:
    spans = without(play(Script(uneven=0.3, steps=40), seed).spans, 0.2, seed)
    assert list(slow_claims(spans)) == []
