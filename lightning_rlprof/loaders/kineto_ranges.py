"""What a torch.profiler trace marks: annotations of the host, and their shadows on the device."""

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.attribution import Launches, Stages, stages_at
from lightning_rlprof.loaders.chrome_columns import ChromeColumns
from lightning_rlprof.loaders.enclosing import Enclosing
from lightning_rlprof.model import KINDS, STAGES
from lightning_rlprof.spans import Int64s

__all__ = ["REGION", "STAGE", "STEP", "Around", "Ranges", "ranges_of"]

STEP, STAGE, REGION = (KINDS.index(kind) for kind in ("step", "stage", "region"))
"""Codes of the kinds of an annotation."""

_STEP_NAME = re.compile(r"ProfilerStep#(\d{1,15})")


@dataclass(frozen=True, eq=False)
class Ranges:
    """Annotations as columns, by start and of two that begin at once the longer one first.

    Attributes:
        lane: Code of the thread (the stream, on the device).
        process: Code of the process (the device).
        name: Code of the name.
        kind: Index into `lightning_rlprof.model.KINDS`: step, stage or region.
        step: Step that it is or lies in, 0 where none is known.
        start_ns: In the trace's own time.
        end_ns: In the trace's own time.
    """

    lane: Int64s
    process: Int64s
    name: Int64s
    kind: npt.NDArray[np.int8]
    step: Int64s
    start_ns: Int64s
    end_ns: Int64s

    def stages(self, *kinds: int) -> Stages:
        """Return those of some kinds for `stages_at`."""
        told = np.isin(self.kind, kinds)
        rows = slice(None) if told.all() else told  # a copy only where some are left out
        return Stages(
            self.process[rows],
            self.lane[rows],
            self.kind[rows],
            self.name[rows],
            self.step[rows],
            self.start_ns[rows],
            self.end_ns[rows],
        )

    def of(self, *kinds: int) -> "Around":
        """Return those of some kinds, to be asked for the innermost around a moment."""
        rows = np.flatnonzero(np.isin(self.kind, kinds))
        own = Enclosing(self.lane[rows], self.start_ns[rows], self.end_ns[rows])
        return Around(np.append(rows, -1), own)


class Around(NamedTuple):
    """Some of the ranges, made ready to be asked."""

    rows: Int64s
    own: Enclosing

    def at(self, lane: Int64s, time_ns: Int64s) -> Int64s:
        """Return the innermost range around each moment on a lane, -1 where none is."""
        return self.rows[self.own.at(lane, time_ns)]


def ranges_of(columns: ChromeColumns, kind: int, processes: Int64s) -> Ranges:
    """Return the annotations of one kind; ``processes`` has the code of each lane's process."""
    rows = columns.rows(kind)
    order = np.lexsort((-rows["end_ns"], rows["start_ns"]))
    lane, name, start, end = (
        rows[column][order] for column in ("lane", "name", "start_ns", "end_ns")
    )
    names = list(columns.names)
    kinds, steps = np.full(len(names), REGION, np.int8), np.zeros(len(names), np.int64)
    for code in np.unique(name).tolist():
        if names[code] in STAGES:
            kinds[code] = STAGE
        elif found := _STEP_NAME.fullmatch(names[code]):
            kinds[code], steps[code] = STEP, int(found[1])
    alone = Ranges(lane, processes[lane], name, kinds[name], steps[name], start, end)
    around = stages_at(alone.stages(STEP), Launches(alone.process, lane, start)).step
    return replace(alone, step=np.where(alone.kind == STEP, alone.step, around))
