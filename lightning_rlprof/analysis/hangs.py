"""Which rank a job waits for, the line at which it is, and what the others wait in."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from lightning_rlprof.records.hang_reports import (
    STACK,
    Collective,
    Frame,
    HangReport,
    Ranges,
    RankEvidence,
    is_own_code,
    ranks_in,
)
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import innermost
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

State = Literal[
    "waits",
    "hangs",
    "idle",
    "runs",
    "killed",
    "stopped",
    "silent",
    "failed",
    "finished",
    "no file",
]
"""What a rank does: it waits for others, hangs by its own code, or has not reported a hang.

An actor of Ray is idle between two calls.
"""

_LOST = ("killed", "stopped", "silent", "failed")
_MIN_SILENCE_S = 15.0  # Three signs of life are missing then.
_MAX_REPORTS_APART_S = 60.0  # Clocks of hosts differ by less, so later reports are of another hang.
_MIN_QUIET_S = 1.0  # A rank that reports because another one hangs may run.
_MIN_CPU_SHARE = 0.1  # A thread that waits uses less of a CPU.
_MAX_RANKS_NAMED = 8
_RAY = "Ray"
_COLLECTIVE = re.compile(r"/torch(_npu)?/distributed/")
_WRAPPERS = re.compile(r"(^|[.>])wrapper$")

# Functions in these files wait for something that is not a rank; the first match decides.
_WAITS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"/torch/utils/data/"), "a DataLoader worker"),
    (re.compile(r"/ray/"), _RAY),
    (re.compile(r"/multiprocessing/"), "another process"),
    (re.compile(r"/concurrent/futures/|/threading\.py$|/queue\.py$"), "another thread"),
    (re.compile(r"/subprocess\.py$"), "a program"),
    (re.compile(r"/(socket|ssl|selectors)\.py$|/http/"), "the network"),
)

_AROUND = (KINDS.index("stage"), KINDS.index("region"))
_MIN_SAMPLES = 3  # Fewer samples do not name a line.
_COLUMNS = (
    Column("rank", "count"),
    Column("share", "share"),
    Column("samples", "count"),
    *columns_of("text", "in", "line"),
)


@dataclass(frozen=True)
class RankState:
    """What one rank does.

    Attributes:
        rank: Global rank.
        state: See `State`.
        reason: What is known beyond its report, as the rest of a sentence that begins with it.
        at: The innermost line of the training's own code; None without a report.
        stack: Of the training thread, innermost first.
        waits_in: The collective, or what else it waits for; empty if it does not.
        report: The newest one of the hang.
        role: Its role, if the run has several; else empty.
    """

    rank: int
    state: State
    reason: str = ""
    at: Frame | None = None
    stack: tuple[Frame, ...] = ()
    waits_in: str = ""
    report: HangReport | None = None
    role: str = ""

    @property
    def name(self) -> str:
        """Return ``rank 3``, or ``rank 3 (rollout)`` if the run has several roles."""
        return f"rank {self.rank}" + (f" ({self.role})" if self.role else "")


@dataclass(frozen=True)
class Hang:
    """What a job waits for.

    Attributes:
        headline: The answer in a sentence or two.
        causes: The ranks that others wait for, or that hang alone.
        ranks: All of them.
        hints: What to try.
    """

    headline: str
    causes: tuple[RankState, ...]
    ranks: tuple[RankState, ...]
    hints: tuple[str, ...] = ()

    def table(self) -> Table:
        """Return a row per rank, the causes first."""
        columns = (
            Column("rank", "count"),
            *columns_of("text", "role", "state"),
            Column("quiet", "duration", "ns"),
            *columns_of("text", "in", "waits for", "at"),
            Column("step", "count"),
        )
        causes = {each.rank for each in self.causes}
        rows: list[tuple[Cell, ...]] = []
        for each in sorted(self.ranks, key=lambda each: (each.rank not in causes, each.rank)):
            inside = " > ".join(_open_names(each.report)) or None
            at = None if each.at is None else place(each.at)
            quiet, step = None, None
            if each.report is not None:
                quiet, step = round(each.report.quiet_s * 1e9), each.report.step
            own = (each.rank, each.role or None, each.state, quiet, inside)
            rows.append((*own, each.waits_in or None, at, step))
        return Table("ranks", columns, rows)


def place(frame: Frame) -> str:
    """Return file, line and function of a frame; of the path the last two parts.

    Example::

        >>> place(Frame("/code/project/rewards.py", 12, "score", "while True:"))
        'project/rewards.py:12 score'
    """
    return f"{'/'.join(frame.file.split('/')[-2:])}:{frame.line} {frame.function}"


def _open_names(report: HangReport | None) -> list[str]:
    return [] if report is None else [span.name for span in report.spans if span.is_training]


class _Wait(NamedTuple):
    """One rank waits in a collective for those that have not come to it."""

    rank: int
    collective: Collective
    missing: tuple[int, ...]


def find_hang(evidence: Sequence[RankEvidence], now_unix_ns: int) -> Hang:
    """Return which ranks the others wait for.

    A rank that has not reported although others hang, and was killed, stopped or has failed, is the
    cause. Else, in each process group it is the ranks that have not come to the collective in which
    others are; if these wait in another group, those that they wait for. Without collectives, it
    is the ranks whose stack is outside of torch.distributed and of Ray while those of others are
    inside. What is left are ranks that hang, each by its own code.

    Args:
        evidence: Of all ranks.
        now_unix_ns: The time by which signs of life are judged.
    """
    reports = _of_last_hang(evidence)
    latest = max((one.beat.unix_ns for one in evidence if one.beat is not None), default=0)
    states = _with_roles(
        evidence,
        [_state(each, reports.get(each.rank), latest, now_unix_ns) for each in evidence],
    )
    if not reports:
        return _without_reports(states, evidence)
    waits = _waits(states, evidence)
    open_in = {wait.rank: wait for wait in waits}
    states = [_waiting(each, open_in.get(each.rank)) for each in states]
    causes = tuple(_causes(states, waits))
    headline = _headline(causes, states, waits)
    if all(_has_recovered(each, reports[each.rank]) for each in evidence if each.rank in reports):
        longest = max(report.quiet_s for each in evidence for report in each.reports)
        headline = f"Progress came back after {longest:.0f} s. Until then: {headline}"
    return Hang(headline, causes, tuple(states), _hints(causes, states, evidence))


def _of_last_hang(evidence: Sequence[RankEvidence]) -> dict[int, HangReport]:
    """Return the newest report of each rank, without those of earlier hangs."""
    newest = {}
    for each in evidence:
        if found := [report for report in each.reports if report.cause != "recovered"]:
            newest[each.rank] = found[-1]
    if not newest:
        return {}
    last = max(newest.values(), key=lambda report: report.unix_ns)
    since = last.unix_ns - (last.quiet_s + _MAX_REPORTS_APART_S) * 1e9
    return {rank: report for rank, report in newest.items() if report.unix_ns >= since}


def _has_recovered(each: RankEvidence, report: HangReport) -> bool:
    later = [other.cause for other in each.reports if other.number > report.number]
    return "recovered" in later or each.end == "finished"


def _with_roles(evidence: Sequence[RankEvidence], states: Sequence[RankState]) -> list[RankState]:
    roles = {each.rank: each.header.role for each in evidence if each.header is not None}
    if len(set(roles.values())) < 2:
        return [*states]
    return [replace(each, role=roles.get(each.rank, "")) for each in states]


def _state(
    each: RankEvidence, report: HangReport | None, latest_ns: int, now_unix_ns: int
) -> RankState:
    if each.header is None:
        return RankState(each.rank, "no file", "has no file in this run directory")
    ended = "" if each.end in (None, "finished") else f"ended later: {each.end}"
    if report is not None:
        stack = next((thread.frames for thread in report.threads if thread.is_training), ())
        waits_in = _wait_of(stack)
        state: State = "hangs"
        if report.quiet_s < _MIN_QUIET_S:
            state = "finished" if each.end == "finished" else "runs"
        if state == "hangs" and (waits_in == _RAY or waits_in.startswith("torch.distributed")):
            state = "waits"
        # Its stack ends in Ray's loop, so that no call of it runs.
        if waits_in == _RAY and not _open_names(report) and not any(map(_is_own, stack)):
            state, waits_in = ("idle" if state == "waits" else state), ""
        return RankState(each.rank, state, ended, _own_line(stack), stack, waits_in, report)
    if each.end is not None:
        what: State = "failed" if ended else "finished"
        return RankState(each.rank, what, f"has ended: {each.end}")
    process = f"process {each.header.pid} on {each.header.host}"
    if each.process in ("gone", "Z", "X"):
        return RankState(each.rank, "killed", f"was killed or crashed: {process} does not exist")
    if each.process in ("T", "t"):
        return RankState(each.rank, "stopped", f"is stopped (SIGSTOP, or a debugger): {process}")
    if each.beat is not None:
        # If the run is over, the latest sign of life of any rank is the present.
        behind_s = ((now_unix_ns if each.process else latest_ns) - each.beat.unix_ns) / 1e9
        if behind_s > _MIN_SILENCE_S:
            text = f"has given no sign of life for {behind_s:.0f} s, {process}: killed or stopped, "
            return RankState(each.rank, "silent", f"{text}or C code holds Python's lock")
    return RankState(each.rank, "runs", "has not reported")


def _own_line(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the training's own code, else the innermost one."""
    own = (frame for frame in stack if _is_own(frame))
    return next(own, stack[0] if stack else None)


