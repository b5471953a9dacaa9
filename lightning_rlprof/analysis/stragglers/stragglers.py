"""Stragglers: a verdict on each rank that slows the others down, or why there is none."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.statistics.pace import LEAST_CHANCE, above_the_others, panel
from lightning_rlprof.analysis.statistics.rank_tests import median_bounds
from lightning_rlprof.analysis.statistics.robust import nan_median
from lightning_rlprof.analysis.steps.rank_matrix import (
    Replicas,
    StageRows,
    build_rank_matrix,
    replicas,
    stage_rows,
    with_phases,
)
from lightning_rlprof.analysis.steps.step_selection import recent
from lightning_rlprof.analysis.stragglers.replica_attribution import (
    ArrivalEvidence,
    Attribution,
    ComparedRanks,
    arrival_evidence,
    attribute,
    listed_collectives,
)
from lightning_rlprof.analysis.stragglers.verdicts import (
    IMBALANCE,
    INCONCLUSIVE,
    LONGER_IN,
    NO_STRAGGLER,
    SLOW_IN,
    WHOLE,
    RankSlowdown,
    Verdict,
    judge,
    known_together,
    rank_slowdown,
    steps_needed,
)
from lightning_rlprof.tables.arrays import Float64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    Column("rank", "count"),
    Column("verdict", "text"),
    Column("slowdown", "share"),
    Column("stages", "text"),
    Column("peer time lost", "duration", "ns"),
    Column("steps", "text"),
    *columns_of("share", "CI low", "CI high"),
    Column("p-value", "number"),
    Column("last arrivals", "share"),
    Column("group", "text"),
)
_NOTE = (
    "slowdown: relative to the median of the other ranks, adjusted for work, with its 95% CI. "
    "p-value: probability of this result if no rank is slow, at least 1e-12."
)
_UNCOUNTED = (
    "No stage counts tokens, so load imbalance can't be distinguished from slowness. "
    "Call count(tokens=...) in the stages."
)
_LONGER = (
    "longer in a stage: the other stages of this rank keep pace, so it is extra work or a slow "
    "dependency there, not the machine."
)
_NO_ARRIVALS = "No collective timings in this run, so arrival order was not used."
_NO_PARALLEL = (
    "Ranks are in several process groups, but the configuration has no `parallel` key. If one "
    "rank is slow, ranks that wait for it in every layer may look slow, too."
)
_MAX_WAITING_SHARE = 0.8  # Beyond it, most of the time of all stages can hide a slow rank.
_DETECTABLE = 0.10  # "No straggler" means that a rank this much slower would show.


def stragglers(spans: Spans) -> Table:
    """Compare the ranks of each role at equal work and name those that slow the others down.

    Verdicts: ``slow device``, ``slow host`` or, without device times, ``slow rank``;
    ``slow, work not counted``; ``transient slowdown``, slow for a range of steps; ``slow replica``,
    one rank of a model replica, unknown which; ``load imbalance``, explained by more work;
    ``longer in`` a stage while the other stages keep pace, ``slow in`` some stages;
    ``inconclusive``; and ``no straggler``, if a rank 10% slower would have been detected.

    Abstains if no role has enough ranks, steps and stages without waiting. The answer is cached as
    long as the run exists, because report and findings both need it.
    """
    return spans.once("stragglers", _analyze, spans.tables)


def peer_time_lost(own_ns: Float64s, excess_ns: Float64s, rank: int, first: int, last: int) -> int:
    """Return the time that all others waited because one rank was slower.

    Per step the ranks wait for the one with the longest work. Without its excess, this rank's work
    would be shorter by just that, and every other rank could have continued that much earlier.
    Two slow ranks hide each other: neither costs what both do together.

    Args:
        own_ns: Work; shape (ranks, steps). A rank without data waits for no other.
        excess_ns: How much less it would have taken at the others' pace, not below 0; same shape.
        rank: Rank with the excess.
        first: First step.
        last: Last step, included.

    Example::

        >>> own, excess = np.array([[100.0], [100.0], [150.0]]), np.array([[0.0], [0.0], [50.0]])
        >>> peer_time_lost(own, excess, 2, 0, 0)
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


class _Judged(NamedTuple):
    """The rows of a role, and its notes."""

    rows: list[tuple[Cell, ...]]
    remarks: list[str]


def _analyze(spans: Spans) -> Table:
    first, left_out = recent(spans)
    spans = with_phases(spans)
    rows = stage_rows(spans, first)
    table: list[tuple[Cell, ...]] = []
    remarks: list[str] = [text for text in (left_out, rows.note) if text]
    reasons: list[str] = []
    for role, ranks in _roles(spans).items():
        found = _verdicts_of_role(spans, rows, ranks, f"role {role}" if role else "this run")
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
    """Return the ranks of each role; only ranks of one role are comparable."""
    roles: dict[str, list[int]] = {}
    for rank, header in spans.headers.items():
        roles.setdefault(header.role, []).append(rank)
    return roles


