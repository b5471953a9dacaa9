"""What a run holds in memory, as the tables that SQL asks for."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_rlprof.model import KINDS
from lightning_rlprof.table import Column, ColumnRows, PartRows, Table

if TYPE_CHECKING:
    from lightning_rlprof.spans import Counter, Spans

__all__ = ["CORE", "core_tables", "counter_columns"]

CORE = ("spans", "headers", "notes", "problems")
"""Tables that every run has; all others are what its device tools recorded."""

_MOST_COUNTERS = 256
_SPANS = (
    Column("name", "text"),
    Column("kind", "text"),
    Column("rank", "count"),
    Column("step", "count"),
    Column("start_ns", "duration", "ns"),
    Column("end_ns", "duration", "ns"),
    Column("duration_ns", "duration", "ns"),
    Column("thread", "count"),
    Column("thread_name", "text"),
    Column("id", "count"),
    Column("parent", "count"),
)
_HEADERS = (
    Column("rank", "count"),
    Column("run_id", "text"),
    Column("world_size", "count"),
    Column("role", "text"),
    Column("host", "text"),
    Column("pid", "count"),
    Column("device", "text"),
    Column("device_name", "text"),
    Column("status", "text"),
    Column("format", "count"),
    Column("unix_ns", "count", "ns"),
    Column("clock_ns", "count", "ns"),
    Column("zero_unix_ns", "count", "ns"),
    Column("config", "text"),
    Column("versions", "text"),
)
_NOTES = (
    Column("rank", "count"),
    Column("time_ns", "duration", "ns"),
    Column("level", "text"),
    Column("text", "text"),
)
_PROBLEMS = (Column("rank", "count"), Column("text", "text"))


def core_tables(spans: "Spans") -> Mapping[str, Callable[[], Table]]:
    """Return what makes each table of `CORE`; ``spans`` has a column for each counter."""
    return {
        "spans": lambda: _spans(spans),
        "headers": lambda: Table("headers", _HEADERS, _headers(spans)),
        "notes": lambda: Table("notes", _NOTES, [tuple(note) for note in spans.notes]),
        "problems": lambda: Table("problems", _PROBLEMS, [tuple(each) for each in spans.problems]),
    }


def _spans(spans: "Spans") -> Table:
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
            spans.id[part],
            np.ma.masked_less(spans.parent[part], 0),
        ]
        return ColumnRows([*columns, *(each[part] for _, each in counters)])

    return Table("spans", heads, PartRows(len(spans), read), note=note)


def _identities(idents: Iterable[int]) -> Any:
    """Return identities of threads as 64 bits, those of another tool wrapped where larger."""
    return np.array([(each + 2**63) % 2**64 - 2**63 for each in idents], dtype=np.int64)


def counter_columns(spans: "Spans") -> dict[str, str]:
    """Return the column of each counter that has one: the most frequent, by name."""
    taken = {column.name for column in _SPANS}
    often = sorted(spans.counters, key=lambda name: (-len(spans.counters[name].rows), name))
    found = {}
    for name in sorted(often[:_MOST_COUNTERS]):
        own = "_".join(name.split()) or "counter"
        while own.lower() in taken:  # SQL does not tell "Tokens" from "tokens"
            own = f"counter_{own}"
        taken.add(own.lower())
        found[name] = own
    return found


def _counters(spans: "Spans") -> tuple[list[tuple[Column, Any]], str]:
    """Return a column per counter, empty where a span has none; the most frequent where many."""
    found = []
    for name, own in counter_columns(spans).items():
        values = _column(spans.counters[name], len(spans))
        whole = values.dtype.kind == "i"
        unit = "bytes" if name.endswith("bytes") else ""
        kind = "duration" if whole and name.endswith("_ns") else "count" if whole else "number"
        found.append((Column(own, kind, "ns" if kind == "duration" else unit), values))  # type: ignore[arg-type]
    left = len(spans.counters) - _MOST_COUNTERS
    return found, f"{left} rarer counters have no column" if left > 0 else ""


def _column(counter: "Counter", length: int) -> Any:
    """Spread a counter over all spans; whole numbers beyond 64 bits become floats."""
    values = counter.values
    if values.dtype.kind not in "if":
        values = values.astype(np.float64)
    full = np.zeros(length, dtype=values.dtype)
    mask = np.ones(length, dtype=bool)
    full[counter.rows], mask[counter.rows] = values, False
    return np.ma.masked_array(full, mask=mask)


def _headers(spans: "Spans") -> list[tuple[Any, ...]]:
    return [
        (
            rank,
            header.run_id,
            header.world_size,
            header.role,
            header.host,
            header.pid,
            header.device,
            header.device_name,
            spans.statuses.get(rank),
            header.format,
            header.unix_ns,
            header.clock_ns,
            spans.unix_ns,
            json.dumps(header.config, default=str),
            json.dumps(header.versions, default=str),
        )
        for rank, header in spans.headers.items()
    ]
