"""The icicle of the HTML report: device time by stage or annotation, module, operator and kernel.

Numbered layers of one kind are one box. Without device work it is the host time of operators.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_rlprof.analysis.device.work import NO_STAGE, NOT_RECORDED, DeviceWork
from lightning_rlprof.analysis.operators import (
    PREFIX,
    CallTree,
    call_tree,
    launching_modules,
    thread_lanes,
)
from lightning_rlprof.tables.arrays import Int64s, distinct_tuples
from lightning_rlprof.tables.intervals import NONE
from lightning_rlprof.tables.spans import Spans, apart
from lightning_rlprof.tables.table import Table

_MAX_BOXES = 1_500
_AT_ONCE = 2**18  # Rows that are summed up at once: temporary columns of all would be large.
_NUMBER = re.compile(r"_\d+$")  # torch numbers the modules of a class.
_RANGE_TAIL = re.compile(r"[_#]\d.*")  # Frameworks write sizes and steps into annotations.
_STEP = "ProfilerStep"

_Step = tuple[str, str]
"""One level of a stack: the kind of its box, and the name."""


@dataclass
class _Box:
    kind: str
    name: str
    ns: int = 0
    count: int = 0
    members: set[int] = field(default_factory=set)
    inner: "dict[_Step, _Box]" = field(default_factory=dict)


class Stacks:
    """What was open when each kernel or copy was launched; without work, at calls of operators.

    The calls themselves are not kept: there can be millions.

    Attributes:
        ns: Duration of each row of work, or how long each operator was the innermost one.
        operator: Index of each row's innermost operator in what follows, `NONE` without one.
        operators: The operators around one another, as steps of the icicle.
        operator_names: The innermost of them.
        module: The same of modules; kernels of a backward count to their module.
        modules: Those around one another, without their numbers.
        module_names: All of them, with their numbers.
    """

    def __init__(self, spans: Spans, work: DeviceWork) -> None:
        operators, modules = _Paths("o"), _Paths("m")
        calls = None if len(work) else spans.try_table("calls", [])
        if calls is None:
            self.ns = work.duration
            self.operator, self.module = np.full((2, len(work)), NONE)
            for rows, own, launched in _by_rank(spans, work):
                self.operator[rows], self.module[rows] = _launching(
                    own, launched, operators, modules
                )
        else:
            self.ns, self.operator, self.module = _innermost(calls, operators, modules)
        self.operators, self.modules = [*operators.steps, []], [*modules.steps, []]
        self.operator_names = [stack[-1][0][1] for stack in operators.steps]
        self.module_names = modules.titles


class _Paths:
    """Distinct stacks of calls of one kind, of all ranks, an outer one before those inside it.

    Attributes:
        steps: Those of each, with the number of the path that each step was in before layers of
            one kind became one.
        titles: The full names of each, joined by dots.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._place = kind, dict[tuple[int, str], int]()
        self.steps: list[list[tuple[_Step, int]]] = []
        self.titles: list[str] = []

    def of(self, tree: CallTree, call: Int64s) -> Int64s:
        """Return the path of some calls, `NONE` for `NONE`."""
        paths = tree.paths()
        numbers: list[int] = []
        for above, name in zip(paths.parent.tolist(), paths.name.tolist(), strict=True):
            outer = numbers[above] if above >= 0 else NONE
            numbers.append(self._number(outer, tree.names[name]))
        return np.array([*numbers, NONE])[np.where(call == NONE, NONE, paths.of[call])]

    def _number(self, outer: int, name: str) -> int:
        number = self._place.setdefault((outer, name), len(self.steps))
        if number == len(self.steps):
            own = name.removeprefix(PREFIX)
            short = _NUMBER.sub("", own) if self._kind == "m" else own
            around = self.steps[outer] if outer >= 0 else []
            self.steps.append([*around, ((self._kind, short), number)])
            self.titles.append(f"{self.titles[outer]}.{own}" if outer >= 0 else own)
        return number


def _by_rank(
    spans: Spans, work: DeviceWork
) -> Iterator[tuple[Int64s | slice, Table | None, DeviceWork]]:
    """Yield rows of the work, its calls and itself; of one rank at a time if they lie apart.

    The stacks of all ranks at once would take many times the memory.
    """
    for rank in apart(spans, "calls"):
        calls = spans.try_table("calls", [], rank)
        if rank is None:
            yield slice(None), calls, work
        elif calls is not None:
            kernels, copies = (spans.try_table(name, [], rank) for name in ("kernels", "memcpy"))
            yield np.flatnonzero(work.rank == rank), calls, DeviceWork(kernels, copies)


def _launching(
    calls: Table | None, work: DeviceWork, operators: _Paths, modules: _Paths
) -> tuple[Int64s, Int64s]:
    """Return the paths of operators and of modules in which each row of the work was launched."""
    operator = module = np.full(len(work), NONE)
    if calls is None:
        return operator, module
    tree, layers = (_tree(calls, kind) for kind in ("operator", "module"))
    if tree is not None:
        operator = operators.of(tree, tree.launching(work, calls))
    if layers is not None:
        own = call_tree(calls, "operator") if tree is None else tree
        module = modules.of(layers, np.maximum(*launching_modules(layers, own, work, calls)))
    return operator, module


