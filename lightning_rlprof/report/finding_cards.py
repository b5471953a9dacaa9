"""Findings as cards: what a line of a table would cut off, in words, with where to look."""

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lightning_rlprof.report.terminal import duration
from lightning_rlprof.tables.table import Table


@dataclass(frozen=True)
class CardView:
    """One finding in words.

    Attributes:
        claim: What is held.
        price: What it costs, and how sure that is.
        evidence: What it rests on.
        where: Rank, step and time of the first of the evidence; empty where there is none.
        step: That step, where a timeline shows it.
        experiment: What to try next.
        refuted: What would show that the claim is wrong.
        commands: What reproduces the number, and what prints the evidence.
    """

    claim: str
    price: str
    evidence: str
    where: str
    step: int | None
    experiment: str
    refuted: str
    commands: tuple[str, str]


def cards(findings: Table, run: str = "RUN", shown: Collection[int] = ()) -> list[CardView]:
    """Return a card per finding.

    Args:
        findings: The answer of the analysis.
        run: How the commands call the run, as a shell takes it.
        shown: Steps of the timeline beside the cards.
    """
    names = [column.name for column in findings.columns]
    rows: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in findings.rows]
    return [
        CardView(
            row["finding"],
            _price(row),
            row["evidence"],
            _where(row),
            row["step"] if row["step"] in shown else None,
            row["next experiment"],
            row["refuted if"],
            (row["reproduce"].replace("RUN", run), f"rlprof sql {run} {_quoted(row['query'])}"),
        )
        for row in rows
    ]


def _price(row: dict[str, Any]) -> str:
    sure = f"{row['confidence']} confidence"
    if row["effect"] is None:
        return f"without a price in time, {sure}"
    bounds = ""
    if row["low"] is not None and row["high"] is not None:
        bounds = f" ({duration(row['low'])} to {duration(row['high'])})"
    return f"{duration(row['effect'])} of GPU time{bounds}, {row['share']:.1%} of the job, {sure}"


def _where(row: dict[str, Any]) -> str:
    """Say where the evidence begins; a viewer of the exported trace counts from the same zero."""
    if row["rank"] is None:
        return ""
    step = "" if row["step"] is None else f", step {row['step']}"
    return f"rank {row['rank']}{step}, {row['from'] / 1e9:.6f} s to {row['to'] / 1e9:.6f} s"


def _quoted(query: str) -> str:
    """Return a query as a shell takes it, in double quotes where that is safe: SQL has single."""
    return shlex.quote(query) if set(query) & set('"$`\\!') else f'"{query}"'
