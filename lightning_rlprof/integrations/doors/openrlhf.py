"""Door to OpenRLHF, which has no timers: methods of the plain classes under its Ray actors.

A step is ``BasePPOTrainer.train_step`` and the generation before it.
"""

import functools
from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import current

KIT = Kit("OpenRLHF", "openrlhf", "vllm", "ray", "transformers")

_STAGES = {
    "BasePPOTrainer": {"ppo_train": "actor_update", "broadcast_to_vllm": "weight_sync"},
    "SamplesGenerator": {"generate_samples": "actor_generate"},
    "RemoteExperienceMaker": {
        "make_experience": "make_experience",
        "compute_advantages_and_returns": "compute_advantage",
    },
}


def install(module: Any) -> None:
    """Mark the methods of one module of OpenRLHF."""
    for kind, methods in _STAGES.items():
        owner = getattr(module, kind, None)
        for name, marker in methods.items() if owner is not None else ():
            KIT.replace(owner, name, functools.partial(_marked, marker))
        if owner is not None and kind == "BasePPOTrainer":
            KIT.replace(owner, "train_step", _ends_step)


def _marked(marker: str, function: Any) -> Any:
    around = stage(marker)
    begin = KIT.quiet(_begin)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin()
        with around:
            return function(*args, **kwargs)

    return call


def _begin() -> None:
    session = KIT.session(role="controller")
    if session is not None and session.step_start_ns is None:
        session.begin_step(session.next_step)


def _ends_step(function: Any) -> Any:
    begin = KIT.quiet(_begin)

    @functools.wraps(function)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        begin()
        found = function(*args, **kwargs)
        _end()
        return found

    return train_step


@KIT.quiet
def _end() -> None:
    if (session := current()) is not None:
        session.begin_step(session.next_step)
        session.end_step()
