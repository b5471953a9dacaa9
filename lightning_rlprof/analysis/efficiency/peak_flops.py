"""Peak FLOP/s and bandwidth of devices by the names torch reports; FLOPs of transformers."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.records import Header

Type = Literal["fp32", "tf32", "bf16", "fp8", "int8", "fp4"]
"""Type of the numbers that a matmul multiplies; FP16 has the peak of BF16."""
_TYPES: tuple[Type, ...] = ("fp32", "tf32", "fp8", "int8", "fp4")

_SPEEDS = ("tflops", "gb_s", *_TYPES)
_ALL = (*_SPEEDS, "memory_gb")


@dataclass(frozen=True, slots=True)
class Peak:
    """What one device can do at most.

    Attributes:
        name: Pattern of the whole name that torch reports, ignoring case.
        label: Name for people, with the memory: ``H100-80G``.
        tflops: 10^12 FLOP/s in BF16 or FP16 with FP32 accumulation, dense: without sparsity; 0 if
            only the memory was given.
        gb_s: 10^9 bytes/s of its memory, None if a name has several or documents disagree.
        memory_gb: Size of its memory on the data sheet.
        others: Peaks of other types in 10^12 operations/s, dense.
        unconfirmed: Which of these no document of the vendor confirms, or documents contradict:
            ``tflops``, ``gb_s``, ``memory_gb``, and types of ``others``.
    """

    name: str
    label: str
    tflops: float
    gb_s: float | None
    memory_gb: float
    others: Mapping[Type, float] = field(default_factory=dict)
    unconfirmed: tuple[str, ...] = ()

    @property
    def usable(self) -> float:
        """Bytes that torch can see: 99% of the GiB on the data sheet."""
        return self.memory_gb * 2**30 * 0.99

    def of(self, kind: Type) -> float | None:
        """Return the peak of a type, None if unknown."""
        return self.tflops if kind == "bf16" else self.others.get(kind)

    def shown(self, figure: str) -> str:
        """Return a figure for people, with ``~`` before an unconfirmed one.

        Example::

            >>> h20 = next(device for device in DEVICES if device.label == "H20-96G")
            >>> h20.shown("tflops"), h20.shown("memory_gb"), h20.shown("fp4")
            ('~148', '96', '-')
        """
        value = self.others.get(figure) if figure in _TYPES else getattr(self, figure)
        mark = "~" if figure in self.unconfirmed else ""
        return "-" if value is None else f"{mark}{value:g}"


def _types(*tops: float | None) -> dict[Type, float]:
    """Return peaks by type: fp32, tf32, fp8, int8, fp4."""
    given = zip(_TYPES, tops, strict=False)
    return {kind: value for kind, value in given if value is not None}


_AMPERE = _types(19.5, 156, None, 624)
_HOPPER = _types(67, 494.7, 1979, 1979)
_HOPPER_CARD = _types(51.2, 378, 1513, 1513)
_MI300 = _types(163.4, 653.7, 2614.9, 2614.9)
_910C = _types(None, None, None, 752)
_950PR = _types(None, None, 757, None, 1514)
_B200 = _types(75, 1125, 4500, 4500, 9000)
_B300 = _types(75, 1125, 4500, None, 14000)
_GB200 = _types(80, 1250, 5000, 5000, 10000)
_H20 = _types(44, 74, 296, 296)
_MI350 = _types(144.2, None, 4614, 4614, 9228)
_MI355 = _types(157.3, None, 5033, 5033, 10066)
_RTX4090 = _types(82.6, 82.6, 330.3, 660.6)


DEVICES = (
    Peak("(NVIDIA )?A100-(SXM4|PCIE)-40GB", "A100-40G", 312.0, 1555, 40, _AMPERE),
    Peak("(NVIDIA )?A100-SXM4-80GB", "A100-80G", 312.0, 2039, 80, _AMPERE),
    Peak("NVIDIA A100 80GB PCIe", "A100-PCIe-80G", 312.0, 1935, 80, _AMPERE),
    Peak("NVIDIA A800-SXM4-40GB", "A800-40G", 312.0, None, 40, _AMPERE),
    Peak("NVIDIA A800-SXM4-80GB", "A800-80G", 312.0, 2039, 80, _AMPERE),
    Peak("NVIDIA A800 80GB PCIe", "A800-PCIe-80G", 312.0, 1935, 80, _AMPERE),
    Peak("NVIDIA H100 80GB HBM3", "H100-80G", 989.4, 3350, 80, _HOPPER),
    Peak("NVIDIA H100 PCIe", "H100-PCIe-80G", 756.0, 2000, 80, _HOPPER_CARD),
    Peak("NVIDIA H100 NVL", "H100-NVL-94G", 835.5, 3900, 94),
    # In the driver's list of products, H800 is the SXM module and H800 PCIe the card.
    Peak("NVIDIA H800", "H800-80G", 989.4, 3350, 80, _HOPPER),
    Peak("NVIDIA H800 PCIe", "H800-PCIe-80G", 756.0, 2000, 80, _HOPPER_CARD),
    Peak("NVIDIA H20", "H20-96G", 148.0, 4000, 96, _H20, _SPEEDS),
    Peak("NVIDIA H20-3e", "H20-141G", 148.0, 4800, 141, _H20, _SPEEDS),
    Peak("NVIDIA H200", "H200-141G", 989.4, 4800, 141, _HOPPER),
    Peak("NVIDIA H200 NVL", "H200-NVL-141G", 835.5, 4800, 141),
    Peak("NVIDIA GH200 (120|480)GB", "GH200-96G", 989.4, None, 96, _HOPPER, ("memory_gb",)),
    Peak("NVIDIA B200", "B200-180G", 2250.0, 8000, 180, _B200, ("gb_s", "memory_gb")),
    Peak("NVIDIA GB200", "GB200-186G", 2500.0, 8000, 186, _GB200, ("tflops", "memory_gb", *_TYPES)),
    Peak("NVIDIA B300", "B300-288G", 2250.0, 8000, 288, _B300, ("memory_gb", "fp4")),
    Peak("NVIDIA L40S", "L40S-48G", 362.05, 864, 48, _types(91.6, 183, 733, 733), _TYPES),
    Peak("NVIDIA L20", "L20-48G", 119.5, 864, 48, _types(59.8, 59.8, 239, 239), _ALL),
    Peak("NVIDIA L4", "L4-24G", 121.0, 300, 24),
    Peak("(NVIDIA )?A10", "A10-24G", 125.0, 600, 24),
    Peak("(NVIDIA )?A40", "A40-48G", 149.7, 696, 48),
    Peak("(NVIDIA )?RTX A6000", "A6000-48G", 154.8, 768, 48),
    Peak("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada-48G", 364.2, 960, 48),
    Peak(
        "NVIDIA RTX PRO 6000 Blackwell (Workstation|Server) Edition",
        *("RTXPRO6000-96G", 503.8, 1792, 96, {}, ("tflops",)),
    ),
    Peak("NVIDIA GB10", "GB10-128G", 125.0, 273, 128, {}, ("tflops",)),
    Peak("(Tesla|NVIDIA) T4", "T4-16G", 65.0, None, 16),
    Peak("Tesla V100-SXM2-(16|32)GB(-LS)?", "V100-32G", 125.0, 900, 32),
    Peak("Tesla V100-PCIE-(16|32)GB", "V100-PCIe-32G", 112.0, 900, 32),
    Peak("Tesla V100S-PCIE-32GB", "V100S-32G", 130.0, 1134, 32),
    Peak("NVIDIA GeForce RTX 3090", "RTX3090-24G", 71.0, 936, 24),
    Peak("NVIDIA GeForce RTX 4090", "RTX4090-24G", 165.2, 1008, 24, _RTX4090),
    Peak("NVIDIA GeForce RTX 5090", "RTX5090-32G", 209.5, 1792, 32),
    # For torch, each of the two dies of an MI250X is a device.
    Peak("AMD Instinct MI250X", "MI250X-64G", 191.5, 1638, 64, _types(47.9, None, None, 191.5)),
    # VF is a cloud's slice of a whole device.
    Peak("AMD Instinct MI300X( OAM| VF)?", "MI300X-192G", 1307.4, 5300, 192, _MI300),
    Peak("AMD Instinct MI325X( OAM)?", "MI325X-256G", 1307.4, 6000, 256, _MI300),
    Peak("AMD Instinct MI350X( OAM)?", "MI350X-288G", 2309.6, 8000, 288, _MI350),
    Peak("AMD Instinct MI355X( OAM)?", "MI355X-288G", 2516.6, 8000, 288, _MI355, _TYPES),
    # Huawei publishes no clocks, and product pages state 6% more than the files of CANN. A name
    # without a digit, Ascend910B, is a first-generation 910: unknown.
    Peak("Ascend910(B2|B2C)", "910B2-64G", 353.9, 1600, 64, _types(None, None, None, 708), _ALL),
    Peak("Ascend910B1", "910B1-64G", 353.9, 1600, 64, _types(None, None, None, 708), _ALL),
    Peak("Ascend910B3", "910B3-64G", 294.9, 1600, 64, _types(None, None, None, 590), _ALL),
    Peak("Ascend910B4", "910B4-32G", 245.8, 800, 32, _types(None, None, None, 491.5), _ALL),
    Peak("Ascend910B4-1", "910B4-1-64G", 245.8, 800, 64, _types(None, None, None, 491.5), _ALL),
    # For torch_npu, each of the two dies of a 910C is a device.
    Peak("Ascend910_(9391|9392|9381|9382)", "910C-64G", 376.0, 1600, 64, _910C, _ALL),
    Peak("Ascend950PR_957(9|8|7|6|5|4|3|2|1|0)", "950PR-112G", 378.5, 1400, 112, _950PR, _ALL),
    Peak("Ascend950DT", "950DT-144G", 432.5, 4000, 144, _types(None, None, 865, None, 1730), _ALL),
)
"""What a vendor's document gives for exactly that name; a slice of a device (MIG) has another.