def _innermost(calls: Table, operators: _Paths, modules: _Paths) -> tuple[Int64s, Int64s, Int64s]:
    """Return for each operator how long it was the innermost one, its path and its module's."""
    tree, layers = (_tree(calls, kind) for kind in ("operator", "module"))
    if tree is None:
        return (np.zeros(0, np.int64),) * 3
    module = np.full(len(tree.name), NONE)
    if layers is not None:
        thread = tree.threads[tree.lane % max(len(tree.threads), 1)]
        lanes = thread_lanes(layers.threads, tree.rank, thread)
        module = modules.of(layers, layers.at(lanes, tree.start_ns))
    return tree.self_ns(), operators.of(tree, np.arange(len(tree.name))), module


def icicle(
    work: DeviceWork, stacks: Stacks, names: Sequence[str], classes: Sequence[int]
) -> list[list[Any]]:
    """Return the boxes, outer ones first: parent, kind, name, ns, count, members, class.

    Kinds are ``s`` (stage), ``r`` (annotation), ``m`` (module), ``o`` (operator), ``k`` (kernel),
    ``u`` (launch not recorded) and the first box, ``a``, of all. A box that is narrower than one of
    `_MAX_BOXES` is left out, so that those of a parent may not fill it.

    Args:
        work: Kernels and copies.
        stacks: What launched them.
        names: Short name of each code of ``work.named``, then that of what has no name.
        classes: Class of each of these names.
    """
    root = _Box("a", "all kernels and copies" if len(work) else "all operators")
    head = kernel = np.zeros(len(stacks.module), np.int64)
    heads: list[list[_Step]] = [[]]
    tails: list[list[_Step]] = [[]]
    if len(work):
        head, heads = _heads(work)
        kernel, tails = work.named[0] % len(names), [[("k", name)] for name in names]
    columns = head, stacks.module, stacks.operator, kernel
    for first in range(0, len(stacks.ns), _AT_ONCE):
        rows = slice(first, first + _AT_ONCE)
        keys, place = distinct_tuples(np.stack([column[rows] for column in columns]))
        total = np.zeros(keys.shape[1], np.int64)
        np.add.at(total, place, stacks.ns[rows])
        counts = np.bincount(place, minlength=keys.shape[1]).tolist()
        for key, own, count in zip(keys.T.tolist(), total.tolist(), counts, strict=True):
            steps = [(each, 0) for each in heads[key[0]]]
            steps += stacks.modules[key[1]] + stacks.operators[key[2]]
            _add(root, [*steps, *((each, 0) for each in tails[key[3]])], own, count)
    return _rows(root, dict(zip(names, classes, strict=True)))


def _tree(calls: Table, kind: str) -> CallTree | None:
    tree = call_tree(calls, kind)
    return tree if len(tree.name) and not tree.too_deep else None


def _heads(work: DeviceWork) -> tuple[Int64s, list[list[_Step]]]:
    """Return a code per row and what it stands for: its stage, else its annotation, else nothing.

    Work whose launch was not recorded has a box of its own if other work has one.
    """
    stage, stages = work.stages()
    code, ranges = work.ranges
    shown = [
        "" if text.startswith(_STEP) else _RANGE_TAIL.sub("", text.strip("# ")) for text in ranges
    ]
    steps: list[list[_Step]] = [[], [("u", "launch not recorded")]]
    steps += [[("s", name)] for name in stages] + [[("r", text)] if text else [] for text in shown]
    unlaunched = work.numbers("launch") == NOT_RECORDED
    found = np.where(code >= 0, code + 2 + len(stages), 0)
    found = np.where(stage != NO_STAGE, stage + 2, found)
    if not unlaunched.all():
        found[unlaunched & (found == 0)] = 1
    return found, steps


def _add(root: _Box, steps: Sequence[tuple[_Step, int]], ns: int, count: int) -> None:
    box = root
    box.ns, box.count = box.ns + ns, box.count + count
    for step, member in steps:
        box = box.inner.setdefault(step, _Box(*step))
        box.ns, box.count = box.ns + ns, box.count + count
        box.members.add(member)


def _rows(root: _Box, of_class: dict[str, int]) -> list[list[Any]]:
    """Return the largest boxes; what is in a box is never larger, so none loses its parent."""
    smallest = max(1, root.ns // _MAX_BOXES)
    found: list[tuple[int, int, _Box]] = []  # Its place among those before it, depth, and the box.
    waiting = [(0, -1, root)]
    while waiting:
        depth, parent, box = waiting.pop()
        if box.ns < smallest:
            continue
        found.append((depth, parent, box))
        waiting += [(depth + 1, len(found) - 1, each) for each in box.inner.values()]
    order = sorted(range(len(found)), key=lambda at: (-found[at][2].ns, found[at][0]))
    order = order[:_MAX_BOXES]
    place = {at: number for number, at in enumerate(order)} | {-1: -1}
    rows = []
    for at in order:
        _, parent, box = found[at]
        around = len(found[parent][2].members) if parent >= 0 else 1
        own = len(box.members)
        members = own // around if around and own % around == 0 else own
        cls = of_class[box.name] if box.kind == "k" else NONE
        rows.append([place[parent], box.kind, box.name, box.ns, box.count, members, cls])
    return rows
