"""Door to Lightning Fabric, whose programs have loops of their own.

Its steps, rollouts and updates are those that the door to PyTorch sees. A program that is recorded
in another way keeps its own steps.
"""

import functools
import gc
import sys
from typing import Any
from weakref import WeakSet

import torch

from lightning_rlprof.integrations.doors.kit import Kit
from lightning_rlprof.integrations.doors.pytorch import LOOP
from lightning_rlprof.recording.annotations import Marker
from lightning_rlprof.recording.job import find_place, forget
from lightning_rlprof.recording.open_spans import Owner
from lightning_rlprof.recording.session import current, running
from lightning_rlprof.records.records import OPTIMIZER_STEP, ROLLOUT_AND_UPDATES

KIT = Kit("Fabric", "lightning", "sheeprl")

_ENVIRONMENTS = ("gymnasium", "gym")  # A program that has these rolls out.
_TIMED = "sheeprl.utils.timer"  # The door of this module marks updates and steps.
_COLLECTIVES = ("all_reduce", "all_gather", "barrier", "broadcast")


def install(module: Any) -> None:
    """Mark the methods of Fabric and of its optimizers.

    Args:
        module: ``lightning.fabric.fabric`` or ``lightning_fabric.fabric``.
    """
    fabric = KIT.find(module, "Fabric")
    for name in ("setup", "setup_module", "setup_optimizers"):
        KIT.replace(fabric, name, functools.partial(KIT.around, before=_begin))
    KIT.replace(fabric, "backward", _noticing)
    for name in _COLLECTIVES:
        KIT.replace(fabric, name, Marker(name, "region"))
    KIT.marks(fabric, "save", "save_checkpoint")
    optimizer = KIT.find(module, "_FabricOptimizer")
    KIT.replace(KIT.find(module, "_FabricModule"), "forward", _noticing)
    KIT.marks(KIT.find(module, "_FabricDataLoader"), "__iter__", "data_fetch")
    KIT.replace(optimizer, "step", _noticing)


class _Training:
    """A session that this door starts, and the Fabrics that set up what it records."""

    def __init__(self, place: tuple[int, int], device: str) -> None:
        self.fabrics = WeakSet[Any]()
        unit = OPTIMIZER_STEP
        if any(name in sys.modules for name in _ENVIRONMENTS):
            unit = ROLLOUT_AND_UPDATES
        is_timed = _TIMED in sys.modules
        end = self._end_if_left
        self.session = KIT.new_session(
            Owner(), place, device, "" if is_timed else unit, end_if_left=end
        )
        if is_timed:
            self.session.expect_step(1)
        else:
            LOOP.lead(self.session)

    def _end_if_left(self) -> None:
        """End the run once its Fabrics are gone, as in the next trial of a sweep.

        One that has trained nothing, as that of a player, leaves no run.
        """
        LOOP.flush()
        gc.collect()  # A Fabric refers to itself, so only the garbage collector removes it.
        if not self.fabrics and (self.session.has_steps or self.session.buffer.has_stages()):
            self.session.close(self.session.standing)
        elif not self.fabrics:
            self.discard()

    def discard(self) -> None:
        """Leave no run, and its place in the job to another session of this process."""
        self.session.discard()
        forget(self.session.run)


_trainings: list[_Training] = []


def _begin(fabric: Any, *args: Any, **kwargs: Any) -> None:
    """Start a session, unless one records this training: one Fabric may set up parts of another's.

    What the Fabric of a player or an evaluation says of ranks goes for nothing as soon as that of
    the training knows more.
    """
    if any(fabric in each.fabrics for each in _trainings):
        return
    place, session = (fabric.global_rank, fabric.world_size), running()
    _trainings[:] = [each for each in _trainings if each.fabrics]
    mine = next((each for each in _trainings if each.session is session), None)
    if session is not None and session.owner.has_thread():
        if mine is None:
            return  # The session belongs to the program, or to another framework.
        known, header = find_place(own=place), session.header
        if session.has_steps or (header.rank, header.world_size) == (known.rank, known.world_size):
            mine.fabrics.add(fabric)
            return
        mine.discard()
    mine = _Training(place, fabric.device.type)
    mine.fabrics.add(fabric)
    _trainings.append(mine)


def _noticing(function: Any) -> Any:
    """Let the session know of an exception: if no step follows, the training ended with it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if (session := current()) is not None:
                session.saw(error)
            raise

    return call
