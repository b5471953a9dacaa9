"""A straggler of a Lightning run is named without any mark in the training code."""

import random

import pytest

from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row, loaded

MS = 1_000_000


def ddp_run(late_ms: float, seed: int, steps: int = 60) -> Spans:
    """Two ranks whose backward pass ends together; rank 1 is late in its training step."""
    noise = random.Random(seed)
    ranks: list[list[Row]] = [[], []]
    begin = 0
    for step in range(1, steps + 1):
        forward = [int((15 + late) * MS * noise.gauss(1, 0.03)) for late in (0, late_ms)]
        backward = [int(14 * MS * noise.gauss(1, 0.03)) for _ in ranks]
        together = begin + max(map(sum, zip(forward, backward, strict=True)))
        for rows, own in zip(ranks, forward, strict=True):
            update = together + int(MS * noise.gauss(1, 0.05))
            rows += [
                Row("step", "step", step, begin, update + MS),
                Row("training_step", "region", step, begin, begin + own),
                Row("backward", "region", step, begin + own, together),
                Row("optimizer_step", "region", step, together, update),
            ]
        begin = together + 3 * MS
    return loaded(*ranks)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("late_ms", [5, 20])
def test_the_late_rank_is_named_with_its_stage_and_what_the_other_lost(
    late_ms: float, seed: int
) -> None:
    table = stragglers(ddp_run(late_ms, seed))
    (row,) = [dict(zip([c.name for c in table.columns], row, strict=True)) for row in table.rows]
    assert (row["rank"], row["stages"]) == (1, "training_step")
    assert row["peer time lost"] == pytest.approx(60 * late_ms * MS, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_accuses_no_rank(seed: int) -> None:
    assert stragglers(ddp_run(0, seed)).column("rank") == [None]
