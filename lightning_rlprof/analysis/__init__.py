"""Pure functions from `Spans` to a `Table`; `ALL` holds those of one run, in reading order."""

from collections.abc import Callable, Mapping

from lightning_rlprof.analysis.beside import background, regions
from lightning_rlprof.analysis.compare import compare
from lightning_rlprof.analysis.coverage import coverage
from lightning_rlprof.analysis.device import device
from lightning_rlprof.analysis.gaps import gaps
from lightning_rlprof.analysis.headline import headline
from lightning_rlprof.analysis.ledger import ledger
from lightning_rlprof.analysis.memory import memory
from lightning_rlprof.analysis.ranks import ranks
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.analysis.steps import steps
from lightning_rlprof.analysis.stragglers import stragglers
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Table

__all__ = [
    "ALL",
    "DEEP",
    "NAMED",
    "background",
    "compare",
    "coverage",
    "device",
    "gaps",
    "headline",
    "ledger",
    "memory",
    "ranks",
    "regions",
    "stages",
    "steps",
    "stragglers",
]

ALL: tuple[Callable[[Spans], Table], ...] = (
    ledger,
    stragglers,
    stages,
    device,
    background,
    regions,
    gaps,
    ranks,
    steps,
    memory,
    coverage,
)
"""Every analysis of one run; each takes `Spans` and returns a `Table` named after it."""

DEEP: tuple[Callable[[Spans], Table], ...] = ()
"""Analyses of what device tools recorded; each is asked for by name, as they read large tables."""

NAMED: Mapping[str, Callable[[Spans], Table]] = {each.__name__: each for each in (*ALL, *DEEP)}
"""All of them by name."""
