"""What `lightning_rlprof.load` returns: a run with every analysis as a method, shown as tables."""

import html
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from pathlib import Path

from lightning_rlprof import analysis
from lightning_rlprof.store.open_run import open_run
from lightning_rlprof.store.run_store import ask
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table


class Run(Spans):
    """`Spans` with the analyses as methods; each returns a `lightning_rlprof.tables.table.Table`.

    Example::

        >>> run = load("profiler_data")                       # doctest: +SKIP
        >>> run.stages(per_rank=True).to_pandas()             # doctest: +SKIP
    """

    background = analysis.background
    breakdown = analysis.breakdown
    communication = analysis.communication
    compare = analysis.compare
    counter_statistics = analysis.counters
    coverage = analysis.coverage
    critical_path = analysis.path
    device = analysis.device
    device_path = analysis.device_path
    findings = analysis.findings
    gaps = analysis.gaps
    headline = analysis.headline
    idle = analysis.idle
    integrity = analysis.integrity
    kernels = analysis.kernels
    launches = analysis.launches
    ledger = analysis.ledger
    matmuls = analysis.matmuls
    memory = analysis.memory
    memory_timeline = analysis.memory_timeline
    modules = analysis.modules
    operators = analysis.operators
    overlap = analysis.overlap
    regions = analysis.regions
    slowest_ranks = analysis.ranks
    stages = analysis.stages
    steps = analysis.steps
    stragglers = analysis.stragglers
    throughput = analysis.throughput
    trace_diff = analysis.trace_diff
    whatif = analysis.whatif

    def table(self, name: str) -> Table:
        """Read a table as `Spans.table` does, once: it stays in memory with this object."""
        if name not in self._read_tables:
            self._read_tables[name] = super().table(name)
        return self._read_tables[name]

    @cached_property
    def _read_tables(self) -> dict[str, Table]:
        """Tables that were asked for so far."""
        return {}

    def sql(self, query: str) -> Table:
        """Return what one SELECT says of the tables of this run; see ``docs/store.md``.

        Tables that a query named stay in memory with this object. DuckDB reads the columns where
        they lie and writes nothing.

        Raises:
            TraceError: The query is wrong or would do more than read; the text is one line.
        """
        return ask(self, query, self.table)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the headline, the stages, and what is doubtful."""
        whose = ("" if each.rank is None else f"rank {each.rank}: " for each in self.problems)
        texts = map(str.__add__, whose, (each.text for each in self.problems))
        doubts = "".join(f"<li>{html.escape(text)}</li>" for text in texts)
        title = f"<p><strong>{html.escape(self.headline())}</strong></p>"
        return f"{title}{self.stages()._repr_html_()}<ul>{doubts}</ul>"


def load(
    path: str | Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    leave: bool = False,
) -> Run:
    """Read a run or a trace, out of its cache where ``rlprof ingest`` left a good one.

    Takes what `lightning_rlprof.loaders.load.load` takes, and a directory with a trace per rank.

    Args:
        path: What to read.
        progress: Called after each file with (files read, files in all).
        leave: Leave a cache of a large trace of another tool; reading writes nothing else.

    Raises:
        TraceError: Nothing there can be read; the text says why.
    """
    spans = open_run(path, progress=progress, leave=leave)
    return Run(**{each.name: getattr(spans, each.name) for each in fields(Spans)})
