"""Problems of a run as a whole: what ended it, what makes its times untrue, ranks, machines."""

from lightning_rlprof.analysis.diagnosis import device_quantities as devices
from lightning_rlprof.analysis.diagnosis import machine_quantities as machines
from lightning_rlprof.analysis.diagnosis import sample_quantities as samples
from lightning_rlprof.analysis.diagnosis import step_quantities as steps
from lightning_rlprof.analysis.diagnosis.problem import distorts, ended, idea, problem, remedy

BALANCE = remedy(
    "length-balance: Give all ranks the same number of tokens",
    "Samples of one group may end on several ranks.",
    "verl: trainer.balance_batch = True (default True)",
    "MindSpeed-RL: rl_config.use_dp_batch_balance = True (default False)",
    when=(samples.TOKEN_IMBALANCE > 1.1,),
    saving="balance",
)
"""Of whatever makes ranks wait for one another."""

ENDED = (
    ended(
        "out-of-memory: A rank ran out of device memory",
        (samples.OUT_OF_MEMORY > 0,),
        "See what each stage keeps: rlprof show RUN memory_phases. Then use a smaller micro-batch "
        "or shorter responses; memory.level: snapshot records every allocation.",
        "It raises in the same stage with half of the batch",
        "rlprof show RUN memory_phases",
        remedy(
            "smaller-micro-batch: Recompute activations, and use smaller micro-batches",
            "Recomputing takes one more forward pass: a third more FLOPs.",
            "verl: actor_rollout_ref.model.enable_gradient_checkpointing = True",
            "verl: actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu ↓ halve it (default null)",
            "MindSpeed-RL: megatron_training.recompute_granularity = full",
            "TRL: GRPOConfig.gradient_checkpointing = True (default True)",
            "TRL: GRPOConfig.per_device_train_batch_size ↓ halve it (default 8)",
            "Lightning: FSDPStrategy(activation_checkpointing_policy=) = the layers",
        ),
        remedy(
            "fragmentation: Let torch's memory segments grow",
            "Sleep mode of some vLLM versions refuses expandable segments.",
            "environment: PYTORCH_CUDA_ALLOC_CONF = expandable_segments:True",
            "environment: PYTORCH_NPU_ALLOC_CONF = expandable_segments:True",
            when=(devices.HAS_ACCELERATOR.yes,),
        ),
        lead=("rank", "step", "stage"),
    ),
    ended(
        "hang: The run hung",
        (steps.HUNG_RANKS > 0,),
        "See which rank the others wait for, and the line at which it is: rlprof hang RUN",
        "It was in a compilation, a checkpoint or a validation that takes longer than hang_timeout",
        "rlprof hang RUN",
        lead=("step",),
    ),
)

