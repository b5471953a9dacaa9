"""Bytes of one device by phase: states, activations, logits, KV cache, overhead.

Sources, of which docs/sizing.md has the list: DeepSpeed's ZeRO paper and Megatron's
theoretical_memory_usage.py for states; saved tensors of transformers' Llama and Qwen2 in BF16 for
activations; measured peaks of log-softmax and entropy for logits; verl's tuning guide for those of
forward-only passes.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil

from lightning_rlprof.analysis.models.architecture import (
    Attention,
    Experts,
    LatentAttention,
    Layer,
    LinearAttention,
    Model,
)
from lightning_rlprof.analysis.models.flops import cache_bytes
from lightning_rlprof.analysis.sizing.job import Job

GB = 1e9
_STATES = {
    "fsdp": (4, 4, 8),  # Weights are FP32; BF16 copies exist only while they are gathered.
    "zero1": (2, 2, 12),
    "zero2": (2, 2, 12),
    "zero3": (2, 2, 12),
    "megatron": (2, 4, 12),
}
"""Bytes per parameter of weights, gradients and Adam's states."""

_RESIDENT = 1 / 16
"""Share of an optimizer on the host that is on the device during its step."""

_TENSOR_PARALLEL = (1, 2, 4, 8, 16, 32, 64)
"""Sizes that a rollout may have unless one is given."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of something, from and to."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Phase:
    """What is on a device during one phase."""

    name: str
    parts: tuple[Part, ...]

    @property
    def low(self) -> float:
        """The least sum."""
        return sum(part.low for part in self.parts)

    @property
    def high(self) -> float:
        """The largest sum."""
        return sum(part.high for part in self.parts)


def _shares(job: Job, model: Model) -> tuple[float, float]:
    """Return parameters of the fullest pipeline stage on one rank: without and with experts.

    It has the largest layers, and the embedding or the output layer.
    """
    largest = sorted(model.layers, key=lambda layer: -layer.parameters(model.hidden))
    stage = Counter(largest[: ceil(len(model.layers) / job.pp)])
    experts = sum(n * layer.experts(model.hidden) for layer, n in stage.items())
    inner = sum(n * layer.parameters(model.hidden) for layer, n in stage.items()) - experts
    ends = model.embedding_parameters + (0 if model.tied else model.head_parameters)
    outer = max(model.embedding_parameters, model.head_parameters) if job.pp > 1 else ends
    return (inner + outer + model.other) / job.tp + model.vision, experts / job.ep


def _states(job: Job, model: Model) -> tuple[float, float, float]:
    """Return bytes of weights, gradients and optimizer on one device."""
    weights, grads, adam = _STATES[job.shard]
    dense, experts = _shares(job, model)
    own, world = dense + experts, job.training_devices
    if job.lora:
        split = world if job.shard in ("fsdp", "zero3") else 1
        base, new = 2 * own / split, _adapters(job, model) / job.tp / job.pp / split
        return base + 4 * new, 4 * new, 8 * new * (1 - job.offload * (1 - _RESIDENT))
    kept = 1 - job.offload * (1 - _RESIDENT)
    if job.shard == "megatron":
        copies = job.data_parallel * job.cp
        expert_copies = world / (job.ep * job.pp)
        spread = adam * (dense / copies + experts / max(expert_copies, 1))
        return weights * own, grads * own, spread * kept
    split_weights = world if job.shard in ("fsdp", "zero3") else 1
    split_grads = 1 if job.shard == "zero1" else world
    return weights * own / split_weights, grads * own / split_grads, adam * own / world * kept


def _adapters(job: Job, model: Model) -> float:
    """Return the parameters of LoRA on all linear layers; routed experts have none."""
    return job.lora * sum(
        n * (ins + outs)
        for layer, n in model.kinds.items()
        for ins, outs in (
            *layer.attention.projections(model.hidden),
            *layer.block.projections(model.hidden),
        )
    )


def _gathered(job: Job, model: Model, *, backward: bool) -> float:
    """Return bytes of what FSDP and ZeRO-3 gather: two layers, the ends, one layer's gradients."""
    if job.shard not in ("fsdp", "zero3") or job.training_devices == 1:
        return 0.0
    largest = max(layer.parameters(model.hidden) for layer in model.kinds)
    ends = model.embedding_parameters + (0 if model.tied else model.head_parameters)
    return 2 * 2 * largest + 2 * ends + (4 * largest if backward and not job.lora else 0)


