"""Peak FLOP/s and bandwidth of devices by the names torch reports; FLOPs of transformers."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peak:
    """What one device can do at most.

    Attributes:
        name: Pattern of the whole name that torch reports, ignoring case.
        tflops: 10^12 FLOP/s in BF16 or FP16 with FP32 accumulation, dense: without sparsity.
        gb_s: 10^9 bytes/s of its memory, None if a name has several or documents disagree.
        source: Document of the vendor. A number given with sparsity is halved.
    """

    name: str
    tflops: float
    gb_s: float | None
    source: str


DEVICES = (
    Peak("(NVIDIA )?A100-(SXM4|PCIE)-40GB", 312.0, 1555, "NVIDIA A100 Tensor Core GPU data sheet"),
    Peak("(NVIDIA )?A100-SXM4-80GB", 312.0, 2039, "NVIDIA A100 Tensor Core GPU data sheet"),
    Peak("NVIDIA A100 80GB PCIe", 312.0, 1935, "NVIDIA A100 Tensor Core GPU data sheet"),
    Peak("NVIDIA A800-SXM4-40GB", 312.0, None, "NVIDIA A800 Tensor Core GPU data sheet"),
    Peak("NVIDIA A800-SXM4-80GB", 312.0, 2039, "NVIDIA A800 Tensor Core GPU data sheet"),
    Peak("NVIDIA A800 80GB PCIe", 312.0, 1935, "NVIDIA A800 Tensor Core GPU data sheet"),
    Peak("NVIDIA H100 80GB HBM3", 989.4, 3350, "NVIDIA H100 Tensor Core GPU architecture, SXM5"),
    Peak("NVIDIA H100 PCIe", 756.0, 2000, "NVIDIA H100 PCIe GPU product brief and data sheet"),
    Peak("NVIDIA H100 NVL", 835.5, 3900, "NVIDIA H100 Tensor Core GPU data sheet, NVL"),
    # In the driver's list of products, H800 is the SXM module and H800 PCIe the card.
    Peak("NVIDIA H800", 989.4, 3350, "NVIDIA H800 Tensor Core GPU data sheet, SXM"),
    Peak("NVIDIA H800 PCIe", 756.0, 2000, "NVIDIA H800 Tensor Core GPU data sheet, PCIe"),
    Peak("NVIDIA H20", 148.0, 4000, "NVIDIA H20 GPU data sheet"),
    Peak("NVIDIA H200", 989.4, 4800, "NVIDIA H200 Tensor Core GPU data sheet, SXM"),
    Peak("NVIDIA H200 NVL", 835.5, 4800, "NVIDIA H200 Tensor Core GPU data sheet, NVL"),
    Peak("NVIDIA GH200 (120|480)GB", 989.4, None, "NVIDIA GH200 Grace Hopper Superchip data sheet"),
    Peak("NVIDIA B200", 2250.0, None, "NVIDIA Blackwell data sheet, HGX B200"),
    Peak("NVIDIA GB200", 2500.0, 8000, "NVIDIA Blackwell data sheet, GB200 NVL72"),
    Peak("NVIDIA L40S", 362.05, 864, "NVIDIA L40S data sheet"),
    Peak("(NVIDIA )?A10", 125.0, 600, "NVIDIA A10 Tensor Core GPU data sheet"),
    Peak("(Tesla|NVIDIA) T4", 65.0, None, "NVIDIA T4 Tensor Core GPU data sheet (FP16)"),
    Peak("Tesla V100-SXM2-(16|32)GB(-LS)?", 125.0, 900, "NVIDIA V100 data sheet (FP16)"),
    Peak("Tesla V100-PCIE-(16|32)GB", 112.0, 900, "NVIDIA V100 data sheet (FP16)"),
    Peak("Tesla V100S-PCIE-32GB", 130.0, 1134, "NVIDIA V100 data sheet, V100S (FP16)"),
    Peak("NVIDIA GeForce RTX 4090", 165.2, 1008, "NVIDIA Ada GPU architecture, appendix A"),
    Peak("NVIDIA GeForce RTX 5090", 209.5, 1792, "NVIDIA RTX Blackwell architecture, appendix A"),
    # torch sees each of the two dies of an MI250X as a device.
    Peak("AMD Instinct MI250X", 191.5, 1638, "AMD Instinct MI250X data sheet, half of 383"),
    Peak("AMD Instinct MI300X( OAM)?", 1307.4, 5300, "AMD Instinct MI300X data sheet"),
    Peak("AMD Instinct MI325X( OAM)?", 1307.4, 6000, "AMD Instinct MI325X data sheet"),
    Peak("AMD Instinct MI355X( OAM)?", 2516.6, 8000, "AMD Instinct MI355X data sheet"),
)
"""What a vendor's document gives for exactly that name; a slice of a device (MIG) has another."""

_PEAKS = tuple((re.compile(device.name, re.IGNORECASE), device) for device in DEVICES)
_TRAINING = re.compile(
    r"(actor|critic|policy|ppo)_(update|train|training)|update_(actor|critic|policy)"
    r"|train|training|train_step|train_batch|training_step"
)
_FORWARD = re.compile(
    r"(actor_)?generate(_\w+)?|rollouts?|generation|gen|(critic_)?compute_values|values"
    r"|(\w+_)?log_probs?"
)


def peak_of(device: str) -> float | None:
    """Return the peak of a device in TFLOP/s, None if unknown or ambiguous.

    Example::

        >>> peak_of("NVIDIA H100 80GB HBM3"), peak_of("NVIDIA H100"), peak_of("Ascend910B3")
        (989.4, None, None)
    """
    return next((peak.tflops for name, peak in _PEAKS if name.fullmatch(device)), None)


def bandwidth_of(device: str) -> float | None:
    """Return the bandwidth of a device's memory in GB/s, None if unknown.

    Example::

        >>> bandwidth_of("NVIDIA H100 80GB HBM3"), bandwidth_of("NVIDIA GH200 480GB")
        (3350, None)
    """
    return next((peak.gb_s for name, peak in _PEAKS if name.fullmatch(device)), None)


def kind_of(stage: str) -> str | None:
    """Return whether a stage trains or only goes forward, by its name; None if unknown.

    Example::

        >>> kind_of("actor_update"), kind_of("actor_generate"), kind_of("compute_reward")
        ('training', 'forward', None)
    """
    name = stage.lower()
    if _TRAINING.fullmatch(name):
        return "training"
    return "forward" if _FORWARD.fullmatch(name) else None


def token_flops(parameters: float, kind: str) -> float:
    """Return the FLOPs of one token: 6 N in training, 2 N in a forward pass alone.

    N counts the parameters that a token passes; in a mixture of experts, the active ones. From
    Kaplan et al. 2020, arXiv:2001.08361, section 2.1. Recomputation for activation checkpointing
    does not count.

    Example::

        >>> token_flops(7e9, "training"), token_flops(7e9, "forward")
        (42000000000.0, 14000000000.0)
    """
    return (6.0 if kind == "training" else 2.0) * parameters
