"""Problems of a run as a whole: what ended it, what makes its times untrue, ranks, machines."""

from lightning_rlprof.analysis.diagnosis.device_quantities import HAS_ACCELERATOR
from lightning_rlprof.analysis.diagnosis.machine_quantities import (
    CPU_QUOTA,
    DISK_PRESSURE,
    HEAT,
    MEMORY_PRESSURE,
    NO_CPU_WAIT,
    OTHER_CPU,
    OWN_CPU,
    POWER,
    SLOWDOWN,
)
from lightning_rlprof.analysis.diagnosis.problem import (
    Problem,
    Remedy,
    above,
    below,
    down,
    holds,
    to,
    up,
)
from lightning_rlprof.analysis.diagnosis.sample_quantities import (
    GROWTH,
    HOST_ROOM,
    LOST_DATA,
    OUT_OF_MEMORY,
    TOKEN_IMBALANCE,
)
from lightning_rlprof.analysis.diagnosis.step_quantities import (
    CPU_WAIT_SHARE,
    CPU_WAITS,
    GARBAGE,
    HUNG_RANKS,
    LEVEL_CHANGES,
    LOADER_WORKERS,
    OUTLIERS,
    PROFILER,
    SLOW_RANKS,
    TRENDS,
)

_ACTOR = "actor_rollout_ref.actor"
_FSDP = f"{_ACTOR}.fsdp_config"

BALANCE = Remedy(
    "length-balance",
    "Give all ranks the same number of tokens",
    (
        to("verl", "trainer.balance_batch", "True", "True"),
        to("MindSpeed-RL", "rl_config.use_dp_batch_balance", "True", "False"),
    ),
    "Samples of one group may end on several ranks.",
    (above(TOKEN_IMBALANCE, 1.1),),
    "balance",
)
"""Of whatever makes ranks wait for one another."""