def _verdicts_of_role(
    spans: Spans, rows: StageRows, ranks: Sequence[int], whose: str
) -> _Judged | str:
    """Judge the ranks of one role, or return a text that says why that isn't possible."""
    needed, steps = steps_needed(len(ranks)), len(rows.steps)
    if len(ranks) < 2:
        return f"{_capitalized(whose)} has one rank; a comparison needs two or more."
    if steps < needed:
        return (
            f"Not enough steps: comparing {len(ranks)} ranks needs {needed}, {whose} has {steps}."
        )
    who = replicas(spans, ranks)
    lines, table_collectives = _lines(spans, rows, who), listed_collectives(spans, who)
    every = max((line.slowdown.lasting for line in lines), default=1)
    arrivals = arrival_evidence(who, table_collectives, every, _step_ns(spans, rows))
    found = sorted(attribute(lines, arrivals, needed), key=lambda attribution: attribution.ranks)
    table = [_row(spans, rows, arrivals, each) for each in found]
    if not table and not lines:
        return _nothing_to_compare(rows, who, whose)
    if not table:
        cleared = _no_straggler(spans, rows, lines)
        if isinstance(cleared, str):
            return cleared
        table = [(*cleared, spans.headers[ranks[0]].role)]
    return _Judged(table, list(_remarks(spans, lines, arrivals)))


def _lines(spans: Spans, rows: StageRows, who: Replicas) -> list[ComparedRanks]:
    """Compare the ranks of each parallel position in which several replicas have stages."""
    comparable = [ranks for ranks in who.lines() if len(ranks) > 1]
    found = []
    for ranks in comparable:
        matrix = build_rank_matrix(spans, rows, ranks)
        if len(matrix.stage):
            own = rank_slowdown(spans, matrix)
            host_only = all(spans.headers[rank].device.startswith("cpu") for rank in ranks)
            verdicts = judge(own, host_only=host_only, places=len(comparable))
            found.append(ComparedRanks(matrix, own, verdicts))
    return found


def _step_ns(spans: Spans, rows: StageRows) -> float:
    """Return the median duration of the included steps."""
    steps = spans.rows(kind="step")
    return float(np.median(spans.took_ns(steps[np.isin(spans.step[steps], rows.steps)])))


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _nothing_to_compare(rows: StageRows, who: Replicas, whose: str) -> str:
    if max(map(len, who.lines())) > 1:
        return f"{_capitalized(whose)} has no stage{' on several ranks' if len(rows.rows) else ''}."
    return f"{_capitalized(whose)} has one model replica; a comparison needs two or more."


def _row(
    spans: Spans, rows: StageRows, arrivals: ArrivalEvidence, attribution: Attribution
) -> tuple[Cell, ...]:
    ranks = attribution.ranks
    one = ranks[0] if len(ranks) == 1 else None
    role = spans.headers[ranks[0]].role
    group = role if one is not None else f"{role} ranks {', '.join(map(str, ranks))}".strip()
    share = arrivals.share(one) if one is not None else None
    if attribution.compared is None:
        steps = f"{rows.steps[0]}-{rows.steps[-1]}"
        cost = ("unknown", attribution.cost_ns, steps, None, None)
        chance = max(attribution.chance, LEAST_CHANCE)
        return (one, attribution.word, None, *cost, chance, share, group)
    line, verdict = attribution.compared
    evidence = verdict.evidence
    names = [spans.names[code] for code in verdict.stages if code != WHOLE]
    word = attribution.word
    if word in (LONGER_IN, SLOW_IN):
        word = f"{word} {', '.join(names)}"
    return (
        one,
        word,
        evidence.effect,
        ", ".join(names) or "all",
        _peer_time_lost(line, verdict, attribution.word, len(arrivals.who.ranks)),
        f"{rows.steps[evidence.first]}-{rows.steps[evidence.last]}",
        evidence.low,
        evidence.high,
        max(evidence.chance, LEAST_CHANCE),
        share,
        group,
    )


def _peer_time_lost(line: ComparedRanks, verdict: Verdict, word: str, ranks: int) -> int | None:
    """Return the time that all other ranks of the role waited, scaled to all parallel positions.

    Without its slowdown, the rank would be faster by its median excess, and as noisy as it is.
    """
    if not line.slowdown.has_sync or word == INCONCLUSIVE:
        return None
    own, evidence = line.slowdown, verdict.evidence
    rank, first, last = verdict.rank, evidence.first, evidence.last
    slower = nan_median(own.effect[rank, first : last + 1, 0])
    effect = np.maximum(own.unequal if word == IMBALANCE else slower, 0.0)
    excess = own.compared_ns * effect / (1.0 + effect)
    lost = peer_time_lost(own.own_ns, excess, rank, first, last)
    here = len(line.matrix.ranks)
    return lost if here == ranks else lost * (ranks - 1) // (here - 1)


