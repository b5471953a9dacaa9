"""What each torch operator and each ``nn.Module`` costs, on the host and on the device."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.operators.call_tree import (
    UNATTRIBUTED,
    CallTree,
    LaunchedWork,
    call_tree,
    launched_work,
)
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.interval_nesting import NONE
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_OPERATOR_COLUMNS = (
    Column("operator", "text"),
    Column("calls", "count"),
    *columns_of("duration", "device total", "device self", "host total", "host self", unit="ns"),
    Column("kernels", "count"),
    Column("backward of", "text"),
)
_MODULE_COLUMNS = (
    Column("module", "text"),
    Column("calls", "count"),
    *columns_of("duration", "device total", "device self", unit="ns"),
    *columns_of("duration", "backward total", "backward self", unit="ns"),
    *columns_of("duration", "host total", "host self", unit="ns"),
    Column("path", "text"),
)
_NO_OPERATORS = (
    "{} no operators. Capture a step with torch.profiler and the CPU among its activities "
    "(integrated: {{profile_with_cpu: true}})."
)
_NO_MODULES = (
    "{} no modules. Capture a step with torch.profiler and Python stacks "
    "(integrated: {{profile_with_module: true}} or torch_profiler: {{with_stack: true}})."
)
_NO_KERNELS = "No kernels were recorded, so device time is unknown."
_PREFIX = "nn.Module: "  # as torch writes it in its traces

_Row = tuple[Cell, ...]


def operators(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum the calls of each operator, ordered by device time, then by host time.

    ``self`` excludes nested operators, ``total`` includes them; a total counts recursion once. A
    kernel or copy belongs to the innermost operator that was open on its thread at its launch;
    ``kernels`` counts those. The row `UNATTRIBUTED` has the work that no operator launched: with
    it, ``device self`` adds up to the time of all kernels and copies. ``host self`` adds up to the
    time that threads spent in operators. ``backward of`` is the forward operator of most calls.
    """
    notes: list[str] = []
    tree, work = _operator_calls(spans, ranks, notes)
    if tree is None:
        why = " ".join([_NO_OPERATORS.format(_subject(ranks)), *notes])
        return Table("operators", _OPERATOR_COLUMNS, abstained=why)
    if tree.too_deep:
        return Table("operators", _OPERATOR_COLUMNS, abstained=" ".join([tree.too_deep, *notes]))
    if work is None:
        notes.append(_NO_KERNELS)
        rows = _by_cost(_operator_rows(tree, [[None] * len(tree.names)] * 3))
        return Table("operators", _OPERATOR_COLUMNS, rows, " ".join(notes))
    call = tree.launching(work)
    rows = _by_cost(_operator_rows(tree, _device_costs(tree, call, work.duration_ns)))
    rest = work.duration_ns[call == NONE]
    ns = int(rest.sum())
    rows.append((UNATTRIBUTED, None, ns, ns, None, None, len(rest), None))
    return Table("operators", _OPERATOR_COLUMNS, rows, " ".join(notes))


def _operator_calls(
    spans: Spans, ranks: Collection[int] | None, notes: list[str]
) -> tuple[CallTree | None, LaunchedWork | None]:
    """Return the calls of operators, None without, and launches; frees the table's columns."""
    table = spans.try_table("calls", notes)
    tree = None if table is None else call_tree(table, "operator", ranks)
    if table is None or tree is None or not len(tree.name):
        return None, None
    return tree, launched_work(spans, table, ranks, notes)


def _by_cost(rows: Iterable[_Row]) -> list[_Row]:
    """Return the rows by device total, then by host total, descending."""
    return sorted(
        rows, key=lambda row: [-1 if row[at] is None else row[at] for at in (2, 4)], reverse=True
    )


def _device_costs(tree: CallTree, call: Int64s, duration: Int64s) -> list[list[Cell]]:
    """Return by name device total, device self and number of kernels."""
    known, paths = call >= 0, tree.paths
    self_ns = paths.sum(call[known], duration[known])
    count = paths.sum(call[known], np.ones_like(duration[known]))
    outer = paths.outermost
    return [
        _by_name(tree, outer, paths.with_inner(self_ns)[outer]),
        *(_by_name(tree, slice(None), values) for values in (self_ns, count)),
    ]


def _operator_rows(tree: CallTree, device: Sequence[Sequence[Cell]]) -> Iterator[_Row]:
    """Yield a row per operator; ``device`` are the columns of `_device_costs`."""
    paths, every = tree.paths, np.arange(len(tree.name))
    calls = _by_name(tree, slice(None), paths.sum(every, np.ones_like(every)))
    host_self = _by_name(tree, slice(None), paths.sum(every, tree.self_ns()))
    outer = paths.outermost
    host_total = _by_name(tree, outer, paths.sum(every, tree.end_ns - tree.start_ns)[outer])
    forward = _forward_names(tree)
    for name in np.unique(tree.name).tolist():
        total, self_ns, kernels = (column[name] for column in device)
        costs = (total, self_ns, host_total[name], host_self[name], kernels)
        yield (tree.names[name] or None, calls[name], *costs, forward.get(name))


def _by_name(tree: CallTree, paths: Int64s | slice, values: Int64s) -> list[Cell]:
    """Return the sum of values of paths by name."""
    found = np.zeros(len(tree.names), np.int64)
    np.add.at(found, tree.paths.name[paths], values)
    return list(found.tolist())


