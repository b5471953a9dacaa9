"""A straggler of a Lightning run is named without any mark in the training code."""

import random

import numpy as np
import pytest

from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.tables.spans import Spans
from tests.builders.diagnosed import judged
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


def busy_machine(late_ms: float, seed: int, steps: int = 60) -> Spans:
    """The same on a machine that others use: the pace of each rank wanders by a third."""
    noise = np.random.default_rng(seed)
    pace = np.zeros((2, steps))
    for step in range(steps):
        pace[:, step] = 0.5 * pace[:, step - 1] + noise.normal(0, 0.26, 2)
    forward, backward = 15 * np.exp(pace), 14 * np.exp(pace)
    forward[1] += late_ms
    ranks: list[list[Row]] = [[], []]
    begin = 0
    for step in range(steps):
        arrived = begin + (forward[:, step] * MS).astype(int)
        together = int(np.max(arrived + (backward[:, step] * MS).astype(int)))
        for rows, own in zip(ranks, arrived.tolist(), strict=True):
            rows += [
                Row("step", "step", step + 1, begin, together + MS),
                Row("training_step", "region", step + 1, begin, own),
                Row("backward", "region", step + 1, own, together),
            ]
        begin = together + 20 * MS
    return loaded(*ranks)


@pytest.mark.parametrize("seed", range(4))
def test_the_late_one_of_two_ranks_is_named_on_a_busy_machine(seed: int) -> None:
    table = stragglers(busy_machine(40, seed))
    assert table.column("rank") == [1]
    assert table.column("verdict") != ["inconclusive"]
    assert 1 < table.column("slowdown")[0] < 5  # 40 ms in 15
    assert table.column("peer time lost")[0] == pytest.approx(60 * 40 * MS, rel=0.3)


@pytest.mark.parametrize("seed", range(4))
def test_no_healthy_rank_is_accused_on_a_busy_machine(seed: int) -> None:
    table = stragglers(busy_machine(0, seed))
    assert table.abstained or set(table.column("verdict")) <= {"no straggler", "inconclusive"}


@pytest.mark.parametrize(("late_ms", "found"), [(1, 0), (5, 1)])
def test_a_late_rank_is_a_problem_if_its_peers_lose_a_part_of_the_job(
    late_ms: float, found: int
) -> None:
    spans = ddp_run(late_ms, 1)
    assert stragglers(spans).column("rank") == [1]
    assert len(judged(spans, "straggler")) == found
