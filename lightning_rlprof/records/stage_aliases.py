"""Other names of the known stages, as frameworks and code call them, and which stage each means."""

import re
from functools import lru_cache

from lightning_rlprof.records.records import STAGES

STAGE_ALIASES = {
    "actor_generate": """
        actor_rollout agenerate decode gen gen_max generate generate_and_rm generate_async
        generate_batch generate_samples generate_sequences generation policy_generation prefill
        rollout rollout_batch rollout_generate rollouts sglang_generate step_generate
        vllm_generate""",
    "actor_compute_log_prob": """
        actor_log_prob cal_old_log_probs_values compute_actor_log_prob compute_log_prob
        compute_log_probs compute_logp get_logprobs log_prob log_probs old_log_prob old_log_probs
        recompute_logp""",
    "actor_update": """
        actor_train policy_train policy_training ppo_update step_train train_actor update_actor
        update_policy""",
    "reference_compute_log_prob": """
        cal_ref_log_probs compute_ref_log_prob compute_ref_log_probs compute_reference_log_prob
        get_reference_policy_logprobs ref ref_compute_log_prob ref_log_prob ref_log_probs ref_logp
        reference_log_prob reference_log_probs reference_model_calculate_logprobs""",
    "critic_compute_values": "compute_values critic_values value_inference values",
    "critic_update": """
        critic_ppo_update critic_train critic_train_step train_critic update_critic
        value_training""",
    "compute_reward": """
        cal_token_reward calculate_rewards compute_rewards compute_rm_score compute_score env
        env_step environment environment_step get_token_reward group_reward_model judge reward
        reward_calculation reward_evaluation reward_fn reward_model reward_postprocess rewards rm
        rm_score sandbox score scoring tool tool_call tool_calls toolcall verifier verify""",
    "compute_advantage": """
        adv advantage advantage_calculation advantages apply_reward_kl_penalty compute_advantages
        compute_advantages_and_returns""",
    "weight_sync": """
        broadcast_to_vllm broadcast_weights load_weights model_update param_sync publish_weights
        push_weights refit refit_bubble refit_event_wait refit_policy_generation reshard
        step_model_update sync_rollout_weights sync_weights transfer_and_update_weights
        update_rollout_weights update_weights update_weights_from_disk
        update_weights_from_distributed weight_update""",
}
"""Names of verl, slime, NeMo-RL and others for each stage of `STAGES` that has some."""

EVALUATIONS = """
    save_checkpoint validation sanity_check checkpoint checkpointing eval eval_rollout
    evaluate evaluation load_checkpoint checkpoint_for_recover dump_data_batch
    save_checkpoints save_ckpt save_hf_model val val_step validate_time
    modelcheckpoint_on_train_batch_end modelcheckpoint_on_train_epoch_end save save_model test
    testing validate"""
"""Names of checkpoints and evaluations, which are rare and may take long."""

DATA_WAITS = """
    data_fetch buffer_starvation data_loading dataloader_next enumerate_dataloader
    exposed_generation fetch_batch get_batch load_data next_batch queue_get starvation
    switch_wait train_wait wait_for_enough_samples wait_for_generation_buffer
    waiting_for_buffer wait_for_batch wait_for_data wait_for_rollout wait_for_rollouts
    wait_for_sample wait_for_samples"""
"""Names of waits for a batch or samples."""

LOGS = """
    logging log log_metrics log_dict log_step log_samples tracking tracker wandb_log log_rollout
    dump_rollout_generations write_logs logger"""
"""Writing metrics and samples to files and servers."""

BACKPRESSURES = """
    back_pressure backpressure buffer_full buffer_full_backoff generation_limit_pause
    queue_put staleness_wait wait_for_consumer wait_for_space wait_for_trainer"""
"""Names of waits for whatever takes the samples."""

_EVALUATIONS = frozenset(EVALUATIONS.split())
_STAGE_OF = {alias: stage for stage, names in STAGE_ALIASES.items() for alias in names.split()}
_STAGE_OF |= {stage: stage for stage in STAGES}
# These are methods of tokenizers and dictionaries, and a part of a rollout.
_OTHER = {"decode", "prefill", "values"}
_SIGNS = re.compile(r"[^a-z0-9]+")


def plain_names(name: str) -> tuple[str, str]:
    """Return a name without capitals, signs, and what follows a ``#``; then its last part alone.

    Parts are divided by dots and slashes.

    Example::

        >>> plain_names("Engine.wake-up"), plain_names("Optimizer.step#Adam.step")
        (('engine_wake_up', 'wake_up'), ('optimizer_step', 'step'))
    """
    whole = name.lower().partition("#")[0]
    last = re.split(r"[./]", whole)[-1]
    return _SIGNS.sub("_", whole).strip("_"), _SIGNS.sub("_", last).strip("_")


@lru_cache(maxsize=1_000)
def is_evaluation(name: str) -> bool:
    """Return whether a stage or region is a checkpoint or an evaluation, by its name.

    Example::

        >>> is_evaluation("Trainer.save-checkpoint"), is_evaluation("actor_update")
        (True, False)
    """
    return not _EVALUATIONS.isdisjoint(plain_names(name))


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
