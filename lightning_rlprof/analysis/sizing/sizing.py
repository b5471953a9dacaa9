"""`size`: whether a training fits, with how much to spare, and what to change if not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lightning_rlprof.analysis.sizing.attainable import (
    BEST,
    COMPUTE,
    PIECES,
    WORST,
    Pass,
    Refit,
    Rollout,
    Work,
)
from lightning_rlprof.analysis.sizing.job import Job
from lightning_rlprof.analysis.sizing.memory import (
    GB,
    Phase,
    forward_phase,
    host_bytes,
    kv_bytes,
    rollout_phase,
    rollout_tp,
    update_phase,
)
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

Verdict = Literal["fits", "close", "does not fit"]
"""``close``: the low end of the range fits, and the high end does not."""

_ORDER: tuple[Verdict, ...] = ("fits", "close", "does not fit")
_MEMORY = (
    *columns_of("text", "phase", "part"),
    *columns_of("number", "low GB", "high GB", unit="GB"),
    Column("verdict", "text"),
)
_TIMES = (
    Column("stage", "text"),
    *columns_of("number", "low s", "high s", unit="s"),
    Column("limit", "text"),
)
_CHANGES = (
    *columns_of("text", "change", "verdict"),
    Column("GB to spare", "number", "GB"),
)
_SPARE = "GB to spare: at least. A number below 0 is what may be missing."
_ASSUMED = (
    "Per device. States are within 2%, activations from -10% to +30%, logits 6 to 16 bytes per "
    "token and vocabulary entry, 2 to 7 without backward. Not included: other processes, datasets."
)
_TIMES_ASSUMED = (
    "Low: everything as good as healthy jobs show it; high: everything as bad. Decode at "
    f"{PIECES[BEST]:.0%} to {PIECES[WORST]:.0%} of bandwidth, training at {COMPUTE[BEST]:.0%} to "
    f"{COMPUTE[WORST]:.0%} of peak, and what launches, links and hosts add. Waits for rewards, "
    "tools and data are not included."
)
_HALF = " Low: mean responses of half the length; pass --mean-length N for those of your job."

KV_SHARE = 0.9
"""Of a device, with all that is on it, up to which the KV cache grows unless a share is given."""


@dataclass(frozen=True)
class Sizing:
    """What `size` found.

    Attributes:
        job: What was asked.
        verdict: Of the phase with the least memory to spare.
        phases: What is on a device.
    """

    job: Job
    verdict: Verdict
    phases: tuple[Phase, ...]

    @property
    def spare(self) -> tuple[float, float]:
        """Bytes to spare in the fullest phase, from and to; below 0 they are missing."""
        limits = [(phase, available(self.job, phase)) for phase in self.phases]
        return (
            min(limit - phase.high for phase, limit in limits),
            min(limit - phase.low for phase, limit in limits),
        )

    def summary(self) -> str:
        """Return one line for people."""
        low, high = (each / GB for each in self.spare)
        mark = "~" if "memory_gb" in self.job.device.unconfirmed else ""
        have = f"{mark}{self.job.device.usable / GB:.1f} GB of {self.job.device.label}"
        if self.verdict == "does not fit":
            return f"Does not fit: {-high:.1f} to {-low:.1f} GB more than the {have}."
        if self.verdict == "close":
            return f"Close: from {-low:.1f} GB too much to {high:.1f} GB to spare of the {have}."
        return f"Fits: {low:.1f} to {high:.1f} GB to spare of the {have}."

    def _rollout(self) -> str:
        """Return how the rollout is divided, and how many sequences it has room for."""
        job, number = self.job, min(concurrent(self.job), 1 << 20)
        wide = f", expert parallelism {job.rollout_ep}" if job.rollout_ep else ""
        return (
            f"Rollout with tensor parallelism {rollout_tp(job)}{wide} and "
            f"{job.rollout_memory or KV_SHARE:.0%} of the device: the KV cache of a replica has "
            f"room for {number:,} sequence{'s' * (number != 1)} of {job.length:,} tokens."
        )

    def memory(self) -> Table:
        """Return bytes by phase and part, with the sum and the verdict of each phase."""
        rows: list[tuple[Cell, ...]] = []
        for phase in self.phases:
            parts = [(phase.name, p.name, p.low / GB, p.high / GB, None) for p in phase.parts]
            total = (phase.name, "total", phase.low / GB, phase.high / GB)
            rows += [*parts, (*total, judge(phase, available(self.job, phase)))]
        notes = [_ASSUMED]
        if self.job.model.vision:
            notes.append("Not included: activations of the vision tower.")
        if self.job.generates:
            notes.append(self._rollout())
        if host := host_bytes(self.job):
            notes.append(
                f"Host memory of a node with 8 devices: {host / GB:,.0f} GB, up to twice that if "
                "pinned."
            )
        return Table("sizing", _MEMORY, rows, " ".join(notes))

    def times(self) -> Table:
        """Return seconds by stage, and of the step."""
        if self.job.batch is None:
            return Table("step_time", _TIMES, abstained="No batch: pass --batch N (prompts).")
        if not self.job.device.tflops:
            how = "Pass it: --devices 8x48GB@180TFLOPS@1.8TB/s."
            return Table("step_time", _TIMES, abstained=f"The device's peak is unknown. {how}")
        works = step_work(self.job)
        ranges = [work.range() for work in works.values()]
        rows: list[tuple[Cell, ...]] = [
            (stage, *own, work.limit)
            for (stage, work), own in zip(works.items(), ranges, strict=True)
        ]
        low, high = (sum(own[end] for own in ranges) for end in (0, 1))
        rows.append(("step", low, high, None))
        note = _TIMES_ASSUMED + (_HALF if self.job.generates and not self.job.mean else "")
        note += "" if self.job.device.gb_s else " Without generation: the bandwidth is unknown."
        return Table("step_time", _TIMES, rows, note)

    def changes(self) -> Table:
        """Return what to change, the cheapest first, and what follows from it; only if needed."""
        rows: list[tuple[Cell, ...]] = []
        if self.verdict != "fits":
            for text, job in _candidates(self.job):
                other = size(job)
                if job.devices > self.job.devices and any(row[1] == "fits" for row in rows):
                    continue  # A cheaper change already fits.
                better = _ORDER.index(other.verdict) < _ORDER.index(self.verdict)
                if better or other.spare[0] > self.spare[0] + 0.02 * self.job.device.usable:
                    rows.append((text, other.verdict, other.spare[0] / GB))
        none = "Nothing to change: it fits." if self.verdict == "fits" else "Nothing helps."
        if not rows:
            return Table("changes", _CHANGES, abstained=none)
        return Table("changes", _CHANGES, rows, _SPARE)


def available(job: Job, phase: Phase) -> float:
    """Return bytes of a device that a phase may use: an engine has a limit of its own."""
    limit = job.rollout_memory if phase.name == "rollout" else None
    return job.device.usable * (limit or 1)


def judge(phase: Phase, usable: float) -> Verdict:
    """Return whether a phase fits a device's memory."""
    if phase.high <= usable:
        return "fits"
    return "close" if phase.low <= usable else "does not fit"


