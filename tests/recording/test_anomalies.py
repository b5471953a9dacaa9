"""Which steps are unusual: healthy runs under correlated noise, slow steps, lasting changes."""

import numpy as np
import pytest

from lightning_rlprof.recording.anomalies import (
    Anomalies,
    StepFacts,
    StepTimes,
    facts_of,
)
from tests.builders.recorded import recorded
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


# ---- at equal work


def lengths(scatter, memory):
    return lambda random, count: np.exp(autoregressive(random, count, scatter, memory))


TOKENS = {
    "independent": lengths(0.3, 0.0),
    "AR(.9)": lengths(0.3, 0.9),
    "AR(.99)": lengths(0.5, 0.99),
    "grow": lambda random, count: np.geomspace(1, 4, count) * lengths(0.1, 0.0)(random, count),
    "doubled": lambda random, count: (
        np.where(np.arange(count) < count // 4, 1, 2) * lengths(0.02, 0)(random, count)
    ),
    "fewer": lambda random, count: (
        np.where(np.arange(count) < count // 4, 1, 0.4) * lengths(0.02, 0)(random, count)
    ),
    "a few long ones": lambda random, count: np.where(random.random(count) < 0.03, 3, 1),
}


def found_at_equal_work(law, seed, count, fixed=0.3, slower_from=None, ratio=1.5):
    """Return anomalies of steps whose time is a fixed part and one that grows with tokens."""
    random = np.random.default_rng(seed)
    tokens = 1e5 * TOKENS[law](random, count)
    ns = 1e8 * np.exp(autoregressive(random, count, 0.03)) * (fixed + (1 - fixed) * tokens / 1e5)
    if slower_from is not None:
        ns[slower_from:] *= ratio
    times = StepTimes("tokens")
    each = [times.add(step, int(ns[step]), tokens[step]) for step in range(count)]
    return [anomaly for anomaly in each if anomaly is not None]


@pytest.mark.parametrize("law", TOKENS)
@pytest.mark.parametrize("fixed", [0.0, 0.3, 0.9])
def test_two_thousand_healthy_steps_of_varying_tokens_show_nothing(law, fixed):
    for seed in range(max(SEEDS // 8, 1)):
        assert found_at_equal_work(law, seed, 2000, fixed) == [], seed


@pytest.mark.parametrize("law", TOKENS)
def test_fewer_tokens_per_second_are_found_once(law):
    for seed in range(max(SEEDS // 4, 1)):
        (anomaly,) = found_at_equal_work(law, seed, 1400, slower_from=1000)
        assert 1000 <= anomaly.step <= 1040, seed
        assert anomaly.ratio == pytest.approx(1.5, rel=0.15)


def test_without_the_work_longer_responses_look_like_a_slow_machine():
    random = np.random.default_rng(0)
    ns = 1e8 * np.exp(autoregressive(random, 800, 0.03))
    tokens = np.where(np.arange(800) < 400, 1.0, 2.0)
    plain, adjusted = StepTimes(), StepTimes("tokens")
    assert any(plain.add(step, int(ns[step] * tokens[step])) for step in range(800))
    each = [
        adjusted.add(step, int(ns[step] * tokens[step]), tokens[step] * 1000) for step in range(800)
    ]
    assert not any(each)


def test_an_anomaly_says_that_the_work_was_the_same():
    times = StepTimes("flops")
    for step in range(60):
        assert times.add(step, 10**8, 1e12) is None
    assert str(times.add(60, 10**9, 1e12)) == (
        "step 60 took 10.0 times the usual 100 ms for as many FLOPs"
    )


def test_steps_are_compared_with_those_that_count_the_same():
    anomalies = Anomalies()
    generate, train = StepFacts(False, "", 1.0), StepFacts(False, "tokens", 1e5)
    for step in range(0, 400, 2):
        assert anomalies.add(step, 10**9, generate) is None
        assert anomalies.add(step + 1, 10**8, train) is None
    assert anomalies.add(400, 10**9, train).ratio == pytest.approx(10)
    assert anomalies.add(401, 10**10, generate) is None  # silent: one capture is enough


def line(name, kind, counters=None):
    return recorded(name, kind, 1, 0, 9, 1, 1, None, counters)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], StepFacts(False, "", 1.0)),
        (
            [
                line("actor_generate", "stage", {"tokens": 30, "flops": 7}),
                line("actor_update", "stage", {"tokens": 12, "device_allocated_bytes": 90}),
                line("weight_sync", "stage", {"device_allocated_bytes": 70, "host_rss_bytes": 5}),
                line("step", "step", {"host_rss_bytes": 6, "tokens": 99}),
            ],
            StepFacts(False, "tokens", 42),
        ),
        ([line("a", "stage", {"flops": 2.5})], StepFacts(False, "flops", 2.5)),
        ([line("a", "stage", {"tokens": object()})], StepFacts(False, "", 1.0)),
        ([line("a", "stage", {"tokens": float("nan")})], StepFacts(False, "", 1.0)),
        ([line("a", "stage", {"tokens": -4})], StepFacts(False, "", 1.0)),
        ([line("validation", "region")], StepFacts(True, "", 1.0)),
        ([line("Trainer.save-checkpoint", "region")], StepFacts(True, "", 1.0)),
    ],
)
def test_what_the_spans_of_a_step_say(lines, expected):
    assert facts_of(lines) == expected
