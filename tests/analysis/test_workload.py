"""What stages took and should have taken, by chain and step."""

from dataclasses import replace

import numpy as np

from lightning_rlprof.analysis.dag import dag
from lightning_rlprof.analysis.workload import workload
from tests.analysis.fed import MS, with_roles
from tests.analysis.scripted import STAGES, Script, play
from tests.runs import Row


def test_times_are_the_scripts_and_what_work_explains_is_close_to_them() -> None:
    run = play(Script(listed=True, uneven=0.3, noise=0.002, hiccups=0.0), 1)
    graph = dag(run.spans)
    assert not isinstance(graph, str)
    found = workload(run.spans, graph)

    assert found.counted
    assert {graph.names[each.name] for each in found.stages} == {*STAGES}
    for each in found.stages:
        at = STAGES.index(graph.names[each.name])
        if STAGES[at] != "actor_update":  # where there is a join inside that does not count
            assert np.allclose(each.took[:, -23:], run.sections_ns[:, -23:, at], atol=2)
        assert np.nanmedian(np.abs(each.took / each.should - 1)) < 0.02


def test_a_role_with_one_chain_has_nobody_to_be_compared_with() -> None:
    spans = play(Script(ranks=1, meets=()), 1).spans
    graph = dag(spans)
    assert not isinstance(graph, str)
    assert workload(spans, graph).stages == ()


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
    graph = dag(spans)
    assert not isinstance(graph, str)
    told = {graph.names[each.name]: each for each in workload(spans, graph).stages}
    own = told["actor_compute_log_prob"]
    assert (np.isfinite(own.should) == np.isfinite(own.took)).all()


def test_a_gap_between_steps_takes_no_room() -> None:
    run = play(Script(), 1).spans
    later = run.step > run.step.max() // 2
    apart = replace(run, step=run.step + np.where(later, 2**50, 0))
    graphs = dag(run), dag(apart)
    assert not isinstance(graphs[0], str)
    assert not isinstance(graphs[1], str)
    near, away = workload(run, graphs[0]), workload(apart, graphs[1])
    assert near.shape[2] - away.shape[2] in (0, 1)  # the step before the gap may end nowhere
    assert len(away.at) > 0
