"""Where ranks wait for one another, told by tables, names and behaviour."""

import numpy as np

from lightning_rlprof.analysis.steps.sync_points import SyncPoints, find_sync_points
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row, loaded
from tests.builders.scripted import STAGES, Script, play


def found(spans: Spans) -> SyncPoints:
    return find_sync_points(spans, np.unique(spans.thread[spans.rows(kind="step")]))


def meeting(*stays: tuple[int, int], name: str = "barrier", step: int = 1) -> list[Row]:
    """Return a rank that is in a stage and, inside, in some joins."""
    own = [Row(name, "region", step, start, end) for start, end in stays]
    return [Row("step", "step", step, 0, 100), Row("actor_update", "stage", step, 0, 100), *own]


def test_the_nth_of_a_name_in_a_step_is_one_for_all_and_its_transfer_the_shortest_stay() -> None:
    sync_points = found(loaded(meeting((10, 30), (50, 60)), meeting((25, 30), (40, 61))))

    assert sync_points.transfer_ns.tolist() == [5, 10]
    assert sync_points.size.tolist() == [2, 2]
    assert sync_points.group.tolist() == [0, 1, 0, 1]
    assert [sync_points.names[code] for code in sync_points.name.tolist()] == ["barrier"] * 4
    assert sync_points.source == "spans of collectives and barriers"
    assert not sync_points.whole_stage.any()


def test_no_join_has_one_rank_alone_or_ranks_that_were_not_there_together() -> None:
    assert not len(found(loaded(meeting((10, 30)), meeting())).size)
    assert not len(found(loaded(meeting((10, 20)), meeting((30, 40)))).size)
    # Different numbers of them: nobody knows which belong together.
    assert not len(found(loaded(meeting((10, 20), (30, 40)), meeting((10, 20)))).size)


def test_of_joins_in_one_another_the_outer_one_counts() -> None:
    inner = [meeting((20, 30), name="all_reduce"), meeting((25, 30), name="all_reduce")]
    outer = [Row("grad_sync", "region", 1, 10, 35)]
    sync_points = found(loaded(inner[0] + outer, inner[1] + outer))
    assert {sync_points.names[code] for code in sync_points.name.tolist()} == {"grad_sync"}


def test_a_table_of_collectives_counts_before_names_and_behaviour() -> None:
    sync_points = found(play(Script(listed=True, meets=STAGES), 1).spans)
    assert sync_points.source == "collectives table"
    assert len(sync_points.size) == 24 * 4
    assert (sync_points.size == 8).all()


def test_stages_that_wait_are_joins_as_a_whole() -> None:
    sync_points = found(play(Script(slow={1: 0.1}), 1).spans)
    assert sync_points.source == "stages that include waiting (actor_update)"
    assert sync_points.whole_stage.all()
    assert len(sync_points.size) == 24


def test_stages_that_do_not_wait_are_none() -> None:
    assert not len(found(play(Script(meets=()), 1).spans).size)