def _forward_names(tree: CallTree) -> dict[int, str]:
    """Return per name that of the forward operator to which most of its calls belong."""
    rows = tree.forwards()
    linked = np.flatnonzero(rows >= 0)
    width = len(tree.names)
    pairs = tree.name[linked] * width + tree.name[rows[linked]]
    found, count = np.unique(pairs, return_counts=True)
    order = np.argsort(count, kind="stable")  # the most frequent one is written last
    keys = [divmod(key, width) for key in found[order].tolist()]
    return {name: tree.names[forward] for name, forward in keys}


def _subject(ranks: Collection[int] | None) -> str:
    return "This run has" if ranks is None else f"Ranks {sorted(ranks)} have"


class _ModuleCosts(NamedTuple):
    """Device time per path: total and self, of forward and backward together, and of backward."""

    total: Int64s
    self_ns: Int64s
    backward_total: Int64s
    backward_self: Int64s


def modules(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum the calls of each module as a tree: nested modules are indented below outer ones.

    A module is identified by its path: ``Model_0.Block_3.Linear_7`` contains the names of all
    modules around it, as torch numbers them. The first column has its own name, indented by a space
    per level. Siblings are ordered by cost. ``self`` excludes nested modules.

    A kernel or copy belongs to the innermost module that was open on its thread at its launch. If
    none was open, it counts as backward, to the module that called the forward operator of its
    backward operator. The columns ``device`` contain both.

    The row `UNATTRIBUTED` has the work that belongs to no module: with it, ``device self`` adds up
    to the time of all kernels and copies. ``host self`` adds up to the time that threads spent in
    modules.
    """
    notes: list[str] = []
    table = spans.try_table("calls", notes)
    tree = None if table is None else call_tree(table, "module", ranks)
    if table is None or tree is None or not len(tree.name):
        why = " ".join([_NO_MODULES.format(_subject(ranks)), *notes])
        return Table("modules", _MODULE_COLUMNS, abstained=why)
    if tree.too_deep:
        return Table("modules", _MODULE_COLUMNS, abstained=" ".join([tree.too_deep, *notes]))
    work = launched_work(spans, table, ranks, notes)
    if work is None:
        rows = [*_module_rows(tree, None)]
        return Table("modules", _MODULE_COLUMNS, rows, " ".join([*notes, _NO_KERNELS]))
    forward = tree.launching(work)
    backward = _backward_modules(tree, call_tree(table, "operator", ranks), work)
    backward[forward != NONE] = NONE
    costs = [
        tree.paths.sum(call[call != NONE], work.duration_ns[call != NONE])
        for call in (forward, backward)
    ]
    both, inner = costs[0] + costs[1], tree.paths.with_inner
    rows = [*_module_rows(tree, _ModuleCosts(inner(both), both, inner(costs[1]), costs[1]))]
    rest = int(work.duration_ns[(forward == NONE) & (backward == NONE)].sum())
    rows.append((UNATTRIBUTED, None, rest, rest, *(None,) * 5))
    return Table("modules", _MODULE_COLUMNS, rows, " ".join(notes))


def _backward_modules(tree: CallTree, operators: CallTree, work: LaunchedWork) -> Int64s:
    """Return the module to whose backward each kernel or copy belongs, else `NONE`.

    Of the operators around a launch, the innermost one with a forward operator decides.
    """
    forward = operators.forwards()
    nearest = _nearest_with_forward(operators, forward)
    found = np.append(forward, NONE)[nearest[operators.launching(work)]]
    rows = found[found != NONE]
    thread = operators.threads[operators.lane[rows] % max(len(operators.threads), 1)]
    lane = tree.lane_of(operators.rank[rows], thread)
    found[found != NONE] = tree.at(lane, operators.start_ns[rows])
    return found


def _nearest_with_forward(operators: CallTree, forward: Int64s) -> Int64s:
    """Return the innermost operator with a forward one around each, itself included.

    The last item is `NONE`: indexed by `NONE` it gives `NONE`.
    """
    ends = np.append(forward != NONE, True)  # the search ends at the top, too
    found = np.append(np.arange(len(forward)), NONE)
    while len(rows := np.flatnonzero(~ends[found])):
        found[rows] = operators.around[found[rows]]
    return found


def _module_rows(tree: CallTree, costs: _ModuleCosts | None) -> Iterator[_Row]:
    """Yield a row per path, each followed by those inside it."""
    paths, every = tree.paths, np.arange(len(tree.name))
    calls = paths.sum(every, np.ones_like(every))
    host = paths.sum(every, tree.end_ns - tree.start_ns)
    columns = (host, paths.sum(every, tree.self_ns()))
    weight = host if costs is None else costs.total
    titles: list[str] = []
    short = [name.removeprefix(_PREFIX) for name in tree.names]
    for above, name in zip(paths.parent.tolist(), paths.name.tolist(), strict=True):
        titles.append(f"{titles[above]}.{short[name]}" if above >= 0 else short[name])
    for at in _depth_first(paths.parent, np.lexsort((-host, -weight))):
        device = [None] * 4 if costs is None else [int(column[at]) for column in costs]
        title = " " * int(paths.depth[at]) + short[int(paths.name[at])]
        yield (title, int(calls[at]), *device, *(int(each[at]) for each in columns), titles[at])


def _depth_first(parent: Int64s, order: Int64s) -> Iterator[int]:
    """Yield all paths, each before those inside it, siblings in the order given."""
    inside: dict[int, list[int]] = {}
    for at in order[::-1].tolist():
        inside.setdefault(int(parent[at]), []).append(at)
    stack = inside.get(NONE, [])
    while stack:
        at = stack.pop()
        yield at
        stack.extend(inside.get(at, ()))
