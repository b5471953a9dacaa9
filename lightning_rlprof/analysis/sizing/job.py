"""A training to be sized: model, devices, lengths, and how the model is divided."""

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_rlprof.analysis.efficiency.peak_flops import Peak, device_labeled
from lightning_rlprof.analysis.models.architecture import Experts, Model
from lightning_rlprof.errors import RlprofError

Algorithm = Literal["grpo", "ppo", "dpo", "sft"]
"""What is trained: GRPO has a reference, PPO also a critic.

DPO has a reference, pairs of sequences and no rollout; SFT has neither a reference nor a rollout.
"""

Shard = Literal["fsdp", "zero1", "zero2", "zero3", "megatron"]
"""How states are divided among ranks."""

_DEVICES = re.compile(r"([0-9]{1,9})\s*[x×*]\s*(\S+)")
_FIGURES = re.compile(  # 20G, or 48GB@180TFLOPS@1.8TB/s
    r"([0-9.]+)GB?(?:@([0-9.]+)TFLOPS)?(?:@([0-9.]+)TB/s)?", re.IGNORECASE
)
_MAX_COUNT = 1 << 40
_COUNTS = (
    *("prompt", "response", "devices", "tp", "pp", "ep", "cp", "group"),
    *("batch", "mean", "tokens", "forward_tokens", "rollout_tp", "rollout_ep", "max_num_seqs"),
)


