"""The cycle of a graph with the most weight by step: how fast anything goes on for ever."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.spans import Int64s

__all__ = ["Cycle", "heaviest"]

Mask = npt.NDArray[np.bool_]


class Cycle(NamedTuple):
    """A cycle: its edges in order, their weight together, and how many steps one round takes."""

    edges: Int64s
    weight: int
    steps: int


def heaviest(source: Int64s, target: Int64s, weight: Int64s, steps: Int64s) -> Cycle | None:
    """Return the cycle with the greatest weight by steps, None where there is none; exact.

    From any cycle to one that is heavier until there is none (Dinkelbach 1967; the cycles by
    Bellman-Ford). A round of any cycle must take one step or more.

    Args:
        source: Node at which each edge begins.
        target: Node at which it ends.
        weight: Its weight; below 2^40.
        steps: How many steps it goes on.

    Raises:
        ValueError: A round of some cycle takes no step.
    """
    nodes, best, gain = (
        int(max(source.max(initial=-1), target.max(initial=-1))) + 1,
        None,
        weight + 1,
    )
    while (edges := _positive(source, target, gain, nodes)) is not None:
        best = Cycle(edges, int(weight[edges].sum()), int(steps[edges].sum()))
        if best.steps <= 0:
            raise ValueError(f"a round of {len(edges)} edges takes {best.steps} steps")
        gain = weight * best.steps - steps * best.weight
    return best


def _positive(source: Int64s, target: Int64s, gain: Int64s, nodes: int) -> Int64s | None:
    """Return the edges of a cycle whose gains add up to more than 0, None where there is none."""
    order = np.argsort(target, kind="stable")
    heads = np.flatnonzero(np.diff(target[order], prepend=-1))
    size, where = np.diff(np.append(heads, len(order))), target[order][heads]
    best, by = np.zeros(nodes, dtype=np.int64), np.full(nodes, -1)
    while len(order):
        reach = best[source[order]] + gain[order]
        top = np.maximum.reduceat(reach, heads)
        better = top > best[where]
        if not better.any():
            break
        best[where] = np.where(better, top, best[where])
        chosen = order[np.repeat(better, size) & (reach == np.repeat(top, size))]
        by[target[chosen]] = chosen
        found = _circle(by, source)
        if found is not None:
            return found
    return None


def _circle(by: Int64s, source: Int64s) -> Int64s | None:
    """Return the edges of a circle in which each node was reached by its edge, if there is one."""
    nodes = len(by)
    up = np.append(np.where(by >= 0, source[by], nodes), nodes)
    far = up.copy()
    for _ in range(nodes.bit_length()):
        far = far[far]
    inside = far[far < nodes]
    if not len(inside):
        return None
    edges, node = [int(by[inside[0]])], int(up[inside[0]])
    while node != inside[0]:
        edges.append(int(by[node]))
        node = int(up[node])
    return np.array(edges[::-1], dtype=np.int64)