def size(job: Job) -> Sizing:
    """Return whether a training fits, from its model, devices and lengths. Nothing is run.

    Amounts are ranges: what no formula shows, such as the code path of the logits, makes them wide.
    """
    phases = [rollout_phase(job)] if job.generates else []
    phases += [forward_phase(job)] if job.algorithm != "sft" else []
    phases.append(update_phase(job))
    verdicts = [judge(phase, available(job, phase)) for phase in phases]
    return Sizing(job, max(verdicts, key=_ORDER.index), tuple(phases))


def _candidates(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield changes of a job that are possible, those without other machines first."""
    experts = bool(job.model.expert_parameters)
    least, is_megatron = job.sequences * job.length, job.shard == "megatron"
    can_split = max(job.tokens or 0, job.forward_tokens or 0) > least
    what = "one sequence" if job.sequences == 1 else "one pair"
    share, tp, twice = KV_SHARE, 2 * (job.rollout_tp or 0), 2 * job.devices
    tries: list[tuple[bool, str, Mapping[str, object]]] = [
        (can_split, f"tokens per micro-batch: {what}", {"tokens": None, "forward_tokens": None}),
        (not job.checkpointing, "gradient checkpointing", {"checkpointing": True}),
        (job.offload < 1, "offload the optimizer, and states during rollout", {"offload": 1.0}),
        (job.shard in ("zero1", "zero2"), "shard zero3", {"shard": "zero3"}),
        ((job.rollout_memory or 1) < share, f"rollout memory {share}", {"rollout_memory": share}),
        (tp > 0, f"rollout tp {tp}", {"rollout_tp": tp}),
        (True, f"sequence parallelism, cp {2 * job.cp}", {"cp": 2 * job.cp}),
        (is_megatron, f"tp {2 * job.tp}", {"tp": 2 * job.tp}),
        (is_megatron, f"pp {2 * job.pp}", {"pp": 2 * job.pp}),
        (is_megatron and experts, f"ep {2 * job.ep}", {"ep": 2 * job.ep}),
        (not job.lora, "LoRA of rank 32", {"lora": 32}),
        *((True, f"{job.devices * n} devices", {"devices": job.devices * n}) for n in (2, 4, 8)),
        (job.offload < 1, f"{twice} devices and offload", {"offload": 1.0, "devices": twice}),
    ]
    for is_open, text, changes in tries:
        try:
            if is_open:
                yield text, job.changed(**changes)
        except RlprofError:  # It does not divide the devices.
            continue


def concurrent(job: Job) -> int:
    """Return how many sequences of full length fit the KV cache of one replica of the rollout."""
    tp = rollout_tp(job)
    one = kv_bytes(job, tp)
    free = (job.rollout_memory or KV_SHARE) * job.device.usable - rollout_phase(job).low + one
    return max(int(free / one), 0) if one else 1 << 20


def step_work(job: Job) -> dict[str, Work]:
    """Return the stages of a step; needs ``batch``, and for generation the device's bandwidth.

    At best, mean responses have half of the longest length unless the job says how long they are.
    """
    assert job.batch is not None
    found: dict[str, Work] = {}
    samples = job.batch * (job.group if job.generates else job.sequences)
    least = job.mean or (max(job.response // 2, 1) if job.generates else job.response)
    most = job.mean or job.response
    if job.generates and job.device.gb_s is not None:
        room, tp = concurrent(job) * job.length, rollout_tp(job)
        seqs = (job.max_num_seqs,) * 2 if job.max_num_seqs else Rollout.max_num_seqs
        found["actor_generate"] = Rollout(
            *(job.model, job.device, job.rollout_ranks, samples, job.prompt),
            *((least, most), (job.response, job.response), job.group, (tp, tp)),
            *(job.rollout_ep or 0, (job.eager, job.eager), seqs),
            kv_tokens=(room, room),
        )
    sharded, moves = job.shard in ("fsdp", "zero3"), int(job.offload > 0)
    for stage, backward in _passes(job).items():
        micro = job.tokens if backward else job.forward_tokens or job.tokens
        from_host = stage == "reference_compute_log_prob" and sharded and job.offload > 0
        found[stage] = Pass(
            job.model.critic() if stage.startswith("critic") else job.model,
            *(job.device, job.training_devices, samples),
            *((job.prompt + least, job.prompt + most), backward),
            *(job.tp, job.pp, job.cp, job.ep),
            lora=job.lora > 0,
            micro_tokens=(micro, micro) if micro else Pass.micro_tokens,
            recompute=(job.checkpointing, job.checkpointing),
            sharded=(sharded, sharded),
            offload=(moves, moves),
            host_adam=(False, job.offload > 0),
            streamed=(False, from_host),
        )
    if job.generates:
        refit = Refit(job.model, job.device, job.rollout_ranks)
        found["weight_sync"] = refit if job.rollout_devices else replace(refit, path=("ipc", "ipc"))
    return found


def _passes(job: Job) -> dict[str, bool]:
    """Return the stages that train or go forward, and whether they train."""
    if job.algorithm == "sft":
        return {"train": True}
    if job.algorithm == "dpo":
        return {"reference_compute_log_prob": False, "actor_update": True}
    critic = {"critic_compute_values": False, "critic_update": True}
    return {
        "actor_compute_log_prob": False,
        "reference_compute_log_prob": False,
        **(critic if job.algorithm == "ppo" else {}),
        "actor_update": True,
    }
