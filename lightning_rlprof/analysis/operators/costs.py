"""What each ``nn.Module`` costs: forward and backward, on the host and on the device, as a tree.

What each operator of torch costs, on the host and on the device, alone and with those inside.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.operators.call_tree import (
    UNATTRIBUTED,
    CallTree,
    Launched,
    call_tree,
    launched,
)
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.interval_nesting import NONE
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_Row = tuple[Cell, ...]

_OPERATORS_COLUMNS = (
    Column("operator", "text"),
    Column("calls", "count"),
    Column("device total", "duration", "ns"),
    Column("device self", "duration", "ns"),
    Column("host total", "duration", "ns"),
    Column("host self", "duration", "ns"),
    Column("kernels", "count"),
    Column("backward of", "text"),
)
_OPERATORS_TOLD = (
    "calls",
    "device total",
    "device self",
    "total",
    "self",
)  # of Ascend, in our order
_NO_CALLS = (
    "no operators were recorded{}; torch.profiler records them where the CPU is among its "
    "activities (integrated: {{profile_with_cpu: true}})"
)


def operators(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum the calls of each operator, those first that take the device longest, else the host.

    ``self`` is without the operators inside, ``total`` with them; a total counts an operator that
    lies in itself once. A kernel or copy belongs to the innermost operator that was open on its
    thread when it was launched; ``kernels`` counts those that belong to it. The row `UNATTRIBUTED`
    has what no operator launched: with it, ``device self`` adds up to the time of all kernels and
    copies, and ``host self`` to the time in which threads were in operators. ``backward of`` is the
    forward operator of most of its calls.

    Where a run has no calls but Ascend's own sums (the table ``operators``), those are shown.
    """
    remarks: list[str] = []
    tree, found = _recorded(spans, ranks, remarks)
    if tree is None:
        return _operators_told(spans, ranks, remarks)
    if tree.too_deep:
        return Table(
            "operators", _OPERATORS_COLUMNS, abstained="; ".join([tree.too_deep, *remarks])
        )
    if found is None:
        remarks.append("No kernels were recorded: the device's time is not known.")
        rows = _sorted(_operators_rows(tree, [[None] * len(tree.names)] * 3))
        return Table("operators", _OPERATORS_COLUMNS, rows, " ".join(remarks))
    call = tree.launching(found)
    rows = _sorted(_operators_rows(tree, _device(tree, call, found.duration_ns)))
    lost = found.duration_ns[call == NONE]
    rows.append((UNATTRIBUTED, None, int(lost.sum()), int(lost.sum()), None, None, len(lost), None))
    return Table("operators", _OPERATORS_COLUMNS, rows, " ".join(remarks))


def _recorded(
    spans: Spans, ranks: Collection[int] | None, remarks: list[str]
) -> tuple[CallTree | None, Launched | None]:
    """Return operators, None without, and launches; the table's columns are not kept for longer."""
    table = spans.try_table("calls", remarks)
    tree = None if table is None else call_tree(table, "operator", ranks)
    if table is None or tree is None or not len(tree.name):
        return None, None
    return tree, launched(spans, table, ranks, remarks)


def _sorted(rows: Iterable[_Row]) -> list[_Row]:
    """Return the rows by time of the device, then of the host."""
    return sorted(
        rows, key=lambda row: [-1 if row[at] is None else row[at] for at in (2, 4)], reverse=True
    )


def _device(tree: CallTree, call: Int64s, duration: Int64s) -> list[list[Cell]]:
    """Return by name the device's time with inner operators and without, and kernels."""
    found, paths = call >= 0, tree.paths
    alone = paths.sum(call[found], duration[found])
    count = paths.sum(call[found], np.ones_like(duration[found]))
    outer = paths.outermost
    return [
        _by_name(tree, outer, paths.with_inner(alone)[outer]),
        *(_by_name(tree, slice(None), values) for values in (alone, count)),
    ]


def _operators_rows(tree: CallTree, device: Sequence[Sequence[Cell]]) -> Iterator[_Row]:
    """Yield a row per operator."""
    paths, every = tree.paths, np.arange(len(tree.name))
    calls = _by_name(tree, slice(None), paths.sum(every, np.ones_like(every)))
    alone = _by_name(tree, slice(None), paths.sum(every, tree.own_ns()))
    outer = paths.outermost
    whole = _by_name(tree, outer, paths.sum(every, tree.end_ns - tree.start_ns)[outer])
    forward = _forward(tree)
    for name in np.unique(tree.name).tolist():
        total, own, kernels = (column[name] for column in device)
        costs = (total, own, whole[name], alone[name], kernels)
        yield (tree.names[name] or None, calls[name], *costs, forward.get(name))


