"""The cycle that the rate of a scripted job hangs on, by its script.

The heaviest cycle beside all cycles of small graphs, counted out.
"""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.critical_path.bottleneck_cycle import (
    bottleneck_cycle,
    heaviest_cycle,
)
from tests.analysis.critical_path.test_handoffs import jobs
from tests.builders.fed import MS, Fed, feed, with_roles
from tests.builders.runs import Row, loaded
from tests.builders.scripted import Script, play
from tests.effort import examples

ASYNC = Fed(lag=1)


def parts(job: Fed) -> dict[tuple[str, int | None], int]:
    table = bottleneck_cycle(feed(job))
    assert table.abstained is None, table.abstained
    return {(row[0], row[3]): row[5] for row in table.rows}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({}, {("actor_generate", 1): 70}),
        ({"generate": (90, 70)}, {("actor_generate", 0): 90}),
        ({"train": 100}, {("actor_update", 3): 100, ("weight_sync", 3): 8}),
        ({"reward": 50, "lag": 2}, {("compute_reward", 2): 100}),
    ],
    ids=str,
)
def test_one_role_that_is_always_busy_is_the_cycle(
    change: dict[str, Any], want: dict[tuple[str, int], int]
) -> None:
    found = parts(replace(ASYNC, **change))
    assert found == {key: ms * MS for key, ms in want.items()}


def test_weights_that_may_be_one_version_old_make_a_cycle_of_two_steps() -> None:
    job = Fed(generate=(60, 60), train=60, lag=1, steps=20)
    table = bottleneck_cycle(feed(job))

    # 1 for the weights, 60, 1, both samples 20, 1, 60 and 8: 151 every two steps.
    assert {(row[0], row[1]): row[5] for row in table.rows} == {
        ("actor_update", "work"): 60 * MS,
        ("actor_generate", "work"): 60 * MS,
        ("compute_reward", "work"): 20 * MS,
        ("weight_sync", "work"): 8 * MS,
        ("actor_generate", "handoff"): MS,
        ("compute_reward", "handoff"): MS,
        ("taken", "handoff"): MS,
    }
    assert "The cycle takes 151 ms and 2 steps: 75.5 ms per step." in (table.note or "")


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_the_rate_is_that_of_the_cycle(lag: int) -> None:
    for generate in ((50, 70), (100, 30), (60, 60)):
        for train in (20, 60, 110):
            table = bottleneck_cycle(feed(Fed(generate=generate, train=train, lag=lag, steps=40)))
            words = (table.note or "").split()
            by_step, measured = float(words[8]), float(words[15])
            assert by_step == pytest.approx(measured, rel=0.02)


def test_where_every_step_waits_for_the_one_before_nothing_is_said() -> None:
    assert "Steps don't overlap." in str(bottleneck_cycle(feed(Fed())).abstained)
    assert "No samples or weight versions" in str(
        bottleneck_cycle(feed(Fed(lag=1, tell=False))).abstained
    )
    assert "No samples or weight versions" in str(
        bottleneck_cycle(play(Script(), 1).spans).abstained
    )


@settings(max_examples=examples(100), deadline=None)
@given(jobs())
def test_odd_runs_abstain_or_name_a_cycle_that_adds_up(ranks: list[list[Row]]) -> None:
    table = bottleneck_cycle(loaded(*ranks))
    if table.abstained is None:
        assert sum(row[4] for row in table.rows) == pytest.approx(1, abs=0.2)  # type: ignore[misc]


Edge = tuple[int, int, int, int]


def counted_out(edges: list[Edge]) -> Iterator[tuple[int, int]]:
    """Yield weight and steps of every cycle that passes no node twice."""

    def onwards(first: int, at: int, seen: frozenset[int], sums: tuple[int, int]) -> Any:
        for source, target, weight, steps in edges:
            if source != at or target < first:
                continue
            more = (sums[0] + weight, sums[1] + steps)
            if target == first:
                yield more
            elif target not in seen:
                yield from onwards(first, target, seen | {target}, more)

    for first in {edge[0] for edge in edges}:
        yield from onwards(first, first, frozenset([first]), (0, 0))


def columns(edges: list[Edge]) -> Any:
    return np.array(edges, dtype=np.int64).reshape(-1, 4).T


@st.composite
def graphs(draw: Any) -> list[Edge]:
    """Draw edges of which a round takes a step or more: those back to a lower node have one."""
    nodes = st.integers(0, 4)
    found = draw(
        st.lists(st.tuples(nodes, nodes, st.integers(0, 20), st.integers(0, 2)), max_size=9)
    )
    return [(a, b, weight, steps + (b <= a)) for a, b, weight, steps in found]


@given(graphs())
def test_no_cycle_has_more_weight_by_step(edges: list[Edge]) -> None:
    found = heaviest_cycle(*columns(edges))
    every = [Fraction(*sums) for sums in counted_out(edges)]
    if found is None:
        assert not every
        return
    assert Fraction(found.weight, found.steps) == max(every)
    around = [edges[at] for at in found.edges.tolist()]
    assert sum(edge[2] for edge in around) == found.weight
    assert sum(edge[3] for edge in around) == found.steps
    assert [edge[1] for edge in around] == [edge[0] for edge in around[1:] + around[:1]]


def test_a_cycle_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="a cycle of 2 edges takes 0 steps"):
        heaviest_cycle(*columns([(0, 1, 5, 0), (1, 0, 5, 0)]))


def test_a_long_chain_is_exact_in_nanoseconds() -> None:
    ring = [(at, (at + 1) % 500, 10**9 + at, int(at == 499)) for at in range(500)]
    found = heaviest_cycle(*columns([*ring, (3, 3, 500 * 10**9 + 499 * 250, 1)]))
    assert found is not None
    assert (found.weight, found.steps) == (500 * 10**9 + 499 * 250, 1)
    assert len(found.edges) in (1, 500)  # they are the same
    longer = heaviest_cycle(*columns([*ring, (3, 3, 500 * 10**9 + 499 * 250 + 1, 1)]))
    assert longer is not None
    assert longer.edges.tolist() == [500]


def test_one_wait_for_a_sample_and_for_weights_of_two_ranks() -> None:
    def stage(name: str, step: int, start: int, end: int, **told: int) -> Row:
        return Row(name, "stage", step, start * MS, end * MS, counters=told)

    rows: list[list[Row]] = [[], [], []]
    for step in range(1, 11):
        now = 100 * step
        rows[0].append(stage("prompts", step, now - 95, now - 5, sample=step))
        need = {"sample": step} | ({"version": step - 1} if step > 1 else {})
        rows[1].append(stage("actor_generate", step, now, now + 80, **need))
        rows[2].append(stage("actor_update", step, now + 81, now + 91, sample=step))
        rows[2].append(stage("weight_sync", step, now + 91, now + 99, version=step))
        for own, (start, end) in zip(rows, ((-95, 5), (0, 100), (81, 181)), strict=True):
            own.append(Row("step", "step", step, (now + start) * MS, (now + end) * MS))
    table = bottleneck_cycle(with_roles([*zip(("data", "rollout", "trainer"), rows, strict=True)]))

    assert "The cycle takes 100 ms and 1 step: 100 ms per step." in table.note
