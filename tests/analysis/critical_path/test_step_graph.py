"""Laps, pieces and what is left out."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from lightning_rlprof.analysis.critical_path.replay import replay
from lightning_rlprof.analysis.critical_path.step_graph import OUTSIDE_STAGES, StepGraph, step_graph
from lightning_rlprof.tables.spans import Spans
from tests.builders.oracle import runs
from tests.builders.runs import Row, header, loaded
from tests.builders.scripted import Script, play, without
from tests.effort import examples


def graph(spans: Spans) -> StepGraph:
    found = step_graph(spans)
    assert not isinstance(found, str), found
    return found


def rank(
    late: int, *, joins: tuple[str, ...] = ("barrier", "all_reduce"), steps: int = 4
) -> list[Row]:
    """Return steps of 100: a stage until the first join, the joins at the end."""
    rows = []
    for step in range(1, steps + 1):
        at = 100 * step
        rows += [
            Row("step", "step", step, at, at + 100),
            Row("actor_update", "stage", step, at + 10, at + 60),
            Row(joins[0], "region", step, at + 60 + late, at + 90),
            Row(joins[1], "region", step, at + 90, at + 100),
        ]
    return rows


def test_a_lap_goes_from_the_last_join_of_a_step_to_that_of_the_next_and_is_tiled() -> None:
    own = graph(loaded(rank(0), rank(10)))

    assert own.steps.tolist() == [2, 3, 4]
    assert own.wall_ns.tolist() == [100] * 3
    total = np.bincount(own.schedule.run, own.ns)
    assert total.tolist() == [100] * 6
    names = [own.names[code] for code in own.name[own.schedule.run == 3].tolist()]
    assert names == [OUTSIDE_STAGES, "actor_update", OUTSIDE_STAGES, "barrier", "all_reduce"]
    assert own.transfer_ns.tolist() == [20, 10] * 3


def test_the_measured_step_comes_out_when_it_is_played_again() -> None:
    own = graph(loaded(rank(0), rank(10)))
    assert (
        replay(own.schedule, own.ns, own.transfer_ns, own.offset_ns).interval_ns.tolist()
        == [100] * 3
    )


def test_a_step_without_its_last_join_makes_no_lap_of_two_steps() -> None:
    ranks = [rank(0, steps=6), rank(10, steps=6)]
    kept = [[row for row in own if row.step != 3 or row.kind != "region"] for own in ranks]
    own = graph(loaded(*kept))
    assert (own.steps.tolist(), own.wall_ns.tolist()) == ([2, 5, 6], [100] * 3)


def test_joins_in_different_orders_leave_their_steps_out() -> None:
    spans = loaded(rank(0), rank(0, joins=("all_reduce", "barrier")))
    apart = {number: header(number, 2, host=f"node-{number}") for number in range(2)}
    found = step_graph(
        replace(spans, headers=apart)
    )  # with one clock it would show that they never met
    assert found == "No step is complete on all ranks with the same order of sync points."


def test_without_a_join_of_all_steps_are_cut_by_the_clock() -> None:
    alone = [row for row in rank(0) if row.kind != "region"]
    own = graph(
        loaded(
            rank(0),
            rank(10),
            [
                row._replace(start_ns=row.start_ns + 5) if row.kind == "step" else row
                for row in alone
            ],
        )
    )

    assert own.steps.tolist() == [1, 2, 3, 4]
    assert own.offset_ns.reshape(3, 4).tolist() == [[0] * 4, [0] * 4, [5] * 4]
    assert "by the clocks (no sync point includes all ranks)" in own.note


def test_steps_that_lost_events_never_make_a_lap_that_is_not_tiled() -> None:
    for seed in range(5):
        found = step_graph(without(play(Script(listed=True), seed).spans, 0.2, seed))
        if not isinstance(found, str):
            total = np.bincount(found.schedule.run, found.ns).reshape(-1, len(found.steps))
            assert np.allclose(total, found.wall_ns, rtol=0.01)


@settings(max_examples=examples(60), deadline=None)
@given(runs(overlapping_steps=True))
def test_odd_runs_are_tiled_or_refused(rows: list[list[Row]]) -> None:
    found = step_graph(loaded(*rows))
    if not isinstance(found, str):
        assert (np.diff(found.schedule.run) >= 0).all()
        assert (found.ns > 0).all()
        assert not found.schedule.stuck.any()
