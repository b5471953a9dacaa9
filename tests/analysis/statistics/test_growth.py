"""One judge says whether memory grows: leaks, plateaus, sawtooths, walks, and growing work."""

from collections import Counter

import numpy as np
import pytest

from lightning_rlprof.analysis.statistics.growth import MIN_VALUES_TO_GROW, grows
from lightning_rlprof.tables.arrays import Float64s
from tests.effort import DEEP

MIB, BASE = 2.0**20, 2.0**32
SEEDS = 40 if DEEP else 12


def verdicts(law: str, steps: int) -> Counter[str]:
    """Return how often each verdict is given on a law of memory."""
    found: Counter[str] = Counter()
    for seed in range(SEEDS):
        random, at = np.random.default_rng(seed), np.arange(steps)
        noise = random.normal(0, MIB / 2, steps)
        saw = (at + random.integers(10)) % 10 / 10
        laws: dict[str, Float64s] = {
            "leak": at * MIB,
            "leak below a sawtooth": at * MIB + saw * 20 * MIB,
            "sawtooth": saw * 100 * MIB,
            "walk": np.cumsum(random.normal(0, 5 * MIB, steps)),
            "cache": 2_000 * MIB * (1 - np.exp(-at / (steps / 6))),
            "noise": random.normal(0, 5 * MIB, steps),
        }
        found[grows(at, (BASE + laws[law] + noise).astype(np.int64)).verdict] += 1
    return found


@pytest.mark.parametrize(
    ("law", "steps", "verdict"),
    [
        ("leak", 24, "leak"),
        ("leak", 60, "leak"),
        ("leak below a sawtooth", 120, "leak"),
        ("sawtooth", 60, "sawtooth"),
        ("cache", 60, "plateau"),
        ("cache", 200, "plateau"),
        ("noise", 60, "flat"),
    ],
)
def test_each_law_has_its_verdict(law: str, steps: int, verdict: str) -> None:
    assert verdicts(law, steps) == {verdict: SEEDS}


@pytest.mark.parametrize("steps", [24, 60, 200])
def test_a_walk_without_drift_is_seldom_a_leak(steps: int) -> None:
    assert verdicts("walk", steps)["leak"] <= 1 + 0.01 * SEEDS


def test_a_leak_below_a_sawtooth_is_never_said_to_have_stopped() -> None:
    assert set(verdicts("leak below a sawtooth", 24)) <= {"leak", "may leak", "sawtooth"}


@pytest.mark.parametrize("steps", [30, 60])
def test_memory_that_follows_growing_lengths_is_no_leak_and_a_leak_beside_it_is(
    steps: int,
) -> None:
    with_work: Counter[str] = Counter()
    for seed in range(SEEDS):
        random, at = np.random.default_rng(seed), np.arange(steps)
        tokens = np.linspace(1_000, 4_000, steps) * random.normal(1, 0.1, steps)
        held = BASE + tokens * MIB + random.normal(0, MIB, steps)
        with_work[grows(at, held.astype(np.int64), tokens).verdict] += 1
        leaks = (held + at * 5 * MIB).astype(np.int64)
        assert grows(at, leaks, tokens).verdict == "leak"
    assert "leak" not in with_work


def test_tokens_that_are_a_line_over_the_steps_explain_nothing() -> None:
    at = np.arange(30)
    assert grows(at, at * 2**20, 100.0 + at).verdict == "leak"


def test_few_steps_are_not_judged() -> None:
    few = np.arange(MIN_VALUES_TO_GROW - 1)
    assert grows(few, few).verdict == "too few steps"
    assert grows(few, few).low is None
    assert grows(few[:1], few[:1]).per_step is None