def live_layer(layer: Layer, hidden: int) -> int:
    """Return bytes that backward needs of one layer per token, BF16, flash attention.

    16 h + 8 i + 4 q + 4 k, measured on transformers' Llama and Qwen2. A mixture of experts has the
    experts that a token passes, and copies of the token for them.
    """
    block, attention = layer.block, layer.attention
    if isinstance(block, Experts):
        inner = 8 * (block.per_token * block.width + block.shared) + 4 * block.per_token * hidden
    else:
        inner = 8 * block.width
    wide = narrow = 0
    if isinstance(attention, Attention):
        wide, narrow = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    elif isinstance(attention, LatentAttention):
        wide = attention.heads * (attention.nope_dim + attention.rope_dim)
        narrow = attention.heads * (attention.nope_dim + attention.value_dim)
    elif isinstance(attention, LinearAttention):
        wide = narrow = attention.channels
    return 16 * hidden + inner + 4 * wide + 4 * narrow


def _activations(job: Job, model: Model) -> float:
    """Return bytes of activations of the update on one device."""
    layers = ceil(len(model.layers) / job.pp)
    live = max(live_layer(layer, model.hidden) for layer in model.kinds)
    in_flight = job.pp  # The first pipeline stage keeps this many micro-batches.
    kept = 2 * model.hidden * layers * in_flight if job.checkpointing else live * layers * in_flight
    return job.micro_tokens * (kept + live * job.checkpointing) / job.tp


def _logits(job: Job, tokens: float, low: float, high: float) -> Part:
    entries = tokens * job.model.vocabulary / job.tp
    return Part("logits", entries * low, entries * high)


def _overhead(job: Job, parts: list[Part]) -> list[Part]:
    """Return context and communicators of a process, and fragments of the allocator.

    A colocated engine that sleeps keeps CUDA graphs and communicators (vllm issue 47654).
    """
    groups = sum(size > 1 for size in (job.tp, job.pp, job.ep, job.cp))
    low, high = sum(part.low for part in parts), sum(part.high for part in parts)
    asleep = (1.5 + (rollout_tp(job) > 1)) * GB
    return [
        *parts,
        *([Part("sleeping engine", 0.0, asleep)] if job.colocated else []),
        Part("context, communicators", 1 * GB, (2 + groups) * GB),
        Part("fragmentation", 0.0, 0.05 * high if low else 0.0),
    ]


def _trained(job: Job) -> list[Model]:
    """Return the models that are trained: the actor, and in PPO the critic."""
    return [job.model, *([job.model.critic()] if job.algorithm == "ppo" else [])]


def _reference(job: Job) -> list[Part]:
    """Return the frozen copy; adapters need none, and with offload it is on the host meanwhile."""
    if job.algorithm == "sft" or job.lora:
        return []
    own = sum(_shares(job, job.model))
    split = job.training_devices if job.shard in ("fsdp", "zero3") else 1
    each = 4 if job.shard == "fsdp" else 2
    # Frameworks can keep it on the host between its passes.
    return [Part("reference", 0.0, 0.0 if job.offload else each * own / split)]


def update_phase(job: Job) -> Phase:
    """Return what is on a device that trains during the update."""
    names = ("weights", "gradients", "optimizer")
    parts = []
    for model in _trained(job):
        who = "critic " if model.head == "value" else ""
        sizes = zip(names, _states(job, model), strict=True)
        parts += [Part(who + name, size, 1.02 * size) for name, size in sizes]
    parts += _reference(job)
    gathered = _gathered(job, job.model, backward=True)
    parts += [Part("gathered layers", gathered / 2, gathered)] if gathered else []
    kept = _activations(job, job.model)
    parts.append(Part("activations", 0.9 * kept, 1.3 * kept))
    parts.append(_logits(job, job.micro_tokens, 6, 16 if job.generates else 14))
    return Phase("update", tuple(_overhead(job, parts)))


