"""Recognize the log of a framework by its beginning, and read logs of one kind together."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.frameworks.areal import read_events, read_sessions
from lightning_rlprof.loaders.frameworks.log_lines import (
    LONGEST,
    MS,
    as_object,
    exact,
    line,
    objects,
    rank_trace,
    text,
    whole,
)
from lightning_rlprof.loaders.frameworks.slime import read_slime
from lightning_rlprof.loaders.frameworks.verl import read_verl
from lightning_rlprof.records.run_directory import RankTrace, SpanLine
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.system.files import open_file

Log = Literal["areal events", "areal sessions", "slime", "verl", "rl-insight"]
SUFFIXES = (".jsonl", ".json")
"""Of files that may be logs."""

_FEW_LINES = 16  # of which the first may be damaged
_HEAD = 4096
_DUMP = re.compile(rb'\s*\{\s*"(?:rollout_id|samples)"\s*:')
_MOST_RANKS, _LONGEST_NS = 2**20, 2**58
_WALL_CLOCK_NS = 10**18  # the year 2001: earlier times are of a clock that nothing tells
_NO_STEPS = "rl-insight's rows have no steps: the record of a rank is one step"


def kind_of_log(path: Path) -> Log | None:
    """Return what kind of log a file is, by its beginning; None for anything else."""
    try:
        with open_file(path) as file:
            if path.suffix == ".jsonl":
                parts = iter(lambda: file.readline(LONGEST), b"")
                return _kind_of_lines(islice(parts, _FEW_LINES))
            return "slime" if _DUMP.match(file.read(_HEAD)) else None
    except OSError:
        return None


def _kind_of_lines(lines: Iterable[bytes]) -> Log | None:
    found = (as_object(each) for each in lines)
    kinds = (_kind_of_object(each) for each in found if each is not None)
    return next((kind for kind in kinds if kind is not None), None)


def _kind_of_object(first: Mapping[str, Any]) -> Log | None:
    if isinstance(first.get("data"), dict) and "step" in first:
        return "verl"
    if {"task_id", "session_id", "submit_ts"} <= first.keys():
        return "areal sessions"
    if isinstance(first.get("trace"), dict) or isinstance(first.get("events"), list):
        return "slime"
    if {"role", "rank_id", "start_time_ms", "end_time_ms"} <= first.keys():
        return "rl-insight"
    about = first.get("args")
    own = isinstance(about, dict) and ("global_step" in about or "role" in about)
    known = first.get("ph") in ("M", "X", "i") and (own or "pid" in first)
    return "areal events" if known else None


def read_rl_insight(paths: Sequence[Path]) -> list[RankTrace]:
    """Read rows with ``name, role, rank_id, start_time_ms, end_time_ms``: stages of ranks.

    Raises:
        TraceError: A file cannot be read, or has no row with these.
    """
    return [trace for path in paths for trace in _read_rows(path)]


class _Row(NamedTuple):
    rank: int
    role: str
    span: SpanLine


def _read_rows(path: Path) -> list[RankTrace]:
    read = [_row(each or {}) for each in objects(path)]
    rows = [each for each in read if each is not None]
    if not rows:
        raise TraceError(f"{path}: has no row with a rank, a name, and times")
    starts = sorted(each.span.start_ns for each in rows)
    is_wall = starts[len(starts) // 2] > _WALL_CLOCK_NS
    rows = [each for each in rows if (each.span.start_ns > _WALL_CLOCK_NS) == is_wall]
    zero = min(each.span.start_ns for each in rows) if is_wall else 0
    found = list[RankTrace]()
    for rank in sorted({each.rank for each in rows}):
        own = [each for each in rows if each.rank == rank]
        roles = {each.role for each in own}
        found.append(
            rank_trace(
                path,
                [each.span for each in own],
                rank=rank,
                role=roles.pop() if len(roles) == 1 else "worker",
                zero_ns=zero,
                notes=[("info", _NO_STEPS)],
                lost=0 if found else len(read) - len(rows),
            )
        )
    return found


def _row(row: Mapping[str, Any]) -> _Row | None:
    rank, name = whole(row.get("rank_id")), row.get("name")
    start, end = (row.get(f"{each}_time_ms") for each in ("start", "end"))
    begin, until = (exact(each, MS) for each in (start, end))
    if rank is None or rank >= _MOST_RANKS or not isinstance(name, str):
        return None
    if begin is None or until is None or not 0 <= until - begin < _LONGEST_NS:
        return None
    stage, thread = text(standard_stage(name)), whole(row.get("tid")) or 0
    return _Row(
        rank, text(row.get("role", "worker")), line(stage, "stage", begin, until, thread=thread)
    )


READERS: Mapping[Log, Callable[[Sequence[Path]], list[RankTrace]]] = {
    "areal events": read_events,
    "areal sessions": read_sessions,
    "slime": read_slime,
    "verl": read_verl,
    "rl-insight": read_rl_insight,
}
"""What reads the files of each kind."""
