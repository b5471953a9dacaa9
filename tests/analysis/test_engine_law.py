"""Verdicts on runs under the law of real engines, which none of them was made for.

`benchmarks/verdicts.py` measures how often they are right. Here is one run of each kind, or few.
"""

from dataclasses import replace
from typing import Literal

import pytest

from lightning_rlprof.analysis.comparison.changes import LEVEL, OUTLIER, changes
from lightning_rlprof.analysis.comparison.compare import PASS, Judgement, gate, judge, verdict
from lightning_rlprof.analysis.diagnosis.evidence import Evidence
from lightning_rlprof.analysis.diagnosis.step_quantities import OUTLIERS
from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.analysis.whatif.whatif import whatif
from tests.builders.engine import Engine, OneStepOff, one_step_off, run
from tests.builders.paced import Regime

JOB = Engine()
README = Engine(ranks=2, regime=Regime(0.05, common=(0.08, 0.3)))


def compared(before: Engine, after: Engine, seed: int = 1) -> Judgement:
    return judge([run(before, 2 * seed)], [run(after, 2 * seed + 1)])


def test_a_faster_rollout_makes_no_other_stage_faster() -> None:
    found = compared(JOB, replace(JOB, slower={"actor_generate": 1 / 3}))
    said = {name: verdict(row) for name, row in found.by_name.items()}
    assert said.pop("actor_generate") == said.pop("step") == "faster"
    own = {name: word for name, word in said.items() if not name.startswith("waiting")}
    assert set(own.values()) == {"unchanged"}


def test_longer_responses_are_more_work_and_no_change() -> None:
    found = compared(JOB, replace(JOB, regime=Regime(0.02, length=1.5)))
    rows = [row for row in found.rows if not row.name.startswith("waiting")]
    assert {verdict(row) for row in rows} == {"unchanged"}
    assert gate(found, 0.03).result == PASS


def test_a_slower_update_is_seen_although_ranks_wait_in_it() -> None:
    """The last rank has the time of the update without waiting, so its work explains it."""
    found = compared(JOB, replace(JOB, slower={"actor_update": 1.08}))
    assert verdict(found.by_name["actor_update"]) == "slower"
    low, high = found.by_name["actor_update"].change.interval(0.05)  # type: ignore[union-attr]
    assert -0.01 < low < 0.077 < high < 0.13


def test_a_stage_slower_than_the_others_is_not_unchanged_for_the_machine_hides_it() -> None:
    """The whole machine wanders by more than 5%, beside which the other stages show the update."""
    wanders = Engine(regime=Regime(0.01, common=(0.05, 0.95)))
    slower = replace(wanders, slower={"actor_update": 1.08})
    words = {verdict(compared(wanders, slower, seed).by_name["actor_update"]) for seed in range(4)}
    assert words <= {"slower", "minor", "slower than the rest"}


def test_stages_that_did_not_change_are_unchanged_in_the_noise_of_the_readme() -> None:
    words = [
        verdict(
            compared(README, replace(README, slower={"actor_generate": 0.6}), seed).by_name[each]
        )
        for seed in range(4)
        for each in ("actor_compute_log_prob", "actor_update")
    ]
    assert set(words) <= {"unchanged", "as the rest"}


def accused(job: Engine, seed: int = 3) -> set[object]:
    table = stragglers(run(job, seed))
    rows = zip(table.column("rank"), table.column("verdict"), strict=True)
    return {rank for rank, word in rows if "slow" in str(word)}


def test_all_ranks_of_a_slow_host_are_found() -> None:
    """Four slow ranks of 16 raise the spread by which each of them is judged."""
    slow = dict.fromkeys(range(8, 12), 1.1)
    assert accused(Engine(ranks=16, per_host=4, slow_ranks=slow)) == {8, 9, 10, 11}


@pytest.mark.parametrize("counted", ["lengths", "tokens"])
def test_a_rank_with_longer_responses_is_not_slow(counted: str) -> None:
    job = Engine(ranks=8, lengths={2: 1.6}, counted=counted)  # type: ignore[arg-type]
    assert accused(job) == set()


def rows_of_changes(job: Engine, seed: int = 5) -> list[tuple[object, ...]]:
    table = changes(run(job, seed))
    columns = [table.column(name) for name in ("change", "step", "stage")]
    return [*zip(*columns, strict=True)]


def test_a_change_of_a_small_stage_is_found_and_no_other_is_blamed() -> None:
    """The reward is 3% of the step; nothing waits in it, though all ranks change at once."""
    job = replace(JOB, slower={"compute_reward": 3.0}, since=30)
    assert rows_of_changes(job) == [(LEVEL, 31, "compute_reward")]


def test_a_change_smaller_than_asked_is_no_row() -> None:
    spans = run(replace(JOB, slower={"compute_reward": 3.0}, since=30), 5)
    assert not changes(spans, least=0.2).rows


def test_one_checkpoint_is_named_and_checkpoints_that_recur_are_no_outliers() -> None:
    once = replace(JOB, extra_ms={(None, 29, "save_checkpoint"): 5_000.0})
    assert rows_of_changes(once) == [(OUTLIER, 30, "save_checkpoint")]
    assert rows_of_changes(replace(JOB, checkpoint=10, evaluation=10)) == []


def test_a_checkpoint_that_takes_far_longer_than_the_others_is_an_outlier() -> None:
    job = replace(JOB, checkpoint=10, extra_ms={(None, 39, "save_checkpoint"): 20_000.0})
    assert rows_of_changes(job) == [(OUTLIER, 40, "save_checkpoint")]


@pytest.mark.parametrize("shape", ["growing", "shrinking", "cosine", "curriculum"])
def test_lengths_that_change_over_the_run_are_no_change_of_pace(shape: str) -> None:
    assert rows_of_changes(replace(JOB, shape=shape)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counted", "stage", "unclear"),
    [
        ("tokens", "actor_generate", True),
        ("lengths", "actor_generate", False),
        ("tokens", "save_checkpoint", False),
    ],
)
def test_a_row_that_longer_responses_may_explain_says_so(
    counted: Literal["tokens", "lengths"], stage: str, *, unclear: bool
) -> None:
    spans = run(replace(JOB, counted=counted, extra_ms={(None, 29, stage): 5_000.0}), 5)
    table = changes(spans)
    assert table.rows[0][:3] == (OUTLIER, 30, stage)
    assert ("not counted" in str(table.note)) == unclear
    (found,) = OUTLIERS.measure(Evidence(spans))  # type: ignore[misc]
    assert ("lengths of responses" in [each.name for each in found.facts]) == unclear
    assert found.confidence == ("medium" if unclear else "high")


def test_p_values_are_above_zero() -> None:
    table = changes(run(replace(JOB, slower={"*": 3.0}, since=30), 5))
    assert all(float(str(each)) >= 1e-12 for each in table.column("p-value"))


@pytest.mark.parametrize("update", [1.0, 2.4])
@pytest.mark.parametrize("stage", ["actor_generate", "actor_update"])
def test_a_change_of_an_asynchronous_job_saves_what_was_predicted(
    stage: str, update: float
) -> None:
    now = {"actor_update": update}
    spans, before = one_step_off(OneStepOff(slower=now), 11)
    (row,) = whatif(spans, speedup={stage: 2.0}).rows
    then = now | {stage: now.get(stage, 1.0) / 2}
    _, after = one_step_off(OneStepOff(slower=then), 12)
    assert float(str(row[4])) == pytest.approx(1 - after / before, abs=0.06)
    assert int(str(row[6])) <= after <= int(str(row[7]))
