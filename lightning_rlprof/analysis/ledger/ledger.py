"""Where the GPU-seconds of a job went: every instant of every rank once, with its price."""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.ledger.accounts import OUTSIDE, SILENT, Accounts, compute_accounts
from lightning_rlprof.analysis.time_categories import Category
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_HOUR_NS = 3_600 * 10**9
_HALF = 30  # bits of a time that are summed apart from the others
_CHUNK = 2**20
_OURS = (
    Category.PROFILER,
    Category.CUSTOM,
)  # shown where there is such time; nothing to miss elsewhere
_NOTHING = "no span was recorded"
_NEEDS = {
    Category.COLLECTIVE_WAIT: "barriers or collectives that two ranks recorded",
    Category.HOST_IDLE: "kernels of a device",
    Category.ROLLOUT_TAIL: "a span per request",
}
# The last book of each run, by step: a report balances it for the findings, and sums it again here.
_LAST: "WeakKeyDictionary[Spans, Accounts]" = WeakKeyDictionary()


def ledger(spans: Spans) -> Table:
    """Divide the time of the whole job, wall clock times ranks, among labels; the sum is exact.

    The rows are those of `totals`. Abstains where nothing was recorded.
    """
    return totals(_LAST.get(spans) or compute_accounts(spans))


def cached_accounts(spans: Spans, held: Spans | None = None) -> Accounts:
    """Balance a run per step; the last answer about it is kept as long as the run is.

    Args:
        spans: The run.
        held: The same with tables that are read only once, for whoever reads them, too.
    """
    found = _LAST.get(spans)
    if found is None:
        found = _LAST[spans] = compute_accounts(spans if held is None else held, per_step=True)
    return found


def totals(book: Accounts, *, price: float | None = None) -> Table:
    """Return one row per label: what it took of the job, in hours and money, and who says so.

    ``total`` adds up to ``wall_ns`` times all ranks; ``in steps`` is the part inside of steps.
    ``evidence`` is ``spans``, ``kernels``, ``both``, or ``none`` for what is untraced. A label for
    which this run has no evidence is "not told", and no zero.

    Args:
        book: The balanced job.
        price: Of a GPU-hour, in euros.
    """
    columns = (
        Column("label", "text"),
        Column("share", "share"),
        Column("GPU-hours", "number", "h"),
        *([] if price is None else [Column("EUR", "number", "EUR")]),
        Column("total", "duration", "ns"),
        Column("evidence", "text"),
        Column("in steps", "duration", "ns"),
        Column("by kernels", "share"),
    )
    if not book.wall_ns:
        return Table("ledger", columns, abstained=_NOTHING)
    missing = [label for label in Category if label not in {*book.told, *_OURS}]
    blank = (None,) * (len(columns) - 4)
    untold = [(label.text, *blank, "not told", None, None) for label in missing]
    return Table("ledger", columns, [*_lines(book, price), *untold], _note(book, missing))


def _lines(book: Accounts, price: float | None) -> Iterator[tuple[Cell, ...]]:
    for label, total, inside, seen in _by_label(book):
        hours = total / _HOUR_NS
        prices = (hours,) if price is None else (hours, hours * price)
        by_kernels = seen / total if seen else None
        evidence = _evidence(book, label, total, seen)
        share = total / _whole(book)
        yield (label.text, share, *prices, total, evidence, inside, by_kernels)


def _whole(book: Accounts) -> int:
    return book.wall_ns * (len(book.ranks) + len(book.silent))


def breakdown(book: Accounts) -> Table:
    """Return the labels as columns: a row per rank, per step, or both, as the book tells them.

    Each row adds up to its ``wall``, and the walls of all rows add up to those of `totals`. The
    step of a row is None for the time outside of steps. Labels without time have no column.
    """
    per_rank, per_step = book.by_rank, book.steps is not None
    name = "ledger by " + " and ".join(["rank"] * per_rank + ["step"] * per_step)
    shown = [label for label, total, *_ in _by_label(book) if total or label == Category.UNTRACED]
    columns = (
        *([Column("rank", "count")] if per_rank else []),
        *([Column("step", "count")] if per_step else []),
        Column("wall", "duration", "ns"),
        *(Column(label.text, "duration", "ns") for label in shown),
    )
    if not book.wall_ns:
        return Table(name, columns, abstained=_NOTHING)
    rows: list[tuple[Cell, ...]] = []
    for rank, step, times in _groups(book):
        place = (*([rank] if per_rank else []), *([step] if per_step else []))
        rows.append((*place, sum(times), *(times[label] for label in shown)))
    return Table(name, columns, rows)


