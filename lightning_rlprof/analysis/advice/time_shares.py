"""Quantities of time: shares of the step by category, stage or name, and ratios of stages."""

import numpy as np

from lightning_rlprof.analysis.advice.evidence import Evidence
from lightning_rlprof.analysis.advice.rule import Measured, Measurement, NoData, Quantity
from lightning_rlprof.analysis.findings.device_evidence import host_bound
from lightning_rlprof.analysis.findings.finding import (
    FEWEST_KERNELS,
    FEWEST_STEPS,
    KERNELS_LOST,
    NotChecked,
    share_interval,
)
from lightning_rlprof.analysis.findings.run_evidence import UNVERIFIED
from lightning_rlprof.analysis.ledger.accounts import OUTSIDE
from lightning_rlprof.analysis.steps.time_categories import NAMES, Category, category_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.records.stage_aliases import plain_names, standard_stage
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.interval_nesting import NONE, parents

CAPTURE_ALL = "Capture the same steps on all ranks with torch.profiler (ranks: all)"
CAPTURE = "Capture a few steps with torch.profiler, npu_profiler or nsys"

_WORK = (KINDS.index("stage"), KINDS.index("region"))
_MARK = "Mark it with stage('{}') or annotate('{}')"


def share_by_step(part: Float64s, whole: Float64s) -> Measurement:
    """Return a share with its interval, by a bootstrap over steps; no data if these are few."""
    if len(whole) < FEWEST_STEPS:
        why = f"{len(whole)} complete steps after warm-up; {FEWEST_STEPS} are needed"
        return NoData(why, "Record more steps")
    if not whole.sum():
        return NoData("The included steps have none of it", "Record more steps")
    return Measured(float(part.sum() / whole.sum()), *share_interval(part, whole))


def category_share(category: Category, text: str, name: str, how: str = "") -> Quantity:
    """Return the share of the step time that the ledger gives to a category of spans.

    Args:
        category: One that spans show.
        text: What the quantity is.
        name: A span's name that has this category, for the advice how to record it.
        how: How to record it, if not by marking it.
    """

    def measure(run: Evidence) -> Measurement:
        if category not in run.accounts.sources:
            how_to = how or _MARK.format(name, name)
            return NoData(f"No span of {category.text} was recorded", how_to)
        ns = run.category_ns
        return share_by_step(ns[:, category], ns.sum(axis=1))

    def covers(name: str) -> bool:
        return category_of(name) == category

    return Quantity(f"{text}, of the step time", "share", measure, covers)


def device_share(category: Category, text: str, how: str = CAPTURE) -> Quantity:
    """Return the share of a category in the time in which devices were profiled.

    Kernels that were lost hide what ran beside them: up to a fifth, unless launches show that none
    were. Below that the lower bound is zero.
    """

    def measure(run: Evidence) -> Measurement:
        source = run.accounts.sources.get(category)
        if source not in ("kernels", "both"):
            return NoData("No profiler recorded devices", how)
        if (problem := device_problem(run)) is not None:
            return problem
        ns = run.device_accounts.job_ns[:OUTSIDE].astype(np.float64)
        ns[:, Category.WARM_UP] = 0.0
        ns = ns[ns.any(axis=1)]
        own, whole = ns[:, category], ns.sum(axis=1)
        low, high = share_interval(own, whole)
        return unverified(run, Measured(float(own.sum() / whole.sum()), low, high))

    return Quantity(f"{text}, of the captured time", "share", measure)


def device_problem(run: Evidence) -> NoData | None:
    """Return why kernels do not show shares of time, None if they do."""
    fewest = min((len(lane.work.start_ns) for lane in run.devices.lanes), default=0)
    if not run.devices.lanes:
        return NoData("No profiler recorded devices", CAPTURE)
    if fewest < FEWEST_KERNELS:
        why = f"{fewest} kernels per device; {FEWEST_KERNELS} are needed"
        return NoData(why, "Capture whole steps")
    if run.launches is not None and run.launches.lossy:
        return NoData(KERNELS_LOST[:1].upper() + KERNELS_LOST[1:], "Capture fewer steps at a time")
    return None


def unverified(run: Evidence, found: Measured) -> Measured:
    """Return a share from kernels with a lower bound that lost kernels cannot raise."""
    if run.launches is None and found.low <= UNVERIFIED:
        return found._replace(low=0.0)
    return found


def _host_bound(run: Evidence) -> Measurement:
    found = host_bound(run)
    if found is None:
        return NoData("No profiler recorded devices", CAPTURE)
    if isinstance(found, NotChecked):
        return NoData(f"Host-bound idle {found.why}", "Capture whole steps")
    if run.launches is not None and run.launches.lossy:
        return NoData(KERNELS_LOST[:1].upper() + KERNELS_LOST[1:], "Capture fewer steps at a time")
    if not found.observed_ns:
        return NoData("All kernels ran in graph replays, where idle time is unknown", CAPTURE)
    return Measured(found.late_ns / found.observed_ns, found.low, found.high)


