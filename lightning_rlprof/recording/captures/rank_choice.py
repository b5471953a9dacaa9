"""Ranks that show the cause of an unusual step: the slowest, a healthy one, one of each role."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import msgspec

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.records.records import Header
from lightning_rlprof.records.run_directory import rank_files, read_header
from lightning_rlprof.system.files import open_file

MOST_FOR_ALL = 4
"""Ranks of a run of which all are captured."""

_MOST = 8
_LAST = 8  # steps
_LATE = 0.02  # of the step
_TAIL = 1 << 15  # bytes; some 8 steps of 40 spans
_LONGEST_NS = 10**18  # of a step; a damaged file may say anything
_BUDGET_NS = 200_000_000  # of the training thread, at most 3 times an hour

_LEFT_OUT = {"capture", "interrupted"}

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True)
class RankSteps:
    """What a rank did last.

    Attributes:
        rank: Its number.
        role: Its role.
        lengths: The nanoseconds of its last steps.
        ends: How long after the start of the step each stage ended, by step, name and occurrence.
    """

    rank: int
    role: str
    lengths: Mapping[int, int] = field(default_factory=dict)
    ends: Mapping[int, Mapping[tuple[str, int], int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """Which ranks to capture.

    Attributes:
        ranks: Their numbers; None means all.
        why: What is known of them, for people; ``""`` if all are captured.
    """

    ranks: list[int] | None
    why: str = ""


def choose(
    header: Header,
    run: Path,
    step: int,
    *,
    alone: bool,
    knows: bool,
    clock: Callable[[], int] = perf_counter_ns,
) -> Choice:
    """Return the ranks that a capture after an unusual step is for.

    Of up to 4 ranks these are all. Of more, the ends of their files say which one arrives last.
    Reading stops after 0.2 s.

    Args:
        header: Of the rank that asks.
        run: The run directory.
        step: The unusual step.
        alone: Whether that step alone was unusual, else those before it, too.
        knows: Whether the cause is of the rank that asks.
        clock: Monotonic nanoseconds.
    """
    paths = []
    with suppress(OSError):
        paths = rank_files(run)
    if max(header.world_size, len(paths)) <= MOST_FOR_ALL:
        return Choice(None)
    until, found = clock() + _BUDGET_NS, []
    own = [path for path in paths if int(path.stem[5:]) == header.rank]
    for path in [*own, *(path for path in paths if path not in own)]:
        if clock() > until:
            break
        if (read := read_steps(path)) is not None:
            found.append(read)
    steps = {step} if alone else set(range(step - _LAST + 1, step + 1))
    choice = pick(found, steps, header.rank, slowest=header.rank if knows else None)
    if choice.why and len(found) < len(paths):
        return replace(choice, why=f"{choice.why}, of {len(found)} ranks that were read")
    return choice


def pick(
    found: Iterable[RankSteps], steps: set[int], own: int, slowest: int | None = None
) -> Choice:
    """Return the slowest of some ranks, a healthy one of its role, and one of each other role.

    The slowest one arrives last: in these steps its stages end later than the median of its role,
    by 2% of the step or more. If none does, or the ranks can't be compared, the rank that asks
    takes its place.

    Example::

        >>> def rank(number, end):
        ...     return RankSteps(number, "actor", {1: 100}, {1: {("compute_reward", 0): end}})
        >>> pick([rank(0, 50), rank(1, 51), rank(2, 90), rank(3, 50), rank(4, 49)], {1}, own=0)
        Choice(ranks=[0, 2], why='rank 2 arrives last, by 40% of the step')
    """
    roles: dict[str, list[RankSteps]] = defaultdict(list)
    for each in found:
        roles[each.role].append(each)
    late: dict[int, float] = {}
    for ranks in roles.values():
        late |= lateness(ranks, steps)
    why = ""
    if slowest is None:
        last = max(late, key=late.__getitem__, default=own)
        slowest = last if late.get(last, 0.0) >= _LATE else own
        why = "no rank is known to arrive late"
        if late.get(slowest, 0.0) >= _LATE:
            why = f"rank {slowest} arrives last, by {late[slowest]:.0%} of the step"
    chosen = [slowest]
    for ranks in sorted(roles.values(), key=lambda ranks: all(r.rank != slowest for r in ranks)):
        others = [each.rank for each in ranks if each.rank != slowest]
        if others:
            chosen.append(min(others, key=lambda rank: (abs(late.get(rank, 0.0)), rank)))
    return Choice(sorted(chosen[:_MOST]), why)


def lateness(ranks: list[RankSteps], steps: set[int]) -> dict[int, float]:
    """Return by how much of a step each rank is late, at the stage where it is most so.

    Steps of ranks that work together start together, so that no clocks are compared. It is the
    median over the steps, of ranks that ran them.
    """
    shares: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        present = [each for each in ranks if step in each.ends]
        if len(present) < 3:  # of two, each may be the late one
            continue
        length = median(each.lengths[step] for each in present)
        stages = set.intersection(*(set(each.ends[step]) for each in present))
        usual = {stage: median(each.ends[step][stage] for each in present) for stage in stages}
        for each in present if stages else ():
            most = max(each.ends[step][stage] - usual[stage] for stage in stages)
            shares[each.rank].append(most / length)
    return {rank: median(values) for rank, values in shares.items()}


def read_steps(path: Path) -> RankSteps | None:
    """Return what the end of a rank's file says of its last steps; None if it can't be read.

    Steps that were captured or interrupted are left out.
    """
    try:
        header = read_header(path)
        with open_file(path) as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL, 0))
            lines = file.read(_TAIL).split(b"\n")
    except (OSError, TraceError):
        return None
    rank = RankSteps(int(path.stem[5:]), header.role, lengths := {}, ends := {})
    stages: list[tuple[str, int, int]] = []  # name, thread and end of those of the next step
    for read in _decoded([line for line in lines if line.startswith(b'["span"')]):
        match read:
            case ["span", str() as name, "stage", int(), int(), int() as end, int() as thread, *_]:
                stages.append((name, thread, end))
            case ["span", _, "step", int() as step, int() as start, int() as end, own, _, _, more]:
                kept = not (isinstance(more, dict) and more.keys() & _LEFT_OUT)
                if kept and 0 < end - start < _LONGEST_NS:
                    lengths[step] = end - start
                    ends[step] = _numbered(stages, own, start, end)
                stages = []
    return rank


def _decoded(lines: list[bytes]) -> list[Any]:
    """Return what lines hold, without those that are damaged."""
    try:  # all at once: several times as fast as line by line
        return list(_decode(b"[" + b",".join(lines) + b"]"))
    except NOT_JSON:
        pass
    found = []
    for line in lines:
        with suppress(*NOT_JSON):
            found.append(_decode(line))
    return found


def _numbered(
    stages: list[tuple[str, int, int]], thread: object, start: int, end: int
) -> dict[tuple[str, int], int]:
    """Return the ends of stages in a step, with a number for those that come several times."""
    found: dict[tuple[str, int], int] = {}
    count: dict[str, int] = defaultdict(int)
    for name, own, at in stages:
        if own == thread and start <= at <= end:
            found[name, count[name]] = at - start
            count[name] += 1
    return found
