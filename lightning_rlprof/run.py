"""What `lightning_rlprof.load` returns: a run with every analysis as a method, shown as tables."""

import html
from collections.abc import Callable, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING

from lightning_rlprof.analysis.catalog import CATALOG, Analysis
from lightning_rlprof.analysis.comparison.compare import compare
from lightning_rlprof.analysis.comparison.trace_diff import trace_diff
from lightning_rlprof.loaders.join_ranks import as_one
from lightning_rlprof.loaders.rank_names import by_cause
from lightning_rlprof.report.notebook import Plots, ReportFrame, summary_html
from lightning_rlprof.report.summary import Summary, lead_tables, summary
from lightning_rlprof.store.duckdb_tables import sql_columns
from lightning_rlprof.store.open_run import open_run
from lightning_rlprof.store.run_store import KERNEL_NAMES, KERNELS, ask, described, in_memory
from lightning_rlprof.store.sql import Limits
from lightning_rlprof.tables.spans import CORE, Spans, apart
from lightning_rlprof.tables.table import Table


class _Method:
    """An analysis as a method, whose module is imported when it is first asked for."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis

    def __get__(self, run: object, owner: type) -> object:
        function = self._analysis.run
        return function if run is None else MethodType(function, run)


if TYPE_CHECKING:  # The module is written by docs/generate_methods.py.
    from lightning_rlprof.analysis.methods import Methods
else:
    Methods = type("Methods", (), {each.name: _Method(each) for each in CATALOG})


class Run(Methods, Spans):
    """`Spans` with a method for each analysis of `CATALOG`, which returns a `Table`.

    Example::

        >>> run = load("profiler_data")                       # doctest: +SKIP
        >>> run.stages(per_rank=True).to_pandas()             # doctest: +SKIP
    """

    compare = compare
    trace_diff = trace_diff

    def __repr__(self) -> str:
        """Return its name and its size, without the arrays."""
        return f"Run({self.path.name!r}, {len(self):,} spans)"

    @classmethod
    def of(cls, spans: Spans) -> "Run":
        """Return a run with the spans, tables and notes of ``spans``; nothing is copied."""
        run = cls.__new__(cls)
        vars(run).update(vars(spans))
        return run

    @property
    def plot(self) -> Plots:
        """Charts of this run with matplotlib, such as ``run.plot.steps()``."""
        return Plots(self)

    def table(self, name: str, rank: int | None = None) -> Table:
        """Read a table as `Spans.table` does, once: it stays in memory with this object."""
        if rank is not None and apart(self, name) != (None,):
            return super().table(name, rank)
        if name not in self._read_tables:
            self._read_tables[name] = super().table(name)
        return self._read_tables[name]

    @cached_property
    def _read_tables(self) -> dict[str, Table]:
        """Tables that were asked for so far."""
        return {}

    def sql(
        self, query: str, *, memory_gb: float | None = None, timeout_s: float | None = None
    ) -> Table:
        """Return what one SELECT says of the tables of this run; see ``docs/sql.md``.

        Tables that a query named stay in memory with this object. DuckDB reads the columns where
        they lie and writes nothing.

        Args:
            query: One SELECT.
            memory_gb: Most memory, in units of 10^9 bytes; None for 2, or half of a machine's that
                has less than 4.
            timeout_s: Most seconds; None for any time.

        Raises:
            TraceError: The query is wrong, would do more than read, or needs more than its limits;
                the text is one line.
        """
        names, limits = (*CORE, *self.tables), Limits(memory_gb, timeout_s)
        return ask(query, names, lambda name: in_memory(self.table(name)), limits=limits)

    def describe(self) -> Table:
        """Return every column of the SQL tables that have data: its unit, and what it means.

        Reads the tables of profilers, which then stay in memory.
        """
        own = [self.table(name) for name in CORE]
        more = [self.try_table(name, []) for name in sorted(self.tables)]
        tables = [*own, *(table for table in more if table is not None)]
        columns = {each.name: [one.name for one in sql_columns(each.columns)] for each in tables}
        if KERNELS in columns:
            columns[KERNELS] += KERNEL_NAMES
        return described(columns)

    def summary(self) -> Summary:
        """Return the first screen as facts; ``print`` shows it as the end of a training does.

        Tables of profilers are left out, since reading them can take minutes.

        Example::

            >>> print(run.summary())                          # doctest: +SKIP
        """
        return summary(self)

    def report(self) -> ReportFrame:
        """Return the HTML report, which a notebook shows in a frame; ``report().page`` is its text.

        Example::

            >>> run.report()                                  # doctest: +SKIP
        """
        from lightning_rlprof.report.html.page import render_report, report_tables

        return ReportFrame(render_report(self, report_tables(self)))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: its summary, first tables, and what is doubtful."""
        causes = by_cause((each.rank, each.text) for each in self.warnings)
        doubts = "".join(f"<li>{html.escape(str(each))}</li>" for each in causes)
        tables = "".join(table._repr_html_() for table in lead_tables(self))
        return f"{summary_html(self, self.summary())}{tables}<ul>{doubts}</ul>"


def load(
    path: str | Path | Sequence[str | Path],
    *,
    progress: Callable[[int, int], None] | None = None,
    cache: bool = False,
) -> Run:
    """Read a run or a trace, out of its cache where ``rlprof ingest`` left a good one.

    Takes what `lightning_rlprof.loaders.load.load` takes, and a directory with a trace per rank.

    Args:
        path: What to read. Several are read as one run, aligned by their wall clocks: a trainer and
            a rollout server that were recorded apart. Their ranks are numbered one after another.
        progress: Called after each file with (files read, files in all).
        cache: Write a cache of a large external trace; reading writes nothing else.

    Raises:
        TraceError: Nothing there can be read; the text says why.
    """
    if not isinstance(path, str | PathLike):
        return Run.of(as_one([open_run(each, progress=progress, cache=cache) for each in path]))
    return Run.of(open_run(path, progress=progress, cache=cache))
