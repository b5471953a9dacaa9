import numpy as np
import pytest

from lightning_rlprof.analysis.comparison.changes import LEVEL, OUTLIER, TREND, changes
from tests.builders.paced import REGIMES, Job, Regime, play
from tests.builders.pairs import run_of

CALM = [name for name in REGIMES if name not in ("t2 4%", "day/night 10%, 200 steps")]


@pytest.mark.parametrize("regime", CALM)
def test_a_healthy_run_has_no_change(regime: str) -> None:
    for seed in range(4):
        assert changes(play(Job(regime=REGIMES[regime]), seed)).rows == []


@pytest.mark.parametrize("regime", CALM)
@pytest.mark.parametrize(("stage", "blamed"), [("*", "all"), ("actor_generate", "actor_generate")])
def test_a_step_at_which_the_time_changes_is_found(regime: str, stage: str, blamed: str) -> None:
    job = Job(regime=REGIMES[regime], slower={stage: 1.5}, since=30)
    (row,) = changes(play(job, 7)).rows
    change, step, where, ratio, low, high, delta, steps, cost, chance = row
    assert (change, where) == (LEVEL, blamed)
    assert abs(step - 31) <= 2
    assert low < ratio < high
    if stage == "*" and regime != "thermal 8%":  # where half of the warming is in the ratio
        assert low < 1.5 < high
    assert steps == 61 - step
    assert cost == pytest.approx(delta * steps * 4, rel=1e-6)
    assert chance < 0.001


def test_two_changes_are_two_rows_and_one_that_saved_time_is_negative() -> None:
    slow = np.repeat([1.0, 2.0, 1.0], 40)
    noise = np.exp(np.random.default_rng(1).normal(0, 0.03, 120))
    table = changes(run_of({"a": 1e8 * slow * noise, "b": 1e6 * noise}))
    found = sorted(zip(table.column("step"), table.column("cost"), strict=True))
    assert [step for step, _ in found] == [41, 81]
    assert found[1][1] < 0 < found[0][1]


def test_more_work_is_no_change() -> None:
    tokens = 1_000 * np.repeat([1.0, 2.0], 30) * np.exp(np.random.default_rng(2).normal(0, 0.1, 60))
    times = tokens * 1e5
    counted = changes(run_of({"a": times}, {"tokens": {"a": tokens}}))
    assert counted.rows == []
    assert changes(run_of({"a": times})).column("step") == [31]


def test_a_long_step_is_an_outlier_and_names_its_stage() -> None:
    times = 1e8 * np.exp(np.random.default_rng(3).normal(0, 0.03, 60))
    other = times.copy()
    times[16] *= 3
    (row,) = changes(run_of({"a": times, "b": other})).rows
    assert row[:3] == (OUTLIER, 17, "a")
    assert row[3] == pytest.approx(2.0, rel=0.1)
    assert row[6] == pytest.approx(2e8, rel=0.1)


def test_a_step_with_a_validation_is_no_outlier_and_no_change() -> None:
    times = 1e8 * np.exp(np.random.default_rng(1).normal(0, 0.02, 60))
    validations = np.full(60, np.nan)
    validations[[19, 39]] = 2e9
    assert changes(run_of({"a": times, "validation": validations})).rows == []
    found = changes(run_of({"a": times, "b": validations})).column("step")
    assert {*found} == {20, 40}


def test_steps_that_get_slower_little_by_little_are_a_trend() -> None:
    (row,) = changes(play(Job(steps=100, regime=Regime(warming=0.5)), 4)).rows
    assert (row[0], row[1], row[2]) == (TREND, 1, "all")
    assert row[4] < np.exp(0.5) < row[5]


def test_long_runs_are_read_by_blocks_and_the_step_stays() -> None:
    noise = np.exp(np.random.default_rng(5).normal(0, 0.03, 2_000))
    times = 1e8 * noise * np.repeat([1.0, 1.3], [1_400, 600])
    (step,) = changes(run_of({"a": times})).column("step")
    assert abs(int(step) - 1_401) <= 14


def test_too_few_steps_and_none_have_no_answer() -> None:
    few = changes(run_of({"a": np.full(20, 1e8)}))
    assert few.abstained == "This run has 20 complete steps; finding changes needs 24."
    assert changes(run_of({"a": np.full(60, 1e8)})).rows == []


@pytest.mark.deep
def test_changes_are_found_as_often_as_promised_and_seldom_in_healthy_runs() -> None:
    for name in CALM:
        regime = REGIMES[name]
        false = sum(bool(changes(play(Job(regime=regime), seed)).rows) for seed in range(100, 160))
        assert false <= 2, name  # 1% of 60
        for steps, factor in ((60, 1.3), (60, 2.0), (24, 2.0)):
            job = Job(steps=steps, regime=regime, slower={"*": factor}, since=steps // 2)
            found = sum(LEVEL in changes(play(job, seed)).column("change") for seed in range(20))
            assert found >= 18, (name, steps, factor)
