"""Turn events of torch.profiler traces into columns by kind; no event object is kept."""

from collections import Counter
from collections.abc import Sequence
from itertools import compress, islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.loaders.chrome.decoding import (
    LARGEST_TIME,
    NO_TIME,
    Codes,
    Event,
    Id,
    nanoseconds,
)
from lightning_rlprof.loaders.chrome.spill import HELD, Grown, Scratch
from lightning_rlprof.loaders.kineto.event_kinds import (
    ARGUMENTS,
    COLLECTIVE,
    COUNTER,
    DERIVED,
    EVERY,
    KEPT,
    MEMORY,
    METADATA,
    OTHER,
    SLICES,
    code_of_event,
    holding,
    read_arguments,
    signs_of,
)
from lightning_rlprof.tables.arrays import Int64s

MOST_LANES = 4_096
"""Most distinct threads; the largest hosts run a few hundred in one process."""

_Columns = dict[str, npt.NDArray[Any]]

_TOLD = b'"Collective name"'
_LARGEST = 1e300  # of a counter: a thousand of them still have a sum
_LONGEST = 1_000  # characters of what threads and processes are called
# Codes: half the memory.
_NARROW = {"lane", "name", "operation", "type", "group", "dims", "types", "values"}


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
            self.thread_names[event.pid, event.tid] = name[:_LONGEST]
        elif isinstance(name, str):
            self.labels[event.pid] = name[:_LONGEST]


def _type(column: str) -> type[np.generic]:
    return np.int32 if column in _NARROW else np.float64 if column == "value" else np.int64
