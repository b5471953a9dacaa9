"""Log the memory of this process's accelerator as one line, in verl's words."""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from lightning_rlprof.recording import accelerator
from lightning_rlprof.recording.call_wrapping import within

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


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
    found = accelerator.memory_bytes(accelerator.device_kind())
    allocated, reserved = found.get("device_allocated_bytes"), found.get("device_reserved_bytes")
    used, total = accelerator.device_memory()
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
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return alone


def _gigabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f}"