docs/efficiency.md names the document of each. A number given with sparsity is halved.
"""

_PEAKS = tuple((re.compile(device.name, re.IGNORECASE), device) for device in DEVICES)


def device_of(name: str) -> Peak | None:
    """Return the device of a name that torch reports, None if unknown or ambiguous.

    Example::

        >>> device_of("NVIDIA H100 80GB HBM3").label, device_of("NVIDIA H100")
        ('H100-80G', None)
    """
    return next((peak for pattern, peak in _PEAKS if pattern.fullmatch(name)), None)


def device_labeled(label: str) -> Peak:
    """Return the device with a label, with or without the memory if only one has the rest.

    Raises:
        RlprofError: No device has it, or several have.

    Example::

        >>> device_labeled("H100-80G").tflops, device_labeled("h100").label
        (989.4, 'H100-80G')
    """
    own = label.lower()
    exact = [device for device in DEVICES if device.label.lower() == own]
    found = exact or [
        device for device in DEVICES if device.label.lower().rpartition("-")[0] == own
    ]
    if len(found) != 1:
        names = ", ".join(device.label for device in found or DEVICES)
        text = f"{label!r} may be several devices" if found else f"unknown device {label!r}"
        raise RlprofError(text, hint=f"Known: {names}", code="device")
    return found[0]


def recorded_device(header: Header) -> Peak | None:
    """Return the device of a rank, with the peak of the chip where the run recorded that.

    CANN's cores and clock go before the table: each cube multiplies 16 x 16 by 16 x 16 matrices in
    a cycle in BF16, and other types in proportion.

    Example::

        >>> head = Header(1, "r", 0, 1, "actor", "a", 1, "npu", 0, 0, device_name="Ascend910B2")
        >>> recorded_device(head).shown("tflops")
        '~353.9'
        >>> head = replace(head, chip={"cube_cores": 24, "cube_mhz": 1800})
        >>> recorded_device(head).shown("tflops")
        '353.894'
    """
    found, chip = device_of(header.hardware), header.chip
    cores, clock = chip.get("cube_cores", 0), chip.get("cube_mhz", 0)
    if not cores or not clock:
        return found
    tflops = 2 * 16**3 * cores * clock / 1e6
    if found is None:
        name = header.hardware
        return Peak(re.escape(name), name, tflops, None, 0, {"int8": 2 * tflops})
    others = {kind: top * tflops / found.tflops for kind, top in found.others.items()}
    open_ = tuple(each for each in found.unconfirmed if each in ("gb_s", "memory_gb"))
    return replace(found, tflops=tflops, others=others, unconfirmed=open_)


def unconfirmed_note(headers: Iterable[Header], *figures: str) -> str:
    """Return a remark on the devices of which one of these figures is unconfirmed, or nothing.

    Example::

        >>> head = Header(1, "r", 0, 1, "actor", "a", 1, "NVIDIA H20", 0, 0)
        >>> unconfirmed_note([head, replace(head, device="NVIDIA H200")], "gb_s")
        'Unconfirmed: NVIDIA H20 ~4000 GB/s.'
    """
    units = {"tflops": "TFLOP/s", "gb_s": "GB/s"}
    found = {
        f"{header.hardware} {peak.shown(figure)} {units[figure]}": None
        for header in sorted(headers, key=lambda header: header.hardware)
        if (peak := recorded_device(header))
        for figure in figures
        if figure in peak.unconfirmed
    }
    return f"Unconfirmed: {', '.join(found)}." if found else ""


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
