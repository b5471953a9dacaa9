"""Door to TRL: what its trainers do inside of the Hugging Face Trainer's `training_step`.

Steps, the update and the optimizer are those of `doors.transformers`, which is all that is recorded
of asynchronous GRPO.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit
from lightning_rlprof.recording.annotations import Marker, count, in_stage, listener, stage
from lightning_rlprof.recording.samples import sample
from lightning_rlprof.records.records import Fate

KIT = Kit("TRL", "trl")

_REWARD = stage("compute_reward")
_REFERENCE, _OLD = stage("reference_compute_log_prob"), stage("actor_compute_log_prob")
_EQUAL = 1e-8  # Rewards of a group that differ by less give no advantage.


def install(module: Any) -> None:
    """Mark the methods of one module of TRL."""
    name = module.__name__.rpartition(".")[2]
    _INSTALL[name](module)


def _on_policy(kind: str) -> Any:
    def install_trainer(module: Any) -> None:
        trainer = KIT.find(module, kind)
        if trainer is None:
            return
        KIT.marks(trainer, "_generate_and_score_completions", "compute_advantage")
        KIT.marks(trainer, "_generate_single_turn", "actor_generate", _generated)
        after = functools.partial(KIT.around, after=_record)
        KIT.replace(trainer, "_calculate_rewards", lambda function: _REWARD(after(function)))
        KIT.replace(trainer, "_get_per_token_logps_and_entropies", _log_probs)
        if "log" in vars(trainer):  # It logs completions, too.
            KIT.replace(trainer, "log", Marker("logging", "region"))
        if hasattr(trainer, "_tokenize_prompts"):
            KIT.marks(trainer, "_tokenize_prompts", "tokenize")
        if hasattr(trainer, "_tool_call_loop"):
            KIT.marks(trainer, "_tool_call_loop", "tool_calls")
        KIT.replace(module, "profiling_context", _rewards_by_name)

    return install_trainer


def _rewards_by_name(function: Any) -> Any:
    """Let what TRL times of each reward function be a region by the function's name."""

    @functools.wraps(function)
    def timed(trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        around = function(trainer, name, *args, **kwargs)
        return _both(name, around) if name in trainer.reward_func_names else around

    return timed


@contextmanager
def _both(name: str, around: Any) -> Iterator[Any]:
    with Marker(name, "region"), around as found:
        yield found


def _generated(found: Any) -> Mapping[str, Any]:
    """Return what one call of ``_generate_single_turn`` generated.

    GRPO returns the ids of completions and their log-probs, RLOO the ids alone.
    """
    ids = found[0] if isinstance(found, tuple) else found
    lengths = [len(each) for each in ids]
    return {"tokens": sum(lengths), "samples": len(lengths), "lengths": lengths}


def _log_probs(function: Any) -> Any:
    """Mark the passes without gradients: of the reference, or of the policy that generated."""
    import torch

    @functools.wraps(function)
    def call(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # The call is a part of the update.
            return function(self, model, *args, **kwargs)
        with _REFERENCE if _is_reference(self, model) else _OLD:
            return function(self, model, *args, **kwargs)

    return call


def _is_reference(trainer: Any, model: Any) -> bool:
    """Return whether a model now computes what the reference would."""
    if model is getattr(trainer, "ref_model", None):
        return True
    for module in model.modules():
        if hasattr(module, "disable_adapters") and hasattr(module, "active_adapters"):  # PEFT.
            return bool(module.disable_adapters) or "ref" in module.active_adapters
    return False


_is_reference = KIT.quiet(_is_reference)


def _record(
    gathered: Any,
    trainer: Any,
    inputs: Any,
    prompts: Any,
    completions: Any,
    ids: Sequence[Sequence[int]],
    *more: Any,
) -> None:
    """Record the completions of this rank; their rewards are among those of all ranks.

    ``_calculate_rewards`` has scored them, before the steps that train them.
    """
    if listener() is None:
        return
    if in_stage():
        eager = {} if getattr(trainer, "use_vllm", False) else {"eager": 1}
        recompute = int(trainer.args.gradient_checkpointing)
        count(group=trainer.num_generations, recompute=recompute, **eager)
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


def _vllm(module: Any) -> None:
    KIT.marks(KIT.find(module, "VLLMGeneration"), "sync_weights", "weight_sync")


def _preference(module: Any) -> None:
    """Mark the passes of the reference, around which DPO and KTO keep activations."""
    KIT.replace(module, "disable_gradient_checkpointing", _of_reference)


def _of_reference(function: Any) -> Any:
    @functools.wraps(function)
    @contextmanager
    def reference(*args: Any, **kwargs: Any) -> Iterator[None]:
        with _REFERENCE, function(*args, **kwargs):
            yield

    return reference


def _online_dpo(module: Any) -> None:
    trainer = KIT.find(module, "OnlineDPOTrainer")
    KIT.marks(trainer, "training_step", "actor_update")
    KIT.marks(trainer, "_generate", "actor_generate", _completed)
    KIT.marks(trainer, "_generate_vllm", "actor_generate", _completed)
    KIT.replace(trainer, "_forward", _log_probs)
    KIT.marks(trainer, "_calculate_rewards_from_functions", "compute_reward")
    KIT.marks(trainer, "_move_model_to_vllm", "weight_sync")


def _completed(found: Any) -> Mapping[str, Any]:
    """Return what one call of online DPO generated: the fourth it returns masks completions."""
    lengths = found[3].sum(1).tolist()
    return {"tokens": sum(lengths), "samples": len(lengths), "lengths": lengths}


_INSTALL = {
    "grpo_trainer": _on_policy("GRPOTrainer"),
    "rloo_trainer": _on_policy("RLOOTrainer"),
    "dpo_trainer": _preference,
    "kto_trainer": _preference,
    "vllm_generation": _vllm,
    "online_dpo_trainer": _online_dpo,
}
