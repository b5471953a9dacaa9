"""Logs of frameworks as runs: AReaL's sessions, slime's rollouts, and verl's steps.

The beginning of a file tells which of them it is; files of one kind are read together. They may be
compressed with gzip.
"""

import io
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.chrome_events import Source
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import (
    FATES,
    FORMAT,
    NO_KNOWN_FATE,
    SAMPLE,
    Header,
    Kind,
    Note,
    Number,
)
from lightning_rlprof.records.run_directory import RankTrace, SampleLine, SpanLine
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.system.files import open_file

S = 1_000_000_000
"""Nanoseconds of a second."""

MAX_LINE_BYTES = 1 << 24
"""Bytes of a line, or of a pickle's beginning, that are looked at."""

ANY = range(1 - 2**60, 2**60)
"""Nanoseconds of 36 years."""

TODAY = range(15 * 10**17, 26 * 10**17)
"""From 2017 to 2052: one time that is far away would put all others out of range."""

_MAX_INTEGER = 2**52
_MAX_TEXT = 200
_Read = TypeVar("_Read")
_PHASES = {"generate": "actor_generate", "reward": "compute_reward", "toolcall": "tool_call"}

# An accepted session may still be dropped or go stale before an update: that is not in the file.
_AREAL_FATES = {"rejected": "filtered", "failed": "aborted", "dropped": "aborted"}
_EVALUATES = "eval-rollout"
_STEPS = "sessions don't name their step: a step begins when no session is open"
_ACCEPTED = "accepted sessions have an unknown fate: the file doesn't tell which of them train"
_NO_TIMES = "{} phases without a start or an end are left out"
_EVALUATION = re.compile(r"eval_\d+$")
_GENERATE, _WHOLE, _GROUP = "actor_generate", "generate_and_rm", "generate_and_rm_group"
_SLIME_FATES = {"truncated": "truncated", "aborted": "aborted", "failed": "aborted"}
_NO_TRACE = "its samples have no trace, which newer versions of slime record"
_TORN = "{} events are left out: they are damaged, or of a span that didn't end"
_MAX_STEP_NS = 2**55  # A step longer than a year is an error, and would move all later steps.
_STEP = "timing_s/step"
_ONLY_STEPS = (
    "the log has no times of day: its steps follow one another without a gap, and their stages are "
    "left out, as their order is unknown"
)
Log = Literal["areal", "slime", "verl", "OpenTelemetry"]
_OF_LINES = (".jsonl", ".jsonl.gz")
SUFFIXES = (*_OF_LINES, ".json", ".json.gz")
"""Of files that may be logs."""

_MAX_LINES = 16  # The first lines may be damaged.
_HEAD = 4096
_BUFFER = 1 << 16  # Bytes that are read and decompressed at once.
_DUMP = re.compile(rb'\s*\{\s*"(?:rollout_id|samples)"\s*:')
_OTLP = re.compile(rb'\s*\{\s*"(?:resource(?:Spans|Metrics|Logs)|batches)"\s*:')


class _Stream(io.RawIOBase):
    """A file, decompressed, as what `io` reads.

    Args:
        source: The file.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._source.readinto(memoryview(buffer))


@contextmanager
def opened(path: Path) -> Iterator[tuple[Source, io.BufferedReader]]:
    """Open a file, plain or compressed; raises TraceError and OSError."""
    open_file(path).close()  # A pipe, which may never end, is refused.
    with Source(path) as source:
        yield source, io.BufferedReader(_Stream(source), _BUFFER)


def texts(path: Path, *, by_line: bool) -> Iterator[bytes | None]:
    """Yield the file, or each line that is not empty; None at the end of one that is cut off.

    Of a line that is too long, only the beginning comes.

    Raises:
        TraceError: The file cannot be read.
    """
    try:
        with opened(path) as (source, file):
            if not by_line:
                yield file.read()
                return
            begins = True
            while part := file.readline(MAX_LINE_BYTES):
                if begins and part.strip():
                    yield part
                begins = part.endswith(b"\n")
            if source.problem is not None:
                yield None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def objects(path: Path) -> Iterator[Mapping[str, Any] | None]:
    """Yield the object of each line, or of the file; None for what is none, or is too long.

    Raises:
        TraceError: The file cannot be read.
    """
    for part in texts(path, by_line=_has_lines(path)):
        yield None if part is None else as_object(part)


def _has_lines(path: Path) -> bool:
    return path.name.endswith(_OF_LINES)


def as_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a text; None for anything else."""
    try:
        found = json.loads(text)
    except NOT_JSON:
        return None
    return found if isinstance(found, dict) else None


