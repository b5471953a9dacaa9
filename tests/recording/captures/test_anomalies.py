"""Which steps are unusual: healthy runs under correlated noise, slow steps, lasting changes."""

import numpy as np
import pytest

from lightning_rlprof.recording.captures.anomalies import StepTimes
from tests.effort import DEEP

SEEDS = 50 if DEEP else 8


def autoregressive(random, count, scatter, memory=0.9):
    noise = random.normal(0, scatter * np.sqrt(1 - memory**2), count)
    values = np.zeros(count)
    values[0] = random.normal(0, scatter)
    for at in range(1, count):
        values[at] = memory * values[at - 1] + noise[at]
    return values


def collected(random, count):
    """Each tenth step has a garbage collection."""
    slower = np.where(random.random(count) < 0.1, np.log(random.choice([1.2, 1.4], count)), 0)
    return random.normal(0, 0.02, count) + slower


LAWS = {
    "independent 2%": lambda random, count: random.normal(0, 0.02, count),
    "AR(.9) 3%": lambda random, count: autoregressive(random, count, 0.03),
    "garbage collection": collected,
}


def found(values):
    times = StepTimes()
    each = [times.add(step, int(1e7 * np.exp(value))) for step, value in enumerate(values)]
    return [anomaly for anomaly in each if anomaly is not None]


@pytest.mark.parametrize("law", LAWS)
def test_two_thousand_healthy_steps_show_nothing(law):
    for seed in range(SEEDS):
        assert found(LAWS[law](np.random.default_rng(seed), 2000)) == [], seed


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("ratio", [1.3, 2.0])
def test_a_lasting_change_is_found_once_within_16_steps(law, ratio):
    for seed in range(SEEDS):
        values = LAWS[law](np.random.default_rng(seed), 800)
        values[400:] += np.log(ratio)
        (anomaly,) = found(values)
        assert 400 <= anomaly.step <= 416, seed
        if anomaly.kind == "level":  # else a collection made a step more than 2.5 times as long
            assert anomaly.ratio == pytest.approx(ratio, rel=0.15)
        else:
            assert (law, ratio) == ("garbage collection", 2.0)


@pytest.mark.parametrize("law", LAWS)
def test_one_slow_step_is_found_at_once(law):
    for seed in range(SEEDS):
        values = LAWS[law](np.random.default_rng(seed), 800)
        values[400] += np.log(5)
        (anomaly,) = found(values)
        assert (anomaly.kind, anomaly.step) == ("spike", 400), seed


def test_periodic_checkpoints_are_found_once():
    values = np.random.default_rng(1).normal(0, 0.02, 2000)
    values[100::100] += np.log(3)
    assert [anomaly.step for anomaly in found(values)] == [100]


def test_the_first_steps_show_nothing():
    values = np.random.default_rng(1).normal(0, 0.02, 300)
    values[:5] += np.log([40, 9, 5, 3, 2])
    assert found(values) == []


def test_a_slow_drift_is_not_an_anomaly():
    values = np.random.default_rng(1).normal(0, 0.02, 4000) + np.linspace(0, np.log(2), 4000)
    assert found(values) == []