def stage_share(text: str, *stages: str) -> Quantity:
    """Return the share of the step time in stages, whatever a framework calls them."""

    def measure(run: Evidence) -> Measurement:
        rows = stage_rows(run, *stages)
        if not len(rows):
            return NoData(f"No stage {stages[0]} was recorded", _MARK.format(stages[0], stages[0]))
        return share_by_step(_exclusive(run, *stages), run.wall_ns)

    def covers(name: str) -> bool:
        return standard_stage(name) in stages

    return Quantity(f"{text}, of the step time", "share", measure, covers)


def _exclusive(run: Evidence, *stages: str) -> Float64s:
    """Return the time of stages by step, without the stages inside them: a rollout in an update."""
    spans = run.spans
    names = [standard_stage(name) in stages for name in spans.names]
    keep = np.array([*names, False], dtype=bool)[spans.name]
    rows = np.flatnonzero(keep & (spans.kind == KINDS.index("stage")))
    return run.by_step(rows, run.exclusive_ns[rows].astype(np.float64))


def stage_rows(run: Evidence, *stages: str) -> Int64s:
    """Return the spans of stages by their standard names, of training threads, outermost only."""
    spans = run.spans
    names = [standard_stage(name) in stages for name in spans.names]
    return _outermost(run, np.array([*names, False], dtype=bool)[spans.name])


def named_rows(run: Evidence, names: frozenset[str]) -> Int64s:
    """Return stages and regions with one of some names, outermost only; signs do not count."""
    spans = run.spans
    match = [any(part in names for part in plain_names(name)) for name in spans.names]
    return _outermost(run, np.array([*match, False], dtype=bool)[spans.name])


def _outermost(run: Evidence, keep: Mask) -> Int64s:
    """Return the kept stages and regions of the threads with steps, unless in another one."""
    spans = run.spans
    trains = np.unique(spans.thread[spans.rows(kind="step")])
    rows = np.flatnonzero(keep & np.isin(spans.kind, _WORK) & np.isin(spans.thread, trains))
    thread, start, end = spans.thread[rows], spans.start_ns[rows], spans.end_ns[rows]
    order = np.lexsort((rows, -end, start, thread))
    around = parents(thread[order], start[order], end[order])
    return np.sort(rows[order[around == NONE]])


def named_share(text: str, names: str, how: str) -> Quantity:
    """Return the share of the step time in spans with some names."""
    wanted = frozenset(names.split())

    def measure(run: Evidence) -> Measurement:
        rows = named_rows(run, wanted)
        if not len(rows):
            return NoData(f"No span of {text} was recorded", how)
        return share_by_step(run.by_step(rows, None), run.wall_ns)

    def covers(name: str) -> bool:
        return any(part in wanted for part in plain_names(name))

    return Quantity(f"{text}, of the step time", "share", measure, covers)


def stage_ratio(text: str, stages: tuple[str, ...], other: tuple[str, ...]) -> Quantity:
    """Return the time of some stages by that of others, per step."""

    def measure(run: Evidence) -> Measurement:
        rows, others = stage_rows(run, *stages), stage_rows(run, *other)
        for name, found in ((stages[0], rows), (other[0], others)):
            if not len(found):
                return NoData(f"No stage {name} was recorded", _MARK.format(name, name))
        return share_by_step(_exclusive(run, *stages), _exclusive(run, *other))

    return Quantity(text, "ratio", measure)


def step_counter_share(text: str, counter: str, how: str) -> Quantity:
    """Return a counter of nanoseconds per step by the step time; spans of all kinds count it once.

    The counter is that of a step: what it holds for one step is not a running total.
    """

    def measure(run: Evidence) -> Measurement:
        spans = run.spans
        rows, ns = spans.amounts(counter)
        own = spans.kind[rows] == KINDS.index("step")
        if not own.any():
            return NoData(f"No step has the counter {counter}", how)
        steps = rows[own]
        return share_by_step(run.by_step(steps, ns[own]), run.by_step(steps, None))

    return Quantity(f"{text}, of the step time", "share", measure)


def _profiler(run: Evidence) -> Measurement:
    """Return the time of opening and closing captures: none in a run of rlprof without any."""
    ours = any(head.config for head in run.spans.headers.values())
    if Category.PROFILER not in run.accounts.sources and ours:
        return Measured(0.0, 0.0, 0.0)
    return _CAPTURES.measure(run)


