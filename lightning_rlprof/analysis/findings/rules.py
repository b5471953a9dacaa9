"""Every rule of `findings` in one table: its title, its threshold, what to try, what rules it out.

A rule is one row here. `device_evidence` and `run_evidence` measure, `findings.CHECKS` lists how.
"""

from collections.abc import Mapping
from itertools import chain

from lightning_rlprof.analysis.findings.finding import Rule
from lightning_rlprof.analysis.steps.time_categories import Category

_UNPROFILED = "Unprofiled steps are faster by the same amount (profiler overhead)"

SHORT_GAPS = Rule(
    "device idle between launches",
    "Device idle between short kernels",
    # A trace of a device that never idles and lost a fifth of its events shows a fifth idle.
    0.2,
    "Use CUDA graphs, torch.compile or fused kernels for fewer launches. Or raise the micro-batch",
    f"{_UNPROFILED}. Or the share stays with a micro-batch of twice the size",
    "rlprof show RUN idle",
)
LONG_GAPS = SHORT_GAPS._replace(
    title="Device idle: long gaps before launches",
    suggestion="See what the host does in the longest gaps: .item(), blocking copies, Python code",
    ruled_out_if=f"{_UNPROFILED}. Or the host waits in these gaps for something else",
)
DOMINANT_KERNEL = Rule(
    "dominant kernel",
    "One kernel takes {share:.0%} of kernel time: {kernel}",
    0.4,
    "Profile its longest launch with Nsight Compute. For a matmul, check dtype and sizes in "
    "multiples of 64. Else fuse it with its neighbors",
    "It already reaches the device's peak FLOP/s or memory bandwidth",
    "rlprof show RUN kernels",
    idea=True,
)
SMALL_COLLECTIVES = Rule(
    "small collectives",
    "Small collectives run at low bandwidth: {what}",
    0.05,
    "Use larger buckets, or put several tensors into one call",
    "One call with all the bytes takes as long",
    "rlprof show RUN communication",
)
LOW_MFU = Rule(
    "training MFU",
    "Training MFU is low: {mfu:.0%} in {stages}",
    0.2,  # dense models reach 0.35 to 0.5
    "See rlprof show RUN breakdown and idle: devices idle, or compute slowly. Then try a larger "
    "micro-batch, packed sequences, BF16",
    "The counted FLOPs miss a part of the work, or the work is not in BF16",
    "rlprof show RUN throughput",
    reports_below=True,
    idea=True,
)
MEMORY_GROWTH = Rule(
    "memory growth",
    "Memory grows every step: {what}",
    0.02,  # growth over all steps, as a share of the peak
    "Find the stage with rlprof show RUN memory_phases. Then compare memory snapshots of two "
    "steps far apart (memory.level: snapshot)",
    "It stops in a run of twice as many steps, or batches get longer",
    "rlprof show RUN memory_phases",
)
OUT_OF_MEMORY = Rule(
    "out of memory",
    "Rank {rank} ran out of memory in step {step}, in or after {stage}",
    0.0,
    "See what each stage keeps: rlprof show RUN memory_phases. Then use a smaller micro-batch, "
    "shorter responses or more offload; memory.level: snapshot records every allocation",
    "It raises in the same stage with half of the batch",
    "rlprof show RUN memory_phases",
)
HANG = Rule(
    "hang",
    "The run hung in step {step}",
    0.0,
    "See which rank the others wait for, and the line at which it is: rlprof hang RUN",
    "It was in a compilation, a checkpoint or a validation that takes longer than hang_timeout",
    "rlprof hang RUN",
)
FATAL = (OUT_OF_MEMORY, HANG)
"""Rules for what ended a run: they come first."""

LEVEL_CHANGE = Rule(
    "steps that became slower",
    "Steps take {ratio:.2f}x as long since step {step} ({stage})",
    0.02,  # of the job
    "See what changed at that step: response lengths, other jobs on the machine, device clocks, a "
    "dataset shard. Count tokens in the stages, so that longer responses are accounted for",
    "It is in the work: tokens or samples per step grew, and were not counted",
    "rlprof show RUN changes",
)
TREND = LEVEL_CHANGE._replace(
    name="steps that get slower",
    title="Steps get slower over the run: {ratio:.2f}x ({stage})",
    suggestion="Look for what grows with every step: lists, caches, logs, memory, response lengths",
)
OUTLIER_STEP = Rule(
    "outlier steps",
    "Step {step} took {ratio:.1f}x as long as its neighbors ({stage})",
    0.02,
    "See what else ran in this step: a checkpoint, garbage collection, a retry, another job",
    "A second run has no such step",
    "rlprof show RUN changes",
)
CPU_CONTENTION = Rule(
    "CPU contention",
    "Training threads wait for a CPU",
    0.05,
    "Use fewer DataLoader workers and threads (OMP_NUM_THREADS), or move other jobs off the "
    "machine. All other times include this wait",
    "The wait stays with fewer threads than CPUs and without other jobs",
    "rlprof show RUN steps",
)
NEIGHBORS = CPU_CONTENTION._replace(
    title="Training threads wait for a CPU: other programs use {share:.0%} of the machine",
    suggestion="Move the other programs off the machine, or reserve CPUs for this job (cpuset, "
    "exclusive nodes)",
    ruled_out_if="The wait stays when the other programs are stopped",
    command="rlprof show RUN device_counters",
)
"""Reported instead if programs outside this job's container keep the CPUs busy."""

