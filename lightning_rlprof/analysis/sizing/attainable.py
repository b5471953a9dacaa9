"""Attainable seconds of generation, of passes over sequences, and of bringing weights to engines.

Each is a range: its low end is everything as good as healthy jobs show it, its high end everything
as bad. A fact that is not known is a pair of what it is at best and at worst. Numbers are in BF16.

The efficiencies were chosen on published rows of few sources; docs/accuracy.md says how often rows
of other sources are inside, and what was corrected since.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import exp, inf
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from lightning_rlprof.analysis.efficiency.peak_flops import Peak
from lightning_rlprof.analysis.models.architecture import Attention, Experts, Model
from lightning_rlprof.analysis.models.flops import (
    cache_bytes,
    decode,
    decode_weight_bytes,
    forward,
    prefill,
)
from lightning_rlprof.tables.arrays import Float64s

Pair = tuple[float, float]
"""What something is at best and at worst; twice the same if it is known."""

Path = Literal["ipc", "nccl", "p2p", "disk"]
"""How new weights reach the engines.

``ipc`` is between processes of the same devices, ``nccl`` a broadcast to other devices, ``p2p``
many transfers at a time, ``disk`` a checkpoint.
"""

BEST, WORST = 0, 1
NODE = 8
"""Devices of a node, between which links are fast."""

_MARGIN = 0.05  # By this much a hypothesis may miss the measured seconds.
_SUMS = ("total", "tail")
_BALANCE = 295.0  # FLOPs per byte of an H100, on which parts of the peak were chosen.

# ---- decode
_DECODE = (0.85, 0.40)  # Part of the memory's bandwidth.
_PREFILL = (0.60, 0.25)  # Part of an H100's peak, also of decoding that is bound by compute.
_HOST_STEP = (1.5e-3, 6e-3)  # Seconds of a decode step on the host, with graphs.
_EAGER_LAYER = (0.35e-3, 0.9e-3)  # Seconds of a layer and decode step without graphs.
_REDUCE = (10e-6, 30e-6)  # Seconds of an all-reduce inside a node; a layer has two.
_FAR_REDUCE = (40e-6, 150e-6)
_SEQUENCE = (8e-6, 40e-6)  # Seconds of a running sequence and step: sampling, detokenizing.
_SPREAD = (0.35, 1.0)  # Standard deviation of the logarithm of response lengths.
_START = (0.0, 6.0)  # Seconds until the engines are awake and have the first batch.
_RESERVED = (0.5, 1.0)  # Part of what a sequence may still write that is kept free for it.
_FEW_SEQUENCES = (64, 8)
_ENGINE_BYTES = (1.5e9, 3e9)  # Activations and graphs of an engine; vLLM logs 1.5 GB at best.
_MAX_EVENTS = 512  # A rollout is computed in at most about this many intervals.

# ---- passes over sequences
_COMPUTE = (0.55, 0.22)  # Executed FLOPs by the peak of an H100, without what follows.
_ELEMENTWISE = (0.7, 0.35)  # Part of the bandwidth, of norms, activations and logits.
_LAUNCH_LAYER = (0.25e-3, 0.9e-3)  # Seconds of a layer, pass and micro-batch if bound by launches.
_STAGE = (0.1, 4.0)  # Seconds of a stage besides: dispatch, loading, gathering.
_OVERLAP_LOST = (0.0, 0.25)  # Part of the shorter one of launches and device that is not hidden.
_LINK = (0.8, 0.35)  # Part of a link's bandwidth.
_LOOPED_EXPERT = (0.1e-3, 8e-3)  # Seconds of an expert, pass and micro-batch in a Python loop.
_HOST_LINK = (25e9, 6e9)  # Bytes/s between host and device.
_LENGTHS_SPREAD = 0.6
_NEAR, _FAR, _PCIE = 450e9, 50e9, 25e9  # Bytes/s of a device one way: in a node, between, cards.
_ON_PCIE = re.compile(r"RTX|L4|L20|A10-|A40-|A6000|T4|GB10|PCIe", re.IGNORECASE)

# ---- weights
_PATHS: dict[str, Pair] = {  # Bytes/s; p2p is of each device.
    "ipc": (20e9, 6e9),
    "nccl": (25e9, 5e9),
    "p2p": (25e9, 2e9),
    "disk": (5e9, 0.5e9),
}
_TENSOR = (0.05e-3, 0.4e-3)
_EXPORTED = (5e-3, 0.3)  # Seconds of a tensor that is gathered and converted for itself.
_AROUND = (0.1, 5.0)  # Seconds: pause, flush, load, resume.


@dataclass(frozen=True)
class Work:
    """A stage whose seconds can be computed.

    Attributes:
        model: The model.
        device: What a device can do.
        devices: How many work on it.
    """

    model: Model
    device: Peak
    devices: int

    def parts(self, end: int) -> dict[str, float]:
        """Return the seconds at one end of the range: of some parts, and in ``total``."""
        raise NotImplementedError

    def range(self) -> Pair:
        """Return the seconds at best and at worst."""
        return self.parts(BEST)["total"], self.parts(WORST)["total"]

    @property
    def limit(self) -> str:
        """The largest part at best, which a faster device or link would shorten."""
        found = self.parts(BEST)
        return max((name for name in found if name not in _SUMS), key=found.__getitem__)

    def hypotheses(self) -> Iterator[tuple[str, "Work"]]:
        """Yield what may explain more time than the range has, the most specific fact first."""
        raise NotImplementedError

    def causes(self, seconds: float) -> tuple[str, ...]:
        """Return the hypotheses whose ranges contain measured seconds, nearly at least."""
        ranges = ((cause, work.range()) for cause, work in self.hypotheses())
        low, high = seconds / (1 - _MARGIN), seconds * (1 - _MARGIN)
        return tuple(cause for cause, own in ranges if own[BEST] <= low and high <= own[WORST])

    def unknown(self) -> list[str]:
        """Return the facts that are not known."""
        pairs = ((each.name, getattr(self, each.name)) for each in fields(self))
        return [name for name, own in pairs if isinstance(own, tuple) and own[BEST] != own[WORST]]

    def narrowest(self) -> tuple[str, float] | None:
        """Return the missing fact that would narrow the range most, and by which factor."""
        low, high = self.range()
        found = []
        for name in self.unknown():
            known: list[dict[str, Any]] = [{name: (own, own)} for own in getattr(self, name)]
            ends = [replace(self, **each).range() for each in known]
            found.append((high / low / max(end[1] / end[0] for end in ends), name))
        factor, name = max(found, default=(1.0, ""))
        return (name, factor) if factor > 1 else None

    def _reach(self, parts: Pair, end: int) -> float:
        """Return which part of the peak matmuls reach.

        What an H100 lacks at best is the time in which operands are read. A device with more
        bandwidth by its peak reads them sooner: an H20 reaches nine tenths.
        """
        if end == WORST or not self.device.gb_s:
            return parts[end]
        balance = self.device.tflops * 1e3 / self.device.gb_s
        return 1 / (1 + (1 / parts[BEST] - 1) * balance / _BALANCE)

    @property
    def link(self) -> float:
        """Bytes/s of a device to others, one way."""
        near = _PCIE if _ON_PCIE.search(self.device.label) else _NEAR
        return near if self.devices <= NODE else min(near, _FAR * NODE)


@dataclass(frozen=True)
class Rollout(Work):
    """The generation of responses.

    The longest response of the slowest engine ends it, so it decodes a batch that gets smaller.

    Attributes:
        samples: Responses.
        prompt: Tokens of a prompt.
        mean: Tokens of a mean response.
        longest: Tokens of the longest one.
        group: Responses of one prompt.
        tp: Tensor parallelism of an engine.
        ep: Expert parallelism, over engines if above ``tp``; 0 for ``tp``.
        eager: Engines decode without graphs.
        max_num_seqs: Sequences that an engine runs at a time.
        share: Of a device's memory for weights and KV cache.
        kv_tokens: Tokens that the KV cache of an engine has room for; 0 if ``share`` says it.
    """

    samples: int
    prompt: float
    mean: Pair
    longest: Pair
    group: int = 8
    tp: Pair = (1, 1)
    ep: int = 0
    eager: tuple[bool, bool] = (False, True)
    max_num_seqs: Pair = (1024, 256)
    share: Pair = (0.85, 0.6)
    kv_tokens: Pair = (0, 0)

    def hypotheses(self) -> Iterator[tuple[str, Work]]:
        """Yield that engines decode without graphs, and that few sequences run at a time."""
        if not self.eager[WORST]:
            yield "eager", replace(self, eager=(True, True))
        if self.max_num_seqs[WORST] > _FEW_SEQUENCES[BEST]:
            yield "small_batch", replace(self, max_num_seqs=_FEW_SEQUENCES)

    def parts(self, end: int) -> dict[str, float]:
        """Return the seconds at one end of the range; the best or worst tensor parallelism counts.

        ``memory`` are reads of weights and cache, ``host`` what the device waits for, ``tail`` the
        time in which at most a tenth of the sequences runs.
        """
        several = (self._engine(end, int(tp)) for tp in {*self.tp})
        return (min, max)[end](several, key=lambda each: each["total"])

    def _engine(self, end: int, tp: int) -> dict[str, float]:
        model, prompt = self.model, max(round(self.prompt), 1)
        each = max(-(-self.samples * tp // self.devices), 1)
        todo = lengths(self.mean[end], self.longest[end], _SPREAD[end], each)
        todo = np.random.default_rng(0).permutation(todo)
        peak = self.device.tflops * 1e12 * self._reach(_PREFILL, end) * tp
        bandwidth = (self.device.gb_s or inf) * 1e9 * _DECODE[end]
        reduce = (_FAR_REDUCE if tp > NODE else _REDUCE)[end] * 2 * len(model.layers) * (tp > 1)
        launches = _EAGER_LAYER[end] * len(model.layers) * self.eager[end]
        room = self._room(end, tp)
        reads = prefill(model, [prompt]).forward / peak
        reads /= min(self.group, each) if end == BEST else 1  # Prefix caching.
        seqs, part = int(self.max_num_seqs[end]), _RESERVED[end]
        interval = max(float(todo.max()) / _MAX_EVENTS, 1.0)
        left, context = np.zeros(0), np.zeros(0)
        names = ("memory", "compute", "host", "prefill", "tail")
        found = {"total": _START[end], **dict.fromkeys(names, 0.0)}
        while len(todo) or len(left):
            free = room - float(context.sum()) - part * float(left.sum())
            fits = int(np.searchsorted(np.cumsum(prompt + part * todo[:seqs]), free, "right"))
            new = min(max(fits, not len(left)), seqs - len(left), len(todo))
            left, context = np.append(left, todo[:new]), np.append(context, np.full(new, prompt))
            todo = todo[new:]
            steps = max(float(left.min()), min(interval, float(left.max())))
            running = float(np.minimum(left, steps).sum()) / steps
            mean_context = max(round(float(context.mean()) + steps / 2), 1)
            busy, memory = self._step(running, mean_context, tp, peak, bandwidth)
            # Launches without graphs run ahead of the device at best.
            waits = max(launches - busy, 0.0) if end == BEST else launches
            host = _HOST_STEP[end] + reduce + running * _SEQUENCE[end] + waits
            took = steps * (busy + host)
            found["memory" if memory == busy else "compute"] += steps * busy
            found["host"] += steps * host
            found["prefill"] += new * reads
            found["tail"] += took * (running <= max(1.0, 0.1 * min(each, seqs)))
            found["total"] += took + new * reads
            left, context = left - steps, context + steps
            left, context = left[left > 0], context[left > 0]
        return found

    def _step(
        self, running: float, context: int, tp: int, peak: float, bandwidth: float
    ) -> tuple[float, float]:
        """Return the seconds of the device in a decode step, and how long its memory reads."""
        ep = self.ep or tp
        dense = decode_weight_bytes(self.model, 0)
        experts = decode_weight_bytes(self.model, running * ep / tp) - dense
        attention = self.model.layers[-1].attention
        heads = attention.kv_heads if isinstance(attention, Attention) else 1
        cache = running * cache_bytes(self.model, [context]) / min(tp, heads)
        memory = (dense / tp + experts / ep + cache) / bandwidth
        return max(memory, running * decode(self.model, [context], [2]).forward / peak), memory

    def _room(self, end: int, tp: int) -> float:
        """Return the tokens that the KV cache of an engine has room for, one sequence at least."""
        least = self.prompt + self.longest[end]
        if self.kv_tokens[end]:
            return max(self.kv_tokens[end], least)
        length = max(round(least), 1)
        one = cache_bytes(self.model, [length]) / length
        own = self.model.expert_parameters
        weights = 2 * ((self.model.parameters - own) / tp + own / (self.ep or tp))
        free = self.device.usable * self.share[end] - weights - _ENGINE_BYTES[end]
        return max(free * tp / one if one else inf, least)


@dataclass(frozen=True)
class Pass(Work):
    """A training, or a forward pass without one, over sequences.

    Attributes:
        samples: Sequences.
        mean: Tokens of a mean sequence, prompt included.
        backward: It trains.
        tp: Tensor parallelism.
        pp: Pipeline stages.
        cp: Context parallelism, or Ulysses: devices that share sequences, each with all weights.
        ep: Expert parallelism: a device gathers its own experts alone.
        updates: Steps of the optimizer.
        lora: Adapters are trained alone.
        micro_tokens: Tokens of a micro-batch; one sequence at least.
        padding: Tokens that are computed for each real one.
        recompute: Activations of layers are computed again.
        sharded: Weights are gathered layer by layer: FSDP, ZeRO-3.
        offload: How often a stage moves the optimizer's state to the device and back.
        square: Mean of the squares of lengths by the square of their mean.
        longest: Tokens that padding extends every sequence to.
        expert_loop: Experts run one after the other, not as one grouped matmul.
    """

    samples: float
    mean: Pair
    backward: bool
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    updates: int = 1
    lora: bool = False
    micro_tokens: Pair = (16384, 1)
    padding: Pair = (1.0, 1.0)
    recompute: tuple[bool, bool] = (False, True)
    sharded: tuple[bool, bool] = (False, True)
    offload: Pair = (0, 1)
    square: float = exp(_LENGTHS_SPREAD**2)
    longest: float = 0.0
    expert_loop: bool = False

    def hypotheses(self) -> Iterator[tuple[str, Work]]:
        """Yield padding, recomputation, small micro-batches, offload, and experts in a loop."""
        padded = self.longest / self.mean[WORST]
        if padded > 1.2 > self.padding[WORST]:
            yield "padding", replace(self, padding=(padded, padded))
        if self.backward and not self.recompute[WORST]:
            yield "recompute", replace(self, recompute=(True, True))
        if self.micro_tokens[WORST] > self.mean[WORST]:
            yield "micro_batches", replace(self, micro_tokens=(1, 1))
        if self.backward and self.offload[WORST] < self.updates:
            yield "offload", replace(self, offload=(self.updates, self.updates))
        if self.model.expert_parameters and not self.expert_loop:
            loop = replace(self, expert_loop=True)
            yield "expert_loop", replace(loop, micro_tokens=(self.micro_tokens[BEST], 1))

    def parts(self, end: int) -> dict[str, float]:
        """Return the seconds of ``compute``, ``launches``, ``link``, ``optimizer``, and in total.

        At best, launches, kernels and links overlap, and no pipeline stage waits for another.
        """
        model, mean = self.model, self.mean[end]
        again = self.recompute[end] and self.backward
        work = 1 + (1 if self.lora else 2) + again if self.backward else 1
        one = forward(model, [max(round(mean), 1)])
        flops = self.samples * (one.linear + one.head + one.attention * min(self.square, 3.0))
        tokens = self.samples * mean * self.padding[end]
        row = len(model.layers) * 60 * model.hidden * (3 + again if self.backward else 1)
        row += model.vocabulary * (30 if self.backward else 10)
        peak = self.device.tflops * 1e12 * self.devices
        compute = work * flops * self.padding[end] / peak / self._reach(_COMPUTE, end)
        elementwise = row * tokens / self._bandwidth / self.devices / _ELEMENTWISE[end]
        compute += elementwise * (0.5 if end == BEST else 1)
        groups = self.devices / (self.tp * self.pp * self.cp)
        micro = max(self.micro_tokens[end], mean * self.padding[end])
        count = max(tokens / micro / groups, self.updates)
        launches = count * len(model.layers) * _LAUNCH_LAYER[end] * work
        if self.expert_loop:
            blocks = (layer.block for layer in model.layers)
            calls = sum(block.count for block in blocks if isinstance(block, Experts))
            launches += count * calls * _LOOPED_EXPERT[end] * work
        busy = max(compute, launches) + _OVERLAP_LOST[end] * min(compute, launches)
        # Stages fill and drain in each update; schedules without that bubble are the best.
        busy *= 1 if end == BEST else 1 + (self.pp - 1) * self.updates / count
        link = self._link_seconds(end, count, tokens / self.padding[end] / groups, 2 + again)
        optimizer = 0.0
        if self.backward and not self.lora:
            own = model.parameters / self.devices
            optimizer = self.updates * 28 * own / (self._bandwidth * 0.5)
            optimizer += self.offload[end] * 24 * own / _HOST_LINK[end]
        total = (max(busy, link) if end == BEST else busy + link) + optimizer + _STAGE[end]
        names = {"compute": compute, "launches": launches, "link": link, "optimizer": optimizer}
        return {"total": total, **names}

    @property
    def _bandwidth(self) -> float:
        return (self.device.gb_s or inf) * 1e9

    def _link_seconds(self, end: int, count: float, tokens: float, passes: int) -> float:
        """Return the seconds of gathered weights, and of the all-reduces of tensor parallelism.

        At best, weights are gathered once per micro-batch and gradients reduced once per update.
        """
        found = 0.0
        if self.sharded[end] and self.devices > 1:
            best = count + self.updates * self.backward
            times = best if end == BEST else count * (4 if self.backward else 1)
            experts = self.model.expert_parameters
            split = self.tp * self.pp
            gathered = (self.model.parameters - experts) / split
            found += times * 2 * (gathered + experts / max(split, self.ep)) / self.link
        if self.tp > 1:
            moved = 8 * (self.tp - 1) / self.tp * self.model.hidden * tokens
            passes = passes if self.backward else 1
            near = replace(self, devices=self.tp).link
            found += len(self.model.layers) * moved * passes / near
        return found / _LINK[end]


@dataclass(frozen=True)
class Refit(Work):
    """Bringing new weights to the engines.

    Attributes:
        path: How, at best and at worst.
        bytes: Of the weights; 0 for those of the model.
        tensors: Their number; 0 for that of the model.
        exports: Each tensor is gathered and converted for itself before it is sent.
    """

    path: tuple[Path, Path] = ("p2p", "nccl")
    bytes: float = 0.0
    tensors: int = 0
    exports: bool = False

    def hypotheses(self) -> Iterator[tuple[str, Work]]:
        """Yield a way over the disk, and tensors that are exported one by one."""
        if "disk" not in self.path:
            yield "disk", replace(self, path=("disk", "disk"))
        if not self.exports:
            yield "export", replace(self, exports=True)

    def parts(self, end: int) -> dict[str, float]:
        """Return the seconds of the ``link``, of handling ``tensors``, and in total."""
        path = self.path[end]
        speed = _PATHS[path][end] * (self.devices if path == "p2p" else 1)
        link = (self.bytes or 2 * self.model.parameters) / speed * (2 if path == "disk" else 1)
        each = (_EXPORTED if self.exports else _TENSOR)[end]
        handled = (self.tensors or tensors(self.model)) * each
        return {"total": link + handled + _AROUND[end], "link": link, "tensors": handled}


def lengths(mean: float, longest: float, spread: float, count: int) -> Float64s:
    """Return response lengths: lognormal quantiles with a mean, of which the last is the longest.

    Example::

        >>> lengths(100, 400, 0.5, 4).tolist(), lengths(400, 400, 0.5, 2).tolist()
        ([52.0, 78.0, 107.0, 400.0], [400.0, 400.0])
    """
    if mean >= 0.985 * longest:
        return np.full(count, float(longest))
    at = np.exp(spread * np.array([NormalDist().inv_cdf((k + 0.5) / count) for k in range(count)]))
    low, high = 1e-3 * mean, 1e4 * mean
    for _ in range(50):
        middle = float(np.sqrt(low * high))
        less = np.minimum(middle * at, longest).mean() < mean
        low, high = (middle, high) if less else (low, middle)
    found = np.rint(np.clip(middle * at, 1, longest))
    found[-1] = longest
    return found


def tensors(model: Model) -> int:
    """Return how many tensors the weights have, each expert with its own."""
    found = 3
    for layer, n in model.kinds.items():
        shapes = layer.attention.projections(model.hidden) + layer.block.projections(model.hidden)
        experts = 3 * layer.block.count if isinstance(layer.block, Experts) else 0
        found += n * (len(shapes) + experts + 2)
    return found
