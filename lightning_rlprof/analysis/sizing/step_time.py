"""Seconds of a step by roofline: memory and arithmetic, at efficiencies that others saw."""

from dataclasses import dataclass

from lightning_rlprof.analysis.models.flops import (
    decode,
    decode_cache_bytes,
    decode_weight_bytes,
    forward,
    prefill,
)
from lightning_rlprof.analysis.sizing.job import Job
from lightning_rlprof.analysis.sizing.memory import kv_bytes, rollout_phase, rollout_tp

KV_SHARE = 0.9
"""Of a device, with all that is on it, up to which the KV cache grows unless a share is given."""

_BANDWIDTH = (0.75, 0.35)
_PREFILL = (0.60, 0.25)
_TRAINING = (0.40, 0.20)
_SYNC = (50e9, 5e9)
"""Efficiencies from the best to the worst: decode, prefill, MFU, and bytes/s of a weight sync."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of a stage, and what limits it."""

    stage: str
    low: float
    high: float
    limit: str


def concurrent(job: Job) -> int:
    """Return how many sequences of full length fit the KV cache of one replica of the rollout."""
    tp = rollout_tp(job)
    one = kv_bytes(job, tp)
    free = (job.rollout_memory or KV_SHARE) * job.usable - rollout_phase(job).low + one
    return max(int(free / one), 0) if one else 1 << 20


def step_times(job: Job) -> list[StageTime]:
    """Return the stages of a step; the low end has responses of half the length.

    Needs ``batch``, and a known bandwidth of the device. Sequences beyond the KV cache wait.
    """
    assert job.batch is not None
    peak = job.device.tflops * 1e12
    found = []
    samples = job.batch * (job.group if job.generates else job.sequences)
    if job.generates and job.device.gb_s is not None:
        found.append(_generation(job, samples, peak, job.device.gb_s * 1e9))
    trained = peak * job.training_devices
    for stage, passes in _passes(job).items():
        low, high = (
            passes
            * samples
            * forward(job.model, [job.prompt + response], images=job.images).forward
            / (trained * mfu)
            for response, mfu in zip((job.response // 2, job.response), _TRAINING, strict=True)
        )
        found.append(StageTime(stage, low, high, "compute"))
    if job.generates:
        size = 2 * job.model.parameters
        found.append(StageTime("weight_sync", size / _SYNC[0], size / _SYNC[1], "link"))
    return found


def _passes(job: Job) -> dict[str, int]:
    """Return the stages that train or go forward, in forward passes."""
    if job.algorithm == "sft":
        return {"train": 3}
    if job.algorithm == "dpo":
        return {"reference_compute_log_prob": 1, "actor_update": 3}
    critic = {"critic_compute_values": 1, "critic_update": 3} if job.algorithm == "ppo" else {}
    reference = {"reference_compute_log_prob": 1}
    return {"actor_compute_log_prob": 1, **reference, **critic, "actor_update": 3}


def _weights_read(job: Job, tp: int, batch: int) -> float:
    """Return bytes of weights that a device reads for one token of each sequence.

    Expert parallelism divides the experts among replicas, which hit them with all their sequences.
    """
    ep = job.rollout_ep or tp
    dense = decode_weight_bytes(job.model, 0)
    experts = decode_weight_bytes(job.model, batch * ep / tp) - dense
    return dense / tp + experts / ep


def _generation(job: Job, samples: int, peak: float, bandwidth: float) -> StageTime:
    tp = rollout_tp(job)
    each = -(-samples * tp // job.rollout_ranks)  # of one replica
    batch = min(each, concurrent(job) or 1)
    waves = -(-each // batch)
    bounds, limit = [], "memory"
    for response, of_memory, of_peak in zip(
        (max(job.response // 2, 2), job.response), _BANDWIDTH, _PREFILL, strict=True
    ):
        weights = waves * response * _weights_read(job, tp, batch)
        cache = each * decode_cache_bytes(job.model, [job.prompt], [response])
        read = (weights + cache / tp) / bandwidth / of_memory
        compute = each * decode(job.model, [job.prompt], [response]).forward / peak / tp / of_peak
        once = prefill(job.model, [job.prompt], images=job.images).forward
        reading = -(-each // job.group) * once
        bounds.append(max(read, compute) + reading / peak / tp / of_peak)
        limit = "memory" if read > compute else "compute"
    return StageTime("actor_generate", bounds[0], bounds[1], limit)
