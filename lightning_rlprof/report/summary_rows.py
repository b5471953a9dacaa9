"""The rows of the two tables that sum up a run in the HTML report: its stages, and its ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.report.step_series import LATE, WAITS, StepSeries, times_largest
from lightning_rlprof.report.terminal import duration

_ALIKE = 1.05  # times the median of the other ranks: ranks below that are alike
_SMALL = 0.01  # of the step: a slow rank there does not matter
_MOST_RANKS = 64


@dataclass(frozen=True)
class StageRow:
    """One part of a step: times are means over the ranks, by step.

    Attributes:
        name: The part.
        stage: The stage that gives its color.
        kind: ``stage``, ``waiting`` or ``untraced``.
        share: Of the mean step.
        mean: Mean over steps.
        median: Median over steps.
        high: 95th percentile over steps.
        longest: In the longest step.
        slowest: Slowest rank and its ratio to the others, ``alike``, or empty.
        stands_out: Whether that rank is clearly slower in a stage that matters.
        inclusive: Mean of whole spans, with the stages and the waiting in them; empty if there are
            none in them.
    """

    name: str
    stage: str
    kind: str
    share: float
    mean: str
    median: str
    high: str
    longest: str
    slowest: str
    stands_out: bool
    inclusive: str


def stage_rows(
    series: StepSeries,
    slowest: Sequence[Mapping[str, Any]],
    stages: Sequence[Mapping[str, Any]],
) -> list[StageRow]:
    """Return a row per part of the included steps, in the order of `StepSeries.parts`.

    Args:
        series: The run.
        slowest: Rows of the analysis `slowest_ranks`.
        stages: Rows of the analysis `stages`.
    """
    some = series.included
    if not some.any():
        return []
    by_stage = {row["stage"]: row for row in slowest}
    whole_spans = {row["stage"]: row["inclusive mean"] for row in stages}
    whole = float(series.wall_ns[some].sum())
    rows = []
    for part in series.parts:
        own = part.ns[some]
        if not own.any() and part.kind != "untraced":
            continue
        share = float(own.sum()) / whole if whole else 0.0
        found = by_stage.get(part.name) if part.kind != "waiting" else None
        text, stands_out = _slowest(found, share)
        figures = (own.mean(), *np.quantile(own, (0.5, 0.95)), own.max())
        mean, median, high, longest = (duration(int(ns)) for ns in figures)
        inclusive = whole_spans.get(part.name) if part.kind == "stage" else None
        shown = "" if inclusive is None else duration(int(inclusive))
        rows.append(
            StageRow(part.name, part.stage, part.kind, share, mean, median, high, longest, text,
                     stands_out, shown)
        )  # fmt: skip
    return rows


def _slowest(row: Mapping[str, Any] | None, share: float) -> tuple[str, bool]:
    if row is None or row["ratio"] is None:
        return "", False
    if row["ratio"] < _ALIKE:
        return "alike", False
    return f"rank {row['slowest rank']}, {row['ratio']:.2f}x", share >= _SMALL


@dataclass(frozen=True)
class RankRow:
    """One rank beside the others; texts are empty where nothing is known.

    Attributes:
        rank: Its number.
        late: Median of how late it arrives where ranks meet.
        last: In how many steps it was the last to arrive.
        stage: Median time of the largest stage.
        waits: Share of the steps in which it waited for others.
        verdict: What the analysis of stragglers says of it.
        slow: Whether that names it.
        status: How its recording ended, unless it finished.
    """

    rank: int
    late: str
    last: str
    stage: str
    waits: str
    verdict: str
    slow: bool
    status: str


def rank_rows(
    series: StepSeries,
    stragglers: Sequence[Mapping[str, Any]],
    status: Sequence[Mapping[str, Any]],
) -> list[RankRow]:
    """Return a row per rank of a job of several, the latest of very many.

    Args:
        series: The run.
        stragglers: Rows of the analysis `stragglers`.
        status: Rows of the analysis `rank_status`.
    """
    values, some = series.by_rank, series.included
    if not values or not some.any():
        return []
    verdicts = {row["rank"]: str(row["verdict"]) for row in stragglers if row["rank"] is not None}
    ended = {row["rank"]: str(row["status"]) for row in status}
    late, waits = values.get(LATE), values.get(WAITS)
    last = None if late is None else times_largest(late[:, some])
    stage = next((ns for name, ns in values.items() if name not in (LATE, WAITS)), None)
    order = np.arange(len(series.ranks))
    if len(order) > _MOST_RANKS and late is not None:
        order = np.sort(np.argsort(-np.median(late[:, some], axis=1), kind="stable")[:_MOST_RANKS])
    wall = _walls(series)
    return [
        RankRow(
            rank := int(series.ranks[at]),
            "" if late is None else duration(int(np.median(late[at, some]))),
            "" if last is None else f"{last[at]} of {int(some.sum())}",
            "" if stage is None else duration(int(np.median(stage[at, some]))),
            "" if waits is None else f"{100 * waits[at, some].sum() / wall[at]:.1f}",
            verdicts.get(rank, ""),
            rank in verdicts,
            "" if ended.get(rank, "finished") == "finished" else ended[rank],
        )
        for at in order[:_MOST_RANKS].tolist()
    ]


def _walls(series: StepSeries) -> Any:
    """Return the time of the included steps of each rank; at least 1 ns."""
    steps = series.matrix.steps
    steps = steps[np.isin(series.spans.step[steps], series.numbers[series.included])]
    found = summarize(series.spans.rank[steps], series.spans.duration_ns[steps])
    walls = np.ones(len(series.ranks))
    walls[np.searchsorted(series.ranks, found.group)] = np.maximum(found.total, 1)
    return walls
