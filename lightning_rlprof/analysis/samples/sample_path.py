"""One sample from its prompt to the update that it trained, phase by phase."""

import numpy as np

from lightning_rlprof.analysis.samples.sample_book import (
    NO_FATE,
    NO_SAMPLES,
    UNKNOWN,
    SampleBook,
    sample_book,
)
from lightning_rlprof.analysis.steps.execution_mode import rollouts_and_updates
from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import FATES, KINDS, NO_KNOWN_FATE
from lightning_rlprof.tables.arrays import Int64s, group_starts
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
    cells: list[tuple[Cell, ...]] = []
    reached = zero
    for row in rows:
        start, end = int(spans.start_ns[row]), int(spans.end_ns[row])
        if start > reached and cells:
            cells.append((_WAIT, None, None, reached - zero, start - reached, None, None))
        rank = int(spans.rank[row])
        counters = spans.counters_of(row) or {}
        name, role = spans.names[spans.name[row]], spans.headers[rank].role
        told = counters.get("tokens"), counters.get("version")
        cells.append((name, rank, role, start - zero, end - start, *told))
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
        update = int(updates_of(spans, book.fate_row[at : at + 1])[0])
        rows += [update] if update != UNKNOWN and update not in rows else []
    return sorted(rows, key=lambda row: (int(spans.start_ns[row]), int(spans.end_ns[row])))


def updates_of(spans: Spans, fates: Int64s) -> Int64s:
    """Return the row of the update nearest to each fate in its step and on its rank.

    `UNKNOWN` stands for none.
    """
    updates = rollouts_and_updates(spans)[1]
    both = np.append(updates, fates)
    lane = np.unique(np.stack([spans.rank[both], spans.step[both]]), axis=1, return_inverse=True)[1]
    lane = lane.ravel()
    order = np.argsort(lane[: len(updates)], kind="stable")
    updates, lanes = updates[order], lane[: len(updates)][order]
    wanted, found = lane[len(updates) :], np.full(len(fates), UNKNOWN)
    own = np.argsort(wanted, kind="stable")
    for at in np.split(own, group_starts(wanted[own])[1:]) if len(own) else ():
        rows = updates[slice(*np.searchsorted(lanes, wanted[at[0]] + np.arange(2)))]
        if len(rows):
            time = spans.start_ns[fates[at]][:, None]
            away = np.maximum(spans.start_ns[rows] - time, 0)
            away += np.maximum(time - spans.end_ns[rows], 0)
            found[at] = rows[away.argmin(axis=1)]
    return found


def _note(book: SampleBook, at: int, took_ns: int) -> str:
    code = int(book.fate[at])
    fate = FATES[code] if code != NO_FATE else NO_KNOWN_FATE
    prompt = book.prompts[book.prompt[at]] if book.prompt[at] != UNKNOWN else "unknown"
    attempt = f", attempt {book.attempt[at] + 1}" if book.attempt[at] > 0 else ""
    return (
        f"Sample {book.id[at]} of prompt {prompt}{attempt}: {fate}, {took_ns / 1e9:.3g} s from its "
        "first event to the end of its update."
    )
