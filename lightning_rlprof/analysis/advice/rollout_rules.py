"""Rules on rollouts: engine memory and batching, lengths, the long tail, and who waits for whom."""

from lightning_rlprof.analysis.advice.counters import ENGINE, ENGINE_COUNTERS, KV_USAGE, OLD_VLLM
from lightning_rlprof.analysis.advice.device_work import (
    ROLLOUT_COMMUNICATION,
    ROLLOUT_GRAPHS,
    ROLLOUT_HOST_BOUND,
)
from lightning_rlprof.analysis.advice.memory_room import (
    ASYNCHRONOUS,
    HELD_BY_OTHERS,
    ROLLOUT_ROOM,
    SHARED_DEVICES,
    UPDATE_ROOM,
)
from lightning_rlprof.analysis.advice.rule import Rule, Setting, above, below, fails, holds
from lightning_rlprof.analysis.advice.sample_work import (
    CLIPPED,
    CLIPPED_PROMPTS,
    DISCARDED,
    FIRST_TOKENS,
    PREEMPTIONS,
    PREFIX_HITS,
    RESPONSES_PER_PROMPT,
    STALENESS,
)
from lightning_rlprof.analysis.advice.time_shares import (
    BACKPRESSURE,
    DATA_WAIT,
    REWARD,
    ROLLOUT,
    SAMPLES_FROM_OTHERS,
    TAIL,
)

_ROLLOUT = "actor_rollout_ref.rollout"
_GENERATE = "generate_config"

