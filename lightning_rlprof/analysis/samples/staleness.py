"""How old the weights are that generated the samples of each update, and how long these waited."""

import numpy as np

from lightning_rlprof.analysis.samples.sample_book import (
    NO_SAMPLES,
    UNKNOWN,
    USED,
    SampleBook,
    sample_book,
)
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, group_starts
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    Column("step", "text"),
    *columns_of("count", "samples", "version"),
    Column("staleness mean", "number"),
    Column("staleness max", "count"),
    *columns_of("share", "off-policy", "mixed versions"),
    *columns_of("duration", "wait p50", "wait max", unit="ns"),
    Column("queue", "count"),
)
_NOTE = (
    "staleness: versions between the weights that began the sample and those that the update "
    "starts from. mixed versions: weights changed during the response. wait: from the end of the "
    "last phase to the fate. queue: complete samples that waited when the update began."
)
_NO_VERSIONS = (
    "No sample has both versions. Pass that of the generating weights to sample(version=...), and "
    "that of the weights which are updated to end(trainer_version=...)"
)


def staleness(spans: Spans) -> Table:
    """Return for each update how stale its samples were; the first row is of all updates.

    An update is the step in which the fates of its samples were recorded. Without
    ``trainer_version`` the version is the last one that a weight sync published before the fate.

    Abstains if no versions were recorded.
    """
    book = sample_book(spans)
    if not len(book):
        return Table("staleness", _COLUMNS, abstained=NO_SAMPLES)
    used = np.flatnonzero(book.fates(*USED))
    version = trainer_versions(spans, book.fate_row[used])
    used, version = used[version >= 0], version[version >= 0]
    used, version = used[book.version[used] >= 0], version[book.version[used] >= 0]
    if not len(used):
        return Table("staleness", _COLUMNS, abstained=_NO_VERSIONS)
    step = spans.step[book.fate_row[used]]
    order = np.argsort(step, kind="stable")
    first = group_starts(step[order])
    ready = _ready_ns(spans, book)
    rows = [("all", *_numbers(spans, book, used, version, ready), None)]
    for own, queue in zip(
        np.split(order, first[1:]), _queues(spans, book, ready, used, order, first), strict=True
    ):
        name, numbers = str(step[own[0]]), _numbers(spans, book, used[own], version[own], ready)
        rows.append((name, *numbers, queue))
    return Table("staleness", _COLUMNS, rows, _NOTE)


def trainer_versions(spans: Spans, fates: Int64s) -> Int64s:
    """Return the version of the weights that each fate's update starts from, or `UNKNOWN`."""
    version = spans.per_row("trainer_version", UNKNOWN)[fates]
    at, values = spans.amounts("version", np.int64)
    syncs = (categories_of(spans.names) == Category.WEIGHT_SYNC)[spans.name[at]]
    at, values = at[syncs], values[syncs]
    order = np.argsort(spans.end_ns[at], kind="stable")
    highest = np.maximum.accumulate(values[order]) if len(order) else values
    place = np.searchsorted(spans.end_ns[at[order]], spans.start_ns[fates], "right") - 1
    published = np.append(highest, UNKNOWN)[place]
    return np.where(version >= 0, version, published)


def _ready_ns(spans: Spans, book: SampleBook) -> Int64s:
    """Return when the last phase of each sample ended; of one without phases, its fate."""
    found = np.where(book.fate_row >= 0, spans.end_ns[book.fate_row], np.iinfo(np.int64).max)
    last = np.full(len(book), np.iinfo(np.int64).min)
    phases = spans.kind[book.rows] != KINDS.index("mark")
    np.maximum.at(last, book.owner[phases], spans.end_ns[book.rows[phases]])
    return np.where(last > np.iinfo(np.int64).min, last, found)


def _queues(
    spans: Spans, book: SampleBook, ready: Int64s, used: Int64s, order: Int64s, first: Int64s
) -> list[int]:
    """Return how many complete samples wait when each update begins, with its first fate."""
    begins = np.minimum.reduceat(spans.start_ns[book.fate_row[used[order]]], first)
    left = np.where(book.fate_row >= 0, spans.start_ns[book.fate_row], np.iinfo(np.int64).max - 1)
    gone = np.sort(np.maximum(ready, left + 1))  # one that leaves as the update begins is in it
    here = np.searchsorted(np.sort(ready), begins, "right")
    found: list[int] = (here - np.searchsorted(gone, begins, "right")).tolist()
    return found


def _numbers(
    spans: Spans, book: SampleBook, used: Int64s, version: Int64s, ready: Int64s
) -> tuple[Cell, ...]:
    """Return the cells of some samples but the first and the last."""
    behind = version - book.version[used]
    wait = np.maximum(spans.start_ns[book.fate_row[used]] - ready[used], 0)
    whole = len(np.unique(version)) == 1
    return (
        len(used),
        int(version[0]) if whole else None,
        float(behind.mean()),
        int(behind.max()),
        float((behind > 0).mean()),
        float((book.version_end[used] > book.version[used]).mean()),
        int(np.median(wait)),
        int(wait.max()),
    )
