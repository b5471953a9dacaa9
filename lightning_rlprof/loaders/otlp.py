"""Spans of OpenTelemetry as a run: what a collector's file exporter writes, OTLP as lines of JSON.

A resource is a process: a rank with its role. Tempo's answers have the same spans. What a span
means is in `lightning_rlprof.records.otel_names`. Spans of libraries are left out.
"""

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.framework_logs import (
    TODAY,
    is_number,
    line,
    rank_trace,
    read_each,
    text,
    texts,
)
from lightning_rlprof.records import otel_names
from lightning_rlprof.records.records import FIRST_ROLE_RANK, Kind, Number
from lightning_rlprof.records.run_directory import RankTrace, SpanLine

_MAX_RANKS = 2**20
_MAX_WHOLE_BYTES = 1 << 28
"""Bytes of a file that is one object on several lines."""

_NOTHING: Mapping[str, Any] = {}
_NO_SPANS = "has no span that is a step or a stage of a training"
_CUT = f"a line of it is damaged or cut off, and the rest {_NO_SPANS}"
_NO_HOST = "spans don't name their host: whether all ranks share a clock is unknown"
_RUNS = "the spans are of {} runs: this is the newest"
_DAMAGED = "{} spans are left out: they have no name, no end, or times that cannot be true"


class _Scope(msgspec.Struct):
    spans: list[msgspec.Raw] = []


class _OfResource(msgspec.Struct, rename="camel"):
    resource: Any = None
    scope_spans: list[_Scope] = []


class _Line(msgspec.Struct, rename="camel"):
    """One line of a file; Tempo's answers call it batches."""

    resource_spans: list[_OfResource] = []
    batches: list[_OfResource] = []


class _Encoded(msgspec.Struct, rename="camel"):
    """One span; 64-bit integers are texts in JSON."""

    name: str
    start_time_unix_nano: int | str
    end_time_unix_nano: int | str
    span_id: str | None = None
    parent_span_id: str | None = None
    attributes: Any = None


class _Span(NamedTuple):
    id: str
    parent: str
    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    told: Mapping[str, Any]


@dataclass
class _Process:
    """One process.

    Attributes:
        told: Its attributes.
        spans: By id.
        umbrellas: Ids of spans as long as the run: what begins in one is on any thread.
    """

    told: Mapping[str, Any]
    spans: dict[str, _Span] = field(default_factory=dict)
    umbrellas: set[str] = field(default_factory=set)

    @property
    def place(self) -> otel_names.Place:
        return otel_names.place_in(self.told)

    @property
    def run(self) -> str | None:
        """What the run is called; None if it has no name."""
        return next((str(self.told[name]) for name in otel_names.RUNS if name in self.told), None)

    @property
    def has_steps(self) -> bool:
        return any(each.kind == "step" for each in self.spans.values())

    @property
    def start_ns(self) -> int:
        return min(each.start_ns for each in self.spans.values())

    @property
    def order(self) -> tuple[bool, int]:
        """Place among others: those with steps first, then by start."""
        return not self.has_steps, self.start_ns

    @property
    def role(self) -> str:
        service = text(self.told.get(otel_names.SERVICE) or "unknown_service")
        return text(self.place.role or ("actor" if "unknown_service" in service else service))


class _Read:
    """What files say, while they are read.

    Attributes:
        processes: By their attributes.
        damaged: How many spans cannot be read or be true.
        lost: How many lines cannot be read.
    """

    def __init__(self) -> None:
        self.processes: dict[str, _Process] = {}
        self.damaged = self.lost = 0
        self._line, self._span = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Encoded)

    def take_file(self, path: Path) -> None:
        """Add a file; raises TraceError."""
        before = self.lost
        found = [self._take_line(each) for each in texts(path, by_line=True)]
        if not any(found) and path.stat().st_size <= _MAX_WHOLE_BYTES:
            lost, self.lost = self.lost, before
            whole = [self._take_line(each) for each in texts(path, by_line=False)]
            if not any(whole):
                self.lost = lost

    def _take_line(self, data: bytes | None) -> bool:
        """Add what a line has; return whether it has a resource with spans."""
        try:
            found = self._line.decode(data or b"")
        except NOT_JSON:
            self.lost += 1
            return False
        for each in (*found.resource_spans, *found.batches):
            told = _attributes(each.resource)
            process = self.processes.setdefault(repr(sorted(told.items())), _Process(told))
            for scope in each.scope_spans:
                for span in scope.spans:
                    self._take_span(process, span)
        return len(found.resource_spans) + len(found.batches) > 0

    def _take_span(self, process: _Process, data: msgspec.Raw) -> None:
        try:
            span = self._span.decode(data)
            start, end = int(span.start_time_unix_nano), int(span.end_time_unix_nano)
        except NOT_JSON:
            self.damaged += 1
            return
        told = _attributes({"attributes": span.attributes})
        meaning = otel_names.meaning_of(span.name, told)
        key = span.span_id or f"no id, {len(process.spans)}"
        if meaning is None:
            if otel_names.is_of_training(span.name, told):
                process.umbrellas.add(key)
        elif not span.name or start not in TODAY or end not in TODAY or end < start:
            self.damaged += 1
        else:  # A collector that tries again writes a span twice.
            name = sys.intern(text(meaning.name))
            kept = {each: told[each] for each in told if each.startswith(otel_names.KEPT_PREFIXES)}
            own = span.parent_span_id or "", meaning.kind, name, start, end, kept or _NOTHING
            process.spans[key] = _Span(key, *own)