def _garbage(run: Evidence) -> Measurement:
    counted = _GC_COUNTER.measure(run)
    if isinstance(counted, Measured):
        return counted
    marked = _GC_SPANS.measure(run)
    return counted if isinstance(marked, NoData) else marked


def _samples_from_others(run: Evidence) -> Measurement:
    """Return whether data is waited for that other ranks generate."""
    spans = run.spans
    waits = [name for name in spans.names if _is_wait(name)]
    if not waits:
        return NoData("No wait for data was recorded", _MARK.format("data_fetch", "data_fetch"))
    codes = [spans.names.index(name) for name in waits]
    ns = [int(spans.duration_ns[spans.name == code].sum()) for code in codes]
    found = float(waits[int(np.argmax(ns))] not in _LOADS)
    return Measured(found, found, found)


def _is_wait(name: str) -> bool:
    return any(part in _DATA_NAMES for part in plain_names(name))


_DATA_NAMES = frozenset(NAMES[Category.DATA_WAIT].split())
_LOADS = frozenset(
    ("data_fetch", "data_loading", "dataloader_next", "enumerate_dataloader", "load_data")
)
_CHECKPOINTS = """
    save_checkpoint checkpoint checkpointing checkpoint_for_recover save_checkpoints save_ckpt
    save_hf_model modelcheckpoint_on_train_batch_end modelcheckpoint_on_train_epoch_end save
    save_model"""
_LOGGING = """
    log logging log_metrics log_dict log_step log_samples tracking tracker wandb_log log_rollout
    dump_rollout_generations write_logs logger"""

ROLLOUT = category_share(Category.ROLLOUT, "rollout", "actor_generate")
TAIL = category_share(
    Category.ROLLOUT_TAIL,
    "rollout tail",
    "rollout_tail",
    "Record a span per request: wrap each response in sample(), with a phase",
)
WEIGHT_SYNC = category_share(Category.WEIGHT_SYNC, "weight sync", "weight_sync")
REWARD = category_share(Category.REWARD, "rewards, tools and environments", "compute_reward")
DATA_WAIT = category_share(Category.DATA_WAIT, "waiting for data", "data_fetch")
COLLECTIVE_WAIT = category_share(Category.COLLECTIVE_WAIT, "waiting for other ranks", "barrier")
BACKPRESSURE = category_share(Category.BACKPRESSURE, "backpressure", "backpressure")
OFFLOAD = category_share(Category.OFFLOAD, "offload and onload", "offload")
BATCH_TRANSFER = category_share(Category.MEMCPY, "copies to the device", "batch_transfer")
_CAPTURES = category_share(Category.PROFILER, "opening and closing captures", "start_profile")
PROFILER = Quantity(_CAPTURES.text, "share", _profiler)
UNTRACED = category_share(Category.UNTRACED, "untraced", "my_stage")
EXPOSED_COMMUNICATION = device_share(Category.COMMUNICATION, "exposed communication", CAPTURE_ALL)
HOST_BOUND = Quantity("host-bound idle, of the captured time", "share", _host_bound)
UPDATE = stage_share("update", "actor_update")
LOG_PROBS = stage_share(
    "passes for log-probs", "actor_compute_log_prob", "reference_compute_log_prob"
)
CRITIC = stage_share("critic", "critic_update", "critic_compute_values")
LOG_PROBS_BY_UPDATE = stage_ratio(
    "log-prob passes by update time",
    ("actor_compute_log_prob", "reference_compute_log_prob"),
    ("actor_update",),
)
CRITIC_BY_ACTOR = stage_ratio(
    "critic update by actor update time", ("critic_update",), ("actor_update",)
)
CHECKPOINTS = named_share(
    "checkpoints", _CHECKPOINTS, _MARK.format("save_checkpoint", "save_checkpoint")
)
EVALUATION = named_share(
    "evaluation",
    "validation eval eval_rollout evaluate evaluation val val_step validate_time test testing",
    _MARK.format("validation", "validation"),
)
LOGGING = named_share("logging", _LOGGING, "Mark it with annotate('logging')")
CPU_WAIT = step_counter_share(
    "waiting for a CPU", "cpu_wait_ns", "Record on Linux: steps then have cpu_wait_ns"
)
_GC_COUNTER = step_counter_share(
    "garbage collection",
    "gc_pause_ns",
    "Record background_metrics: steps then have gc_pause_ns",
)
_GC_SPANS = category_share(Category.PYTHON_GC, "garbage collection", "gc_collect")
GARBAGE = Quantity(_GC_COUNTER.text, "share", _garbage)
SAMPLES_FROM_OTHERS = Quantity(
    "other ranks generate what is waited for", "yes/no", _samples_from_others
)
