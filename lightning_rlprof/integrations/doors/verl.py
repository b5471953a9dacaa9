"""Door to verl: the timers of its driver, and the calls of its workers.

On the driver a step is the timer ``step``. A worker has no steps of its own: each call of its
update ends one. Where generation runs ahead, ``gen`` on the trainer waits for samples. Responses of
a batch are samples; their fates are told when their advantages are known.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit, TimerNames, Timers
from lightning_rlprof.recording.annotations import count, in_stage, listener, record, stage
from lightning_rlprof.recording.samples import sample
from lightning_rlprof.recording.session import Session, current
from lightning_rlprof.records.records import Fate

KIT = Kit("verl", "verl", "vllm", "sglang", "ray", "transformers")
_TIMERS = Timers(KIT, TimerNames(steps=("step",)))

_ASYNCHRONOUS = (
    "verl.experimental.fully_async_policy.fully_async_trainer",
    "verl.trainer.ppo.v1.trainer_separate_async",
    "verl.trainer.ppo.v1.trainer_colocate_async",
)
_FACTS = {
    "eager": "actor_rollout_ref.rollout.enforce_eager",
    "max_num_seqs": "actor_rollout_ref.rollout.max_num_seqs",
    "rollout_tp": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "group": "actor_rollout_ref.rollout.n",
    "recompute": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "lora": "actor_rollout_ref.model.lora_rank",
    "micro_tokens": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "offload": "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "streamed": "actor_rollout_ref.actor.fsdp_config.offload_policy",
}
"""Settings that say how fast a step may be, by the name that the run counts them under."""

_facts: dict[str, float] = {}  # Their values, of the trainer that fits.
_UPDATES = ("actor_update", "train_batch", "critic_update", "update_actor", "update_critic")


def install(module: Any) -> None:
    """Replace the driver's timer, the states of workers, or what computes advantages."""
    if module.__name__ == "verl.trainer.ppo.ray_trainer":
        if hasattr(module, "RayPPOTrainer"):
            before = functools.partial(KIT.around, before=_read_facts)
            KIT.replace(module.RayPPOTrainer, "fit", before)
        after = functools.partial(KIT.around, after=_record_samples)
        KIT.replace(module, "compute_advantage", after)
    elif module.__name__ == "verl.utils.tracking":
        KIT.replace(KIT.find(module, "RLInsightLogger"), "trace_state", _trace_state)
    else:
        KIT.replace(module, "_timer", _timer)


def _timer(function: Any) -> Any:
    @functools.wraps(function)
    def timer(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        inner = function(name, *args, **kwargs)
        KIT.session(role="controller")
        if _TIMERS.is_step(name):
            _TIMERS.start(name, name)
            yield from inner
            _TIMERS.stop(name, name)  # A step that raised is not recorded.
        else:
            with stage(_stage_of(str(name))):
                yield from inner

    return timer


def _stage_of(name: str) -> str:
    if name == "gen" and any(each in sys.modules for each in _ASYNCHRONOUS):
        return "wait_for_samples"
    return _TIMERS.stage_of(name)


def _read_facts(trainer: Any) -> None:
    """Keep the settings that `_FACTS` names, and the number of devices and updates."""
    config = trainer.config
    found = {name: _setting(config, path) for name, path in _FACTS.items()}
    if not _setting(config, "actor_rollout_ref.actor.use_dynamic_bsz"):
        del found["micro_tokens"]
    nodes, each = (_setting(config, f"trainer.{key}") for key in ("nnodes", "n_gpus_per_node"))
    found["devices"] = nodes * each if nodes and each else None
    batch = _setting(config, "data.train_batch_size")
    mini = _setting(config, "actor_rollout_ref.actor.ppo_mini_batch_size")
    found["updates"] = batch / mini if batch and mini else None
    sharding = str(_setting(config, "actor_rollout_ref.actor.strategy"))
    found["sharded"] = sharding.startswith("fsdp")
    _facts.update({name: float(value) for name, value in found.items() if value is not None})


def _setting(config: Any, path: str) -> Any:
    """Return a setting by its path; None if the configuration lacks it."""
    for key in path.split("."):
        config = None if config is None else config.get(key)
    return config


def _record_samples(data: Any, *args: Any, **kwargs: Any) -> None:
    """Record each response of a batch: tokens, their limit, reward, and whether it trains.

    verl pads responses to the longest that it allows.
    """
    if listener() is None:
        return
    batch, others = data.batch, data.non_tensor_batch
    mask = batch["response_mask"].bool()
    tokens = mask.sum(-1).tolist()
    rewards = (batch["token_level_rewards"] * mask).sum(-1).tolist()
    useful = ((batch["advantages"] != 0) & mask).any(-1).tolist()
    if in_stage():
        whole = batch["attention_mask"].sum().item() if "attention_mask" in batch else 0
        prompt = (whole - sum(tokens)) / max(len(tokens), 1)
        count(lengths=tokens, **_facts, **({"prompt_tokens": prompt} if whole else {}))
    groups = [str(each) for each in others["uid"]] if "uid" in others else range(len(tokens))
    for group, length, reward, trains in zip(groups, tokens, rewards, useful, strict=True):
        fate: Fate = "trained" if trains else "zero_advantage"
        sample(group).end(fate, tokens=length, reward=reward, response_limit=mask.shape[-1])


def _trace_state(function: Any) -> Any:
    @functools.wraps(function)
    def trace_state(cls: Any, state_name: str, *args: Any, **kwargs: Any) -> Any:
        return _state(str(state_name), function(cls, state_name, *args, **kwargs))

    return trace_state


@contextmanager
def _state(name: str, inner: Any) -> Iterator[Any]:
    """Mark what a worker does, and end its step with an update."""
    session = KIT.session(role="worker")
    _begin(session)
    last = name.rpartition(".")[2]
    with stage(_TIMERS.stage_of("actor_update" if last == "train_batch" else last)), inner as found:
        yield found
    _end(session, is_update=last in _UPDATES)


_ended: list[int] = []  # The time at which the last call of this worker ended.


@KIT.quiet
def _begin(session: Session | None) -> None:
    """Begin a step, if none has begun; what a worker does between calls is to wait for them."""
    if session is not None:
        if session.step_start_ns is None or session.waiting:
            session.begin_step(session.next_step)
        elif _ended:
            record("idle", _ended[-1], session.clock())


@KIT.quiet
def _end(session: Session | None, *, is_update: bool) -> None:
    if session is not None and session is current():
        _ended[:] = [session.clock()]
        if is_update:
            session.end_step()
