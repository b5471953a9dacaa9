"""What is worth acting on: its price, its evidence, the next experiment, and what refutes it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.book import Book, balance
from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.labels import Label, labels_of
from lightning_rlprof.analysis.ledger import breakdown, totals
from lightning_rlprof.analysis.rules import RULES, Rule
from lightning_rlprof.analysis.stragglers import stragglers
from lightning_rlprof.analysis.verdicts import INSUFFICIENT, NOBODY, UNEVEN
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["findings"]

_COLUMNS = (
    Column("finding", "text"),
    Column("share", "share"),
    Column("effect", "duration", "ns"),
    Column("low", "duration", "ns"),
    Column("high", "duration", "ns"),
    Column("confidence", "text"),
    Column("next experiment", "text"),
    Column("refuted if", "text"),
    Column("evidence", "text"),
    Column("reproduce", "text"),
)
_FEWEST = 5  # steps, below which nothing is known of how a share changes from one to the next
_DRAWS = 1_000
_SHOWN = 3
_NOTHING = "no step was recorded to its end"


class _Job(NamedTuple):
    """What the rules look at: the time of each label in each step, summed over ranks."""

    spans: Spans
    told: dict[Label, int]
    whole: int
    steps: dict[Label, Floats]
    walls: Floats


def findings(spans: Spans) -> Table:
    """Return what is worth acting on, the most costly first.

    ``effect`` is GPU-seconds of the whole job, ``share`` its part of it; ``low`` and ``high`` bound
    it with 95 % confidence, by a bootstrap over steps. A rule speaks where all of the interval is
    above its threshold, is silent where all is below, and abstains otherwise: the note says which.

    Abstains where no step was recorded to its end.
    """
    job = _job(spans, balance(spans, per_step=True))
    if not len(job.walls):
        return Table("findings", _COLUMNS, abstained=_NOTHING)
    rows = list(_slow(spans, job))
    unsure: dict[str, list[str]] = {}
    for rule in RULES:
        found = _of_label(job, rule)
        if isinstance(found, str):
            unsure.setdefault(found, []).append(rule.label.text)
        elif found is not None:
            rows.append(found)
    rows.sort(key=lambda row: -int(row[2] or 0))
    notes = (f"Not decided, {why}: {', '.join(labels)}." for why, labels in unsure.items())
    return Table("findings", _COLUMNS, rows, " ".join(notes))


def _job(spans: Spans, book: Book) -> _Job:
    total, by_step = totals(book), breakdown(book, per_rank=False)
    names = {label.text: label for label in Label}
    pairs = zip(total.column("label"), total.column("total"), strict=True)
    told = {names[str(name)]: int(ns) for name, ns in pairs if ns is not None}
    steps = [row for row in by_step.rows if row[0] is not None]
    columns = [column.name for column in by_step.columns]
    table = np.array([row[1:] for row in steps], dtype=np.float64).reshape(-1, len(columns) - 1)
    own = {names[name]: table[:, at] for at, name in enumerate(columns[1:]) if name in names}
    whole = book.wall_ns * (len(book.ranks) + len(book.silent))
    return _Job(spans, told, whole, own, table[:, 0])


def _of_label(job: _Job, rule: Rule) -> tuple[Cell, ...] | str | None:
    """Return a finding, None where there is none, or why that is not decided."""
    if rule.label not in job.told:
        return "as nothing tells"
    if len(job.walls) < _FEWEST:
        return f"of {len(job.walls)} steps"
    own = job.steps.get(rule.label, np.zeros_like(job.walls))
    low, high = _bounds(own, job.walls)
    if high < rule.above:
        return None
    if low <= rule.above:
        return f"{low:.0%} to {high:.0%} of the steps where {rule.above:.0%} counts"
    inside = float(job.walls.sum())
    return (
        rule.claim,
        float(own.sum()) / job.whole,
        int(own.sum()),
        int(low * inside),
        int(high * inside),
        "high" if low > 2 * rule.above or low > (1 + rule.above) / 2 else "medium",
        rule.experiment,
        rule.refuted,
        _longest(job.spans, rule.label) or f"{len(job.walls)} steps",
        "rlprof ledger RUN --per-step",
    )


def _bounds(own: Floats, walls: Floats) -> tuple[float, float]:
    """Bound the label's share of the steps: the 95 % interval of a bootstrap over steps."""
    drawn = np.random.default_rng(0).integers(0, len(own), (_DRAWS, len(own)))
    shares = own[drawn].sum(axis=1) / np.maximum(walls[drawn].sum(axis=1), 1.0)
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(low), float(high)


def _longest(spans: Spans, label: Label) -> str:
    """Name the longest spans of a label by rank and id, as tables and traces number them."""
    rows = np.flatnonzero((labels_of(spans.names) == label)[spans.name])
    rows = rows[np.argsort(-spans.duration_ns[rows], kind="stable")][:_SHOWN]
    named = (f"{spans.rank[row]}/{spans.id[row]}" for row in rows.tolist())
    text = ", ".join(named)
    return f"longest spans (rank/id): {text}" if text else ""


def _slow(spans: Spans, job: _Job) -> Iterator[tuple[Cell, ...]]:
    """Yield a finding for each rank that is surely slow."""
    table = stragglers(spans)
    names = [column.name for column in table.columns]
    for row in table.rows:
        one: dict[str, Any] = dict(zip(names, row, strict=True))
        if one["verdict"] in (INSUFFICIENT, NOBODY, UNEVEN):
            continue
        lost, effect = one["lost by others"], one["effect"]
        bounds: list[int | None] = [None, None]
        if lost is not None and effect:
            ends = (one["low"], one["high"])
            bounds = [None if end is None else int(lost * end / effect) for end in ends]
        yield (
            f"rank {one['rank']} makes the others wait: {one['verdict']}",
            None if lost is None else lost / job.whole,
            lost,
            *bounds,
            "high",
            f"move the work of rank {one['rank']} to another machine for some steps",
            "whoever takes its place is slow as well: then it is the work, and not the machine",
            f"steps {one['steps']}, stages {one['stages']}, chance {one['chance']:.2g}",
            "rlprof stragglers RUN --json",
        )
