"""GPU-hours of the whole job by category: every second of every rank once, with its cost."""

from collections.abc import Sequence

from lightning_rlprof.analysis.ledger.accounts import OUTSIDE, Accounts, compute_accounts
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_HOUR_NS = 3_600 * 10**9
_FEW_S = 360  # below a tenth of an hour
_NO_DATA = "no spans were recorded"
_ONLY_IF_ANY = (
    Category.LAUNCH_LATENCY,
    Category.UNATTRIBUTED_IDLE,
    Category.PROFILER,
    Category.CUSTOM,
    Category.WARM_UP,
)  # their absence is not missing data
_NEEDS = {
    Category.COLLECTIVE_WAIT: "needs two or more ranks that meet",
    Category.HOST_IDLE: "needs device kernels",
    Category.ROLLOUT_TAIL: "needs a span per request",
}


def ledger(spans: Spans) -> Table:
    """Divide the time of the whole job, wall time times ranks, among categories; sums are exact.

    The rows are those of `category_totals`. Has no data if nothing was recorded.
    """
    return category_totals(accounts_of(spans))


def accounts_of(spans: Spans) -> Accounts:
    """Return the accounts of a run, ranks summed; they are computed once."""
    return spans.once("accounts", compute_accounts, spans.tables)


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
    ns = accounts.job_ns
    totals, in_steps = ns.sum(axis=0).tolist(), ns[:OUTSIDE].sum(axis=0).tolist()
    rows: list[tuple[Cell, ...]] = []
    for category in _most_time_first(accounts):
        total, from_kernels = totals[category], int(accounts.kernels_ns[category])
        hours = total / _HOUR_NS
        source = accounts.sources[category]
        if category == Category.UNTRACED:
            source = "none"
        elif total:
            part = "kernels" if from_kernels == total else "both"
            source = part if from_kernels else "spans"
        cost = () if price is None else (hours * price,)
        measured = from_kernels / total if from_kernels else None
        times = (total, source, in_steps[category], measured)
        rows.append((category.text, total / accounts.total_ns, hours, *cost, *times))
    return Table("ledger", columns, rows, _note(accounts))


def _hours(accounts: Accounts) -> str:
    return f"{accounts.device}-hours"


def category_breakdown(accounts: Accounts, *, per_step: bool) -> Table:
    """Return categories as columns: a row per rank if the accounts have them, per step, or both.

    Each row adds up to its ``wall``, and all walls add up to the total of `category_totals`. The
    row of the time outside steps has no step. Categories without time have no column.
    """
    per_rank, job_ns = accounts.by_rank, accounts.job_ns
    name = "ledger by " + " and ".join(["rank"] * per_rank + ["step"] * per_step)
    totals = job_ns.sum(axis=0)
    shown = [
        each for each in _most_time_first(accounts) if totals[each] or each == Category.UNTRACED
    ]
    columns = (
        *([Column("rank", "count")] if per_rank else []),
        *([Column("step", "count")] if per_step else []),
        Column("wall", "duration", "ns"),
        *(Column(category.text, "duration", "ns") for category in shown),
    )
    if not accounts.wall_ns:
        return Table(name, columns, abstained=_NO_DATA)
    by_rank: dict[int | None, Int64s] = {None: job_ns}
    if per_rank:
        recorded = zip(accounts.ranks, accounts.ns, strict=True)
        by_rank = {**dict.fromkeys(accounts.silent, accounts.silent_ns), **dict(recorded)}
    steps = [*accounts.steps.tolist(), None] if per_step else [None]
    rows: list[tuple[Cell, ...]] = []
    for rank, ns in sorted(by_rank.items()):
        for step, times in zip(steps, (ns if per_step else [ns.sum(axis=0)]), strict=True):
            if times.any():
                place = (*([rank] if per_rank else []), *([step] if per_step else []))
                rows.append((*place, int(times.sum()), *times[shown].tolist()))
    return Table(name, columns, rows)


def _most_time_first(accounts: Accounts) -> list[Category]:
    """Return the categories with data, untraced last."""
    totals = accounts.job_ns.sum(axis=0)
    return sorted(
        accounts.sources, key=lambda each: (each == Category.UNTRACED, -totals[each], each)
    )


def _note(accounts: Accounts) -> str:
    ranks, wall_s = len(accounts.ranks) + len(accounts.silent), accounts.wall_ns / 1e9
    total_s = accounts.total_ns / 1e9
    hours = f"{_rounded(total_s / 3600)} {_hours(accounts)}"
    if total_s < _FEW_S:
        hours = f"{_rounded(total_s)} {accounts.device}-seconds"
    cpu = " (CPU run)" if accounts.device == "rank" else ""
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
