"""Events of torch.profiler's traces as columns, by kind; no event is kept."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.chrome_args import (
    ALLOCATED,
    CALLED,
    COMMUNICATED,
    COPIED,
    LAUNCHED,
    read_arguments,
)
from lightning_rlprof.loaders.chrome_codes import Codes
from lightning_rlprof.loaders.chrome_events import (
    LARGEST_TIME,
    NO_TIME,
    Event,
    Id,
    nanoseconds,
)
from lightning_rlprof.loaders.chrome_scratch import HELD, Grown, Scratch

__all__ = [
    "ANNOTATION",
    "COLLECTIVE",
    "COPY",
    "COUNTER",
    "DEVICE_ANNOTATION",
    "EVERY",
    "KERNEL",
    "LAUNCH",
    "MEMORY",
    "MOST_LANES",
    "OPERATOR",
    "PARAMETERS",
    "PYTHON",
    "ChromeColumns",
]

KERNEL, LAUNCH, ANNOTATION, DEVICE_ANNOTATION = range(4)
"""A device's work, calls of its driver, marked ranges, their shadow on the device."""

COPY, OPERATOR, PYTHON, MEMORY, COUNTER, COLLECTIVE, PARAMETERS = range(4, 11)
"""Copies of a device, operators, Python's functions, changes of memory, samples of counters; the
kernels that communicate, which are among the kernels, and the operators that say what they send."""

MOST_LANES = 4_096
"""Threads that are told apart; the largest hosts run a few hundred in one process."""

_DRIVERS = ("cuda", "hip", "xpu", "mtia", "musa", "privateuse1")
_LAUNCHING = [f"{driver}_{api}" for driver in _DRIVERS for api in ("runtime", "driver")]
_KINDS = {
    **dict.fromkeys(("kernel", "Kernel"), KERNEL),  # with capitals in torch 1.8
    **dict.fromkeys((*_LAUNCHING, "Runtime"), LAUNCH),
    "user_annotation": ANNOTATION,
    "gpu_user_annotation": DEVICE_ANNOTATION,
    **dict.fromkeys(("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"), COPY),
    **dict.fromkeys(("cpu_op", "Operator"), OPERATOR),
    "python_function": PYTHON,
    "cpu_instant_event": MEMORY,
}
_LEFT, _OTHER = -2, -1  # categories that are not kept, and those that we do not know
_CATEGORIES = {**_KINDS, **dict.fromkeys(("ac2g", "fwdbwd", "async_cpu_to_gpu"), _LEFT)}
_PARTS = {COLLECTIVE: KERNEL, PARAMETERS: OPERATOR}
_PARAMETERS, _CHANGE = "record_param_comms", "[memory]"
_TOLD = b'"Collective name"'
# NCCL, RCCL and their like by their prefixes; fused ones by what they do.
_COMMUNICATES = re.compile(
    r"[nrx]ccl|msccl|oneccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|cross_device_reduce",
    re.IGNORECASE,
)

_ARGUMENTS = {
    KERNEL: LAUNCHED,
    LAUNCH: LAUNCHED,
    COPY: COPIED,
    OPERATOR: CALLED,
    MEMORY: ALLOCATED,
    COLLECTIVE: COMMUNICATED,
    PARAMETERS: COMMUNICATED,
}
_ALWAYS = ("start_ns", "end_ns", "lane", "name")
_DEVICE = (*_ALWAYS, "launch", "device", "stream")
_SENT = ("external", "size", "incoming", "outgoing", "number", "operation", "type", "group")
_KEPT = {
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
}
EVERY = frozenset(_KEPT)
"""All kinds."""

