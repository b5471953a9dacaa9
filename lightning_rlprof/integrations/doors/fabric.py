"""Door to Lightning Fabric: rank, world size and life of loops whose steps `doors.pytorch` finds.

A Fabric may set up parts of another's training, such as a player or an evaluation. So a run ends
once no Fabric is left that set up what it records, as in the next trial of a sweep.
"""

import functools
import gc
from typing import Any
from weakref import WeakSet

from lightning_rlprof.integrations.doors.kit import Kit
from lightning_rlprof.integrations.doors.pytorch import LOOP

KIT = Kit("Fabric", "lightning")

_fabrics = WeakSet[Any]()


def install(module: Any) -> None:
    """Hear of what Fabric sets up, and mark its checkpoints.

    Args:
        module: ``lightning.fabric.fabric`` or ``lightning_fabric.fabric``.
    """
    fabric = KIT.find(module, "Fabric")
    for name in ("setup", "setup_module", "setup_optimizers"):
        KIT.replace(fabric, name, functools.partial(KIT.around, before=_begin))
    KIT.marks(fabric, "save", "save_checkpoint")


def _begin(fabric: Any, *args: Any, **kwargs: Any) -> None:
    if fabric not in _fabrics:
        if LOOP.session is not None:
            gc.collect()  # A Fabric refers to itself, so only the garbage collector removes it.
        if not len(_fabrics):
            LOOP.leave()
        _fabrics.add(fabric)
        LOOP.stand(fabric.global_rank, fabric.world_size, fabric.device.type)