def _attributes(holder: Any) -> dict[str, Any]:
    """Return attributes that are one text or number."""
    pairs = holder.get("attributes") if isinstance(holder, dict) else None
    found: dict[str, Any] = {}
    for pair in pairs if isinstance(pairs, list) else ():
        value = pair.get("value") if isinstance(pair, dict) else None
        for kind, own in value.items() if isinstance(value, dict) else ():
            found[str(pair.get("key"))] = _value(kind, own)
    return found


def _value(kind: str, value: Any) -> str | float | None:
    """Return an attribute; a 64-bit integer is a text in JSON."""
    if kind == "intValue":
        with suppress(TypeError, ValueError):
            return int(value)
    return value if isinstance(value, str | int | float) else None


def read_otlp(paths: Sequence[Path]) -> list[RankTrace]:
    """Read spans of processes as ranks; of several runs that are named, the newest.

    Times are those of the hosts' wall clocks. A process without a step gets those of the trainer.

    Raises:
        TraceError: None of the files can be read, or has a step or a stage.
    """
    read = _Read()
    notes = [("warning", why) for why in read_each(paths, read.take_file)[1]]
    every = [each for each in read.processes.values() if each.spans]
    if not every:
        raise TraceError(f"{paths[0]}: {_CUT if read.lost else _NO_SPANS}")
    named = [each for each in every if each.run is not None]
    newest = max(named, key=lambda each: each.start_ns).run if named else None
    processes = [each for each in every if each.run in (newest, None)]
    if len(processes) < len(every):
        notes.append(("info", _RUNS.format(len({each.run for each in every} - {None}))))
    if read.damaged:
        notes.append(("warning", _DAMAGED.format(read.damaged)))
    if len(processes) > 1 and any(otel_names.HOST not in each.told for each in processes):
        notes.append(("info", _NO_HOST))
    zero = min(each.start_ns for each in processes)
    ranks, world = _ranks(processes)
    found = []
    for rank, process in sorted(ranks.items()):
        host = process.told.get(otel_names.HOST)
        told: dict[str, Any] = {} if host is None else {"host": text(host)}
        if process.has_steps and rank < FIRST_ROLE_RANK:  # Others are servers beside the ranks.
            told["world_size"] = world
        number = otel_names.number_in(process.told, otel_names.PROCESS)
        found.append(
            rank_trace(
                paths[0], _lines(process), rank=rank, role=process.role, process=number or 0,
                zero_ns=zero, notes=notes, lost=read.lost, **told,
            )
        )  # fmt: skip
        notes, read.lost = [], 0
    return found


def _ranks(processes: Sequence[_Process]) -> tuple[dict[int, _Process], int]:
    """Return processes by rank, and how many ranks there are.

    Where two have one rank, or one has none, as if each role counts its own, they are numbered by
    role, and the role with steps is the first.
    """
    told = [each.place.rank for each in processes]
    ranks = {rank for rank in told if rank is not None and rank < _MAX_RANKS}
    if len(ranks) == len(processes):
        worlds = (each.place.world_size or 0 for each in processes)
        own = [rank + 1 for rank in ranks if rank < FIRST_ROLE_RANK]
        world = max(each for each in (*worlds, *own) if each <= _MAX_RANKS)
        return {each.place.rank or 0: each for each in processes}, world
    roles: dict[str, tuple[bool, int]] = {}
    for each in processes:
        roles[each.role] = min(roles.get(each.role, each.order), each.order)
    ordered = sorted(
        processes, key=lambda each: (roles[each.role], each.place.rank or 0, each.order)
    )
    return dict(enumerate(ordered)), len(ordered)


def _lines(process: _Process) -> list[SpanLine]:
    """Return the spans of a process, in steps and on threads; steps in other ones are regions.

    Steps are on one thread, with what is in them, and with what runs between them. A span without
    a told thread that overlaps a step, and is not in it by its parent, is on another one.
    """
    spans = sorted(process.spans.values(), key=lambda each: (each.start_ns, -each.end_ns))
    steps, numbers, counted = list[_Span](), [0], otel_names.StepNumbers()
    for each in spans:
        if each.kind == "step" and (not steps or each.start_ns >= steps[-1].end_ns):
            steps.append(each)
            numbers.append(counted.next(each.told, numbers[-1]))
    begins, ends = [each.start_ns for each in steps], [each.end_ns for each in steps]
    threads, place, found = dict[str, int](), dict[str, int](), list[SpanLine]()
    for each in spans:
        number, at = bisect_right(begins, each.start_ns), bisect_right(ends, each.start_ns)
        is_inner = each.kind == "step" and each is not steps[number - 1]
        overlaps = each.kind != "step" and at < len(steps) and begins[at] < each.end_ns
        is_child = bool(each.parent) and each.parent not in process.umbrellas
        is_inside = is_child and number == at + 1 and each.end_ns <= ends[at]
        thread = otel_names.number_in(each.told, otel_names.THREAD)
        if thread is None:
            thread = threads.get(each.parent, int(overlaps and not is_inside))
        found.append(
            line(
                each.name, "region" if is_inner else each.kind, each.start_ns, each.end_ns,
                numbers[number], thread, place.get(each.parent), _counters(each.told),
            )
        )  # fmt: skip
        threads[each.id], place[each.id] = thread, len(found)
    return found


def _counters(told: Mapping[str, Any]) -> dict[str, Number] | None:
    """Return the counters of a span that this package wrote."""
    own = ((name.removeprefix(otel_names.COUNTER_PREFIX), value) for name, value in told.items())
    return {name: value for name, value in own if name not in told and is_number(value)} or None