def as_ns(value: Any, unit: int, within: range) -> int | None:
    """Return a time in nanoseconds; None for what is not a number, or out of range.

    Example::

        >>> as_ns(1.5, S, ANY), as_ns(float("nan"), S, ANY), as_ns("1", S, ANY), as_ns(5, S, TODAY)
        (1500000000, None, None, None)
    """
    if not is_number(value) or not abs(value) < 2**62 // unit:
        return None
    full, rest = divmod(value, 1)  # A float of today's date in nanoseconds is 256 ns coarse.
    found = int(full) * unit + round(rest * unit)
    return found if found in within else None


def is_number(value: Any) -> bool:
    """Tell whether a value is a number that is finite and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def whole(value: object) -> int | None:
    """Return a number that counts something; None for anything else."""
    return value if type(value) is int and 0 <= value < _MAX_INTEGER else None


def is_name(value: object) -> bool:
    """Tell whether a value can name a task or a sample."""
    return isinstance(value, str) or (type(value) is int and abs(value) < _MAX_INTEGER)


def text(value: object) -> str:
    """Return a value as a text of moderate length that every encoder takes."""
    return str(value)[:_MAX_TEXT].encode("utf-8", "replace").decode()


def sample_number(*ids: object) -> int:
    """Return the number of a sample below 2**52, the same in every file that has these ids."""
    digest = blake2b(json.dumps(ids).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") >> 4


def read_each(
    paths: Sequence[Path], read: Callable[[Path], _Read]
) -> tuple[list[_Read], list[str]]:
    """Read files; what cannot be read is said.

    Raises:
        TraceError: None of them can be read; the reason of the first.
    """
    found, broken = [], list[TraceError]()
    for path in paths:
        try:
            found.append(read(path))
        except TraceError as error:
            broken.append(error)
    if not found:
        raise broken[0]
    return found, [str(error) for error in broken]


def line(
    name: str,
    kind: Kind,
    start_ns: int,
    end_ns: int,
    step: int = 0,
    thread: int = 0,
    parent: int | None = None,
    counters: Mapping[str, Number] | None = None,
) -> SpanLine:
    """Return a span; `rank_trace` numbers it."""
    told: dict[str, Number | None] | None = None if counters is None else {**counters}
    return SpanLine(name, kind, step, start_ns, end_ns, thread, 0, parent, told)


def fate_mark(fate: str, number: int, at_ns: int, **counters: Number | None) -> SpanLine:
    """Return the mark of what became of a sample; a word that `FATES` lacks counts as unknown."""
    known = fate if fate in FATES else NO_KNOWN_FATE
    told = {SAMPLE: number, **_known(counters)}
    return line(f"{SAMPLE} {known}", "mark", at_ns, at_ns, counters=told)


def _known(counters: Mapping[str, Number | None]) -> dict[str, Number]:
    return {name: value for name, value in counters.items() if value is not None}


def step_spans(starts: Mapping[int, int], end_ns: int, thread: int = 0) -> list[SpanLine]:
    """Return steps that follow one another, by their number and start."""
    begins = sorted((start, number) for number, start in starts.items())
    return [
        line("step", "step", start, max(until, start), number, thread)
        for (start, number), (until, _) in pairwise([*begins, (end_ns, 0)])
    ]


def in_steps(spans: Iterable[SpanLine], starts: Mapping[int, int]) -> list[SpanLine]:
    """Give each span the step in which it starts: the last that began before it, or the first."""
    begins, numbers = zip(*sorted((start, each) for each, start in starts.items()), strict=True)
    return [
        replace(each, step=numbers[max(bisect_right(begins, each.start_ns) - 1, 0)])
        for each in spans
    ]


def rollout_stages(spans: Iterable[SpanLine], name: str) -> list[SpanLine]:
    """Return for each step the stage from its first phase to the end of its last one.

    Phases of samples overlap, so that none of them alone is what the process does.
    """
    lives: dict[int, tuple[int, int]] = {}
    for each in spans:
        if each.kind == "region":
            first, last = lives.get(each.step, (each.start_ns, each.end_ns))
            lives[each.step] = min(first, each.start_ns), max(last, each.end_ns)
    return [line(name, "stage", *life, step) for step, life in lives.items()]


def rank_trace(
    path: Path,
    spans: Sequence[SpanLine],
    *,
    rank: int = 0,
    role: str = "actor",
    process: int = 0,
    zero_ns: int = 0,
    samples: Sequence[SampleLine] = (),
    notes: Iterable[tuple[str, str]] = (),
    lost: int = 0,
    host: str = "unknown host",
    world_size: int | None = None,
) -> RankTrace:
    """Return the record of a rank.

    Args:
        path: The log, which the name of the run is taken from.
        spans: Its spans; a ``parent`` is the place of a span in them, from 1.
        rank: Its number.
        role: What the process does.
        process: Its id.
        zero_ns: Wall clock of the record's first moment; 0 if the log has no wall clock.
        samples: What its samples are called.
        notes: Level and text of each.
        lost: Lines that could not be read.
        host: Its host.
        world_size: Number of ranks; None if those that are read are all.
    """
    head = Header(
        FORMAT, path.parent.name, rank, world_size or rank + 1, role, host, process, "unknown",
        zero_ns, 0,
        open_world=world_size is None,
    )  # fmt: skip
    lines = [
        replace(each, start_ns=each.start_ns - zero_ns, end_ns=each.end_ns - zero_ns, id=at)
        for at, each in enumerate(spans, start=1)
    ]
    return RankTrace(
        path,
        head,
        lines,
        samples=[*samples],
        notes=[Note(0, level, said, Code.OF_LOG.value) for level, said in notes],
        status="finished",
        lost_lines=lost,
    )


def _number_or(value: object, otherwise: int) -> int:
    found = whole(value)
    return otherwise if found is None else found


class _Session(NamedTuple):
    """One sample.

    Attributes:
        number: Its number.
        task: Name of its task: the sessions of one prompt.
        start_ns: When it was submitted.
        end_ns: When its result was final, or its last known moment.
        status: What the tracer says of it.
        phases: Name, start and end of each.
        torn: Phases that lack a time.
    """

    number: int
    task: str
    start_ns: int
    end_ns: int
    status: str
    phases: list[tuple[str, int, int]]
    torn: int


class _File(NamedTuple):
    path: Path
    rank: int
    role: str
    sessions: list[_Session]
    lost: int


def read_sessions(paths: Sequence[Path]) -> list[RankTrace]:
    """Read ``sessions-r*.jsonl`` of AReaL's session tracer: each session is a sample.

    ``accepted`` isn't a fate, because what the update does with the sample is not in the file.
    Steps are common to all files.

    Raises:
        TraceError: None of the files can be read, or has a session.
    """
    files, broken = read_each(paths, _read_sessions)
    every = sorted(
        (each for file in files for each in file.sessions), key=lambda each: each.start_ns
    )
    starts, reached = dict[int, int](), every[0].start_ns - 1
    for each in every:
        if each.start_ns > reached:
            starts[len(starts) + 1] = each.start_ns
        reached = max(reached, each.end_ns)
    found = []
    for file in files:
        spans = in_steps([span for each in file.sessions for span in _spans(each, file)], starts)
        stage = "evaluation" if file.role == _EVALUATES else "actor_generate"
        spans += rollout_stages(spans, stage) + step_spans(starts, reached)
        torn = sum(each.torn for each in file.sessions)
        notes = [("info", _STEPS), ("info", _ACCEPTED), *(("warning", why) for why in broken)]
        notes += [("warning", _NO_TIMES.format(torn))] * (torn > 0)
        names = [SampleLine(each.number, each.task, each.task, 0) for each in file.sessions]
        found.append(
            rank_trace(
                file.path, spans, rank=file.rank, role=file.role, zero_ns=every[0].start_ns,
                samples=names, notes=notes, lost=file.lost,
            )
        )  # fmt: skip
        broken = []
    return found


def _spans(session: _Session, file: _File) -> Iterator[SpanLine]:
    for name, start, end in session.phases:
        yield line(name, "region", start, end, counters={SAMPLE: session.number})
    fate = _AREAL_FATES.get(session.status, session.status)
    if file.role == _EVALUATES and fate == session.status:
        fate = "evaluation"
    if session.status != "pending":
        yield fate_mark(fate, session.number, session.end_ns)


def _read_sessions(path: Path) -> _File:
    sessions, lost = list[_Session](), 0
    rank, role = 0, "rollout"
    for record in objects(path):
        found = None if record is None else _session(record)
        if record is None or found is None:
            lost += 1
            continue
        rank, role = _number_or(record.get("rank"), rank), text(record.get("role") or role)
        sessions.append(found)
    if not sessions:
        raise TraceError(f"{path}: has no session with a task and a start")
    return _File(path, rank, role, sessions, lost)


def _session(record: Mapping[str, Any]) -> _Session | None:
    ids = [record.get(name) for name in ("role", "rank", "task_id", "session_id")]
    start = as_ns(record.get("submit_ts"), S, TODAY)
    if start is None or not all(map(is_name, ids[2:])):
        return None
    told = [each if is_name(each) else None for each in ids]
    final = as_ns(record.get("finalized_ts"), S, TODAY)
    phases, torn = list[tuple[str, int, int]](), 0
    groups = record.get("phases")
    for name, parts in (groups if isinstance(groups, dict) else {}).items():
        for part in parts if isinstance(parts, list) else [None]:
            times = part if isinstance(part, dict) else {}
            begin, end = (as_ns(times.get(key), S, TODAY) for key in ("start_ts", "end_ts"))
            end = final if end is None else end
            if begin is None or end is None or end < begin:
                torn += 1
                continue
            phases.append((_PHASES.get(name, text(name)), begin, end))
    last = max([start, *(end for _, _, end in phases)])
    # Every process counts sessions and tasks from 0, even if it starts again.
    number = sample_number(*told, start)
    task = f"rank {text(told[1])}, task {text(told[2])}"
    status = text(record.get("status"))
    return _Session(number, task, start, last if final is None else final, status, phases, torn)


class _Dump(NamedTuple):
    """Samples of one rollout.

    Attributes:
        number: ``rollout_id``, from 0.
        evaluates: Whether they are of an evaluation.
        samples: What slime says of each.
    """

    number: int
    evaluates: bool
    samples: list[Mapping[str, Any]]


class _Span(NamedTuple):
    """A span of a sample's trace, with what its start and its end say of it."""

    id: str
    parent: object
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]


