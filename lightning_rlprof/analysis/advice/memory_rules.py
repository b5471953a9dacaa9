"""Rules on memory: running out, recomputation, offload, logits, and fragmentation."""

from lightning_rlprof.analysis.advice.counters import MEMORY_PRESSURE
from lightning_rlprof.analysis.advice.memory_room import (
    FRAGMENTATION,
    HOST_ROOM,
    LOG_PROB_ROOM,
    OUT_OF_MEMORY,
    UPDATE_ROOM,
)
from lightning_rlprof.analysis.advice.rule import Rule, Setting, above, below, holds
from lightning_rlprof.analysis.advice.time_shares import OFFLOAD, UPDATE

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_FSDP = f"{_ACTOR}.fsdp_config"

MEMORY_RULES = (
    Rule(
        "out-of-memory",
        "Recompute activations, and use smaller micro-batches: a rank ran out of memory",
        (holds(OUT_OF_MEMORY),),
        (
            Setting("verl", f"{_MODEL}.enable_gradient_checkpointing", "True", "True"),
            Setting("verl", f"{_MODEL}.enable_activation_offload", "True, with FSDP", "False"),
            Setting("verl", f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "halve it", "null"),
            Setting("MindSpeed-RL", "megatron_training.recompute_granularity", "full"),
            Setting("TRL", "GRPOConfig.gradient_checkpointing", "True", "True"),
            Setting("TRL", "GRPOConfig.per_device_train_batch_size", "halve it", "8"),
            Setting("Lightning", "FSDPStrategy(activation_checkpointing_policy=)", "the layers"),
        ),
        "Activations of one layer at a time are in memory.",
        "Recomputing takes one more forward pass: a third more FLOPs.",
    ),
    Rule(
        "recompute-less",
        "Recompute fewer activations: memory is free",
        (above(UPDATE_ROOM, 0.5), above(UPDATE, 0.3)),
        (
            Setting("verl", f"{_MODEL}.enable_gradient_checkpointing", "False", "True"),
            Setting(
                "MindSpeed-RL", "megatron_training.recompute_granularity", "selective, or unset"
            ),
            Setting("MindSpeed-RL", "megatron_training.recompute_num_layers", "fewer layers"),
            Setting("TRL", "GRPOConfig.gradient_checkpointing", "False", "True"),
            Setting("Lightning", "FSDPStrategy(activation_checkpointing_policy=)", "unset"),
        ),
        "One forward pass less: up to a quarter of the update.",
        "Longer responses later in training need the memory. Without recomputation now, no effect.",
    ),
    Rule(
        "logits-memory",
        "Compute entropy and log-probs in chunks: their passes fill the memory",
        (below(LOG_PROB_ROOM, 0.1),),
        (
            Setting("verl", f"{_ACTOR}.entropy_from_logits_with_chunking", "True", "False"),
            Setting("verl", f"{_ACTOR}.entropy_checkpointing", "True", "False"),
            Setting("verl", f"{_MODEL}.use_fused_kernels", "True", "False"),
            Setting("TRL", "GRPOConfig.use_liger_kernel", "True", "False"),
        ),
        "Logits of all tokens are never in memory at a time.",
        "Chunks do not save the copy of the backward pass: that needs checkpointing, or fused "
        "kernels.",
    ),
    Rule(
        "optimizer-offload",
        "Keep optimizer states on the host: the update fills the device",
        (below(UPDATE_ROOM, 0.05), above(HOST_ROOM, 0.5)),
        (
            Setting("verl", f"{_FSDP}.optimizer_offload", "True", "False"),
            Setting("verl", f"{_FSDP}.param_offload", "True", "False"),
            Setting("verl", f"{_ACTOR}.megatron.optimizer_offload", "True"),
            Setting("MindSpeed-RL", "megatron_training.swap_optimizer", "True", "False"),
            Setting(
                "MindSpeed-RL", f"{'generate_config'}.offload_train_optimizer", "True", "False"
            ),
            Setting("Lightning", "FSDPStrategy(cpu_offload=)", "True"),
        ),
        "Frees 8 to 12 bytes per parameter of this rank.",
        "Copies in each step. A 671B model needs 1.6 TB of host memory per node.",
    ),
    Rule(
        "offload-less",
        "Offload less: copies cost time, and memory is free",
        (above(OFFLOAD, 0.05), above(UPDATE_ROOM, 0.3)),
        (
            Setting("verl", f"{_FSDP}.param_offload", "False", "False"),
            Setting("verl", f"{_FSDP}.optimizer_offload", "False", "False"),
            Setting("verl", "actor_rollout_ref.ref.fsdp_config.param_offload", "False", "False"),
            Setting("MindSpeed-RL", "generate_config.offload_train_param", "False", "False"),
            Setting("MindSpeed-RL", "generate_config.offload_train_grad", "False", "False"),
        ),
        "Weights and states stay where they are used.",
        "The rollout engine has less memory.",
        "removed",
    ),
    Rule(
        "fragmentation",
        "Let torch's memory segments grow: much of what it reserves is unused at the peak",
        (above(FRAGMENTATION, 0.15),),
        (
            Setting("environment", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "unset"),
            Setting("environment", "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "unset"),
            Setting("TRL", "GRPOConfig.torch_empty_cache_steps", "1"),
        ),
        "Reserved memory stays close to what tensors use.",
        "Sleep mode of some vLLM versions refuses expandable segments.",
    ),
    Rule(
        "host-memory",
        "Use less host memory: the limit is near",
        (below(HOST_ROOM, 0.1),),
        (
            Setting("verl", f"{_FSDP}.optimizer_offload", "False", "False"),
            Setting("PyTorch", "DataLoader(num_workers=)", "fewer workers"),
            Setting("PyTorch", "DataLoader(prefetch_factor=)", "lower it"),
            Setting("TRL", "GRPOConfig.dataloader_num_workers", "fewer workers", "0"),
        ),
        "The system does not end a rank for want of memory.",
        "Offload to the host may be what makes the model fit.",
    ),
    Rule(
        "memory-pressure",
        "Give the job more host memory: threads wait for pages",
        (above(MEMORY_PRESSURE, 0.05),),
        (
            Setting("PyTorch", "DataLoader(num_workers=)", "fewer workers"),
            Setting("environment", "memory limit of the container", "raise it"),
        ),
        "Threads do not wait until pages are read again.",
        "Other jobs of the machine have less memory.",
    ),
)
