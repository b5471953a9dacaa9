"""Which steps of an optimizer are one iteration of a program's own loop."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.loaders.iterations import optimizer_steps_per_iteration
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import OPTIMIZER_STEP
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.testing import make_header

_MS = 1_000_000


def lengths(seed: int, *, iterations: int, size: int, share: float, noise: float) -> Int64s:
    """Return steps of a loop with rollouts of a share of the time, noise, and a slow first step."""
    draw = np.random.default_rng(seed)
    updates = _MS * draw.lognormal(0, noise, iterations * size)
    rollouts = _MS * size * share / (1 - share) * draw.lognormal(0, noise, iterations)
    updates[::size] += rollouts
    updates[0] += 30 * _MS
    return updates.astype(np.int64)


@pytest.mark.parametrize("size", [2, 3, 8, 20, 64, 320])
def test_iterations_with_rollouts_are_found(size: int) -> None:
    share = max(0.25, 10 / (10 + size))  # a rollout as long as ten updates, or a quarter of all
    drawn = [
        lengths(seed, iterations=5 + seed % 9, size=size, share=share, noise=0.1)
        for seed in range(100)
    ]
    found = [optimizer_steps_per_iteration(each) for each in drawn]
    assert found.count(size) >= 98


@pytest.mark.parametrize("noise", [0.02, 0.3, 0.8])
def test_steps_of_a_loop_without_rollouts_stay(noise: float) -> None:
    draw = np.random.default_rng(7)
    found = []
    for _ in range(300):
        steps = _MS * draw.lognormal(0, noise, draw.integers(3, 200))
        stalls = draw.random(len(steps)) < 0.03  # a machine that is busy with something else
        steps[stalls] *= draw.uniform(5, 50, stalls.sum())
        steps[0] += 30 * _MS
        found.append(optimizer_steps_per_iteration(steps.astype(np.int64)))
    assert found.count(1) >= 299


def test_a_validation_now_and_then_makes_no_iterations() -> None:
    steps = np.full(400, _MS)
    steps[::100] += 15 * _MS
    assert optimizer_steps_per_iteration(steps) == 1


def written(folder: Path, *, unit: str, fetches: bool = False) -> Spans:
    """Write two ranks of four iterations of two optimizer steps, and read them."""
    for rank in (0, 1):
        header = replace(make_header(rank=rank, world_size=2), step_unit=unit)
        writer, number, end = TraceWriter(folder, header), 0, 0
        for step in range(1, 9):
            start, end = end, end + (50 if step % 2 else 1) * _MS
            name = "data_fetch" if fetches else "actor_update"
            counters = {"cpu_wait_ns": step, "host_rss_bytes": 100 - step}
            lines = [
                [
                    "span",
                    name,
                    "stage",
                    step,
                    end - 10,
                    end - 5,
                    1,
                    number + 1,
                    None,
                    {"tokens": 1},
                ],
                ["span", "step", "step", step, start, end, 1, number + 2, None, counters],
            ]
            writer.write(lines)
            number += 2
        writer.write([("end", end, "finished")])
        writer.close()
    return load(folder)


def rows_of(run: Spans, kind: str) -> list[tuple[int, int, int, dict[str, int]]]:
    return [
        (span.rank, span.step, span.duration_ns // _MS, dict(span.counters))
        for span in run
        if span.kind == kind
    ]


def test_steps_of_an_iteration_are_one_with_their_times_and_counters(tmp_path: Path) -> None:
    run = written(tmp_path, unit=OPTIMIZER_STEP)
    wait = {number: 4 * number - 1 for number in (1, 2, 3, 4)}
    assert rows_of(run, "step") == [
        (rank, number, 51, {"cpu_wait_ns": wait[number], "host_rss_bytes": 101 - 2 * number})
        for rank in (0, 1)
        for number in (1, 2, 3, 4)
    ]
    assert [row[1] for row in rows_of(run, "stage")] == 2 * [1, 1, 2, 2, 3, 3, 4, 4]
    assert [row[3] for row in rows_of(run, "stage")] == 16 * [{"tokens": 1}]
    assert "with 2 steps of optimizers" in run.notes[0].text


@pytest.mark.parametrize(("unit", "fetches"), [("", False), (OPTIMIZER_STEP, True)])
def test_marked_steps_and_batches_of_a_loader_stay(
    unit: str, fetches: bool, tmp_path: Path
) -> None:
    run = written(tmp_path, unit=unit, fetches=fetches)
    assert [row[1] for row in rows_of(run, "step")] == 2 * [*range(1, 9)]
    assert run.notes == ()