def _by_name(tree: CallTree, paths: Int64s | slice, values: Int64s) -> list[Cell]:
    """Return the sum of values of paths by name."""
    found = np.zeros(len(tree.names), np.int64)
    np.add.at(found, tree.paths.name[paths], values)
    return list(found.tolist())


def _forward(tree: CallTree) -> dict[int, str]:
    """Return per name that of the forward operator to which most of its calls belong."""
    rows = tree.forwards()
    linked = np.flatnonzero(rows >= 0)
    width = len(tree.names)
    pairs = tree.name[linked] * width + tree.name[rows[linked]]
    found, count = np.unique(pairs, return_counts=True)
    order = np.argsort(count, kind="stable")  # the most frequent one is written last
    keys = [divmod(key, width) for key in found[order].tolist()]
    return {name: tree.names[forward] for name, forward in keys}


def _operators_told(spans: Spans, ranks: Collection[int] | None, remarks: list[str]) -> Table:
    """Return what Ascend's tools summed up themselves."""
    table = spans.try_table("operators", remarks)
    if table is None or not len(table.rows):
        why = _NO_CALLS.format("" if ranks is None else f" of ranks {sorted(ranks)}")
        return Table("operators", _OPERATORS_COLUMNS, abstained="; ".join([why, *remarks]))
    found: dict[Cell, list[Cell]] = {}
    for rank, name, *cells in zip(
        *map(table.column, ("rank", "operator", *_OPERATORS_TOLD)), strict=True
    ):
        if ranks is None or rank in ranks:
            pairs: Any = zip(found.get(name, [None] * len(cells)), cells, strict=True)
            found[name] = [a if b is None else b if a is None else a + b for a, b in pairs]
    remarks.append("These are the sums of Ascend's own tools.")
    rows = _sorted((name, *sums, None, None) for name, sums in found.items())
    return Table("operators", _OPERATORS_COLUMNS, rows, " ".join(remarks))


_COLUMNS = (
    Column("module", "text"),
    Column("calls", "count"),
    Column("device total", "duration", "ns"),
    Column("device self", "duration", "ns"),
    Column("backward total", "duration", "ns"),
    Column("backward self", "duration", "ns"),
    Column("host total", "duration", "ns"),
    Column("host self", "duration", "ns"),
    Column("path", "text"),
)
_PREFIX = "nn.Module: "  # as torch writes it in its traces
_TOLD = ("calls", "total", "self")  # of Ascend
_NO_MODULES = (
    "no modules were recorded{}; torch.profiler records them with Python stacks "
    "(integrated: {{profile_with_module: true}} or torch_profiler: {{with_stack: true}})"
)


class _Cost(NamedTuple):
    """The device's time per path, with the paths inside and without; both ways and backward."""

    total: Int64s
    alone: Int64s
    backward_total: Int64s
    backward_alone: Int64s


