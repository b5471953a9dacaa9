"""Attainable seconds of generation, of passes over sequences, and of bringing weights to engines.

Each is a range: its low end is everything as good as healthy jobs show it, its high end everything
as bad. A fact that is not known is a pair of what it is at best and at worst. Numbers are in BF16.

The efficiencies were chosen on published rows of few sources; docs/accuracy.md says how often rows
of other sources are inside, and what was corrected since.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import ceil, exp, inf
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
from lightning_rlprof.analysis.sizing.links import NODE, exchanging, gathering, is_near
from lightning_rlprof.tables.arrays import Float64s

Pair = tuple[float, float]
"""What something is at best and at worst; twice the same if it is known."""

Path = Literal["ipc", "nccl", "p2p", "disk"]
"""How new weights reach the engines.

``ipc`` is between processes of the same devices, ``nccl`` a broadcast to other devices, ``p2p``
many transfers at a time, ``disk`` a checkpoint.
"""

BEST, WORST = 0, 1

_MARGIN = 0.05  # By this much a hypothesis may miss the measured seconds.
_SUMS = ("total", "tail")
_BALANCE = 295.0  # FLOPs per byte of an H100, on which parts of the peak were chosen.

# ---- decode
_WEIGHTS = (0.9, 0.55)  # Part of the memory's bandwidth; a copy on an H100 reaches 0.9.
PIECES = (0.9, 0.40)
"""The same of caches and experts, which are not read in one row."""

_PREFILL = (0.60, 0.25)  # Part of an H100's peak, also of decoding that is bound by compute.
_HOST_STEP = (1.5e-3, 6e-3)  # Seconds of a decode step on the host, with graphs.
_EAGER_LAYER = (0.35e-3, 0.9e-3)  # Seconds of a layer and decode step without graphs.
_EAGER_LOST = (0.0, 0.5)  # As `_OVERLAP_LOST`; a decode step begins with nothing launched.
_REDUCE = (10e-6, 30e-6)  # Seconds of an all-reduce inside a node; a layer has two.
_FAR_REDUCE = (40e-6, 150e-6)
_PEER = (0.0, 1e-6)  # Seconds that each device of an all-to-all adds: a message of its own.
_DISPATCHED = (1, 2)  # Bytes of a number that goes to an expert: FP8 at best; it returns in BF16.
_SEQUENCE = (8e-6, 40e-6)  # Seconds of a running sequence and step: sampling, detokenizing.
_SPREAD = (0.35, 1.0)  # Standard deviation of the logarithm of response lengths.
_START = (0.0, 6.0)  # Seconds until the engines are awake and have the first batch.
_RESERVED = (0.5, 0.7)  # Part of what a sequence may still write that is kept free for it.
_FEW_SEQUENCES = (64, 8)
_ENGINE_BYTES = (1.5e9, 3e9)  # Activations and graphs of an engine; vLLM logs 1.5 GB at best.
_MAX_EVENTS = 512  # A rollout is computed in at most about this many intervals.

# ---- passes over sequences
COMPUTE = (0.62, 0.22)
"""Executed FLOPs of passes by the peak of an H100, without what follows."""

_ELEMENTWISE = (0.7, 0.35)  # Part of the bandwidth, of norms, activations and logits.
_LAUNCH_LAYER = (0.25e-3, 0.9e-3)  # Seconds of a layer, pass and micro-batch if bound by launches.
_SHARDED_LAYER = (0.0, 0.3e-3)  # The same of FSDP besides: to gather, wait for, copy and free.
_STAGE = (0.1, 4.0)  # Seconds of a stage besides: dispatch, loading, gathering.
_OVERLAP_LOST = (0.0, 0.25)  # Part of the shorter one of launches and device that is not hidden.
_ROUTED_LOST = (0.0, 1.0)  # The same of experts: the host waits for the tokens of each of them.
_ATTENTION_TFLOPS = 989.4  # Kernels for an H100 don't get faster on newer devices.
_LINK = (0.8, 0.35)  # Part of a link's bandwidth.
_LOOPED_EXPERT = (0.1e-3, 8e-3)  # Seconds of an expert, pass and micro-batch in a Python loop.
_HOST_LINK = (25e9, 6e9)  # Bytes/s between host and device.
_HOST_ADAM = (0.1e-9, 1.5e-9)  # Seconds of a parameter on a node: DeepSpeed's Adam, PyTorch's.
_ACCUMULATED = 12 / 28  # Bytes of adding a gradient, by those of Adam.
_KEPT = (2, 4)  # Bytes of a weight or a gradient of training.
_LENGTHS_SPREAD = 0.6

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

    def _routed(self, end: int, ep: int, each: float) -> float:
        """Return the seconds in which a token goes to its experts on other devices and back.

        Each of its numbers has ``each`` bytes. At best it goes to another node once, as in DeepEP.
        """
        places = ep if end == WORST or is_near(self.device, ep) else ceil(ep / NODE)
        copies = sum(n * min(block.per_token, places) for block, n in _experts(self.model))
        moved = each * copies * (places - 1) / places * self.model.hidden
        return moved / exchanging(self.device, ep) / _LINK[end]

    @property
    def _bandwidth(self) -> float:
        return (self.device.gb_s or inf) * 1e9

    def _reach(self, parts: Pair, end: int) -> float:
        """Return which part of the peak matmuls reach.

        What an H100 lacks at best is the time in which operands are read. A device with more
        bandwidth by its peak reads them sooner: an H20 reaches nine tenths.
        """
        if end == WORST or not self.device.gb_s:
            return parts[end]
        balance = self.device.tflops * 1e3 / self.device.gb_s
        return 1 / (1 + (1 / parts[BEST] - 1) * balance / _BALANCE)


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
        launches = _EAGER_LAYER[end] * len(model.layers) * self.eager[end]
        room = self._room(end, tp)
        reads = prefill(model, [prompt]).forward / peak
        reads += self._reduced(end, tp, prompt)
        reads /= min(self.group, each) if end == BEST else 1  # Prefix caching.
        seqs, part = int(self.max_num_seqs[end]), _RESERVED[end]
        interval = max(float(todo.max()) / _MAX_EVENTS, 1.0)
        left, context, had = np.zeros(0), np.zeros(0), np.full(each, float(prompt))
        names = ("memory", "compute", "link", "host", "prefill", "tail")
        found = {"total": _START[end], **dict.fromkeys(names, 0.0)}
        while len(todo) or len(left):
            free = room - float(context.sum()) - part * float(left.sum())
            needs = np.cumsum(had[:seqs] + part * todo[:seqs])
            fits = int(np.searchsorted(needs, free, "right"))
            new = min(max(fits, not len(left)), seqs - len(left), len(todo))
            filled = reads * float(had[:new].sum()) / prompt
            left, context = np.append(left, todo[:new]), np.append(context, had[:new])
            todo, had = todo[new:], had[new:]
            least = min(interval, float(left.max()))
            # A full cache loses the youngest sequence, which is read once more when it returns.
            while len(left) > 1 and float(context.sum()) + least * len(left) > room:
                todo, had = np.append(left[-1], todo), np.append(context[-1], had)
                left, context = left[:-1], context[:-1]
            grows = (room - float(context.sum())) / len(left)
            steps = max(least, min(float(left.min()), grows))
            running = float(np.minimum(left, steps).sum()) / steps
            mean_context = max(round(float(context.mean()) + steps / 2), 1)
            memory = self._reads(end, tp, running, mean_context)
            compute = running * decode(model, [mean_context], [2]).forward / peak
            link = self._reduced(end, tp, running) + self._exchanged(end, tp, running)
            busy = max(memory, compute)
            waits = _overlapped(_EAGER_LOST[end], launches, busy + link) - busy - link
            host = _HOST_STEP[end] + running * _SEQUENCE[end] + waits
            took = steps * (busy + link + host)
            found["memory" if memory == busy else "compute"] += steps * busy
            found["link"] += steps * link
            found["host"] += steps * host
            found["prefill"] += filled
            found["tail"] += took * (running <= max(1.0, 0.1 * min(each, seqs)))
            found["total"] += took + filled
            left, context = left - steps, context + steps
            left, context = left[left > 0], context[left > 0]
        return found

    def _reads(self, end: int, tp: int, running: float, context: int) -> float:
        """Return the seconds in which a decode step reads weights and cache."""
        ep = self.ep or tp
        dense = decode_weight_bytes(self.model, 0)
        experts = decode_weight_bytes(self.model, running * ep / tp) - dense
        cache = running * cache_bytes(self.model, [context]) / self._cache_split(tp)
        pieces = experts / ep + cache
        return (dense / tp / _WEIGHTS[end] + pieces / PIECES[end]) / self._bandwidth

    def _reduced(self, end: int, tp: int, tokens: float) -> float:
        """Return the seconds of two all-reduces per layer among the devices of an engine."""
        if tp == 1:
            return 0.0
        delay = (_REDUCE if is_near(self.device, tp) else _FAR_REDUCE)[end]
        moved = 2 * 2 * (tp - 1) / tp * tokens * self.model.hidden
        speed = gathering(self.device, tp) * _LINK[end]
        return 2 * len(self.model.layers) * (delay + moved / speed)

    def _exchanged(self, end: int, tp: int, running: float) -> float:
        """Return the seconds in which tokens go to the experts of other engines and back."""
        if self.ep <= tp:
            return 0.0
        delay = (_REDUCE if is_near(self.device, self.ep) else _FAR_REDUCE)[end]
        delay += _PEER[end] * self.ep
        calls = 2 * sum(n for _, n in _experts(self.model))
        return calls * delay + running / tp * self._routed(end, self.ep, _DISPATCHED[end] + 2)

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
        return max(free * self._cache_split(tp) / one if one else inf, least)

    def _cache_split(self, tp: int) -> int:
        """Return among how many devices an engine divides its cache: no more than its heads."""
        attention = self.model.layers[-1].attention
        return min(tp, attention.kv_heads if isinstance(attention, Attention) else 1)


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
        host_adam: The optimizer runs on the host, and its state stays there.
        streamed: Weights come from the host in each micro-batch, and gradients go there.
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
    host_adam: tuple[bool, bool] = (False, False)
    streamed: tuple[bool, bool] = (False, False)
    square: float = exp(_LENGTHS_SPREAD**2)
    longest: float = 0.0
    expert_loop: bool = False

    def hypotheses(self) -> Iterator[tuple[str, Work]]:
        """Yield padding, recomputation, small micro-batches, the host, and experts in a loop."""
        padded = self.longest / self.mean[WORST]
        if padded > 1.2 > self.padding[WORST]:
            yield "padding", replace(self, padding=(padded, padded))
        if self.backward and not self.recompute[WORST]:
            yield "recompute", replace(self, recompute=(True, True))
        if self.micro_tokens[WORST] > self.mean[WORST]:
            yield "micro_batches", replace(self, micro_tokens=(1, 1))
        if self.backward and self.offload[WORST] < self.updates:
            yield "offload", replace(self, offload=(self.updates, self.updates))
        if self.backward and not self.host_adam[WORST]:
            yield "host_adam", replace(self, host_adam=(True, True))
        if not self.streamed[WORST]:
            yield "streamed", replace(self, streamed=(True, True))
        if self.model.expert_parameters and not self.expert_loop:
            loop = replace(self, expert_loop=True)
            yield "expert_loop", replace(loop, micro_tokens=(self.micro_tokens[BEST], 1))

    def parts(self, end: int) -> dict[str, float]:
        """Return the seconds of some parts and in total.

        These are ``compute``, ``launches``, ``link`` between devices, ``host``, from which weights
        come, and ``optimizer``. At best, the first four overlap, and no pipeline stage waits for
        another.
        """
        model, mean = self.model, self.mean[end]
        again = self.recompute[end] and self.backward
        work = 1 + (1 if self.lora else 2) + again if self.backward else 1
        one = forward(model, [max(round(mean), 1)])
        slower = 1.0 if end == BEST else max(self.device.tflops / _ATTENTION_TFLOPS, 1.0)
        attention = one.attention * min(self.square, 3.0) * slower
        flops = self.samples * (one.linear + one.head + attention)
        tokens = self.samples * mean * self.padding[end]
        row = len(model.layers) * 60 * model.hidden * (3 + again if self.backward else 1)
        row += model.vocabulary * (30 if self.backward else 10)
        peak = self.device.tflops * 1e12 * self.devices
        compute = work * flops * self.padding[end] / peak / self._reach(COMPUTE, end)
        elementwise = row * tokens / self._bandwidth / self.devices / _ELEMENTWISE[end]
        compute += elementwise * (0.5 if end == BEST else 1)
        groups = self.devices / (self.tp * self.pp * self.cp)
        micro = max(self.micro_tokens[end], mean * self.padding[end])
        count = max(tokens / micro / groups, self.updates)
        launch = _LAUNCH_LAYER[end] + _SHARDED_LAYER[end] * self.sharded[end]
        launches = count * len(model.layers) / self.pp * launch * work
        if self.expert_loop:
            calls = sum(n * block.count for block, n in _experts(model))
            launches += count * calls / self.pp * _LOOPED_EXPERT[end] * work
        lost = _ROUTED_LOST if model.expert_parameters else _OVERLAP_LOST
        busy = _overlapped(lost[end], compute, launches)
        # Stages fill and drain in each update; schedules without that bubble are the best.
        busy *= 1 if end == BEST else 1 + (self.pp - 1) * self.updates / count
        link = self._gathered(end, count)
        link += self._moved(end, tokens / self.padding[end], 2 + again if self.backward else 1)
        host, optimizer = self._streamed(end, count), self._optimized(end)
        total = (max(busy, link, host) if end == BEST else busy + link + host) + optimizer
        names = {"compute": compute, "launches": launches, "link": link, "host": host}
        return {"total": total + _STAGE[end], **names, "optimizer": optimizer}

    def _gathered(self, end: int, count: float) -> float:
        """Return the seconds of gathering weights and reducing gradients.

        At best, weights are gathered once per micro-batch and gradients reduced once per update.
        """
        if not self.sharded[end] or self.devices == 1:
            return 0.0
        best = count + self.updates * self.backward
        times = best if end == BEST else count * (4 if self.backward else 1)
        experts = self.model.expert_parameters
        split = self.tp * self.pp
        own = (self.model.parameters - experts) / split + experts / max(split, self.ep)
        return times * 2 * own / gathering(self.device, self.devices) / _LINK[end]

    def _moved(self, end: int, tokens: float, passes: int) -> float:
        """Return the seconds in which activations go to other devices.

        With tensor parallelism they are reduced. With context parallelism, heads are exchanged
        (Ulysses), or keys and values go around all devices. Tokens go to experts and back.
        """
        model, found = self.model, 0.0
        if self.tp > 1:
            here = tokens * self.tp / self.devices
            moved = 8 * (self.tp - 1) / self.tp * model.hidden * here
            found += len(model.layers) * moved / gathering(self.device, self.tp)
        here = tokens / self.devices
        if self.cp > 1:
            group = self.tp * self.cp
            for layer, n in model.kinds.items():
                cached = layer.attention.cached
                wide = layer.attention.projections(model.hidden)[-1][0]
                heads = (2 * wide + cached) * (self.cp - 1) / self.cp
                ring = cached * (self.cp - 1)
                numbers = (min, max)[end](heads, ring)
                found += n * 2 * numbers * here / exchanging(self.device, group)
        routed = here * self._routed(end, self.ep, 2 * 2)
        return passes * (found / _LINK[end] + routed)

    def _own(self, end: int) -> float:
        """Return the parameters that a device keeps."""
        return self.model.parameters / (self.devices if self.sharded[end] else self.tp * self.pp)

    def _streamed(self, end: int, count: float) -> float:
        """Return the seconds in which the host sends weights, and adds gradients that it gets."""
        if not self.streamed[end]:
            return 0.0
        trained = self.backward and not self.lora
        moved = (1 + self.backward + trained) * _KEPT[end] * self._own(end)
        added = trained * _ACCUMULATED * _HOST_ADAM[end] * self._own(end) * self._neighbours
        return count * (moved / _HOST_LINK[end] + added)

    def _optimized(self, end: int) -> float:
        """Return the seconds of the optimizer, on the device or on the host."""
        if not self.backward or self.lora:
            return 0.0
        own = self.model.parameters / self.devices
        if self.host_adam[end] or self.streamed[end]:
            moved = 2 * _KEPT[end] * own * (not self.streamed[end])
            adam = _HOST_ADAM[end] * own * self._neighbours
            return self.updates * (moved / _HOST_LINK[end] + adam)
        on_device = self.updates * 28 * own / (self._bandwidth * 0.5)
        return on_device + self.offload[end] * 24 * own / _HOST_LINK[end]

    @property
    def _neighbours(self) -> int:
        """Devices that share a host."""
        return min(self.devices, NODE)


@dataclass(frozen=True)
class Refit(Work):
    """Bringing new weights to the engines.

    Attributes:
        path: How, at best and at worst.
        bytes: Of the weights; 0 for those of the model.
        tensors: Their number; 0 for that of the model.
        exports: Each tensor is gathered and converted for itself before it is sent.
        senders: Devices that send a part each; 0 for one, of ``p2p`` for all.
    """

    path: tuple[Path, Path] = ("p2p", "nccl")
    bytes: float = 0.0
    tensors: int = 0
    exports: bool = False
    senders: int = 0

    def hypotheses(self) -> Iterator[tuple[str, Work]]:
        """Yield a way over the disk, and tensors that are exported one by one."""
        if "disk" not in self.path:
            yield "disk", replace(self, path=("disk", "disk"))
        if not self.exports:
            yield "export", replace(self, exports=True)

    def parts(self, end: int) -> dict[str, float]:
        """Return the seconds of the ``link``, of handling ``tensors``, and in total.

        One sender gathers all weights before. All engines get what several senders have.
        """
        path, moved = self.path[end], self.bytes or 2 * self.model.parameters
        senders = self.senders or (self.devices if path == "p2p" else 1)
        speed, near = _PATHS[path][end] * senders, gathering(self.device, self.devices) * _LINK[end]
        if path == "nccl" and senders > 1:
            speed = min(speed, near)
        link = moved / speed * (2 if path == "disk" else 1)
        if senders == 1 and self.devices > 1:
            link += moved * _KEPT[end] / 2 / near
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


def _overlapped(lost: float, one: float, other: float) -> float:
    """Return the seconds of what the host launches and the device runs meanwhile."""
    return max(one, other) + lost * min(one, other)


def _experts(model: Model) -> Iterator[tuple[Experts, int]]:
    """Yield the mixtures of experts, and in how many layers each is."""
    for layer, n in model.kinds.items():
        if isinstance(layer.block, Experts):
            yield layer.block, n


def tensors(model: Model) -> int:
    """Return how many tensors the weights have, each expert with its own."""
    found = 3
    for layer, n in model.kinds.items():
        shapes = layer.attention.projections(model.hidden) + layer.block.projections(model.hidden)
        experts = 3 * layer.block.count if isinstance(layer.block, Experts) else 0
        found += n * (len(shapes) + experts + 2)
    return found
