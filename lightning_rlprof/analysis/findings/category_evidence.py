"""Evidence from the ledger: a category that takes more of the step time than it should."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_rlprof.analysis.device.launches import LOST
from lightning_rlprof.analysis.findings.finding import (
    KERNELS_LOST,
    Finding,
    NotChecked,
    Rule,
    RunData,
    judge,
    place_of,
    share_interval,
    spans_query,
)
from lightning_rlprof.analysis.findings.rules import CATEGORY_RULES
from lightning_rlprof.analysis.ledger.accounts import Accounts
from lightning_rlprof.analysis.ledger.ledger import category_breakdown
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans

FEWEST_STEPS = 5
"""Steps needed to know how much a share changes from step to step."""

UNVERIFIED = 0.2
"""Lowest threshold for a share measured from kernels, if lost kernels cannot be detected.

A fifth of the kernels may be lost, and what they hid is then up to a fifth of the time.
"""

_SHOWN = 3
_FROM_KERNELS = ("kernels", "both")  # sources in which kernels take part


def category_shares(run: RunData) -> Iterator[Finding | NotChecked]:
    """Report categories whose share of the step time is too large; nothing without steps.

    If kernels show what is host-bound, `device_idle` checks that instead: it looks at launches, so
    a lost kernel cannot be mistaken for a late host.
    """
    steps, times, wall = _times_by_step(run.accounts)
    if not len(wall):
        return
    for category, rule in CATEGORY_RULES.items():
        source = run.accounts.sources.get(category)
        if source is None:
            yield NotChecked(rule.name, "no data")
            continue
        if category == Category.HOST_IDLE and source in _FROM_KERNELS:
            continue
        if len(wall) < FEWEST_STEPS:
            yield NotChecked(rule.name, f"needs {FEWEST_STEPS} steps, has {len(wall)}")
            continue
        own = times.get(category, np.zeros_like(wall))
        low, high = share_interval(own, wall)
        from_kernels = source in _FROM_KERNELS
        unverified = from_kernels and run.launches is None
        decision = judge(
            rule, low, high, max(rule.threshold, UNVERIFIED) if unverified else rule.threshold
        )
        if decision is None:
            continue
        if from_kernels and run.launches is not None and run.launches.lossy:
            yield NotChecked(rule.name, KERNELS_LOST)
        elif category == Category.COMMUNICATION and _unmatched(run.spans, run.accounts):
            yield NotChecked(rule.name, "too few collectives are matched across ranks")
        elif isinstance(decision, NotChecked):
            yield decision
        else:
            yield _finding(run.spans, category, rule, steps, own, wall, (low, high), decision)


def _times_by_step(accounts: Accounts) -> tuple[list[int], dict[Category, Float64s], Float64s]:
    """Return the step numbers, and per step the time of each category and of all."""
    table = category_breakdown(accounts)
    rows: list[Any] = [row for row in table.rows if row[0] is not None]
    columns = [column.name for column in table.columns][1:]
    times = np.array([row[1:] for row in rows], dtype=np.float64).reshape(-1, len(columns))
    categories = {category.text: category for category in Category}
    by_category = {
        categories[name]: times[:, at] for at, name in enumerate(columns) if name in categories
    }
    return [row[0] for row in rows], by_category, times[:, 0]


def _unmatched(spans: Spans, accounts: Accounts) -> bool:
    """Return whether ranks lack collectives that others have: then waiting looks like transfer."""
    if len(accounts.ranks) + len(accounts.silent) < 2:
        return False
    rows = np.flatnonzero((categories_of(spans.names) == Category.COMMUNICATION)[spans.name])
    width = int(spans.rank.max(initial=0)) + 1
    calls = (spans.step[rows] * len(spans.names) + spans.name[rows]) * width + spans.rank[rows]
    calls, ranks = np.unique(np.unique(calls) // width, return_counts=True)
    most = np.zeros(len(spans.names), np.int64)
    np.maximum.at(most, calls % len(spans.names), ranks)
    fewer = np.count_nonzero(ranks < most[calls % len(spans.names)])
    return bool(fewer > LOST * len(calls)) or accounts.unmatched_collectives > 0


def _finding(
    spans: Spans,
    category: Category,
    rule: Rule,
    steps: list[int],
    own: Float64s,
    wall: Float64s,
    share: tuple[float, float],
    confidence: str,
) -> Finding:
    rows, evidence = _longest(spans, category)
    if not len(rows):
        step = steps[int(np.argmax(own))]
        rows = spans.rows(kind="step")
        rows = rows[spans.step[rows] == step]
        evidence = f"{len(wall)} steps, most of it in step {step}"
    whole = float(wall.sum())
    return Finding(
        rule,
        rule.title,
        int(own.sum()),
        int(share[0] * whole),
        int(share[1] * whole),
        confidence,
        evidence,
        spans_query(spans, rows.tolist()),
        place_of(spans, rows),
    )


def _longest(spans: Spans, category: Category) -> tuple[Int64s, str]:
    """Return the category's longest spans, and their names."""
    rows = np.flatnonzero((categories_of(spans.names) == category)[spans.name])
    rows = rows[np.argsort(spans.start_ns[rows] - spans.end_ns[rows], kind="stable")][:_SHOWN]
    named = (f"{spans.rank[row]}/{spans.id[row]}" for row in rows.tolist())
    return rows, f"longest spans (rank/id): {', '.join(named)}"
