"""All spans of a run as columns on one time axis, with what is known to be missing.

`core_tables` are the same as tables, which SQL can query.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.notes import NO_FACTS, Code, Fact
from lightning_rlprof.records.records import KINDS, Header, Kind, Number, Span, bin_in_name
from lightning_rlprof.system.process import give_back
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.table import (
    Cell,
    Column,
    ColumnRows,
    Loss,
    PartRows,
    Table,
    columns_of,
)

Result = TypeVar("Result")

RUN = Path("RUN")
"""What a run is called in an answer that its cache keeps."""

NO_PARENT = -1
"""Stands in ``Spans.parent`` where a span has none; ids are never negative."""


class Thread(NamedTuple):
    """One thread of one rank; ``Spans.thread`` holds indices into ``Spans.threads``."""

    rank: int
    ident: int
    name: str


class RankNote(NamedTuple):
    """Something that a rank, or the loader (rank None), reports; its time is on the timeline.

    Programs decide by ``code`` and read ``facts``, see `lightning_rlprof.records.notes`; a note of
    an older run has neither.
    """

    rank: int | None
    time_ns: int
    level: str
    text: str
    code: str = ""
    facts: Mapping[str, Fact] = NO_FACTS


class RunWarning(NamedTuple):
    """What is missing or doubtful in a run; rank None means the whole run.

    ``code`` is one of `lightning_rlprof.records.notes`.
    """

    rank: int | None
    text: str
    code: str = ""
    facts: Mapping[str, Fact] = NO_FACTS


def note_of(rank: int | None, code: Code, text: str, time_ns: int = 0, **facts: Fact) -> RankNote:
    """Return a note of the loader at the level of its code."""
    return RankNote(rank, time_ns, code.level, text, code.value, facts)


def warning_of(rank: int | None, text: str, code: Code) -> RunWarning:
    """Return a warning; one that says what was lost has the code of that instead."""
    if isinstance(text, Loss):
        return RunWarning(rank, text, text.code.value, text.facts)
    return RunWarning(rank, text, code.value)


class Counter(NamedTuple):
    """The spans that carry one counter, ascending, and their values; integers stay exact."""

    rows: Int64s
    values: npt.NDArray[Any]

    def at(self, rows: Int64s, unknown: float) -> npt.NDArray[Any]:
        """Return the value of each of some rows, ``unknown`` where it has none, as below row 0.

        Example::

            >>> Counter(np.array([1, 4]), np.array([7, 8])).at(np.array([4, 2, -1]), -1).tolist()
            [8, -1, -1]
        """
        place = np.searchsorted(self.rows, rows)
        there = np.append(self.rows, -2)[place] == rows
        return np.where(there, np.append(self.values, unknown)[place], unknown)


class Histogram(NamedTuple):
    """How many values lie in which bins of spans, see `lightning_rlprof.records.records`."""

    rows: Int64s
    bins: Int64s
    counts: Int64s


class ByRank:
    """Reads a table that was put together of the ranks' own, or that of one rank alone.

    Args:
        read: Returns the rows of a rank, or without one all rows.
    """

    def __init__(self, read: Callable[..., Table]) -> None:
        self._read = read

    def __call__(self) -> Table:
        """Return the rows of all ranks."""
        return self._read()

    def of(self, rank: int) -> Table:
        """Return the rows of a rank; the table abstains if it has none."""
        return self._read(rank=rank)


@dataclass(frozen=True, eq=False)
class Spans:
    """A run in memory: one row per span, sorted by rank, start and id.

    Times are integer nanoseconds since the first event of the run. Iterating yields `Span`; the
    columns are for everything that must be fast. They are integers of 64 bits; of a large run,
    ``kind``, ``thread``, ``id`` and ``parent`` may have fewer: convert them before you multiply.

    Attributes:
        path: What was loaded.
        names: Distinct names; ``name`` holds indices into it.
        threads: Distinct threads; ``thread`` holds indices into it.
        name: Index into ``names`` per span.
        kind: Index into `lightning_rlprof.records.records.KINDS` per span.
        rank: Global rank per span.
        step: RL step per span, 0 before training.
        start_ns: Start on the run's axis.
        end_ns: End on the run's axis, never before the start.
        thread: Index into ``threads`` per span.
        id: Number of the span in its rank.
        parent: Id of the enclosing span in the same rank, or `NO_PARENT`.
        counters: Counters by name.
        headers: Headers by rank, ascending.
        statuses: How each rank ended: ``finished``, a reason, or None if its file is truncated.
        notes: What ranks and the loader say, by time.
        warnings: What is missing or doubtful, by rank.
        unix_ns: Wall-clock time of zero on the axis.
        tables: What else the files hold, by name; a table is read when it is asked for.
        wall_off: How far a rank's wall clock was ahead of that of ``unix_ns`` when it said a time;
            only ranks of which that is known.
        results: What `once` has computed; a copy with other tables shares it.
        from_start: Whether the first steps here are the first ones of the run, which may be slow
            because they warm up; not so in the last steps of a long run.
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
    warnings: tuple[RunWarning, ...] = ()
    unix_ns: int = 0
    tables: Mapping[str, Callable[[], Table]] = field(default_factory=dict)
    wall_off: Mapping[int, Callable[[int], int]] = field(default_factory=dict)
    results: dict[Any, Any] = field(default_factory=dict, repr=False)
    from_start: bool = True

    if not TYPE_CHECKING:  # A type checker would believe that there is every attribute.

        def __getattr__(self, name: str) -> Any:
            """Read a column of a run that is kept in a cache."""
            read = vars(self).get("_read")
            if read is None or name not in _KEPT:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return vars(self).setdefault(name, read(name))

    def __len__(self) -> int:
        """Return the number of spans."""
        return len(self.start_ns)

    def __bool__(self) -> NoReturn:
        """Refuse to be a condition: a run without spans is a run, and may have kernels.

        Raises:
            TypeError: Always.
        """
        raise TypeError("a run is neither true nor false: ask len(spans), or spans is None")

    def __iter__(self) -> Iterator[Span]:
        """Yield every span as a `Span`; convenient, and slow beyond some ten thousand."""
        return (self.span(row) for row in range(len(self)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that were read, ascending; a rank without spans counts."""
        return tuple(self.headers)

    @property
    def device_word(self) -> str:
        """What time and hours of this run are of: ``GPU``, ``NPU``, or ``rank`` on CPUs."""
        devices = {header.device.partition(":")[0] for header in self.headers.values()}
        if devices == {"cpu"}:
            return "rank"
        return "NPU" if devices == {"npu"} else "GPU"

    @property
    def duration_ns(self) -> Int64s:
        """Length of every span."""
        return self.end_ns - self.start_ns

    def took_ns(self, rows: Int64s) -> Int64s:
        """Return the length of some spans."""
        return self.end_ns[rows] - self.start_ns[rows]

    def once(
        self, name: str, make: Callable[["Spans"], Result], tables: Collection[str] = ()
    ) -> Result:
        """Return what is computed of this run, and compute it only the first time.

        A copy of a run shares what was computed, unless it has other columns, or lacks one of the
        tables. So what is read of a run is computed once, however many analyses ask for it.

        Args:
            name: What is computed.
            make: Computes it.
            tables: Names of the tables of profilers that it depends on.
        """
        read = frozenset(each for each in tables if each in self.tables)
        columns = (
            *(self.names, self.name, self.kind, self.rank, self.step, self.start_ns, self.end_ns),
            *(self.thread, self.counters, self.headers),
        )
        key = (name, read, *map(id, columns))
        if key not in self.results:
            # Columns are kept so that no other object gets their ids.
            self.results[key] = columns, make(self)
            if read:  # Tables of profilers can be large.
                give_back()
        return self.results[key][1]  # type: ignore[no-any-return]

    def later(self, rank: int | None, unix_ns: int) -> int:
        """Return the time on the axis when a rank's wall clock said ``unix_ns``."""
        off = self.wall_off.get(-1 if rank is None else rank)
        return unix_ns - self.unix_ns - (0 if off is None else off(unix_ns))

    def table(self, name: str, rank: int | None = None) -> Table:
        """Read a table: ``spans``, ``headers``, ``notes``, ``warnings``, or one of a profiler.

        ``load(path).table("kernels")``. The table of a profiler is read again at every call. With a
        rank, only its rows are read if they lie alone; else there are those of all ranks.

        Raises:
            TraceError: The files hold no such table.
        """
        own = core_tables(self)
        if name in own:
            return own[name]()
        if name not in self.tables:
            there = ", ".join(sorted(self.tables)) or "none: no profiler recorded this run"
            raise TraceError(f"{self.path} has no table {name!r} (there are: {there})")
        read = self.tables[name]
        return read.of(rank) if isinstance(read, ByRank) and rank is not None else read()

    def try_table(self, name: str, remarks: list[str], rank: int | None = None) -> Table | None:
        """Return a table, or what `table` reads for a rank; None if the run has none.

        Why a table cannot be read becomes a remark, and so do rows that its loader left out, unless
        a warning of the run names them. A table that no profiler recorded is not a remark.
        """
        if name not in self.tables:
            return None
        try:
            table = self.table(name, rank)
        except TraceError as error:
            remarks.append(f"The table {name} could not be read: {error}.")
            return None
        if table.abstained is not None:
            if table.recorded:
                remarks.append(f"The table {name} is missing: {table.abstained}.")
            return None
        known = {warning.text for warning in self.warnings}
        lost = (text for text in table.losses if text not in known)
        remarks += [f"The table {name} is incomplete: {text}." for text in lost]
        return table

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
        names, rows, which, places = self._counters_by_row
        low, high = np.searchsorted(rows, (row, row + 1)).tolist()
        found: dict[str, Number] = {}
        for counter, at in zip(which[low:high].tolist(), places[low:high].tolist(), strict=True):
            value = self.counters[names[counter]].values[at]
            found[names[counter]] = value.item() if isinstance(value, np.generic) else value
        return found or None

    @cached_property
    def _counters_by_row(self) -> tuple[list[str], Int64s, Int64s, Int64s]:
        """Return counters, then of each value by row: the row, which counter, its place there.

        To look into every counter for every row takes minutes if there are thousands of them.
        """
        none = np.empty(0, np.int64)
        sizes = [len(each.rows) for each in self.counters.values()]
        rows = np.concatenate([none, *(each.rows for each in self.counters.values())])
        which = np.repeat(np.arange(len(sizes)), sizes)
        places = np.concatenate([none, *map(np.arange, sizes)])
        order = np.argsort(rows, kind="stable")
        return [*self.counters], rows[order], which[order], places[order]

    def rows(
        self, *, kind: Kind | None = None, name: str | None = None, rank: int | None = None
    ) -> Int64s:
        """Return the rows that match, ascending: ``spans.start_ns[spans.rows(kind="step")]``.

        Those of all steps are found once, so they cannot be written to.

        Raises:
            ValueError: The kind is unknown.
        """
        if kind == "step" and name is None and rank is None:  # Nearly all that is computed asks.
            return self.once("rows of steps", _rows_of_steps)
        first, last = 0, len(self)
        if rank is not None:  # Rows are sorted by rank.
            first, last = np.searchsorted(self.rank, [rank, rank + 1]).tolist()
        keep = np.ones(last - first, dtype=bool)
        if kind is not None:
            if kind not in KINDS:
                raise ValueError(f"unknown kind {kind!r} (kinds: {', '.join(KINDS)})")
            keep = self.kind[first:last] == KINDS.index(kind)
        if name is not None:
            code = self.names.index(name) if name in self.names else -1
            keep &= self.name[first:last] == code
        found = np.flatnonzero(keep)
        return found + first if first else found

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

    def per_row(self, name: str, unknown: int = -1, rows: Int64s | None = None) -> Int64s:
        """Return a counter as an integer for some rows, ``unknown`` where a span lacks it.

        Args:
            name: Of the counter.
            unknown: Stands where there is none.
            rows: Which rows; those below 0 have none. None for all.
        """
        counter = self.amounts(name, np.int64)
        if rows is not None:
            return counter.at(rows, unknown)
        found = np.full(len(self), unknown)
        found[counter.rows] = counter.values
        return found

    def histogram(self, name: str) -> Histogram:
        """Return the bins that spans counted of a histogram; empty where no span has it.

        Counts below 0, or of 2^40 and more, come of damage and are left out.
        """
        parts = []
        for counter in self.counters:
            if (found := bin_in_name(counter)) is not None and found[0] == name:
                rows, counts = self.amounts(counter, np.int64)
                sound = (counts >= 0) & (counts < 2**40)
                parts.append((rows[sound], np.full(sound.sum(), found[1]), counts[sound]))
        columns = zip(*parts, strict=True) if parts else ((), (), ())
        return Histogram(*(np.concatenate([np.zeros(0, np.int64), *each]) for each in columns))

    def flagged(self, counter: str) -> Int64s:
        """Return the rows that carry a counter that is not zero, ascending."""
        if counter not in self.counters:
            return np.empty(0, dtype=np.int64)
        rows, values = self.counters[counter]
        found: Int64s = rows[values != 0]
        return found


_KEPT = frozenset(
    "name kind rank step start_ns end_ns thread id parent counters".split()  # noqa: SIM905
)

CORE = ("spans", "headers", "notes", "warnings")
"""Tables that every run has."""

OF_RANK_FILES = ("background_metrics", "clocks", "sample_names")
"""Further tables of what ranks wrote; all others come from profilers, and may be large."""

_MOST_COUNTERS = 256
_SPANS = (
    *columns_of("text", "name", "kind"),
    *columns_of("count", "rank", "step"),
    *columns_of("time", "start_ns", "end_ns", unit="ns"),
    Column("duration_ns", "duration", "ns"),
    Column("thread", "count"),
    Column("thread_name", "text"),
    *columns_of("count", "id", "parent"),
)
_HEADERS = (
    Column("rank", "count"),
    Column("run_id", "text"),
    Column("world_size", "count"),
    *columns_of("text", "role", "host"),
    Column("pid", "count"),
    *columns_of("text", "device", "device_name", "status"),
    Column("format", "count"),
    *columns_of("count", "unix_ns", "clock_ns", "zero_unix_ns", unit="ns"),
    *columns_of("text", "config", "versions"),
)
_NOTES = (
    Column("rank", "count"),
    Column("time_ns", "time", "ns"),
    *columns_of("text", "level", "text", "code", "facts"),
)
_WARNINGS = (Column("rank", "count"), *columns_of("text", "text", "code", "facts"))


def kept_spans(read: Callable[[str], Any], answers: Callable[..., Any], **facts: Any) -> Spans:
    """Return the run of a cache, which may be far larger than what is asked of it.

    Args:
        read: Reads a column, or ``counters``, by name, when it is first looked at.
        answers: Takes what `answer` takes.
        facts: All other fields.
    """
    found = Spans.__new__(Spans)
    vars(found).update(wall_off={}, results={}, _read=read, _answers=answers, **facts)
    return found


def answer(spans: Spans, name: str, kind: Any, make: Callable[[Spans], Result]) -> Result:
    """Return what is computed of a whole run, out of its cache where that keeps it.

    Args:
        spans: The run.
        name: What is computed.
        kind: Its type: classes of plain data.
        make: Computes it, of this run, or of one whose path is `RUN`.
    """
    answers = vars(spans).get("_answers")
    found: Result = make(spans) if answers is None else answers(spans, name, kind, make)
    return found


def is_kept(spans: Spans) -> bool:
    """Return whether tables are read from a cache, so that reading one again costs little."""
    return "_read" in vars(spans)


def apart(spans: Spans, name: str) -> Sequence[int | None]:
    """Return the ranks whose rows of a table can be read alone; None stands for all at once."""
    return spans.ranks if isinstance(spans.tables.get(name), ByRank) else (None,)


def core_tables(spans: Spans) -> Mapping[str, Callable[[], Table]]:
    """Return what makes each table of `CORE`; ``spans`` has a column for each counter."""
    return {
        "spans": lambda: _spans(spans),
        "headers": lambda: Table("headers", _HEADERS, _headers(spans)),
        "notes": lambda: Table("notes", _NOTES, [*map(_note, spans.notes)]),
        "warnings": lambda: Table("warnings", _WARNINGS, [*map(_warning, spans.warnings)]),
    }


def _note(note: RankNote) -> tuple[Cell, ...]:
    return (*note[:5], json.dumps(dict(note.facts)) if note.facts else None)


def _warning(warning: RunWarning) -> tuple[Cell, ...]:
    return (*warning[:3], json.dumps(dict(warning.facts)) if warning.facts else None)


def _spans(spans: Spans) -> Table:
    counters, note = _counters(spans)
    heads = (*_SPANS, *(column for column, _ in counters))
    identities = _identities([thread.ident for thread in spans.threads] or [0])
    names = [thread.name for thread in spans.threads]

    def read(low: int, high: int) -> ColumnRows:
        part = slice(low, high)
        columns: list[Any] = [
            (spans.name[part], spans.names),
            (spans.kind[part], KINDS),
            spans.rank[part],
            spans.step[part],
            spans.start_ns[part],
            spans.end_ns[part],
            spans.end_ns[part] - spans.start_ns[part],
            identities[spans.thread[part]],
            (spans.thread[part], names),
            spans.id[part].astype(np.int64),
            np.ma.masked_less(spans.parent[part].astype(np.int64), 0),
        ]
        return ColumnRows([*columns, *(each[part] for _, each in counters)])

    return Table("spans", heads, PartRows(len(spans), read), note=note)


def _identities(idents: Iterable[int]) -> Any:
    """Return identities of threads as 64 bits, those of another tool wrapped where larger."""
    return np.array([(each + 2**63) % 2**64 - 2**63 for each in idents], dtype=np.int64)


def counter_columns(spans: Spans) -> dict[str, str]:
    """Return the column of each counter that has one: the most frequent, by name."""
    taken = {column.name for column in _SPANS}
    single = [name for name in spans.counters if bin_in_name(name) is None]
    often = sorted(single, key=lambda name: (-len(spans.counters[name].rows), name))
    found = {}
    for name in sorted(often[:_MOST_COUNTERS]):
        own = "_".join(name.split()) or "counter"
        while own.lower() in taken:  # SQL ignores case in names.
            own = f"counter_{own}"
        taken.add(own.lower())
        found[name] = own
    return found


def _counters(spans: Spans) -> tuple[list[tuple[Column, Any]], str]:
    """Return a column per counter, empty where a span has none; the most frequent where many."""
    found = []
    for name, own in counter_columns(spans).items():
        values = _column(spans.counters[name], len(spans))
        whole = values.dtype.kind == "i"
        unit = "bytes" if name.endswith("bytes") else ""
        kind = "duration" if whole and name.endswith("_ns") else "count" if whole else "number"
        found.append((Column(own, kind, "ns" if kind == "duration" else unit), values))  # type: ignore[arg-type]
    left = sum(bin_in_name(name) is None for name in spans.counters) - _MOST_COUNTERS
    return found, f"{left} rarer counters have no column" if left > 0 else ""


def _column(counter: Counter, length: int) -> Any:
    """Spread a counter over all spans; whole numbers beyond 64 bits become floats."""
    values = counter.values
    if values.dtype.kind not in "if":
        values = values.astype(np.float64)
    full = np.zeros(length, dtype=values.dtype)
    mask = np.ones(length, dtype=bool)
    full[counter.rows], mask[counter.rows] = values, False
    return np.ma.masked_array(full, mask=mask)


def _headers(spans: Spans) -> list[tuple[Any, ...]]:
    rows = []
    for rank, header in spans.headers.items():
        cells = {
            **vars(header),
            "rank": rank,
            "status": spans.statuses.get(rank),
            "zero_unix_ns": spans.unix_ns,
            "config": json.dumps(header.config, default=str),
            "versions": json.dumps(header.versions, default=str),
        }
        rows.append(tuple(cells[column.name] for column in _HEADERS))
    return rows


def _rows_of_steps(spans: Spans) -> Int64s:
    found: Int64s = np.flatnonzero(spans.kind == KINDS.index("step"))
    found.flags.writeable = False
    return found


def rows_named(spans: Spans, wanted: Mask, kinds: Collection[int]) -> Int64s:
    """Return the spans of some kinds whose names are wanted, ascending; quick where these are few.

    Args:
        spans: The run.
        wanted: Which of ``Spans.names``; one more item at the end is for the code -1.
        kinds: Indices into `lightning_rlprof.records.records.KINDS`.
    """
    if not wanted.any():
        return np.empty(0, np.int64)
    rows = np.flatnonzero(wanted[spans.name])
    return rows[np.isin(spans.kind[rows], [*kinds])]


_WORK = (KINDS.index("step"), KINDS.index("stage"))

DRIVER = "controller"
"""Role of a process that hands out work and waits for it."""

_MAX_RANKS = 2**20  # A group or a link that names more of them is damaged.


def world_size(spans: Spans) -> int:
    """Return how many ranks the job has at least: by headers, ranks, groups and links.

    A profiler of a few ranks may name no world. Its collectives still have the size of their group,
    and its links the number of each end within the group.
    """
    return spans.once("world_size", _world_size, ("collectives", "links"))


def _world_size(spans: Spans) -> int:
    found = [header.world_size for header in spans.headers.values()]
    found += [rank + 1 for rank in spans.ranks]
    ends = [f"{end}{what}" for end in ("source", "destination") for what in ("", " rank")]
    for name, sizes in (("collectives", ("group size",)), ("links", ends)):
        if (table := spans.try_table(name, [])) is None:
            continue
        for column in {each.name for each in table.columns} & {*sizes}:
            numbers = table.numbers(column, -1) + (name == "links")
            found.append(int(numbers[numbers <= _MAX_RANKS].max(initial=0)))
    return max(found, default=0)


def drivers(spans: Spans) -> frozenset[int]:
    """Return the ranks of drivers whose workers are in the run, too."""
    own = {rank for rank, header in spans.headers.items() if header.role == DRIVER}
    if not own:
        return frozenset()
    others = np.isin(spans.kind, _WORK) & ~np.isin(spans.rank, sorted(own))
    return frozenset(own if others.any() else ())
