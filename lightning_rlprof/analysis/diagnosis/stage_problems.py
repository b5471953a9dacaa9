"""Problems of what a step consists of: rollout, samples, weight sync, data, communication."""

from lightning_rlprof.analysis.diagnosis.device_quantities import (
    ALL_GATHER,
    ALL_TO_ALL,
    CAPTURE_ALL,
    DOMINANT_KERNEL,
    HAS_ACCELERATOR,
    HOST_BOUND_IDLE,
    MESSAGE_BYTES,
    MFU,
    ON_NPU,
    POINT_TO_POINT,
    POINTWISE,
    REDUCTION,
    ROLLOUT_GRAPHS,
    SHORT_GAPS,
    SMALL_COLLECTIVES,
    UNMATCHED,
    device_share,
)
from lightning_rlprof.analysis.diagnosis.machine_quantities import CPU_BUSY
from lightning_rlprof.analysis.diagnosis.problem import (
    Problem,
    Remedy,
    above,
    below,
    down,
    fails,
    holds,
    to,
    up,
)
from lightning_rlprof.analysis.diagnosis.run_problems import BALANCE
from lightning_rlprof.analysis.diagnosis.sample_quantities import (
    CLIPPED,
    DISCARDED,
    PREEMPTIONS,
    STALENESS,
    TRANSFER_BYTES,
)
from lightning_rlprof.analysis.diagnosis.step_quantities import (
    ASYNCHRONOUS,
    BACKPRESSURE,
    CHECKPOINT_EVALUATION,
    CHECKPOINTS,
    COLLECTIVE_WAIT,
    COMMUNICATION_SPANS,
    COPY_SPANS,
    CRITIC,
    DATA_WAIT,
    DRAIN,
    EVALUATION,
    HOST_WORK,
    LOADER_WORKERS,
    LOGGING,
    OFFLOAD,
    ONLY_LOADS,
    REWARD,
    ROLLOUT,
    ROLLOUT_IN_LOADER,
    SAMPLES_FROM_OTHERS,
    TAIL,
    UNTRACED,
    WEIGHT_SYNC,
)
from lightning_rlprof.analysis.steps.time_categories import Category

_ROLLOUT = "actor_rollout_ref.rollout"
_GENERATE = "generate_config"
_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_FSDP = f"{_ACTOR}.fsdp_config"
_MEGATRON = f"{_ACTOR}.megatron"
_ENGINE = f"{_ROLLOUT}.checkpoint_engine"
_ASYNC = "async_training"
_TRAINING = "megatron_training"
_LEDGER = "rlprof show RUN ledger"
_UNPROFILED = "Unprofiled steps are faster by the same amount (profiler overhead)"

COMMUNICATION = device_share(Category.COMMUNICATION, COMMUNICATION_SPANS, CAPTURE_ALL)
MEMCPY = device_share(Category.MEMCPY, COPY_SPANS)
WAIT_FOR_RANKS = device_share(Category.COLLECTIVE_WAIT, COLLECTIVE_WAIT, CAPTURE_ALL)
LAUNCH_LATENCY = device_share(Category.LAUNCH_LATENCY)
UNATTRIBUTED_IDLE = device_share(Category.UNATTRIBUTED_IDLE)

