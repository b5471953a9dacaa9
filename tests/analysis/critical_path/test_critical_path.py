"""The critical path of scripted runs: whom it goes through, and when nothing is said."""

from typing import Any

import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.critical_path.critical_path import critical_path
from tests.builders.oracle import runs
from tests.builders.runs import Row, loaded
from tests.builders.scripted import STAGES, Script, play
from tests.effort import examples

LISTED = Script(listed=True)


def rows(table: Any) -> list[dict[str, Any]]:
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def test_the_path_of_a_slow_rank_is_that_rank_and_adds_up_to_the_steps() -> None:
    table = critical_path(play(Script(listed=True, slow={2: 0.2}), 7).spans)

    own = [row for row in rows(table) if row["part"] == "work"]
    assert [row["rank"] for row in own if row["stage"] in STAGES] == [2] * 4
    assert sum(row["share"] for row in rows(table)) == pytest.approx(1)
    assert {row["steps"] for row in own} == {23}
    assert "Synchronization points: collectives table." in table.note


def test_the_time_per_step_is_the_mean_as_in_summary() -> None:
    table = critical_path(play(Script(listed=True, slow={2: 0.2}), 7).spans)

    for row in rows(table):
        if row["part"] == "work" and row["stage"] in STAGES:
            assert row["per step"] == round(row["total"] / row["steps"])


def test_per_rank_the_others_have_the_slack_that_they_wait() -> None:
    run = play(Script(listed=True, slow={2: 0.2}, hiccups=0.0), 7)
    table = critical_path(run.spans, per_rank=True)

    update = {
        row["rank"]: row
        for row in rows(table)
        if row["stage"] == "actor_generate" and row["part"] == "work"
    }
    assert [update[rank]["total"] > 0 for rank in range(8)] == [rank == 2 for rank in range(8)]
    for rank in {*range(8)} - {2}:
        # The least that it waited in any collective that a whole step came before.
        waited = run.waited_ns[rank] - run.waited_ns.min(axis=0)
        assert update[rank]["slack"] == pytest.approx(waited[1:].min(), abs=2e6)


def test_stages_that_wait_are_joins_where_nothing_lists_collectives() -> None:
    table = critical_path(play(Script(slow={1: 0.1}), 3).spans)

    assert "Synchronization points: stages that include waiting (actor_update)." in table.note
    parts = {(row["stage"], row["part"]) for row in rows(table)}
    assert ("actor_update", "transfer") in parts
    assert ("actor_generate", "transfer") not in parts


def test_clocks_that_are_off_change_nothing_where_collectives_are_listed() -> None:
    script = Script(listed=True, slow={1: 0.1})
    off = Script(listed=True, slow={1: 0.1}, offsets_ms={1: 5.0, 3: -40.0})
    near, far = (critical_path(play(each, 3).spans) for each in (script, off))
    assert [row[:3] for row in near.rows] == [row[:3] for row in far.rows]
    for one, other in zip(rows(near), rows(far), strict=True):
        assert one["total"] == pytest.approx(other["total"], abs=100)


def test_only_clocks_show_the_work_after_the_first_rank_has_left_a_stage() -> None:
    script = Script(slow={1: 0.1})
    off = Script(slow={1: 0.1}, offsets_ms={1: 5.0, 3: -40.0})
    near, far = (rows(critical_path(play(each, 3).spans)) for each in (script, off))

    def parts(found: list[dict[str, Any]]) -> list[str]:
        return [row["part"] for row in found if row["stage"] == "actor_update"]

    def total(found: list[dict[str, Any]]) -> int:
        return sum(row["total"] for row in found if row["stage"] == "actor_update")

    assert (sorted(parts(near)), parts(far)) == (["transfer", "work"], ["transfer"])
    assert total(near) == pytest.approx(total(far), rel=0.05)


def test_one_rank_alone_is_its_own_path() -> None:
    ms = 10**6
    own = [
        row
        for step in range(1, 5)
        for row in (
            Row("step", "step", step, step * 10 * ms, (step * 10 + 10) * ms),
            Row("actor_update", "stage", step, (step * 10 + 2) * ms, (step * 10 + 9) * ms),
        )
    ]
    table = critical_path(loaded(own))
    assert [(row[0], row[7]) for row in table.rows] == [
        ("actor_update", 28 * ms),
        ("outside stages", 12 * ms),
    ]
    assert "Single thread, so everything is on the critical path." in table.note


def test_without_joins_several_ranks_have_no_path() -> None:
    table = critical_path(play(Script(meets=()), 1).spans)
    assert table.abstained is not None
    assert table.abstained.startswith("rlprof found no synchronization between ranks")


@settings(max_examples=examples(60), deadline=None)
@given(runs(overlapping_steps=True))
def test_odd_runs_abstain_or_add_up(spans_rows: list[list[Row]]) -> None:
    table = critical_path(loaded(*spans_rows))
    if table.abstained is None and any(row["total"] for row in rows(table)):
        assert sum(row["share"] for row in rows(table)) == pytest.approx(1)
