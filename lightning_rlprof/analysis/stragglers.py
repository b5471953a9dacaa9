"""Who makes the others wait: a verdict on each rank that stands out, or why there is none."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.arrivals import Arrivals, last_of_steps
from lightning_rlprof.analysis.cost import lost_ns
from lightning_rlprof.analysis.drift import joined
from lightning_rlprof.analysis.exact import holm, median_bounds
from lightning_rlprof.analysis.lineup import Lineup, StageRows, line_up, stage_rows
from lightning_rlprof.analysis.others import middle
from lightning_rlprof.analysis.pace import WHOLE, Pace, pace
from lightning_rlprof.analysis.recent import recent
from lightning_rlprof.analysis.verdicts import (
    INSUFFICIENT,
    LEVEL,
    NOBODY,
    SLOW_OR_UNEVEN,
    UNEVEN,
    Verdict,
    judge,
    steps_needed,
)
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["stragglers"]

_COLUMNS = (
    Column("rank", "count"),
    Column("verdict", "text"),
    Column("effect", "share"),
    Column("stages", "text"),
    Column("lost by others", "duration", "ns"),
    Column("steps", "text"),
    Column("low", "share"),
    Column("high", "share"),
    Column("chance", "number"),
    Column("came last", "share"),
    Column("group", "text"),
)
_NOTE = (
    "effect: how much longer than the other ranks' median, at equal work; low and high bound it "
    "with 95 % confidence; chance: of such a finding where no rank is slow."
)
_UNCOUNTED = "No stage counts its tokens, so more work cannot be told from slowness."
_UNLISTED = "Who came last to collectives is not known: no table lists them."
_DETECTED = 0.10  # a rank that much slower must be excluded before nobody is said to be
_MOSTLY = 0.5  # of the steps: who comes last less often shares that with others


class _Judged(NamedTuple):
    """A group's rows, without the group, and what is to be said about it."""

    rows: list[tuple[Cell, ...]]
    remarks: list[str]


def stragglers(spans: Spans) -> Table:
    """Compare the ranks of each role at equal work and name those that make the others wait.

    Verdicts: ``slow device``, ``slow host`` or, where no device clock tells them apart,
    ``slow rank``; ``slow or uneven work`` where no work was counted; ``transient``, slow for some
    steps; ``uneven work``, which explains it; ``insufficient evidence``; and ``nobody is slow``,
    which is only said where a rank 10 % slower would have been found.

    Abstains where no role has enough ranks, steps and stages that are not waiting.
    """
    spans, left_out = recent(spans)
    rows = stage_rows(spans)
    table: list[tuple[Cell, ...]] = []
    remarks: list[str] = [text for text in (left_out, rows.note) if text]
    reasons: list[str] = []
    for role, ranks in _roles(spans).items():
        found = _group(spans, rows, ranks)
        if isinstance(found, str):
            reasons.append(f"{role}: {found}" if role else found)
            table.append((None, INSUFFICIENT, *(None,) * 8, role))
            continue
        table += [(*row, role) for row in found.rows]
        remarks += found.remarks
    if len(reasons) == len(table):
        reason = "; ".join(dict.fromkeys(reasons)) or "no rank was recorded"
        return Table("stragglers", _COLUMNS, abstained=f"{INSUFFICIENT}: {reason}")
    remarks += [f"{INSUFFICIENT.capitalize()} for {reason}." for reason in reasons]
    return Table("stragglers", _COLUMNS, table, " ".join(dict.fromkeys([*remarks, _NOTE])))


def _roles(spans: Spans) -> dict[str, list[int]]:
    """Return the ranks of each role: only they do the same."""
    roles: dict[str, list[int]] = {}
    for rank, header in spans.headers.items():
        roles.setdefault(header.role, []).append(rank)
    return roles


def _group(spans: Spans, rows: StageRows, ranks: Sequence[int]) -> _Judged | str:
    """Judge the ranks of one role; a text says why that cannot be done."""
    needed, steps = steps_needed(len(ranks)), len(rows.steps)
    if len(ranks) < 2:
        return "one rank has nobody to be compared with"
    if steps < needed:
        return f"{len(ranks)} ranks take {needed} steps to be compared, here are {steps}"
    lineup = line_up(spans, rows, ranks)
    if not len(lineup.stage):
        return "no stage was recorded"
    own = pace(spans, lineup)
    host_only = all(spans.headers[rank].device.startswith("cpu") for rank in ranks)
    verdicts = judge(own, host_only=host_only)
    last = last_of_steps(spans, ranks, own.lasting)
    arrived = dict(_arrived(last, needed, verdicts, lineup))
    table = [_row(spans, lineup, own, each, last) for each in verdicts if each.rank not in arrived]
    table = sorted([*table, *arrived.values()], key=lambda row: int(row[0] or 0))
    if not table:
        nobody = _nobody(spans, lineup, own)
        if isinstance(nobody, str):
            return nobody
        table = [nobody]
    return _Judged(table, list(_remarks(spans, own, last)))


