"""GPU-hours of the whole job by category: every second of every rank once, with its cost."""

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
_LOW_BITS = 30  # bits of a time that are summed separately, so that sums stay exact
_CHUNK = 2**20
_NO_DATA = "no spans were recorded"
_ONLY_IF_ANY = (Category.PROFILER, Category.CUSTOM)  # their absence is not missing data
_NEEDS = {
    Category.COLLECTIVE_WAIT: "needs barriers or collectives on two or more ranks",
    Category.HOST_IDLE: "needs device kernels",
    Category.ROLLOUT_TAIL: "needs a span per request",
}
# The last accounts of each run, by step: a report needs them for the findings and the ledger.
_LAST: "WeakKeyDictionary[Spans, Accounts]" = WeakKeyDictionary()


def ledger(spans: Spans) -> Table:
    """Divide the time of the whole job, wall time times ranks, among categories; sums are exact.

    The rows are those of `category_totals`. Has no data if nothing was recorded.
    """
    return category_totals(_LAST.get(spans) or compute_accounts(spans))


def cached_accounts(spans: Spans, with_tables: Spans | None = None) -> Accounts:
    """Return the accounts of a run by step; the last ones are kept as long as the run is.

    Args:
        spans: The run.
        with_tables: The same run with tables that are read only once, if the caller reads them too.
    """
    found = _LAST.get(spans)
    if found is None:
        run = spans if with_tables is None else with_tables
        found = _LAST[spans] = compute_accounts(run, per_step=True)
    return found


def category_totals(
    accounts: Accounts, *, price: float | None = None, currency: str = "EUR"
) -> Table:
    """Return one row per category: its time of the job, its cost, and where this is known from.

    ``total`` adds up to ``wall_ns`` times all ranks; ``in steps`` is the part inside steps.
    ``source`` is ``spans``, ``kernels``, ``both``, or ``none`` for untraced time. The note lists
    the categories without data: they have no row, and are not zero.

    Args:
        accounts: The job's time.
        price: Price of a GPU-hour.
        currency: Unit of the price.
    """
    columns = (
        Column("category", "text"),
        Column("share", "share"),
        Column(_hours(accounts), "number", "h"),
        *([] if price is None else [Column("cost", "number", currency)]),
        Column("total", "duration", "ns"),
        Column("source", "text"),
        Column("in steps", "duration", "ns"),
        Column("% from kernels", "share"),
    )
    if not accounts.wall_ns:
        return Table("ledger", columns, abstained=_NO_DATA)
    rows: list[tuple[Cell, ...]] = []
    for category, total, in_steps, from_kernels in _by_category(accounts):
        hours = total / _HOUR_NS
        source = accounts.sources[category]
        if category == Category.UNTRACED:
            source = "none"
        elif total:
            part = "kernels" if from_kernels == total else "both"
            source = part if from_kernels else "spans"
        rows.append(
            (
                *(category.text, total / accounts.total_ns, hours),
                *(() if price is None else (hours * price,)),
                *(total, source, in_steps, from_kernels / total if from_kernels else None),
            )
        )
    return Table("ledger", columns, rows, _note(accounts))


def _hours(accounts: Accounts) -> str:
    return "rank-hours" if accounts.cpu_only else "GPU-hours"


def category_breakdown(accounts: Accounts) -> Table:
    """Return categories as columns: a row per rank, per step, or both, as the accounts have them.

    Each row adds up to its ``wall``, and all walls add up to the total of `category_totals`. The
    row of the time outside steps has no step. Categories without time have no column.
    """
    per_rank, per_step = accounts.by_rank, accounts.steps is not None
    name = "ledger by " + " and ".join(["rank"] * per_rank + ["step"] * per_step)
    totals = _by_category(accounts)
    shown = [each for each, total, *_ in totals if total or each == Category.UNTRACED]
    columns = (
        *([Column("rank", "count")] if per_rank else []),
        *([Column("step", "count")] if per_step else []),
        Column("wall", "duration", "ns"),
        *(Column(category.text, "duration", "ns") for category in shown),
    )
    if not accounts.wall_ns:
        return Table(name, columns, abstained=_NO_DATA)
    rows: list[tuple[Cell, ...]] = []
    for rank, step, times in _by_rank_and_step(accounts):
        place = (*([rank] if per_rank else []), *([step] if per_step else []))
        rows.append((*place, sum(times), *(times[category] for category in shown)))
    return Table(name, columns, rows)


