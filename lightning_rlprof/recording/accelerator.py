"""Say what accelerator this process has and how its memory stands, on every kind of device.

Kinds are torch's names of devices: ``cuda`` (NVIDIA and ROCm), ``npu`` (Ascend), ``xpu``, ``mps``,
``cpu``. Questions go to ``torch.accelerator`` where the installed torch answers them there, else to
``torch.<kind>``. What a device cannot tell is None or left out, never zero; a question that fails
is one that the device cannot answer, so only `reset_peak` and `use_device` raise.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from configparser import ConfigParser, Error
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from lightning_rlprof.recording.call_wrapping import within
from lightning_rlprof.system.post_import import process_group

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])

# Section and key in CANN's files, and a limit above the value of any chip.
_CHIP = {
    "cube_cores": ("SoCInfo", "cube_core_cnt", 1_000),
    "cube_mhz": ("AICoreSpec", "cube_freq", 10_000),
}
_BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}

# Counters, by their keys in torch's memory_stats.
_ALLOCATOR = {
    "allocated_bytes.all.current": "device_allocated_bytes",
    "allocated_bytes.all.peak": "device_peak_bytes",
    "reserved_bytes.all.current": "device_reserved_bytes",
}


def _installed_torch() -> Any:
    try:
        found: Any = import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    if tuple(map(int, found.__version__.split(".")[:2])) < (2, 6):
        raise ImportError(
            f"recording needs PyTorch 2.6 or newer, found {found.__version__}. "
            'Run: pip install "lightning-rlprof[lightning]"'
        )
    return found


torch: Any = _installed_torch()
"""PyTorch; None if it is not installed, as in the Python of a tool server."""


def device_kind() -> str:
    """Return the kind of accelerator that this process can use, or ``cpu``.

    Example::

        >>> device_kind() in {"cpu", "cuda", "npu", "xpu", "mps"}
        True
    """
    if torch is None:
        return "cpu"
    # Without devices, torch_npu still names npu as the current accelerator; torch 2.6 then fails.
    try:
        device = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
    except RuntimeError:
        return "cpu"
    return "cpu" if device is None else str(device.type)


def device_name(kind: str | None = None) -> str | None:
    """Return the model of this process's accelerator, e.g. ``NVIDIA H100 80GB HBM3``, or None."""
    name = _ask(device_kind() if kind is None else kind, "get_device_name")
    return None if name is None else str(name)


def chip_facts(name: str | None) -> dict[str, int]:
    """Return cores and clock of an Ascend as CANN's ``platform_config`` on this machine has them.

    Product pages state other clocks, and none is published. Empty without that file, or if it
    has no plausible numbers.

    Args:
        name: What `device_name` returns, ``Ascend910B2``: the name of the file.
    """
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if not home or not name or not re.fullmatch(r"[\w-]{1,64}", name):
        return {}
    found = {}
    for folder in ("data", "*/data", "*/*/data"):
        for path in sorted(Path(home).glob(f"{folder}/platform_config/{name}.ini")):
            parser = ConfigParser(strict=False, interpolation=None)
            with suppress(Error, OSError, UnicodeDecodeError):
                parser.read_string(path.read_text(encoding="utf-8"))
            for fact, (section, key, most) in _CHIP.items():
                text = parser.get(section, key, fallback="").strip()
                if text.isdecimal() and 0 < int(text) < most:
                    found[fact] = int(text)
            if len(found) == len(_CHIP):
                return found
            found = {}
    return {}


def device_count() -> int | None:
    """Return how many accelerators this process sees; None on a CPU."""
    return _number(_ask(device_kind(), "device_count"))


def device_index() -> int | None:
    """Return which accelerator the calling thread uses; None on a CPU."""
    return _number(_ask(device_kind(), "current_device_index", "current_device"))


def used_device(kind: str) -> tuple[int, str | None] | None:
    """Return number and UUID of the device that the calling thread uses, None until it uses one.

    To ask torch which one is current would make it start the device, for some hundred megabytes.
    """
    if not _ask(kind, "is_initialized") or (index := device_index()) is None:
        return None
    uuid = getattr(_call(kind, ("get_device_properties",), index), "uuid", None)
    return index, None if uuid is None else str(uuid)


def device_memory() -> tuple[int | None, int | None]:
    """Return (used, total) bytes of this thread's accelerator, by all processes on it."""
    return _used_and_total(device_kind())


def device_backend() -> str:
    """Return the backend of torch.distributed for this process: nccl, hccl, xccl or gloo.

    Example::

        >>> device_backend() in {"nccl", "hccl", "xccl", "gloo"}
        True
    """
    return _BACKENDS.get(device_kind(), "gloo")


def allocator_bytes(kind: str) -> dict[str, int]:
    """Return the keys of `memory_bytes` that torch's allocator knows; the driver isn't asked."""
    stats = _ask(kind, "memory_stats") or {}
    return {key: int(stats[name]) for name, key in _ALLOCATOR.items() if name in stats}