@dataclass(frozen=True)
class Job:
    """What `size` needs to know.

    Attributes:
        model: The model, see `read_model`.
        device: What each device can do.
        devices: How many there are.
        prompt: Longest prompt, in tokens.
        response: Longest response.
        algorithm: ``grpo``, ``ppo``, ``dpo`` or ``sft``.
        shard: How states are divided: ``fsdp`` keeps FP32 weights, ``megatron`` has a distributed
            optimizer.
        batch: Prompts of a step; None if no times are wanted.
        group: Responses per prompt; DPO has two.
        mean: Tokens of a mean response, for times; None if unknown.
        tokens: Tokens of a micro-batch, which context parallelism divides; None for one sequence of
            the full length, of DPO one pair.
        forward_tokens: The same for passes without a backward pass; None for ``tokens``.
        tp: Tensor parallelism of the training.
        pp: Pipeline parallelism.
        ep: Expert parallelism; an expert is on one rank of a tensor-parallel group.
        cp: Context or sequence parallelism: ranks that share a sequence.
        rollout_tp: Tensor parallelism of the rollout; None for the least that fits.
        rollout_ep: Expert parallelism of the rollout, over replicas if above ``rollout_tp``; None
            for the same.
        rollout_memory: Share of a device that the engine may use with all that is on it; None for
            all of it, of which the KV cache gets up to 90%.
        rollout_devices: Devices of the rollout alone; 0 if rollout and training share all devices.
        max_num_seqs: Sequences that an engine runs at a time; None if unknown.
        eager: Engines decode without graphs.
        lora: Rank of adapters, 0 to train all parameters.
        offload: Share of the optimizer that is on the host. If above 0, training states also leave
            the device during the rollout.
        checkpointing: Activations of layers are recomputed.
    """

    model: Model
    device: Peak
    devices: int
    prompt: int
    response: int
    algorithm: Algorithm = "grpo"
    shard: Shard = "fsdp"
    batch: int | None = None
    group: int = 8
    mean: int | None = None
    tokens: int | None = None
    forward_tokens: int | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    rollout_tp: int | None = None
    rollout_ep: int | None = None
    rollout_memory: float | None = None
    rollout_devices: int = 0
    max_num_seqs: int | None = None
    eager: bool = False
    lora: int = 0
    offload: float = 0.0
    checkpointing: bool = True

    def __post_init__(self) -> None:
        self._check_numbers()
        ranks = self.training_devices
        replica = self.tp * self.pp * self.cp
        if ranks <= 0 or ranks % replica:
            raise RlprofError(
                f"{ranks} devices for training are not a multiple of tp x pp x cp = {replica}"
            )
        if self.shard != "megatron" and self.tp * self.pp * self.ep > 1:
            raise RlprofError(f"tp, pp and ep need shard megatron, not {self.shard}")
        experts = [each.block for each in self.model.layers if isinstance(each.block, Experts)]
        fits = experts and experts[0].count % self.ep == ranks % (self.ep * self.pp) == 0
        if self.ep > 1 and not fits:
            has = f"{experts[0].count} experts" if experts else "no experts"
            raise RlprofError(f"ep={self.ep} does not divide {has} among {ranks} devices")
        if self.pp > len(self.model.layers):
            raise RlprofError(f"pp={self.pp} is more than the {len(self.model.layers)} layers")
        self._check_rollout(experts[0].count if experts else None)
        for name in ("tokens", "forward_tokens"):
            value, least = getattr(self, name), self.sequences * self.length
            if value is not None and value < least:
                what = "one pair of sequences" if self.sequences > 1 else "one sequence"
                raise RlprofError(f"{name}={value} is less than the {least} tokens of {what}")

    def _check_rollout(self, experts: int | None) -> None:
        given = ("rollout_tp", "rollout_ep", "rollout_memory", "rollout_devices")
        if not self.generates and (named := [each for each in given if getattr(self, each)]):
            raise RlprofError(f"{named[0]}: {self.algorithm} has no rollout")
        for size, kind in ((self.rollout_tp, "tensor"), (self.rollout_ep, "expert")):
            if size and self.rollout_ranks % size:
                text = f"{self.rollout_ranks} devices for the rollout are not a multiple of"
                raise RlprofError(f"{text} its {kind} parallelism {size}")
        if self.rollout_ep and (not experts or experts % self.rollout_ep):
            raise RlprofError(
                f"rollout_ep={self.rollout_ep} does not divide {experts or 'no'} experts"
            )
        if self.rollout_ep and self.rollout_ep % (self.rollout_tp or 1):
            raise RlprofError(
                f"rollout_ep={self.rollout_ep} is not a multiple of rollout_tp={self.rollout_tp}"
            )

    def _check_numbers(self) -> None:
        for name, choices in (("algorithm", Algorithm), ("shard", Shard)):
            if (value := getattr(self, name)) not in get_args(choices):
                raise RlprofError(f"{name} {value!r} is not one of {', '.join(get_args(choices))}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and not 0 < value < _MAX_COUNT:
                raise RlprofError(f"{name}={value} is not a positive count")
        if self.mean is not None and self.mean > self.response:
            raise RlprofError(f"mean={self.mean} is more than the longest response {self.response}")
        if self.rollout_memory is not None and not 0 < self.rollout_memory <= 1:
            raise RlprofError(f"rollout_memory={self.rollout_memory} is not a share above 0, to 1")
        if not 0 <= self.offload <= 1:
            raise RlprofError(f"offload={self.offload} is not a share from 0 to 1")
        if self.lora < 0 or self.rollout_devices < 0:
            raise RlprofError("lora and rollout_devices cannot be negative")

    @property
    def training_devices(self) -> int:
        """Devices that train."""
        return self.devices - self.rollout_devices

    @property
    def rollout_ranks(self) -> int:
        """Devices that generate."""
        return self.rollout_devices or self.devices

    @property
    def data_parallel(self) -> int:
        """Ranks that have the same part of the model, without context parallelism."""
        return self.training_devices // (self.tp * self.pp * self.cp)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.response

    @property
    def generates(self) -> bool:
        """Whether responses are generated."""
        return self.algorithm in ("grpo", "ppo")

    @property
    def colocated(self) -> bool:
        """Whether rollout and training share all devices."""
        return self.generates and not self.rollout_devices

    @property
    def sequences(self) -> int:
        """Sequences that a micro-batch has at least: in DPO a chosen and a rejected one."""
        return 2 if self.algorithm == "dpo" else 1

    @property
    def micro_tokens(self) -> float:
        """Tokens of a micro-batch of the update on one device."""
        return (self.tokens or self.sequences * self.length) / self.cp

    @property
    def forward_micro_tokens(self) -> float:
        """Tokens of a micro-batch of forward-only passes on one device."""
        return self.forward_tokens / self.cp if self.forward_tokens else self.micro_tokens

    def changed(self, **changes: object) -> "Job":
        """Return another job."""
        return replace(self, **changes)  # type: ignore[arg-type]


def parse_devices(text: str) -> tuple[int, Peak]:
    """Return the number and the kind of devices; a device is known, or is its figures.

    Raises:
        RlprofError: The text is not a number, an x and a device.

    Example::

        >>> number, device = parse_devices("8xH100-80G")
        >>> number, device.label
        (8, 'H100-80G')
        >>> _, device = parse_devices("1x48GB@180TFLOPS@1.8TB/s")
        >>> device.memory_gb, device.tflops, device.gb_s
        (48.0, 180.0, 1800.0)
    """
    found = _DEVICES.fullmatch(text.strip())
    if found is None or not int(found[1]):
        hint = "Such as 8xH100-80G, or 8x48GB@180TFLOPS@1.8TB/s"
        raise RlprofError(f"devices {text!r}: not a number and a device", hint=hint)
    if (figures := _FIGURES.fullmatch(found[2])) is None:
        return int(found[1]), device_labeled(found[2])
    gb, tflops, tb_s = figures.groups(default="0")
    speed = float(tb_s) * 1e3 or None
    return int(found[1]), Peak(re.escape(found[2]), found[2], float(tflops), speed, float(gb))