DISTORTING = (
    distorts(
        "cpu-contention: Training threads wait for a CPU",
        (steps.CPU_WAIT_SHARE > steps.CPU_WAITS,),
        "Free CPUs first: all other times include this wait.",
        "The wait stays with fewer threads than CPUs and without other jobs",
        "rlprof show RUN device_counters",
        remedy(
            "own-threads: Use fewer threads",
            "Too few threads make work on the CPU slower.",
            "environment: OMP_NUM_THREADS ↓ CPUs per rank, less workers",
            "verl: actor_rollout_ref.rollout.agent.num_workers ↓ fewer (default 8)",
            "MindSpeed-RL: rl_config.num_cpus_for_local_task ↓ fewer CPUs (default 1)",
            when=(machines.OWN_CPU > 0.5,),
        ),
        remedy(
            "fewer-workers: Use fewer workers of the data loader",
            "Too few workers let the trainer wait for data.",
            "PyTorch: DataLoader(num_workers=) ↓ fewer",
            "TRL: GRPOConfig.dataloader_num_workers ↓ fewer (default 0)",
            when=(steps.LOADER_WORKERS.yes, machines.OWN_CPU > 0.2),
        ),
        remedy(
            "other-programs: Move the other programs off the machine, or reserve CPUs for this job",
            "Other jobs of the machine have fewer CPUs.",
            "environment: CPUs of this job = a cpuset, or an exclusive node",
            when=(machines.OTHER_CPU > 0.5,),
        ),
        remedy(
            "cpu-limit: Raise the CPU limit of the container",
            "Other containers of the machine have fewer CPUs.",
            "environment: CPU limit of the container ↑ raise or remove it",
            when=(machines.CPU_QUOTA > 0.05,),
        ),
    ),
    distorts(
        "cpu-quota: The CPU quota of the container is used up",
        (machines.CPU_QUOTA > 0.05, machines.NO_CPU_WAIT.yes),
        "Raise the CPU limit of the container, or use fewer threads: it stops all of them.",
        "The steps take as long with a higher limit",
        "rlprof show RUN device_counters",
        remedy(
            "cpu-quota-limit: Raise the CPU limit of the container",
            "Other containers of the machine have fewer CPUs.",
            "environment: CPU limit of the container ↑ raise or remove it",
        ),
    ),
    distorts(
        "lost-data: Data of this run is missing",
        (samples.LOST_DATA > 0,),
        "See which ranks are missing or lost lines: rlprof show RUN data_quality. Sums of the job "
        "are too low, and waiting for a missing rank has no cause.",
        "The missing ranks took part in no step",
        "rlprof show RUN data_quality",
        lead=("missing ranks", "ranks that lost lines"),
    ),
)

RANKS_AND_CHANGES = (
    problem(
        "straggler: A rank slows the others down",
        (steps.SLOW_RANKS > 0.02,),  # Rank 0 of a healthy job also logs, which takes up to 1%.
        "Check what only this rank does: data, logging, other load on its host. Then swap ranks.",
        "The slowdown moves with the work to the other rank",
        "rlprof stragglers RUN --json",
        remedy(
            "swap-ranks: Make this rank as fast as the others",
            "Swapping a node moves the straggler if the cause is its place in the rack.",
            "environment: node of the slow rank = another node",
            saving="straggler",
        ),
        BALANCE,
        lead=("rank", "one of ranks", "verdict"),
    ),
    problem(
        "slower-since: Steps became slower",
        (steps.LEVEL_CHANGES > 0.02,),
        "See what changed at that step: response lengths, other jobs on the machine, device "
        "clocks, a dataset shard.",
        "It is in the work: tokens or samples per step grew, and were not counted",
        "rlprof show RUN changes",
        lead=("since step", "times as long", "stage"),
    ),
    problem(
        "slower-over-time: Steps get slower over the run",
        (steps.TRENDS > 0.02,),
        "Look for what grows with every step: lists, caches, logs, memory, response lengths.",
        "It is in the work: tokens or samples per step grew, and were not counted",
        "rlprof show RUN changes",
        lead=("times as long", "stage"),
    ),
    problem(
        "outlier-step: A step took longer than its neighbors",
        (steps.OUTLIERS > 0.02,),
        "See what else ran in this step: a checkpoint, garbage collection, a retry, another job.",
        "A second run has no such step",
        "rlprof show RUN changes",
        lead=("step", "times as long", "stage"),
    ),
    problem(
        "memory-growth: Memory grows every step",
        (samples.GROWTH > 0.02,),
        "Find the stage with rlprof show RUN memory_phases. Then compare memory snapshots of two "
        "steps far apart (memory.level: snapshot).",
        "It stops in a run of twice as many steps, or batches get longer",
        "rlprof show RUN memory_phases",
        lead=("component", "rank", "added by"),
    ),
)