def _row(
    spans: Spans, lineup: Lineup, own: Pace, verdict: Verdict, last: Arrivals | None
) -> tuple[Cell, ...]:
    evidence = verdict.evidence
    lost = None
    if own.met and verdict.verdict != INSUFFICIENT:
        effect = own.unequal if verdict.verdict == UNEVEN else own.effect[:, :, 0]
        lost = lost_ns(own.own_ns, effect, verdict.rank, evidence.first, evidence.last)
    names = [spans.names[code] for code in verdict.stages if code != WHOLE]
    first, end = (int(lineup.steps[at]) for at in (evidence.first, evidence.last))
    rank = int(lineup.ranks[verdict.rank])
    return (
        rank,
        verdict.verdict,
        evidence.effect,
        ", ".join(names) or "all",
        lost,
        f"{first}-{end}",
        evidence.low,
        evidence.high,
        evidence.chance,
        _share(last, rank),
    )


def _share(last: Arrivals | None, rank: int) -> float | None:
    if last is None or rank not in last.ranks:
        return None
    at = int(np.searchsorted(last.ranks, rank))
    return int(last.last[at]) / int(last.trials[at])


def _arrived(
    last: Arrivals | None, needed: int, verdicts: Sequence[Verdict], lineup: Lineup
) -> Iterator[tuple[int, tuple[Cell, ...]]]:
    """Yield ranks whom arrivals alone accuse: late for sure, though not why."""
    if last is None:
        return
    told = {each.rank for each in verdicts if each.verdict != INSUFFICIENT}
    chance = holm(last.chance)
    for at, rank in enumerate(last.ranks.tolist()):
        row = int(np.searchsorted(lineup.ranks, rank))
        mostly = last.last[at] > _MOSTLY * last.trials[at]
        if row in told or last.trials[at] < needed or chance[at] > LEVEL or not mostly:
            continue
        lost, steps = int(last.cost_ns[at]), f"{int(lineup.steps[0])}-{int(lineup.steps[-1])}"
        unknown = (None, None, None)
        rest = (unknown[0], "not known", lost, steps, *unknown[1:], float(chance[at]))
        yield row, (rank, SLOW_OR_UNEVEN, *rest, _share(last, rank))


def _nobody(spans: Spans, lineup: Lineup, own: Pace) -> tuple[Cell, ...] | str:
    """Return the row that clears all ranks, or why they cannot be cleared."""
    if not own.seen[0]:
        return "every stage takes all ranks equally long, as where they wait for one another"
    bounds = [median_bounds(each) for each in joined(own.effect[:, :, 0], own.lasting)]
    highest = max((bound[1] for bound in bounds if bound), default=np.inf)
    if None in bounds or highest >= _DETECTED:
        return f"steps differ so much that a rank {_DETECTED:.0%} slower could not be told"
    seen = [spans.names[code] for code, see in zip(own.stages, own.seen, strict=True) if see]
    worst = float(np.max(middle(own.effect[:, :, 0], axis=1)))
    steps = f"{int(lineup.steps[0])}-{int(lineup.steps[-1])}"
    return (None, NOBODY, worst, ", ".join(seen[1:]), None, steps, None, highest, None, None)


def _remarks(spans: Spans, own: Pace, last: Arrivals | None) -> Iterator[str]:
    pairs = zip(own.stages[1:].tolist(), own.seen[1:].tolist(), strict=True)
    hidden = [spans.names[code] for code, seen in pairs if not seen]
    if hidden:
        names = ", ".join(hidden)
        yield f"A slow rank may be hidden in {names}: waiting for others is or may be in there."
    if own.lasting > 1:
        yield f"Ranks keep their pace for a while: {own.lasting} steps count as one."
    if not own.counted:
        yield _UNCOUNTED
    if last is None:
        yield _UNLISTED
