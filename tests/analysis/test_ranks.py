from pathlib import Path

import pytest

from lightning_rlprof.analysis.ranks import ranks
from lightning_rlprof.analysis.steps import steps
from tests.runs import Row, grpo_rows, grpo_run, loaded, spans_of


def test_the_slow_rank_is_named_with_its_ratio_and_the_number_of_steps(tmp_path: Path) -> None:
    slow = grpo_rows(5, 2, slow={"actor_update": 2.0})
    spans = spans_of(tmp_path, grpo_rows(5, 0), grpo_rows(5, 1), slow, grpo_rows(5, 3))

    table = ranks(spans)
    row = dict(zip(table.column("stage"), table.rows, strict=True))["actor_update"]

    walls = steps(spans)
    update = zip(walls.column("rank"), walls.column("actor_update"), strict=True)
    own = [time for rank, time in update if rank == 2]
    assert row[1] == 2
    assert row[2] == sum(own) // 5  # type: ignore[arg-type]
    assert row[4] == pytest.approx(2.0, abs=0.1)
    assert row[5] == 5
    assert "no verdicts" in table.note


def test_no_ratio_where_the_others_have_none_of_it() -> None:
    rows = [Row("step", "step", n, n * 10, n * 10 + 10) for n in (1, 2, 3)]
    table = ranks(loaded(rows, [*rows, Row("save", "stage", 1, 10, 16)]))
    assert table.rows[1][:5] == ("save", 1, 2, None, None)


def test_ranks_that_never_run_a_stage_are_none_of_the_others() -> None:
    idle = [Row("step", "step", n, n * 10, n * 10 + 10) for n in (1, 2, 3)]
    trains = [
        [*idle, *(Row("update", "stage", n, n * 10, n * 10 + took) for n in (1, 2, 3))]
        for took in (4, 4, 6)
    ]
    assert ranks(loaded(*trains, idle, idle, idle)).rows[1][:5] == ("update", 2, 6, 4, 1.5)


@pytest.mark.parametrize(
    ("count", "size", "reason"),
    [
        (1, 5, "ranks are compared where two or more have steps"),
        (2, 2, "a rank has 2 steps, too few to compare ranks (3 needed)"),
    ],
)
def test_it_abstains(tmp_path: Path, count: int, size: int, reason: str) -> None:
    assert ranks(grpo_run(tmp_path, steps=size, ranks=count)).abstained == reason


def test_it_abstains_without_spans() -> None:
    assert ranks(loaded([], [])).abstained == "ranks are compared where two or more have steps"