def _by_category(accounts: Accounts) -> list[tuple[Category, int, int, int]]:
    """Return (category, total, in steps, from kernels), most time first and untraced last."""
    entries = accounts.entries
    in_step = entries.step != OUTSIDE
    keys = entries.category * np.int8(4) + np.int8(2) * in_step + entries.from_kernels
    sums = _sums(accounts, keys, 4 * len(Category), each_rank=False)
    rows = []
    for category in accounts.sources:
        each = sums[4 * category : 4 * category + 4]
        rows.append((category, sum(each), each[2] + each[3], each[1] + each[3]))
    return sorted(rows, key=lambda row: (row[0] == Category.UNTRACED, -row[1], row[0]))


def _by_rank_and_step(accounts: Accounts) -> Iterator[tuple[int, int | None, list[int]]]:
    """Yield (rank, step, time of each category) by rank and step, time outside steps last."""
    entries, width = accounts.entries, len(Category)
    numbers = [None] if accounts.steps is None else [*accounts.steps.tolist(), None]
    size, zeros = len(numbers), np.zeros(len(accounts.rank), dtype=np.int64)
    rank = accounts.rank.astype(np.int64) - SILENT if accounts.by_rank else zeros
    step = zeros if accounts.steps is None else np.where(entries.step < 0, size - 1, entries.step)
    keys, place = np.unique(rank * size + step, return_inverse=True)
    keyed = place * width + entries.category
    sums = _sums(accounts, keyed, len(keys) * width, each_rank=accounts.by_rank)
    of_rank: dict[int, list[int]] = {}
    for at, each in enumerate((keys // size + SILENT).tolist()):
        of_rank.setdefault(each, []).append(at)
    ranks = sorted((*accounts.ranks, *accounts.silent)) if accounts.by_rank else [SILENT]
    for each in ranks:
        for at in of_rank[each if each in of_rank else SILENT]:
            yield each, numbers[keys[at] % size], sums[at * width : (at + 1) * width]


def _sums(accounts: Accounts, keys: npt.NDArray[Any], size: int, each_rank: bool) -> list[int]:
    """Sum the entries by key, exactly: a thousand ranks for a hundred days exceed 64 bits.

    The entries of silent ranks count once if sums are of ``each_rank``, else once per such rank.
    """
    silent = int(np.searchsorted(accounts.rank, SILENT, "right"))
    times = 1 if each_rank else len(accounts.silent)
    parts = (slice(0, silent), slice(silent, None))
    theirs, others = (_exact(keys[part], accounts.entries.ns[part], size) for part in parts)
    return [times * one + other for one, other in zip(theirs, others, strict=True)]


def _exact(keys: npt.NDArray[Any], ns: Int64s, size: int) -> list[int]:
    high, low = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for at in range(0, len(keys), _CHUNK):
        part = slice(at, at + _CHUNK)
        np.add.at(high, keys[part], ns[part] >> _LOW_BITS)
        np.add.at(low, keys[part], ns[part] & (2**_LOW_BITS - 1))
    pairs = zip(high.tolist(), low.tolist(), strict=True)
    return [(above << _LOW_BITS) + below for above, below in pairs]


def _note(accounts: Accounts) -> str:
    ranks, wall_s = len(accounts.ranks) + len(accounts.silent), accounts.wall_ns / 1e9
    hours = f"{_rounded(accounts.total_ns / _HOUR_NS)} {_hours(accounts)}"
    cpu = " (CPU run)" if accounts.cpu_only else ""
    head = f"{ranks} {'rank' if ranks == 1 else 'ranks'} × {_rounded(wall_s)} s = {hours}{cpu}."
    present = {*accounts.sources, *_ONLY_IF_ANY}
    missing = [category for category in Category if category not in present]
    texts = [head, *accounts.notes]
    if Category.HOST_IDLE in missing and Category.COMPUTE in accounts.sources:
        texts.append("Without device kernels, compute includes host-bound idle time.")
    return " ".join([*texts, *_no_data(missing)])


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _no_data(missing: Sequence[Category]) -> list[str]:
    if not missing:
        return []
    unnamed = ", ".join(each.text for each in missing if each not in _NEEDS)
    parts = [f"{each.text} ({_NEEDS[each]})" for each in missing if each in _NEEDS]
    parts += [f"{unnamed} (no spans with matching names)"] if unnamed else []
    count = f"{len(missing)} {'category' if len(missing) == 1 else 'categories'}"
    return [f"No data for {count}: {'; '.join(parts)}."]
