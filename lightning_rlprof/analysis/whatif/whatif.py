"""Step time after a change, from a replay of the step graph."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain

import numpy as np

from lightning_rlprof.analysis.critical_path.replay import longest_path, replay
from lightning_rlprof.analysis.critical_path.step_graph import StepGraph, step_graph
from lightning_rlprof.analysis.steps.execution_mode import Mode, execution_mode
from lightning_rlprof.analysis.steps.time_categories import Category, category_of
from lightning_rlprof.analysis.whatif.edits import (
    Edit,
    balance_load,
    overlap_stage,
    remove_slowness,
    scale_stage,
    shorten_stages,
    workload,
)
from lightning_rlprof.analysis.whatif.pools import Pools, find_pools
from lightning_rlprof.analysis.whatif.rollout_requests import (
    find_requests,
    replicas_added,
    stopped_at,
)
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

BALANCED = "balanced load"
"""The change that gives all ranks the same number of tokens."""

_COLUMNS = (
    Column("change", "text"),
    *columns_of("duration", "baseline", "predicted", "saved", unit="ns"),
    Column("share", "share"),
    Column("hours saved", "number", "h"),
    *columns_of("duration", "CI low", "CI high", unit="ns"),
)
_NOT_BALANCED = (
    '"balanced load" is not available: no token counts, or the work is inside stages that include '
    "waiting."
)
_HOUR_NS = 3_600 * 10**9
_MAX_REPLAY_ERROR = 0.01  # A replay of the unchanged step may err by this share.
_SHOWN = 5  # By default, this many stages get a speedup.
_NORMAL = 1.96  # This many spreads on each side contain 95%.


def whatif(
    spans: Spans,
    *,
    speedup: Mapping[str, float] | None = None,
    remove: Sequence[str] = (),
    overlap: Sequence[str] = (),
    stop_rollout_at: float | None = None,
    add_replicas: int | None = None,
) -> Table:
    """Estimate the median step after each change, largest saving first, with its 95% CI.

    Always includes ``no straggler``, and ``balanced load`` if tokens are counted. Without a request
    for other changes, stages on the critical path run twice as fast and weight syncs overlap.
    ``hours saved`` are of all ranks together. Abstains if the replay of the unchanged steps is more
    than 1% off.

    Of an asynchronous run it is the mean step, by `Pools` instead of a replay: rollout and training
    overlap, and each may be faster or get more ranks.

    Args:
        spans: The run.
        speedup: Speed of stages relative to now, by name; 2 halves their time.
        remove: Stages to leave out.
        overlap: Stages that fully overlap with the rest of the step.
        stop_rollout_at: Stop each rollout when this share of its requests is answered.
        add_replicas: Replicas to add, each with as many slots as one rank that has requests. These
            two need a span per request, at least four per rollout.

    Raises:
        TraceError: A stage isn't in the run, or a number is out of bounds.
    """
    if stop_rollout_at is not None and not 0 < stop_rollout_at <= 1:
        raise TraceError(f"stop_rollout_at {stop_rollout_at} must be above 0 and at most 1")
    if add_replicas is not None and add_replicas < 1:
        raise TraceError(f"add_replicas {add_replicas} must be 1 or more")
    asked, rollout = (speedup or {}, remove, overlap), (stop_rollout_at, add_replicas)
    if execution_mode(spans) == Mode.ASYNCHRONOUS:
        return _asynchronous(spans, *asked, *rollout)
    graph = step_graph(spans)
    if isinstance(graph, str):
        return Table("whatif", _COLUMNS, abstained=graph)
    before = _replayed_ns(graph, Edit(graph.ns, graph.transfer_ns))
    off = float(np.median(np.abs(before / np.maximum(graph.wall_ns, 1) - 1)))
    if off > _MAX_REPLAY_ERROR:
        text = f"The replay error of the unchanged step is {off:.2%}"
        text += f"; at most {_MAX_REPLAY_ERROR:.0%} is allowed. {graph.note}"
        return Table("whatif", _COLUMNS, abstained=text)
    changes = asked if any(asked) or any(rollout) else _default_changes(graph)
    edits = chain(_stage_edits(graph, *changes), _rollout_edits(graph, *rollout))
    rows = [_row(graph, text, before - _replayed_ns(graph, edit)) for text, edit in edits]
    text = f"Based on {len(graph.steps)} steps. Replay error of the unchanged step: {off:.2%}."
    why = "" if any(row[0] == BALANCED for row in rows) else f" {_NOT_BALANCED}"
    rows.sort(key=lambda row: -int(row[3] or 0))
    return Table("whatif", _COLUMNS, rows, f"{text}{why} {graph.note}")


def _asynchronous(
    spans: Spans,
    speedup: Mapping[str, float],
    remove: Sequence[str],
    overlap: Sequence[str],
    stop_at: float | None,
    add_replicas: int | None,
) -> Table:
    pools = find_pools(spans)
    if isinstance(pools, str):
        return Table("whatif", _COLUMNS, abstained=pools)
    if stop_at is not None:
        text = "rollouts of an asynchronous run can't be stopped here"
        raise TraceError(f"{text}: see `rlprof show RUN long_tail`")
    work = pools.training[:, :, :-1].sum(axis=(0, 1)) + pools.rollout.sum(axis=(0, 1))
    known = {name: ns for name, ns in zip(pools.names, work.tolist(), strict=True) if ns}
    for name in (*speedup, *remove, *overlap):
        if name not in known:
            raise _unknown_stage(name, known)
    changes = {
        f"{name} {speed:g}x faster": ({name: 1 / _speed(name, speed)}, 0)
        for name, speed in speedup.items()
    }
    changes |= {f"{name} removed": ({name: 0.0}, 0) for name in remove}
    changes |= {f"{name} overlapped": ({name: 0.0}, 0) for name in overlap}
    added = [add_replicas] if add_replicas else []
    if not changes and not added:
        most = sorted(known, key=known.__getitem__, reverse=True)[:_SHOWN]
        changes, added = {f"{name} 2x faster": ({name: 0.5}, 0) for name in most}, [1, 2]
    changes |= {f"+{more} rollout replicas": ({}, more) for more in added}
    now, steps, before = float(pools.step_ns.mean()), len(pools.step_ns), pools.longest_ns()
    rows: list[tuple[Cell, ...]] = []
    for text, change in changes.items():
        # Time that no rank's work explains stays.
        each = pools.step_ns - before + pools.longest_ns(*change)
        then = float(each.mean())
        unsure = abs(float(np.mean(pools.step_ns - before))) * abs(1 - then / now)
        # The interval is of the mean of as many steps to come, whose lengths differ.
        around = _NORMAL * float(each.std(ddof=1)) * np.sqrt(2 / steps) + unsure
        saved = now - then
        hours = saved * steps * len(spans.ranks) / _HOUR_NS
        bounds = round(max(then - around, 0)), round(then + around)
        rows.append((text, round(now), round(then), round(saved), saved / now, hours, *bounds))
    rows.sort(key=lambda row: -int(row[3] or 0))
    return Table("whatif", _COLUMNS, rows, _pools_note(pools))


def _pools_note(pools: Pools) -> str:
    train, roll = (each.sum(axis=2).mean() / 1e6 for each in (pools.training, pools.rollout))
    return (
        f"Asynchronous, mean of {len(pools.step_ns)} steps: a step takes as long as the rank with "
        f"most to do. Per step, training works {train:.3g} ms, and each rollout rank {roll:.3g} ms "
        f"({len(pools.rollout)} of them). What neither explains of the "
        f"{pools.step_ns.mean() / 1e6:.3g} ms of a step stays. "
        "Added ranks are like the present ones, on hardware of their own."
    )


def _speed(name: str, speed: float) -> float:
    if not 0 < speed < np.inf:
        raise TraceError(f"speedup {speed} of {name} must be above 0, for instance 2")
    return speed


def _replayed_ns(graph: StepGraph, edit: Edit) -> Int64s:
    found = replay(graph.schedule, edit.own_ns, edit.transfer_ns, graph.offset_ns).interval_ns
    return found if edit.least_ns is None else np.maximum(found, edit.least_ns)


def _default_changes(graph: StepGraph) -> tuple[dict[str, float], list[str], list[str]]:
    """Return the default changes: faster stages on the critical path, overlapped weight syncs."""
    found = longest_path(graph.schedule, graph.ns, graph.transfer_ns, graph.offset_ns)
    on = np.bincount(graph.name[found.on], found.weight[found.on], len(graph.names))[:-1]
    stages = [code for code in np.argsort(-on, kind="stable").tolist() if on[code] > 0][:_SHOWN]
    syncs = [name for name in _stages(graph) if category_of(name) == Category.WEIGHT_SYNC]
    return {graph.names[code]: 2.0 for code in stages}, [], syncs


def _stage_edits(
    graph: StepGraph, speedup: Mapping[str, float], remove: Iterable[str], overlap: Iterable[str]
) -> Iterator[tuple[str, Edit]]:
    work = workload(graph)
    yield "no straggler", remove_slowness(graph, work)
    even = balance_load(graph, work)
    if even is not None:
        yield BALANCED, even
    for name, speed in speedup.items():
        slower = 1 / _speed(name, speed)
        yield f"{name} {speed:g}x faster", scale_stage(graph, _stage_code(graph, name), slower)
    for name in remove:
        yield f"{name} removed", scale_stage(graph, _stage_code(graph, name), 0.0)
    for name in overlap:
        yield f"{name} overlapped", overlap_stage(graph, _stage_code(graph, name))


def _rollout_edits(
    graph: StepGraph, stop_at: float | None, add_replicas: int | None
) -> Iterator[tuple[str, Edit]]:
    if stop_at is None and add_replicas is None:
        return
    stages = np.unique(graph.row[(graph.row >= 0) & ~graph.schedule.produces])
    found = find_requests(graph.spans, stages)
    if found is None:
        raise TraceError(
            "changes to rollouts need a span per request (at least 4 per rollout). "
            'Mark each request with annotate("generate").'
        )
    if stop_at is not None:
        saved = stopped_at(found, stop_at)
        yield f"rollout stopped at {stop_at:.0%}", shorten_stages(graph, found.row, saved)
    if add_replicas is not None:
        saved = replicas_added(found, graph.spans.step[found.row], add_replicas)
        yield f"+{add_replicas} rollout replicas", shorten_stages(graph, found.row, saved)


def _stage_code(graph: StepGraph, name: str) -> int:
    there = _stages(graph)
    if name not in there:
        raise _unknown_stage(name, there)
    return there[name]


def _unknown_stage(name: str, there: Iterable[str]) -> TraceError:
    close = get_close_matches(name, [*there], n=1)
    return TraceError(
        f"unknown stage {name!r}. Stages in this run: {', '.join(there)}",
        hint=f"did you mean {close[0]!r}?" if close else "",
        code="unknown_stage",
    )


def _stages(graph: StepGraph) -> dict[str, int]:
    """Return the stages of the steps and their codes."""
    codes = np.flatnonzero(np.bincount(graph.name, minlength=len(graph.names))[:-1])
    return {graph.names[code]: code for code in codes.tolist()}


def _row(graph: StepGraph, text: str, saved_ns: Int64s) -> tuple[Cell, ...]:
    """Return what a change saves, with the 95% CI of the median.

    The bootstrap's median of n steps is at a quantile with a symmetric beta distribution, which is
    normal but for its ends (David and Nagaraja, Order Statistics, 2003); so nothing is drawn.
    """
    after = np.sort(graph.wall_ns - saved_ns)
    now, then, steps = float(np.median(graph.wall_ns)), float(np.median(after)), len(after)
    part = 0.5 + _NORMAL * 0.5 / np.sqrt(steps + 2)
    at = min(int(part * steps), steps - 1)
    low, high = int(after[steps - 1 - at]), int(after[at])
    hours = int(saved_ns.sum()) * len(graph.ranks) / _HOUR_NS
    saving = round(now) - round(then)
    return (text, round(now), round(then), saving, saving / max(now, 1.0), hours, low, high)
