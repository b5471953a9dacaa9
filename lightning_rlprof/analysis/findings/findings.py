"""What is worth acting on: its price, its evidence, where to see it, and what refutes it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from lightning_rlprof.analysis.device.launches import unpaired
from lightning_rlprof.analysis.device.timeline import device_runs
from lightning_rlprof.analysis.findings.device_rules import device_claims, kernel_claims
from lightning_rlprof.analysis.findings.efficiency_rules import speed_claims, transfer_claims
from lightning_rlprof.analysis.findings.finding import Claim, Undecided
from lightning_rlprof.analysis.findings.ledger_rules import ledger_claims
from lightning_rlprof.analysis.findings.run_rules import memory_claims, slow_claims
from lightning_rlprof.analysis.ledger.ledger import cached_accounts
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_COLUMNS = (
    Column("finding", "text"),
    Column("share", "share"),
    Column("effect", "duration", "ns"),
    Column("low", "duration", "ns"),
    Column("high", "duration", "ns"),
    Column("confidence", "text"),
    Column("next experiment", "text"),
    Column("refuted if", "text"),
    Column("evidence", "text"),
    Column("reproduce", "text"),
    Column("query", "text"),
    Column("rank", "count"),
    Column("step", "count"),
    Column("from", "duration", "ns"),
    Column("to", "duration", "ns"),
)
_NOTHING = "no step was recorded to its end"


def findings(spans: Spans) -> Table:
    """Return what is worth acting on, the most costly first; what has no price comes last.

    ``effect`` is GPU-seconds of the whole job, ``share`` its part of it; ``low`` and ``high`` bound
    it with 95 % confidence, by a bootstrap over steps or over pieces of the recorded time. A rule
    speaks where all of the interval is above its threshold, is silent where all is below, and
    abstains otherwise: the note says which.

    ``query`` is the SELECT that returns the evidence; ``rank``, ``step``, ``from`` and ``to`` are
    where the first of it lies, in the report's timeline and in the exported trace.

    Abstains where no step was recorded to its end, and no device.
    """
    found = [*_said(spans)]
    if not found and not len(spans.rows(kind="step")):
        return Table("findings", _COLUMNS, abstained=_NOTHING)
    book = cached_accounts(spans)
    whole = book.wall_ns * (len(book.ranks) + len(book.silent))
    rows = [_row(each, whole) for each in found if isinstance(each, Claim)]
    rows.sort(key=lambda row: -int(row[2] or 0))
    unsure: dict[str, list[str]] = {}
    for each in found:
        if isinstance(each, Undecided):
            unsure.setdefault(each.why, []).append(each.subject)
    notes = (f"Not decided, {why}: {', '.join(names)}." for why, names in unsure.items())
    return Table("findings", _COLUMNS, rows, " ".join(notes))


def _said(spans: Spans) -> Iterator[Claim | Undecided]:
    """Yield what all rules say; what most of them ask of device tools is read once."""
    if len(spans.rows(kind="step")):  # what takes most memory comes before all that is kept
        yield from slow_claims(spans)
    held = replace(spans, tables={name: cache(read) for name, read in spans.tables.items()})
    devices, pairs = device_runs(held), unpaired(held)
    known = [lane.known for lane in devices.lanes]
    seen_ns = sum(int((last - first).sum()) for first, last in known)
    yield from device_claims(held, devices, pairs)
    yield from kernel_claims(held, seen_ns)
    yield from transfer_claims(held, devices, seen_ns)
    yield from memory_claims(held)
    yield from speed_claims(spans)
    yield from ledger_claims(spans, cached_accounts(spans, held), pairs)


def _row(claim: Claim, whole: int) -> tuple[Cell, ...]:
    share = None if claim.effect is None or not whole else claim.effect / whole
    place = claim.place or (None,) * 4
    price = (share, claim.effect, claim.low, claim.high, claim.confidence)
    words = (claim.experiment, claim.refuted, claim.evidence, claim.command, claim.query)
    return (claim.text, *price, *words, *place)
