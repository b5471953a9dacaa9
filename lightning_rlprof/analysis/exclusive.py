"""Time in steps by the innermost stage that was open."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from lightning_rlprof.spans import Int64s

__all__ = ["UNTRACED", "Cells", "summed"]

UNTRACED = -1
"""Label of the time in a step that no stage covers."""

_SPARSE = 8


@dataclass(frozen=True, eq=False)
class Cells:
    """Exclusive time per step and stage: three columns sorted by step, then name.

    Attributes:
        ns: Time in a step whose innermost stage has a name; never zero.
        columns: ``step`` and ``name`` of each; None where all steps have the same ``names``.
        names: Then those; ``ns`` is a table by step and name.
    """

    ns: Int64s
    columns: tuple[Int64s, Int64s] | None = None
    names: Int64s = field(default_factory=lambda: np.empty(0, np.int64))

    @cached_property
    def step(self) -> Int64s:
        """Index into ``Partition.steps``."""
        each = max(len(self.names), 1)
        return self.columns[0] if self.columns else np.repeat(np.arange(len(self.ns) // each), each)

    @cached_property
    def name(self) -> Int64s:
        """Index into ``Spans.names``, or `UNTRACED`."""
        each = max(len(self.names), 1)
        return self.columns[1] if self.columns else np.tile(self.names, len(self.ns) // each)

    def sums(self, place: Int64s, places: int, names: int) -> Int64s:
        """Return the time of ``places`` by names, untraced first; `place` is each step's or -1."""
        found = np.zeros((places + 1, names + 1), dtype=np.int64)
        if self.columns:
            row = place % (places + 1) * (names + 1) + 1  # what counts nowhere goes into the last
            np.add.at(found.ravel(), row[self.step] + self.name, self.ns)
            return found[:places]
        table, some = self.ns.reshape(len(place), -1), place >= 0
        if not some.all():  # many short runs would be slow
            table, place = table[some], place[some]
        heads = np.flatnonzero(np.diff(place, prepend=-1))
        for first, last in pairwise([*heads.tolist(), len(place)]):
            found[place[first], self.names + 1] += table[first:last].sum(axis=0)
        return found[:places]


def summed(step: Int64s, name: Int64s, ns: Int64s, steps: int, names: int) -> Cells:
    """Return the sums of times that belong to steps and names, of which there are so many."""
    width = names + 1
    keys, size, at = step * width + name + 1, steps * width, None
    if size > _SPARSE * len(keys):  # few of many names: there is no room for all
        at, keys = np.unique(keys, return_inverse=True)
        size = len(at)
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, keys, ns)
    some = np.flatnonzero(sums)
    at = some if at is None else at[some]
    return Cells(sums[some], (at // width, at % width - 1))
