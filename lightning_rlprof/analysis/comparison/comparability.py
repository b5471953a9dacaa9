"""Comparability score of two runs, and what lowers it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from lightning_rlprof.analysis.comparison.run_pair import STEP, Side, shared_work, sides
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

HARDLY = 0.5
"""Below this score two runs should not be compared, and a warning says so."""

_COLUMNS = (
    Column("what", "text"),
    Column("A", "text"),
    Column("B", "text"),
    Column("score", "number"),
)
_APART, _EAGER, _UNCOUNTED = 0.5, 0.3, 0.9  # no common work; all graphs or none; no work counted
_NONE, _UNKNOWN, _SHOWN = "none", "unknown", 4

_Row = tuple[Cell, ...]


def comparability(a: Spans, b: Spans, pair: Sequence[Side] | None = None) -> Table:
    """Return what makes two runs alike or different; ``score`` is 0 to 1 and multiplies.

    Stages: share of time in stages that both have, of the run with less. Ranks, device and
    counters: 1 if equal. Work: share of all steps with an amount of work that the other run had,
    too. Graph capture: share of kernels that ran in CUDA graphs, if a profiler recorded that.

    Args:
        a: Run A.
        b: Run B.
        pair: Their `sides`, if already computed.
    """
    left, right = pair or sides([a, b])
    counters = [_listed(side.work.get(STEP, {})) for side in (left, right)]
    counted = counters != [_NONE, _NONE]
    rows: list[_Row] = [
        _stages(left, right),
        _alike("ranks", 0.8, _ranks(a), _ranks(b)),
        _alike("device", 0.7, _devices(a), _devices(b)),
        _graphs(a, b),
        _alike("counters", 0.8, *counters) if counted else ("counters", *counters, _UNCOUNTED),
        _work(left, right),
    ]
    table = Table("comparability", _COLUMNS, rows)
    note = (
        f"Comparability score: {score_of(table):.2f} (product of the rows). "
        f"Below {HARDLY}, don't rely on the comparison."
    )
    return replace(table, note=note)


def score_of(table: Table) -> float:
    """Return the score of two runs, the product of what `comparability` found."""
    return math.prod(float(score or 0) for score in table.column("score"))


def _alike(what: str, otherwise: float, a: str, b: str) -> _Row:
    return what, a, b, 1.0 if a == b else otherwise


def _stages(a: Side, b: Side) -> _Row:
    shares, texts = [], []
    for side, other in ((a, b), (b, a)):
        ns = {name: float(ns.sum()) for name, ns in side.stages.items() if name != STEP}
        alone = [name for name in ns if name not in other.stages]
        whole, both = sum(ns.values()), sum(ns[name] for name in ns if name not in alone)
        shares.append(both / whole if whole else 1.0)
        texts.append(f"only here: {_listed(alone)}" if alone else "all in both")
    return "stages", *texts, min(shares)


def _ranks(spans: Spans) -> str:
    world = max((head.world_size for head in spans.headers.values()), default=0)
    have = len(spans.ranks)
    return f"{have}" if have >= world else f"{have} of {world}"


def _devices(spans: Spans) -> str:
    return _listed(sorted({head.hardware for head in spans.headers.values()}))


def _graphs(a: Spans, b: Spans) -> _Row:
    shares = []
    for spans in (a, b):
        table = spans.try_table("kernels", [])
        if table is not None and len(table.rows) and "graph" in {c.name for c in table.columns}:
            shares.append(float(np.mean(table.numbers("graph", -1) >= 0)))
        else:
            shares.append(np.nan)
    texts = [_UNKNOWN if np.isnan(share) else f"{share:.0%} of kernels" for share in shares]
    apart = abs(shares[0] - shares[1])
    return "graph capture", *texts, 1.0 if np.isnan(apart) else 1.0 - _EAGER * apart


def _work(a: Side, b: Side) -> _Row:
    shared = shared_work([a, b], STEP)
    if not shared:
        return "work", _UNKNOWN, _UNKNOWN, 1.0
    name, pair = next(iter(shared.items()))
    known = [each[np.isfinite(each)] for each in pair]
    low, high = max(each.min() for each in known), min(each.max() for each in known)
    inside = min(float(np.mean((each >= low) & (each <= high))) for each in known)
    texts = [f"{each.min():,.0f} to {each.max():,.0f} {name}" for each in known]
    return "work", *texts, _APART + (1 - _APART) * inside


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + more or _NONE