ROLLOUTS = (
    Problem(
        "rollout-tail",
        "problem",
        "Ranks wait for the last responses of a rollout",
        (above(TAIL, 0.1),),
        "Cap the response length, use partial rollouts, or sample more prompts than needed.",
        "The tail is as long with capped lengths: then requests start late or an engine is slow",
        "rlprof show RUN long_tail",
        (),
        (
            Remedy(
                "cut-tail",
                "Do not wait for the last tenth of the responses",
                (
                    up("verl", f"{_ROLLOUT}.over_sample_rate", "0.1", "0"),
                    to("verl", f"{_ASYNC}.partial_rollout", "True"),
                    up("MindSpeed-RL", "rl_config.partial_rollout_max_split", "2 or more", "1"),
                ),
                "Cutting drops long responses, which biases training to short ones. Partial "
                "rollouts mix versions of the weights.",
                saving="tail",
            ),
        ),
    ),
    Problem(
        "preemptions",
        "problem",
        "The rollout engine preempts requests",
        (above(PREEMPTIONS, 0.0),),
        "Run fewer requests at a time, or give the KV cache more memory.",
        "Preemptions stay with half of the requests",
        "rlprof show RUN throughput",
        (),
        (
            Remedy(
                "kv-preemptions",
                "Run fewer requests at a time, or give the KV cache more memory",
                (
                    down("verl", f"{_ROLLOUT}.max_num_seqs", default="256"),
                    up("verl", f"{_ROLLOUT}.gpu_memory_utilization", default="0.5"),
                    down("MindSpeed-RL", f"{_GENERATE}.max_num_seqs", default="1"),
                    up("TRL", "GRPOConfig.vllm_gpu_memory_utilization", default="0.3"),
                    down("vLLM", "EngineArgs.max_num_seqs"),
                ),
                "Fewer requests at a time: throughput falls if the cache was not the limit.",
            ),
        ),
    ),
    Problem(
        "clipped-responses",
        "problem",
        "Many responses reach the limit of their length",
        (above(CLIPPED, 0.1),),
        "Allow longer responses, so that rewards judge whole answers.",
        "The clipped responses are loops that never end",
        "rlprof show RUN samples",
        (),
        (
            Remedy(
                "longer-responses",
                "Allow longer responses",
                (
                    up("verl", "data.max_response_length", default="512"),
                    up("MindSpeed-RL", f"{_GENERATE}.sampling_config.max_tokens", default="128"),
                    up("TRL", "GRPOConfig.max_completion_length", default="512"),
                ),
                "Longer rollouts and more memory.",
            ),
        ),
    ),
    Problem(
        "discarded-samples",
        "problem",
        "Many generated tokens train nothing",
        (above(DISCARDED, 0.1),),
        "See which fates the samples have: rlprof show RUN samples.",
        "The samples were filtered on purpose",
        "rlprof show RUN samples",
        (),
        (
            Remedy(
                "discard-less",
                "Discard fewer samples",
                (
                    up("verl", f"{_ASYNC}.staleness_threshold", knob="staleness"),
                    to("verl", f"{_ASYNC}.partial_rollout", "True"),
                    to("MindSpeed-RL", "rl_config.filter_groups_enable", "False", "False"),
                    up("TRL", "AsyncGRPOConfig.max_staleness", knob="staleness"),
                ),
                "Samples that were too old or filtered on purpose come back into training.",
            ),
        ),
    ),
    Problem(
        "stale-samples",
        "problem",
        "Samples are old when they train",
        (above(STALENESS, 2.0),),
        "Let rollouts run less far ahead.",
        "The algorithm corrects for old samples, and the reward does not suffer",
        "rlprof show RUN staleness",
        (),
        (
            Remedy(
                "less-staleness",
                "Let rollouts run less far ahead",
                (
                    down("verl", f"{_ASYNC}.staleness_threshold", knob="staleness"),
                    down("verl", f"{_ASYNC}.trigger_parameter_sync_step"),
                    down("TRL", "AsyncGRPOConfig.max_staleness", knob="staleness"),
                ),
                "Rollout and trainer wait for each other more often.",
            ),
        ),
    ),
    Problem(
        "rollout",
        "idea",
        "Rollout takes most of the time",
        (above(ROLLOUT, 0.5),),
        "Measure a step with a larger batch per engine, or a KV cache that fits. Compare tokens/s "
        "with rlprof compare.",
        "Rollout tokens/s do not rise, or the rest of the step grows by as much",
        "rlprof show RUN throughput",
        ("of the step time",),
        (
            Remedy(
                "rollout-graph-capture",
                "Capture graphs for decoding",
                (
                    to("verl", f"{_ROLLOUT}.enforce_eager", "False", "False"),
                    to("MindSpeed-RL", f"{_GENERATE}.enforce_eager", "False", "True"),
                    to("vLLM", "EngineArgs.enforce_eager", "False", "False"),
                ),
                "Graphs take memory that is not offloaded and not part of the engine's fraction.",
                (above(HOST_BOUND_IDLE, 0.2), below(ROLLOUT_GRAPHS, 0.5)),
            ),
            Remedy(
                "rollout-overlap",
                "Generate the next batch during the update, on devices of its own",
                (
                    to("verl", "verl.experimental.one_step_off_policy", "use this trainer"),
                    to("TRL", "AsyncGRPOTrainer", "use this trainer"),
                ),
                "Samples are one version old or more, and rollout needs devices of its own.",
                (holds(HAS_ACCELERATOR), fails(ASYNCHRONOUS)),
            ),
        ),
    ),
    Problem(
        "critic",
        "idea",
        "The critic takes much of the time",
        (above(CRITIC, 0.25),),
        "Try an algorithm without a critic, or train it less often.",
        "The value estimates are what makes training stable",
        "rlprof show RUN stages",
        (),
        (
            Remedy(
                "critic-share",
                "Use an algorithm without a critic",
                (
                    to("verl", "algorithm.adv_estimator", "grpo", "gae"),
                    to("MindSpeed-RL", "rl_config.adv_estimator", "group_norm", "group_norm"),
                ),
                "Another algorithm: rewards need groups of responses, and results change.",
            ),
        ),
    ),
)

