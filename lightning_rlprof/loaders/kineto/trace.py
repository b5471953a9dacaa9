"""Read one torch.profiler trace into columns by kind: at first only what every question needs.

No event object is kept. torch.profiler records annotations of the host, and their shadows on the
device. The stage, step and range of a kernel are those around its launch.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, compress, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.chrome_events import (
    MAX_TIME,
    MISSING,
    Codes,
    Event,
    EventDecoder,
    Id,
    integers,
    nanoseconds,
    read_batches,
)
from lightning_rlprof.loaders.host_calls import (
    NOWHERE,
    PRODUCTS,
    Launches,
    Stages,
    counted,
    launch_remarks,
    stages_at,
)
from lightning_rlprof.loaders.rank_names import labels_of_verl
from lightning_rlprof.loaders.spill import HELD, ROWS, Columns, Grown, Scratch, beside, in_order
from lightning_rlprof.records.records import KINDS, STAGES
from lightning_rlprof.system.process import give_back
from lightning_rlprof.tables.arrays import Int64s, group_sizes, group_starts
from lightning_rlprof.tables.event_times import DATE_NS, LONGEST_NS, device_times, main_dates, named
from lightning_rlprof.tables.kernels import COLLECTIVES, UNKNOWN
from lightning_rlprof.tables.table import Cut, ImpossibleTimes, Loss

_Columns = dict[str, npt.NDArray[Any]]
_MAX_SHAPES = 1_000
MAX_LANES = 4_096
"""Most distinct threads; the largest hosts run a few hundred in one process."""

_TOLD = b'"Collective name"'
_MAX_COUNTER = 1e300  # A thousand such values still have a finite sum.
_MAX_NAME = 1_000

# These columns contain codes, which take half the memory.
_NARROW = {"lane", "name", "operation", "type", "group", "dims", "types", "values"}


class Kind:
    """Kinds of events.

    Attributes:
        KERNEL: A device's work.
        LAUNCH: Calls of its driver.
        ANNOTATION: Marked ranges.
        DEVICE_ANNOTATION: Their shadow on the device.
        COPY: Copies of a device.
        OPERATOR: Operators.
        PYTHON: Python's functions.
        MEMORY: Changes of memory.
        COUNTER: Samples of counters.
        COLLECTIVE: The kernels that communicate, which are among the kernels.
        PARAMETERS: The operators that say what these send.
        SHAPES: The operators whose FLOPs follow from their inputs.
        METADATA: Events that name threads and processes.
        UNKNOWN: Slices of a category that no reader knows, perhaps of a device.
        OTHER: Those of no kind.
    """

    KERNEL, LAUNCH, ANNOTATION, DEVICE_ANNOTATION, COPY, OPERATOR, PYTHON = range(7)
    MEMORY, COUNTER, COLLECTIVE, PARAMETERS, SHAPES, METADATA, UNKNOWN, OTHER = range(7, 15)


DERIVED = {Kind.COLLECTIVE: Kind.KERNEL, Kind.PARAMETERS: Kind.OPERATOR, Kind.SHAPES: Kind.OPERATOR}
"""Kinds that are found by what is in events of another one, and which that is."""

_DRIVERS = ("cuda", "hip", "xpu", "mtia", "musa", "mlu", "gcu", "privateuse1")
_LAUNCHING = [f"{driver}_{api}" for driver in _DRIVERS for api in ("runtime", "driver")]
_COPYING = [f"{device}_{what}" for device in ("gpu", "mlu", "GCU") for what in ("memcpy", "memset")]

# Kineto's types: https://github.com/pytorch/kineto/blob/main/libkineto/src/ActivityType.cpp.
# PyTorch 1.8 writes capitals.
_CATEGORIES = {
    **dict.fromkeys(("kernel", "Kernel", "mtia_ccp_events"), Kind.KERNEL),
    **dict.fromkeys((*_LAUNCHING, "Runtime"), Kind.LAUNCH),
    "user_annotation": Kind.ANNOTATION,
    **dict.fromkeys(
        ("gpu_user_annotation", "mlu_user_annotation", "GCU_USER_ANNOTATION"),
        Kind.DEVICE_ANNOTATION,
    ),
    **dict.fromkeys((*_COPYING, "Memcpy", "Memset"), Kind.COPY),
    **dict.fromkeys(("cpu_op", "Operator"), Kind.OPERATOR),
    "python_function": Kind.PYTHON,
    "cpu_instant_event": Kind.MEMORY,
    # Waits, the profiler's own time, the whole recording, and arrows are of no kind.
    **dict.fromkeys(
        ("cuda_sync", "cuda_event", "xpu_sync", "gcu_sync", "overhead", "Trace", "fwdbwd", "ac2g"),
        Kind.OTHER,
    ),
}

# Gaudi writes this of its device and of its host; only the former has a device.
_GAUDI, _ON_DEVICE = "hpu_op", b'"device"'

# CUPTI measures counters in ranges. Kineto spreads the ranges evenly over the recording:
# https://github.com/pytorch/kineto/blob/main/libkineto/src/CuptiRangeProfiler.cpp
_UNTIMED = "cuda_profiler_range"
_DEVICE_LABEL = re.compile(r"(?!CPU)[A-Za-z]+ ?\d+")
_MAX_CATEGORIES, _MAX_CATEGORY = 1_000, 100  # How many are counted, and characters of one.
_category = attrgetter("cat")
_PARAMETERS, _CHANGE = "record_param_comms", "[memory]"

_ALWAYS = ("start_ns", "end_ns", "lane", "name")
_DEVICE = (*_ALWAYS, "launch", "device", "stream")
_SENT = ("external", "size", "incoming", "outgoing", "number", "operation", "type", "group")
KEPT: dict[int, tuple[str, ...]] = {
    Kind.KERNEL: _DEVICE,
    Kind.LAUNCH: (*_ALWAYS, "launch"),
    Kind.ANNOTATION: _ALWAYS,
    Kind.DEVICE_ANNOTATION: _ALWAYS,
    Kind.COPY: (*_DEVICE, "bytes"),
    Kind.OPERATOR: (*_ALWAYS, "sequence", "forward"),
    Kind.PYTHON: _ALWAYS,
    Kind.MEMORY: ("start_ns", "kind", "device", "allocated", "reserved"),
    Kind.COUNTER: ("start_ns", "lane", "name", "value"),
    Kind.COLLECTIVE: (*_DEVICE, *_SENT),
    Kind.PARAMETERS: (*_ALWAYS, *_SENT),
    Kind.SHAPES: (*_ALWAYS, "dims", "types", "values"),
}
"""Columns of each kind."""

EVERY = frozenset(KEPT)
"""All kinds."""

STEP, STAGE, REGION = (KINDS.index(kind) for kind in ("step", "stage", "region"))
"""Codes of the kinds of an annotation."""

_STEP_NAME = re.compile(r"ProfilerStep#(\d{1,15})")
_GRAPH = "GraphLaunch"  # It is part of cudaGraphLaunch, cuGraphLaunch and hipGraphLaunch.
_PLACED: dict[str, type[np.generic]] = {
    **dict.fromkeys(("stage", "range"), np.int32),
    **dict.fromkeys(("step", "launch_ns", "call_ns", "thread", "graph"), np.int64),
}
_CALL = {"launch_ns": UNKNOWN, "call_ns": UNKNOWN, "caller": NOWHERE, "replay": 0}
T = TypeVar("T")
_Processes: TypeAlias = Callable[[Int64s, Int64s], Int64s]
_UNREAD = "events are left out: they cannot be read"
_UNTRUE = "events are left out: their times are out of range"
_OTHERS = "events share one name: the trace has too many different names"
_FIRST = frozenset({Kind.KERNEL, Kind.LAUNCH, Kind.ANNOTATION, Kind.DEVICE_ANNOTATION})
_STEP_FILE = re.compile(r"step-(\d{1,15})")

# Before torch 2.3 times were since 1970, now they are since a quarter of a year began, which has
# 8 * 10**15 nanoseconds. 10**18 was in 2001.
_SINCE_1970 = range(10**18, MAX_TIME)


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


def _launches(args: list[Any], _: Codes) -> _Columns:
    """Return what kernels and their launches have in common: correlation, else External id."""
    found = integers([each.correlation for each in args])
    if (found < 0).any():
        external = integers([each.external for each in args])
        # External ids become numbers below `MISSING`, so that they never equal a correlation.
        found = np.where(found >= 0, found, np.where(external >= 0, -2 - external, MISSING))
    return {"launch": found}


def _communicated(args: list[Any], texts: Codes) -> _Columns:
    words: dict[str, list[Any]] = {
        "operation": [each.operation for each in args],
        "type": [each.type for each in args],
        "group": [_group(each) for each in args],
    }
    coded = {
        name: np.array([-1 if word is None else texts[str(word)] for word in own], np.int32)
        for name, own in words.items()
    }
    return {**_launches(args, texts), **coded}


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
        text = msgspec.json.format(raw, indent=-1).decode()  # PyTorch breaks lines since 2.3.
    except NOT_JSON:
        return MISSING
    return texts[text] if len(text) <= _MAX_SHAPES else MISSING


def _group(args: _Communicated) -> str | None:
    """Return a group's name, or before torch 2.4 its number, with what its maker calls it."""
    name = args.group_id if args.group in (None, "") else args.group
    if name is None:
        return None
    return f"{name} {args.description}" if args.description else str(name)