def read_slime(paths: Sequence[Path]) -> list[RankTrace]:
    """Read dumps of rollouts, in JSON or lines of it, as one rank.

    A step is a rollout, up to the next one; a phase is in the step in which it began. ``completed``
    isn't a fate, because the dump is written before the update.

    Raises:
        TraceError: None of the files can be read, or no sample has a trace.
    """
    read, broken = read_each(paths, _read_dumps)
    spans, names = list[SpanLine](), list[SampleLine]()
    lives, seen, torn = list[tuple[_Dump, int, int]](), set[str](), 0
    rolled: dict[bool, list[SpanLine]] = {False: [], True: []}  # True is for evaluations.
    for dump in (each for dumps, _ in read for each in dumps):
        phases, ends = list[SpanLine](), list[tuple[Mapping[str, Any], int, int | None]]()
        for sample in dump.samples:
            number, (traced, lost_events) = _number_of(dump, sample), _trace_of(sample, seen)
            names.append(_name(number, dump, sample))
            own = _phases(number, sample, traced, len(spans) + len(phases))
            ends.append((sample, number, max((each.end_ns for each in own), default=None)))
            phases += own
            torn += lost_events
        if phases:
            last = max(each.end_ns for each in phases)
            lives.append((dump, min(each.start_ns for each in phases), last))
            rolled[dump.evaluates] += phases
            spans += phases
            spans += [
                _fate(number, dump, sample, last if end is None else end)
                for sample, number, end in ends
            ]
    if not spans:
        raise TraceError(f"{paths[0]}: {_NO_TRACE}")
    zero, starts = min(first for _, first, _ in lives), _starts(lives, spans)
    spans = in_steps(spans, starts)
    for evaluates, stage in ((False, _GENERATE), (True, "evaluation")):
        spans += rollout_stages(in_steps(rolled[evaluates], starts), stage)
    spans += step_spans(starts, max(last for *_, last in lives))
    notes = [("warning", each) for each in broken]
    notes += [("warning", _TORN.format(torn))] * (torn > 0)
    lost = sum(count for _, count in read)
    return [
        rank_trace(
            paths[0], spans, role="rollout", zero_ns=zero, samples=names, notes=notes, lost=lost
        )
    ]


