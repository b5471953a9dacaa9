"""Rules on Ascend NPUs."""

from lightning_rlprof.analysis.advice.counters import ON_NPU
from lightning_rlprof.analysis.advice.device_work import (
    MATMUL_RATE,
    POINTWISE,
)
from lightning_rlprof.analysis.advice.rule import Rule, Setting, above, below, holds
from lightning_rlprof.analysis.advice.time_shares import EXPOSED_COMMUNICATION, HOST_BOUND

ASCEND_RULES = (
    Rule(
        "npu-task-queue",
        "Queue operators in two levels: NPUs wait for the host",
        (holds(ON_NPU), above(HOST_BOUND, 0.1)),
        (
            Setting("environment", "TASK_QUEUE_ENABLE", "2", "1"),
            Setting("environment", "CPU_AFFINITY_CONF", "1"),
        ),
        "The host prepares the next operators while it launches others.",
        "Conflicts with ACL graphs, as with enforce_eager=False.",
        "share",
    ),
    Rule(
        "npu-collectives",
        "Run collectives on vector cores",
        (holds(ON_NPU), above(EXPOSED_COMMUNICATION, 0.1)),
        (
            Setting("environment", "HCCL_OP_EXPANSION_MODE", "AIV"),
            Setting("environment", "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE", "1"),
            Setting("MindSpeed-RL", "megatron_training.use_ascend_coc", "True", "False"),
            Setting("MindSpeed-RL", "rl_config.hccl_buffersize", "raise it", "256"),
        ),
        "Small collectives start sooner.",
        "They take cores from compute. Not every product supports it.",
        "share",
    ),
    Rule(
        "npu-fused-operators",
        "Use fused operators on the NPU",
        (holds(ON_NPU), above(POINTWISE, 0.25)),
        (
            Setting("MindSpeed-RL", "megatron_training.use_flash_attn", "True", "False"),
            Setting("MindSpeed-RL", "megatron_training.use_fused_rmsnorm", "True", "False"),
            Setting("MindSpeed-RL", "megatron_training.use_fused_swiglu", "True", "False"),
            Setting("MindSpeed-RL", "megatron_training.use_fused_rotary_pos_emb", "True", "False"),
            Setting("MindSpeed-RL", "megatron_training.moe_grouped_gemm", "True", "False"),
            Setting(
                "MindSpeed-RL",
                "megatron_training.use_fused_moe_token_permute_and_unpermute",
                "True",
                "False",
            ),
        ),
        "Norms, rotary embeddings and activations are one operator each.",
        "Flash attention is required for packed sequences.",
    ),
    Rule(
        "npu-cube-rate",
        "Choose shapes that keep the cube units busy",
        (holds(ON_NPU), below(MATMUL_RATE, 0.8)),
        (Setting("MindSpeed-RL", "megatron_training.micro_batch_size", "raise it"),),
        "Operators of 50 µs and more can use 80% of the cubes.",
        "Tails aligned to 512 bytes. A multiple of 16 KB makes cores read the same memory bank.",
    ),
)
