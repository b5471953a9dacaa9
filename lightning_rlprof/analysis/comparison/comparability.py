"""Comparability score of two runs, and what lowers it."""

from collections.abc import Iterable, Sequence

import numpy as np

from lightning_rlprof.analysis.comparison.run_pair import STEP, Side, shared_work, sides
from lightning_rlprof.tables.arrays import Float64s
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
_UNLIKE = {"ranks": 0.8, "device": 0.7, "warm-up": 0.95, "counters": 0.8}
"""Factor of the score if the runs differ in that."""

_UNCOUNTED, _EAGER, _APART = 0.9, 0.3, 0.5  # no work counted; all graphs or none; no common work
_NONE, _UNKNOWN, _SHOWN = "none", "unknown", 4

_Row = tuple[Cell, ...]


def comparability(a: Spans, b: Spans, pair: Sequence[Side] | None = None) -> Table:
    """Return what makes two runs alike or different; ``score`` is 0 to 1 and multiplies.

    Stages: share of time in stages that both have, of the run with less. Ranks, device, warm-up and
    counters: 1 if equal. Work: share of all steps with an amount of work that the other run had,
    too. Graph capture: share of kernels that ran in CUDA graphs, if a profiler recorded that.

    Args:
        a: Run A.
        b: Run B.
        pair: Their `sides`, if already computed.
    """
    left, right = pair or sides([a, b])
    rows = [
        _stages(left, right),
        _alike("ranks", _ranks(a), _ranks(b)),
        _alike("device", _devices(a), _devices(b)),
        _graphs(_in_graphs(a), _in_graphs(b)),
        _alike("warm-up", _warm(left), _warm(right)),
        _counters(left, right),
        _work(left, right),
    ]
    table = Table("comparability", _COLUMNS, rows)
    note = (
        f"Comparability score: {score_of(table):.2f} (product of the rows). "
        f"Below {HARDLY}, don't rely on the comparison."
    )
    return Table("comparability", _COLUMNS, rows, note)


def score_of(table: Table) -> float:
    """Return the score of two runs, the product of what `comparability` found."""
    return float(np.prod([float(score or 0) for score in table.column("score")]))


def _alike(what: str, a: str, b: str) -> _Row:
    return what, a, b, 1.0 if a == b else _UNLIKE[what]


def _stages(a: Side, b: Side) -> _Row:
    both = set(a.stages) & set(b.stages)
    shares, texts = [], []
    for side in (a, b):
        named = {name: float(ns.sum()) for name, ns in side.stages.items() if name != STEP}
        whole = sum(named.values())
        shares.append(sum(ns for name, ns in named.items() if name in both) / whole if whole else 1)
        alone = [name for name in named if name not in both]
        texts.append(f"only here: {_listed(alone)}" if alone else "all in both")
    return "stages", texts[0], texts[1], float(min(shares))


def _ranks(spans: Spans) -> str:
    world = max((head.world_size for head in spans.headers.values()), default=0)
    have = len(spans.ranks)
    return f"{have}" if have >= world else f"{have} of {world}"


def _devices(spans: Spans) -> str:
    return _listed(sorted({head.hardware for head in spans.headers.values()}))


def _in_graphs(spans: Spans) -> float | None:
    """Return the share of kernels that ran in graphs, None if that was not recorded."""
    table = spans.try_table("kernels", [])
    if table is None or not len(table.rows):
        return None
    if "graph" not in [column.name for column in table.columns]:
        return None
    return float(np.mean(table.numbers("graph", -1) >= 0))


def _graphs(a: float | None, b: float | None) -> _Row:
    texts = [_UNKNOWN if each is None else f"{each:.0%} of kernels" for each in (a, b)]
    apart = abs(a - b) if a is not None and b is not None else 0.0
    return "graph capture", texts[0], texts[1], 1.0 - _EAGER * apart


def _warm(side: Side) -> str:
    return f"first {side.warm} steps excluded" if side.warm else _NONE


def _counters(a: Side, b: Side) -> _Row:
    texts = [_listed(side.work.get(STEP, {})) for side in (a, b)]
    row = _alike("counters", texts[0], texts[1])
    return (*row[:3], _UNCOUNTED) if texts == [_NONE, _NONE] else row


def _work(a: Side, b: Side) -> _Row:
    shared = shared_work([a, b], STEP)
    if not shared:
        return "work", _UNKNOWN, _UNKNOWN, 1.0
    name, (left, right) = next(iter(shared.items()))
    left, right = left[np.isfinite(left)], right[np.isfinite(right)]
    low, high = max(left.min(), right.min()), min(left.max(), right.max())
    inside = min(np.mean((each >= low) & (each <= high)) for each in (left, right))
    texts = [_range(each, name) for each in (left, right)]
    return "work", texts[0], texts[1], _APART + (1 - _APART) * float(inside)


def _range(values: Float64s, name: str) -> str:
    return f"{values.min():,.0f} to {values.max():,.0f} {name}"


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + more or _NONE
