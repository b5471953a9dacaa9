"""Who makes the others wait: a verdict on each rank that stands out, or why there is none.

What one rank's excess costs the others: how much sooner they could have gone on without it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from lightning_rlprof.analysis.statistics.rank_tests import median_bounds
from lightning_rlprof.analysis.statistics.robust import middle
from lightning_rlprof.analysis.statistics.time_series import joined
from lightning_rlprof.analysis.step_selection import recent
from lightning_rlprof.analysis.stragglers.rank_matrix import (
    Replicas,
    StageRows,
    line_up,
    replicas,
    stage_rows,
)
from lightning_rlprof.analysis.stragglers.rank_slowdown import WHOLE, pace
from lightning_rlprof.analysis.stragglers.replica_attribution import (
    Attendance,
    Charge,
    Line,
    attendance,
    charges,
    listed,
)
from lightning_rlprof.analysis.stragglers.verdicts import (
    IMBALANCE,
    INCONCLUSIVE,
    NO_STRAGGLER,
    judge,
    steps_needed,
)
from lightning_rlprof.tables.arrays import Float64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table


def lost_ns(own_ns: Float64s, excess_ns: Float64s, rank: int, first: int, last: int) -> int:
    """Return the time that all others waited because one rank was slower than they.

    Per step the ranks wait for the one whose own time is the longest. Without its excess, this
    rank's would be shorter by just that; by what the longest becomes shorter, every other rank
    could have gone on earlier. Two slow ranks hide each other: neither costs what both do.

    Args:
        own_ns: Own time; shape (ranks, steps). A rank of which it is not known waits for nobody.
        excess_ns: How much less it would have taken at the others' pace, not below 0; likewise.
        rank: Whose excess.
        first: First step.
        last: Last step, included.

    Example::

        >>> own, excess = np.array([[100.0], [100.0], [150.0]]), np.array([[0.0], [0.0], [50.0]])
        >>> lost_ns(own, excess, 2, 0, 0)
        100
    """
    own, excess = own_ns[:, first : last + 1], excess_ns[rank, first : last + 1]
    others = np.delete(own, rank, axis=0)
    count = np.sum(~np.isnan(others), axis=0)
    known = (count > 0) & ~np.isnan(own[rank]) & ~np.isnan(excess)
    if not known.any():
        return 0
    longest, mine = np.fmax.reduce(others[:, known], axis=0), own[rank, known]
    sooner = np.maximum(mine, longest)
    sooner -= np.maximum(mine - excess[known], longest)
    return round(float(sooner @ count[known]))


_COLUMNS = (
    Column("rank", "count"),
    Column("verdict", "text"),
    Column("slowdown", "share"),
    Column("stages", "text"),
    Column("peer time lost", "duration", "ns"),
    Column("steps", "text"),
    Column("CI low", "share"),
    Column("CI high", "share"),
    Column("p-value", "number"),
    Column("last arrivals", "share"),
    Column("group", "text"),
)
_LAST: "WeakKeyDictionary[Spans, Table]" = WeakKeyDictionary()
_NOTE = (
    "slowdown: relative to the median of the other ranks, adjusted for work, with its 95% CI. "
    "p-value: probability of this result if no rank is slow."
)
_UNCOUNTED = (
    "No stage counts tokens, so load imbalance can't be distinguished from slowness. "
    "Call count(tokens=...) in the stages."
)
_UNLISTED = "No collective timings in this run, so arrival order was not used."
_UNTOLD = (
    "Ranks are in several process groups, but the configuration has no `parallel` key. If one "
    "rank is slow, ranks that wait for it in every layer may look slow, too."
)
_DETECTED = 0.10  # a rank that much slower must be excluded before nobody is said to be


class _Judged(NamedTuple):
    """A role's rows and what is to be said about it."""

    rows: list[tuple[Cell, ...]]
    remarks: list[str]


