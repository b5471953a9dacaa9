"""Door to Lightning Fabric, whose programs have loops of their own.

A step ends with an optimizer's step. ``Fabric.backward`` and the optimizer's step are
``actor_update``. A program that is recorded in another way keeps its own steps.
"""

import functools
import sys
from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit
from lightning_rlprof.recording.annotations import Marker, in_stage, stage
from lightning_rlprof.recording.session import Session, current

KIT = Kit("Fabric", "lightning", "sheeprl")

_UPDATE = stage("actor_update")
_TIMED = "sheeprl.utils.timer"  # whose door marks updates and steps
_COLLECTIVES = ("all_reduce", "all_gather", "barrier", "broadcast")


def install(module: Any) -> None:
    """Mark the methods of Fabric and of its optimizers.

    Args:
        module: ``lightning.fabric.fabric`` or ``lightning_fabric.fabric``.
    """
    fabric = KIT.find(module, "Fabric")
    KIT.replace(fabric, "setup", _start_before)
    KIT.replace(fabric, "setup_module", _start_before)
    KIT.replace(fabric, "setup_optimizers", _start_before)
    KIT.replace(fabric, "backward", _unless_inside)
    for name in _COLLECTIVES:
        KIT.replace(fabric, name, Marker(name, "region"))
    KIT.marks(fabric, "save", "save_checkpoint")
    optimizer = KIT.find(module, "_FabricOptimizer")
    KIT.replace(optimizer, "step", lambda function: _ending(_unless_inside(function)))


_owned: list[Session] = []  # the session that this door started


def _begin(fabric: Any) -> None:
    if current() is None:
        session = KIT.new_session(
            rank=fabric.global_rank, world_size=fabric.world_size, device=fabric.device.type
        )
        _owned[:] = [session]
        session.expect_step(1)


def _start_before(function: Any) -> Any:
    begin = KIT.quiet(_begin)

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin(self)
        return function(self, *args, **kwargs)

    return call


def _unless_inside(function: Any) -> Any:
    """Mark calls as the update, but not those in a stage of the program's own."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if in_stage() or _TIMED in sys.modules:
            return function(*args, **kwargs)
        with _UPDATE:
            return function(*args, **kwargs)

    return call


def _ending(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        _end()
        return found

    return call


@KIT.quiet
def _end() -> None:
    session = current()
    if _TIMED in sys.modules or in_stage():
        return
    if session is not None and [session] == _owned:
        session.begin_step(session.next_step)
        session.end_step()
