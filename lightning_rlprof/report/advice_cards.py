"""Advice that is given, as cards: what to set, on what evidence, and what it would save."""

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lightning_rlprof.analysis.advice.effects import AT_MOST
from lightning_rlprof.analysis.advice.rule import GIVEN, UNDECIDED
from lightning_rlprof.analysis.findings.finding import rows_of
from lightning_rlprof.tables.table import Table


@dataclass(frozen=True)
class AdviceCard:
    """One rule that is given, in words.

    Attributes:
        id: Of the rule.
        title: What to do.
        saving: What it would save; empty for advice on memory or quality.
        price: The same in short.
        evidence: Quantities of the run, their intervals and limits.
        settings: What to change, a line each.
        effect: What the change is expected to do.
        risk: What it may cost.
        guide: Page and section.
    """

    id: str
    title: str
    saving: str
    price: str
    evidence: str
    settings: tuple[str, ...]
    effect: str
    risk: str
    guide: str


def advice_cards(table: Table) -> list[AdviceCard]:
    """Return a card for each rule that is given, in the order of the table."""
    return [
        AdviceCard(
            row["advice"],
            row["title"],
            _saving(row),
            _price(row),
            row["evidence"],
            tuple(row["settings"].split("; ")),
            row["effect"],
            row["risk"],
            row["guide"],
        )
        for row in rows_of(table)
        if row["verdict"] == GIVEN
    ]


def what_to_record(table: Table) -> list[tuple[str, int]]:
    """Return what to record to decide more, and how many rules each helps, most first."""
    own = [row["record"].split("; ") for row in rows_of(table) if row["verdict"] == UNDECIDED]
    return Counter(chain.from_iterable(own)).most_common()


def _saving(row: dict[str, Any]) -> str:
    if row["saved"] is None:
        return ""
    interval = f"(95% CI {_percent(row['CI low'])}–{_percent(row['CI high'])})"
    if row["saving"] == AT_MOST:
        return f"saves at most {_percent(row['saved'])} of the time {interval}"
    return f"saves {_percent(row['saved'])} of the step, by a replay {interval}"


def _price(row: dict[str, Any]) -> str:
    if row["saved"] is None:
        return ""
    return f"{'at most ' if row['saving'] == AT_MOST else ''}{_percent(row['saved'])}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.0995 else f"{share:.1%}"
