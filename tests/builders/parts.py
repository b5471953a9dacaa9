"""How the ranks of a scripted replica hold one another up: tensor, expert and pipeline parallel."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_rlprof.tables.table import Column, ColumnRows, Table

_COLUMNS, _KINDS = ("rank", "step", "operator", "group"), ("count", "count", "text", "text")
_CHUNKS = 8  # micro-batches that a pipeline has in a stage


class Parts:
    """Where each rank stands, in the order of ranks that Megatron has; arrays by rank."""

    def __init__(self, ranks: int, sizes: Mapping[str, int]) -> None:
        tp, ep, pp = (sizes.get(key, 1) for key in ("tp", "ep", "pp"))
        number, copies = np.arange(ranks), ranks // (tp * ep * pp)
        self.several = tp * ep * pp > 1
        self.tensor, self.expert = number % tp, number // tp % ep
        self.copy = number // (tp * ep) % copies
        self.stage = number // (tp * ep * copies)
        self.same = self._numbered(self.copy, self.expert, self.stage)  # a tensor-parallel group
        self.samples = self._numbered(self.copy, self.expert)
        self.line = self._numbered(self.tensor, self.expert, self.stage)

    @staticmethod
    def _numbered(*columns: Any) -> Any:
        return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].ravel()

    def share(self, values: Any) -> Any:
        """Give ranks that share samples the same ones: those of the first."""
        return values[np.unique(self.samples, return_index=True)[1][self.samples]]

    def held_up(self, came: Any) -> Any:
        """Return when ranks of one tensor-parallel group can all go on: with the last of them."""
        found = np.full(came.shape, -np.inf)
        np.maximum.at(found, self.same, came)
        return found[self.same]

    def piped(self, done: Any, took: Any) -> Any:
        """Return when pipeline stages are done: not before the one before, and one chunk more."""
        found = done.copy()
        for stage in range(1, int(self.stage.max()) + 1):
            here, before = (np.flatnonzero(self.stage == each) for each in (stage, stage - 1))
            found[here] = np.maximum(found[here], found[before] + took[here] / _CHUNKS)
        return found

    def met(self, came: Any) -> Any:
        """Return when the last rank of each one's data-parallel group has come."""
        found = np.full(came.shape, -np.inf)
        np.maximum.at(found, self.line, came)
        return found[self.line]

    def groups(self) -> dict[str, Any]:
        """Return the process groups of a training step, each by the number of its rank's one."""
        return {
            "tensor": self.same,
            "expert": self._numbered(self.copy, self.tensor, self.stage),
            "pipeline": self._numbered(self.copy, self.expert, self.tensor),
            "data_parallel": self.line,
            "world": np.zeros_like(self.line),
        }


def table_of(met: Any, groups: Mapping[str, Any], inside: Any = None) -> Table:
    """Return collectives as the loaders list them.

    Args:
        met: When ranks came and how long they were there; shape (2, ranks, steps, slots).
        groups: Process groups by kind: of each rank the number of its own.
        inside: When ranks came where they meet in every stage; None where they do not.
    """
    blocks, names = [], []
    for kind, group in groups.items():
        within = inside is not None and kind not in ("data_parallel", "world")
        came, took = (inside, inside) if within else met
        if inside is not None and kind != "data_parallel":  # it ends when the last one has come
            gone = np.full(came.shape, -np.inf)
            np.maximum.at(gone, group, came)
            took = gone[group] - came + 2e5
        rank, step, slot = np.indices(came.shape)
        code = len(names) + group[:, None, None] + np.zeros_like(rank)
        what = 2 * slot + (kind == "pipeline")
        blocks.append([rank, step + 1, what, code, np.rint(came), np.rint(took)])
        names += [f"{kind}_{number}" for number in range(int(group.max()) + 1)]
    columns = zip(*blocks, strict=True)
    whole = [
        np.concatenate([each.ravel().astype(np.int64) for each in column]) for column in columns
    ]
    operators = [f"{name}_{at}" for at in range(9) for name in ("allreduce", "hcom_receive")]
    told = [Column(name, kind) for name, kind in zip(_COLUMNS, _KINDS, strict=True)]
    times = [Column("start", "time", "ns"), Column("duration", "duration", "ns")]
    whole[2], whole[3] = (whole[2], operators), (whole[3], names)
    return Table("communication", (*told, *times), ColumnRows(whole))
