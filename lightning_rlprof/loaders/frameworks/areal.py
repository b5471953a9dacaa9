"""AReaL's traces: events of its perf tracer, and sessions, which are one sample each.

Events are in microseconds since their tracer began: there isn't a wall clock, so processes are
aligned by nothing but their steps. Sessions have the wall clock of their host.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.frameworks.log_lines import (
    US,
    fate_mark,
    in_steps,
    is_name,
    line,
    nanoseconds,
    objects,
    rank_trace,
    read_each,
    rollout_stages,
    sample_number,
    step_spans,
    text,
    wall_clock,
    whole,
)
from lightning_rlprof.records.records import SAMPLE
from lightning_rlprof.records.run_directory import RankTrace, SampleLine, SpanLine
from lightning_rlprof.records.stage_aliases import standard_stage

_NO_CLOCK = "AReaL's trace lacks a wall clock: don't compare ranks by time"
_PHASES = {"generate": "actor_generate", "reward": "compute_reward", "toolcall": "tool_call"}
# An accepted session may still be dropped or go stale before an update: that is not in the file.
_FATES = {"rejected": "filtered", "failed": "aborted", "dropped": "aborted"}
_EVALUATES = "eval-rollout"
_STEPS = "sessions don't name their step: a step begins when no session is open"
_ACCEPTED = "accepted sessions have an unknown fate: the file doesn't tell which of them train"
_NO_TIMES = "{} phases without a start or an end are left out"


def read_events(paths: Sequence[Path]) -> list[RankTrace]:
    """Read ``traces-r*.jsonl`` of AReaL's perf tracer.

    Its ``global_step`` counts from 0. A step is as long as to the first event of the next one.

    Raises:
        TraceError: A file cannot be read, or has no event of a step.
    """
    return [_read_events(path) for path in paths]


def _read_events(path: Path) -> RankTrace:
    spans, lost = list[SpanLine](), 0
    rank, role, process = 0, "actor", 0
    for event in objects(path):
        if event is None:
            lost += 1
            continue
        about = event.get("args")
        about = about if isinstance(about, dict) else {}
        rank, role = _number(about.get("rank"), rank), text(about.get("role", role))
        process = _number(event.get("pid"), process)
        start, length = nanoseconds(event.get("ts"), US), nanoseconds(event.get("dur"), US)
        step, name = whole(about.get("global_step")), event.get("name")
        if event.get("ph") != "X" or not isinstance(name, str) or step is None:
            continue
        if start is None or length is None:
            lost += 1
            continue
        thread = _number(event.get("tid"), 0)
        stage = text(standard_stage(name))
        spans.append(line(stage, "stage", start, start + length, step + 1, thread))
    if not spans:
        raise TraceError(f"{path}: has no timings of a step")
    threads = [each.thread for each in spans]
    starts: dict[int, int] = {}
    for each in spans:
        starts[each.step] = min(starts.get(each.step, each.start_ns), each.start_ns)
    end = max(each.end_ns for each in spans)
    spans += step_spans(starts, end, max(set(threads), key=threads.count))
    notes = [("info", _NO_CLOCK)]
    return rank_trace(path, spans, rank=rank, role=role, process=process, notes=notes, lost=lost)


def _number(value: object, otherwise: int) -> int:
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
    fate = _FATES.get(session.status, session.status)
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
        rank, role = _number(record.get("rank"), rank), text(record.get("role") or role)
        sessions.append(found)
    if not sessions:
        raise TraceError(f"{path}: has no session with a task and a start")
    return _File(path, rank, role, sessions, lost)


def _session(record: Mapping[str, Any]) -> _Session | None:
    ids = [record.get(name) for name in ("role", "rank", "task_id", "session_id")]
    start = wall_clock(record.get("submit_ts"))
    if start is None or not all(map(is_name, ids[2:])):
        return None
    told = [each if is_name(each) else None for each in ids]
    final = wall_clock(record.get("finalized_ts"))
    phases, torn = list[tuple[str, int, int]](), 0
    groups = record.get("phases")
    for name, parts in (groups if isinstance(groups, dict) else {}).items():
        for part in parts if isinstance(parts, list) else [None]:
            times = part if isinstance(part, dict) else {}
            begin, end = (wall_clock(times.get(key)) for key in ("start_ts", "end_ts"))
            end = final if end is None else end
            if begin is None or end is None or end < begin:
                torn += 1
                continue
            phases.append((_PHASES.get(name, text(name)), begin, end))
    last = max([start, *(end for _, _, end in phases)])
    # Sessions and tasks are counted by each process from 0, also by one that starts again.
    number = sample_number(*told, start)
    task = f"rank {text(told[1])}, task {text(told[2])}"
    status = text(record.get("status"))
    return _Session(number, task, start, last if final is None else final, status, phases, torn)
