"""The icicle of the HTML report: device time by stage or annotation, module, operator and kernel.

Numbered layers of one kind are one box. Without device work it is the host time of operators.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_rlprof.analysis.device.work import NO_STAGE, NOT_RECORDED, DeviceWork
from lightning_rlprof.analysis.operators import (
    PREFIX,
    CallTree,
    call_tree,
    launching_modules,
    path_titles,
    thread_lanes,
)
from lightning_rlprof.tables.arrays import Int64s, distinct_tuples
from lightning_rlprof.tables.intervals import NONE
from lightning_rlprof.tables.table import Table

_MAX_BOXES = 1_500
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


class Launchers:
    """Which operator and which module launched each kernel or copy, if calls were recorded.

    Attributes:
        operators: All calls of operators.
        modules: All calls of modules.
        operator: Index into ``operators`` per row of work, `NONE` without.
        module: The same of ``modules``, forward or backward.
        path: Index into ``titles`` per call of a module.
        titles: The names of modules around one another, joined by dots.
    """

    def __init__(self, calls: Table | None, work: DeviceWork) -> None:
        self.operators, self.modules = (
            None if calls is None else _tree(calls, kind) for kind in ("operator", "module")
        )
        self.operator = self.module = np.full(len(work), NONE)
        self.path, self.titles = np.zeros(0, np.int64), list[str]()
        if calls is not None and self.operators is not None:
            self.operator = self.operators.launching(work, calls)
        if calls is not None and self.modules is not None:
            operators = call_tree(calls, "operator") if self.operators is None else self.operators
            self.module = np.maximum(*launching_modules(self.modules, operators, work, calls))
            paths = self.modules.paths()
            self.path, self.titles = paths.of, path_titles(self.modules, paths)

    def host_modules(self) -> Int64s:
        """Return the module in which each operator was called, `NONE` without."""
        operators, modules = self.operators, self.modules
        if operators is None or modules is None:
            return np.full(0 if operators is None else len(operators.name), NONE)
        thread = operators.threads[operators.lane % max(len(operators.threads), 1)]
        lanes = thread_lanes(modules.threads, operators.rank, thread)
        return modules.at(lanes, operators.start_ns)


def icicle(
    work: DeviceWork, launchers: Launchers, names: Sequence[str], classes: Sequence[int]
) -> list[list[Any]]:
    """Return the boxes, outer ones first: parent, kind, name, ns, count, members, class.

    Kinds are ``s`` (stage), ``r`` (annotation), ``m`` (module), ``o`` (operator), ``k`` (kernel),
    ``u`` (launch not recorded) and the first box, ``a``, of all. A box that is narrower than one of
    `_MAX_BOXES` is left out, so that those of a parent may not fill it.

    Args:
        work: Kernels and copies.
        launchers: What launched them.
        names: Short name of each code of ``work.named``, then that of what has no name.
        classes: Class of each of these names.
    """
    root = _Box("a", "all kernels and copies" if len(work) else "all operators")
    of_class = dict(zip(names, classes, strict=True))
    operators, of_operator = _levels(launchers.operators, "o")
    modules, of_module = _levels(launchers.modules, "m")
    heads: list[list[_Step]] = [[]]
    tails: list[list[_Step]] = [[]]
    if len(work):
        head, heads = _heads(work)
        kernel = work.named[0] % len(names)
        tails = [[("k", name)] for name in names]
        of_call = of_operator[launchers.operator], of_module[launchers.module]
        ns = work.duration
    else:
        of_call = of_operator[:-1], of_module[launchers.host_modules()]
        head = kernel = np.zeros(len(of_call[0]), np.int64)
        ns = np.zeros(0, np.int64)
        if launchers.operators is not None:
            ns = launchers.operators.self_ns()
    keys, place = distinct_tuples(np.stack([head, of_call[1], of_call[0], kernel]))
    total = np.zeros(keys.shape[1], np.int64)
    np.add.at(total, place, ns)
    counts = np.bincount(place, minlength=keys.shape[1]).tolist()
    for (at, module, operator, name), own, count in zip(
        keys.T.tolist(), total.tolist(), counts, strict=True
    ):
        steps = [(each, 0) for each in heads[at]]
        steps += modules[module] + operators[operator] + [(each, 0) for each in tails[name]]
        _add(root, steps, own, count)
    return _rows(root, of_class)


def _tree(calls: Table, kind: str) -> CallTree | None:
    tree = call_tree(calls, kind)
    return tree if len(tree.name) and not tree.too_deep else None


def _levels(tree: CallTree | None, kind: str) -> tuple[list[list[tuple[_Step, int]]], Int64s]:
    """Return each stack of names as steps with the number of the path, and that of each call.

    The last one of both stands for no call. Calls that only pass on have a box of their own.
    """
    if tree is None:
        return [[]], np.zeros(1, np.int64)
    paths = tree.paths()
    titles = [name.removeprefix(PREFIX) for name in tree.names]
    if kind == "m":
        titles = [_NUMBER.sub("", title) for title in titles]
    found: list[list[tuple[_Step, int]]] = []
    for number, (above, name) in enumerate(
        zip(paths.parent.tolist(), paths.name.tolist(), strict=True)
    ):
        outer = found[above] if above >= 0 else []
        found.append([*outer, ((kind, titles[name]), number + 1)])
    return [*found, []], np.append(paths.of, len(found))


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
