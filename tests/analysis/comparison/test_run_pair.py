import numpy as np
import pytest

from lightning_rlprof.analysis.comparison.run_pair import STEP, shared_work, sides
from lightning_rlprof.analysis.stages import stages
from tests.builders.pairs import Half, run_of, scripted
from tests.builders.runs import Row, grpo_rows, loaded

FLAT = np.full(20, 1e8)


def test_times_are_the_exclusive_ones_of_the_stages_table() -> None:
    run = loaded(grpo_rows(6))
    own, _ = sides([run, run])
    table = stages(run)
    totals = dict(zip(table.column("stage"), table.column("total"), strict=True))
    found = {name: int(ns.sum()) for name, ns in own.stages.items()}
    assert found.pop(STEP) == sum(found.values())
    assert found == totals


def test_ranks_are_averaged_and_so_is_their_work() -> None:
    def rank(length: int, tokens: int) -> list[Row]:
        found = []
        for n in (1, 2, 3):
            found.append(Row("step", "step", n, n * 100, n * 100 + 100))
            at = n * 100
            found.append(Row("a", "stage", n, at, at + length, counters={"tokens": tokens}))
        return found

    run = loaded(rank(10, 100), rank(30, 300))
    own, _ = sides([run, run])
    assert own.stages["a"].tolist() == [20, 20, 20]
    assert own.work["a"]["tokens"].tolist() == [200.0, 200.0, 200.0]


def test_a_stage_that_is_called_step_or_untraced_is_a_stage_by_itself() -> None:
    run = run_of({"step": FLAT, "untraced": 2 * FLAT, "a": FLAT})
    own, _ = sides([run, run])
    found = {name: float(ns[0]) for name, ns in own.stages.items()}
    assert found["step (stage)"] == found["a"] == 1e8
    assert found["untraced (stage)"] == 2e8
    assert found.pop(STEP) == sum(found.values())


def test_several_names_of_one_stage_become_one() -> None:
    a = run_of({"gen": FLAT, "rollout": FLAT}, {"tokens": {"gen": FLAT, "rollout": FLAT}})
    left, right = sides([a, run_of({"actor_generate": FLAT})])
    assert left.stages["actor_generate"].tolist() == (2 * FLAT).tolist()
    assert left.work["actor_generate"]["tokens"].tolist() == (2 * FLAT).tolist()
    assert right.stages["actor_generate"].tolist() == FLAT.tolist()


def test_a_stage_that_counts_nothing_has_the_work_of_the_step() -> None:
    run = scripted(Half(stages={"a": 0.5, "b": 0.5}), 1)
    only_a = {"tokens": {"a": np.arange(20.0)}}
    uneven = run_of({"a": FLAT, "b": FLAT}, only_a)
    own = sides([uneven, uneven])
    assert shared_work(own, "b")["tokens"][0].tolist() == np.arange(20.0).tolist()
    assert list(shared_work(sides([run, run]), "a")) == ["tokens", "tokens_sq"]


def test_a_counter_of_one_run_or_of_few_steps_is_not_shared() -> None:
    counted = run_of({"a": FLAT}, {"tokens": {"a": FLAT}})
    rare = run_of({"a": FLAT}, {"tokens": {"a": np.where(np.arange(20) < 5, 1.0, np.nan)}})
    for other in (run_of({"a": FLAT}), rare):
        assert shared_work(sides([counted, other]), "a") == {}


@pytest.mark.parametrize(("factors", "warm"), [([], 0), ([5, 2], 2), ([1.2], 0), ([9] * 6, 0)])
def test_slow_first_steps_are_warm_up_up_to_a_tenth(factors: list[float], warm: int) -> None:
    """Six slow ones of twenty are how the run is."""
    times = FLAT.copy()
    times[: len(factors)] *= factors
    own, _ = sides([run_of({"a": times}), run_of({"a": FLAT})])
    assert own.steps == 20 - warm


def test_three_steps_are_never_taken_for_warm_up() -> None:
    own, _ = sides([run_of({"a": [9e9, 1.0, 1.0]}), run_of({"a": FLAT})])
    assert own.steps == 3


def test_a_rare_long_stage_in_the_first_step_is_no_warm_up() -> None:
    save = np.where(np.arange(20) % 4 == 0, 2e8, np.nan)
    own, _ = sides([run_of({"a": FLAT, "save": save}), run_of({"a": FLAT})])
    assert own.steps == 20
