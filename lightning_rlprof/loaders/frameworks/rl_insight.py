"""Rows of events as rl-insight's parsers return them, saved as JSON Lines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.frameworks.log_lines import (
    MS,
    exact,
    line,
    objects,
    rank_trace,
    text,
    whole,
)
from lightning_rlprof.records.run_directory import RankTrace, SpanLine
from lightning_rlprof.records.stage_aliases import standard_stage

_MOST_RANKS, _LONGEST_NS = 2**20, 2**58
_WALL_CLOCK_NS = 10**18  # the year 2001: earlier times are of a clock that nothing tells
_NO_STEPS = "rl-insight's rows have no steps: the record of a rank is one step"


def read_rl_insight(paths: Sequence[Path]) -> list[RankTrace]:
    """Read rows with ``name, role, rank_id, start_time_ms, end_time_ms``: stages of ranks.

    Raises:
        TraceError: A file cannot be read, or has no row with these.
    """
    return [trace for path in paths for trace in _read(path)]


class _Row(NamedTuple):
    rank: int
    role: str
    span: SpanLine


def _read(path: Path) -> list[RankTrace]:
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
