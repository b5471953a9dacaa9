"""What each torch operator and each ``nn.Module`` costs, on the host and on the device."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.work import NOT_RECORDED, DeviceWork, device_work
from lightning_rlprof.analysis.statistics.group_summary import rows_by_group
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import (
    NONE,
    alone,
    depths,
    enclosing,
    holding,
    nested_order,
    open_at,
)
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_OPERATOR_COLUMNS = (
    Column("operator", "text"),
    Column("calls", "count"),
    *columns_of("duration", "device total", "device self", "host total", "host self", unit="ns"),
    Column("kernels", "count"),
)
_MODULE_COLUMNS = (
    Column("module", "text"),
    Column("calls", "count"),
    *columns_of("duration", "device total", "device self", unit="ns"),
    *columns_of("duration", "backward total", "backward self", unit="ns"),
    *columns_of("duration", "host total", "host self", unit="ns"),
    Column("path", "text"),
)
_MISSING = {
    "operator": "{} no operators. Capture a step with torch.profiler and the CPU among its "
    "activities (integrated: {{profile_with_cpu: true}}).",
    "module": "{} no modules. Capture a step with torch.profiler and Python stacks "
    "(integrated: {{profile_with_module: true}} or with_stack: true).",
}
_NO_KERNELS = "No kernels were recorded, so device time is unknown."
PREFIX = "nn.Module: "
"""Traces of torch write modules with this prefix."""

_Row = tuple[Cell, ...]

UNATTRIBUTED = "unattributed"
"""Names the row of device time that no call launched."""

_DEEPEST = 1_000  # Python's own limit is the same; real models nest a few dozen calls.


def operators(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum the calls of each operator, ordered by device time, then by host time.

    ``self`` excludes nested operators, ``total`` includes them; a total counts recursion once. A
    kernel or copy belongs to the innermost operator that was open on its thread at its launch;
    ``kernels`` counts those. The row `UNATTRIBUTED` has the work that no operator launched: with
    it, ``device self`` adds up to the time of all kernels and copies. ``host self`` adds up to the
    time that threads spent in operators.
    """
    notes: list[str] = []
    found = _read(spans, "operator", ranks, notes)
    if isinstance(found, str):
        return Table("operators", _OPERATOR_COLUMNS, abstained=found)
    rows = _operator_rows(*found)
    return Table("operators", _OPERATOR_COLUMNS, rows, " ".join(notes))


class Paths(NamedTuple):
    """Distinct stacks of names; an outer one comes before those inside it.

    Attributes:
        of: Path of each call.
        parent: Of each path the one around it, `NONE` at the top.
        name: Code of its innermost name.
    """

    of: Int64s
    parent: Int64s
    name: Int64s


