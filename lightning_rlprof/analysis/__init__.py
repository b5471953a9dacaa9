"""Pure functions from `Spans` to a `Table`; `ALL` holds those of one run, in reading order."""

from collections.abc import Callable, Mapping

from lightning_rlprof.analysis.collectives import communication
from lightning_rlprof.analysis.comparison.compare import compare
from lightning_rlprof.analysis.comparison.trace_diff import trace_diff
from lightning_rlprof.analysis.critical_path.critical_path import path
from lightning_rlprof.analysis.device.device_counters import counters
from lightning_rlprof.analysis.device.device_critical_path import device_path
from lightning_rlprof.analysis.device.kernels import kernels
from lightning_rlprof.analysis.device.launches import launches
from lightning_rlprof.analysis.device.utilization import breakdown, idle, overlap
from lightning_rlprof.analysis.efficiency.matmuls import matmuls
from lightning_rlprof.analysis.efficiency.throughput import throughput
from lightning_rlprof.analysis.findings.data_quality import integrity
from lightning_rlprof.analysis.findings.findings import findings
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.analysis.memory import memory, memory_timeline
from lightning_rlprof.analysis.operators.costs import modules, operators
from lightning_rlprof.analysis.stages.overviews import (
    background,
    coverage,
    device,
    ranks,
    regions,
    steps,
)
from lightning_rlprof.analysis.stages.stage_times import headline, stages
from lightning_rlprof.analysis.stages.untraced_gaps import gaps
from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.analysis.whatif.whatif import whatif
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

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