WAITS = (
    Problem(
        "rollout-in-loader",
        "problem",
        "The rollout runs in the data loader, and the trainer waits for it",
        (above(DATA_WAIT, 0.05), above(ROLLOUT_IN_LOADER, 0.01)),
        "Mark it as actor_generate, and make the rollout faster. Workers of the loader are no "
        "remedy: each would sample with a copy of the policy that never changes.",
        "The module in the loader is not the policy that trains",
        "rlprof show RUN regions",
        ("inside",),
    ),
    Problem(
        "data-wait",
        "problem",
        "The trainer waits for data",
        (
            above(DATA_WAIT, 0.05),
            fails(SAMPLES_FROM_OTHERS),
            below(ROLLOUT_IN_LOADER, 0.01),
        ),
        "See what the loader does: rlprof watch --stacks while it trains, or mark its parts.",
        "The wait stays with a batch that is already in memory",
        _LEDGER,
        (),
        (
            Remedy(
                "data-workers",
                "Load data in the background",
                (
                    up(
                        "PyTorch",
                        "DataLoader(num_workers=)",
                        "2 to 4 per rank",
                        "0",
                        "loader workers",
                    ),
                    up(
                        "TRL",
                        "GRPOConfig.dataloader_num_workers",
                        "2 to 4",
                        "0",
                        "loader workers",
                    ),
                    up(
                        "verl",
                        "data.dataloader_num_workers",
                        "more workers",
                        "8",
                        "loader workers",
                    ),
                    up(
                        "MindSpeed-RL",
                        f"{_TRAINING}.num_workers",
                        "more workers",
                        "2",
                        "loader workers",
                    ),
                ),
                "Each worker is a process with its own memory.",
                (holds(ONLY_LOADS), fails(LOADER_WORKERS), fails(CPU_BUSY)),
            ),
            Remedy(
                "prefetch",
                "Let the workers prepare more batches",
                (
                    up("PyTorch", "DataLoader(prefetch_factor=)", "4", "2"),
                    to("PyTorch", "DataLoader(persistent_workers=)", "True", "False"),
                ),
                "Batches that wait take host memory.",
                (holds(LOADER_WORKERS), fails(CPU_BUSY)),
            ),
        ),
    ),
    Problem(
        "waits-for-samples",
        "problem",
        "The trainer waits for samples of other ranks",
        (above(DATA_WAIT, 0.05), holds(SAMPLES_FROM_OTHERS)),
        "Generate faster, or move ranks from training to rollout: rlprof whatif RUN predicts it.",
        "Complete samples are in the buffer while the trainer waits",
        "rlprof show RUN roles",
        (),
        (
            Remedy(
                "more-rollout-devices",
                "Move devices from training to rollout, or let rollouts run further ahead",
                (
                    up("verl", f"{_ROLLOUT}.nnodes", "more nodes", "0"),
                    up("verl", f"{_ASYNC}.staleness_threshold", knob="staleness"),
                    up("TRL", "AsyncGRPOConfig.max_staleness", knob="staleness"),
                ),
                "Fewer devices for the update make it slower.",
            ),
        ),
    ),
    Problem(
        "backpressure",
        "problem",
        "Rollout ranks wait for the trainer",
        (above(BACKPRESSURE, 0.05),),
        "Move ranks from rollout to training, or allow more staleness.",
        "The buffer is not full while they wait",
        "rlprof show RUN roles",
        (),
        (
            Remedy(
                "more-training-devices",
                "Move devices from rollout to training, or allow more staleness",
                (
                    down("verl", f"{_ROLLOUT}.nnodes", "fewer nodes", "0"),
                    up("verl", f"{_ASYNC}.staleness_threshold", knob="staleness"),
                    up("TRL", "AsyncGRPOConfig.max_staleness", knob="staleness"),
                ),
                "More staleness instead of more devices makes samples more off-policy.",
            ),
        ),
    ),
    Problem(
        "collective-wait",
        "problem",
        "Ranks wait for the slowest one",
        (above(WAIT_FOR_RANKS, 0.05),),
        "Find the slow rank with rlprof stragglers RUN. Balance the tokens of the ranks.",
        "The wait stays when every rank gets the same batch",
        _LEDGER,
        (),
        (BALANCE,),
    ),
    Problem(
        "reward",
        "problem",
        "Ranks wait for rewards, tools or environments",
        (above(REWARD, 0.15),),
        "Score samples in parallel as they arrive, not as one batch at the end.",
        "The rewards of one sample take as long as those of the batch",
        _LEDGER,
        (),
        (
            Remedy(
                "reward-workers",
                "Score samples in parallel, as they arrive",
                (
                    up("verl", "reward.num_workers", "more workers", "8"),
                    up("MindSpeed-RL", "rl_config.verifier_parallel", "more workers", "1"),
                    to("TRL", "GRPOTrainer(reward_funcs=)", "async functions"),
                ),
                "Sandboxes and reward models may share CPUs or devices with training.",
                (fails(CPU_BUSY),),
                "overlap",
            ),
        ),
    ),
    Problem(
        "weight-sync-drain",
        "problem",
        "The weight sync waits until rollouts pause",
        (above(WEIGHT_SYNC, 0.05), above(DRAIN, 0.5)),
        "Abort or interrupt running requests, or sync less often: the links are not the limit.",
        "The parts after the pause take as long",
        "rlprof show RUN weight_sync",
        ("of the syncs",),
        (
            Remedy(
                "sync-less-often",
                "Sync less often, and continue interrupted responses",
                (
                    up("verl", f"{_ASYNC}.trigger_parameter_sync_step"),
                    to("verl", f"{_ASYNC}.partial_rollout", "True"),
                    up("TRL", "AsyncGRPOConfig.weight_sync_steps"),
                ),
                "Samples are older when they train.",
            ),
        ),
    ),
    Problem(
        "weight-sync",
        "problem",
        "Weight sync is slow",
        (above(WEIGHT_SYNC, 0.05), below(DRAIN, 0.5)),
        "See its parts: rlprof show RUN weight_sync. Avoid copies through the host.",
        "A model of half the size takes as long: then it is a fixed pause",
        "rlprof show RUN weight_sync",
        (),
        (
            Remedy(
                "weight-sync-backend",
                "Send weights from device to device",
                (to("verl", f"{_ENGINE}.backend", "nccl or hccl", "naive"),),
                "A bucket is in memory on both sides.",
                (holds(HAS_ACCELERATOR),),
            ),
            Remedy(
                "weight-sync-bucket",
                "Send weights in larger buckets",
                (up("verl", f"{_ENGINE}.update_weights_bucket_megabytes", default="2048"),),
                "A bucket is in memory on both sides.",
                (holds(HAS_ACCELERATOR), below(TRANSFER_BYTES, 128.0 * 2**20)),
            ),
        ),
    ),
    Problem(
        "offload",
        "problem",
        "Offload and onload take much time",
        (above(OFFLOAD, 0.05), holds(HAS_ACCELERATOR)),
        "Keep more on the device, offload only the optimizer, or use separate devices for rollout.",
        "Training and rollout do not fit into memory together",
        _LEDGER,
        (),
        (
            Remedy(
                "offload-less",
                "Offload less",
                (
                    to("verl", f"{_FSDP}.param_offload", "False", "False"),
                    to("verl", f"{_FSDP}.optimizer_offload", "False", "False"),
                    to("MindSpeed-RL", f"{_GENERATE}.offload_train_param", "False", "False"),
                    to("MindSpeed-RL", f"{_GENERATE}.offload_train_grad", "False", "False"),
                ),
                "The rollout engine has less memory.",
                saving="removed",
            ),
        ),
    ),
    Problem(
        "checkpoint-eval",
        "problem",
        "Checkpoints and evaluation take a large share",
        (above(CHECKPOINT_EVALUATION, 0.1),),
        "Do them less often, or write checkpoints asynchronously.",
        "You need this many checkpoints and evaluations",
        _LEDGER,
        (),
        (
            Remedy(
                "checkpoint-cost",
                "Save checkpoints less often, or asynchronously",
                (
                    up("verl", "trainer.save_freq", default="-1"),
                    to("verl", f"{_ACTOR}.checkpoint.async_save", "True", "False"),
                    up("TRL", "GRPOConfig.save_steps", default="500"),
                    to("TRL", "GRPOConfig.save_only_model", "True", "False"),
                    up("Lightning", "ModelCheckpoint(every_n_train_steps=)"),
                    up("MindSpeed-RL", f"{_TRAINING}.save_interval"),
                ),
                "A crash loses more steps.",
                (above(CHECKPOINTS, 0.05),),
            ),
            Remedy(
                "evaluation-cost",
                "Evaluate less often, or on fewer samples",
                (
                    up("verl", "trainer.test_freq", default="-1"),
                    to("verl", "trainer.val_before_train", "False", "True"),
                    up("TRL", "GRPOConfig.eval_steps"),
                    up("Lightning", "Trainer(val_check_interval=)", default="1.0"),
                    down("Lightning", "Trainer(limit_val_batches=)", default="1.0"),
                    up("MindSpeed-RL", f"{_TRAINING}.eval_interval", default="1000"),
                ),
                "Overfitting and collapse are seen later.",
                (above(EVALUATION, 0.05),),
            ),
        ),
    ),
    Problem(
        "logging",
        "problem",
        "Steps wait for logging",
        (above(LOGGING, 0.02),),
        "Log less often: steps wait for files, networks, and values from the device.",
        "The time stays when nothing is logged",
        "rlprof show RUN regions",
        (),
        (
            Remedy(
                "logging-cost",
                "Log less often",
                (
                    down("verl", "trainer.log_val_generations", "fewer, or 0", "0"),
                    up("TRL", "GRPOConfig.logging_steps", default="10"),
                    to("TRL", "GRPOConfig.log_completions", "False", "False"),
                    up("Lightning", "Trainer(log_every_n_steps=)", default="50"),
                    up("MindSpeed-RL", f"{_TRAINING}.log_interval", default="100"),
                ),
                "Curves have fewer points.",
            ),
        ),
    ),
    Problem(
        "untraced",
        "idea",
        "A large share of the time is untraced",
        (above(UNTRACED, 0.2),),
        "Mark the code between stages with stage(…) or wrap:. See rlprof show RUN gaps",
        "The untraced time belongs to crashed ranks: see rlprof show RUN data_quality",
        "rlprof show RUN gaps",
        ("of the step time",),
        (
            Remedy(
                "untraced-time",
                "Name the time that no stage has",
                (
                    to("rlprof", "wrap", "the methods that take it"),
                    to("rlprof", "auto_stages", "true", "true"),
                ),
                "Nothing gets faster: the other checks see this time.",
            ),
        ),
    ),
)