def _arguments(
    kind: type,
    *names: str,
    first: Callable[[list[Any], Codes], _Columns] = lambda *_: {},
    sign: bytes = b"",
) -> Arguments:
    """Return how arguments are read: columns made by a function, then numbers by their names."""
    nothing = kind()  # Null in JSON stands for it.
    decode: Any = msgspec.json.Decoder(list[kind | None]).decode  # type: ignore[valid-type]
    return Arguments(
        lambda data: [each or nothing for each in decode(data)],
        lambda args, texts: first(args, texts) | _numbers(args, *names),
        sign,
    )


_SENDS = _arguments(
    *(_Communicated, "device", "stream", "external", "size", "incoming", "outgoing", "number"),
    first=_communicated,
)


ARGUMENTS: dict[int, Arguments] = {
    Kind.KERNEL: _arguments(_Ran, "device", "stream", first=_launches),
    Kind.LAUNCH: _arguments(_Launched, first=_launches),
    Kind.COPY: _arguments(_Copied, "device", "stream", "bytes", first=_launches),
    # These are autograd's number, and the thread of the forward pass.
    Kind.OPERATOR: _arguments(_Called, "sequence", "forward", sign=b'"Sequence number"'),
    Kind.MEMORY: _arguments(_Allocated, "kind", "device", "allocated", "reserved"),
    Kind.COLLECTIVE: _SENDS,
    Kind.PARAMETERS: _SENDS,
    Kind.SHAPES: _arguments(_Shaped, first=_shaped, sign=b'"Input Dims"'),
}
"""What is read of the arguments of a kind, where that is anything."""


