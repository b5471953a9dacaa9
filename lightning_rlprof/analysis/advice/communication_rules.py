"""Rules on communication: sharding, buckets, experts, pipelines, and weight syncs."""

from lightning_rlprof.analysis.advice.device_work import (
    ALL_GATHER,
    ALL_TO_ALL,
    FSDP1,
    MESSAGE_BYTES,
    POINT_TO_POINT,
    REDUCTION,
    UPDATE_COMMUNICATION,
)
from lightning_rlprof.analysis.advice.memory_room import UPDATE_ROOM
from lightning_rlprof.analysis.advice.rule import Rule, Setting, above, below, holds
from lightning_rlprof.analysis.advice.sample_work import BACKWARDS, TRANSFER_BYTES
from lightning_rlprof.analysis.advice.time_shares import WEIGHT_SYNC

_ACTOR = "actor_rollout_ref.actor"
_FSDP = f"{_ACTOR}.fsdp_config"
_MEGATRON = f"{_ACTOR}.megatron"

COMMUNICATION_RULES = (
    Rule(
        "fsdp-prefetch",
        "Gather the next layer during the forward pass",
        (above(ALL_GATHER, 0.1),),
        (
            Setting("verl", f"{_FSDP}.forward_prefetch", "True", "False"),
            Setting("MindSpeed-RL", "megatron_training.overlap_param_gather", "True"),
            Setting("Lightning", "FSDPStrategy(forward_prefetch=)", "True", "False"),
        ),
        "All-gathers run behind compute.",
        "One more layer's weights are in memory. Not needed if the links are at their limit.",
        "share",
    ),
    Rule(
        "fsdp-reshard",
        "Keep gathered weights until the backward pass (ZeRO-2)",
        (above(ALL_GATHER, 0.1), above(UPDATE_ROOM, 0.3)),
        (
            Setting("verl", f"{_FSDP}.reshard_after_forward", "False", "True"),
            Setting("Lightning", "FSDPStrategy(sharding_strategy=)", "SHARD_GRAD_OP", "FULL_SHARD"),
            Setting("PyTorch", "fully_shard(reshard_after_forward=)", "False"),
        ),
        "One all-gather per layer and step instead of two.",
        "All weights are in memory, in the type of compute. For models below about 7B.",
        "share",
    ),
    Rule(
        "fsdp2",
        "Use FSDP2",
        (holds(FSDP1),),
        (
            Setting("verl", f"{_ACTOR}.strategy", "fsdp2", "fsdp"),
            Setting("Lightning", "ModelParallelStrategy(data_parallel_size=)", "use this strategy"),
        ),
        "TorchTitan measured 7% less memory and 1.5% more tokens per second.",
        "Checkpoints of FSDP1 need conversion. PyTorch 2.4 or later.",
    ),
    Rule(
        "gradient-sync",
        "Reduce gradients once per optimizer step, not in each micro-batch",
        (above(REDUCTION, 0.05), above(BACKWARDS, 1.5)),
        (
            Setting("verl", f"{_FSDP}.use_no_sync_for_gradient_accumulation", "True", "True"),
            Setting(
                "Lightning", "Trainer(accumulate_grad_batches=)", "let Lightning accumulate", "1"
            ),
            Setting("PyTorch", "DistributedDataParallel.no_sync", "around all but the last one"),
        ),
        "Reductions fall to one per optimizer step.",
        "Gradients that are not yet reduced take memory, which with FSDP is that of all weights.",
        "share",
    ),
    Rule(
        "gradient-buckets",
        "Reduce gradients in larger buckets",
        (above(REDUCTION, 0.05), below(MESSAGE_BYTES, 8.0 * 2**20)),
        (
            Setting("Lightning", "DDPStrategy(bucket_cap_mb=)", "100", "25"),
            Setting("TRL", "GRPOConfig.ddp_bucket_cap_mb", "100", "25"),
            Setting("MindSpeed-RL", "megatron_training.ddp_bucket_size", "raise it"),
            Setting("MindSpeed-RL", "megatron_training.overlap_grad_reduce", "True", "False"),
        ),
        "Fewer and larger messages reach the bandwidth of the links.",
        "The first reduction begins later, so that less of it overlaps with the backward pass.",
        "share",
    ),
    Rule(
        "tensor-parallel-size",
        "Divide the model among fewer devices",
        (above(UPDATE_COMMUNICATION, 0.2), above(UPDATE_ROOM, 0.4)),
        (
            Setting("verl", f"{_MEGATRON}.tensor_model_parallel_size", "halve it", "1"),
            Setting("verl", f"{_FSDP}.fsdp_size", "shard within a node", "-1"),
            Setting(
                "MindSpeed-RL", "megatron_training.tensor_model_parallel_size", "halve it", "1"
            ),
            Setting("Lightning", "ModelParallelStrategy(tensor_parallel_size=)", "halve it"),
        ),
        "Fewer collectives in each layer.",
        "Memory per device grows. Prefer tensor, then pipeline, then context parallelism.",
        "share",
    ),
    Rule(
        "expert-parallel",
        "Speed up the exchange between experts",
        (above(ALL_TO_ALL, 0.1),),
        (
            Setting("verl", f"{_MEGATRON}.override_transformer_config.moe_enable_deepep", "True"),
            Setting(
                "verl",
                f"{_MEGATRON}.override_transformer_config.moe_token_dispatcher_type",
                "flex",
            ),
            Setting("verl", f"{_MEGATRON}.expert_model_parallel_size", "within a node", "1"),
            Setting("MindSpeed-RL", "megatron_training.moe_alltoall_overlap_comm", "True"),
            Setting("MindSpeed-RL", "megatron_training.moe_tp_extend_ep", "True"),
        ),
        "Tokens reach their experts with less waiting.",
        "DeepEP needs NVLink and RDMA. Experts in parallel can be slower than tensors in parallel: "
        "measure both. Ulysses uses all-to-alls, too.",
        "share",
    ),
    Rule(
        "pipeline-bubbles",
        "Shorten the bubbles of the pipeline",
        (above(POINT_TO_POINT, 0.1),),
        (
            Setting(
                "verl", f"{_MEGATRON}.virtual_pipeline_model_parallel_size", "2 or more", "null"
            ),
            Setting("verl", f"{_MEGATRON}.pipeline_model_parallel_size", "halve it", "1"),
            Setting(
                "MindSpeed-RL",
                "megatron_training.num_layers_per_virtual_pipeline_stage",
                "fewer layers per stage",
            ),
        ),
        "Stages wait less for one another. So do more micro-batches per step.",
        "Interleaved stages send more messages and keep more activations.",
        "share",
    ),
    Rule(
        "weight-sync-bucket",
        "Send weights in larger buckets",
        (above(WEIGHT_SYNC, 0.05), below(TRANSFER_BYTES, 128.0 * 2**20)),
        (
            Setting(
                "verl",
                "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
                "raise it",
                "2048",
            ),
            Setting(
                "verl",
                "actor_rollout_ref.rollout.checkpoint_engine.backend",
                "nccl or hccl",
                "naive",
            ),
        ),
        "Fewer and larger transfers reach the bandwidth of the link.",
        "A bucket is in memory on both sides.",
        "share",
    ),
    Rule(
        "weight-sync-overlap",
        "Shorten the weight sync, or hide it behind rollout",
        (above(WEIGHT_SYNC, 0.1),),
        (
            Setting(
                "verl",
                "actor_rollout_ref.rollout.checkpoint_engine.backend",
                "nccl or hccl",
                "naive",
            ),
            Setting("verl", "actor_rollout_ref.rollout.layered_summon", "False", "False"),
            Setting("verl", "verl.experimental.one_step_off_policy", "use this trainer"),
            Setting("TRL", "AsyncGRPOConfig.weight_sync_steps", "sync less often"),
        ),
        "Generation does not wait until all weights have arrived.",
        "Rollouts mix versions of the weights if they do not stop for the sync.",
        "overlap",
    ),
)