_LONGEST = 1_000  # characters of what threads and processes are called
_NARROW = {"lane", "name", "operation", "type", "group"}  # codes: half the memory


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
        counts: Events of the categories of each kind, kept or not.
        lost: Events left out by kind because their times cannot be true.
        unread: Events left out by kind because their arguments cannot be read.
        unpaired: Events left out by kind because they are only a beginning, as torch writes none.
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
        self.unpaired: Counter[int] = Counter()
        self._held = 0
        self.first_ns: dict[int, int] = {}
        # Collectives are found among the kernels, and what they send among the operators.
        looked = self.wanted | {of for kind, of in _PARTS.items() if kind in self.wanted}
        self._kinds = {
            category: kind if kind in looked else _LEFT for category, kind in _CATEGORIES.items()
        }
        scratch = Scratch()
        self._grown = {
            kind: Grown({column: _type(column) for column in columns}, scratch)
            for kind, columns in _KEPT.items()
        }

    def add(self, events: Sequence[Event]) -> None:
        """Add what is wanted of a batch."""
        categories = [event.cat for event in events]
        for category, count in Counter(categories).items():
            if category in _KINDS:
                self.counts[_KINDS[category]] += count
        found: list[list[Event]] = [[] for _ in _KEPT]
        kind_of = self._kinds.get
        for event, category in zip(events, categories, strict=True):
            kind = kind_of(category, _OTHER)  # type: ignore[arg-type]
            if kind >= 0:
                if event.ph == ("X" if kind != MEMORY else "i"):
                    found[kind].append(event)
                else:
                    self.unpaired[kind] += event.ph in ("B", "b")
            elif kind == _OTHER:
                self._add_other(event, found[COUNTER])
        self._derive(found)
        for kind, own in enumerate(found):
            if own and kind in self.wanted:
                self._take(kind, own) if kind != COUNTER else self._take_samples(own)
        if self._held > HELD:
            self._held = 0
            for grown in self._grown.values():
                grown.put_aside()

    def rows(self, kind: int) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of one kind, in the order of the file, in memory of their own.

        Columns: start_ns, end_ns, lane, name; launch (equal where a call and what it launched
        belong together, `MISSING` if unknown), and what `chrome_args` makes of the arguments. Of
        `COUNTER`: start_ns, lane, name, value.
        """
        return {column: self.grown(kind).column(column) for column in _KEPT[kind]}

    def grown(self, kind: int) -> Grown:
        """Return the columns of one kind."""
        return self._grown[kind]

    def _add_other(self, event: Event, samples: list[Event]) -> None:
        """Look at an event without a category that we know."""
        if event.ph == "C":
            samples.append(event)
            self.counts[COUNTER] += 1
        elif event.ph == "M":
            self._name(event)

    def _derive(self, found: list[list[Event]]) -> None:
        """Find the kinds that are part of others."""
        found[MEMORY] = [event for event in found[MEMORY] if event.name == _CHANGE]
        found[COLLECTIVE] = _communicating(found[KERNEL])
        found[PARAMETERS] = [event for event in found[OPERATOR] if event.name == _PARAMETERS]
        self.counts[COLLECTIVE] += len(found[COLLECTIVE])

    def _take(self, kind: int, events: list[Event]) -> None:
        columns: dict[str, Any] = {}
        if kind in _ARGUMENTS:
            count = len(events)
            events, columns = read_arguments(events, _ARGUMENTS[kind], self.names)
            self.unread[kind] += count - len(events)
        start = columns["start_ns"] = nanoseconds([event.ts for event in events])
        sound = start != NO_TIME
        if "end_ns" in _KEPT[kind]:
            lanes, names = self.lanes, self.names
            length = nanoseconds([event.dur for event in events])
            columns["end_ns"] = start + length
            sound &= (length >= 0) & (columns["end_ns"] < LARGEST_TIME)
            columns["lane"] = [lanes[event.pid, event.tid] for event in events]
            columns["name"] = [names[event.name or ""] for event in events]
        self._grow(kind, columns, sound)

    def _take_samples(self, events: list[Event]) -> None:
        """Take the samples of counters; an event holds one of each of its series."""
        rows: list[tuple[Any, ...]] = []
        for event in events:
            try:
                values = msgspec.json.decode(event.args, type=dict[str, Any])
            except (ValueError, RecursionError):
                self.unread[COUNTER] += 1
                continue
            lane, name = self.lanes[event.pid, event.tid], event.name or ""
            for series, value in values.items():
                if isinstance(value, int | float) and abs(value) < 1e300:
                    whole = name if series in ("value", name) else f"{name} {series}".strip()
                    rows.append((event.ts, lane, self.names[whole], float(value)))
        if rows:
            columns: dict[str, Any] = dict(
                zip(_KEPT[COUNTER], zip(*rows, strict=True), strict=True)
            )
            start = columns["start_ns"] = nanoseconds(columns["start_ns"])
            self._grow(COUNTER, columns, start != NO_TIME)

    def _grow(self, kind: int, columns: dict[str, Any], sound: npt.NDArray[np.bool_]) -> None:
        lost = int(np.count_nonzero(~sound))
        self.lost[kind] += lost
        found = {}
        for column in _KEPT[kind]:
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
        if len(f"{event.pid}{event.tid}") > _LONGEST:
            return
        try:
            name = msgspec.json.decode(event.args, type=dict[str, Any])[key]
        except (KeyError, ValueError, RecursionError):
            return
        if isinstance(name, str) and key == "name":
            self.thread_names[event.pid, event.tid] = name[:_LONGEST]
        elif isinstance(name, str):
            self.labels[event.pid] = name[:_LONGEST]


def _type(column: str) -> type[np.generic]:
    return np.int32 if column in _NARROW else np.float64 if column == "value" else np.int64


def _communicating(kernels: list[Event]) -> list[Event]:
    """Return the kernels that are a collective's: by their arguments, or by their names."""
    if _TOLD in b"".join([kernel.args for kernel in kernels]):
        return [each for each in kernels if _TOLD in bytes(each.args) or _named_so(each.name or "")]
    return [each for each in kernels if _named_so(each.name or "")]


@lru_cache(1 << 12)
def _named_so(kernel: str) -> bool:
    return _COMMUNICATES.search(kernel) is not None