MACHINES = (
    problem(
        "memory-pressure: Memory of the host is short",
        (machines.MEMORY_PRESSURE > 0.05,),
        "Give the job more host memory, or use less of it: threads wait for pages.",
        "The pressure stays when this job is stopped: then another program takes the memory",
        "rlprof show RUN device_counters",
        remedy(
            "more-host-memory: Give the job more host memory",
            "Other jobs of the machine have less memory.",
            "environment: memory limit of the container ↑",
        ),
        remedy(
            "fewer-workers-for-memory: Use fewer workers of the data loader",
            "Too few workers let the trainer wait for data.",
            "PyTorch: DataLoader(num_workers=) ↓ fewer",
            when=(steps.LOADER_WORKERS.yes,),
        ),
        lead=("rank", "by"),
    ),
    problem(
        "host-memory-full: Host memory is nearly full",
        (samples.HOST_ROOM < 0.1,),
        "Use less host memory: the system ends a process that passes the limit.",
        "The peak was in a checkpoint or a validation that does not come again",
        "rlprof show RUN memory",
        remedy(
            "host-memory: Keep less in host memory",
            "Offload to the host may be what makes the model fit.",
            "verl: actor_rollout_ref.actor.fsdp_config.optimizer_offload = False (default False)",
            "PyTorch: DataLoader(prefetch_factor=) ↓",
        ),
    ),
    problem(
        "disk-wait: Threads wait for a disk",
        (machines.DISK_PRESSURE > 0.05,),
        "Read data and write checkpoints on a faster disk.",
        "The wait stays when this job is stopped",
        "rlprof show RUN device_counters",
        remedy(
            "faster-disk: Use a local disk",
            "A local disk is lost with its machine: upload checkpoints.",
            "Lightning: Trainer(default_root_dir=) = a local disk",
            "verl: trainer.default_local_dir = a local disk",
        ),
        lead=("rank",),
    ),
    problem(
        "device-heat: Heat lowers the clock of a device",
        (machines.HEAT > 0.05, devices.HAS_ACCELERATOR.yes),
        "Check fans, air flow and dust: nvidia-smi -q -d PERFORMANCE,TEMPERATURE. Move the job to "
        "another machine meanwhile.",
        "Its steps take as long at full clock: the work is limited by memory or the host",
        "rlprof show RUN device_counters",
        lead=("rank", "device"),
    ),
    problem(
        "device-slowdown: Hardware slows a device down, because of heat or power",
        (machines.SLOWDOWN > 0.05, devices.HAS_ACCELERATOR.yes),
        "Check cooling and power supply: nvidia-smi -q -d PERFORMANCE.",
        "Its steps take as long at full clock: the work is limited by memory or the host",
        "rlprof show RUN device_counters",
        lead=("rank", "device"),
    ),
    idea(
        "device-power: The power limit lowers the clock of a device",
        (machines.POWER > 0.05, devices.HAS_ACCELERATOR.yes),
        "Compare its power limit with that of other machines: nvidia-smi -q -d POWER. Raise it if "
        "it was lowered.",
        "A device that computes at full load runs at this limit",
        "rlprof show RUN device_counters",
        remedy(
            "power-limit: Raise the power limit",
            "More heat. Many data centers limit power on purpose.",
            "environment: nvidia-smi -pl ↑ up to the board's limit",
        ),
        lead=("rank", "device"),
    ),
    problem(
        "garbage-collection: Garbage collection of Python pauses the ranks",
        (steps.GARBAGE > 0.02,),
        "Call gc.freeze() after setup, and collect at the same step on all ranks.",
        "The pauses stay with gc.disable()",
        "rlprof show RUN ledger",
        remedy(
            "collect-together: Collect garbage at the same step on all ranks",
            "Cycles with tensors keep their memory until the next collection.",
            "PyTorch: gc.freeze = after setup",
            "PyTorch: gc.disable = and gc.collect(1) every 50 steps",
        ),
    ),
    problem(
        "profiler-overhead: Captures take much time",
        (steps.PROFILER > 0.02,),
        "Capture fewer steps, one stage, or a lower level.",
        "The share stays with integrated.profile: false",
        "rlprof show RUN ledger",
        remedy(
            "smaller-captures: Make captures smaller",
            "Fewer events: what is not captured is not seen.",
            "rlprof: steps ↓ fewer steps",
            "rlprof: integrated.stage = one stage (default all)",
            "rlprof: integrated.profile_level = level_none or level0 (default level0)",
            "verl: global_profiler.steps ↓ fewer steps (default null)",
        ),
    ),
)
