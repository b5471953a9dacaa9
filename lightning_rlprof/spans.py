"""All spans of a run as columns on one time axis, with what is known to be missing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import TraceError
from lightning_rlprof.model import KINDS, Header, Kind, Number, Span

if TYPE_CHECKING:
    from lightning_rlprof.table import Table

__all__ = ["NO_PARENT", "Counter", "Int64s", "Problem", "RankNote", "Spans", "Thread"]

Int64s = npt.NDArray[np.int64]
"""An array of 64-bit integers."""

NO_PARENT = -1
"""Stands in ``Spans.parent`` where a span has none; ids are never negative."""


class Thread(NamedTuple):
    """One thread of one rank; ``Spans.thread`` holds indices into ``Spans.threads``."""

    rank: int
    ident: int
    name: str


class RankNote(NamedTuple):
    """Something that a rank, or the loader (rank None), has to say; its time is on the axis."""

    rank: int | None
    time_ns: int
    level: str
    text: str


class Problem(NamedTuple):
    """What is missing or doubtful in a run; rank None means the whole run."""

    rank: int | None
    text: str


class Counter(NamedTuple):
    """The spans that carry one counter, ascending, and their values; integers stay exact."""

    rows: Int64s
    values: npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Spans:
    """A run in memory: one row per span, sorted by rank, start and id.

    Times are integer nanoseconds since the first event of the run. Iterating yields `Span`; the
    columns are for everything that must be fast.

    Attributes:
        path: What was loaded.
        names: Distinct names; ``name`` holds indices into it.
        threads: Distinct threads; ``thread`` holds indices into it.
        name: Index into ``names`` per span.
        kind: Index into `lightning_rlprof.model.KINDS` per span.
        rank: Global rank per span.
        step: RL step per span, 0 before training.
        start_ns: Start on the run's axis.
        end_ns: End on the run's axis, never before the start.
        thread: Index into ``threads`` per span.
        id: Number of the span in its rank.
        parent: Id of the enclosing span in the same rank, or `NO_PARENT`.
        counters: Counters by name.
        headers: Headers by rank, ascending.
        statuses: How each rank ended: ``finished``, a reason, or None when its file just stops.
        notes: What ranks and the loader say, by time.
        problems: What is missing or doubtful.
        unix_ns: Wall-clock time of zero on the axis.
        tables: What else the files hold, by name; a table is read when it is asked for.
        wall_off: How far a rank's wall clock was ahead of that of ``unix_ns`` when it said a time;
            only ranks of which that is known.
    """

    path: Path
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    name: Int64s
    kind: Int64s
    rank: Int64s
    step: Int64s
    start_ns: Int64s
    end_ns: Int64s
    thread: Int64s
    id: Int64s
    parent: Int64s
    counters: Mapping[str, Counter] = field(default_factory=dict)
    headers: Mapping[int, Header] = field(default_factory=dict)
    statuses: Mapping[int, str | None] = field(default_factory=dict)
    notes: tuple[RankNote, ...] = ()
    problems: tuple[Problem, ...] = ()
    unix_ns: int = 0
    tables: "Mapping[str, Callable[[], Table]]" = field(default_factory=dict)
    wall_off: Mapping[int, Callable[[int], int]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of spans."""
        return len(self.start_ns)

    def __iter__(self) -> Iterator[Span]:
        """Yield every span as a `Span`; convenient, and slow beyond some ten thousand."""
        return (self.span(row) for row in range(len(self)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that were read, ascending; a rank without spans counts."""
        return tuple(self.headers)

    @property
    def duration_ns(self) -> Int64s:
        """Length of every span."""
        return self.end_ns - self.start_ns

    def later(self, rank: int | None, unix_ns: int) -> int:
        """Return the time on the axis when a rank's wall clock said ``unix_ns``."""
        off = self.wall_off.get(-1 if rank is None else rank)
        return unix_ns - self.unix_ns - (0 if off is None else off(unix_ns))

    def table(self, name: str) -> "Table":
        """Read a table: ``spans``, ``headers``, ``notes``, ``problems``, or one of a device tool.

        ``load(path).table("kernels")``. One of a device tool is read anew at every call.

        Raises:
            TraceError: The files hold no such table.
        """
        from lightning_rlprof.store.rows import core_tables

        own = core_tables(self)
        if name in own:
            return own[name]()
        if name not in self.tables:
            there = ", ".join(sorted(self.tables)) or "none: no device tool recorded this run"
            raise TraceError(f"{self.path} has no table {name!r} (there are: {there})")
        return self.tables[name]()

    def sql(self, query: str) -> "Table":
        """Return what one SELECT says of the tables of this run; see ``docs/store.md``.

        Tables that a query named stay in memory with this object. DuckDB reads the columns where
        they lie and writes nothing.

        Raises:
            TraceError: The query is wrong or would do more than read; the text is one line.
        """
        from lightning_rlprof.store.store import ask

        def read(name: str) -> "Table":
            if name not in self._asked:
                self._asked[name] = self.table(name)
            return self._asked[name]

        return ask(self, query, read)

    @cached_property
    def _asked(self) -> "dict[str, Table]":
        """Tables that SQL has named so far."""
        return {}

    def span(self, row: int) -> Span:
        """Return one row as a `Span`, its times on the run's axis."""
        parent = int(self.parent[row])
        return Span(
            self.names[self.name[row]],
            KINDS[self.kind[row]],
            int(self.rank[row]),
            int(self.step[row]),
            int(self.start_ns[row]),
            int(self.end_ns[row]),
            self.threads[self.thread[row]].ident,
            int(self.id[row]),
            None if parent == NO_PARENT else parent,
            self.counters_of(row),
        )

    def counters_of(self, row: int) -> dict[str, Number] | None:
        """Return the counters of one row, None when it has none."""
        found: dict[str, Number] = {}
        for name, (rows, values) in self.counters.items():
            at = int(np.searchsorted(rows, row))
            if at < len(rows) and rows[at] == row:
                value = values[at]
                found[name] = value.item() if isinstance(value, np.generic) else value
        return found or None

    def rows(
        self, *, kind: Kind | None = None, name: str | None = None, rank: int | None = None
    ) -> Int64s:
        """Return the rows that match, ascending: ``spans.start_ns[spans.rows(kind="step")]``.

        Raises:
            ValueError: There is no such kind.
        """
        first, last = 0, len(self)
        if rank is not None:  # rows are sorted by rank
            first, last = np.searchsorted(self.rank, [rank, rank + 1]).tolist()
        keep = np.ones(last - first, dtype=bool)
        if kind is not None:
            if kind not in KINDS:
                raise ValueError(f"kind={kind!r}: there are {', '.join(KINDS)}")
            keep &= self.kind[first:last] == KINDS.index(kind)
        if name is not None:
            code = self.names.index(name) if name in self.names else -1
            keep &= self.name[first:last] == code
        return np.flatnonzero(keep) + first

    def amounts(self, name: str, kind: type[np.number[Any]] = np.float64) -> Counter:
        """Return a counter as numbers of one type to add up; empty where no span has it.

        What would not fit into a sum, at 2^62 or 1e200, comes of damage and is left out.
        """
        if name not in self.counters:
            return Counter(np.empty(0, np.int64), np.empty(0, kind))
        rows, values = self.counters[name]
        most = 2**62 if kind is np.int64 else 1e200
        sound = np.asarray((values > -most) & (values < most), dtype=bool)
        if not sound.all():
            rows, values = rows[sound], values[sound]
        return Counter(rows, values.astype(kind, copy=False))

    def flagged(self, counter: str) -> Int64s:
        """Return the rows that carry a counter that is not zero, ascending."""
        if counter not in self.counters:
            return np.empty(0, dtype=np.int64)
        rows, values = self.counters[counter]
        found: Int64s = rows[values != 0]
        return found