DEVICES = (
    Problem(
        "communication",
        "problem",
        "Communication is not overlapped",
        (above(COMMUNICATION, 0.1), below(UNMATCHED, 1.0)),
        "Overlap it: larger buckets, gradient reduction during backward, fewer gathers.",
        "rlprof show RUN communication shows that it overlaps, and the links are at their limit",
        "rlprof show RUN communication",
        (),
        (
            Remedy(
                "fsdp-prefetch",
                "Gather the next layer during the forward pass",
                (
                    to("verl", f"{_FSDP}.forward_prefetch", "True", "False"),
                    to("MindSpeed-RL", f"{_TRAINING}.overlap_param_gather", "True"),
                    to("Lightning", "FSDPStrategy(forward_prefetch=)", "True", "False"),
                ),
                "One more layer's weights are in memory.",
                (above(ALL_GATHER, 0.1),),
            ),
            Remedy(
                "gradient-buckets",
                "Reduce gradients in larger buckets",
                (
                    up("Lightning", "DDPStrategy(bucket_cap_mb=)", "100", "25"),
                    up("TRL", "GRPOConfig.ddp_bucket_cap_mb", "100", "25"),
                    up("MindSpeed-RL", f"{_TRAINING}.ddp_bucket_size"),
                    to("MindSpeed-RL", f"{_TRAINING}.overlap_grad_reduce", "True", "False"),
                ),
                "The first reduction begins later, so that less of it overlaps with the backward "
                "pass.",
                (above(REDUCTION, 0.05), below(MESSAGE_BYTES, 8.0 * 2**20)),
            ),
            Remedy(
                "expert-parallel",
                "Speed up the exchange between experts",
                (
                    to(
                        "verl",
                        f"{_MEGATRON}.override_transformer_config.moe_enable_deepep",
                        "True",
                    ),
                    to("MindSpeed-RL", f"{_TRAINING}.moe_alltoall_overlap_comm", "True"),
                ),
                "DeepEP needs NVLink and RDMA. Ulysses uses all-to-alls, too.",
                (above(ALL_TO_ALL, 0.1),),
            ),
            Remedy(
                "pipeline-bubbles",
                "Shorten the bubbles of the pipeline",
                (
                    up(
                        "verl",
                        f"{_MEGATRON}.virtual_pipeline_model_parallel_size",
                        "2 or more",
                        "null",
                    ),
                    down("verl", f"{_MEGATRON}.pipeline_model_parallel_size", "halve it", "1"),
                ),
                "Interleaved stages send more messages and keep more activations.",
                (above(POINT_TO_POINT, 0.1),),
            ),
            Remedy(
                "npu-collectives",
                "Run collectives on vector cores",
                (
                    to("environment", "HCCL_OP_EXPANSION_MODE", "AIV"),
                    up("MindSpeed-RL", "rl_config.hccl_buffersize", default="256"),
                ),
                "They take cores from compute. Not every product supports it.",
                (holds(ON_NPU),),
            ),
        ),
    ),
    Problem(
        "unmatched-collectives",
        "problem",
        "Collectives are not overlapped, and whether they transfer or wait is unknown",
        (above(COMMUNICATION, 0.1), above(UNMATCHED, 0.0)),
        "Capture the same steps on all ranks (ranks: all): then transfer and waiting are divided. "
        "Overlap hides both.",
        "rlprof show RUN communication shows that it overlaps, and the links are at their limit",
        "rlprof show RUN communication",
    ),
    Problem(
        "small-collectives",
        "problem",
        "Small collectives run at low bandwidth",
        (above(SMALL_COLLECTIVES, 0.05), holds(HAS_ACCELERATOR)),
        "Use larger buckets, or put several tensors into one call.",
        "One call with all the bytes takes as long",
        "rlprof show RUN communication",
        ("collective",),
    ),
    Problem(
        "short-gaps",
        "problem",
        "Devices idle between short kernels",
        # A trace of a device that never idles and lost a fifth of its events shows a fifth idle.
        (above(HOST_BOUND_IDLE, 0.2), above(SHORT_GAPS, 0.5), holds(HAS_ACCELERATOR)),
        "Use CUDA graphs, torch.compile or fused kernels for fewer launches. Or raise the "
        "micro-batch.",
        f"{_UNPROFILED}. Or the share stays with a micro-batch of twice the size",
        "rlprof show RUN idle",
        (),
        (
            Remedy(
                "host-bound-update",
                "Launch fewer kernels",
                (
                    to("verl", f"{_ACTOR}.use_torch_compile", "True", "True"),
                    to("TRL", "GRPOConfig.torch_compile", "True", "False"),
                    to("PyTorch", "torch.compile(mode=)", "reduce-overhead: CUDA graphs"),
                ),
                "Compilation takes minutes, and again for each new shape.",
                (fails(ON_NPU),),
            ),
            Remedy(
                "npu-task-queue",
                "Queue operators in two levels",
                (
                    to("environment", "TASK_QUEUE_ENABLE", "2", "1"),
                    to("environment", "CPU_AFFINITY_CONF", "1"),
                ),
                "Conflicts with ACL graphs, as with enforce_eager=False.",
                (holds(ON_NPU),),
            ),
        ),
    ),
    Problem(
        "long-gaps",
        "problem",
        "Devices idle in long gaps before launches",
        (above(HOST_BOUND_IDLE, 0.2), below(SHORT_GAPS, 0.5), holds(HAS_ACCELERATOR)),
        "See what the host does in the longest gaps: .item(), blocking copies, Python code.",
        f"{_UNPROFILED}. Or the host waits in these gaps for something else",
        "rlprof show RUN idle",
        (),
        (
            Remedy(
                "no-synchronization",
                "Do not wait for the device in the step",
                (to("PyTorch", "Tensor.item", "avoid it"),),
                "Values are logged a step later.",
            ),
        ),
    ),
    Problem(
        "host-work",
        "problem",
        "Devices wait while the host prepares batches",
        (above(HOST_WORK, 0.1),),
        "Prepare the next batch in the background: tokenizing, packing and collating.",
        "The share stays with batches that are prepared before the run",
        _LEDGER,
    ),
    Problem(
        "launch-latency",
        "problem",
        "Launches of short kernels take their time",
        (above(LAUNCH_LATENCY, 0.2), holds(HAS_ACCELERATOR)),
        "Use CUDA graphs, torch.compile or fused kernels for fewer launches.",
        _UNPROFILED,
        "rlprof show RUN idle",
    ),
    Problem(
        "unattributed-idle",
        "problem",
        "Devices idle for an unknown cause",
        # Lost kernels leave a fifth idle, see short-gaps.
        (above(UNATTRIBUTED_IDLE, 0.25), holds(HAS_ACCELERATOR)),
        "See rlprof show RUN idle. Record launches (profile_with_cpu: true), then look at what the "
        "host and other streams do in the longest gaps.",
        "The device waits for another stream or another process on purpose",
        "rlprof show RUN idle",
    ),
    Problem(
        "memcpy",
        "problem",
        "Copies between host and device are not overlapped",
        (above(MEMCPY, 0.05), holds(HAS_ACCELERATOR)),
        "Pin the memory, copy with non_blocking=True, and keep data on the device between stages.",
        "The copies take as long from pinned memory",
        "rlprof show RUN breakdown",
        (),
        (
            Remedy(
                "pinned-copies",
                "Copy batches from pinned memory, without waiting",
                (
                    to("PyTorch", "DataLoader(pin_memory=)", "True", "False"),
                    to("PyTorch", "Tensor.to(non_blocking=)", "True", "False"),
                    to("TRL", "GRPOConfig.dataloader_pin_memory", "True", "True"),
                ),
                "Pinned memory cannot be swapped. Do not change a tensor while it is copied.",
            ),
        ),
    ),
    Problem(
        "dominant-kernel",
        "idea",
        "One kernel takes most of the kernel time",
        (above(DOMINANT_KERNEL, 0.4), holds(HAS_ACCELERATOR)),
        "Profile its longest launch with Nsight Compute. For a matmul, check dtype and sizes in "
        "multiples of 64.",
        "It already reaches the device's peak FLOP/s or memory bandwidth",
        "rlprof show RUN kernels",
        ("of kernel time", "kernel"),
        (
            Remedy(
                "fused-kernels",
                "Fuse pointwise kernels",
                (
                    to("verl", f"{_MODEL}.use_liger", "True", "False"),
                    to("verl", f"{_MODEL}.use_fused_kernels", "True", "False"),
                    to("TRL", "GRPOConfig.use_liger_kernel", "True", "False"),
                    to("PyTorch", "torch.compile", "compile the model"),
                ),
                "Results change in the last digits. verl switches off Liger's cross-entropy.",
                (above(POINTWISE, 0.25), fails(ON_NPU)),
            ),
        ),
    ),
    Problem(
        "training-mfu",
        "idea",
        "Training uses little of the device's FLOP/s",
        (below(MFU, 0.2), holds(HAS_ACCELERATOR)),  # dense models reach 0.35 to 0.5
        "See rlprof show RUN breakdown and idle: devices idle, or compute slowly. Then try a "
        "larger micro-batch, packed sequences, BF16.",
        "The counted FLOPs miss a part of the work, or the work is not in BF16",
        "rlprof show RUN throughput",
        ("MFU", "stages"),
        (
            Remedy(
                "low-mfu",
                "Raise the MFU of the update",
                (
                    up(
                        "verl",
                        f"{_ACTOR}.ppo_max_token_len_per_gpu",
                        default="16384",
                        knob="micro-batch",
                    ),
                    to("verl", f"{_MODEL}.use_remove_padding", "True", "True"),
                    to("TRL", "GRPOConfig.bf16", "True"),
                    to("Lightning", "Trainer(precision=)", "bf16-true or bf16-mixed", "32-true"),
                ),
                "FLOPs that were counted wrongly look like a low MFU.",
            ),
        ),
    ),
)