@lru_cache(maxsize=1_000)
def code_of_event(category: str | None, phase: str) -> int:
    """Return the kind of an event, `Kind.METADATA` or `Kind.OTHER`.

    Example::

        >>> code_of_event("kernel", "X") == Kind.KERNEL, code_of_event("kernel", "B") == Kind.OTHER
        (True, True)
        >>> code_of_event(None, "C") == Kind.COUNTER, code_of_event("ac2g", "s") == Kind.OTHER
        (True, True)
        >>> code_of_event("hpu_op", "X") == Kind.UNKNOWN
        True
    """
    kind = _CATEGORIES.get(category or "")
    if kind is not None:
        return kind if phase == ("i" if kind == Kind.MEMORY else "X") else Kind.OTHER
    if category and phase == "X":
        return Kind.UNKNOWN
    return {"C": Kind.COUNTER, "M": Kind.METADATA}.get(phase, Kind.OTHER)


SLICES: dict[str | None, int] = {
    **{category: code_of_event(category, "X") for category in _CATEGORIES},
    **dict.fromkeys((None, ""), Kind.OTHER),
}
"""The same of phase X, of which most events are; all other categories are `Kind.UNKNOWN` in it."""


def signs_of(names: Iterable[str]) -> npt.NDArray[np.int8]:
    """Return the kind that the name of an event tells, -1 for most.

    Example::

        >>> signs_of(["ncclDevKernel_AllReduce_Sum_f32_RING_LL", "gemm"]).tolist()
        [9, -1]
    """
    told = {
        _PARAMETERS: Kind.PARAMETERS,
        _CHANGE: Kind.MEMORY,
        **dict.fromkeys(PRODUCTS, Kind.SHAPES),
    }
    kinds = (Kind.COLLECTIVE if COLLECTIVES.search(name) else told.get(name, -1) for name in names)
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
        untrue: Codes of the names of these, by kind.
        unread: Events left out by kind because their arguments cannot be read.
        unknown: Slices of categories that no reader knows, by category, process, and whether they
            name a device.
        categories: Categories that occur.
        first_ns: When the first event of each kind began, of those that can be true.
        doubts: What is said of device work of each kind whose times cannot be true.
    """

    def __init__(self, wanted: frozenset[int] = EVERY, like: "ChromeColumns | None" = None) -> None:
        self.wanted = wanted
        self.names: Codes = like.names if like else Codes("(other names)")
        self.lanes: Codes = like.lanes if like else Codes((None, "others"), MAX_LANES)
        self.thread_names: dict[tuple[Id, Id], str] = {}
        self.labels: dict[Id, str] = {}
        self.counts: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        self.unread: Counter[int] = Counter()
        self.unknown: Counter[tuple[str | None, Id, bool]] = Counter()
        self.categories: set[str | None] = set()
        self._held = 0
        self.first_ns: dict[int, int] = {}
        self.untrue: dict[int, set[int]] = {}
        self.doubts: dict[int, list[str]] = {}
        # Of each kind and date: how many events began, when the first did, and the last one ended.
        self._dates: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._like, self._ends = like, dict[tuple[int, int, int], int]()
        self._signs = np.empty(0, np.int8)
        # Collectives are found among the kernels, and what they send among the operators.
        looked = wanted | {of for kind, of in DERIVED.items() if kind in wanted}
        self._taken = np.isin(np.arange(Kind.OTHER + 1), [*looked - {Kind.COUNTER}])
        scratch = Scratch()
        self._grown = {
            kind: Grown({column: _type(column) for column in columns}, scratch)
            for kind, columns in KEPT.items()
        }

    def add(self, events: Sequence[Event]) -> None:
        """Add what is wanted of a batch."""
        slice_code = SLICES.get
        codes = [
            slice_code(each.cat, Kind.UNKNOWN)
            if each.ph == "X"
            else code_of_event(each.cat, each.ph)
            for each in events
        ]
        code = np.frombuffer(bytearray(codes), np.uint8)
        self._look_at_unknown(events, code)
        if len(self.categories) < _MAX_CATEGORIES:
            self.categories.update(map(_category, events))
        counts = np.bincount(code, minlength=Kind.OTHER + 1).tolist()
        self.counts.update({kind: counts[kind] for kind in KEPT})
        if counts[Kind.METADATA]:
            for event in compress(events, (code == Kind.METADATA).tobytes()):
                self._name(event)
        if counts[Kind.COUNTER] and Kind.COUNTER in self.wanted:
            self._take_samples([*compress(events, (code == Kind.COUNTER).tobytes())])
        taken = self._taken[code]
        if taken.any():
            self._take_all([*compress(events, taken.tobytes())], code[taken])
        if self._held > HELD:
            self._held = 0
            for grown in self._grown.values():
                grown.put_aside()

    def _look_at_unknown(self, events: Sequence[Event], code: npt.NDArray[np.uint8]) -> None:
        """Make device work of what Gaudi did; count the rest by what may show that it is some."""
        for row in np.flatnonzero(code == Kind.UNKNOWN).tolist():
            event = events[row]
            on_device = _ON_DEVICE in bytes(event.args)
            if event.cat == _GAUDI and on_device:
                code[row] = Kind.KERNEL
            elif len(self.unknown) < _MAX_CATEGORIES:
                self.unknown[event.cat, event.pid, on_device] += 1

    def unread_device_work(self) -> list[str]:
        """Say by category how many slices of devices are not read, and why."""
        counts: Counter[str] = Counter()
        for (category, pid, on_device), count in self.unknown.items():
            label = self.labels.get(pid, "")
            if on_device or category in (_GAUDI, _UNTIMED) or _DEVICE_LABEL.fullmatch(label):
                counts[category or ""] += count
        untimed = "they hold counters, and their times were not measured"
        return [
            f"{count} events of category {category[:_MAX_CATEGORY]} are not read: "
            + (untimed if category == _UNTIMED else "what they measure of the device is unknown")
            for category, count in counts.items()
        ]

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
            if each == Kind.MEMORY:
                rows = rows[sign[rows] == Kind.MEMORY]
            raw = [args[row] for row in rows.tolist()]
            for derived in (kind for kind, of in DERIVED.items() if of == each):
                part = sign[rows] == derived
                if derived == Kind.COLLECTIVE:
                    part[holding(raw, b",".join(raw), _TOLD)] = True
                    self.counts[Kind.COLLECTIVE] += int(np.count_nonzero(part))
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
        sound = found["start_ns"] != UNKNOWN
        if "end_ns" in KEPT[kind]:
            length = columns["length_ns"][rows]
            found["end_ns"] = found["start_ns"] + length
            sound &= (length >= 0) & (found["end_ns"] < MAX_TIME)
            if "stream" not in KEPT[kind]:
                sound &= length < LONGEST_NS
        self._grow(kind, found, sound)

    def _take_samples(self, events: list[Event]) -> None:
        """Take the samples of counters; an event holds one of each of its series."""
        rows: list[tuple[Any, ...]] = []
        for event in events:
            try:
                values = msgspec.json.decode(event.args, type=dict[str, Any])
            except NOT_JSON:
                self.unread[Kind.COUNTER] += 1
                continue
            lane, name = self.lanes[event.pid, event.tid], event.name or ""
            for series, value in values.items():
                if not isinstance(value, int | float) or abs(value) > _MAX_COUNTER:
                    self.unread[Kind.COUNTER] += 1
                    continue
                whole = name if series in ("value", name) else f"{name} {series}".strip()
                rows.append((event.ts, lane, self.names[whole], float(value)))
            self.unread[Kind.COUNTER] += not values
        if rows:
            columns: dict[str, Any] = dict(
                zip(KEPT[Kind.COUNTER], zip(*rows, strict=True), strict=True)
            )
            start = columns["start_ns"] = nanoseconds(columns["start_ns"])
            self._grow(Kind.COUNTER, columns, start != UNKNOWN)

    def _grow(self, kind: int, columns: dict[str, Any], sound: npt.NDArray[np.bool_]) -> None:
        lost = int(np.count_nonzero(~sound))
        self.lost[kind] += lost
        if lost and "name" in columns:
            self.untrue.setdefault(kind, set()).update(np.asarray(columns["name"])[~sound].tolist())
        found = {}
        for column in KEPT[kind]:
            array = np.asarray(columns[column], _type(column))
            found[column] = array[sound] if lost else array
        if len(found["start_ns"]):
            self._note_dates(kind, found["start_ns"], found.get("end_ns", found["start_ns"]))
            self._held += self._grown[kind].add(found)

    def _note_dates(self, kind: int, start: Int64s, end: Int64s) -> None:
        date = start // DATE_NS
        for each in np.unique(date).tolist() if date.min() < date.max() else date[:1].tolist():
            own = date == each
            count, first, last = self._dates.get((kind, each), (0, MAX_TIME, -MAX_TIME))
            count += int(np.count_nonzero(own))
            first, last = min(first, int(start[own].min())), max(last, int(end[own].max()))
            self._dates[kind, each] = count, first, last

    def leave_out_impossible(self) -> None:
        """Leave out what is of another date than the trace, and what devices cannot have done.

        It is called once, when all events were added.
        """
        dates = (self._like or self)._main_dates() or self._main_dates()
        for kind in {kind for kind, date in self._dates if date not in dates}:
            self.lost[kind] += self._keep(kind, partial(self._of_dates, kind, dates))
        for (kind, date), (_, first, _) in self._dates.items():
            if date in dates:
                self.first_ns[kind] = min(first, self.first_ns.get(kind, first))
        for kind in (Kind.KERNEL, Kind.COPY):
            if len(self._grown[kind]):
                self._check_device(kind)
        if len(self._grown[Kind.COLLECTIVE]):  # They are kernels, too.
            self._set_ends(Kind.COLLECTIVE, self._kernels()._ends)

    def _of_dates(self, kind: int, dates: range, part: _Columns) -> npt.NDArray[np.bool_]:
        date = part["start_ns"] // DATE_NS
        own = np.asarray((date >= dates.start) & (date < dates.stop))
        self.untrue.setdefault(kind, set()).update(part.get("name", date[:0])[~own].tolist())
        return own

    def _main_dates(self) -> range:
        counts: Counter[int] = Counter()
        for (_, date), (count, _, _) in self._dates.items():
            counts[date] += count
        dates = sorted(counts)
        first, last = main_dates(np.array(dates, np.int64), np.array([*map(counts.get, dates)]))
        return range(first, last + 1)

    def _kernels(self) -> "ChromeColumns":
        return self if Kind.KERNEL in self.wanted or self._like is None else self._like

    def _host(self) -> tuple[int, int] | None:
        """Return when the first event of the host began, and when the last one ended."""
        of = self._like or self
        dates = of._main_dates()
        found = [
            times
            for (kind, date), (_, *times) in of._dates.items()
            if kind in (Kind.LAUNCH, Kind.ANNOTATION) and date in dates
        ]
        return (min(first for first, _ in found), max(last for _, last in found)) if found else None

    def _check_device(self, kind: int) -> None:
        """Leave out work without a time, and let none run past the next work of its stream."""
        own = self._grown[kind]
        count, kernels = len(own), self._kernels()._grown[Kind.KERNEL]

        def column(name: str) -> Int64s:
            part = own.part(name, 0, count)
            if kind == Kind.KERNEL:
                return part
            return np.append(part, kernels.part(name, 0, len(kernels)))

        lane = np.where(column("stream") == MISSING, -1, column("lane"))
        start, end = column("start_ns"), column("end_ns")
        times = device_times(lane, start, end, column("launch"), self._host()).at(slice(0, count))
        rows = np.flatnonzero(times.bounded | times.untimed)
        if not len(rows):
            return
        called = (own.part("name", 0, count).astype(np.int64), list(self.names))
        self.doubts[kind] = times.remarks("copies" if kind == Kind.COPY else "kernels", called)
        ends = np.where(times.untimed, UNKNOWN, times.end_ns)
        keys = zip(lane[rows].tolist(), start[rows].tolist(), end[rows].tolist(), strict=True)
        found = dict(zip(keys, ends[rows].tolist(), strict=True))
        if kind == Kind.KERNEL:
            self._ends = found
        self._set_ends(kind, found)

    def _set_ends(self, kind: int, ends: Mapping[tuple[int, int, int], int]) -> None:
        """Replace ends, given by lane, start and end; a row whose end is `UNKNOWN` goes."""
        starts = np.array([start for _, start, _ in ends], np.int64)

        def change(part: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
            lane, start, end = part["lane"], part["start_ns"], part["end_ns"]
            for row in np.flatnonzero(np.isin(start, starts)).tolist():
                end[row] = ends.get((int(lane[row]), int(start[row]), int(end[row])), end[row])
            return np.asarray(end != UNKNOWN)

        if ends:
            self._keep(kind, change)

    def _keep(
        self,
        kind: int,
        chosen: Callable[[dict[str, npt.NDArray[Any]]], npt.NDArray[np.bool_]],
    ) -> int:
        """Keep the chosen rows of a kind, and return how many go."""
        before = self._grown[kind]
        kept = self._grown[kind] = Grown(before.types)
        self.first_ns.pop(kind, None)
        for part in before.parts():
            rows = chosen(part)
            if rows.any():
                first = int(part["start_ns"][rows].min())
                self.first_ns[kind] = min(first, self.first_ns.get(kind, first))
                kept.add({name: column[rows] for name, column in part.items()})
        return len(before) - len(kept)

    def _name(self, event: Event) -> None:
        """Keep what a thread or process is called."""
        key = {"thread_name": "name", "process_labels": "labels"}.get(event.name or "")
        if key is None or max(len(self.thread_names), len(self.labels)) >= MAX_LANES:
            return
        try:
            name = msgspec.json.decode(event.args, type=dict[str, Any])[key]
        except (KeyError, *NOT_JSON):
            return
        if isinstance(name, str) and key == "name":
            self.thread_names[event.pid, event.tid] = name[:_MAX_NAME]
        elif isinstance(name, str):
            self.labels[event.pid] = name[:_MAX_NAME]


def _type(column: str) -> type[np.generic]:
    return np.int32 if column in _NARROW else np.float64 if column == "value" else np.int64


def _read_ranges(columns: ChromeColumns, kind: int) -> Stages:
    """Return the annotations of one kind by start, and of two that begin at once the longer first.

    Their threads and processes are codes of lanes (streams, on the device) and of pids. The step
    is the one that it is or lies in, 0 where none is known.
    """
    rows = columns.grown(kind).rows()
    order = np.lexsort((-rows["end_ns"], rows["start_ns"]))
    lane, name, start, end = (
        rows[column][order] for column in ("lane", "name", "start_ns", "end_ns")
    )
    names = list(columns.names)
    kinds, steps = np.full(len(names), REGION, np.int8), np.zeros(len(names), np.int64)
    for code in np.unique(name).tolist():
        if names[code] in STAGES:
            kinds[code] = STAGE
        elif found := _STEP_NAME.fullmatch(names[code]):
            kinds[code], steps[code] = STEP, int(found[1])
    process = columns.processes[lane]
    ranges = Stages(process, lane, kinds[name], name, steps[name], start, end)
    around = stages_at(ranges.only(STEP), Launches(process, lane, start)).step
    return replace(ranges, step=np.where(ranges.kind == STEP, ranges.step, around))


@dataclass(frozen=True, eq=False)
class KinetoTrace:
    """What is kept of a trace; times are nanoseconds as the trace counts them.

    Attributes:
        path: The file.
        top: What stands beside the events, by key, as JSON.
        columns: Names, threads, and what the events became.
        ranges: Annotations of the host.
        shadows: Annotations as the device saw them: around the kernels that they launched.
        problems: What was lost, and how the file ended, where that was not its end.
        complete: Whether it was read to its end.
        version: Size and time of the file when it was read.
    """

    path: Path
    top: Mapping[str, msgspec.Raw]
    columns: ChromeColumns
    ranges: Stages
    shadows: Stages
    problems: list[str]
    complete: bool
    version: tuple[int, int]
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _more: list[ChromeColumns] = field(default_factory=list)

    def grown(self, kind: int) -> Grown:
        """Return the columns of one kind; all kinds that were not kept are read at the first time.

        Raises:
            TraceError: The file cannot be read again, or is another one by now.
        """
        with self._turn:
            if kind not in self.columns.wanted and not self._more:
                if _version(self.path) != self.version:
                    raise TraceError(f"{self.path}: changed since it was loaded; load it again")
                rest = ChromeColumns(EVERY - self.columns.wanted, self.columns)
                read_batches(self.path, EventDecoder().decode, rest.add)
                rest.leave_out_impossible()
                give_back()
                self._more.append(rest)
        return self._of(kind).grown(kind)

    def losses(self, *kinds: int, more: int = 0) -> list[str]:
        """Say how many events of some kinds are left out, and why, as far as they were read."""
        doubts = [text for kind in kinds for text in self._of(kind).doubts.get(kind, ())]
        unread = more + sum(self._of(kind).unread[kind] for kind in kinds)
        untrue = sum(self._of(kind).lost[kind] for kind in kinds)
        found: list[str] = [Loss(f"{unread} {_UNREAD}")] if unread else []
        if untrue:
            codes = set[int]().union(*(self._of(kind).untrue.get(kind, ()) for kind in kinds))
            text = f"{untrue} {_UNTRUE}{named(codes, list(self.columns.names))}"
            found.append(ImpossibleTimes(text, untimed=untrue))
        merged = self.columns.names.merged
        return [*found, *doubts, *([f"{merged} {_OTHERS}"] if merged else [])]

    def _of(self, kind: int) -> ChromeColumns:
        return self.columns if kind in self.columns.wanted or not self._more else self._more[0]

    @property
    def idents(self) -> Int64s:
        """Identity of the thread of each lane, wrapped to 64 bits."""
        lanes = enumerate(tid for _, tid in self.columns.lanes)
        return np.array([(ident(tid, lane) + 2**63) % 2**64 - 2**63 for lane, tid in lanes])

    @property
    def file_step(self) -> int:
        """Step that the file's name tells, 0 without, or where the trace itself tells steps."""
        if STEP in self.ranges.kind:
            return 0
        found = _STEP_FILE.match(self.path.name) or _STEP_FILE.match(self.path.parent.name)
        return int(found[1]) if found else labels_of_verl(self.path.name)[1]

    @property
    def zero_ns(self) -> int:
        """When the first annotation or kernel began."""
        first = self.columns.first_ns
        return min(
            (first[kind] for kind in (Kind.ANNOTATION, Kind.KERNEL) if kind in first), default=0
        )

    @property
    def unix_ns(self) -> int:
        """Wall-clock time of `zero_ns`; 0 where that is not known."""
        base = told(self.top, "baseTimeNanoseconds", int, 0)
        if 0 < base + self.zero_ns < MAX_TIME and base > 0:
            return base + self.zero_ns
        return self.zero_ns if self.zero_ns in _SINCE_1970 else 0


