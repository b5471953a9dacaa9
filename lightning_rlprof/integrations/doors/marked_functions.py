"""Doors to frameworks without a class of timers: their own functions are marked.

- OpenRLHF: methods of the plain classes under its Ray actors. A step is
  ``BasePPOTrainer.train_step`` and the generation before it.
- prime-rl: the trainer's data loader and broadcast. A step begins where it waits for a batch; what
  lies between the batch and the end of the optimizer's step is the update.
- AReaL: ``stats_tracker.record_timing``, which its trainers call for every phase. Its last phase
  ends a step. ``rollout`` is a wait for samples, as rollouts run ahead.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit, TimerNames, Timers
from lightning_rlprof.recording.annotations import record, stage
from lightning_rlprof.recording.session import Session, current

OPENRLHF = Kit("OpenRLHF", "openrlhf", "vllm", "ray", "transformers")
PRIME_RL = Kit("prime-rl", "prime-rl", "vllm", "transformers")
AREAL = Kit("AReaL", "areal", "sglang", "vllm")

_OPENRLHF = {
    "BasePPOTrainer": {"ppo_train": "actor_update", "broadcast_to_vllm": "weight_sync"},
    "SamplesGenerator": {"generate_samples": "actor_generate"},
    "RemoteExperienceMaker": {
        "make_experience": "make_experience",
        "compute_advantages_and_returns": "compute_advantage",
    },
}
_LOADERS = ("DataLoader", "FakeDataLoader")  # Loaders of prime-rl.
_BROADCASTS = ("WeightBroadcast", "FileSystemWeightBroadcast", "NCCLWeightBroadcast")
_STAGES_OF_AREAL = (("rollout", "wait_for_samples"), ("train_step", "actor_update"))
_TIMERS = Timers(AREAL, TimerNames(stages=_STAGES_OF_AREAL))
_LAST_OF_AREAL = "clear_batches"  # The last phase of a step.


def install(module: Any) -> None:
    """Mark the functions of one module of a framework."""
    _INSTALL[module.__name__.partition(".")[0]](module)


def _openrlhf(module: Any) -> None:
    for kind, methods in _OPENRLHF.items():
        owner = getattr(module, kind, None)
        for name, marker in methods.items() if owner is not None else ():
            OPENRLHF.replace(owner, name, functools.partial(_of_openrlhf, marker))
    ends = functools.partial(OPENRLHF.around, before=_begin_openrlhf, after=_end_openrlhf)
    OPENRLHF.replace(getattr(module, "BasePPOTrainer", None), "train_step", ends)


def _of_openrlhf(marker: str, function: Any) -> Any:
    return OPENRLHF.around(stage(marker)(function), before=_begin_openrlhf)


def _begin_openrlhf(*args: Any, **kwargs: Any) -> None:
    OPENRLHF.begin_step(role="controller")


def _end_openrlhf(*args: Any, **kwargs: Any) -> None:
    if (session := current()) is not None:
        session.begin_step(session.next_step)
        session.end_step()


def _prime_rl(module: Any) -> None:
    for owner in (getattr(module, kind, None) for kind in _LOADERS):
        if owner is not None:
            PRIME_RL.replace(owner, "wait_for_batch", _waits_for_batch)
            PRIME_RL.replace(
                owner, "get_batch", functools.partial(PRIME_RL.around, after=_got_batch)
            )
    for owner in (getattr(module, kind, None) for kind in _BROADCASTS):
        if owner is not None:
            PRIME_RL.marks(owner, "broadcast_weights", "weight_sync")


_batch_since: list[int] = []  # The time at which prime-rl had its batch.


def _waits_for_batch(function: Any) -> Any:
    return PRIME_RL.around(stage("wait_for_samples")(function), before=_end_update)


def _end_update(*args: Any, **kwargs: Any) -> None:
    session = PRIME_RL.session()
    if session is not None and _batch_since:
        record("actor_update", _batch_since.pop(), session.clock())
        session.end_step()
    PRIME_RL.begin_step()


def _got_batch(*args: Any, **kwargs: Any) -> None:
    if (session := current()) is not None:
        _batch_since[:] = [session.clock()]


def _areal(module: Any) -> None:
    AREAL.replace(module, "record_timing", _record_timing)


def _record_timing(function: Any) -> Any:
    @functools.wraps(function)
    def record_timing(key: str, *args: Any, **kwargs: Any) -> Any:
        return _timed(str(key), function(key, *args, **kwargs))

    return record_timing


@contextmanager
def _timed(key: str, inner: Any) -> Iterator[Any]:
    session: Session | None = AREAL.quiet(AREAL.begin_step)()
    with stage(_TIMERS.stage_of(key)), inner as found:
        yield found
    if key == _LAST_OF_AREAL and session is not None and session is current():
        AREAL.quiet(session.end_step)()


_INSTALL: dict[str, Callable[[Any], None]] = {
    "openrlhf": _openrlhf,
    "prime_rl": _prime_rl,
    "areal": _areal,
}
