"""Changed durations: what changes, by how much, and what stays.

What stages took and should have taken, by chain and step.
"""

from dataclasses import replace

import numpy as np
import pytest

from lightning_rlprof.analysis.critical_path.replay import WORK, replay
from lightning_rlprof.analysis.critical_path.step_graph import StepGraph, step_graph
from lightning_rlprof.analysis.whatif.edits import (
    balance_load,
    overlap_stage,
    remove_slowness,
    scale_stage,
    workload,
)
from lightning_rlprof.tables.spans import Spans
from tests.builders.fed import MS, with_roles
from tests.builders.runs import Row, loaded
from tests.builders.scripted import STAGES, Script, play


def graph(spans: Spans) -> StepGraph:
    found = step_graph(spans)
    assert not isinstance(found, str), found
    return found


def test_a_stage_is_scaled_with_its_transfers_and_nothing_else() -> None:
    own = graph(play(Script(listed=True), 1).spans)
    code = own.names.index("actor_update")
    edit = scale_stage(own, code, 0.5)

    mine = own.name == code
    assert (edit.own_ns[~mine] == own.ns[~mine]).all()
    assert np.abs(edit.own_ns[mine] * 2 - own.ns[mine]).max() <= 1
    assert np.abs(edit.transfer_ns * 2 - own.transfer_ns).max() <= 1  # all are in this stage


def test_only_the_slow_rank_becomes_faster_by_what_it_is_slower() -> None:
    spans = play(Script(listed=True, slow={3: 0.25}, uneven=0.2, noise=0.005, hiccups=0.0), 1).spans
    own = graph(spans)
    edit = remove_slowness(own, workload(own))

    intervals = own.schedule
    inside = (intervals.sync_point == WORK) & (own.row >= 0)
    chain = intervals.run // intervals.interval_count
    for rank in range(8):
        mine = inside & (chain == rank)
        left = edit.own_ns[mine].sum() / own.ns[mine].sum()
        assert left == pytest.approx(1 / 1.25 if rank == 3 else 1.0, abs=0.01)


def test_balanced_work_keeps_the_sum_and_evens_the_ranks() -> None:
    spans = play(Script(listed=True, uneven=0.4, noise=0.001, hiccups=0.0), 1).spans
    own = graph(spans)
    edit = balance_load(own, workload(own))

    assert edit is not None
    intervals, code = own.schedule, own.names.index("actor_generate")
    mine = own.name == code
    after = np.bincount(intervals.run[mine], edit.own_ns[mine]).reshape(8, intervals.interval_count)
    before = np.bincount(intervals.run[mine], own.ns[mine]).reshape(8, intervals.interval_count)
    assert np.ptp(after, axis=0).max() < 0.1 * np.ptp(before, axis=0).min()
    assert after.sum() == pytest.approx(before.sum(), rel=0.01)


def test_without_tokens_there_is_no_work_to_balance() -> None:
    spans = play(Script(listed=True, counters=False), 1).spans
    own = graph(spans)
    assert balance_load(own, workload(own)) is None


def test_a_hidden_stage_costs_nothing_until_it_takes_longer_than_all_the_rest() -> None:
    def rank(sync: int, late: int) -> list[Row]:
        rows = []
        for step in range(1, 5):
            at = 200 * step
            rows += [
                Row("step", "step", step, at, at + 200),
                Row("weight_sync", "stage", step, at, at + sync),
                Row("barrier", "region", step, at + sync + late, at + 200),
            ]
        return rows

    # The last to come stays 10 in the barrier. 190 = 150 of weight sync and 40; 40 without it.
    long = graph(loaded(rank(150, 40), rank(20, 60)))
    short = graph(loaded(rank(30, 160), rank(20, 60)))
    for own, took in ((long, 150), (short, 170)):
        edit = overlap_stage(own, own.names.index("weight_sync"))
        assert edit.least_ns is not None
        played = replay(own.schedule, edit.own_ns, edit.transfer_ns, own.offset_ns).interval_ns
        assert np.maximum(played, edit.least_ns).tolist() == [took] * 3


def test_times_are_the_scripts_and_what_work_explains_is_close_to_them() -> None:
    run = play(Script(listed=True, uneven=0.3, noise=0.002, hiccups=0.0), 1)
    graph = step_graph(run.spans)
    assert not isinstance(graph, str)
    found = workload(graph)

    assert found.counted
    assert {graph.names[each.name] for each in found.stages} == {*STAGES}
    for each in found.stages:
        at = STAGES.index(graph.names[each.name])
        if STAGES[at] != "actor_update":  # where there is a join inside that does not count
            assert np.allclose(each.actual_ns[:, -23:], run.sections_ns[:, -23:, at], atol=2)
        assert np.nanmedian(np.abs(each.actual_ns / each.expected_ns - 1)) < 0.02


def test_a_role_with_one_chain_has_nobody_to_be_compared_with() -> None:
    spans = play(Script(ranks=1, meets=()), 1).spans
    graph = step_graph(spans)
    assert not isinstance(graph, str)
    assert workload(graph).stages == ()


def test_tokens_that_another_role_counts_are_not_missing_in_ones_own() -> None:
    def rank(counts: str, *others: str) -> list[Row]:
        rows = []
        for step in range(1, 8):
            at = step * 100 * MS
            rows.append(Row("step", "step", step, at, at + 100 * MS))
            stages = [Row(counts, "stage", step, at, at + 10 * MS, counters={"tokens": step})]
            stages += [Row(name, "stage", step, at + 20 * MS, at + 30 * MS) for name in others]
            rows += [*stages, Row("barrier", "region", step, at + 50 * MS, at + 90 * MS)]
        return rows

    trainer = ("trainer", rank("actor_update", "actor_compute_log_prob"))
    spans = with_roles([*[("rollout", rank("actor_generate"))] * 2, *[trainer] * 2])
    graph = step_graph(spans)
    assert not isinstance(graph, str)
    told = {graph.names[each.name]: each for each in workload(graph).stages}
    own = told["actor_compute_log_prob"]
    assert (np.isfinite(own.expected_ns) == np.isfinite(own.actual_ns)).all()


def test_a_gap_between_steps_takes_no_room() -> None:
    run = play(Script(), 1).spans
    later = run.step > run.step.max() // 2
    apart = replace(run, step=run.step + np.where(later, 2**50, 0))
    graphs = step_graph(run), step_graph(apart)
    assert not isinstance(graphs[0], str)
    assert not isinstance(graphs[1], str)
    near, away = workload(graphs[0]), workload(graphs[1])
    assert near.shape[2] - away.shape[2] in (0, 1)  # the step before the gap may end nowhere
    assert len(away.at) > 0
