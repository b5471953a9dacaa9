"""Samples of TRL's on-policy trainers: tokens, reward and fate of each completion of this rank.

They are told when the rewards are known, before the steps that train them.
"""

import functools
from collections.abc import Sequence
from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit
from lightning_rlprof.recording.annotations import listener
from lightning_rlprof.recording.samples import sample
from lightning_rlprof.records.records import Fate

_EQUAL = 1e-8  # rewards of a group that differ by less give no advantage


def sampled(function: Any, kit: Kit) -> Any:
    """Return ``_calculate_rewards`` so that it records the samples that it has scored."""
    record = kit.quiet(_record)

    @functools.wraps(function)
    def call(self: Any, inputs: Any, prompts: Any, completions: Any, ids: Any, *more: Any) -> Any:
        found = function(self, inputs, prompts, completions, ids, *more)
        if listener() is not None:
            record(self, ids, found)
        return found

    return call


def _record(trainer: Any, ids: Sequence[Sequence[int]], gathered: Any) -> None:
    """Record the completions of this rank; their rewards are among those of all ranks."""
    weights = trainer.reward_weights.to(gathered.device)
    rewards = (gathered * weights).nansum(1).tolist()
    training = bool(trainer.model.training)
    size = trainer.num_generations
    if not training:
        size = getattr(trainer, "num_generations_eval", size)
    most = getattr(trainer, "max_completion_length", None)
    limit = {} if most is None else {"response_limit": int(most)}
    first, step = trainer.accelerator.process_index * len(ids), int(trainer.state.global_step)
    for place, own in enumerate(ids, start=first):
        group = place // size
        members = rewards[group * size : (group + 1) * size]
        fate: Fate = "trained"
        if not training:
            fate = "evaluation"
        elif trainer.mask_truncated_completions and _is_truncated(trainer, own):
            fate = "truncated"
        elif max(members) - min(members) < _EQUAL:
            fate = "zero_advantage"
        name = f"step {step + 1}, prompt {group}"
        one = sample(name, version=step)
        one.end(fate, tokens=len(own), reward=rewards[place], **limit)


def _is_truncated(trainer: Any, ids: Sequence[int]) -> bool:
    """Return whether a completion ended by its length."""
    ends = getattr(trainer, "eos_token_ids", None) or [trainer.eos_token_id]
    return not len(ids) or int(ids[-1]) not in ends