def modules(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum the calls of each module by the modules that it lies in, inner ones below outer ones.

    A module is told by its place: the path ``Model_0.Block_3.Linear_7`` holds the names of all
    modules around it, as torch numbers them; the first column its own name, with a space for each
    of those around. Of siblings the most expensive one comes first. ``self`` is without the modules
    inside.

    A kernel or copy belongs to the innermost module that was open on its thread when it was
    launched. Where none was, it counts as backward: to the module in which the forward operator
    began to whose backward operator it belongs. The columns ``device`` hold both. The row
    `UNATTRIBUTED` has what belongs to no module: with it ``device self`` adds up to the time of all
    kernels and copies. ``host self`` adds up to the time in which threads were in modules.

    Where a run has no calls but Ascend's own sums (the table ``modules``), those are shown; they
    are by name alone.
    """
    remarks: list[str] = []
    table = spans.try_table("calls", remarks)
    tree = None if table is None else call_tree(table, "module", ranks)
    if table is None or tree is None or not len(tree.name):
        return _told(spans, ranks, remarks)
    if tree.too_deep:
        return Table("modules", _COLUMNS, abstained="; ".join([tree.too_deep, *remarks]))
    operators = call_tree(table, "operator", ranks)
    rows = list(_rows(tree, operators, launched(spans, table, ranks, remarks)))
    if rows[-1][0] != UNATTRIBUTED:
        remarks.append("No kernels were recorded: the device's time is not known.")
    return Table("modules", _COLUMNS, rows, " ".join(remarks))


def _rows(tree: CallTree, operators: CallTree, found: Launched | None) -> Iterator[_Row]:
    """Yield the rows of modules, and what belongs to none."""
    if found is None:
        yield from _places(tree, None)
        return
    forward, backward = tree.launching(found), _backward(tree, operators, found)
    backward[forward != NONE] = NONE
    yield from _places(tree, _cost(tree, found.duration_ns, forward, backward))
    lost = int(found.duration_ns[(forward == NONE) & (backward == NONE)].sum())
    yield (UNATTRIBUTED, None, lost, lost, *(None,) * 5)


def _backward(tree: CallTree, operators: CallTree, kernels: Launched) -> Int64s:
    """Return the module to whose backward each kernel belongs, `NONE` without.

    Of the operators around a launch it is the innermost one that has a forward operator.
    """
    forward = operators.forwards()
    found = np.append(forward, NONE)[_linked(operators, forward)[operators.launching(kernels)]]
    rows = found[found != NONE]
    thread = operators.threads[operators.lane[rows] % max(len(operators.threads), 1)]
    lane = tree.lane_of(operators.rank[rows], thread)
    found[found != NONE] = tree.at(lane, operators.start_ns[rows])
    return found


def _linked(operators: CallTree, forward: Int64s) -> Int64s:
    """Return the nearest operator with a forward one that each is or lies in; the last is `NONE`.

    So that `NONE`, as an index, finds `NONE`.
    """
    ends = np.append(forward != NONE, True)  # the search ends at the top, too
    found = np.append(np.arange(len(forward)), NONE)
    while len(rows := np.flatnonzero(~ends[found])):
        found[rows] = operators.around[found[rows]]
    return found


def _cost(tree: CallTree, duration: Int64s, forward: Int64s, backward: Int64s) -> _Cost:
    alone = []
    for call in (forward, backward):
        found = call != NONE
        alone.append(tree.paths.sum(call[found], duration[found]))
    both, inner = alone[0] + alone[1], tree.paths.with_inner
    return _Cost(inner(both), both, inner(alone[1]), alone[1])


def _places(tree: CallTree, cost: _Cost | None) -> Iterator[_Row]:
    """Yield a row per path, each followed by those inside it."""
    paths, every = tree.paths, np.arange(len(tree.name))
    calls = paths.sum(every, np.ones_like(every))
    host = paths.sum(every, tree.end_ns - tree.start_ns)
    columns = (host, paths.sum(every, tree.own_ns()))
    weight = host if cost is None else cost.total
    titles: list[str] = []
    short = [name.removeprefix(_PREFIX) for name in tree.names]
    for above, name in zip(paths.parent.tolist(), paths.name.tolist(), strict=True):
        titles.append(f"{titles[above]}.{short[name]}" if above >= 0 else short[name])
    for at in _downwards(paths.parent, np.lexsort((-host, -weight))):
        device = [None] * 4 if cost is None else [int(column[at]) for column in cost]
        title = " " * int(paths.depth[at]) + short[int(paths.name[at])]
        own = (int(column[at]) for column in columns)
        yield (title, int(calls[at]), *device, *own, titles[at])


def _downwards(parent: Int64s, order: Int64s) -> Iterator[int]:
    """Yield all paths, each before those inside it, siblings in the order given."""
    inside: dict[int, list[int]] = {}
    for at in order[::-1].tolist():
        inside.setdefault(int(parent[at]), []).append(at)
    stack = inside.get(NONE, [])
    while stack:
        at = stack.pop()
        yield at
        stack.extend(inside.get(at, ()))


def _told(spans: Spans, ranks: Collection[int] | None, remarks: Sequence[str]) -> Table:
    """Return what Ascend's tools summed up themselves."""
    more = list(remarks)
    table = spans.try_table("modules", more)
    if table is None or not len(table.rows):
        why = _NO_MODULES.format("" if ranks is None else f" of ranks {sorted(ranks)}")
        return Table("modules", _COLUMNS, abstained="; ".join([why, *more]))
    found: dict[Cell, tuple[Any, ...]] = {}
    for rank, name, *cells in zip(*map(table.column, ("rank", "module", *_TOLD)), strict=True):
        if ranks is None or rank in ranks:
            pairs: Any = zip(found.get(name, (0, 0, 0)), cells, strict=True)
            found[name] = tuple(a + b for a, b in pairs)
    every = sorted(found.items(), key=lambda item: -item[1][1])
    rows: list[_Row] = [(name, calls, *(None,) * 4, *host, None) for name, (calls, *host) in every]
    more.append("These are the sums of Ascend's own tools.")
    return Table("modules", _COLUMNS, rows, " ".join(more))
