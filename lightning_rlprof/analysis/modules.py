"""What each ``nn.Module`` costs: forward and backward, on the host and on the device, as a tree."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.call_tree import (
    NONE,
    UNATTRIBUTED,
    CallTree,
    Launched,
    call_tree,
    launched,
)
from lightning_rlprof.analysis.cells import read
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["modules"]

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
_Row = tuple[Cell, ...]


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
    table = read(spans, "calls", remarks)
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
    table = read(spans, "modules", more)
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