def forward_phase(job: Job) -> Phase:
    """Return what is on a device during passes without a backward pass.

    These are the log-probabilities of actor and reference, and the values of the critic. Each layer
    frees what it computed: 8 h + 6 i bytes per token at most, measured on transformers' Llama and
    Qwen2, which is 0.6 of what backward needs.
    """
    trained = [_states(job, model) for model in _trained(job)]
    parts = []
    if job.offload:  # The device has one model at a time, without its optimizer.
        weights, gradients, _ = trained[0]
        parts.append(Part("weights", weights, 1.02 * (weights + gradients)))
    else:
        states = sum(sum(each) for each in trained)
        gradients = sum(each[1] for each in trained)
        parts.append(Part("training states", states - gradients, 1.02 * states))
    parts += _reference(job)
    gathered = _gathered(job, job.model, backward=False)
    parts += [Part("gathered layers", gathered / 2, gathered)] if gathered else []
    live = max(live_layer(layer, job.model.hidden) for layer in job.model.kinds)
    passing = job.forward_micro_tokens * live / job.tp
    parts.append(Part("activations", 0.5 * passing, passing))
    parts.append(_logits(job, job.forward_micro_tokens, 2, 7))
    return Phase("forward", tuple(_overhead(job, parts)))


def rollout_phase(job: Job) -> Phase:
    """Return what is on a device during generation, with one sequence of full length at least."""
    tp = rollout_tp(job)
    parts = []
    if resident := _resident(job):
        gradients = sum(_states(job, model)[1] for model in _trained(job))
        parts.append(Part("training states", resident - gradients, 1.02 * resident))
    own = _engine_weights(job, tp)
    parts.append(Part("engine weights", own, own))
    parts.append(Part("engine activations, graphs", 1.5 * GB, 4.5 * GB))
    one = kv_bytes(job, tp)
    parts.append(Part("KV cache of one sequence", one, one))
    overhead = Part("context, communicators", 1 * GB, (2 + (tp > 1)) * GB)
    return Phase("rollout", (*parts, overhead))


def _engine_weights(job: Job, tp: int) -> float:
    """Return bytes of the rollout's weights on one device, in BF16."""
    experts = job.model.expert_parameters
    return 2 * ((job.model.parameters - experts) / tp + experts / (job.rollout_ep or tp))


def _resident(job: Job) -> float:
    """Return bytes of training states that stay on a device during generation."""
    if job.rollout_devices or job.offload:
        return 0.0
    return sum(sum(_states(job, model)) for model in _trained(job))


def kv_bytes(job: Job, tp: int) -> float:
    """Return bytes of KV cache of one sequence of full length on one device.

    Tensor parallelism divides the heads, at most as many as there are; latent keys have none.
    """
    attention = job.model.layers[-1].attention
    heads = attention.kv_heads if isinstance(attention, Attention) else 1
    return cache_bytes(job.model, [job.length]) / min(tp, heads)


def rollout_tp(job: Job) -> int:
    """Return the tensor parallelism of the rollout: the least that leaves a quarter free."""
    if job.rollout_tp:
        return job.rollout_tp
    usable = job.device.usable * (job.rollout_memory or 1)
    free = max(usable - _resident(job) - 6 * GB, 0.25 * usable)
    whole = job.rollout_ep or job.rollout_ranks
    sizes = [tp for tp in _TENSOR_PARALLEL if job.rollout_ranks % tp == whole % tp == 0]
    roomy = (tp for tp in sizes if _engine_weights(job, tp) <= 0.75 * free)
    return next(roomy, sizes[-1])


def host_bytes(job: Job, node: int = 8) -> float:
    """Return bytes on the host of a node with 8 devices: what is offloaded."""
    if not job.offload:
        return 0.0
    weights, grads, adam = _STATES[job.shard]
    each = 0.0 if job.lora else adam * job.offload + weights + grads
    total = each * job.model.parameters * len(_trained(job))
    return total * min(node, job.training_devices) / job.training_devices
