"""Name the kinds of events in torch.profiler traces, and read their arguments as columns."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.loaders.chrome.decoding import MISSING, Codes, Id, integers
from lightning_rlprof.loaders.host_calls import PRODUCTS

_Columns = dict[str, npt.NDArray[Any]]

_LONGEST = 1_000  # characters of the shapes of one call


def _field(name: str, default: Id | msgspec.Raw = MISSING) -> Any:
    return msgspec.field(default=default, name=name)


class _Launched(msgspec.Struct, gc=False):
    external: Id = _field("External id")
    correlation: Id = MISSING


class _Ran(_Launched, gc=False):
    device: Id = MISSING
    stream: Id = MISSING


class _Copied(_Ran, gc=False):
    bytes: Id = MISSING


class _Called(msgspec.Struct, gc=False):
    sequence: Id = _field("Sequence number")
    forward: Id = _field("Fwd thread id")


class _Allocated(msgspec.Struct, gc=False):
    kind: Id = _field("Device Type")
    device: Id = _field("Device Id")
    allocated: Id = _field("Total Allocated")
    reserved: Id = _field("Total Reserved")


class _Communicated(_Ran, gc=False):
    operation: Id = _field("Collective name", None)
    type: Id = _field("dtype", None)
    group: Id = _field("Process Group Name", None)
    group_id: Id = _field("Process Group ID", None)
    description: Id = _field("Process Group Description", None)
    size: Id = _field("Group size")
    incoming: Id = _field("In msg nelems")
    outgoing: Id = _field("Out msg nelems")
    number: Id = _field("Seq")


class _Shaped(msgspec.Struct, gc=False):
    dims: msgspec.Raw = _field("Input Dims", msgspec.Raw())
    types: msgspec.Raw = _field("Input type", msgspec.Raw())
    values: msgspec.Raw = _field("Concrete Inputs", msgspec.Raw())


class Arguments(NamedTuple):
    """How arguments of one kind of event become columns.

    Attributes:
        decode: Reads a JSON array of them.
        columns: Makes columns; texts become codes.
        sign: Stands in all arguments that matter; the others, which are most, are not read.
    """

    decode: Callable[[bytes], list[Any]]
    columns: Callable[[list[Any], Codes], _Columns]
    sign: bytes = b""


def read_arguments(
    raw: Sequence[msgspec.Raw], arguments: Arguments, texts: Codes
) -> tuple[_Columns, list[bool] | None]:
    """Return arguments as columns, and which of them can be read, None where all can.

    Those that cannot be read have no row.
    """
    joined, places = b",".join(raw), None
    if arguments.sign:
        places = holding(raw, joined, arguments.sign)
        joined = b",".join([raw[at] for at in places])
    try:
        args = arguments.decode(b"[" + joined + b"]")
    except NOT_JSON:
        sound = [_is_readable(each, arguments) for each in raw]
        columns, _ = read_arguments(list(compress(raw, sound)), arguments, texts)
        return columns, sound
    columns = arguments.columns(args, texts)
    if places is not None:
        read, columns = columns, {name: np.full(len(raw), MISSING) for name in columns}
        for name, column in columns.items():
            column[places] = read[name]
    return columns, None


def holding(raw: Sequence[msgspec.Raw], joined: bytes, sign: bytes) -> list[int]:
    """Return which of some texts contain a sign, each once.

    Args:
        raw: The texts.
        joined: All of them, a comma between two, so that one search finds all.
        sign: What may stand in them.
    """
    found, at = [], joined.find(sign)
    while at >= 0:
        found.append(at)
        at = joined.find(sign, at + len(sign))
    if not found:
        return []
    ends = np.cumsum([len(each) + 1 for each in raw])
    places: list[int] = np.unique(np.searchsorted(ends, found, "right")).tolist()
    return places


def _is_readable(each: msgspec.Raw, arguments: Arguments) -> bool:
    try:
        arguments.decode(b"[" + bytes(each) + b"]")
    except NOT_JSON:
        return False
    return True


def _numbers(args: list[Any], *names: str) -> _Columns:
    return {name: integers(list(map(attrgetter(name), args))) for name in names}


def _launches(args: list[Any]) -> _Columns:
    """Return what kernels and their launches have in common: correlation, else External id."""
    found = integers([each.correlation for each in args])
    if (found < 0).any():
        external = integers([each.external for each in args])
        # Below `MISSING`, so that the two kinds of number never meet.
        found = np.where(found >= 0, found, np.where(external >= 0, -2 - external, MISSING))
    return {"launch": found}


def _communicated(args: list[Any], texts: Codes) -> _Columns:
    numbers = ("device", "stream", "external", "size", "incoming", "outgoing", "number")
    words: dict[str, list[Any]] = {
        "operation": [each.operation for each in args],
        "type": [each.type for each in args],
        "group": [_group(each) for each in args],
    }
    coded = {
        name: np.array([-1 if word is None else texts[str(word)] for word in own], np.int32)
        for name, own in words.items()
    }
    return {**_launches(args), **_numbers(args, *numbers), **coded}


def _shaped(args: list[Any], texts: Codes) -> _Columns:
    """Return codes of JSON without white space; calls of a model are of few kinds."""
    whole = [b"\0".join((each.dims, each.types, each.values)) for each in args]
    kinds = {key: at for at, key in enumerate(dict.fromkeys(whole))}
    codes = [[_code_of_json(part, texts) for part in key.split(b"\0", 2)] for key in kinds]
    at = np.array([kinds[key] for key in whole], np.intp)
    rows = np.array(codes, np.int64).reshape(-1, 3)[at]
    return dict(zip(("dims", "types", "values"), rows.T, strict=True))


def _code_of_json(raw: bytes, texts: Codes) -> int:
    """Return the code of some JSON, `MISSING` where it says nothing or is too long."""
    try:
        text = msgspec.json.format(raw, indent=-1).decode()  # torch breaks lines since 2.3
    except NOT_JSON:
        return MISSING
    return texts[text] if len(text) <= _LONGEST else MISSING


def _group(args: _Communicated) -> str | None:
    """Return a group's name, or before torch 2.4 its number, with what its maker calls it."""
    name = args.group_id if args.group in (None, "") else args.group
    if name is None:
        return None
    return f"{name} {args.description}" if args.description else str(name)


