"""Pure functions from `Spans` to a `Table`; `ALL` holds those of one run, in reading order."""

from collections.abc import Callable, Mapping

from lightning_rlprof.analysis.beside import background, regions
from lightning_rlprof.analysis.breakdown import breakdown
from lightning_rlprof.analysis.communication import communication
from lightning_rlprof.analysis.compare import compare
from lightning_rlprof.analysis.counters import counters
from lightning_rlprof.analysis.coverage import coverage
from lightning_rlprof.analysis.device import device
from lightning_rlprof.analysis.device_path import device_path
from lightning_rlprof.analysis.findings import findings
from lightning_rlprof.analysis.gaps import gaps
from lightning_rlprof.analysis.headline import headline
from lightning_rlprof.analysis.idle import idle
from lightning_rlprof.analysis.integrity import integrity
from lightning_rlprof.analysis.kernels import kernels
from lightning_rlprof.analysis.launches import launches
from lightning_rlprof.analysis.ledger import ledger
from lightning_rlprof.analysis.matmuls import matmuls
from lightning_rlprof.analysis.memory import memory
from lightning_rlprof.analysis.memory_timeline import memory_timeline
from lightning_rlprof.analysis.modules import modules
from lightning_rlprof.analysis.operators import operators
from lightning_rlprof.analysis.overlap import overlap
from lightning_rlprof.analysis.path import path
from lightning_rlprof.analysis.ranks import ranks
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.analysis.steps import steps
from lightning_rlprof.analysis.stragglers import stragglers
from lightning_rlprof.analysis.throughput import throughput
from lightning_rlprof.analysis.trace_diff import trace_diff
from lightning_rlprof.analysis.whatif import whatif
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Table

__all__ = [
    "ALL",
    "DEEP",
    "NAMED",
    "REPORTED",
    "background",
    "breakdown",
    "communication",
    "compare",
    "counters",
    "coverage",
    "device",
    "device_path",
    "findings",
    "gaps",
    "headline",
    "idle",
    "integrity",
    "kernels",
    "launches",
    "ledger",
    "matmuls",
    "memory",
    "memory_timeline",
    "modules",
    "operators",
    "overlap",
    "path",
    "ranks",
    "regions",
    "stages",
    "steps",
    "stragglers",
    "throughput",
    "trace_diff",
    "whatif",
]

ALL: tuple[Callable[[Spans], Table], ...] = (
    integrity,
    findings,
    ledger,
    stragglers,
    path,
    whatif,
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

DEEP: tuple[Callable[[Spans], Table], ...] = (
    breakdown,
    idle,
    overlap,
    device_path,
    kernels,
    launches,
    operators,
    matmuls,
    modules,
    communication,
    memory_timeline,
    throughput,
    counters,
)
"""Analyses of what device tools recorded; each is asked for by name, as they read large tables."""

REPORTED: tuple[Callable[[Spans], Table], ...] = (*ALL, breakdown, idle, overlap, communication)
"""Those that the report shows, where they have something to tell."""

NAMED: Mapping[str, Callable[[Spans], Table]] = {each.__name__: each for each in (*ALL, *DEEP)}
"""All of them by name."""