ROLLOUT_RULES = (
    Rule(
        "engine-statistics",
        "Switch on the statistics of the rollout engine",
        (above(ROLLOUT, 0.5), fails(ENGINE_COUNTERS), holds(ENGINE)),
        (
            Setting("verl", f"{_ROLLOUT}.disable_log_stats", "False", "True"),
            Setting("vLLM", "EngineArgs.disable_log_stats", "False", "False"),
        ),
        "KV cache use, preemptions and running requests become visible. Nothing gets faster.",
        "One log line every ten seconds per engine.",
    ),
    Rule(
        "rollout-memory-fraction",
        "Give the rollout engine more memory",
        (above(ROLLOUT, 0.3), above(ROLLOUT_ROOM, 0.2)),
        (
            Setting(
                "verl",
                f"{_ROLLOUT}.gpu_memory_utilization",
                "0.6 to 0.7, or 0.8 with offload",
                "0.5",
            ),
            Setting("MindSpeed-RL", f"{_GENERATE}.gpu_memory_utilization", "0.6 to 0.8", "0.5"),
            Setting("TRL", "GRPOConfig.vllm_gpu_memory_utilization", "0.5 to 0.7", "0.3"),
            Setting("vLLM", "EngineArgs.gpu_memory_utilization", "raise in steps of 0.1"),
        ),
        "A larger KV cache runs more requests at a time.",
        "Update or wake-up may run out of memory. vLLM's fraction is of all memory, SGLang's of "
        "what is free.",
    ),
    Rule(
        "rollout-batching",
        "Run more requests at a time: the KV cache is not full",
        (below(KV_USAGE, 0.5), above(ROLLOUT, 0.3)),
        (
            Setting("verl", f"{_ROLLOUT}.max_num_seqs", "double it", "256"),
            Setting(
                "verl", f"{_ROLLOUT}.max_num_batched_tokens", "above prompt + response", "8192"
            ),
            Setting("MindSpeed-RL", f"{_GENERATE}.max_num_seqs", "double it", "1"),
            Setting("MindSpeed-RL", f"{_GENERATE}.max_num_batched_tokens", "8192 or more", "2048"),
            Setting("TRL", "GRPOConfig.generation_batch_size", "more prompts per generation"),
            Setting("vLLM", "EngineArgs.max_num_seqs", "double it"),
        ),
        "Decoding reads the weights once for more requests: tokens per second rise.",
        "Each request gets slower. Too many requests are preempted.",
    ),
    Rule(
        "kv-preemptions",
        "Stop preemptions: the KV cache is too small for the requests",
        (above(PREEMPTIONS, 0.0),),
        (
            Setting("verl", f"{_ROLLOUT}.max_num_seqs", "lower it", "256"),
            Setting("verl", f"{_ROLLOUT}.gpu_memory_utilization", "raise it", "0.5"),
            Setting("MindSpeed-RL", f"{_GENERATE}.max_num_seqs", "lower it", "1"),
            Setting("TRL", "GRPOConfig.vllm_gpu_memory_utilization", "raise it", "0.3"),
            Setting("vLLM", "EngineArgs.max_num_seqs", "lower it"),
        ),
        "No prompt is computed twice. A preempted request loses its KV cache.",
        "Fewer requests at a time: throughput falls if the cache was not the limit.",
    ),
    Rule(
        "rollout-tensor-parallel",
        "Use fewer devices per engine, and more engines",
        (above(ROLLOUT_COMMUNICATION, 0.15), above(ROLLOUT_ROOM, 0.3)),
        (
            Setting("verl", f"{_ROLLOUT}.tensor_model_parallel_size", "halve it", "2"),
            Setting("MindSpeed-RL", f"{_GENERATE}.infer_tensor_parallel_size", "halve it", "8"),
            Setting("TRL", "GRPOConfig.vllm_tensor_parallel_size", "halve it", "1"),
            Setting("vLLM", "EngineArgs.tensor_parallel_size", "halve it", "1"),
        ),
        "All-reduces after each layer get cheaper, and more engines share the requests.",
        "Weights must fit: memory x utilization x size above twice the bytes of the weights.",
        "share",
    ),
    Rule(
        "rollout-graph-capture",
        "Capture graphs for decoding: the engine waits for launches",
        (above(ROLLOUT_HOST_BOUND, 0.2), below(ROLLOUT_GRAPHS, 0.5)),
        (
            Setting("verl", f"{_ROLLOUT}.enforce_eager", "False", "False"),
            Setting("MindSpeed-RL", f"{_GENERATE}.enforce_eager", "False", "True"),
            Setting("vLLM", "EngineArgs.enforce_eager", "False", "False"),
        ),
        "One launch replays all kernels of a decoding step.",
        "Graphs take memory that is not offloaded and not part of the engine's fraction.",
        "share",
    ),
    Rule(
        "graph-memory",
        "Capture graphs for fewer batch sizes: they hold memory during the update",
        (below(UPDATE_ROOM, 0.1), above(ROLLOUT_GRAPHS, 0.0)),
        (
            Setting("verl", f"{_ROLLOUT}.cudagraph_capture_sizes", "[1, 2, 4, 8, 16, 32]", "null"),
            Setting("verl", f"{_ROLLOUT}.enforce_eager", "True", "False"),
            Setting("MindSpeed-RL", f"{_GENERATE}.enforce_eager", "True", "True"),
            Setting("vLLM", "EngineArgs.cudagraph_capture_sizes", "[1, 2, 4, 8, 16, 32]"),
        ),
        "Frees the memory of the graphs that are left out. Graphs cannot be offloaded.",
        "Batches above the largest size are decoded without a graph, which is slower.",
    ),
    Rule(
        "chunked-prefill",
        "Prefill in larger chunks: responses wait long for their first token",
        (above(FIRST_TOKENS, 0.3), above(ROLLOUT, 0.3)),
        (
            Setting("verl", f"{_ROLLOUT}.enable_chunked_prefill", "True", "True"),
            Setting("verl", f"{_ROLLOUT}.max_num_batched_tokens", "raise it", "8192"),
            Setting("MindSpeed-RL", f"{_GENERATE}.max_num_batched_tokens", "raise it", "2048"),
            Setting("vLLM", "EngineArgs.max_num_batched_tokens", "raise it"),
        ),
        "More prompts are computed at a time.",
        "Decoding of running requests stalls longer, and activations take more memory.",
    ),
    Rule(
        "prefix-cache",
        "Reuse the prompt of a group: few of its tokens come from the prefix cache",
        (below(PREFIX_HITS, 0.5), above(RESPONSES_PER_PROMPT, 2.0)),
        (
            Setting("verl", f"{_ROLLOUT}.enable_prefix_caching", "True", "True"),
            Setting("verl", f"{_ROLLOUT}.engine_kwargs.vllm.kv_transfer_config", "KV offload"),
            Setting("MindSpeed-RL", f"{_GENERATE}.enable_prefix_caching", "True", "False"),
            Setting("vLLM", "EngineArgs.enable_prefix_caching", "True"),
        ),
        "The prompt of a group is computed once, not once per response.",
        "KV offload needs vLLM 0.22 or later: older ones keep stale caches after a weight update.",
    ),
    Rule(
        "clipped-responses",
        "Allow longer responses: many reach the limit",
        (above(CLIPPED, 0.1),),
        (
            Setting("verl", "data.max_response_length", "raise it", "512"),
            Setting("MindSpeed-RL", f"{_GENERATE}.sampling_config.max_tokens", "raise it", "128"),
            Setting("TRL", "GRPOConfig.max_completion_length", "raise it", "512"),
        ),
        "Answers end by themselves, so that rewards judge whole answers.",
        "Longer rollouts and more memory. A clipped response may be a loop that never ends.",
    ),
    Rule(
        "clipped-prompts",
        "Allow longer prompts, or filter the data set: prompts are cut",
        (above(CLIPPED_PROMPTS, 0.05),),
        (
            Setting("verl", "data.max_prompt_length", "raise it", "512"),
            Setting("verl", "data.truncation", "error, to find them", "error"),
            Setting("verl", "data.filter_overlong_prompts", "True", "False"),
            Setting("MindSpeed-RL", "rl_config.max_prompt_length", "raise it", "512"),
        ),
        "The model sees whole questions.",
        "Longer prompts take KV cache and memory of the update.",
    ),
    Rule(
        "rollout-tail",
        "Cut the tail: ranks wait for the last responses",
        (above(TAIL, 0.1),),
        (
            Setting("verl", f"{_ROLLOUT}.over_sample_rate", "0.1", "0"),
            Setting("verl", "async_training.partial_rollout", "True"),
            Setting("MindSpeed-RL", "rl_config.partial_rollout_max_split", "2 or more", "1"),
            Setting("MindSpeed-RL", "rl_config.async_engine", "True", "False"),
        ),
        "Ranks do not idle until the longest response is complete.",
        "Cutting drops long responses, which biases training to short ones. Partial rollouts mix "
        "versions of the weights.",
        "tail",
    ),
    Rule(
        "rollout-overlap",
        "Generate the next batch during the update",
        (above(ROLLOUT, 0.3), fails(ASYNCHRONOUS)),
        (
            Setting("verl", "verl.experimental.one_step_off_policy", "use this trainer"),
            Setting("verl", "verl.experimental.fully_async_policy", "use this trainer"),
            Setting("TRL", "AsyncGRPOTrainer", "use this trainer"),
        ),
        "Rollout leaves the critical path if both take as long. The saving is an upper limit.",
        "Samples are one version old or more. Rollout and update need devices of their own.",
        "overlap",
    ),
    Rule(
        "more-rollout-devices",
        "Move devices from training to rollout: the trainer waits for samples",
        (above(DATA_WAIT, 0.05), holds(SAMPLES_FROM_OTHERS)),
        (
            Setting("verl", f"{_ROLLOUT}.nnodes", "more nodes", "0"),
            Setting("verl", "async_training.staleness_threshold", "let rollouts run further ahead"),
            Setting("TRL", "AsyncGRPOConfig.max_staleness", "let rollouts run further ahead"),
        ),
        "The trainer waits less. At best this wait is gone.",
        "Fewer devices for the update make it slower.",
        "share",
    ),
    Rule(
        "more-training-devices",
        "Move devices from rollout to training: rollout waits for the trainer",
        (above(BACKPRESSURE, 0.05),),
        (
            Setting("verl", f"{_ROLLOUT}.nnodes", "fewer nodes", "0"),
            Setting("verl", "async_training.staleness_threshold", "allow more"),
            Setting("TRL", "AsyncGRPOConfig.max_staleness", "allow more"),
        ),
        "Rollout does not stop while the trainer is busy.",
        "More staleness instead of more devices makes samples more off-policy.",
        "share",
    ),
    Rule(
        "discarded-samples",
        "Discard fewer samples: their tokens train nothing",
        (above(DISCARDED, 0.1),),
        (
            Setting("verl", "async_training.staleness_threshold", "raise it, or run less ahead"),
            Setting("verl", "async_training.partial_rollout", "True"),
            Setting("MindSpeed-RL", "rl_config.filter_groups_enable", "False", "False"),
            Setting("TRL", "AsyncGRPOConfig.max_staleness", "raise it"),
        ),
        "More of the generated tokens train.",
        "Samples that were too old or filtered on purpose come back into training.",
    ),
    Rule(
        "stale-samples",
        "Let rollouts run less far ahead: samples are old when they train",
        (above(STALENESS, 2.0),),
        (
            Setting("verl", "async_training.staleness_threshold", "lower it"),
            Setting("verl", "async_training.trigger_parameter_sync_step", "lower it"),
            Setting("TRL", "AsyncGRPOConfig.max_staleness", "lower it"),
        ),
        "Samples are closer to the policy that they update.",
        "Rollout and trainer wait for each other more often.",
    ),
    Rule(
        "reward-workers",
        "Score samples in parallel, as they arrive",
        (above(REWARD, 0.15),),
        (
            Setting("verl", "reward.num_workers", "more workers", "8"),
            Setting("MindSpeed-RL", "rl_config.verifier_parallel", "more workers", "1"),
            Setting("TRL", "GRPOTrainer(reward_funcs=)", "async functions"),
        ),
        "Rewards overlap with rollout. At best their time is gone.",
        "Sandboxes and reward models may share CPUs or devices with training.",
        "overlap",
    ),
    Rule(
        "vllm-version",
        "Update vLLM to 0.8.3 or later",
        (holds(OLD_VLLM),),
        (Setting("vLLM", "package vllm", "0.8.3 or later"),),
        "Engines of version 1 batch and cache better than those before.",
        "Weights are loaded in another way: update verl or TRL with it.",
    ),
    Rule(
        "rollout-sleep",
        "Let the engine sleep during the update: it keeps its memory",
        (above(HELD_BY_OTHERS, 0.3), below(UPDATE_ROOM, 0.1), holds(SHARED_DEVICES)),
        (
            Setting("verl", f"{_ROLLOUT}.free_cache_engine", "True", "True"),
            Setting("TRL", "GRPOConfig.vllm_enable_sleep_mode", "True", "False"),
            Setting("vLLM", "EngineArgs.enable_sleep_mode", "True", "False"),
        ),
        "The KV cache leaves the device during the update.",
        "Waking up takes time each step. Graphs and NCCL's buffers stay.",
    ),
)
