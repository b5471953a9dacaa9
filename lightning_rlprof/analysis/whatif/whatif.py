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
    Column("baseline", "duration", "ns"),
    Column("predicted", "duration", "ns"),
    Column("saved", "duration", "ns"),
    Column("share", "share"),
    Column("GPU-hours", "number", "h"),
    Column("CI low", "duration", "ns"),
    Column("CI high", "duration", "ns"),
)
_SCORES = (
    Column("change", "text"),
    Column("predicted", "duration", "ns"),
    Column("CI low", "duration", "ns"),
    Column("CI high", "duration", "ns"),
    Column("measured", "duration", "ns"),
    Column("error", "share"),
)
_BALANCED = "balanced load"
_NOT_BALANCED = (
    '"balanced load" is not available: no token counts, or the work is inside stages that include '
    "waiting."
)
_HOUR_NS = 3_600 * 10**9
_ALLOWED = 0.01  # of a step: how far it may be off when it is played again unchanged
_SHOWN = 5  # stages of which is told what it brings to make them faster
_DRAWS = 1_000


class Rollout(NamedTuple):
    """Changes to rollouts.

    Attributes:
        stop_at: Stop each rollout when this share of its requests is answered.
        max_tokens: Cap each response at this number of tokens.
        add_replicas: Replicas to add, each with as many slots as one rank that has requests.
    """

    stop_at: float | None = None
    max_tokens: int | None = None
    add_replicas: int | None = None


def whatif(
    spans: Spans,
    *,
    speedup: Mapping[str, float] | None = None,
    remove: Sequence[str] = (),
    overlap: Sequence[str] = (),
    rollout: Rollout | None = None,
) -> Table:
    """Estimate the median step after each change, largest saving first, with its 95% CI.

    Always includes ``no straggler``, and ``balanced load`` if tokens are counted. Without a request
    for other changes, stages on the critical path run twice as fast and weight syncs overlap.
    ``GPU-hours`` are saved on all ranks together. Abstains if the replay of the unchanged steps is
    more than 1% off.

    Args:
        spans: The run.
        speedup: Speed of stages relative to now, by name; 2 halves their time.
        remove: Stages to leave out.
        overlap: Stages that fully overlap with the rest of the step.
        rollout: Changes to rollouts; these need a span per request.

    Raises:
        TraceError: A stage isn't in the run, or a number is out of bounds.
    """
    graph = dag(spans)
    if isinstance(graph, str):
        return Table("whatif", _COLUMNS, abstained=graph)
    asked = (speedup or {}, remove, overlap)
    wanted = asked if any(asked) or rollout else _usual(graph)
    return _table(graph, chain(_edits(graph, *wanted), _rollouts(graph, rollout or Rollout())))


def _table(graph: Dag, edits: Iterable[tuple[str, Edit]]) -> Table:
    before = _laps(graph, Edit(graph.ns, graph.transfer_ns))
    off = _off(graph, before)
    if isinstance(off, str):
        return Table("whatif", _COLUMNS, abstained=off)
    rows = [_row(graph, text, before - _laps(graph, edit)) for text, edit in edits]
    text = f"Based on {len(graph.steps)} steps. Replay error of the unchanged step: {off:.2%}."
    why = "" if any(row[0] == _BALANCED for row in rows) else f" {_NOT_BALANCED}"
    rows.sort(key=lambda row: -int(row[3] or 0))
    return Table("whatif", _COLUMNS, rows, f"{text}{why} {graph.note}")


def _off(graph: Dag, played: Int64s) -> float | str:
    """Return how far the median step is off when it is played again; a text where that is too far.

    Also where there are too few steps to tell.
    """
    if len(graph.steps) < FEWEST:
        return f"{len(graph.steps)} steps have usable boundaries; {FEWEST} are needed."
    error = float(np.median(np.abs(played / np.maximum(graph.wall_ns, 1) - 1)))
    if error <= _ALLOWED:
        return error
    text = f"The replay error of the unchanged step is {error:.2%}"
    return f"{text}; at most {_ALLOWED:.0%} is allowed. {graph.note}"


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
    graph: Dag, speedup: Mapping[str, float], remove: Iterable[str], overlap: Iterable[str]
) -> Iterator[tuple[str, Edit]]:
    work = workload(graph.spans, graph)
    yield "no straggler", unslowed(graph, work)
    even = balanced(graph, work)
    if even is not None:
        yield _BALANCED, even
    for name, speed in speedup.items():
        if not 0 < speed < np.inf:
            raise TraceError(f"speedup {speed} of {name} must be above 0, for instance 2")
        yield f"{name} {speed:g}x faster", scaled(graph, _code(graph, name), 1 / speed)
    for name in remove:
        yield f"{name} removed", scaled(graph, _code(graph, name), 0.0)
    for name in overlap:
        yield f"{name} overlapped", overlapped(graph, _code(graph, name))


def _rollouts(graph: Dag, asked: Rollout) -> Iterator[tuple[str, Edit]]:
    if asked == Rollout():
        return
    _check(asked)
    found = requests(graph.spans, np.unique(graph.row[(graph.row >= 0) & ~graph.plan.hands]))
    if found is None:
        raise TraceError(
            "changes to rollouts need a span per request (at least 4 per rollout). "
            'Mark each request with annotate("generate").'
        )
    if asked.stop_at is not None:
        yield (
            f"rollout stopped at {asked.stop_at:.0%}",
            shortened(graph, found.row, cut(found, asked.stop_at)),
        )
    if asked.max_tokens is not None:
        saved = capped(found, asked.max_tokens)
        if saved is None:
            raise TraceError(
                "max_tokens needs the tokens of every request. Call count(tokens=...) in each."
            )
        yield f"max {asked.max_tokens} tokens", shortened(graph, found.row, saved)
    if asked.add_replicas is not None:
        saved = more(found, graph.spans.step[found.row], asked.add_replicas)
        yield f"+{asked.add_replicas} rollout replicas", shortened(graph, found.row, saved)


def _check(asked: Rollout) -> None:
    if asked.stop_at is not None and not 0 < asked.stop_at <= 1:
        raise TraceError(f"stop_at {asked.stop_at} must be above 0 and at most 1")
    for name, number in (("max_tokens", asked.max_tokens), ("add_replicas", asked.add_replicas)):
        if number is not None and number < 1:
            raise TraceError(f"{name} {number} must be 1 or more")


def _code(graph: Dag, name: str) -> int:
    there = _there(graph)
    if name not in there:
        raise TraceError(f"unknown stage {name!r}. Stages in this run: {', '.join(there)}")
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
        few = "No predictions were saved." if not last else "The new run has too few steps."
        return Table("score", _SCORES, abstained=graph if isinstance(graph, str) else few)
    took = round(float(np.median(graph.wall_ns)))
    rows: list[tuple[Cell, ...]] = [
        (
            change,
            *(int(each[name]) for name in ("predicted", "CI low", "CI high")),
            took,
            each["predicted"] / took - 1,
        )
        for change, each in last.items()
    ]
    rows.sort(key=lambda row: abs(float(row[5] or 0.0)))
    return Table(
        "score", _SCORES, rows, f"Median of {len(graph.steps)} steps of the new run. {graph.note}"
    )