def _by_label(book: Accounts) -> list[tuple[Category, int, int, int]]:
    """Return (label, total, in steps, by kernels), most time first and untraced last."""
    entries = book.entries
    keys = entries.label * np.int8(4) + np.int8(2) * (entries.step != OUTSIDE) + entries.by_kernels
    sums = _sums(book, keys, 4 * len(Category))
    rows = []
    for label in book.told:
        each = sums[4 * label : 4 * label + 4]
        rows.append((label, sum(each), each[2] + each[3], each[1] + each[3]))
    return sorted(rows, key=lambda row: (row[0] == Category.UNTRACED, -row[1], row[0]))


def _groups(book: Accounts) -> Iterator[tuple[int, int | None, list[int]]]:
    """Yield (rank, step, time of each label) by rank, then step, the time outside of steps last."""
    entries, width = book.entries, len(Category)
    numbers = [None] if book.steps is None else [*book.steps.tolist(), None]
    size, zeros = len(numbers), np.zeros(len(book.rank), dtype=np.int64)
    rank = book.rank.astype(np.int64) - SILENT if book.by_rank else zeros
    step = zeros if book.steps is None else np.where(entries.step < 0, size - 1, entries.step)
    keys, place = np.unique(rank * size + step, return_inverse=True)
    sums = _sums(book, place * width + entries.label, len(keys) * width, each=book.by_rank)
    of_rank: dict[int, list[int]] = {}
    for at, each in enumerate((keys // size + SILENT).tolist()):
        of_rank.setdefault(each, []).append(at)
    for each in sorted((*book.ranks, *book.silent)) if book.by_rank else [SILENT]:
        for at in of_rank[each if each in of_rank else SILENT]:
            yield each, numbers[keys[at] % size], sums[at * width : (at + 1) * width]


def _sums(book: Accounts, keys: npt.NDArray[Any], size: int, *, each: bool = False) -> list[int]:
    """Sum the entries by key, exactly: a thousand ranks for a hundred days exceed 64 bits.

    Silent ranks count as many times as they are, or once where ``each`` is for itself.
    """
    silent = int(np.searchsorted(book.rank, SILENT, "right"))
    times = 1 if each else len(book.silent)
    parts = (slice(0, silent), slice(silent, None))
    theirs, own = (_exact(keys[part], book.entries.ns[part], size) for part in parts)
    return [times * one + other for one, other in zip(theirs, own, strict=True)]


def _exact(keys: npt.NDArray[Any], ns: Int64s, size: int) -> list[int]:
    high, low = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for at in range(0, len(keys), _CHUNK):
        part = slice(at, at + _CHUNK)
        np.add.at(high, keys[part], ns[part] >> _HALF)
        np.add.at(low, keys[part], ns[part] & (2**_HALF - 1))
    pairs = zip(high.tolist(), low.tolist(), strict=True)
    return [(above << _HALF) + below for above, below in pairs]


def _evidence(book: Accounts, label: Category, total: int, seen: int) -> str:
    if label == Category.UNTRACED:
        return "none"
    if not total:
        return book.told[label]
    return "spans" if not seen else "kernels" if seen == total else "both"


def _note(book: Accounts, missing: Sequence[Category]) -> str:
    ranks, wall = len(book.ranks) + len(book.silent), book.wall_ns / 1e9
    texts = [f"{ranks} x {wall:.6g} s = {_whole(book) / _HOUR_NS:.4g} GPU-hours.", *book.remarks]
    if Category.HOST_IDLE in missing and Category.COMPUTE in book.told:
        texts.append("Without kernels, compute is all time in stages that compute.")
    texts += [
        f"{label.text.capitalize()}: not told without {_NEEDS[label]}."
        for label in missing
        if label in _NEEDS
    ]
    if unnamed := [label.text for label in missing if label not in _NEEDS]:
        texts.append(f"Not told, as no span is named so: {', '.join(unnamed)}.")
    return " ".join(texts)