def stragglers(spans: Spans) -> Table:
    """Compare the ranks of each role at equal work and name those that make the others wait.

    Verdicts: ``slow device``, ``slow host`` or, where no device clock tells them apart,
    ``slow rank``; ``slow or uneven work`` where no work was counted; ``transient``, slow for some
    steps; ``slow group``, one of several ranks that hold a copy of the model together; ``uneven
    work``, which explains it; ``insufficient evidence``; and ``nobody is slow``, which is only said
    where a rank 10 % slower would have been found.

    Abstains where no role has enough ranks, steps and stages that are not waiting. The answer is
    kept as long as the run is: report and findings both ask.
    """
    found = _LAST.get(spans)
    if found is None:
        found = _LAST[spans] = _compared(spans)
    return found


def _compared(spans: Spans) -> Table:
    spans, left_out = recent(spans)
    rows = stage_rows(spans)
    table: list[tuple[Cell, ...]] = []
    remarks: list[str] = [text for text in (left_out, rows.note) if text]
    reasons: list[str] = []
    for role, ranks in _roles(spans).items():
        found = _judged(spans, rows, ranks, f"role {role}" if role else "this run")
        if isinstance(found, str):
            reasons.append(found)
            table.append((None, INCONCLUSIVE, *(None,) * 8, role))
            continue
        table += found.rows
        remarks += found.remarks
    if len(reasons) == len(table):
        reason = " ".join(dict.fromkeys(reasons)) or "This run has no ranks."
        return Table("stragglers", _COLUMNS, abstained=reason)
    return Table(
        "stragglers", _COLUMNS, table, " ".join(dict.fromkeys([*remarks, *reasons, _NOTE]))
    )


def _roles(spans: Spans) -> dict[str, list[int]]:
    """Return the ranks of each role: only they do the same."""
    roles: dict[str, list[int]] = {}
    for rank, header in spans.headers.items():
        roles.setdefault(header.role, []).append(rank)
    return roles


def _judged(spans: Spans, rows: StageRows, ranks: Sequence[int], whose: str) -> _Judged | str:
    """Judge the ranks of one role; a text says why that cannot be done."""
    needed, steps = steps_needed(len(ranks)), len(rows.steps)
    if len(ranks) < 2:
        return f"{_capitalized(whose)} has one rank; a comparison needs two or more."
    if steps < needed:
        return (
            f"Not enough steps: comparing {len(ranks)} ranks needs {needed}, {whose} has {steps}."
        )
    who = replicas(spans, ranks)
    lines, told = _lines(spans, rows, who), listed(spans, who)
    every = max((line.pace.lasting for line in lines), default=1)
    came = attendance(who, told, every, _step_ns(spans, rows))
    found = sorted(charges(lines, came, needed), key=lambda charge: charge.ranks)
    table = [_row(spans, rows, came, each) for each in found]
    if not table and not lines:
        return _nothing_to_compare(rows, who, whose)
    if not table:
        nobody = _nobody(spans, rows, lines)
        if isinstance(nobody, str):
            return nobody
        table = [(*nobody, spans.headers[ranks[0]].role)]
    return _Judged(table, list(_remarks(spans, lines, came)))


def _lines(spans: Spans, rows: StageRows, who: Replicas) -> list[Line]:
    """Compare the ranks of each place, where several replicas recorded stages there."""
    comparable = [ranks for ranks in who.lines() if len(ranks) > 1]
    found = []
    for ranks in comparable:
        lineup = line_up(spans, rows, ranks)
        if len(lineup.stage):
            own = pace(spans, lineup)
            host_only = all(spans.headers[rank].device.startswith("cpu") for rank in ranks)
            verdicts = judge(own, host_only=host_only, places=len(comparable))
            found.append(Line(lineup, own, verdicts))
    return found


def _step_ns(spans: Spans, rows: StageRows) -> float:
    """Return how long a step takes that is compared."""
    steps = spans.rows(kind="step")
    return float(np.median(spans.duration_ns[steps[np.isin(spans.step[steps], rows.steps)]]))


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _nothing_to_compare(rows: StageRows, who: Replicas, whose: str) -> str:
    if max(map(len, who.lines())) > 1:
        return f"{_capitalized(whose)} has no stage{' on several ranks' if len(rows.rows) else ''}."
    return f"{_capitalized(whose)} has one model replica; a comparison needs two or more."