@dataclass(frozen=True, eq=False)
class CallTree:
    """Calls of one kind by rank, thread and start, outer ones first.

    Attributes:
        names: Distinct names; ``name`` contains indices into it.
        row: Row of the table.
        threads: Distinct identities of threads, ascending.
        lane: One number per thread of a rank, see `thread_lanes`.
        id: Its number in its rank.
        forward: For a backward operator the number of its forward operator, else `NONE`.
        around: Index of the innermost call that it is nested in, `NONE` at the top.
    """

    names: tuple[str, ...]
    row: Int64s
    threads: Int64s
    rank: Int64s
    lane: Int64s
    name: Int64s
    start_ns: Int64s
    end_ns: Int64s
    id: Int64s
    forward: Int64s
    around: Int64s

    def at(self, lane: Int64s, time_ns: Int64s) -> Int64s:
        """Return the innermost call open on each lane at a moment, else `NONE`."""
        return open_at(self.lane, self.start_ns, self.end_ns, self._holder, lane, time_ns)

    def launching(self, work: DeviceWork, calls: Table) -> Int64s:
        """Return the innermost call open on its thread when each kernel or copy was launched.

        Copies without threads get those of the driver calls in the table ``calls``.
        """
        launch = work.numbers("launch")
        lane = thread_lanes(self.threads, work.rank, work.launching_threads(calls))
        return self.at(np.where(launch == NOT_RECORDED, NONE, lane), launch)

    def self_ns(self) -> Int64s:
        """Return how long each call was the innermost one.

        Time that two overlapping calls of a thread share counts to the later one. So the sum is
        exactly the time in which a call was open, summed over threads.
        """
        return alone(self.lane, self.start_ns, self.end_ns, self._holder)

    def forwards(self) -> Int64s:
        """Return for each call the index of its forward operator, else `NONE`."""
        width = int(self.id.max(initial=0)) + 1
        keys = self.rank * width + self.id
        order = np.argsort(keys, kind="stable")
        wanted = self.rank * width + self.forward
        at = np.searchsorted(keys[order], wanted)
        there = np.append(keys[order], NOT_RECORDED)[at] == wanted
        there &= (self.forward >= 0) & (self.forward < width)
        return np.where(there, np.append(order, NONE)[at], NONE)

    @property
    def too_deep(self) -> str:
        """Why there are no stacks, "" if there are: their size grows as the square of the depth."""
        deep = len(self._levels)
        return f"Calls are nested {deep:,} deep, more than {_DEEPEST:,}." * (deep > _DEEPEST)

    def with_inner(self, values: Int64s) -> Int64s:
        """Return for each call its value and those of all calls inside it."""
        total = values.copy()
        for rows in self._levels[:0:-1]:
            np.add.at(total, self.around[rows], total[rows])
        return total

    def outermost(self) -> Int64s:
        """Return the calls that are not inside one of the same name: recursion counts once."""
        repeated = np.zeros(len(self.name), dtype=bool)
        rows, around = np.arange(len(self.name)), self.around
        while len(rows):
            rows, around = rows[around != NONE], around[around != NONE]
            repeated[rows] |= self.name[rows] == self.name[around]
            around = self.around[around]
        return np.flatnonzero(~repeated)

    def paths(self) -> Paths:
        """Return the stack of names that each call is nested in, each distinct stack once."""
        # The last item stays `NONE`, for calls that nothing encloses.
        of, width, count = np.full(len(self.name) + 1, NONE), len(self.names), 0
        levels: list[Int64s] = []
        for rows in self._levels:
            stacks = (of[self.around[rows]] + 1) * width + self.name[rows]
            distinct = np.unique(stacks)
            of[rows] = np.searchsorted(distinct, stacks) + count
            count += len(distinct)
            levels.append(distinct)
        keys = np.concatenate([np.zeros(0, np.int64), *levels])
        return Paths(of[:-1], keys // width - 1, keys % width)

    @cached_property
    def _levels(self) -> list[Int64s]:
        """The calls at each depth, outer ones first."""
        return rows_by_group(depths(self.around))

    @cached_property
    def _holder(self) -> Int64s:
        """The last call before each that ends no earlier.

        It differs from ``around`` only if a call ends a little later than the one around it.
        """
        return holding(self.around, self.start_ns, self.end_ns)


def _read(
    spans: Spans, kind: str, ranks: Collection[int] | None, notes: list[str]
) -> tuple[CallTree, Table, DeviceWork | None] | str:
    """Return the calls of a kind, their table, and what was launched; or why there are no rows."""
    table = spans.try_table("calls", notes)
    tree = None if table is None else call_tree(table, kind, ranks)
    if table is None or tree is None or not len(tree.name):
        of = "This run has" if ranks is None else f"Ranks {sorted(ranks)} have"
        return " ".join([_MISSING[kind].format(of), *notes])
    if tree.too_deep:
        return " ".join([tree.too_deep, *notes])
    work = device_work(spans, ranks, notes)
    if not work.tables:
        notes.append(_NO_KERNELS)
    return tree, table, work if work.tables else None


def _operator_rows(tree: CallTree, calls: Table, work: DeviceWork | None) -> list[_Row]:
    """Return a row per operator by cost, and one of the work that no operator launched."""
    name, size, outer = tree.name, len(tree.names), tree.outermost()
    seen = np.unique(name)
    host_total = _sums(name[outer], (tree.end_ns - tree.start_ns)[outer], size)
    order = seen[np.argsort(-host_total[seen], kind="stable")]
    device: list[Int64s | None] = [None] * 3
    rest: list[_Row] = []
    if work is not None:
        call = tree.launching(work, calls)
        own = _sums(call, work.duration, len(name))
        total = _sums(name[outer], tree.with_inner(own)[outer], size)
        device = [total, _sums(name, own, size), np.bincount(name[call[call != NONE]], None, size)]
        order = order[np.argsort(-total[order], kind="stable")]
        unlaunched = work.duration[call == NONE]
        ns = int(unlaunched.sum())
        rest = [(UNATTRIBUTED, None, ns, ns, None, None, len(unlaunched))]
    count, host_self = np.bincount(name, None, size), _sums(name, tree.self_ns(), size)
    columns = (count, *device[:2], host_total, host_self, device[2])
    cells = [[None] * len(order) if each is None else each[order].tolist() for each in columns]
    names = [tree.names[code] or None for code in order.tolist()]
    return [*zip(names, *cells, strict=True), *rest]


def _sums(codes: Int64s, values: Int64s, size: int) -> Int64s:
    """Return the sum of the values of each code below ``size``; those of `NONE` do not count."""
    found = np.zeros(size + 1, np.int64)
    np.add.at(found, codes, values)  # `NONE` is the last item.
    return found[:-1]


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
    found = _read(spans, "module", ranks, notes)
    if isinstance(found, str):
        return Table("modules", _MODULE_COLUMNS, abstained=found)
    tree, calls, work = found
    if work is None:
        rows = _module_rows(tree, None)
    else:
        forward, backward = launching_modules(
            tree, call_tree(calls, "operator", ranks), work, calls
        )
        rows = _module_rows(
            tree, [_sums(call, work.duration, len(tree.name)) for call in (forward, backward)]
        )
        rest = int(work.duration[(forward == NONE) & (backward == NONE)].sum())
        rows.append((UNATTRIBUTED, None, rest, rest, *(None,) * 5))
    return Table("modules", _MODULE_COLUMNS, rows, " ".join(notes))


def launching_modules(
    tree: CallTree, operators: CallTree, work: DeviceWork, calls: Table
) -> tuple[Int64s, Int64s]:
    """Return the module that each kernel or copy belongs to by its launch, and by its backward.

    At most one of the two is known, the other is `NONE`; see `modules`.
    """
    forward = tree.launching(work, calls)
    backward = _backward_modules(tree, operators, work, calls)
    backward[forward != NONE] = NONE
    return forward, backward


def _backward_modules(
    tree: CallTree, operators: CallTree, work: DeviceWork, calls: Table
) -> Int64s:
    """Return the module to whose backward each kernel or copy belongs, else `NONE`.

    Of the operators around a launch, the innermost one with a forward operator decides.
    """
    forward = np.append(operators.forwards(), NONE)
    around = np.append(operators.around, NONE)
    operator = operators.launching(work, calls)
    while len(rows := np.flatnonzero((operator != NONE) & (forward[operator] == NONE))):
        operator[rows] = around[operator[rows]]
    found = forward[operator]
    rows = found[found != NONE]
    thread = operators.threads[operators.lane[rows] % max(len(operators.threads), 1)]
    lane = thread_lanes(tree.threads, operators.rank[rows], thread)
    found[found != NONE] = tree.at(lane, operators.start_ns[rows])
    return found


def _module_rows(tree: CallTree, device: Sequence[Int64s] | None) -> list[_Row]:
    """Return a row per path, each followed by those inside it, siblings by cost.

    ``device`` is the device time that each call itself launched, forward and backward.
    """
    paths = tree.paths()
    host = tree.end_ns - tree.start_ns
    of_calls = [host, tree.self_ns()]
    if device is not None:
        both, backward = device[0] + device[1], device[1]
        of_calls = [tree.with_inner(both), both, tree.with_inner(backward), backward, *of_calls]
    columns = [_sums(paths.of, values, len(paths.name)) for values in of_calls]
    cells: list[list[Any]] = [column.tolist() for column in columns]
    if device is None:
        cells = [[None] * len(paths.name)] * 4 + cells
    calls = np.bincount(paths.of).tolist()
    by_cost = np.argsort(np.lexsort((-columns[-2], -columns[0]))).tolist()
    titles = path_titles(tree, paths)
    places: list[tuple[int, ...]] = []
    rows: list[_Row] = []
    stacks = zip(paths.parent.tolist(), paths.name.tolist(), strict=True)
    for at, (above, name) in enumerate(stacks):
        places.append((*(places[above] if above >= 0 else ()), by_cost[at]))
        indented = " " * (len(places[at]) - 1) + tree.names[name].removeprefix(PREFIX)
        rows.append((indented, calls[at], *(column[at] for column in cells), titles[at]))
    return [rows[at] for at in sorted(range(len(rows)), key=places.__getitem__)]


def path_titles(tree: CallTree, paths: Paths) -> list[str]:
    """Return the names of each path joined by dots, the outer ones first."""
    titles: list[str] = []
    for above, name in zip(paths.parent.tolist(), paths.name.tolist(), strict=True):
        own = tree.names[name].removeprefix(PREFIX)
        titles.append(f"{titles[above]}.{own}" if above >= 0 else own)
    return titles


def thread_lanes(threads: Int64s, rank: Int64s, thread: Int64s) -> Int64s:
    """Return one number per thread of a rank, `NONE` for a thread that is not among ``threads``."""
    at = np.searchsorted(threads, thread)
    there = np.append(threads, NOT_RECORDED)[at] == thread
    return np.where(there & (thread != NOT_RECORDED), rank * len(threads) + at, NONE)


def call_tree(table: Table, kind: str, ranks: Collection[int] | None = None) -> CallTree:
    """Return the calls of one kind in a table ``calls``, of some ranks or of all (None).

    A call is nested in the innermost one of its kind and thread that contains it in time.
    """
    rows = _rows_of_kind(table, kind, ranks)
    # One column after the other: that of all calls can be many times as long as these rows.
    rank, start = table.numbers("rank")[rows], table.numbers("start")[rows]
    end = start + table.numbers("duration")[rows]
    threads = np.unique(thread := table.numbers("thread", NOT_RECORDED)[rows])
    lane = rank * len(threads) + np.searchsorted(threads, thread)
    order = nested_order(lane, start, end)
    rows, rank, lane = rows[order], rank[order], lane[order]
    start, end = start[order], end[order]
    name, names = _names(table, rows)
    return CallTree(
        (*names, ""),  # The last name stands for an unknown one.
        rows,
        threads,
        rank,
        lane,
        name,
        start,
        end,
        table.numbers("id", NONE)[rows],
        table.numbers("forward", NONE)[rows],
        enclosing(lane, start, end),
    )


def _rows_of_kind(table: Table, kind: str, ranks: Collection[int] | None) -> Int64s:
    codes, kinds = table.texts("kind")
    keep = codes == (kinds.index(kind) if kind in kinds else len(kinds))
    if ranks is not None:
        keep &= np.isin(table.numbers("rank"), list(ranks))
    return np.flatnonzero(keep)


def _names(table: Table, rows: Int64s) -> tuple[Int64s, Sequence[str]]:
    """Return codes and names of some calls; the code after the last one is an unknown name."""
    codes, names = table.texts("name")
    own = codes[rows]
    return np.where(own < 0, len(names), own), names
