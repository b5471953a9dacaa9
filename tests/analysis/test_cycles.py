"""The heaviest cycle beside all cycles of small graphs, counted out."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.cycles import heaviest

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
    found = heaviest(*columns(edges))
    every = [Fraction(*sums) for sums in counted_out(edges)]
    if found is None:
        assert not every
        return
    assert Fraction(found.weight, found.steps) == max(every)
    around = [edges[at] for at in found.edges.tolist()]
    assert sum(edge[2] for edge in around) == found.weight
    assert sum(edge[3] for edge in around) == found.steps
    assert [edge[1] for edge in around] == [edge[0] for edge in around[1:] + around[:1]]


def test_a_round_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="a round of 2 edges takes 0 steps"):
        heaviest(*columns([(0, 1, 5, 0), (1, 0, 5, 0)]))


def test_a_long_chain_is_exact_in_nanoseconds() -> None:
    ring = [(at, (at + 1) % 500, 10**9 + at, int(at == 499)) for at in range(500)]
    found = heaviest(*columns([*ring, (3, 3, 500 * 10**9 + 499 * 250, 1)]))
    assert found is not None
    assert (found.weight, found.steps) == (500 * 10**9 + 499 * 250, 1)
    assert len(found.edges) in (1, 500)  # they are the same
    longer = heaviest(*columns([*ring, (3, 3, 500 * 10**9 + 499 * 250 + 1, 1)]))
    assert longer is not None
    assert longer.edges.tolist() == [500]