CPU_QUOTA = Rule(
    "CPU quota",
    "The CPU quota of the container is used up in {share:.0%} of its periods",
    0.05,
    "Raise the CPU limit of the container, or use fewer DataLoader workers and threads "
    "(OMP_NUM_THREADS)",
    "The steps take as long with a higher limit",
    "rlprof show RUN device_counters",
)
"""Reported instead of `CPU_CONTENTION`, too, if there is a quota and it is used up."""

CPU_RULES = (CPU_CONTENTION, NEIGHBORS, CPU_QUOTA)

MEMORY_PRESSURE = Rule(
    "memory pressure",
    "Memory of the host is short: {what}",
    0.05,  # of the time
    "Use fewer DataLoader workers, pin less memory, offload less to the host, or raise the "
    "memory limit of the container",
    "The pressure stays when this job is stopped: then another program takes the memory",
    "rlprof show RUN device_counters",
)
HEAT = Rule(
    "GPU throttling",
    "The GPU of {who} is throttled by heat: its clock is {drop:.0%} lower in {share:.0%} of the "
    "time",
    0.05,  # of the clock cycles
    "Check fans, air flow and dust of that machine: nvidia-smi -q -d PERFORMANCE,TEMPERATURE. "
    "Move the job to another one meanwhile",
    "Its steps take as long at full clock: the work is limited by memory or the host",
    "rlprof show RUN device_counters",
)
POWER = HEAT._replace(
    title="The GPU of {who} is throttled by its power limit: its clock is {drop:.0%} lower in "
    "{share:.0%} of the time",
    suggestion="Compare its power limit with that of other machines: nvidia-smi -q -d POWER. "
    "Raise it if it was lowered",
    idea=True,  # a GPU that computes at full load runs at this limit
)
SLOWDOWN = HEAT._replace(
    title="The GPU of {who} is slowed down by hardware, because of heat or power: its clock is "
    "{drop:.0%} lower in {share:.0%} of the time",
)
STRAGGLER = Rule(
    "straggler",
    "{who} is a straggler{where} ({verdict})",
    0.02,  # of the job, lost by the peers: rank 0 of a healthy job logs, which is up to 1%
    "Check what only this rank does: data, logging, other load on its host. Then swap ranks",
    "The slowdown moves with the work to the other rank",
    "rlprof stragglers RUN --json",
)


