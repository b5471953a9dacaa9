"""One sample from its prompt to the update that it trained, phase by phase."""

from typing import Any

import numpy as np

from lightning_rlprof.analysis.samples.sample_book import (
    NO_FATE,
    NO_SAMPLES,
    UNKNOWN,
    SampleBook,
    sample_book,
)
from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import FATES, KINDS
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    Column("phase", "text"),
    Column("rank", "count"),
    Column("role", "text"),
    *columns_of("duration", "from", "duration", unit="ns"),
    *columns_of("count", "tokens", "version"),
)
_MARK = KINDS.index("mark")
_WAIT = "(wait)"


def sample_path(spans: Spans, sample: int | None = None) -> Table:
    """Return the phases of one sample in order of time, the waits between them, and its update.

    ``from`` counts from the sample's first event. Unless a sample is named, it is the one that took
    longest from its first phase to its fate, among those trained if there are some.

    Args:
        spans: The run.
        sample: Its number, the counter ``sample`` of its spans.

    Raises:
        TraceError: The run has no such sample.
    """
    book = sample_book(spans)
    if not len(book):
        return Table("sample_path", _COLUMNS, abstained=NO_SAMPLES)
    at = _slowest(spans, book) if sample is None else _place(spans, book, sample)
    if at is None:
        reason = "no sample has both a phase and a fate"
        return Table("sample_path", _COLUMNS, abstained=reason)
    rows = [*_events(spans, book, at)]
    if not rows:
        return Table("sample_path", _COLUMNS, abstained=f"sample {book.id[at]} has no phases")
    zero = int(spans.start_ns[rows].min())
    told = {name: _counter(spans, name) for name in ("tokens", "version")}
    cells: list[tuple[Cell, ...]] = []
    reached = zero
    for row in rows:
        start, end = int(spans.start_ns[row]), int(spans.end_ns[row])
        if start > reached and cells:
            cells.append((_WAIT, None, None, reached - zero, start - reached, None, None))
        rank = int(spans.rank[row])
        counters = [told[name].get(row) for name in ("tokens", "version")]
        name, role = spans.names[spans.name[row]], spans.headers[rank].role
        cells.append((name, rank, role, start - zero, end - start, *counters))
        reached = max(reached, end)
    return Table("sample_path", _COLUMNS, cells, _note(book, at, reached - zero))


def _place(spans: Spans, book: SampleBook, sample: int) -> int:
    found = np.flatnonzero(book.id == sample)
    if not len(found):
        raise TraceError(
            f"{spans.path} has no sample {sample}. List them: "
            'rlprof sql "select distinct sample from spans where sample is not null"'
        )
    return int(found[0])


def _slowest(spans: Spans, book: SampleBook) -> int | None:
    has = (np.diff(book.first) > 0) & (book.fate_row >= 0)
    trained = has & book.fates("trained")
    some = np.flatnonzero(trained if trained.any() else has)
    if not len(some):
        return None
    begin = spans.start_ns[book.rows[book.first[some]]]
    return int(some[np.argmax(spans.end_ns[book.fate_row[some]] - begin)])


def _events(spans: Spans, book: SampleBook, at: int) -> list[int]:
    """Return the rows of a sample, its fate, and the update that it was part of, by start."""
    rows = book.spans_of(at).tolist()
    fate = int(book.fate_row[at])
    if fate != UNKNOWN:
        rows.append(fate)
        rows += [row for row in update_of(spans, fate) if row not in rows]
    return sorted(rows, key=lambda row: (int(spans.start_ns[row]), int(spans.end_ns[row])))


def update_of(spans: Spans, fate: int) -> list[int]:
    """Return the update nearest to a fate, in its step and on its rank."""
    stages = spans.rows(kind="stage", rank=int(spans.rank[fate]))
    stages = stages[spans.step[stages] == spans.step[fate]]
    named = [standard_stage(spans.names[each]) == "actor_update" for each in spans.name[stages]]
    stages = stages[np.array(named, bool)]
    if not len(stages):
        return []
    time = spans.start_ns[fate]
    away = np.maximum(spans.start_ns[stages] - time, 0) + np.maximum(time - spans.end_ns[stages], 0)
    return [int(stages[np.argmin(away)])]


def _counter(spans: Spans, name: str) -> dict[int, Any]:
    at, values = spans.amounts(name, np.int64)
    return dict(zip(at.tolist(), values.tolist(), strict=True))


def _note(book: SampleBook, at: int, took_ns: int) -> str:
    code = int(book.fate[at])
    fate = FATES[code] if code != NO_FATE else "unknown"
    prompt = book.prompt.texts[book.prompt.code[at]] if book.prompt.code[at] >= 0 else "unknown"
    attempt = f", attempt {book.attempt[at] + 1}" if book.attempt[at] > 0 else ""
    return (
        f"Sample {book.id[at]} of prompt {prompt}{attempt}: {fate}, {took_ns / 1e9:.3g} s from its "
        "first event to the end of its update."
    )
