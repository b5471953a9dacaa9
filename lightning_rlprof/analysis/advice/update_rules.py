"""Rules on the update and on passes for log-probs and values: batches, padding, kernels."""

from lightning_rlprof.analysis.advice.counters import ON_NPU
from lightning_rlprof.analysis.advice.device_work import MFU, POINTWISE, ROUTING
from lightning_rlprof.analysis.advice.memory_room import (
    CRITIC_ROOM,
    LOG_PROB_ROOM,
    UPDATE_ROOM,
)
from lightning_rlprof.analysis.advice.rule import Rule, Setting, above, below, fails
from lightning_rlprof.analysis.advice.sample_work import (
    IMBALANCE,
    LENGTH_SPREAD,
    LONGEST,
    PADDING,
)
from lightning_rlprof.analysis.advice.time_shares import (
    CRITIC,
    CRITIC_BY_ACTOR,
    HOST_BOUND,
    LOG_PROBS_BY_UPDATE,
    UPDATE,
)

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_TRANSFORMER = f"{_ACTOR}.megatron.override_transformer_config"

UPDATE_RULES = (
    Rule(
        "remove-padding",
        "Pack sequences: the update computes padding",
        (above(PADDING, 0.1),),
        (
            Setting("verl", f"{_MODEL}.use_remove_padding", "True", "True"),
            Setting("MindSpeed-RL", "rl_config.use_remove_padding", "True", "False"),
            Setting("TRL", "SFTConfig.padding_free", "True, for SFT", "False"),
        ),
        "The update computes only real tokens. At best the share of padding is saved.",
        "The model needs attention with variable lengths, as flash attention has.",
    ),
    Rule(
        "dynamic-batch",
        "Fill micro-batches by tokens, not by samples",
        (above(LENGTH_SPREAD, 2.0), above(UPDATE, 0.2)),
        (
            Setting("verl", f"{_ACTOR}.use_dynamic_bsz", "True", "False"),
            Setting(
                "verl", f"{_ACTOR}.ppo_max_token_len_per_gpu", "2 x (prompt + response)", "16384"
            ),
            Setting("verl", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", "True", "False"),
            Setting("MindSpeed-RL", "rl_config.use_dynamic_bsz", "True", "False"),
            Setting("MindSpeed-RL", "rl_config.max_packing_token_size", "2 x longest", "4096"),
        ),
        "Micro-batches of short samples get larger, so that fewer passes are needed.",
        "A limit of tokens below the longest sample fails, or cuts it.",
    ),
    Rule(
        "length-balance",
        "Give all ranks the same number of tokens",
        (above(IMBALANCE, 1.1),),
        (
            Setting("verl", "trainer.balance_batch", "True", "True"),
            Setting("MindSpeed-RL", "rl_config.use_dp_batch_balance", "True", "False"),
        ),
        "Ranks reach the gradient reduction together.",
        "Samples of one group may end on several ranks.",
        "balance",
    ),
    Rule(
        "update-micro-batch",
        "Use larger micro-batches in the update: memory is free",
        (above(UPDATE_ROOM, 0.3), above(UPDATE, 0.2)),
        (
            Setting("verl", f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "double it", "null"),
            Setting("verl", f"{_ACTOR}.ppo_max_token_len_per_gpu", "double it", "16384"),
            Setting("MindSpeed-RL", "megatron_training.micro_batch_size", "double it"),
            Setting("TRL", "GRPOConfig.per_device_train_batch_size", "double it", "8"),
            Setting("Lightning", "Trainer(accumulate_grad_batches=)", "halve it", "1"),
            Setting("PyTorch", "DataLoader(batch_size=)", "double it", "1"),
        ),
        "Fewer passes, each with better use of the device.",
        "Longer responses later in training need the memory that is free now.",
    ),
    Rule(
        "log-prob-batch",
        "Use larger micro-batches for log-probs than for the update",
        (above(LOG_PROBS_BY_UPDATE, 0.5), above(LOG_PROB_ROOM, 0.2)),
        (
            Setting(
                "verl",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
                "2 x that of the update",
                "null",
            ),
            Setting(
                "verl",
                "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
                "2 x that of the update",
                "16384",
            ),
            Setting("MindSpeed-RL", "rl_config.actor_forward_micro_batch_size", "double it"),
            Setting("MindSpeed-RL", "rl_config.ref_max_packing_token_size", "double it", "4096"),
        ),
        "A forward pass has a third of the FLOPs of an update: it should take a third of the time.",
        "Logits of the vocabulary decide the peak: memory grows with the tokens of a micro-batch.",
    ),
    Rule(
        "critic-batch",
        "Use larger micro-batches for the critic: it is slower than the actor",
        (above(CRITIC_BY_ACTOR, 1.0), above(CRITIC_ROOM, 0.2)),
        (
            Setting("verl", "critic.ppo_micro_batch_size_per_gpu", "2 x that of the actor", "null"),
            Setting(
                "verl", "critic.forward_max_token_len_per_gpu", "2 x that of the actor", "32768"
            ),
        ),
        "The critic has no head over the vocabulary, so that larger batches fit.",
        "A critic that is larger than the actor is slower whatever its batch.",
    ),
    Rule(
        "critic-share",
        "Try an algorithm without a critic, or train it less often",
        (above(CRITIC, 0.25),),
        (
            Setting("verl", "algorithm.adv_estimator", "grpo", "gae"),
            Setting("verl", "critic.ppo_epochs", "1", "1"),
            Setting("MindSpeed-RL", "rl_config.adv_estimator", "group_norm", "group_norm"),
        ),
        "The time and the memory of the critic are saved.",
        "Another algorithm: rewards need groups of responses, and results change.",
        "removed",
    ),
    Rule(
        "sequence-parallel",
        "Divide long sequences among devices",
        (above(LONGEST, 32_768.0), below(UPDATE_ROOM, 0.1)),
        (
            Setting("verl", f"{_ACTOR}.ulysses_sequence_parallel_size", "2 or more", "1"),
            Setting("verl", f"{_ACTOR}.megatron.context_parallel_size", "2 or more", "1"),
            Setting("MindSpeed-RL", "megatron_training.context_parallel_size", "2 or more", "1"),
            Setting("MindSpeed-RL", "megatron_training.sequence_parallel", "True", "False"),
        ),
        "Each device keeps a part of the activations of a sequence.",
        "All-to-alls in each layer. Heads must be divisible by the size.",
    ),
    Rule(
        "fused-kernels",
        "Fuse pointwise kernels",
        (above(POINTWISE, 0.25), fails(ON_NPU)),
        (
            Setting("verl", f"{_MODEL}.use_liger", "True", "False"),
            Setting("verl", f"{_MODEL}.use_fused_kernels", "True", "False"),
            Setting("TRL", "GRPOConfig.use_liger_kernel", "True", "False"),
            Setting("PyTorch", "torch.compile", "compile the model"),
        ),
        "Norms, activations and rotary embeddings read memory once, not once per operator.",
        "Results change in the last digits. verl switches off Liger's cross-entropy.",
    ),
    Rule(
        "megatron-options",
        "Fuse the routing and permutation of experts",
        (above(ROUTING, 0.1),),
        (
            Setting("verl", f"{_TRANSFORMER}.moe_permute_fusion", "True"),
            Setting("verl", f"{_TRANSFORMER}.moe_router_dtype", "fp32"),
            Setting("verl", f"{_TRANSFORMER}.gradient_accumulation_fusion", "True"),
            Setting("MindSpeed-RL", "megatron_training.moe_grouped_gemm", "True", "False"),
            Setting(
                "MindSpeed-RL",
                "megatron_training.use_fused_moe_token_permute_and_unpermute",
                "True",
                "False",
            ),
        ),
        "Tokens are sorted by expert in one kernel each way.",
        "A router in FP32 costs a little, and keeps training stable.",
    ),
    Rule(
        "low-mfu",
        "Raise the MFU of the update",
        (below(MFU, 0.2),),
        (
            Setting("verl", f"{_ACTOR}.ppo_max_token_len_per_gpu", "raise it", "16384"),
            Setting("verl", f"{_MODEL}.use_remove_padding", "True", "True"),
            Setting("TRL", "GRPOConfig.bf16", "True"),
            Setting("Lightning", "Trainer(precision=)", "bf16-true or bf16-mixed", "32-true"),
            Setting("PyTorch", "torch.compile", "compile the model"),
        ),
        "Dense models reach 35 to 50%. `rlprof show RUN idle` shows whether devices wait.",
        "FLOPs that were counted wrongly look like a low MFU.",
    ),
    Rule(
        "host-bound-update",
        "Launch fewer kernels: devices wait for the host",
        (above(HOST_BOUND, 0.2), fails(ON_NPU)),
        (
            Setting("verl", f"{_ACTOR}.use_torch_compile", "True", "True"),
            Setting("TRL", "GRPOConfig.torch_compile", "True", "False"),
            Setting("PyTorch", "torch.compile(mode=)", "reduce-overhead, which uses CUDA graphs"),
            Setting("PyTorch", "Tensor.item", "avoid it in the step: it waits for the device"),
        ),
        "The device does not run empty between kernels.",
        "Compilation takes minutes, and again for each new shape.",
        "share",
    ),
)