ENDED = (
    Problem(
        "out-of-memory",
        "ended",
        "A rank ran out of device memory",
        (above(OUT_OF_MEMORY, 0.0),),
        "See what each stage keeps: rlprof show RUN memory_phases. Then use a smaller micro-batch "
        "or shorter responses; memory.level: snapshot records every allocation.",
        "It raises in the same stage with half of the batch",
        "rlprof show RUN memory_phases",
        ("rank", "step", "stage"),
        (
            Remedy(
                "smaller-micro-batch",
                "Recompute activations, and use smaller micro-batches",
                (
                    to("verl", "actor_rollout_ref.model.enable_gradient_checkpointing", "True"),
                    down(
                        "verl",
                        f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
                        "halve it",
                        "null",
                        "micro-batch",
                    ),
                    to("MindSpeed-RL", "megatron_training.recompute_granularity", "full"),
                    to("TRL", "GRPOConfig.gradient_checkpointing", "True", "True"),
                    down(
                        "TRL",
                        "GRPOConfig.per_device_train_batch_size",
                        "halve it",
                        "8",
                        "micro-batch",
                    ),
                    to("Lightning", "FSDPStrategy(activation_checkpointing_policy=)", "the layers"),
                ),
                "Recomputing takes one more forward pass: a third more FLOPs.",
            ),
            Remedy(
                "fragmentation",
                "Let torch's memory segments grow",
                (
                    to("environment", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
                    to("environment", "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True"),
                ),
                "Sleep mode of some vLLM versions refuses expandable segments.",
                (holds(HAS_ACCELERATOR),),
            ),
        ),
    ),
    Problem(
        "hang",
        "ended",
        "The run hung",
        (above(HUNG_RANKS, 0.0),),
        "See which rank the others wait for, and the line at which it is: rlprof hang RUN",
        "It was in a compilation, a checkpoint or a validation that takes longer than hang_timeout",
        "rlprof hang RUN",
        ("step",),
    ),
)

DISTORTING = (
    Problem(
        "cpu-contention",
        "distorts",
        "Training threads wait for a CPU",
        (above(CPU_WAIT_SHARE, CPU_WAITS),),
        "Free CPUs first: all other times include this wait.",
        "The wait stays with fewer threads than CPUs and without other jobs",
        "rlprof show RUN device_counters",
        (),
        (
            Remedy(
                "own-threads",
                "Use fewer threads",
                (
                    down("environment", "OMP_NUM_THREADS", "CPUs per rank, less workers"),
                    down("verl", "actor_rollout_ref.rollout.agent.num_workers", "fewer", "8"),
                    down("MindSpeed-RL", "rl_config.num_cpus_for_local_task", "fewer CPUs", "1"),
                ),
                "Too few threads make work on the CPU slower.",
                (above(OWN_CPU, 0.5),),
            ),
            Remedy(
                "fewer-workers",
                "Use fewer workers of the data loader",
                (
                    down("PyTorch", "DataLoader(num_workers=)", "fewer", knob="loader workers"),
                    down(
                        "TRL",
                        "GRPOConfig.dataloader_num_workers",
                        "fewer",
                        "0",
                        knob="loader workers",
                    ),
                ),
                "Too few workers let the trainer wait for data.",
                (holds(LOADER_WORKERS), above(OWN_CPU, 0.2)),
            ),
            Remedy(
                "other-programs",
                "Move the other programs off the machine, or reserve CPUs for this job",
                (to("environment", "CPUs of this job", "a cpuset, or an exclusive node"),),
                "Other jobs of the machine have fewer CPUs.",
                (above(OTHER_CPU, 0.5),),
            ),
            Remedy(
                "cpu-limit",
                "Raise the CPU limit of the container",
                (up("environment", "CPU limit of the container", "raise or remove it"),),
                "Other containers of the machine have fewer CPUs.",
                (above(CPU_QUOTA, 0.05),),
            ),
        ),
    ),
    Problem(
        "cpu-quota",
        "distorts",
        "The CPU quota of the container is used up",
        (above(CPU_QUOTA, 0.05), holds(NO_CPU_WAIT)),
        "Raise the CPU limit of the container, or use fewer threads: it stops all of them.",
        "The steps take as long with a higher limit",
        "rlprof show RUN device_counters",
        (),
        (
            Remedy(
                "cpu-quota-limit",
                "Raise the CPU limit of the container",
                (up("environment", "CPU limit of the container", "raise or remove it"),),
                "Other containers of the machine have fewer CPUs.",
            ),
        ),
    ),
    Problem(
        "lost-data",
        "distorts",
        "Data of this run is missing",
        (above(LOST_DATA, 0.0),),
        "See which ranks are missing or lost lines: rlprof show RUN data_quality. Sums of the job "
        "are too low, and waiting for a missing rank has no cause.",
        "The missing ranks took part in no step",
        "rlprof show RUN data_quality",
        ("missing ranks", "ranks that lost lines"),
    ),
)

RANKS_AND_CHANGES = (
    Problem(
        "straggler",
        "problem",
        "A rank slows the others down",
        (above(SLOW_RANKS, 0.02),),  # rank 0 of a healthy job logs, which is up to 1%
        "Check what only this rank does: data, logging, other load on its host. Then swap ranks.",
        "The slowdown moves with the work to the other rank",
        "rlprof stragglers RUN --json",
        ("rank", "one of ranks", "verdict"),
        (
            Remedy(
                "swap-ranks",
                "Make this rank as fast as the others",
                (to("environment", "node of the slow rank", "another node"),),
                "Swapping a node moves the straggler if the cause is its place in the rack.",
                saving="straggler",
            ),
            BALANCE,
        ),
    ),
    Problem(
        "slower-since",
        "problem",
        "Steps became slower",
        (above(LEVEL_CHANGES, 0.02),),
        "See what changed at that step: response lengths, other jobs on the machine, device "
        "clocks, a dataset shard.",
        "It is in the work: tokens or samples per step grew, and were not counted",
        "rlprof show RUN changes",
        ("since step", "times as long", "stage"),
    ),
    Problem(
        "slower-over-time",
        "problem",
        "Steps get slower over the run",
        (above(TRENDS, 0.02),),
        "Look for what grows with every step: lists, caches, logs, memory, response lengths.",
        "It is in the work: tokens or samples per step grew, and were not counted",
        "rlprof show RUN changes",
        ("times as long", "stage"),
    ),
    Problem(
        "outlier-step",
        "problem",
        "A step took longer than its neighbors",
        (above(OUTLIERS, 0.02),),
        "See what else ran in this step: a checkpoint, garbage collection, a retry, another job.",
        "A second run has no such step",
        "rlprof show RUN changes",
        ("step", "times as long", "stage"),
    ),
    Problem(
        "memory-growth",
        "problem",
        "Memory grows every step",
        (above(GROWTH, 0.02),),
        "Find the stage with rlprof show RUN memory_phases. Then compare memory snapshots of two "
        "steps far apart (memory.level: snapshot).",
        "It stops in a run of twice as many steps, or batches get longer",
        "rlprof show RUN memory_phases",
        ("component", "rank", "added by"),
    ),
)

MACHINES = (
    Problem(
        "memory-pressure",
        "problem",
        "Memory of the host is short",
        (above(MEMORY_PRESSURE, 0.05),),
        "Give the job more host memory, or use less of it: threads wait for pages.",
        "The pressure stays when this job is stopped: then another program takes the memory",
        "rlprof show RUN device_counters",
        ("rank", "by"),
        (
            Remedy(
                "more-host-memory",
                "Give the job more host memory",
                (up("environment", "memory limit of the container"),),
                "Other jobs of the machine have less memory.",
            ),
            Remedy(
                "fewer-workers-for-memory",
                "Use fewer workers of the data loader",
                (down("PyTorch", "DataLoader(num_workers=)", "fewer", knob="loader workers"),),
                "Too few workers let the trainer wait for data.",
                (holds(LOADER_WORKERS),),
            ),
        ),
    ),
    Problem(
        "host-memory-full",
        "problem",
        "Host memory is nearly full",
        (below(HOST_ROOM, 0.1),),
        "Use less host memory: the system ends a process that passes the limit.",
        "The peak was in a checkpoint or a validation that does not come again",
        "rlprof show RUN memory",
        (),
        (
            Remedy(
                "host-memory",
                "Keep less in host memory",
                (
                    to("verl", f"{_FSDP}.optimizer_offload", "False", "False"),
                    down("PyTorch", "DataLoader(prefetch_factor=)"),
                ),
                "Offload to the host may be what makes the model fit.",
            ),
        ),
    ),
    Problem(
        "disk-wait",
        "problem",
        "Threads wait for a disk",
        (above(DISK_PRESSURE, 0.05),),
        "Read data and write checkpoints on a faster disk.",
        "The wait stays when this job is stopped",
        "rlprof show RUN device_counters",
        ("rank",),
        (
            Remedy(
                "faster-disk",
                "Use a local disk",
                (
                    to("Lightning", "Trainer(default_root_dir=)", "a local disk"),
                    to("verl", "trainer.default_local_dir", "a local disk"),
                ),
                "A local disk is lost with its machine: upload checkpoints.",
            ),
        ),
    ),
    Problem(
        "device-heat",
        "problem",
        "Heat lowers the clock of a device",
        (above(HEAT, 0.05), holds(HAS_ACCELERATOR)),
        "Check fans, air flow and dust: nvidia-smi -q -d PERFORMANCE,TEMPERATURE. Move the job to "
        "another machine meanwhile.",
        "Its steps take as long at full clock: the work is limited by memory or the host",
        "rlprof show RUN device_counters",
        ("rank", "device"),
    ),
    Problem(
        "device-slowdown",
        "problem",
        "Hardware slows a device down, because of heat or power",
        (above(SLOWDOWN, 0.05), holds(HAS_ACCELERATOR)),
        "Check cooling and power supply: nvidia-smi -q -d PERFORMANCE.",
        "Its steps take as long at full clock: the work is limited by memory or the host",
        "rlprof show RUN device_counters",
        ("rank", "device"),
    ),
    Problem(
        "device-power",
        "idea",
        "The power limit lowers the clock of a device",
        (above(POWER, 0.05), holds(HAS_ACCELERATOR)),
        "Compare its power limit with that of other machines: nvidia-smi -q -d POWER. Raise it if "
        "it was lowered.",
        "A device that computes at full load runs at this limit",
        "rlprof show RUN device_counters",
        ("rank", "device"),
        (
            Remedy(
                "power-limit",
                "Raise the power limit",
                (up("environment", "nvidia-smi -pl", "up to the board's limit"),),
                "More heat. Many data centers limit power on purpose.",
            ),
        ),
    ),
    Problem(
        "garbage-collection",
        "problem",
        "Garbage collection of Python pauses the ranks",
        (above(GARBAGE, 0.02),),
        "Call gc.freeze() after setup, and collect at the same step on all ranks.",
        "The pauses stay with gc.disable()",
        "rlprof show RUN ledger",
        (),
        (
            Remedy(
                "collect-together",
                "Collect garbage at the same step on all ranks",
                (
                    to("PyTorch", "gc.freeze", "after setup"),
                    to("PyTorch", "gc.disable", "and gc.collect(1) every 50 steps"),
                ),
                "Cycles with tensors keep their memory until the next collection.",
            ),
        ),
    ),
    Problem(
        "profiler-overhead",
        "problem",
        "Captures take much time",
        (above(PROFILER, 0.02),),
        "Capture fewer steps, one stage, or a lower level.",
        "The share stays with integrated.profile: false",
        "rlprof show RUN ledger",
        (),
        (
            Remedy(
                "smaller-captures",
                "Make captures smaller",
                (
                    down("rlprof", "steps", "fewer steps"),
                    to("rlprof", "integrated.stage", "one stage", "all"),
                    to("rlprof", "integrated.profile_level", "level_none or level0", "level0"),
                    down("verl", "global_profiler.steps", "fewer steps", "null"),
                ),
                "Fewer events: what is not captured is not seen.",
            ),
        ),
    ),
)
