"""Time categories of the ledger, and the stage names that mean each of them.

Frameworks call the same stage by different names: `category_of` returns the category of a name.
"""

import re
from collections.abc import Collection, Sequence
from enum import IntEnum

import numpy as np

from lightning_rlprof.records.stage_aliases import (
    BACKPRESSURES,
    DATA_WAITS,
    EVALUATIONS,
    LOGS,
    STAGE_ALIASES,
    plain_names,
    standard_stage,
)
from lightning_rlprof.tables.arrays import Int64s

NO_CATEGORY = -1
"""Stands for a name that has no category."""
_TRAINING = re.compile(
    r"(actor|critic|policy|ppo)_(update|train|training)|update_(actor|critic|policy)"
    r"|train|training|train_step|train_batch|training_step"
)
_FORWARD = re.compile(
    r"(actor_)?generate(_\w+)?|rollouts?|generation|gen|(critic_)?compute_values|values"
    r"|(\w+_)?log_probs?"
)


class Category(IntEnum):
    """What GPU time is spent on; if several apply at one instant, the smallest number wins."""

    text: str
    """The name in tables."""

    def __new__(cls, number: int, text: str = "") -> "Category":
        """Return a category."""
        self = int.__new__(cls, number)
        self._value_, self.text = number, text
        return self

    COMPUTE = 0, "compute"
    COMMUNICATION = 1, "exposed communication"
    COLLECTIVE_WAIT = 2, "collective wait"
    MEMCPY = 3, "exposed memcpy"
    HOST_IDLE = 4, "host-bound idle"
    LAUNCH_LATENCY = 5, "launch latency"
    UNATTRIBUTED_IDLE = 6, "unattributed idle"
    ROLLOUT = 7, "rollout"
    ROLLOUT_TAIL = 8, "rollout tail"
    WEIGHT_SYNC = 9, "weight sync"
    REWARD = 10, "reward/tool/env"
    DATA_WAIT = 11, "data wait"
    BACKPRESSURE = 12, "backpressure"
    OFFLOAD = 13, "offload/onload"
    EVALUATION = 14, "checkpoint/eval"
    PYTHON_GC = 15, "garbage collection"
    PROFILER = 16, "profiler overhead"
    CUSTOM = 17, "custom stage"
    WARM_UP = 18, "warm-up"
    UNTRACED = 19, "untraced"
    OUTSIDE_STEPS = 20, "outside steps"


ENCLOSING = (Category.WEIGHT_SYNC, Category.REWARD, Category.EVALUATION)
"""Categories that include all in their spans: a rollout in an evaluation is evaluation."""

