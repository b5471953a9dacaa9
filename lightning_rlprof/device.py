"""Say what accelerator this process has and how its memory stands, on every kind of device.

Kinds are torch's names of devices: ``cuda`` (NVIDIA and ROCm), ``npu`` (Ascend), ``xpu``, ``mps``,
``cpu``. Memory is asked through ``torch.accelerator`` where the installed torch has it there.
"""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

__all__ = ["device_kind", "host_rss_bytes", "memory_bytes", "reset_peak"]

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def device_kind() -> str:
    """Return the kind of accelerator that this process can use, or ``cpu``.

    Example::

        >>> device_kind() in {"cpu", "cuda", "npu", "xpu", "mps"}
        True
    """
    # is_available, since a torch_npu without devices still names npu as the current accelerator.
    if not torch.accelerator.is_available():
        return "cpu"
    device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type


def memory_bytes(kind: str) -> dict[str, int]:
    """Return the device's memory in bytes by torch's allocator and by its driver.

    Keys: ``device_peak_bytes`` (highest allocated since `reset_peak`), ``device_reserved_bytes``,
    ``device_used_bytes`` (whole device, all processes); what a device cannot tell is left out.
    """
    found: dict[str, int] = {}
    for key, name in (
        ("device_peak_bytes", "max_memory_allocated"),
        ("device_reserved_bytes", "memory_reserved"),
    ):
        if ask := _allocator(kind, name):
            found[key] = ask()
    if ask := _module_function(_module(kind), "mem_get_info"):
        free, total = ask()
        found["device_used_bytes"] = total - free
    return found


def reset_peak(kind: str) -> None:
    """Start a new peak of allocated memory; does nothing on a device that keeps none."""
    if reset := _allocator(kind, "reset_peak_memory_stats"):
        reset()


def host_rss_bytes() -> int | None:
    """Return the memory of this process that is resident on the host, in bytes; None off Linux."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None


def _allocator(kind: str, name: str) -> Callable[[], Any] | None:
    """Find an allocator's question in torch.accelerator (torch >= 2.9), else in torch.<kind>."""
    if kind == "cpu":
        return None
    return _module_function(torch.accelerator, name) or _module_function(_module(kind), name)


def _module(kind: str) -> ModuleType | None:
    module = None if kind == "cpu" else getattr(torch, kind, None)
    return module if isinstance(module, ModuleType) else None


def _module_function(module: ModuleType | None, name: str) -> Callable[[], Any] | None:
    function = getattr(module, name, None)
    return function if callable(function) else None
