"""Other names of the known stages, as frameworks and code call them, and which stage each means."""

import re

from lightning_rlprof.records.records import STAGES

STAGE_ALIASES = {
    "actor_generate": """
        actor_rollout agenerate decode gen generate generate_async generate_samples
        generate_sequences generation prefill rollout rollouts sglang_generate vllm_generate""",
    "actor_compute_log_prob": """
        actor_log_prob compute_actor_log_prob compute_log_prob compute_log_probs log_prob log_probs
        old_log_prob old_log_probs""",
    "actor_update": """
        actor_train policy_training ppo_update train_actor update_actor update_policy""",
    "reference_compute_log_prob": """
        compute_ref_log_prob compute_ref_log_probs compute_reference_log_prob ref ref_log_prob
        ref_log_probs reference_log_prob reference_log_probs""",
    "critic_compute_values": "compute_values critic_values values",
    "critic_update": "critic_train train_critic update_critic",
    "compute_reward": """
        compute_rewards compute_rm_score env env_step environment environment_step judge reward
        reward_calculation reward_fn rewards rm rm_score sandbox score scoring tool tool_call
        tool_calls toolcall verifier verify""",
    "compute_advantage": "adv advantage advantages compute_advantages",
    "weight_sync": """
        broadcast_weights load_weights publish_weights refit refit_bubble refit_event_wait
        refit_policy_generation reshard sync_weights update_rollout_weights update_weights
        weight_update""",
}
"""Names of verl, slime, NeMo-RL and others for each stage of `STAGES` that has some."""

_STAGE_OF = {alias: stage for stage, names in STAGE_ALIASES.items() for alias in names.split()}
_STAGE_OF |= {stage: stage for stage in STAGES}
# Methods of tokenizers and dictionaries, and a part of a rollout.
_OTHER = {"decode", "prefill", "values"}
_SIGNS = re.compile(r"[^a-z0-9]+")


def plain_names(name: str) -> tuple[str, str]:
    """Return a name without capitals, signs, and what follows a ``#``; then its last part alone.

    Example::

        >>> plain_names("Engine.wake-up"), plain_names("Optimizer.step#Adam.step")
        (('engine_wake_up', 'wake_up'), ('optimizer_step', 'step'))
    """
    whole = name.lower().partition("#")[0]
    last = whole.rpartition(".")[2]
    return _SIGNS.sub("_", whole).strip("_"), _SIGNS.sub("_", last).strip("_")


def standard_stage(name: str) -> str:
    """Return the stage of `records.STAGES` that a name means, else the name unchanged.

    Capitals and signs do not count; of ``Class.method`` the method alone will do.

    Example::

        >>> standard_stage("ActorRolloutRefWorker.update_actor"), standard_stage("old_log_prob")
        ('actor_update', 'actor_compute_log_prob')
        >>> standard_stage("generate_sequences"), standard_stage("my_filter")
        ('actor_generate', 'my_filter')
    """
    whole, last = plain_names(name)
    return _STAGE_OF.get(whole) or _STAGE_OF.get(last) or name


def stage_of_method(name: str) -> str | None:
    """Return the known stage that a public method's name means; None if it may mean other things.

    Example::

        >>> stage_of_method("generate"), stage_of_method("decode"), stage_of_method("_reward")
        ('actor_generate', None, None)
    """
    stage = standard_stage(name)
    return stage if stage in STAGES and name not in _OTHER and not name.startswith("_") else None
