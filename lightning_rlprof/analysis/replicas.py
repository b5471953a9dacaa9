"""Which ranks hold one copy of the model together, and which ranks of other copies do the same."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.spans import Int64s, Spans

__all__ = ["Replicas", "replicas"]

_ORDER = ("tp", "cp", "ep", "pp")


class Replicas(NamedTuple):
    """Where each rank stands; arrays over ranks.

    Attributes:
        ranks: Ascending.
        replica: The copy of the model that the rank holds a part of.
        place: Which part that is: ranks of one place are compared with one another.
        work: Places with the same number share layers, experts and samples evenly.
    """

    ranks: Int64s
    replica: Int64s
    place: Int64s
    work: Int64s

    def members(self) -> dict[int, list[int]]:
        """Return the ranks of each replica."""
        copies = np.unique(self.replica).tolist()
        return {copy: self.ranks[self.replica == copy].tolist() for copy in copies}

    def lines(self) -> list[list[int]]:
        """Return the ranks of each place, the places in their order."""
        places = np.unique(self.place).tolist()
        return [self.ranks[self.place == place].tolist() for place in places]


def replicas(spans: Spans, ranks: Sequence[int]) -> Replicas:
    """Return where ranks stand, by the key ``parallel`` of the configuration that they recorded.

    The order of ranks is that of Megatron and of device meshes: tensor, context and expert
    parallel, copies, pipeline. Without the key, or where ranks disagree, each is a copy of its own.
    """
    numbers = np.array(sorted(ranks), dtype=np.int64)
    told = {(*_sizes(spans, rank), spans.headers[rank].world_size) for rank in numbers.tolist()}
    tp, cp, ep, pp, world = told.pop() if len(told) == 1 else (1, 1, 1, 1, 1)
    alone = np.zeros_like(numbers)
    if world % (tp * cp * ep * pp) or tp * cp * ep * pp == 1:
        return Replicas(numbers, numbers, alone, alone)
    share, copies = tp * cp, world // (tp * cp * ep * pp)
    work = numbers // (share * ep * copies) * ep + numbers // share % ep
    replica = numbers // (share * ep) % copies
    return Replicas(numbers, replica, work * share + numbers % share, work)


def _sizes(spans: Spans, rank: int) -> tuple[int, ...]:
    said = spans.headers[rank].config.get("parallel")
    sizes = [said.get(key, 1) for key in _ORDER] if isinstance(said, dict) else []
    known = len(sizes) == len(_ORDER) and all(type(size) is int and size > 0 for size in sizes)
    return tuple(sizes) if known else (1,) * len(_ORDER)
