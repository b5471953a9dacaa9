"""Turn events of torch.profiler traces into columns by kind; no event object is kept."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import compress, islice
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.loaders.chrome_events import (
    LARGEST_TIME,
    MISSING,
    NO_TIME,
    Codes,
    Event,
    Id,
    integers,
    nanoseconds,
)
from lightning_rlprof.loaders.host_calls import PRODUCTS
from lightning_rlprof.loaders.spill import HELD, Grown, Scratch
from lightning_rlprof.tables.arrays import Int64s

_Columns = dict[str, npt.NDArray[Any]]
_LONGEST_SHAPES = 1_000  # characters of the shapes of one call
MOST_LANES = 4_096
"""Most distinct threads; the largest hosts run a few hundred in one process."""

_TOLD = b'"Collective name"'
_LARGEST = 1e300  # of a counter: a thousand of them still have a sum
_LONGEST_NAME = 1_000  # characters of what threads and processes are called
# Codes: half the memory.
_NARROW = {"lane", "name", "operation", "type", "group", "dims", "types", "values"}


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
    return texts[text] if len(text) <= _LONGEST_SHAPES else MISSING


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


class ChromeColumns:
    """Columns that grow with every batch of events; beyond some megabytes they lie in a file.

    Args:
        wanted: Kinds that are kept; all are counted.
        like: Columns of the same trace, whose codes are used and added to.

    Attributes:
        wanted: Kinds that are kept.
        names: Codes of names, and of the texts of arguments.
        lanes: Codes of (pid, tid).
        thread_names: What the trace calls its (pid, tid).
        labels: What the trace calls its processes, by pid: "CPU", "GPU 0".
        counts: Events of each kind, kept or not.
        lost: Events left out by kind because their times cannot be true.
        unread: Events left out by kind because their arguments cannot be read.
        first_ns: When the first event of each kind began.
    """

    def __init__(self, wanted: frozenset[int] = EVERY, like: "ChromeColumns | None" = None) -> None:
        self.wanted = wanted
        self.names: Codes = like.names if like else Codes("(other names)")
        self.lanes: Codes = like.lanes if like else Codes((None, "others"), MOST_LANES)
        self.thread_names: dict[tuple[Id, Id], str] = {}
        self.labels: dict[Id, str] = {}
        self.counts: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        self.unread: Counter[int] = Counter()
        self._held = 0
        self.first_ns: dict[int, int] = {}
        self._signs = np.empty(0, np.int8)
        # Collectives are found among the kernels, and what they send among the operators.
        looked = wanted | {of for kind, of in DERIVED.items() if kind in wanted}
        self._taken = np.isin(np.arange(OTHER + 1), [*looked - {COUNTER}])
        scratch = Scratch()
        self._grown = {
            kind: Grown({column: _type(column) for column in columns}, scratch)
            for kind, columns in KEPT.items()
        }

    def add(self, events: Sequence[Event]) -> None:
        """Add what is wanted of a batch."""
        slice_code = SLICES.get
        codes = [
            slice_code(each.cat, OTHER) if each.ph == "X" else code_of_event(each.cat, each.ph)
            for each in events
        ]
        code = np.frombuffer(bytes(codes), np.uint8)
        counts = np.bincount(code, minlength=OTHER + 1).tolist()
        self.counts.update({kind: counts[kind] for kind in KEPT})
        for event in compress(events, (code == METADATA).tobytes()) if counts[METADATA] else ():
            self._name(event)
        if counts[COUNTER] and COUNTER in self.wanted:
            self._take_samples([*compress(events, (code == COUNTER).tobytes())])
        taken = self._taken[code]
        if taken.any():
            self._take_all([*compress(events, taken.tobytes())], code[taken])
        if self._held > HELD:
            self._held = 0
            for grown in self._grown.values():
                grown.put_aside()

    def grown(self, kind: int) -> Grown:
        """Return the columns of one kind, in the order of the file; see `KEPT`.

        Calls and what they launched are equal in ``launch``, which is `MISSING` if unknown.
        """
        return self._grown[kind]

    @property
    def processes(self) -> Int64s:
        """Code of the process of each lane."""
        pids: dict[Id, int] = {}
        return np.array([pids.setdefault(pid, len(pids)) for pid, _ in self.lanes], np.int64)

    def _take_all(self, events: list[Event], kind: npt.NDArray[np.uint8]) -> None:
        """Take events of all kinds but samples."""
        names, lanes = self.names, self.lanes
        args = [event.args for event in events]
        columns: _Columns = {
            "start_ns": nanoseconds([event.ts for event in events]),
            "length_ns": nanoseconds([event.dur for event in events]),
            "lane": np.array([lanes[event.pid, event.tid] for event in events], np.int32),
            "name": np.array([names[event.name or ""] for event in events], np.int32),
        }
        sign = self._signs_of(columns["name"])
        for each in np.unique(kind).tolist():
            rows = np.flatnonzero(kind == each)
            if each == MEMORY:
                rows = rows[sign[rows] == MEMORY]
            raw = [args[row] for row in rows.tolist()]
            for derived in (kind for kind, of in DERIVED.items() if of == each):
                part = sign[rows] == derived
                if derived == COLLECTIVE:
                    part[holding(raw, b",".join(raw), _TOLD)] = True
                    self.counts[COLLECTIVE] += int(np.count_nonzero(part))
                self._take(derived, rows[part], columns, [*compress(raw, part.tolist())])
            self._take(each, rows, columns, raw)

    def _signs_of(self, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
        """Return the kinds that the names of some events tell."""
        if len(self.names) > len(self._signs):
            new = signs_of(islice(self.names, len(self._signs), None))
            self._signs = np.append(self._signs, new)
        return self._signs[codes]

    def _take(self, kind: int, rows: Int64s, columns: _Columns, raw: list[msgspec.Raw]) -> None:
        """Take some of a batch's events, with their arguments, as those of one kind."""
        if kind not in self.wanted or not raw:
            return
        found: _Columns = {}
        if kind in ARGUMENTS:
            found, readable = read_arguments(raw, ARGUMENTS[kind], self.names)
            if readable is not None:
                self.unread[kind] += readable.count(False)
                rows = rows[readable]
        found |= {name: columns[name][rows] for name in ("start_ns", "lane", "name")}
        sound = found["start_ns"] != NO_TIME
        if "end_ns" in KEPT[kind]:
            length = columns["length_ns"][rows]
            found["end_ns"] = found["start_ns"] + length
            sound &= (length >= 0) & (found["end_ns"] < LARGEST_TIME)
        self._grow(kind, found, sound)

    def _take_samples(self, events: list[Event]) -> None:
        """Take the samples of counters; an event holds one of each of its series."""
        rows: list[tuple[Any, ...]] = []
        for event in events:
            try:
                values = msgspec.json.decode(event.args, type=dict[str, Any])
            except NOT_JSON:
                self.unread[COUNTER] += 1
                continue
            lane, name = self.lanes[event.pid, event.tid], event.name or ""
            for series, value in values.items():
                if not isinstance(value, int | float) or abs(value) > _LARGEST:
                    self.unread[COUNTER] += 1
                    continue
                whole = name if series in ("value", name) else f"{name} {series}".strip()
                rows.append((event.ts, lane, self.names[whole], float(value)))
            self.unread[COUNTER] += not values
        if rows:
            columns: dict[str, Any] = dict(zip(KEPT[COUNTER], zip(*rows, strict=True), strict=True))
            start = columns["start_ns"] = nanoseconds(columns["start_ns"])
            self._grow(COUNTER, columns, start != NO_TIME)

    def _grow(self, kind: int, columns: dict[str, Any], sound: npt.NDArray[np.bool_]) -> None:
        lost = int(np.count_nonzero(~sound))
        self.lost[kind] += lost
        found = {}
        for column in KEPT[kind]:
            array = np.asarray(columns[column], _type(column))
            found[column] = array[sound] if lost else array
        if len(found["start_ns"]):
            first = int(found["start_ns"].min())
            self.first_ns[kind] = min(first, self.first_ns.get(kind, first))
            self._held += self._grown[kind].add(found)

    def _name(self, event: Event) -> None:
        """Keep what a thread or process is called."""
        key = {"thread_name": "name", "process_labels": "labels"}.get(event.name or "")
        if key is None or max(len(self.thread_names), len(self.labels)) >= MOST_LANES:
            return
        try:
            name = msgspec.json.decode(event.args, type=dict[str, Any])[key]
        except (KeyError, *NOT_JSON):
            return
        if isinstance(name, str) and key == "name":
            self.thread_names[event.pid, event.tid] = name[:_LONGEST_NAME]
        elif isinstance(name, str):
            self.labels[event.pid] = name[:_LONGEST_NAME]


def _type(column: str) -> type[np.generic]:
    return np.int32 if column in _NARROW else np.float64 if column == "value" else np.int64