def _row(spans: Spans, rows: StageRows, came: Attendance, charge: Charge) -> tuple[Cell, ...]:
    ranks = charge.ranks
    one = ranks[0] if len(ranks) == 1 else None
    role = spans.headers[ranks[0]].role
    group = role if one is not None else f"{role} ranks {', '.join(map(str, ranks))}".strip()
    share = came.share(one) if one is not None else None
    if charge.line is None or charge.verdict is None:
        steps, unknown = f"{rows.steps[0]}-{rows.steps[-1]}", (None, None)
        told = ("unknown", charge.cost_ns, steps, *unknown, charge.chance, share, group)
        return (one, charge.word, None, *told)
    evidence = charge.verdict.evidence
    names = [spans.names[code] for code in charge.verdict.stages if code != WHOLE]
    return (
        one,
        charge.word,
        evidence.effect,
        ", ".join(names) or "all",
        _lost(charge.line, charge, len(came.who.ranks)),
        f"{rows.steps[evidence.first]}-{rows.steps[evidence.last]}",
        evidence.low,
        evidence.high,
        evidence.chance,
        share,
        group,
    )


def _lost(line: Line, charge: Charge, ranks: int) -> int | None:
    """Return what all other ranks of the role waited; those of other places as long as these.

    A slow rank would have been faster by what it lastingly is slower, and as noisy as it is.
    """
    if charge.verdict is None or not line.pace.met or charge.word == INCONCLUSIVE:
        return None
    own, evidence = line.pace, charge.verdict.evidence
    rank, first, last = charge.verdict.rank, evidence.first, evidence.last
    slower = middle(own.effect[rank, first : last + 1, 0])
    effect = np.maximum(own.unequal if charge.word == IMBALANCE else slower, 0.0)
    excess = own.compared_ns * effect / (1.0 + effect)
    lost = lost_ns(own.own_ns, excess, rank, first, last)
    here = len(line.lineup.ranks)
    return lost if here == ranks else lost * (ranks - 1) // (here - 1)


def _nobody(spans: Spans, rows: StageRows, lines: Sequence[Line]) -> tuple[Cell, ...] | str:
    """Return the row that clears all ranks, without the group, or why they cannot be cleared."""
    if not all(line.pace.seen[0] for line in lines):
        return (
            "Every stage takes the same time on all ranks, as if they waited for each other in it, "
            "so a slow rank would not show."
        )
    effects = [(line.pace.effect[:, :, 0], line.pace.lasting) for line in lines]
    bounds = [median_bounds(each) for pair in effects for each in joined(*pair)]
    if None in bounds:
        rank = np.concatenate([line.lineup.ranks for line in lines])[bounds.index(None)]
        few = f"{bounds.count(None)} of {len(bounds)} ranks"
        return f"Too few steps can be compared on {few}, for instance rank {rank}."
    highest = max((bound[1] for bound in bounds if bound), default=np.inf)
    if highest >= _DETECTED:
        return f"Step times vary so much that a rank {_DETECTED:.0%} slower would go undetected."
    seen = ", ".join(spans.names[code] for code in _stages(lines, seen=True))
    worst = max(float(np.max(middle(effect, axis=1))) for effect, _ in effects)
    steps = f"{rows.steps[0]}-{rows.steps[-1]}"
    return (None, NO_STRAGGLER, worst, seen, None, steps, None, highest, None, None)


def _stages(lines: Sequence[Line], *, seen: bool) -> list[int]:
    """Return the stages in which a slow rank would show at every place, or all others."""
    told: dict[int, bool] = {}
    for line in lines:
        for code, see in zip(line.pace.stages[1:].tolist(), line.pace.seen[1:], strict=True):
            told[code] = told.get(code, True) and bool(see)
    return [code for code, see in told.items() if see == seen]


def _remarks(spans: Spans, lines: Sequence[Line], came: Attendance) -> Iterator[str]:
    hidden = [spans.names[code] for code in _stages(lines, seen=False)]
    if hidden:
        names = ", ".join(hidden)
        yield (
            f"{names} may include waiting for other ranks, so a slowdown there can't be attributed."
        )
    if came.every > 1:
        yield f"Step times are autocorrelated; every {came.every} steps are treated as one sample."
    if not all(line.pace.counted for line in lines):
        yield _UNCOUNTED
    if came.late is None and came.inside is None:
        yield _UNLISTED
    if came.several and not came.who.place.any():
        yield _UNTOLD
