"""What a change would buy: steps played again with other durations, and predictions scored."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.critical_path.replay import longest, replay
from lightning_rlprof.analysis.critical_path.step_graph import Dag, dag
from lightning_rlprof.analysis.step_selection import FEWEST
from lightning_rlprof.analysis.time_categories import Category, category_of
from lightning_rlprof.analysis.whatif.edits import (
    Edit,
    balanced,
    overlapped,
    scaled,
    shortened,
    unslowed,
    workload,
)
from lightning_rlprof.analysis.whatif.rollout_requests import capped, cut, more, requests
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_COLUMNS = (
    Column("change", "text"),
    Column("now", "duration", "ns"),
    Column("predicted", "duration", "ns"),
    Column("saving", "duration", "ns"),
    Column("share", "share"),
    Column("GPU-hours", "number", "h"),
    Column("low", "duration", "ns"),
    Column("high", "duration", "ns"),
)
_SCORES = (
    Column("change", "text"),
    Column("predicted", "duration", "ns"),
    Column("low", "duration", "ns"),
    Column("high", "duration", "ns"),
    Column("later", "duration", "ns"),
    Column("error", "share"),
)
_BALANCED = "balanced work"
_UNTOLD = "Balanced work is not told: nobody counts tokens, or it lies in stages that wait."
_HOUR_NS = 3_600 * 10**9
_ALLOWED = 0.01  # of a step: how far it may be off when it is played again unchanged
_SHOWN = 5  # stages of which is told what it brings to make them faster
_DRAWS = 1_000


class Rollout(NamedTuple):
    """Changes to rollouts.

    Attributes:
        cut: End them when such a share of their requests is answered.
        cap: No answer has more tokens.
        replicas: So many more, each with as many slots as one of the ranks that have requests.
    """

    cut: float | None = None
    cap: int | None = None
    replicas: int | None = None


def whatif(
    spans: Spans,
    *,
    faster: Mapping[str, float] | None = None,
    removed: Sequence[str] = (),
    hidden: Sequence[str] = (),
    rollout: Rollout | None = None,
) -> Table:
    """Predict the median step after each change, largest saving first, bounded with 95 %.

    Always ``no straggler``, and ``balanced work`` where tokens are counted; besides what is asked
    for, or else stages on the critical path twice as fast and weight syncs hidden. ``GPU-hours``
    are of all ranks. Abstains where the steps played again unchanged are more than 1 % off.

    Args:
        spans: The run.
        faster: How many times as fast, by stage; above 0.
        removed: Stages that are gone.
        hidden: Stages that happen beside the rest of the step.
        rollout: Changes to rollouts whose requests have spans.

    Raises:
        TraceError: A stage is not in the run, or a number is out of bounds.
    """
    graph = dag(spans)
    if isinstance(graph, str):
        return Table("whatif", _COLUMNS, abstained=graph)
    asked = (faster or {}, removed, hidden)
    wanted = asked if any(asked) or rollout else _usual(graph)
    return _table(graph, chain(_edits(graph, *wanted), _rollouts(graph, rollout or Rollout())))


def _table(graph: Dag, edits: Iterable[tuple[str, Edit]]) -> Table:
    before = _laps(graph, Edit(graph.ns, graph.transfer_ns))
    off = _off(graph, before)
    if isinstance(off, str):
        return Table("whatif", _COLUMNS, abstained=off)
    rows = [_row(graph, text, before - _laps(graph, edit)) for text, edit in edits]
    text = f"Of {len(graph.steps)} steps; unchanged, the median one is {off:.2%} off."
    untold = "" if any(row[0] == _BALANCED for row in rows) else f" {_UNTOLD}"
    rows.sort(key=lambda row: -int(row[3] or 0))
    return Table("whatif", _COLUMNS, rows, f"{text}{untold} {graph.note}")


def _off(graph: Dag, played: Int64s) -> float | str:
    """Return how far the median step is off when it is played again; a text where that is too far.

    Also where there are too few steps to tell.
    """
    if len(graph.steps) < FEWEST:
        return f"{len(graph.steps)} steps can be cut, it takes {FEWEST}"
    error = float(np.median(np.abs(played / np.maximum(graph.wall_ns, 1) - 1)))
    if error <= _ALLOWED:
        return error
    text = f"played again unchanged, the median step is {error:.2%} off"
    return f"{text}; {_ALLOWED:.0%} is allowed. {graph.note}"


def _laps(graph: Dag, edit: Edit) -> Int64s:
    found = replay(graph.plan, edit.own_ns, edit.transfer_ns, graph.offset_ns).lap
    return found if edit.least_ns is None else np.maximum(found, edit.least_ns)


def _usual(graph: Dag) -> tuple[dict[str, float], list[str], list[str]]:
    """Return what is worth asking where nothing is: stages on the path, and weight syncs."""
    found = longest(graph.plan, graph.ns, graph.transfer_ns, graph.offset_ns)
    on = np.bincount(graph.name[found.on], found.weight[found.on], len(graph.names))[:-1]
    stages = [code for code in np.argsort(-on, kind="stable").tolist() if on[code] > 0][:_SHOWN]
    syncs = [name for name in _there(graph) if category_of(name) == Category.WEIGHT_SYNC]
    return {graph.names[code]: 2.0 for code in stages}, [], syncs


def _edits(
    graph: Dag, faster: Mapping[str, float], removed: Iterable[str], hidden: Iterable[str]
) -> Iterator[tuple[str, Edit]]:
    work = workload(graph.spans, graph)
    yield "no straggler", unslowed(graph, work)
    even = balanced(graph, work)
    if even is not None:
        yield _BALANCED, even
    for name, speed in faster.items():
        if not 0 < speed < np.inf:
            raise TraceError(f"{name} {speed} times as fast: a speed is above 0, for instance 2")
        yield f"{name} {speed:g}x faster", scaled(graph, _code(graph, name), 1 / speed)
    for name in removed:
        yield f"{name} removed", scaled(graph, _code(graph, name), 0.0)
    for name in hidden:
        yield f"{name} hidden", overlapped(graph, _code(graph, name))


def _rollouts(graph: Dag, asked: Rollout) -> Iterator[tuple[str, Edit]]:
    if asked == Rollout():
        return
    _check(asked)
    found = requests(graph.spans, np.unique(graph.row[(graph.row >= 0) & ~graph.plan.hands]))
    if found is None:
        raise TraceError(
            "no rollout of these steps has spans of its requests (four or more): annotate each one"
        )
    if asked.cut is not None:
        yield f"rollout cut at {asked.cut:.0%}", shortened(graph, found.row, cut(found, asked.cut))
    if asked.cap is not None:
        saved = capped(found, asked.cap)
        if saved is None:
            raise TraceError("not every request counts its tokens: count(tokens=...) inside of it")
        yield f"{asked.cap} tokens at most", shortened(graph, found.row, saved)
    if asked.replicas is not None:
        saved = more(found, graph.spans.step[found.row], asked.replicas)
        yield f"{asked.replicas} rollout replicas more", shortened(graph, found.row, saved)


def _check(asked: Rollout) -> None:
    if asked.cut is not None and not 0 < asked.cut <= 1:
        raise TraceError(f"rollouts cut at {asked.cut}: a share is above 0 and at most 1")
    for name, number in (("cap", asked.cap), ("replicas", asked.replicas)):
        if number is not None and number < 1:
            raise TraceError(f"{name} {number}: takes a whole number, 1 or more")


def _code(graph: Dag, name: str) -> int:
    there = _there(graph)
    if name not in there:
        raise TraceError(f"{name} is no stage of these steps, which have {', '.join(there)}")
    return there[name]


def _there(graph: Dag) -> dict[str, int]:
    """Return the stages of the steps and their codes."""
    codes = np.flatnonzero(np.bincount(graph.name, minlength=len(graph.names))[:-1])
    return {graph.names[code]: code for code in codes.tolist()}


def _row(graph: Dag, text: str, saved_ns: Int64s) -> tuple[Cell, ...]:
    """Return what a change saves, with its interval."""
    after = (graph.wall_ns - saved_ns).astype(float)
    now, then = float(np.median(graph.wall_ns)), float(np.median(after))
    low, high = _bounds(after)
    hours = int(saved_ns.sum()) * len(graph.ranks) / _HOUR_NS
    saving, whole = round(now) - round(then), max(now, 1.0)
    return (text, round(now), round(then), saving, saving / whole, hours, round(low), round(high))


def _bounds(values: Float64s) -> tuple[float, float]:
    """Bound the median by drawing the steps anew, a thousand times."""
    draws = np.random.default_rng(0).integers(0, len(values), (_DRAWS, len(values)))
    low, high = np.percentile(np.median(values[draws], axis=1), [2.5, 97.5])
    return float(low), float(high)


def predictions(table: Table) -> list[dict[str, Any]]:
    """Return the rows of a what-if as plain data, to be kept until a later run can score them."""
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def score(kept: Iterable[Mapping[str, Any]], later: Spans) -> Table:
    """Compare predictions with the median step of a later run; an error above 0: too slow a guess.

    Which of the changes was made is for the reader to know. The last prediction of a change counts.
    """
    last = {str(each["change"]): each for each in kept}
    graph = dag(later)
    if isinstance(graph, str) or len(graph.steps) < FEWEST or not last:
        few = "no prediction was kept" if not last else "the later run has too few steps"
        return Table("score", _SCORES, abstained=graph if isinstance(graph, str) else few)
    took = round(float(np.median(graph.wall_ns)))
    rows: list[tuple[Cell, ...]] = [
        (
            change,
            *(int(each[name]) for name in ("predicted", "low", "high")),
            took,
            each["predicted"] / took - 1,
        )
        for change, each in last.items()
    ]
    rows.sort(key=lambda row: abs(float(row[5] or 0.0)))
    return Table("score", _SCORES, rows, f"Median of {len(graph.steps)} later steps. {graph.note}")
