"""The stage and the step that each launch of device work belongs to."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.interval_nesting import Enclosing

NOWHERE = -1
"""Stands for a process or thread that is not known."""

_STAGE, _STEP = KINDS.index("stage"), KINDS.index("step")


class Launches(NamedTuple):
    """Moments on threads of processes, as columns; `NOWHERE` finds nothing."""

    process: Int64s
    thread: Int64s
    time_ns: Int64s


@dataclass(frozen=True, eq=False)
class Stages:
    """Ranges that say what their process was doing, as columns of one length."""

    process: Int64s
    thread: Int64s
    kind: npt.NDArray[np.integer[Any]]
    name: Int64s
    step: Int64s
    start_ns: Int64s
    end_ns: Int64s

    def only(self, *kinds: int) -> "Stages":
        """Return those of some kinds."""
        own = np.isin(self.kind, kinds)
        rows = slice(None) if own.all() else own  # a copy only where some are left out
        return Stages(*(getattr(self, each.name)[rows] for each in fields(self)))

    @cached_property
    def around(self) -> Enclosing:
        """All of them, to be asked for the innermost around a moment."""
        return Enclosing(self.thread, self.start_ns, self.end_ns)

    @cached_property
    def stages(self) -> "Stages":
        """Those that are stages."""
        return self.only(_STAGE)

    def name_at(self, thread: Int64s, time_ns: Int64s) -> Int64s:
        """Return the name of the innermost around each moment on a thread, -1 without one."""
        return np.append(self.name, -1)[self.around.at(thread, time_ns)]

    def step_at(self, thread: Int64s, time_ns: Int64s) -> Int64s:
        """Return the step of the innermost around each moment on a thread, 0 without one."""
        return np.append(self.step, 0)[self.around.at(thread, time_ns)]


class Found(NamedTuple):
    """What `stages_at` found, per launch.

    Attributes:
        stage: Code of the stage's name, -1 where there is none.
        step: The step, 0 where there is none.
        thread: The thread whose ranges told it.
        lent: Whether that is another thread than the launch's own.
    """

    stage: Int64s
    step: Int64s
    thread: Int64s
    lent: npt.NDArray[np.bool_]


def stages_at(stages: Stages, launches: Launches) -> Found:
    """Find the innermost stage, and the step of the innermost range, around each launch.

    Threads that mark nothing themselves borrow from the thread of their process that trains: while
    it waits for a backward pass, autograd's threads launch the kernels.
    """
    thread = launches.thread.copy()
    silent = ~np.isin(thread, stages.thread)
    for process in np.unique(launches.process[silent]).tolist():
        thread[silent & (launches.process == process)] = _training_thread(stages, process)
    around = stages.around.at(thread, launches.time_ns)
    return Found(
        stages.stages.name_at(thread, launches.time_ns),
        np.append(stages.step, 0)[around],
        thread,
        silent & (around >= 0),
    )


def _training_thread(stages: Stages, process: int) -> int:
    """Return the thread with most steps, then with most stages."""
    own = stages.process == process
    threads, codes = np.unique(stages.thread[own], return_inverse=True)
    if not len(threads):
        return NOWHERE
    counts = [
        np.bincount(codes, stages.kind[own] == kind, len(threads)) for kind in (_STAGE, _STEP)
    ]
    return int(threads[np.lexsort(counts)[-1]])