def told(top: Mapping[str, msgspec.Raw], key: str, kind: type[T], otherwise: T) -> T:
    """Return what stands beside the events under a key, if it is of that kind."""
    try:
        return msgspec.json.decode(top[key], type=kind)
    except (KeyError, *NOT_JSON):
        return otherwise


def ident(tid: Any, lane: int) -> int:
    """Return the identity of a thread, one of our own where a text stands for its number."""
    return tid if isinstance(tid, int) else -1 - lane


def read_trace(path: Path, *, every: bool = False) -> KinetoTrace:
    """Read a trace of torch.profiler: plain or .gz, complete or cut off.

    Takes 2 to 3 ms per MB, twice that with ``every``; columns beyond 4 MB lie in a temporary file.

    Args:
        path: The file.
        every: Keep what any table needs; else kernels, launches and annotations, the rest later.

    Raises:
        TraceError: It cannot be read or is not a Chrome trace.
    """
    version = _version(path)
    columns = ChromeColumns(EVERY if every else _FIRST)
    stream = read_batches(path, EventDecoder().decode, columns.add)
    columns.leave_out_impossible()
    give_back()
    trace = KinetoTrace(
        path,
        stream.top,
        columns,
        _read_ranges(columns, Kind.ANNOTATION),
        _read_ranges(columns, Kind.DEVICE_ANNOTATION),
        list(stream.problems),
        stream.complete,
        version,
    )
    if stream.truncated and not columns.counts[Kind.KERNEL]:
        trace.problems[0] = Cut(f"{trace.problems[0]} (no kernel was read)")
    trace.problems.extend(trace.losses(*EVERY, more=stream.lost))
    trace.problems.extend(map(Loss, columns.unread_device_work()))
    if columns.lanes.merged:
        text = f"of more than {MAX_LANES:,} threads, the rest are counted as one thread"
        trace.problems.append(text)
    return trace