def _arguments(
    kind: type, columns: Callable[[list[Any], Codes], _Columns], sign: bytes = b""
) -> Arguments:
    nothing = kind()  # what null stands for
    decode: Any = msgspec.json.Decoder(list[kind | None]).decode  # type: ignore[valid-type]
    return Arguments(lambda data: [each or nothing for each in decode(data)], columns, sign)


KERNEL, LAUNCH, ANNOTATION, DEVICE_ANNOTATION = range(4)
"""A device's work, calls of its driver, marked ranges, their shadow on the device."""

COPY, OPERATOR, PYTHON, MEMORY, COUNTER, COLLECTIVE, PARAMETERS, SHAPES = range(4, 12)
"""Copies of a device, operators, Python's functions, changes of memory, samples of counters; the
kernels that communicate, which are among the kernels, the operators that say what they send, and
those whose FLOPs follow from their inputs."""

METADATA, OTHER = 12, 13
"""Events that name threads and processes, and those of no kind."""

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

_PARAMETERS, _CHANGE = "record_param_comms", "[memory]"
# NCCL, RCCL and their like by their prefixes; fused ones by what they do.
_COMMUNICATES = re.compile(
    r"[nrx]ccl|msccl|oneccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|cross_device_reduce",
    re.IGNORECASE,
)

_SENDS = _arguments(_Communicated, _communicated)
ARGUMENTS: dict[int, Arguments] = {
    KERNEL: _arguments(
        _Ran, lambda args, _: {**_launches(args), **_numbers(args, "device", "stream")}
    ),
    LAUNCH: _arguments(_Launched, lambda args, _: _launches(args)),
    COPY: _arguments(
        _Copied, lambda args, _: {**_launches(args), **_numbers(args, "device", "stream", "bytes")}
    ),
    OPERATOR: _arguments(  # autograd's number, and the thread of the forward pass
        _Called, lambda args, _: _numbers(args, "sequence", "forward"), b'"Sequence number"'
    ),
    MEMORY: _arguments(
        _Allocated, lambda args, _: _numbers(args, "kind", "device", "allocated", "reserved")
    ),
    COLLECTIVE: _SENDS,
    PARAMETERS: _SENDS,
    SHAPES: _arguments(_Shaped, _shaped, b'"Input Dims"'),
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


@lru_cache(maxsize=1_000)
def code_of_event(category: str | None, phase: str) -> int:
    """Return the kind of an event, `METADATA` or `OTHER`.

    Example::

        >>> code_of_event("kernel", "X") == KERNEL, code_of_event("kernel", "B") == OTHER
        (True, True)
        >>> code_of_event(None, "C") == COUNTER, code_of_event("ac2g", "s") == OTHER
        (True, True)
    """
    kind = _CATEGORIES.get(category or "")
    if kind is not None:
        return kind if phase == ("i" if kind == MEMORY else "X") else OTHER
    return {"C": COUNTER, "M": METADATA}.get(phase, OTHER)


SLICES: dict[str | None, int] = {category: code_of_event(category, "X") for category in _CATEGORIES}
"""The same of phase X, of which most events are; all other categories are `OTHER` in it."""


def signs_of(names: Iterable[str]) -> npt.NDArray[np.int8]:
    """Return the kind that the name of an event tells, -1 for most.

    Example::

        >>> signs_of(["ncclDevKernel_AllReduce_Sum_f32_RING_LL", "gemm"]).tolist()
        [9, -1]
    """
    told = {_PARAMETERS: PARAMETERS, _CHANGE: MEMORY, **dict.fromkeys(PRODUCTS, SHAPES)}
    kinds = (COLLECTIVE if _COMMUNICATES.search(name) else told.get(name, -1) for name in names)
    return np.fromiter(kinds, np.int8)
