"""How old the weights are that generated the samples of each update, and how long these waited."""

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.samples.sample_book import (
    NO_SAMPLES,
    UNKNOWN,
    SampleBook,
    sample_book,
)
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_USED = ("trained", "zero_advantage", "truncated")
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
    "No sample has both versions. Give sample(..., version=...) that of the weights that generate, "
    "and end(..., trainer_version=...) that of the weights that are updated"
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
    used = np.flatnonzero(book.fates(*_USED))
    version = _trainer_versions(spans, book.fate_row[used])
    used, version = used[version >= 0], version[version >= 0]
    used, version = used[book.version[used] >= 0], version[book.version[used] >= 0]
    if not len(used):
        return Table("staleness", _COLUMNS, abstained=_NO_VERSIONS)
    step = spans.step[book.fate_row[used]]
    ready = _ready_ns(spans, book)
    rows = [_row("all", spans, book, used, version, ready)]
    for number in np.unique(step).tolist():
        own = step == number
        rows.append(_row(str(number), spans, book, used[own], version[own], ready))
    return Table("staleness", _COLUMNS, rows, _NOTE)


def _trainer_versions(spans: Spans, fates: Int64s) -> Int64s:
    """Return the version of the weights that each fate's update starts from, or `UNKNOWN`."""
    found = np.full(len(spans), UNKNOWN)
    at, values = spans.amounts("trainer_version", np.int64)
    found[at] = values
    version = found[fates]
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


def _row(
    name: str,
    spans: Spans,
    book: SampleBook,
    used: Int64s,
    version: Int64s,
    ready: npt.NDArray[np.int64],
) -> tuple[Cell, ...]:
    behind = version - book.version[used]
    fate = spans.start_ns[book.fate_row[used]]
    wait = np.maximum(fate - ready[used], 0)
    mixed = float((book.version_end[used] > book.version[used]).mean())
    begins = int(fate.min())
    left = np.where(book.fate_row >= 0, spans.start_ns[book.fate_row], np.iinfo(np.int64).max)
    queue = None if name == "all" else int(((ready <= begins) & (left >= begins)).sum())
    whole = len(np.unique(version)) == 1
    return (
        name,
        len(used),
        int(version[0]) if whole else None,
        float(behind.mean()),
        int(behind.max()),
        float((behind > 0).mean()),
        mixed,
        int(np.median(wait)),
        int(wait.max()),
        queue,
    )