NAMES: dict[Category, str] = {
    Category.COMPUTE: """
        actor_compute_log_prob actor_image_embeds actor_update reference_compute_log_prob
        critic_compute_values critic_update compute_advantage training_step backward
        optimizer_step actor_train adv advantage advantages clip_grad_norm clip_gradients
        compute_advantages compute_log_prob compute_log_probs compute_loss compute_values
        critic_train forward forward_backward forward_no_grad forward_step log_prob log_probs
        loss lr_scheduler_step micro_batch cal_old_log_probs_values cal_ref_log_probs compute_logp
        critic_ppo_update critic_train_step fwd_logprobs_values_reward get_logprobs
        get_reference_policy_logprobs get_per_token_logps_and_entropies advantage_calculation
        apply_reward_kl_penalty compute_advantages_and_returns make_experience policy_train
        recompute_logp ref_compute_log_prob ref_logp ref_model_update
        reference_model_calculate_logprobs run_training step_train teacher_log_probs teacher_logp
        train_critic_and_policy train_timer update_ref_with_policy value_inference value_training
        old_log_prob old_log_probs policy_and_reference_logprobs policy_training ppo_update ref
        ref_log_prob ref_log_probs reference_log_prob reference_log_probs train train_batch
        train_step training update update_actor update_critic update_policy values zero_grad""",
    Category.COMMUNICATION: """
        all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all
        all_to_all_single allgather allreduce alltoall broadcast broadcast_object_list grad_sync
        gradient_sync reduce_scatter reduce_scatter_tensor sync_gradients""",
    Category.COLLECTIVE_WAIT: """
        barrier dist_barrier monitored_barrier wait_for_peer wait_for_peers wait_for_ranks""",
    Category.MEMCPY: """
        batch_transfer batch_to_device copy_to_device d2h device_to_host h2d host_to_device memcpy
        to_device""",
    Category.HOST_IDLE: """
        balance_batch clear_batches collate convert_to_training_input data_preprocess
        data_processing logprob_inference_prep pack_sequences postprocess_generator_output
        prepare_batch prepare_inputs training_prep preprocess tokenize""",
    Category.UNATTRIBUTED_IDLE: "idle",
    Category.ROLLOUT: "actor_generate " + STAGE_ALIASES["actor_generate"],
    Category.ROLLOUT_TAIL: "generation_tail rollout_tail",
    Category.WEIGHT_SYNC: "weight_sync " + STAGE_ALIASES["weight_sync"],
    Category.REWARD: "compute_reward " + STAGE_ALIASES["compute_reward"],
    Category.DATA_WAIT: DATA_WAITS,
    Category.BACKPRESSURE: BACKPRESSURES,
    Category.OFFLOAD: """
        actor_offload actor_onload critic_offload critic_onload ref_offload ref_onload
        rollout_continue_generation rollout_offload rollout_onload rollout_pause
        rollout_pause_generation rollout_resume step_stop_server switch_to_rollout
        switch_to_trainer teacher_offload teacher_onload prepare_for_generation_total
        finish_generation load_to_gpu offload offload_model offload_optimizer offload_to_cpu
        onload onload_kv onload_model onload_optimizer onload_weights prepare_for_generation
        prepare_for_training release_memory_occupation resume_memory_occupation sleep wake
        wake_up""",
    Category.EVALUATION: EVALUATIONS,
    Category.PYTHON_GC: "garbage_collection gc gc_collect",
    Category.PROFILER: """
        rlprof_open_capture rlprof_close_capture start_profile stop_profile""",
    Category.CUSTOM: LOGS,
}
"""Names of each category: rlprof's first, then those of verl, slime, NeMo-RL and others."""

_CATEGORIES: dict[str, int] = {
    name: category for category, names in NAMES.items() for name in names.split()
}


def category_of(name: str) -> int:
    """Return the category of a stage's or region's name, `NO_CATEGORY` if it has none.

    Capitals and signs do not count, nor what follows a ``#``; of ``Class.method`` the method alone
    will do.

    Example::

        >>> category_of("Engine.wake-up"), category_of("Optimizer.step#Adam.step")
        (<Category.OFFLOAD: 13>, <Category.COMPUTE: 0>)
        >>> category_of("my_filter")
        -1
    """
    for part in plain_names(name):
        found = _CATEGORIES.get(part)
        if found is not None:
            return found
    return NO_CATEGORY


def kind_of(stage: str) -> str | None:
    """Return whether a stage trains or only goes forward, by its name; None if unknown.

    Example::

        >>> kind_of("actor_update"), kind_of("actor_generate"), kind_of("compute_reward")
        ('training', 'forward', None)
    """
    name = stage.lower()
    if _TRAINING.fullmatch(name):
        return "training"
    return "forward" if _FORWARD.fullmatch(name) else None


def categories_of(names: Sequence[str]) -> Int64s:
    """Return the category of each name, and at the end `NO_CATEGORY`, for the code -1."""
    return np.array([*map(category_of, names), NO_CATEGORY], dtype=np.int64)


def align_stage_names(own: Collection[str], others: Collection[str]) -> dict[str, str]:
    """Return the name under which each stage of a run is compared with another run.

    A name that both runs have stays; any other becomes the stage that it means, so that several of
    one run may become one.

    Example::

        >>> align_stage_names(["gen", "update_actor", "env_step"], ["actor_generate", "env_step"])
        {'gen': 'actor_generate', 'update_actor': 'actor_update', 'env_step': 'env_step'}
    """
    both = set(own) & set(others)
    return {name: name if name in both else standard_stage(name) for name in own}
