"""The kinds of events in torch.profiler's traces: which event is of which, and what is kept."""

import re
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.chrome_args import (
    ALLOCATED,
    CALLED,
    COMMUNICATED,
    COPIED,
    LAUNCHED,
    RAN,
    SHAPED,
    Arguments,
)
from lightning_rlprof.loaders.products import PRODUCTS

__all__ = [
    "ANNOTATION",
    "ARGUMENTS",
    "COLLECTIVE",
    "COPY",
    "COUNTER",
    "DERIVED",
    "DEVICE_ANNOTATION",
    "EVERY",
    "KEPT",
    "KERNEL",
    "KINDS",
    "LAUNCH",
    "MEMORY",
    "METADATA",
    "OPERATOR",
    "PARAMETERS",
    "PYTHON",
    "SHAPES",
    "Shapes",
    "Slices",
    "is_communication",
    "signs_of",
]

KERNEL, LAUNCH, ANNOTATION, DEVICE_ANNOTATION = range(4)
"""A device's work, calls of its driver, marked ranges, their shadow on the device."""

COPY, OPERATOR, PYTHON, MEMORY, COUNTER, COLLECTIVE, PARAMETERS, SHAPES = range(4, 12)
"""Copies of a device, operators, Python's functions, changes of memory, samples of counters; the
kernels that communicate, which are among the kernels, the operators that say what they send, and
those whose FLOPs follow from their inputs."""

KINDS: Final = 12
"""How many kinds there are: codes from here on are those of events that are not taken."""

METADATA = 2 * KINDS
"""Events that name threads and processes."""

_LEFT = METADATA + KINDS  # and of the kinds, and what else there is

DERIVED = {COLLECTIVE: KERNEL, PARAMETERS: OPERATOR, SHAPES: OPERATOR}
"""Kinds that are found by what is in events of another one, and which that is."""

_DRIVERS = ("cuda", "hip", "xpu", "mtia", "musa", "privateuse1")
_LAUNCHING = [f"{driver}_{api}" for driver in _DRIVERS for api in ("runtime", "driver")]
_CATEGORIES = {
    **dict.fromkeys(("kernel", "Kernel"), KERNEL),  # with capitals in torch 1.8
    **dict.fromkeys((*_LAUNCHING, "Runtime"), LAUNCH),
    "user_annotation": ANNOTATION,
    "gpu_user_annotation": DEVICE_ANNOTATION,
    **dict.fromkeys(("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"), COPY),
    **dict.fromkeys(("cpu_op", "Operator"), OPERATOR),
    "python_function": PYTHON,
    "cpu_instant_event": MEMORY,
}
_ARROWS = {"ac2g", "fwdbwd", "async_cpu_to_gpu"}
_MOST_SHAPES = 1_000

_PARAMETERS, _CHANGE = "record_param_comms", "[memory]"
# NCCL, RCCL and their like by their prefixes; fused ones by what they do.
_COMMUNICATES = re.compile(
    r"[nrx]ccl|msccl|oneccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|cross_device_reduce",
    re.IGNORECASE,
)

ARGUMENTS: dict[int, Arguments] = {
    KERNEL: RAN,
    LAUNCH: LAUNCHED,
    COPY: COPIED,
    OPERATOR: CALLED,
    MEMORY: ALLOCATED,
    COLLECTIVE: COMMUNICATED,
    PARAMETERS: COMMUNICATED,
    SHAPES: SHAPED,
}
"""What is read of the arguments of a kind, where that is anything."""

_ALWAYS = ("start_ns", "end_ns", "lane", "name")
_DEVICE = (*_ALWAYS, "launch", "device", "stream")
_SENT = ("external", "size", "incoming", "outgoing", "number", "operation", "type", "group")
KEPT: dict[int, tuple[str, ...]] = {
    KERNEL: _DEVICE,
    LAUNCH: (*_ALWAYS, "launch"),
    ANNOTATION: _ALWAYS,
    DEVICE_ANNOTATION: _ALWAYS,
    COPY: (*_DEVICE, "bytes"),
    OPERATOR: (*_ALWAYS, "sequence", "forward"),
    PYTHON: _ALWAYS,
    MEMORY: ("start_ns", "kind", "device", "allocated", "reserved"),
    COUNTER: ("start_ns", "lane", "name", "value"),
    COLLECTIVE: (*_DEVICE, *_SENT),
    PARAMETERS: (*_ALWAYS, *_SENT),
    SHAPES: (*_ALWAYS, "dims", "types", "values"),
}
"""Columns of each kind."""

EVERY = frozenset(KEPT)
"""All kinds."""


class Shapes(dict[tuple[str | None, str], int]):
    """What to do with an event, by category and phase.

    A kind below `KINDS`: take it. `KINDS` and more: it is of that kind less `KINDS`, and only a
    beginning, as torch writes none. From ``METADATA + 1`` on: of that kind, and not to be taken.

    Example::

        >>> shapes = Shapes()
        >>> shapes["kernel", "X"] == KERNEL, shapes["kernel", "B"] == KINDS + KERNEL
        (True, True)
        >>> shapes[None, "C"] == COUNTER, shapes["ac2g", "s"] > METADATA + KINDS
        (True, True)
    """

    def __missing__(self, shape: tuple[str | None, str]) -> int:
        """Return the code of a shape that was not seen yet."""
        code = _code(*shape)
        if len(self) < _MOST_SHAPES:
            self[shape] = code
        return code


class Slices(dict[str | None, int]):
    """The same by category alone for phase X, of which most events are: no pair is made.

    Example::

        >>> Slices()["kernel"] == KERNEL
        True
    """

    def __missing__(self, category: str | None) -> int:
        """Return the code of a category that was not seen yet."""
        code = _code(category, "X")
        if len(self) < _MOST_SHAPES:
            self[category] = code
        return code


def _code(category: str | None, phase: str) -> int:
    kind = _CATEGORIES.get(category or "")
    if kind is not None:
        if phase == ("i" if kind == MEMORY else "X"):
            return kind
        return KINDS + kind if phase in ("B", "b") else METADATA + 1 + kind
    if category in _ARROWS or phase not in ("C", "M"):
        return _LEFT + 1
    return COUNTER if phase == "C" else METADATA


def signs_of(names: Iterable[str]) -> npt.NDArray[np.int8]:
    """Return the kind that the name of an event tells, -1 for most."""
    told = {_PARAMETERS: PARAMETERS, _CHANGE: MEMORY, **dict.fromkeys(PRODUCTS, SHAPES)}
    kinds = (COLLECTIVE if is_communication(name) else told.get(name, -1) for name in names)
    return np.fromiter(kinds, np.int8)


def is_communication(kernel: str) -> bool:
    """Tell whether a kernel of that name is a collective's.

    Example::

        >>> is_communication("ncclDevKernel_AllReduce_Sum_f32_RING_LL"), is_communication("gemm")
        (True, False)
    """
    return _COMMUNICATES.search(kernel) is not None