def memory_bytes(kind: str) -> dict[str, int]:
    """Return the memory of the calling thread's device in bytes, by torch's allocator and driver.

    Keys: ``device_allocated_bytes`` (in tensors), ``device_peak_bytes`` (the highest of those since
    `reset_peak`), ``device_reserved_bytes`` (held by torch's allocator), ``device_used_bytes``
    (whole device, all processes) and ``device_other_bytes``, which is used less reserved: other
    processes, and what this one holds outside torch's allocator, such as its CUDA context, NCCL's
    buffers or the pool of a rollout engine. What a device cannot tell is left out.
    """
    found = allocator_bytes(kind)
    used, _ = _used_and_total(kind)
    if used is not None:
        found["device_used_bytes"] = used
        if "device_reserved_bytes" in found:
            # The two are not read at one instant.
            found["device_other_bytes"] = max(0, used - found["device_reserved_bytes"])
    return found


def reset_peak(kind: str) -> None:
    """Start a new peak of allocated memory; does nothing on a device that keeps none.

    Raises:
        RuntimeError: The device keeps a peak and does not let go of it.
    """
    _call(kind, ("reset_peak_memory_stats",))


def use_device(kind: str, index: int) -> None:
    """Choose the calling thread's device: a new thread begins on the first one, not on its maker's.

    Raises:
        RuntimeError: The device does not exist.
    """
    _call(kind, ("set_device_index", "set_device"), index)


def _used_and_total(kind: str) -> tuple[int | None, int | None]:
    if found := _ask(kind, "get_memory_info", "mem_get_info"):
        free, total = found
        return int(total) - int(free), int(total)
    return None, None


def _number(answer: Any) -> int | None:
    return None if answer is None else int(answer)


def _ask(kind: str, *names: str) -> Any:
    """Return the first answer to a question under one of its names, or None."""
    try:
        return _call(kind, names)
    except Exception as error:
        log.debug("%s does not report %s: %s", kind, names[0], error)
        return None


def _call(kind: str, names: tuple[str, ...], *arguments: Any) -> Any:
    """Return what the first function that works returns; raises the last error if none does."""
    failed: Exception | None = None
    for function in _functions(kind, names):
        try:
            return function(*arguments)
        except Exception as error:
            failed = error
    if failed is not None:
        raise failed
    return None


def _functions(kind: str, names: tuple[str, ...]) -> Iterator[Callable[..., Any]]:
    """Find a question in torch.accelerator (of memory: torch >= 2.9), then in torch.<kind>."""
    # Of a CPU, torch.accelerator would answer for a device that the run does not use.
    if kind == "cpu" or torch is None:
        return
    for home in (torch.accelerator, getattr(torch, kind, None)):
        for name in names:
            function = getattr(home, name, None)
            if callable(function):
                yield function


def log_memory(
    head: str,
    logger: logging.Logger | None = None,
    level: int = logging.INFO,
    rank: int | None = 0,
) -> None:
    """Log ``after generate, memory allocated (GB): 1.50, memory reserved (GB): …``.

    Device memory is the driver's, used by all processes: it also shows what lies outside torch's
    allocator, as the pool of a sleeping rollout engine. A GB is 2**30 bytes, as in verl, and ``-``
    stands for what the device does not tell. Costs nothing while the logger's level is above.

    Args:
        head: What has just happened.
        logger: Where the line goes; unset, ``lightning_rlprof.recording.accelerator``.
        level: At what level.
        rank: The rank that logs, of torch.distributed as it is at this call; None for all.

    Example::

        >>> log_memory("after generate")
    """
    _write(head, logger or log, level, rank)


class MemoryLog:
    """Two lines, before and after: use it as ``with`` or as ``@``; made by `log_memory_around`."""

    def __init__(
        self, head: str, logger: logging.Logger | None, level: int, rank: int | None
    ) -> None:
        self._head, self._where = head, (logger or log, level, rank)

    def __enter__(self) -> None:
        """Log ``Before <head>, …``."""
        _write(f"Before {self._head}", *self._where)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Log ``After <head>, …``, also when the block failed."""
        _write(f"After {self._head}", *self._where)

    def __call__(self, function: F) -> F:
        """Return the function with two lines per call of it, or per item of a generator."""
        return within(self, function)


def log_memory_around(
    head: str,
    logger: logging.Logger | None = None,
    level: int = logging.INFO,
    rank: int | None = 0,
) -> MemoryLog:
    """Log ``Before <head>, …`` and ``After <head>, …`` around a block or every call of a function.

    Functions may be coroutines and generators, too; the arguments are those of `log_memory`.

    Example::

        >>> @log_memory_around("actor update")
        ... def update() -> int:
        ...     return 1
        >>> update()
        1
    """
    return MemoryLog(head, logger, level, rank)


def _write(head: str, logger: logging.Logger, level: int, rank: int | None) -> None:
    if not logger.isEnabledFor(level) or rank not in (None, _own_rank(rank)):
        return
    found = memory_bytes(device_kind())
    allocated, reserved = found.get("device_allocated_bytes"), found.get("device_reserved_bytes")
    used, total = device_memory()
    logger.log(
        level,
        "%s, memory allocated (GB): %s, memory reserved (GB): %s, "
        "device memory used/total (GB): %s/%s",
        head,
        *map(_gigabytes, (allocated, reserved, used, total)),
        stacklevel=3,
    )


def _own_rank(alone: int | None) -> int | None:
    """Return the rank in the process group as it is now; without one, this process is the one."""
    distributed = process_group()
    return alone if distributed is None else int(distributed.get_rank())


def _gigabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f}"
