"""Door to prime-rl's trainer, which has no timers: its data loader, its broadcast, its optimizer.

A step begins where the trainer waits for a batch. What lies between the batch and the end of the
optimizer's step is the update.
"""

import functools
from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit
from lightning_rlprof.recording.annotations import record, stage
from lightning_rlprof.recording.session import current

KIT = Kit("prime-rl", "prime-rl", "vllm", "transformers")
_since: list[int] = []  # when the batch was there


def install(module: Any) -> None:
    """Mark the methods of one module of prime-rl."""
    for kind in ("DataLoader", "FakeDataLoader"):
        owner = getattr(module, kind, None)
        if owner is not None:
            KIT.replace(owner, "wait_for_batch", _waits)
            KIT.replace(owner, "get_batch", _got)
    for name in ("WeightBroadcast", "FileSystemWeightBroadcast", "NCCLWeightBroadcast"):
        owner = getattr(module, name, None)
        if owner is not None:
            KIT.marks(owner, "broadcast_weights", "weight_sync")


def _waits(function: Any) -> Any:
    wait = stage("wait_for_samples")
    begin = KIT.quiet(_begin)

    @functools.wraps(function)
    def wait_for_batch(*args: Any, **kwargs: Any) -> Any:
        begin()
        with wait:
            return function(*args, **kwargs)

    return wait_for_batch


def _begin() -> None:
    session = KIT.session()
    if session is None:
        return
    if _since:
        record("actor_update", _since.pop(), session.clock())
        session.end_step()
    if session.step_start_ns is None or session.waiting:
        session.begin_step(session.next_step)


def _got(function: Any) -> Any:
    @functools.wraps(function)
    def get_batch(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if (session := current()) is not None:
            _since[:] = [session.clock()]
        return found

    return get_batch