def short_stack(stack: Sequence[Frame]) -> list[Frame]:
    """Return a stack without the frames of libraries that lie around the training's own code."""
    own = next((at for at, frame in enumerate(stack) if _is_own(frame)), len(stack))
    return [*stack[:own], *filter(_is_own, stack[own:])]


def _is_own(frame: Frame) -> bool:
    return is_own_code(frame.file)


def _wait_of(stack: Sequence[Frame]) -> str:
    """Return what the training waits for, by the library that its own code has called."""
    own = next((at for at, frame in enumerate(stack) if _is_own(frame)), len(stack))
    called = stack[:own]
    outermost = called[::-1]
    for frame in outermost:
        if _COLLECTIVE.search(frame.file) and not _WRAPPERS.search(frame.function):
            return f"torch.distributed {frame.function}"
    for pattern, what in _WAITS:
        if any(pattern.search(frame.file) for frame in called):
            return what
    return ""


def _waits(states: Sequence[RankState], evidence: Sequence[RankEvidence]) -> list[_Wait]:
    """Return the collective that each rank waits in, as far as torch's flight recorder knew it."""
    is_open: dict[int, Collective] = {}
    known: set[tuple[str, Ranges]] = set()
    last: dict[str, dict[int, int]] = {}  # By group and rank, it has the last collective's number.
    for state, each in zip(states, evidence, strict=True):
        report = state.report
        for group in (report.groups if report else {}).items():
            if group in known:  # All ranks of a group report it.
                continue
            known.add(group)
            for rank in ranks_in(group[1]):
                last.setdefault(group[0], {}).setdefault(rank, -1)
        for one in (report.collectives if report else ()) or each.dump:
            if one.is_p2p:
                continue
            seqs = last.setdefault(one.group, {})
            seqs[each.rank] = max(seqs.get(each.rank, -1), one.seq)
            if not one.is_done and state.state in ("hangs", "waits"):
                is_open.setdefault(each.rank, one)
    missing: dict[tuple[str, int], tuple[int, ...]] = {}
    for one in is_open.values():
        key = one.group, one.seq
        if key not in missing:
            seqs = last[one.group]
            missing[key] = tuple(sorted(rank for rank in seqs if seqs[rank] < one.seq))
    return [_Wait(rank, one, missing[one.group, one.seq]) for rank, one in is_open.items()]


