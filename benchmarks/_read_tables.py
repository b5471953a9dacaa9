"""The tables of stages of a large run in memory: alone, and as a report asks for them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import NamedTuple

from _measure import CORE, Bound, Report
from _read_parse import BAND
from _read_spans import complete_table

from lightning_rlprof.analysis.stages import gaps, rank_status, regions, stages, steps
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

__all__ = ["TABLES", "Costs", "bounds", "measure", "report"]

LIMIT_S = 0.1

TABLES: dict[str, Callable[[Spans], Table]] = {
    "stages": stages,
    "stages per rank": partial(stages, per_rank=True),
    "steps": steps,
    "gaps": gaps,
    "regions": regions,
    "rank_status": rank_status,
}
"""Every table that is made of stages."""


@dataclass
class Costs:
    """What the tables took.

    Attributes:
        size: Ranks, steps and stages.
        alone: Seconds by table, as the only one that is asked of a run.
        among: Seconds by table, behind another one of the same run.
        cpu: CPU seconds of both by table.
        again: Each table's second time behind another by its first.
        core: CPU time of the process by wall time.
    """

    size: tuple[int, int, int]
    alone: dict[str, float] = field(default_factory=dict)
    among: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, tuple[float, float]] = field(default_factory=dict)
    again: float = 1.0
    core: float = 1.0

    @property
    def quiet(self) -> bool:
        """Whether both controls are inside of their bands."""
        return BAND[0] <= self.again <= BAND[1] and self.core >= CORE


def measure(size: tuple[int, int, int], rounds: int) -> Costs:
    """Make each table of a fresh run, then twice more, in turns."""
    spans, costs = complete_table(*size), Costs(size)
    found: dict[str, list[list[_Took]]] = {name: [[], [], []] for name in TABLES}
    whole = _Took.now()
    for _ in range(rounds):
        for name, table in TABLES.items():
            own = replace(spans)
            for kept in found[name]:
                start = _Took.now()
                made = table(own)
                kept.append(_Took.now() - start)
                if made.abstained is not None:
                    raise AssertionError(f"{name}: {made.abstained}")
    whole = _Took.now() - whole
    costs.core = whole.cpu / whole.wall
    for name, (alone, among, _) in found.items():
        costs.alone[name] = median(took.wall for took in alone)
        costs.among[name] = median(took.wall for took in among)
        costs.cpu[name] = (
            median(took.cpu for took in alone),
            median(took.cpu for took in among),
        )
    pairs = (pair for kept in found.values() for pair in zip(*kept[1:], strict=True))
    costs.again = median(second.wall / first.wall for first, second in pairs)
    return costs


class _Took(NamedTuple):
    """Seconds by the clock, and of this process on all cores."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "_Took":
        """Read both clocks."""
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: "_Took") -> "_Took":
        return _Took(self.wall - other.wall, self.cpu - other.cpu)


def bounds(costs: Costs) -> list[Bound]:
    """Return what a table may take."""
    return [
        *(Bound(f"{name}", took, LIMIT_S, "s") for name, took in costs.among.items()),
        *(Bound(f"{name}, alone", took, LIMIT_S, "s") for name, took in costs.alone.items()),
    ]


def report(costs: Costs) -> Report:
    """Lay out what was measured."""
    ranks, steps, stages = costs.size
    rows = [
        [name, *(round(each * 1e3) for each in (costs.alone[name], costs.among[name], *cpu))]
        for name, cpu in costs.cpu.items()
    ]
    control = (
        f"again by first {costs.again:.2f} (band {BAND[0]} to {BAND[1]}); "
        f"the process had {costs.core:.0%} of a core (at least {CORE:.0%})"
    )
    facts = [
        f"{ranks} ranks x {steps:,} steps x {stages} stages: {ranks * steps * stages:,} stages."
    ]
    heads = ["table", "alone, ms", "behind another, ms", "alone, CPU ms", "behind, CPU ms"]
    return Report("read, tables", heads, rows, bounds(costs), control, costs.quiet, facts)
