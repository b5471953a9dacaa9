"""What each operator of torch costs, on the host and on the device, alone and with those inside."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

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

__all__ = ["operators"]

_Row = tuple[Cell, ...]

_COLUMNS = (
    Column("operator", "text"),
    Column("calls", "count"),
    Column("device total", "duration", "ns"),
    Column("device self", "duration", "ns"),
    Column("host total", "duration", "ns"),
    Column("host self", "duration", "ns"),
    Column("kernels", "count"),
    Column("backward of", "text"),
)
_TOLD = ("calls", "device total", "device self", "total", "self")  # of Ascend, in our order
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
        return _told(spans, ranks, remarks)
    if tree.too_deep:
        return Table("operators", _COLUMNS, abstained="; ".join([tree.too_deep, *remarks]))
    if found is None:
        remarks.append("No kernels were recorded: the device's time is not known.")
        rows = _sorted(_rows(tree, [[None] * len(tree.names)] * 3))
        return Table("operators", _COLUMNS, rows, " ".join(remarks))
    call = tree.launching(found)
    rows = _sorted(_rows(tree, _device(tree, call, found.duration_ns)))
    lost = found.duration_ns[call == NONE]
    rows.append((UNATTRIBUTED, None, int(lost.sum()), int(lost.sum()), None, None, len(lost), None))
    return Table("operators", _COLUMNS, rows, " ".join(remarks))


def _recorded(
    spans: Spans, ranks: Collection[int] | None, remarks: list[str]
) -> tuple[CallTree | None, Launched | None]:
    """Return operators, None without, and launches; the table's columns are not kept for longer."""
    table = read(spans, "calls", remarks)
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


def _rows(tree: CallTree, device: Sequence[Sequence[Cell]]) -> Iterator[_Row]:
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


def _told(spans: Spans, ranks: Collection[int] | None, remarks: list[str]) -> Table:
    """Return what Ascend's tools summed up themselves."""
    table = read(spans, "operators", remarks)
    if table is None or not len(table.rows):
        why = _NO_CALLS.format("" if ranks is None else f" of ranks {sorted(ranks)}")
        return Table("operators", _COLUMNS, abstained="; ".join([why, *remarks]))
    found: dict[Cell, list[Cell]] = {}
    for rank, name, *cells in zip(*map(table.column, ("rank", "operator", *_TOLD)), strict=True):
        if ranks is None or rank in ranks:
            pairs: Any = zip(found.get(name, [None] * len(cells)), cells, strict=True)
            found[name] = [a if b is None else b if a is None else a + b for a, b in pairs]
    remarks.append("These are the sums of Ascend's own tools.")
    rows = _sorted((name, *sums, None, None) for name, sums in found.items())
    return Table("operators", _COLUMNS, rows, " ".join(remarks))
