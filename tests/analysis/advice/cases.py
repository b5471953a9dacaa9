"""Three runs for each rule of advice: it is given, it is contradicted, it is undecided."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_rlprof.records.histograms import bin_name, bin_of
from lightning_rlprof.records.notes import Code
from tests.builders.advised import Fact, Work


class Case(NamedTuple):
    """The runs of one rule."""

    given: Fact
    not_given: Fact
    undecided: Fact


NPU = "Ascend910B2"
HALF: Mapping[str, float] = {"actor_generate": 0.6, "actor_update": 0.4}
ROLLS: Mapping[str, float] = {"actor_generate": 0.3, "actor_update": 0.7}
LITTLE: Mapping[str, float] = {"actor_generate": 0.1, "actor_update": 0.9}
NOTHING = Fact(spans={"my_stage": 1.0})


def share(name: str, much: float, little: float, **more: object) -> Case:
    """Return runs in which a span takes much, little, or is not there."""
    runs = [
        Fact(spans={name: part, "actor_update": 1 - part}, **more)  # type: ignore[arg-type]
        for part in (much, little)
    ]
    return Case(*runs, Fact(spans={"actor_update": 1.0}, **more))  # type: ignore[arg-type]


def memory(stage: str, part: float, spans: Mapping[str, float] = HALF, **more: object) -> Fact:
    """Return a run in which a stage uses such a part of the memory at its peak."""
    return Fact(spans=spans, memory={stage: (part - 0.05, 0.05, part)}, **more)  # type: ignore[arg-type]


def counted(stage: str, spans: Mapping[str, float] = HALF, /, **counters: float) -> Fact:
    """Return a run in which a stage counts the same in each step."""
    return Fact(spans=spans, counters={stage: counters})


def samples(*fates: tuple[str, int], tokens: int = 100, **counters: float) -> Fact:
    """Return a run with so many samples of each fate in each step."""
    own = {"tokens": tokens, **counters}
    return Fact(spans=HALF, samples=[(fate, own) for fate, many in fates for _ in range(many)])


def lengths(*values: float) -> dict[str, float]:
    """Return counters of a histogram of lengths."""
    found: dict[str, float] = {}
    for value in values:
        name = bin_name("lengths", bin_of(value))
        found[name] = found.get(name, 0) + 1
    return found


def device(*work: Work, spans: Mapping[str, float] = HALF, **more: object) -> Fact:
    """Return a run whose device was recorded."""
    return Fact(spans=spans, work=work, **more)  # type: ignore[arg-type]


def talk(name: str, much: float = 0.3, **more: object) -> Fact:
    """Return a run whose device communicates in such a part of each step, exposed."""
    nccl = Work(f"ncclDevKernel_{name}", 0.0, much, stream=9)
    return device(nccl, Work("gemm", much, 1.0), **more)


def tokens_by_rank(*tokens: float) -> Fact:
    """Return a run whose ranks count so many tokens in their update."""
    return Fact(
        spans=HALF,
        ranks=len(tokens),
        counters={"actor_update": lambda rank, step: {"tokens": tokens[rank]}},
    )


def background(**metrics: float) -> Fact:
    """Return a run with these metrics of the background."""
    return Fact(spans=HALF, background=metrics)


def asynchronous(spans: Mapping[str, float], peers: Mapping[str, float]) -> Fact:
    """Return a run in which a rank of its own generates."""
    return Fact(spans=spans, peers=peers)


def staled(behind: int) -> Fact:
    """Return a run whose samples train so many versions after their generation."""
    return samples(("trained", 4), version=3, trainer_version=3 + behind)


def prompted(per_prompt: int, hits: float) -> Fact:
    """Return a run with so many responses per prompt, and hits of the prefix cache."""
    own: Sequence[tuple[str, dict[str, float]]] = [
        ("trained", {"tokens": 9, "prompt": at // per_prompt}) for at in range(8)
    ]
    counters = {"cached_prompt_tokens": 1_000 * hits, "prompt_tokens": 1_000}
    return Fact(spans=HALF, samples=own, counters={"actor_generate": counters})


FULL = {"actor_update": (0.9, 0.05, 0.95)}
CRITIC = {"actor_update": 0.3, "critic_update": 0.5}
FAST_CRITIC = {"actor_update": 0.5, "critic_update": 0.3}
PASSES = {"actor_compute_log_prob": 0.3, "actor_update": 0.4}
QUICK_PASSES = {"actor_compute_log_prob": 0.1, "actor_update": 0.6}
COPIES = {"offload": 0.2, "actor_update": 0.8}
GRADIENTS = Work("ncclDevKernel_AllReduce_Sum_bf16", 0.0, 0.3, stream=9)
SYNC = {"weight_sync": 0.2, "actor_update": 0.8}
TWICE = {"backward": 0.1, "optimizer_step": 0.1, "backward 2": 0.1}


def syncing(size: float, part: float = 0.2) -> Fact:
    """Return a run whose weight syncs move so many bytes at a time."""
    spans = {"weight_sync": part, "actor_update": 1 - part}
    return Fact(spans=spans, counters={"weight_sync": {"bytes": size}})


def reduced(size: int | None, much: float = 0.3) -> Fact:
    """Return a run whose device reduces gradients of such a size."""
    listed = None if size is None else ("all_reduce", size)
    own = [Work("ncclDevKernel_AllReduce", 0.0, much, stream=9), Work("gemm", much, 1.0)]
    return device(*(own if much else [Work()]), collectives=listed)


def accumulating(backwards: int, much: float = 0.3) -> Fact:
    """Return a run with so many backward passes per optimizer step."""
    names = {f"backward#{at}": 0.1 for at in range(backwards)} | {"optimizer_step": 0.1}
    nccl = Work("ncclDevKernel_AllReduce", 0.0, much, stream=9)
    return Fact(spans=names, regions=[*names], work=[nccl, Work("gemm", much, 1.0)])


def clocks(mhz: float, busy: float = 99.0) -> dict[str, float]:
    return {"device_clock_mhz": mhz, "device_max_clock_mhz": 1980, "device_busy_percent": busy}


CASES: dict[str, Case] = {
    "engine-statistics": Case(
        Fact(spans=HALF, versions={"vllm": "0.11.0"}),
        counted("actor_generate", num_preempted=0),
        Fact(spans=HALF),
    ),
    "rollout-memory-fraction": Case(
        memory("actor_generate", 0.5), memory("actor_generate", 0.9), Fact(spans=HALF)
    ),
    "rollout-batching": Case(
        counted("actor_generate", kv_cache_usage=0.2),
        counted("actor_generate", kv_cache_usage=0.9),
        Fact(spans=HALF),
    ),
    "kv-preemptions": Case(
        counted("actor_generate", num_preempted=3),
        counted("actor_generate", num_preempted=0),
        Fact(spans=HALF),
    ),
    "rollout-tensor-parallel": Case(
        talk("AllReduce", memory={"actor_generate": (0.3, 0.1, 0.4)}),
        talk("AllReduce", 0.02, memory={"actor_generate": (0.3, 0.1, 0.4)}),
        talk("AllReduce"),
    ),
    "rollout-graph-capture": Case(
        device(Work(busy=0.5)), device(Work(busy=0.5, graph=True)), Fact(spans=HALF)
    ),
    "graph-memory": Case(
        device(Work(graph=True), memory=FULL),
        device(Work(), memory=FULL),
        Fact(spans=HALF, memory=FULL),
    ),
    "chunked-prefill": Case(
        Fact(spans=HALF, samples=[("trained", {})] * 4, first_token=0.6),
        Fact(spans=HALF, samples=[("trained", {})] * 4, first_token=0.1),
        samples(("trained", 4)),
    ),
    "prefix-cache": Case(prompted(4, 0.1), prompted(4, 0.9), samples(("trained", 4))),
    "clipped-responses": Case(
        samples(("truncated", 1), ("trained", 3)),
        Fact(
            spans=HALF,
            samples=[("trained", {"tokens": 99})] * 4,
            counters={"actor_generate": {"response_limit": 100}},
        ),
        samples(("trained", 4)),
    ),
    "clipped-prompts": Case(
        counted("actor_generate", truncated_prompts=2, samples=10),
        counted("actor_generate", truncated_prompts=0, samples=10),
        counted("actor_generate", samples=10),
    ),
    "rollout-tail": Case(
        Fact(spans=ROLLS, requests=[0.2] * 9 + [1.0]),
        Fact(spans=ROLLS, requests=[0.9, 0.95] * 4 + [1.0]),
        Fact(spans=ROLLS),
    ),
    "rollout-overlap": Case(
        Fact(spans=HALF),
        asynchronous({"actor_update": 1.0}, {"actor_generate": 1.0}),
        Fact(spans={"actor_generate": 0.6}),
    ),
    "more-rollout-devices": Case(
        asynchronous({"wait_for_samples": 0.5, "actor_update": 0.5}, {"actor_generate": 1.0}),
        share("data_fetch", 0.3, 0.1).given,
        Fact(spans=HALF),
    ),
    "more-training-devices": share("backpressure", 0.3, 0.01),
    "discarded-samples": Case(
        samples(("stale", 2), ("trained", 4)), samples(("trained", 4)), Fact(spans=HALF)
    ),
    "stale-samples": Case(staled(4), staled(1), samples(("trained", 4))),
    "reward-workers": share("compute_reward", 0.3, 0.05),
    "vllm-version": Case(
        Fact(spans=HALF, versions={"vllm": "0.7.3"}),
        Fact(spans=HALF, versions={"vllm": "0.11.0+cu128"}),
        Fact(spans=HALF),
    ),
    "rollout-sleep": Case(
        Fact(spans=HALF, memory={"actor_update": (0.5, 0.45, 0.5)}),
        Fact(spans=HALF, memory={"actor_update": (0.9, 0.05, 0.9)}),
        Fact(spans=HALF),
    ),
    "remove-padding": Case(
        counted("actor_update", tokens=500, padded_tokens=1_000),
        counted("actor_update", tokens=990, padded_tokens=1_000),
        counted("actor_update", tokens=500),
    ),
    "dynamic-batch": Case(
        counted("actor_generate", **lengths(*[100] * 8, 1_000)),
        counted("actor_generate", **lengths(*[100] * 9)),
        Fact(spans=HALF),
    ),
    "length-balance": Case(tokens_by_rank(500, 1_500), tokens_by_rank(1_000, 1_000), NOTHING),
    "update-micro-batch": Case(
        memory("actor_update", 0.5), memory("actor_update", 0.9), Fact(spans=HALF)
    ),
    "log-prob-batch": Case(
        memory("actor_compute_log_prob", 0.5, PASSES),
        memory("actor_compute_log_prob", 0.5, QUICK_PASSES),
        Fact(spans=PASSES),
    ),
    "critic-batch": Case(
        memory("critic_update", 0.5, CRITIC),
        memory("critic_update", 0.5, FAST_CRITIC),
        Fact(spans=CRITIC),
    ),
    "critic-share": Case(
        Fact(spans=CRITIC),
        Fact(spans={"actor_update": 0.9, "critic_update": 0.1}),
        Fact(spans=HALF),
    ),
    "sequence-parallel": Case(
        Fact(spans=HALF, memory=FULL, samples=[("trained", {"tokens": 60_000})]),
        Fact(spans=HALF, memory=FULL, samples=[("trained", {"tokens": 600})]),
        Fact(spans=HALF, memory=FULL),
    ),
    "fused-kernels": Case(
        device(Work("vectorized_elementwise_kernel", 0.0, 0.5), Work("gemm", 0.5, 1.0)),
        device(Work("gemm")),
        Fact(spans=HALF),
    ),
    "megatron-options": Case(
        device(Work("permute_kernel", 0.0, 0.3), Work("gemm", 0.3, 1.0)),
        device(Work("gemm")),
        Fact(spans=HALF),
    ),
    "low-mfu": Case(
        counted("actor_update", flops=0.05 * 989.4e12 * 0.0004),
        counted("actor_update", flops=0.5 * 989.4e12 * 0.0004),
        Fact(spans=HALF),
    ),
    "host-bound-update": Case(device(Work(busy=0.5)), device(Work()), Fact(spans=HALF)),
    "out-of-memory": Case(
        Fact(spans=HALF, notes=[Code.OUT_OF_MEMORY]),
        Fact(spans=HALF),
        Fact(spans=HALF, status=None),
    ),
    "recompute-less": Case(
        memory("actor_update", 0.3), memory("actor_update", 0.8), Fact(spans=HALF)
    ),
    "logits-memory": Case(
        memory("actor_compute_log_prob", 0.95, PASSES),
        memory("actor_compute_log_prob", 0.5, PASSES),
        Fact(spans=PASSES),
    ),
    "optimizer-offload": Case(
        memory("actor_update", 0.98, free_host=0.9),
        memory("actor_update", 0.98, free_host=0.2),
        memory("actor_update", 0.98),
    ),
    "offload-less": Case(
        memory("actor_update", 0.5, COPIES),
        memory("actor_update", 0.9, COPIES),
        Fact(spans=COPIES),
    ),
    "fragmentation": Case(
        Fact(spans=HALF, memory={"actor_update": (0.5, 0.05, 0.8)}),
        Fact(spans=HALF, memory={"actor_update": (0.5, 0.05, 0.52)}),
        Fact(spans=HALF),
    ),
    "host-memory": Case(
        Fact(spans=HALF, free_host=0.05), Fact(spans=HALF, free_host=0.5), Fact(spans=HALF)
    ),
    "memory-pressure": Case(
        background(memory_full_pressure_percent=20),
        background(memory_full_pressure_percent=0),
        Fact(spans=HALF),
    ),
    "fsdp-prefetch": Case(talk("AllGather"), talk("AllReduce"), Fact(spans=HALF)),
    "fsdp-reshard": Case(
        talk("AllGather", memory={"actor_update": (0.3, 0.1, 0.4)}),
        talk("AllGather", memory=FULL),
        talk("AllGather"),
    ),
    "fsdp2": Case(
        Fact(spans=HALF, host_ranges=["FullyShardedDataParallel.forward"]),
        Fact(spans=HALF, host_ranges=["FSDP::pre_forward"]),
        Fact(spans=HALF),
    ),
    "gradient-sync": Case(accumulating(4), accumulating(1), talk("AllReduce")),
    "gradient-buckets": Case(reduced(1_000), reduced(2**27), reduced(None)),
    "tensor-parallel-size": Case(
        talk("AllReduce", spans={"actor_update": 1.0}, memory={"actor_update": (0.3, 0.1, 0.4)}),
        talk("AllReduce", spans={"actor_update": 1.0}, memory=FULL),
        talk("AllReduce", spans={"actor_update": 1.0}),
    ),
    "expert-parallel": Case(talk("AllToAll"), talk("AllReduce"), Fact(spans=HALF)),
    "pipeline-bubbles": Case(talk("SendRecv"), talk("AllReduce"), Fact(spans=HALF)),
    "weight-sync-bucket": Case(syncing(2**20), syncing(2**30), Fact(spans=SYNC)),
    "weight-sync-overlap": share("weight_sync", 0.3, 0.02),
    "data-workers": Case(*share("data_fetch", 0.3, 0.01)),
    "pinned-copies": share("batch_transfer", 0.3, 0.01),
    "garbage-collection": Case(
        Fact(spans=HALF, of_step={"gc_pause_ns": 100_000}),
        Fact(spans=HALF, of_step={"gc_pause_ns": 100}),
        Fact(spans=HALF),
    ),
    "logging-cost": share("logging", 0.2, 0.001),
    "checkpoint-cost": share("save_checkpoint", 0.3, 0.01),
    "evaluation-cost": share("validation", 0.3, 0.01),
    "cpu-contention": Case(
        Fact(spans=HALF, of_step={"cpu_wait_ns": 300_000}),
        Fact(spans=HALF, of_step={"cpu_wait_ns": 100}),
        Fact(spans=HALF),
    ),
    "cpu-limit": Case(
        background(cpu_throttled_percent=40), background(cpu_throttled_percent=0), Fact(spans=HALF)
    ),
    "disk-wait": Case(
        background(io_full_pressure_percent=40),
        background(io_full_pressure_percent=0),
        Fact(spans=HALF),
    ),
    "thermal-throttling": Case(
        background(device_thermal_throttled=1),
        background(device_thermal_throttled=0),
        Fact(spans=HALF),
    ),
    "power-limit": Case(
        background(device_power_throttled=1, **clocks(1_200)),
        background(device_power_throttled=1, **clocks(1_950)),
        background(device_power_throttled=1),
    ),
    "low-clocks": Case(
        background(**clocks(1_200)),
        background(**clocks(1_950)),
        background(**clocks(1_200, busy=2.0)),
    ),
    "npu-task-queue": Case(
        device(Work(busy=0.5), device=NPU), device(Work(busy=0.5)), Fact(spans=HALF, device=NPU)
    ),
    "npu-collectives": Case(
        talk("AllReduce", device=NPU, spans={"actor_update": 1.0}),
        talk("AllReduce"),
        Fact(spans=HALF, device=NPU),
    ),
    "npu-fused-operators": Case(
        device(Work("Softmax_1", 0.0, 0.5), Work("MatMul_2", 0.5, 1.0), device=NPU),
        device(Work("MatMul_2"), device=NPU),
        Fact(spans=HALF, device=NPU),
    ),
    "npu-cube-rate": Case(
        Fact(spans=HALF, matmuls=0.4, device=NPU, work=[Work()]),
        Fact(spans=HALF, matmuls=0.95, device=NPU, work=[Work()]),
        Fact(spans=HALF, device=NPU),
    ),
    "smaller-captures": Case(
        share("start_profile", 0.2, 0.001).given,
        Fact(spans=HALF),
        share("start_profile", 0.2, 0.001, steps=4).given,
    ),
    "untraced-time": Case(
        Fact(spans={"actor_update": 0.5}),
        Fact(spans=HALF),
        Fact(spans={"actor_update": 0.5}, steps=4),
    ),
}