def _no_straggler(
    spans: Spans, rows: StageRows, lines: Sequence[ComparedRanks]
) -> tuple[Cell, ...] | str:
    """Return the row that clears all ranks, without the group, or why they can't be cleared."""
    if not all(line.slowdown.seen[0] for line in lines):
        return (
            "Every stage takes the same time on all ranks, as if they waited for each other in it, "
            "so a slow rank would not show."
        )
    own = [line.slowdown for line in lines]
    bounds = [each for slowdown in own for each in _bounds(slowdown.effect[:, :, 0], slowdown)]
    if np.inf in bounds:
        rank = np.concatenate([line.matrix.ranks for line in lines])[bounds.index(np.inf)]
        few = f"{bounds.count(np.inf)} of {len(bounds)} ranks"
        return f"Too few steps can be compared on {few}, for instance rank {rank}."
    highest = max(bounds, default=np.inf)
    if highest >= _DETECTABLE:
        return (
            f"Step times vary so much that a rank {_DETECTABLE:.0%} slower would go undetected; "
            f"one {highest:.0%} slower would show."
        )
    if max(each for slowdown in own for each in _bounds(slowdown.most, slowdown)) >= _DETECTABLE:
        return (
            f"In so few steps, waiting for other ranks can't be separated from work, so a rank "
            f"{_DETECTABLE:.0%} slower may go undetected."
        )
    waiting = max(slowdown.waiting for slowdown in own)
    if waiting > _MAX_WAITING_SHARE:
        names = ", ".join(spans.names[code] for code in _stages(lines, seen=False))
        return (
            f"Ranks wait for each other inside {names} ({waiting:.0%} of the time of all stages), "
            "so a rank that is slow there would not show. Capture a step: then the collectives do."
        )
    effects = [slowdown.effect[:, :, 0] for slowdown in own]
    seen = ", ".join(spans.names[code] for code in _stages(lines, seen=True))
    worst = max(float(np.max(nan_median(effect, axis=1))) for effect in effects)
    steps = f"{rows.steps[0]}-{rows.steps[-1]}"
    return (None, NO_STRAGGLER, worst, seen, None, steps, None, highest, None, None)


def _bounds(effect: Float64s, slowdown: RankSlowdown) -> list[float]:
    """Return the slowdown that each rank stays below with 97.5%, infinite if unknown."""
    if slowdown.lasting > 1:
        together = known_together(effect)
        if together is None:
            return [np.inf] * len(effect)
        ranks, steps = together
        found = panel(steps, np.log(np.maximum(1 + effect[ranks][:, steps], 1e-3)))
        every = range(len(ranks))
        known = {
            rank: above_the_others(found, at, [other for other in every if other != at])
            for at, rank in enumerate(ranks)
        }
        return [
            math.expm1(known[rank].quantile(0.975)) if rank in known else np.inf
            for rank in range(len(effect))
        ]
    return [bound[1] if bound else np.inf for bound in map(median_bounds, effect)]


def _stages(lines: Sequence[ComparedRanks], *, seen: bool) -> list[int]:
    """Return the stages in which a slow rank would show at every position, or all others."""
    shows: dict[int, bool] = {}
    for line in lines:
        for code, see in zip(
            line.slowdown.stages[1:].tolist(), line.slowdown.seen[1:], strict=True
        ):
            shows[code] = shows.get(code, True) and bool(see)
    return [code for code, see in shows.items() if see == seen]


def _remarks(
    spans: Spans, lines: Sequence[ComparedRanks], arrivals: ArrivalEvidence
) -> Iterator[str]:
    words = {each.verdict for line in lines for each in line.verdicts}
    if LONGER_IN in words:
        yield _LONGER
        if any(
            each.verdict == LONGER_IN and line.matrix.ranks[each.rank] == 0
            for line in lines
            for each in line.verdicts
        ):
            yield "Rank 0 often logs, saves or aggregates there."
    hidden = [spans.names[code] for code in _stages(lines, seen=False)]
    if hidden:
        names = ", ".join(hidden)
        yield (
            f"{names} may include waiting for other ranks, so a slowdown there can't be attributed."
        )
    if arrivals.every > 1:
        size = arrivals.every
        yield f"Step times are autocorrelated; every {size} steps are treated as one sample."
    if not all(line.slowdown.counted for line in lines):
        yield _UNCOUNTED
    if not len(arrivals.late.ranks) and not len(arrivals.inside.ranks):
        yield _NO_ARRIVALS
    if arrivals.several and not arrivals.who.place.any():
        yield _NO_PARALLEL
