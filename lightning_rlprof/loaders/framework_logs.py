"""Logs that frameworks write of their own stages: AReaL's perf tracer, and verl's file logger.

AReaL writes Chrome events, one JSON object per line, in microseconds since its tracer began: there
isn't a wall clock, so processes are aligned by nothing but their steps. verl writes one object per
step with the seconds of each of its timers: their order is assumed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.records.records import FORMAT, Header, Note
from lightning_rlprof.records.run_directory import RankTrace, SpanLine
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.system.files import open_file

_US, _S = 1_000, 1_000_000_000
_LONGEST = 1 << 20  # bytes of a line
_TIMING = "timing_s/"
# verl's timers in the order in which its trainer runs them; others follow in that of the log.
_ORDER = (
    *("gen", "generate_sequences", "reward", "old_log_prob", "ref", "values", "adv"),
    *("update_critic", "update_actor", "update_weights", "save_checkpoint", "testing"),
)
_PARTS_OF_OTHERS = ("generate_sequences", "tool_calls", "compute_score")  # of the agent loop
_ASSUMED = (
    "the log has only the seconds of each timer: their order in a step is assumed, and the time "
    "between them is behind them"
)


def read_areal(path: Path) -> RankTrace:
    """Read ``traces-r*.jsonl`` of AReaL's perf tracer.

    Its ``global_step`` counts from 0. A step is as long as to the first event of the next one.

    Raises:
        TraceError: The file cannot be read, or has no event of a step.
    """
    spans, lost = [], 0
    rank, role, process = 0, "actor", 0
    for event in _objects(path):
        if event is None:
            lost += 1
            continue
        about = event.get("args")
        about = about if isinstance(about, dict) else {}
        start, length, step = event.get("ts"), event.get("dur"), about.get("global_step")
        rank, role = about.get("rank", rank), about.get("role", role)
        process = event.get("pid", process)
        if not (isinstance(start, int) and isinstance(length, int) and isinstance(step, int)):
            continue
        if event.get("ph") == "X" and isinstance(event.get("name"), str):
            name, thread = standard_stage(event["name"]), event.get("tid")
            thread = thread if isinstance(thread, int) else 0
            begin = start * _US
            spans.append(_line(name, "stage", step + 1, begin, begin + length * _US, thread))
    trace = _trace(path, _tiled(spans), rank, role, process, lost)
    trace.notes.append(
        Note(0, "info", "AReaL's trace lacks a wall clock: don't compare ranks by time")
    )
    return trace


def read_verl(path: Path) -> RankTrace:
    """Read the log of verl's file logger (``trainer.logger=file``).

    Raises:
        TraceError: The file cannot be read, or has no timings of a step.
    """
    spans, lost, now = [], 0, 0
    for row in _objects(path):
        data = None if row is None else row.get("data")
        step = None if row is None else row.get("step")
        if not isinstance(data, dict) or not isinstance(step, int):
            lost += row is None
            continue
        seconds = {
            name.removeprefix(_TIMING): float(value)
            for name, value in data.items()
            if name.startswith(_TIMING) and isinstance(value, int | float) and value >= 0
        }
        whole = seconds.pop("step", sum(seconds.values()))
        begin, at = now, now
        for name in sorted(seconds, key=_place):
            if name not in _PARTS_OF_OTHERS:
                end = at + round(seconds[name] * _S)
                spans.append(_line(standard_stage(name), "stage", step, at, end))
                at = end
        now = max(at, begin + round(whole * _S))
        if seconds:
            spans.append(_line("step", "step", step, begin, now))
    trace = _trace(path, spans, 0, "actor", 0, lost)
    trace.notes.append(Note(0, "info", _ASSUMED))
    return trace


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def kind_of_log(line: bytes) -> str | None:
    """Return ``areal`` or ``verl`` by the first line of a log; None for anything else."""
    try:
        first = json.loads(line)
    except NOT_JSON:
        return None
    if not isinstance(first, dict):
        return None
    if isinstance(first.get("data"), dict) and "step" in first:
        return "verl"
    about = first.get("args")
    own = isinstance(about, dict) and ("global_step" in about or "role" in about)
    return "areal" if first.get("ph") in ("M", "X", "i") and (own or "pid" in first) else None


READERS = {"areal": read_areal, "verl": read_verl}
"""What reads each kind."""


def _objects(path: Path) -> Iterator[Mapping[str, Any] | None]:
    """Yield the object of each line; None for a line that is none."""
    try:
        with open_file(path) as file:
            while line := file.readline(_LONGEST):
                try:
                    found = json.loads(line)
                except NOT_JSON:
                    found = None
                yield found if isinstance(found, dict) else None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def _line(name: str, kind: Any, step: int, start_ns: int, end_ns: int, thread: int = 0) -> SpanLine:
    return SpanLine(name, kind, step, start_ns, end_ns, thread, 0, None)


def _tiled(spans: Sequence[SpanLine]) -> list[SpanLine]:
    """Add steps, which follow one another."""
    if not spans:
        return []
    first: dict[int, int] = {}
    for each in spans:
        first[each.step] = min(first.get(each.step, each.start_ns), each.start_ns)
    numbers = sorted(first, key=first.__getitem__)
    end = max(each.end_ns for each in spans)
    bounds = [*(first[number] for number in numbers[1:]), end]
    threads = [each.thread for each in spans]
    thread = max(set(threads), key=threads.count)
    return [
        *spans,
        *(
            _line("step", "step", number, first[number], until, thread)
            for number, until in zip(numbers, bounds, strict=True)
        ),
    ]


def _trace(
    path: Path, spans: Sequence[SpanLine], rank: Any, role: Any, process: Any, lost: int
) -> RankTrace:
    if not spans:
        raise TraceError(f"{path}: has no timings of a step")
    rank = rank if isinstance(rank, int) and rank >= 0 else 0
    head = Header(
        FORMAT, path.parent.name, rank, rank + 1, str(role), "unknown host", process or 0,
        "unknown", 0, 0,
        open_world=True,
    )  # fmt: skip
    lines = [
        SpanLine(each.name, each.kind, each.step, each.start_ns, each.end_ns, each.thread, at, None)
        for at, each in enumerate(spans, start=1)
    ]
    return RankTrace(path, head, lines, status="finished", lost_lines=lost)
