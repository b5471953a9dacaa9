"""What became of the samples: from tokens generated to tokens that train, per GPU-second."""

import numpy as np

from lightning_rlprof.analysis.ledger.ledger import accounts_of
from lightning_rlprof.analysis.samples.sample_book import (
    NO_FATE,
    NO_SAMPLES,
    USED,
    SampleBook,
    rollout_rows,
    sample_book,
)
from lightning_rlprof.records.records import FATES, NO_KNOWN_FATE
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_TRAINED = FATES.index("trained")
_COLUMNS = (
    Column("fate", "text"),
    Column("samples", "count"),
    Column("share of samples", "share"),
    Column("tokens", "count"),
    Column("share of tokens", "share"),
    Column("tokens left", "count"),
    Column("generation time", "duration", "ns"),
)


def samples(spans: Spans) -> Table:
    """Return how many samples had which fate, and what that leaves of the tokens generated.

    Each sample is in one row between ``generated`` and ``trained``, so that the fates add up to
    ``generated`` exactly. ``tokens left`` takes the rows away one after another; what is left at
    the end trains. ``generation time`` sums the rollout phases, which may overlap.

    Abstains if no samples were recorded.
    """
    book = sample_book(spans)
    if not len(book):
        return Table("samples", _COLUMNS, abstained=NO_SAMPLES)
    tokens = np.maximum(book.tokens, 0)
    took = _generation_ns(spans, book)
    count, total = len(book), int(tokens.sum())
    left = total
    rows: list[tuple[Cell, ...]] = [
        ("generated", count, 1.0, total, 1.0 if total else None, left, int(took.sum()))
    ]
    for code in (*reversed(range(_TRAINED + 1, len(FATES))), NO_FATE, _TRAINED):
        own = book.fate == code
        if not own.any() and code != _TRAINED:
            continue
        name = FATES[code] if code != NO_FATE else NO_KNOWN_FATE
        part = int(tokens[own].sum())
        left -= 0 if code == _TRAINED else part
        number = int(own.sum())
        shares = number / count, part, part / total if total else None
        rows.append((name, number, *shares, left, int(took[own].sum())))
    return Table("samples", _COLUMNS, rows, _note(spans, book, total, left))


def _generation_ns(spans: Spans, book: SampleBook) -> Int64s:
    """Return how long the rollout phases of each sample took."""
    rows = rollout_rows(spans, book)
    found = np.zeros(len(book), np.int64)
    np.add.at(found, book.of_row[rows], spans.duration_ns[rows])
    return found


def _note(spans: Spans, book: SampleBook, total: int, useful: int) -> str:
    texts = []
    seconds = accounts_of(spans).total_ns / 1e9
    unknown = int((book.fate == NO_FATE).sum())
    if total and seconds:
        per, every = f"{spans.device_word}-second", f"{total / seconds:,.3g}"
        known = f"{useful / seconds:,.3g} useful tokens per {per}, of {every} generated."
        texts.append(known if useful or not unknown else f"{every} tokens generated per {per}.")
    if unknown:
        texts.append(
            "unknown: no fate was recorded, as of samples that were in flight when the run ended."
        )
    silent = int((book.fates(*USED) & (book.tokens < 0)).sum())
    if silent:
        text = "of the samples that an update took have no tokens"
        texts.append(f"{silent:,} {text}: call count(tokens=...) in their phase.")
    if book.again:
        texts.append(f"{book.again:,} fates were told of samples that had one; each counts once.")
    return " ".join(texts)