def _version(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    return found.st_size, found.st_mtime_ns


def place(trace: KinetoTrace, work: Grown, what: str) -> tuple[Grown, list[str]]:
    """Find the call of each piece of device work, and the stage, step and range of that.

    These are those around the call on its thread. A thread without marks borrows from the training
    thread. Without a call, they are those that the device recorded around the kernel.

    Args:
        trace: The trace.
        work: Kernels or copies in any order; start_ns, lane and launch are among the columns.
        what: What remarks call them.

    Returns:
        The work by start, and how many rows have missing (`UNKNOWN`) or uncertain values. It has
        more columns. stage and range are codes of names, of the innermost range in the latter, -1
        without. step is 0 without; of a file without steps, the one in its name. launch_ns counts
        from `KinetoTrace.zero_ns`, call_ns is the length of the call, thread the caller's identity.
        graph is the number of the CUDA graph replay, from 1 by time.
    """
    ordered = Grown(work.types)
    asked = Grown(dict.fromkeys(("launch", "process", "start_ns", "row"), np.int64))
    process_of = _processes(trace, work)
    for block in in_order(work.parts(), "start_ns"):
        told = np.flatnonzero(block["launch"] != MISSING)
        own = {name: block[name][told] for name in ("launch", "start_ns")}
        process = process_of(block["launch"][told], block["lane"][told])
        asked.add({**own, "process": process, "row": told + len(ordered)})
        ordered.add(block)
    rows, missing, lent, inside = Grown({**work.types, **_PLACED}), 0, 0, 0
    replays: set[int] = set()
    placed = _placing(trace)
    for part in beside(ordered, in_order(_calls_of(trace, asked, process_of), "row"), _CALL):
        missing += int(np.count_nonzero(part["caller"] == NOWHERE))
        lent += placed(part)
        replayed = part["graph"][part["graph"] != UNKNOWN]
        inside += len(replayed)
        replays.update(np.unique(replayed).tolist())
        rows.add({name: part[name] for name in rows.types})
    text = f"{what} ran in {len(replays)} CUDA graph replays: idle time inside a replay is unknown"
    return rows, [*launch_remarks(what, missing, lent), *counted((inside, text))]


def _processes(trace: KinetoTrace, work: Grown) -> _Processes:
    """Return what tells, by number and lane, whose call or work a row is; 0 if the number tells it.

    Traces of several processes may be merged in one file, and use a number twice. Each device then
    belongs to the process with which it shares most numbers, and several to the processes in their
    order. If there are fewer devices than processes, nothing tells them apart.
    """
    launches, owner = trace.grown(Kind.LAUNCH), trace.columns.processes
    lanes = np.unique(launches.part("lane", 0, len(launches)))  # Four bytes each stay in memory.
    if len(np.unique(owner[lanes])) < 2:
        return lambda number, _: np.zeros(len(number), np.int64)
    calls, devices = _numbers_by(owner, launches), _numbers_by(owner, work)
    every, uses = np.unique(np.concatenate([*calls.values()]), return_counts=True)
    shared = every[(uses > 1) & (len(devices) >= len(calls))]
    free = list(calls)
    for device, own in devices.items() if len(shared) else ():
        # A process that launched much else is less likely than one that launched only this.
        score = {
            each: len(np.intersect1d(own, numbers)) / len(np.union1d(own, numbers))
            for each, numbers in calls.items()
        }
        best = [each for each in calls if score[each] == max(score.values())]
        process = next((each for each in best if each in free), best[0])
        free = [each for each in free if each != process]
        owner = np.where(trace.columns.processes == device, process, owner)
    return lambda number, lane: np.where(np.isin(number, shared), owner[lane], 0)


def _numbers_by(process: Int64s, rows: Grown) -> dict[int, Int64s]:
    """Return the distinct numbers of launches of each process, in its order of appearance."""
    found: dict[int, list[Int64s]] = {}
    for part in rows.parts():
        whose = process[part["lane"]]
        for each in np.unique(whose).tolist():
            own = part["launch"][(whose == each) & (part["launch"] != MISSING)]
            found.setdefault(each, []).append(np.unique(own))
    return {each: np.unique(np.concatenate(found[each])) for each in sorted(found)}


def _calls_of(trace: KinetoTrace, asked: Grown, process_of: _Processes) -> Iterator[Columns]:
    """Yield the calls of the driver beside the rows of the work that has their number, too.

    If a process uses a number twice, it is the last call before the work.
    """
    nothing = {"call_ns": 0, "caller": 0, "replay": 0}
    work = (
        {**part, **{name: np.full(len(part["row"]), each) for name, each in nothing.items()}}
        for part in asked.parts()
    )
    calls = _calls(trace, process_of)
    if len(asked) <= ROWS:
        known = np.unique(asked.rows()["launch"])
        calls = (_only(part, np.isin(part["launch"], known)) for part in calls)
    for block in in_order(chain(calls, work), "launch", "process", "start_ns", "row"):
        called, at = block["row"] < 0, np.arange(len(block["row"]))
        first = group_starts(block["launch"], block["process"])
        sizes = group_sizes(first, len(at))
        last = np.maximum.accumulate(np.where(called, at, -1))
        early = np.minimum.reduceat(np.where(called, at, len(at)), first)
        call = np.where(last >= np.repeat(first, sizes), last, np.repeat(early, sizes))
        own = np.flatnonzero(~called & (call < len(at)))
        call = call[own]
        told = {name: block[name][call] for name in nothing}
        began = block["start_ns"][call] - trace.zero_ns
        yield {"row": block["row"][own], "launch_ns": began, **told}


def _calls(trace: KinetoTrace, process_of: _Processes) -> Iterator[Columns]:
    """Yield the calls of the driver that have a number; row is -1."""
    launches = trace.grown(Kind.LAUNCH)  # Reading the launches may add names, so it comes first.
    names = list(trace.columns.names)
    graphs = np.array([_GRAPH in name for name in names] or [False])
    starts = [part["start_ns"][graphs[part["name"]]] for part in launches.parts()]
    by_time = np.argsort(np.concatenate([*starts, np.empty(0, np.int64)]), kind="stable")
    replay = np.empty(len(by_time), np.int64)
    replay[by_time] = np.arange(1, len(by_time) + 1)
    for part in launches.parts():
        own = graphs[part["name"]]
        number = np.zeros(len(own), np.int64)
        number[own], replay = replay[: (count := np.count_nonzero(own))], replay[count:]
        columns = {
            "launch": part["launch"],
            "process": process_of(part["launch"], part["lane"]),
            "start_ns": part["start_ns"],
            "row": np.full(len(own), -1),
            "call_ns": part["end_ns"] - part["start_ns"],
            "caller": part["lane"].astype(np.int64),
            "replay": number,
        }
        yield _only(columns, part["launch"] != MISSING)


def _only(rows: Columns, own: npt.NDArray[np.bool_]) -> Columns:
    return {name: column[own] for name, column in rows.items()}


def _placing(trace: KinetoTrace) -> Callable[[dict[str, npt.NDArray[Any]]], int]:
    """Return what adds to work what its calls lay in, and tells for how many another thread did."""
    marking, inner = trace.ranges.marking, trace.ranges.only(STAGE, REGION)
    kinds = ((STAGE,), (STEP,), (STAGE, REGION))
    stages, steps, ranges = (trace.shadows.only(*each) for each in kinds)

    def place(work: dict[str, npt.NDArray[Any]]) -> int:
        lane = work["caller"]
        lost = lane == NOWHERE
        began = np.where(lost, UNKNOWN, work["launch_ns"] + trace.zero_ns)
        launches = Launches(np.append(trace.columns.processes, NOWHERE)[lane], lane, began)
        found = stages_at(marking, launches)
        on_device = np.where(lost, work["lane"], NOWHERE), work["start_ns"]
        step = np.where(lost, steps.step_at(*on_device), found.step)
        around = inner.name_around(launches, found)
        work |= {
            "stage": np.where(lost, stages.name_at(*on_device), found.stage),
            "range": np.where(lost, ranges.name_at(*on_device), around),
            "step": np.where(step > 0, step, trace.file_step),
            "thread": np.append(trace.idents, UNKNOWN)[lane],
            "graph": np.where(work["replay"] > 0, work["replay"], UNKNOWN),
        }
        return int(np.count_nonzero(found.lent))

    return place