def _starts(lives: Sequence[tuple[_Dump, int, int]], spans: Sequence[SpanLine]) -> dict[int, int]:
    """Return the start of each step: of its rollout's first phase after the rollout before.

    Samples that a rollout continues began in an earlier one.
    """
    trains = [each for each in lives if not each[0].evaluates] or [*lives]
    begins = np.sort([each.start_ns for each in spans if each.kind != "mark"])
    found, ended = dict[int, int](), 0
    for dump, first, last in sorted(trains, key=lambda each: each[2]):
        later = np.searchsorted(begins, ended)
        start = first if first >= ended or later == len(begins) else int(begins[later])
        found.setdefault(dump.number + 1, start)
        ended = last
    return found


def _told(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what has the trace of a sample: a part of it, in some versions the sample itself."""
    trace = sample.get("trace")
    return trace if isinstance(trace, dict) else sample


def _trace_of(sample: Mapping[str, Any], seen: set[str]) -> tuple[list[_Span], int]:
    """Return a sample's spans by start, without those of another one, and lost events."""
    events = _told(sample).get("events")
    begun: dict[str, tuple[str, int, object, Mapping[str, Any]]] = {}
    ended: dict[str, _Span] = {}
    torn = 0
    for event in events if isinstance(events, list) else ():
        told = event if isinstance(event, dict) else {}
        what, name, key = told.get("type"), told.get("name"), told.get("span_id")
        at, attributes = as_ns(told.get("ts"), S, TODAY), told.get("attrs")
        attributes = attributes if isinstance(attributes, dict) else {}
        if at is None or not isinstance(name, str):
            torn += 1
        elif what == "event":
            continue
        elif what == "span_start" and isinstance(key, str):
            begun[key] = (name, at, told.get("parent_span_id"), attributes)
        elif what == "span_end" and isinstance(key, str) and key in begun:
            begin = begun[key]
            both = {**begin[3], **attributes}
            ended[key] = _Span(key, begin[2], begin[0], begin[1], max(at, begin[1]), both)
        else:
            torn += 1
    spans = [ended[key] for key in begun if key in ended and key not in seen]
    torn += sum(key not in ended for key in begun)
    seen.update(begun)
    return spans, torn


def _phases(
    number: int, sample: Mapping[str, Any], spans: Sequence[_Span], before: int
) -> list[SpanLine]:
    """Return a sample's phases: innermost generations, and what isn't around them."""
    length = whole(sample.get("response_length"))
    outer = [each for each in spans if each.name == _WHOLE]
    made = [
        each for each in spans if standard_stage(each.name) == _GENERATE and each.name != _WHOLE
    ] or (outer if length else [])
    by_id = {each.id: each for each in spans}
    around = {each.id for each in spans if each.name == _GROUP}
    around |= {each.id for each in outer if each not in made}
    for each in made:
        above = each.parent
        while isinstance(above, str) and above in by_id and above not in around:
            around.add(above)
            above = by_id[above].parent
    told = dict(zip((each.id for each in made), _counters(sample, made, length), strict=True))
    place, found = dict[object, int](), list[SpanLine]()
    for each in spans:
        if each.id in around:
            continue
        counters = {SAMPLE: number, **told.get(each.id, {})}
        parent = place.get(each.parent)
        name = text(standard_stage(each.name))
        found.append(
            line(name, "region", each.start_ns, each.end_ns, parent=parent, counters=counters)
        )
        place[each.id] = before + len(found)
    return found


def _counters(
    sample: Mapping[str, Any], made: Sequence[_Span], length: int | None
) -> list[dict[str, Number]]:
    """Return tokens and versions of the weights of each generation of a sample.

    slime lists a version per generation. If there are more or fewer, the first one is that in which
    the first generation began, and the last one that in which the last one ended.
    """
    tokens = [whole(each.attributes.get("completion_tokens")) for each in made]
    if None in tokens:
        tokens = [*[None] * (len(made) - 1), length]
    told = sample.get("weight_versions")
    versions = [_version(each) for each in told] if isinstance(told, list) else []
    last = None
    if not versions or None in versions:
        versions = [None] * len(made)
    elif len(versions) != len(made):
        last = versions[-1]
        versions = [versions[0], *[None] * (len(made) - 1)][: len(made)]
    pairs = zip(tokens, versions, strict=True)
    found = [_known({"tokens": count, "version": version}) for count, version in pairs]
    if found and last is not None:
        found[-1]["version_end"] = last
    return found


def _version(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 16:
        return int(value)
    return whole(value)


def _fate(number: int, dump: _Dump, sample: Mapping[str, Any], at_ns: int) -> SpanLine:
    status = text(sample.get("status") or "complete")
    told = "filtered" if sample.get("remove_sample") is True else _SLIME_FATES.get(status, status)
    fate = "evaluation" if dump.evaluates else told
    reward, tokens = sample.get("reward"), whole(sample.get("response_length"))
    reward = reward if is_number(reward) else None
    return fate_mark(fate, number, at_ns, tokens=tokens, reward=reward)


def _number_of(dump: _Dump, sample: Mapping[str, Any]) -> int:
    told = _told(sample)
    if isinstance(told.get("trace_id"), str) and told["trace_id"]:
        return sample_number(told["trace_id"])
    index = sample.get("index")
    return sample_number(dump.evaluates, dump.number, index if is_name(index) else None)


def _name(number: int, dump: _Dump, sample: Mapping[str, Any]) -> SampleLine:
    told = _told(sample)
    index, group = (
        next((each for each in both if is_name(each)), None)
        for both in (
            (sample.get("index"), told.get("sample_id")),
            (sample.get("group_index"), told.get("group_id")),
        )
    )
    name = f"sample {text(index)}" if group is None else text(group)
    if dump.evaluates:
        name = f"evaluation {dump.number}, {name}"
    return SampleLine(number, name, name, whole(told.get("attempt")) or 0)


def _read_dumps(path: Path) -> tuple[list[_Dump], int]:
    """Return the rollouts of a file, and the number of samples or lines that cannot be read."""
    stem = re.search(r"\d+$", path.stem)
    number = int(stem[0][-9:]) if stem else 0
    evaluates = _EVALUATION.search(path.stem) is not None
    found, lost = dict[int, list[Mapping[str, Any]]](), 0
    for each in objects(path):
        told = each or {}
        samples = told.get("samples", [told])
        own = whole(told.get("rollout_id"))
        for sample in samples if isinstance(samples, list) else [None]:
            if isinstance(sample, dict) and sample:
                found.setdefault(number if own is None else own, []).append(sample)
            else:
                lost += 1
    if not found:
        raise TraceError(f"{path}: has no samples")
    return [_Dump(each, evaluates, samples) for each, samples in found.items()], lost


def read_verl(paths: Sequence[Path]) -> list[RankTrace]:
    """Read the steps in logs of verl's file logger (``trainer.logger=file``).

    Raises:
        TraceError: A file cannot be read, or has no time of a step.
    """
    return [_read_steps(path) for path in paths]


def _read_steps(path: Path) -> RankTrace:
    spans, lost, now = [], 0, 0
    for row in objects(path):
        data = None if row is None else row.get("data")
        step = None if row is None else whole(row.get("step"))
        lost += row is None
        if not isinstance(data, dict) or step is None:
            continue
        length = as_ns(data.get(_STEP), S, ANY)
        if length is not None and 0 <= length < _MAX_STEP_NS:
            spans.append(line("step", "step", now, now + length, step))
            now += length
    if not spans:
        raise TraceError(f"{path}: has no timings of a step")
    return rank_trace(path, spans, notes=[("info", _ONLY_STEPS)], lost=lost)


def kind_of_log(path: Path) -> Log | None:
    """Return what kind of log a file is, by its beginning; None for anything else."""
    try:
        with opened(path) as (_, file):
            head = file.peek(_HEAD)[:_HEAD]
            if _OTLP.match(head):
                return "OpenTelemetry"
            if not _has_lines(path):
                return "slime" if _DUMP.match(head) else None
            lines = islice(iter(lambda: file.readline(MAX_LINE_BYTES), b""), _MAX_LINES)
            kinds = (_kind_of_object(each) for each in map(as_object, lines) if each is not None)
            return next((kind for kind in kinds if kind is not None), None)
    except (OSError, TraceError):
        return None


def _kind_of_object(first: Mapping[str, Any]) -> Log | None:
    if isinstance(first.get("resourceSpans"), list):
        return "OpenTelemetry"
    if isinstance(first.get("data"), dict) and "step" in first:
        return "verl"
    if {"task_id", "session_id", "submit_ts"} <= first.keys():
        return "areal"
    if isinstance(first.get("trace"), dict) or isinstance(first.get("events"), list):
        return "slime"
    return None
