"""Arguments of a Chrome trace's events as columns, for the kinds of event that have any."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.loaders.chrome_codes import Codes
from lightning_rlprof.loaders.chrome_events import MISSING, Id, integers
from lightning_rlprof.spans import Int64s

__all__ = [
    "ALLOCATED",
    "CALLED",
    "COMMUNICATED",
    "COPIED",
    "LAUNCHED",
    "RAN",
    "SHAPED",
    "Arguments",
    "holding",
    "read_arguments",
]

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
        sign: What stands in all that tell anything; the others, which are most, are not read.
        often: Where one tells something, most do: all are read then.
    """

    decode: Callable[[bytes], list[Any]]
    columns: Callable[[list[Any], Codes], _Columns]
    sign: bytes = b""
    often: bool = False


def read_arguments(
    raw: Sequence[msgspec.Raw], arguments: Arguments, texts: Codes
) -> tuple[_Columns, list[bool] | None]:
    """Return arguments as columns, and which of them can be read, None where all can.

    Those that cannot be read have no row.
    """
    joined, places = b",".join(raw), None
    if arguments.sign and not (arguments.often and arguments.sign in joined):
        places = holding(raw, joined, arguments.sign)
        joined = b",".join([raw[at] for at in places])
    try:
        args = arguments.decode(b"[" + joined + b"]")
    except NOT_JSON:
        sound = [_readable(each, arguments) for each in raw]
        columns, _ = read_arguments(list(compress(raw, sound)), arguments, texts)
        return columns, sound
    columns = arguments.columns(args, texts)
    if places is not None:
        columns = {name: _spread(own, places, len(raw)) for name, own in columns.items()}
    return columns, None


def holding(raw: Sequence[msgspec.Raw], joined: bytes, sign: bytes) -> list[int]:
    """Return which of some texts hold a sign, each once; found in all of them at a time.

    Args:
        raw: The texts.
        joined: All of them, a comma between two.
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


def _readable(each: msgspec.Raw, arguments: Arguments) -> bool:
    try:
        arguments.decode(b"[" + bytes(each) + b"]")
    except NOT_JSON:
        return False
    return True


def _spread(own: Int64s, places: list[int], length: int) -> Int64s:
    column = np.full(length, MISSING)
    column[places] = own
    return column


def _arguments(
    kind: type, columns: Callable[[list[Any], Codes], _Columns], sign: bytes = b""
) -> Arguments:
    nothing = kind()  # what null stands for
    decode: Any = msgspec.json.Decoder(list[kind | None]).decode  # type: ignore[valid-type]
    return Arguments(lambda data: [each or nothing for each in decode(data)], columns, sign)


def _launched(args: list[Any], _: Codes) -> _Columns:
    return {"launch": _launches(args)}


def _ran(args: list[Any], _: Codes) -> _Columns:
    return {
        "launch": _launches(args),
        "device": integers([each.device for each in args]),
        "stream": integers([each.stream for each in args]),
    }


def _launches(args: list[Any]) -> Int64s:
    """Return what kernels and their launches have in common: correlation, else External id."""
    found = integers([each.correlation for each in args])
    if np.all(found >= 0):
        return found
    external = integers([each.external for each in args])
    # Below `MISSING`, so that the two kinds of number never meet.
    return np.where(found >= 0, found, np.where(external >= 0, -2 - external, MISSING))


def _copied(args: list[Any], texts: Codes) -> _Columns:
    return {**_ran(args, texts), "bytes": integers([each.bytes for each in args])}


def _called(args: list[Any], _: Codes) -> _Columns:
    return {
        "sequence": integers([each.sequence for each in args]),
        "forward": integers([each.forward for each in args]),
    }


def _allocated(args: list[Any], _: Codes) -> _Columns:
    return {
        "kind": integers([each.kind for each in args]),
        "device": integers([each.device for each in args]),
        "allocated": integers([each.allocated for each in args]),
        "reserved": integers([each.reserved for each in args]),
    }


def _communicated(args: list[Any], texts: Codes) -> _Columns:
    numbers = ("external", "size", "incoming", "outgoing", "number")
    words: Mapping[str, list[Any]] = {
        "operation": [each.operation for each in args],
        "type": [each.type for each in args],
        "group": [_group(each) for each in args],
    }
    coded = {
        name: np.array([-1 if word is None else texts[str(word)] for word in own], np.int32)
        for name, own in words.items()
    }
    known = {name: integers([getattr(each, name) for each in args]) for name in numbers}
    return {**_ran(args, texts), **known, **coded}


def _shaped(args: list[Any], texts: Codes) -> _Columns:
    """Return codes of JSON without white space; calls of a model are of few kinds."""
    whole = [b"\0".join((each.dims, each.types, each.values)) for each in args]
    kinds = {key: at for at, key in enumerate(dict.fromkeys(whole))}
    codes = [[_code(part, texts) for part in key.split(b"\0", 2)] for key in kinds]
    at = np.array([kinds[key] for key in whole], np.intp)
    rows = np.array(codes, np.int64).reshape(-1, 3)[at]
    return dict(zip(("dims", "types", "values"), rows.T, strict=True))


def _code(raw: bytes, texts: Codes) -> int:
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


LAUNCHED = _arguments(_Launched, _launched)
"""Of calls of a device's driver: launch."""

RAN = _arguments(_Ran, _ran)
"""Of device work: launch, device, stream."""

COPIED = _arguments(_Copied, _copied)
"""Of copies: those and bytes."""

CALLED = _arguments(_Called, _called, b'"Sequence number"')
"""Of operators: sequence, forward (autograd's number; the thread of its forward pass)."""

ALLOCATED = _arguments(_Allocated, _allocated)
"""Of changes of memory: kind and number of the device, bytes allocated and reserved since."""

COMMUNICATED = _arguments(_Communicated, _communicated)
"""Of collectives: those of device work, external (the operator around), and what was sent."""

SHAPED = _arguments(_Shaped, _shaped, b'"Input Dims"')._replace(often=True)
"""Of operators whose FLOPs follow from their inputs: shapes, types and values, as JSON."""
