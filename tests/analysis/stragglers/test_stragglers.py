"""Who makes the others wait: the matrix, what may never be said, and what the table tells."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.stragglers.stragglers import peer_time_lost, stragglers
from lightning_rlprof.analysis.stragglers.verdicts import INCONCLUSIVE, NO_STRAGGLER, SLOW_UNCOUNTED
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Mask
from lightning_rlprof.tables.spans import Spans
from tests.builders.paced import REGIMES, Job
from tests.builders.paced import play as paced
from tests.builders.scripted import STAGES, Script, play, without
from tests.peers.harness import CASES, OURS, TOO_SHORT, accused, scores


def slowly(own: np.ndarray, excess: np.ndarray, rank: int) -> float:
    """Wait step by step, with the rank as it was and without its excess."""
    lost = 0.0
    for step in range(own.shape[1]):
        times = {other: time for other, time in enumerate(own[:, step]) if not np.isnan(time)}
        if rank not in times or np.isnan(excess[rank, step]):
            continue
        without = times | {rank: times[rank] - excess[rank, step]}
        lost += (max(times.values()) - max(without.values())) * (len(times) - 1)
    return lost


@given(st.integers(0, 5_000), st.integers(2, 5))
def test_it_is_what_the_others_would_not_have_waited(seed: int, ranks: int) -> None:
    random = np.random.default_rng(seed)
    own = random.uniform(50, 150, (ranks, 6)) * 1e6
    excess = np.maximum(random.normal(0.1, 0.2, (ranks, 6)), 0) * own
    own[random.random((ranks, 6)) < 0.2] = np.nan
    excess[0, 2] = np.nan
    assert peer_time_lost(own, excess, 0, 0, 5) == pytest.approx(slowly(own, excess, 0), abs=1.0)


def test_two_equally_slow_ranks_cost_nothing_each() -> None:
    own, excess = np.array([[100.0], [110.0], [110.0]]), np.array([[0.0], [10.0], [10.0]])
    assert [peer_time_lost(own, excess, rank, 0, 0) for rank in range(3)] == [0, 0, 0]


def test_a_rank_that_stopped_does_not_make_the_wait_of_the_others_free() -> None:
    own = np.array([[100.0, 100.0], [100.0, np.nan], [150.0, 150.0]])
    assert peer_time_lost(own, np.full((3, 2), 50.0), 2, 0, 1) == 100 + 50


def test_only_the_steps_asked_about_count() -> None:
    own, excess = np.array([[100.0] * 4, [150.0] * 4]), np.array([[0.0] * 4, [50.0] * 4])
    assert peer_time_lost(own, excess, 1, 1, 2) == 100
    assert peer_time_lost(own[1:], excess[1:], 0, 0, 3) == 0


SEEDS = range(2_000, 2_030)
STAGE, REGION = KINDS.index("stage"), KINDS.index("region")


@pytest.mark.deep
@pytest.mark.parametrize("case", list(CASES))
def test_the_matrix_has_no_healthy_rank_accused_and_each_slow_one_found(case: str) -> None:
    own = scores(CASES[case], SEEDS)[OURS]
    assert own.false == 0
    assert own.found >= 29


def test_eight_ranks_and_eight_steps_are_too_few() -> None:
    for seed in SEEDS:
        table = stragglers(play(TOO_SHORT, seed).spans)
        assert table.abstained == (
            "Not enough steps: comparing 8 ranks needs 12, role actor has 8."
        )


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_losing_events_never_leads_to_a_wrong_culprit(share: float) -> None:
    for seed in SEEDS:
        run = play(Script(slow={1: 0.1}, uneven=0.3, steps=40), seed)
        lost = replace(run, spans=without(run.spans, share, seed))
        assert accused(lost) <= {1}


def test_the_row_says_effect_interval_steps_and_what_it_costs() -> None:
    spans = play(Script(slow={3: 0.2}, meets=("actor_update",)), 5).spans
    table = stragglers(spans)
    ((rank, verdict, effect, stages, lost, steps, low, high, chance, _, group),) = table.rows

    assert (rank, verdict, stages, steps, group) == (3, "slow host", "all", "1-24", "actor")
    assert low < 0.2 < high
    assert low < effect < high
    assert chance < 0.01
    # 1.2 s of own work a step, a fifth of that too long, and seven others who wait for it.
    assert lost == pytest.approx(24 * 7 * 0.2 * 1.2e9, rel=0.25)


def test_what_it_costs_is_what_the_same_run_takes_longer() -> None:
    def one(seed: int) -> float:
        script = Script(slow={3: 0.2}, where=("actor_generate",), steps=40)
        slow, even = (play(each, seed).spans for each in (script, replace(script, slow={})))
        longer = int(slow.end_ns.max()) - int(even.end_ns.max())
        return stragglers(slow).rows[0][4] / (7 * longer)  # type: ignore[operator]

    assert np.median([one(seed) for seed in range(20)]) == pytest.approx(1, abs=0.09)


def called(spans: Spans, stage: str, where: Mask, other: str) -> Spans:
    """Give a stage another name on some rows."""
    mine = where & (spans.name == spans.names.index(stage))
    names = np.where(mine, len(spans.names), spans.name)
    return replace(spans, names=(*spans.names, other), name=names)


def test_what_it_costs_is_told_where_some_ranks_or_steps_have_stages_of_their_own() -> None:
    spans = play(Script(slow={3: 0.2}), 5).spans
    whole = stragglers(spans).rows[0][4]
    for where in (spans.rank == 0, spans.rank == 3, spans.step % 3 == 0):
        table = stragglers(called(spans, "compute_reward", where, "score"))
        assert table.column("rank") == [3]
        assert table.column("peer time lost") == pytest.approx([whole], rel=0.1)


def test_a_stage_of_one_rank_alone_clears_nobody() -> None:
    spans = play(Script(), 5).spans
    alone = called(spans, "compute_reward", spans.rank == 0, "score")
    ((_, verdict, _, stages, *_),) = stragglers(alone).rows
    assert verdict == NO_STRAGGLER
    assert "score" not in f"{stages} {stragglers(alone).note}"
    apart = replace(spans, name=np.where(spans.kind == STAGE, spans.rank, 0))
    few = replace(apart, names=tuple("abcdefgh"))
    assert stragglers(few).abstained == "Role actor has no stage on several ranks."


def test_steps_that_have_different_stages_are_compared_all_the_same() -> None:
    spans = play(Script(slow={3: 0.2}), 5).spans
    for kind in (1, 2):
        for stage in STAGES[:3]:
            spans = called(spans, stage, spans.step % 3 == kind, f"{stage} {kind}")
    ((rank, verdict, _, stages, *_),) = stragglers(spans).rows
    assert (rank, verdict, stages) == (3, "slow host", "all")


def test_nobody_is_only_cleared_where_a_slow_rank_would_have_been_found() -> None:
    ((rank, verdict, *_),) = stragglers(play(Script(), 5).spans).rows
    assert (rank, verdict) == (None, NO_STRAGGLER)
    noisy = stragglers(play(Script(noise=0.3, steps=12), 5).spans)
    assert noisy.abstained is not None
    assert "Step times vary so much" in noisy.abstained
    spans = play(Script(), 5).spans
    stopped = np.where(
        (spans.rank == 2) & (spans.step > 4) & (spans.kind == STAGE), REGION, spans.kind
    )
    few = stragglers(replace(spans, kind=stopped)).abstained
    assert few is not None
    assert few == "Too few steps can be compared on 1 of 8 ranks, for instance rank 2."
    together = stragglers(play(Script(meets=STAGES), 5).spans)
    assert [each for each in together.column("verdict") if each != NO_STRAGGLER] == []


def test_roles_are_not_compared_with_one_another() -> None:
    spans = play(Script(slow={0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}), 5).spans
    roles = {
        rank: replace(head, role="rollout" if rank < 4 else "actor")
        for rank, head in spans.headers.items()
    }
    table = stragglers(replace(spans, headers=roles))
    assert table.column("verdict") == [NO_STRAGGLER, NO_STRAGGLER]
    assert table.column("group") == ["rollout", "actor"]


def test_arrivals_alone_accuse_where_stages_hide_a_slow_rank() -> None:
    script = Script(slow={2: 0.3}, where=("actor_update",), listed=True, steps=40)
    table = stragglers(play(script, 5).spans)
    ((rank, verdict, *_),) = table.rows
    assert (rank, verdict) == (2, SLOW_UNCOUNTED)
    assert table.column("last arrivals")[0] > 0.8
    hidden = stragglers(play(replace(script, listed=False), 5).spans)
    assert "actor_update may include waiting for other ranks" in f"{hidden.note}{hidden.abstained}"


def test_drifting_pace_is_said() -> None:
    table = stragglers(play(Script(steps=60, drift=(0.03, 0.9)), 5).spans)
    assert "steps are treated as one sample" in f"{table.note}{table.abstained}"


def test_ranks_that_keep_a_pace_of_their_own_are_seldom_accused() -> None:
    script = Script(drift=(0.03, 0.95))
    assert sum(bool(accused(play(script, seed))) for seed in SEEDS) <= 1


def test_a_run_with_nothing_to_compare_abstains() -> None:
    spans = play(Script(ranks=2, steps=2), 5).spans
    alone = replace(spans, headers={0: spans.headers[0]})
    few = "Not enough steps: comparing 2 ranks needs 10, role actor has 2."
    assert stragglers(replace(spans, headers={})).abstained == "This run has no ranks."
    assert stragglers(alone).abstained == (
        "Role actor has one rank; a comparison needs two or more."
    )
    assert stragglers(spans).abstained == few


def test_a_run_is_compared_once_and_forgotten_with_it() -> None:
    spans = play(Script(), 5).spans
    assert stragglers(spans) is stragglers(spans)
    assert stragglers(replace(spans, step=spans.step + 1)) is not stragglers(spans)
    kept = weakref.ref(spans)
    del spans
    gc.collect()
    assert kept() is None


def _verdict_of(job: Job, seed: int) -> list[tuple[object, object]]:
    table = stragglers(paced(job, seed))
    if table.abstained is not None:
        return [(None, table.abstained)]
    return list(zip(table.column("rank"), table.column("verdict"), strict=True))


@pytest.mark.parametrize("regime", ["iid 2%", "GC 10% x 200 ms", "per-rank AR(.9) 3%"])
def test_what_one_rank_does_besides_is_no_slow_machine(regime: str) -> None:
    job = Job(ranks=8, regime=REGIMES[regime], extra_ms={(0, "compute_reward"): 40.0})
    for seed in range(6):
        assert _verdict_of(job, seed) == [(0, "longer in compute_reward")]
    note = stragglers(paced(job, 1)).note
    assert "extra work or a slow dependency there, not the machine." in note
    assert "Rank 0 often logs, saves or aggregates there." in note


@pytest.mark.parametrize("regime", ["iid 2%", "GC 10% x 200 ms"])
def test_a_rank_that_is_slow_in_all_its_stages_is_a_slow_machine(regime: str) -> None:
    job = Job(ranks=8, regime=REGIMES[regime], slow_ranks={3: 1.1})
    for seed in range(6):
        assert _verdict_of(job, seed) == [(3, "slow host")]


@pytest.mark.deep
def test_where_pace_wanders_slow_ranks_are_found_as_often_as_promised() -> None:
    regime = REGIMES["per-rank AR(.9) 3%"]
    for steps, factor, least in ((24, 1.1, 0.2), (24, 1.2, 0.85), (60, 1.1, 0.5), (100, 1.1, 0.85)):
        job = Job(ranks=8, steps=steps, regime=regime, slow_ranks={3: factor})
        found = sum(_verdict_of(job, seed) == [(3, "slow host")] for seed in range(40))
        assert found >= least * 40, steps
    healthy = [_verdict_of(Job(ranks=8, steps=24, regime=regime), seed) for seed in range(60)]
    calm = (None, NO_STRAGGLER, INCONCLUSIVE)
    false = sum(any(v not in calm for _, v in each if _ is not None) for each in healthy)
    assert false <= 3  # 1.5% of 60


@pytest.mark.parametrize("seed", range(6))
def test_no_straggler_is_not_said_of_steps_too_few_to_separate_waiting(seed: int) -> None:
    """The demo's case: a rank 30% slower, whose peer waits in the update."""
    job = Job(ranks=2, steps=10, regime=REGIMES["iid 5%"], slow_ranks={1: 1.3})
    assert NO_STRAGGLER not in dict(_verdict_of(job, seed)).values()


def test_a_run_that_waits_nearly_all_the_time_clears_no_rank() -> None:
    job = Job(ranks=4, meets=("actor_generate", "actor_update", "actor_compute_log_prob"))
    ((rank, verdict),) = _verdict_of(job, 1)
    assert rank is None
    assert "so a rank that is slow there would not show" in str(verdict)