# Title, threshold, suggestion, and what rules it out.
_SHARES: dict[Category, tuple[str, float, str, str]] = {
    Category.ROLLOUT: (
        "Rollout takes most of the time",
        0.5,
        "Measure a step with a larger batch per engine, a KV cache that fits, or speculative "
        "decoding. Compare tokens/s with rlprof compare",
        "Rollout tokens/s do not rise, or the rest of the step grows by as much",
    ),
    Category.ROLLOUT_TAIL: (
        "Rollout long tail: ranks wait for the last responses",
        0.1,
        "Cap the response length, use partial rollouts, or sample more prompts than needed",
        "The tail is as long with capped lengths: then requests start late or an engine is slow",
    ),
    Category.DATA_WAIT: (
        "Trainer waits for data",
        0.05,
        "Prefetch the next batch, use more DataLoader workers, or start the rollout earlier",
        "The wait stays with a batch that is already in memory",
    ),
    Category.BACKPRESSURE: (
        "Rollout workers are blocked by the trainer",
        0.05,
        "Allow more staleness, or move ranks from rollout to training",
        "The buffer is not full while they wait",
    ),
    Category.COLLECTIVE_WAIT: (
        "Ranks wait for the slowest one",
        0.05,
        "Find the straggler with rlprof stragglers RUN. Balance the tokens of the ranks",
        "The wait stays when every rank gets the same batch",
    ),
    Category.COMMUNICATION: (
        "Communication is not overlapped",
        0.1,
        "Overlap it: larger buckets, gradient reduction during backward, fewer gathers",
        "rlprof show RUN overlap shows that it overlaps, and the links are at their limit",
    ),
    Category.HOST_IDLE: (
        "Host-bound: device waits for kernel launches",
        0.1,
        "See rlprof show RUN idle and launches. Use torch.compile, CUDA graphs, or a larger "
        "micro-batch",
        "The share stays with a micro-batch of twice the size",
    ),
    Category.LAUNCH_LATENCY: (
        "Device idle: launches of short kernels take their time",
        0.2,
        "Use CUDA graphs, torch.compile or fused kernels for fewer launches",
        f"{_UNPROFILED}",
    ),
    Category.UNATTRIBUTED_IDLE: (
        "Device idle for an unknown cause",
        0.25,  # lost kernels leave a fifth idle, see SHORT_GAPS
        "See rlprof show RUN idle. Record launches (profile_with_cpu: true), then look at what the "
        "host and other streams do in the longest gaps",
        "The device waits for another stream or another process on purpose",
    ),
    Category.MEMCPY: (
        "Host/device copies are not overlapped",
        0.05,
        "Pin the memory, copy with non_blocking=True, and keep data on the device between stages",
        "The copies take as long from pinned memory",
    ),
    Category.WEIGHT_SYNC: (
        "Weight sync is slow",
        0.05,
        "Use larger buckets, avoid copies through the host, or update while the engine drains",
        "A model of half the size takes as long: then it is a fixed pause",
    ),
    Category.REWARD: (
        "Ranks wait for rewards, tools or environments",
        0.15,
        "Score samples in parallel as they arrive, not as one batch at the end",
        "The rewards of one sample take as long as those of the batch",
    ),
    Category.OFFLOAD: (
        "Offload/onload is expensive",
        0.05,
        "Keep more on the device, offload only the optimizer, or use separate devices for rollout",
        "Training and rollout do not fit into memory together",
    ),
    Category.EVALUATION: (
        "Checkpoints and evaluation take a large share",
        0.1,
        "Do them less often, or write checkpoints asynchronously",
        "You need this many checkpoints and evaluations",
    ),
    Category.PYTHON_GC: (
        "Python GC pauses the ranks",
        0.02,
        "Call gc.freeze() after setup, and collect at the same step on all ranks",
        "The pauses stay with gc.disable()",
    ),
    Category.PROFILER: (
        "Profiler overhead is high",
        0.02,
        "Capture fewer steps, one stage, or a lower level",
        "The share stays with integrated.profile: false",
    ),
    Category.UNTRACED: (
        "A large share of the time is untraced",
        0.2,
        "Mark the code between stages with stage(…) or wrap:. See rlprof show RUN gaps",
        "The untraced time belongs to crashed ranks: see rlprof show RUN data_quality",
    ),
}

_IDEAS = (Category.ROLLOUT, Category.EVALUATION, Category.UNTRACED)

_COMMANDS = {
    Category.LAUNCH_LATENCY: "rlprof show RUN idle",
    Category.UNATTRIBUTED_IDLE: "rlprof show RUN idle",
}

CATEGORY_RULES: Mapping[Category, Rule] = {
    category: Rule(
        category.text,
        *texts,
        _COMMANDS.get(category, "rlprof show RUN ledger --by step"),
        idea=category in _IDEAS,
    )
    for category, texts in _SHARES.items()
}
"""Rules on categories of the ledger, one per category but compute, custom stage and warm-up."""

STARVED = CATEGORY_RULES[Category.DATA_WAIT]._replace(
    title="Trainer waits for samples",
    suggestion="Move ranks from training to rollout, generate faster (larger batches per engine, "
    "shorter responses), or let rollouts run further ahead. rlprof whatif RUN predicts the first",
    ruled_out_if="Complete samples are in the buffer while the trainer waits",
    command="rlprof show RUN roles",
)
"""Reported instead if other ranks generate what the trainer waits for."""

UNMATCHED = CATEGORY_RULES[Category.COMMUNICATION]._replace(
    title="Collectives are not overlapped with compute; transfer or waiting is unknown",
    suggestion="Capture the same steps on all ranks (ranks: all): then the ledger divides transfer "
    "and waiting. Overlap hides both: larger buckets, gradient reduction during backward",
    command="rlprof show RUN overlap",
)
"""Reported instead if other ranks' calls of the same collectives were not recorded."""


def finding_id(rule: Rule) -> str:
    """Return the name of a rule as one word, as `rlprof explain` takes it.

    Example::

        >>> finding_id(LOW_MFU), finding_id(CATEGORY_RULES[Category.REWARD])
        ('training-mfu', 'reward-tool-env')
    """
    return "-".join(rule.name.lower().replace("/", " ").replace("-", " ").split())


def rules_by_id() -> dict[str, list[Rule]]:
    """Return all rules by id; several have one id if only their evidence differs."""
    single = (
        *(SHORT_GAPS, LONG_GAPS, DOMINANT_KERNEL, SMALL_COLLECTIVES, LOW_MFU, MEMORY_GROWTH),
        *(LEVEL_CHANGE, TREND, OUTLIER_STEP, *CPU_RULES, MEMORY_PRESSURE, HEAT, POWER),
        *(SLOWDOWN, STRAGGLER, *FATAL),
    )
    found: dict[str, list[Rule]] = {}
    for rule in chain(single, CATEGORY_RULES.values(), (STARVED, UNMATCHED)):
        found.setdefault(finding_id(rule), []).append(rule)
    return found