def _waiting(state: RankState, wait: _Wait | None) -> RankState:
    if wait is None:
        return state
    return replace(state, state="waits", waits_in=_name(wait.collective))


def _name(one: Collective) -> str:
    return f"{one.name} #{one.seq} of group {one.group}"


def _causes(states: Sequence[RankState], waits: Sequence[_Wait]) -> Iterable[RankState]:
    hung = [each for each in states if each.state in ("hangs", "waits")]
    if lost := [each for each in states if each.state in _LOST]:
        return lost
    by_rank = {wait.rank: wait for wait in waits}
    missing = {rank for wait in waits for rank in wait.missing}
    if missing:
        ends = {rank for rank in missing if not (rank in by_rank and by_rank[rank].missing)}
        return [each for each in states if each.rank in (ends or missing)]
    if odd := _odd(waits):
        return [each for each in states if each.rank in odd]
    if outside := [each for each in hung if each.state == "hangs"]:
        return outside
    if apart := _outside_of_collective(hung):
        return apart
    ended = [each for each in states if each.state in ("finished", "no file")]
    return ended or ([] if len(hung) > 1 else hung)


def _outside_of_collective(hung: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that wait in Ray while others of their role wait in a collective."""
    inside = {each.role for each in hung if each.waits_in != _RAY}
    return [each for each in hung if each.waits_in == _RAY and each.role in inside]


def _odd(waits: Sequence[_Wait]) -> set[int]:
    """Return the ranks that are in another collective than most of their group, at its number."""
    found: set[int] = set()
    same: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank, one, _ in waits:
        kinds = same.setdefault((one.group, one.seq), {})
        kinds.setdefault(one.name, []).append(rank)
    for kinds in same.values():
        if len(kinds) > 1:
            most = max(map(len, kinds.values()))
            most_common = [ranks for ranks in kinds.values() if len(ranks) == most]
            found.update(*(r for r in kinds.values() if len(most_common) > 1 or len(r) < most))
    return found


def _headline(
    causes: Sequence[RankState], states: Sequence[RankState], waits: Sequence[_Wait]
) -> str:
    others = [each for each in states if each not in causes and each.state in ("hangs", "waits")]
    ends = "; ".join(f"{each.name} {_doing(each, waits)}" for each in causes[:_MAX_RANKS_NAMED])
    ends = ends[:1].upper() + ends[1:]
    if more := len(causes) - _MAX_RANKS_NAMED:
        ends += f"; and {more} more" if more > 0 else ""
    if not causes:
        if not others:
            return "No rank hangs any longer."
        waits_in = f"{_ranks(others)} wait in {_waits_in(others)}"
        if all(each.waits_in == _RAY for each in others):
            return f"{waits_in}, and no rank of this run makes them wait."
        return f"{waits_in}, and none is behind: look at the network and the devices."
    if not others:
        return f"{ends}."
    return f"{ends}. {_ranks(others)} {_verb(others)} {_waits_in(others)}."


def _doing(each: RankState, waits: Sequence[_Wait]) -> str:
    """Return what a cause does, as the rest of a sentence."""
    report = each.report
    if report is None:
        return each.reason
    parts = []
    behind = [wait.collective for wait in waits if each.rank in wait.missing]
    if behind:
        parts.append(f"has not come to {_name(behind[0])}")
    if names := _open_names(report):
        parts.append(f"is in {names[-1]}")
    if each.at is not None:
        text = f" ({each.at.text})" if each.at.text else ""
        parts.append(f"at {place(each.at)}{text}")
    if each.waits_in:
        parts.append(f"waits for {each.waits_in}")
    parts += _facts(each, report)
    return ", ".join(parts) or "hangs"


def _facts(each: RankState, report: HangReport) -> list[str]:
    """Return what else shows why a rank stands where it is."""
    found = []
    shares = [thread.cpu_share or 0.0 for thread in report.threads if thread.is_training]
    if any(share >= _MIN_CPU_SHARE for share in shares):
        found.append(f"its thread uses {shares[0]:.0%} of a CPU")
    if each.waits_in in ("a DataLoader worker", "another process"):
        bad = [child for child in report.children if child.state in ("T", "t", "Z", "D")]
        states = {"T": "stopped", "t": "stopped", "Z": "dead", "D": "in an uninterruptible wait"}
        found += [f"child process {child.pid} is {states[child.state]}" for child in bad[:3]]
    if each.reason:
        found.append(each.reason)
    return found


def _waits_in(others: Sequence[RankState]) -> str:
    kinds = dict.fromkeys(each.waits_in for each in others if each.waits_in)
    return " or ".join(list(kinds)[:3]) or "for it"


def _verb(others: Sequence[RankState]) -> str:
    verb = "waits" if len(others) == 1 else "wait"
    return f"{verb} in" if any(each.waits_in for each in others) else verb


def _ranks(states: Sequence[RankState]) -> str:
    """Return ``Rank 3`` or ``Ranks 0, 1, 4-7``."""
    numbers = sorted(each.rank for each in states)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in ranges]
    shown = ", ".join(texts[:_MAX_RANKS_NAMED]) + (" …" if len(texts) > _MAX_RANKS_NAMED else "")
    return f"Rank{'s' if len(numbers) > 1 else ''} {shown}"


def _without_reports(states: Sequence[RankState], evidence: Sequence[RankEvidence]) -> Hang:
    """Return what is known where no rank has reported a hang."""
    every = tuple(states)
    found = (each for each in states if each.state in _LOST)
    if gone := tuple(sorted(found, key=lambda each: _LOST.index(each.state))):
        text = "; ".join(f"{each.name} {each.reason}" for each in gone[:_MAX_RANKS_NAMED])
        first = _left_first(gone, states, evidence)
        if first:
            before = f"{_ranks(first)} had ended before: did it leave out a collective?"
            return Hang(f"No rank has reported a hang, but {text}. {before}", first + gone, every)
        return Hang(f"No rank has reported a hang, but {text}.", gone, every, ())
    if all(each.state in ("finished", "no file") for each in states):
        return Hang("The run has finished, and no rank has reported a hang.", (), every, ())
    timeouts = {_timeout(each) for each in evidence if each.header is not None}
    if timeouts == {None}:
        text = "Hangs are not watched in this run: hang_timeout is null."
        return Hang(text, (), every, ("Set hang_timeout in the configuration, e.g. 300",))
    least = min(timeout for timeout in timeouts if timeout is not None)
    text = f"No rank has reported a hang. They do so after {least:g} s without progress, later "
    return Hang(f"{text}before the first step has ended and between steps.", (), every, ())


def _left_first(
    gone: Sequence[RankState], states: Sequence[RankState], evidence: Sequence[RankEvidence]
) -> tuple[RankState, ...]:
    """Return the ranks that had ended as they should, before all that were lost failed.

    A rank that leaves out a collective ends, and closes the connection in which the others wait.
    """
    if any(each.state != "failed" for each in gone):
        return ()
    ended = {each.rank: each.last_ns for each in evidence}
    times = [ended[each.rank] for each in gone]
    earliest = min((ns for ns in times if ns is not None), default=None)
    if earliest is None:
        return ()
    return tuple(
        each
        for each in states
        if each.state == "finished" and (ended[each.rank] or earliest) < earliest
    )


def _timeout(each: RankEvidence) -> float | None:
    config: Mapping[str, object] = {} if each.header is None else each.header.config
    value = config.get("hang_timeout")
    return float(value) if isinstance(value, int | float) else None


def _hints(
    causes: Sequence[RankState], states: Sequence[RankState], evidence: Sequence[RankEvidence]
) -> tuple[str, ...]:
    """Return what to try."""
    found = []
    known = {each.rank: each for each in evidence}
    if all(each.waits_in == _RAY for each in causes) and any(
        each.waits_in == _RAY for each in states
    ):
        found.append("Look at the actors that are not in this run: ray list actors")
    for each in causes[:1]:
        header, process = known[each.rank].header, known[each.rank].process
        if header is not None and each.state == "stopped":
            found.append(f"Continue it: kill -CONT {header.pid}")
        elif header is not None and process in ("R", "S", "D"):
            found.append(f"Native frames of it: py-spy dump --native --pid {header.pid}")
    return tuple(found)


class StackLine(NamedTuple):
    """A line at which samples were taken.

    Attributes:
        inside: The innermost stage or region; ``""`` outside of all.
        place: Function, file and line.
        samples: How many.
        of: How many were taken in all.
    """

    inside: str
    place: str
    samples: int
    of: int

    def __str__(self) -> str:
        where = f"in {self.inside}" if self.inside else "outside of stages"
        count = f"{self.samples} of {self.of} samples"
        return f"{self.samples / self.of:.0%} {where}: {self.place} ({count})"


def stack_lines(
    samples: Sequence[tuple[int, str]], spans: Sequence[tuple[str, int, int]]
) -> list[StackLine]:
    """Count samples by line and by the innermost span around them; the most frequent one first.

    Args:
        samples: Time and place of each, all of one thread.
        spans: Name, start and end of the stages and regions of that thread.

    Example::

        >>> fetch, train = "Data.decode train.py:27", "main train.py:40"
        >>> spans = [("data_fetch", 10, 40)]
        >>> str(stack_lines([(11, fetch), (50, train), (12, fetch), (13, fetch)], spans)[0])
        '75% in data_fetch: Data.decode train.py:27 (3 of 4 samples)'
    """
    around = innermost(
        np.zeros(len(spans), dtype=np.int64),
        np.array([start for _, start, _ in spans], dtype=np.int64),
        np.array([end for _, _, end in spans], dtype=np.int64),
        np.zeros(len(samples), dtype=np.int64),
        np.array([at for at, _ in samples], dtype=np.int64),
    )
    return _counted(around, [name for name, _, _ in spans], [place for _, place in samples])


def _counted(around: Int64s, names: Sequence[str], places: Sequence[str]) -> list[StackLine]:
    """Count places by the span around each, a row of ``names`` or below 0."""
    inside = [names[at] if at >= 0 else "" for at in around.tolist()]
    counts = Counter(zip(inside, places, strict=True))
    every = counts.total()
    return [StackLine(*key, number, every) for key, number in counts.most_common()]


def stack_table(lines: Iterable[tuple[int, StackLine]]) -> Table:
    """Return a row per line, of which the rank is given."""
    rows = [
        (rank, each.samples / each.of, each.samples, each.inside or None, each.place)
        for rank, each in lines
    ]
    return Table("stacks", _COLUMNS, rows)


def line_in_steps(spans: Spans, first: int, last: int) -> StackLine | None:
    """Return the most frequent line in a range of steps, None below 3 samples."""
    wanted = [code for code, name in enumerate(spans.names) if name.startswith(STACK)]
    marks = spans.rows(kind="mark") if wanted else np.zeros(0, dtype=np.int64)
    step = spans.step[marks]
    marks = marks[np.isin(spans.name[marks], wanted) & (first <= step) & (step <= last)]
    if len(marks) < _MIN_SAMPLES:
        return None
    rows = np.flatnonzero(
        np.isin(spans.kind, _AROUND) & np.isin(spans.thread, np.unique(spans.thread[marks]))
    )
    around = innermost(
        spans.thread[rows],
        spans.start_ns[rows],
        spans.end_ns[rows],
        spans.thread[marks],
        spans.start_ns[marks],
    )
    names = [spans.names[code] for code in spans.name[rows].tolist()]
    places = [spans.names[code].removeprefix(STACK) for code in spans.name[marks].tolist()]
    return _counted(around, names, places)[0]
