"""Findings as cards: texts too long for a table row, and where to look."""

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
        title: The problem.
        kind: ``problem`` or ``idea``.
        confidence: ``high`` or ``medium``.
        price: Its cost in short; empty if it has none.
        cost: Its cost with the confidence interval, and the confidence.
        evidence: The measurement.
        where: Rank, step and time of the first event; empty if there is none.
        step: That step, if a timeline shows it.
        suggestion: What to try.
        ruled_out_if: Observation that disproves the finding.
        commands: The command that shows the number, and the one that prints the events.
    """

    title: str
    kind: str
    confidence: str
    price: str
    cost: str
    evidence: str
    where: str
    step: int | None
    suggestion: str
    ruled_out_if: str
    commands: tuple[str, str]


def cards(
    findings: Table, run: str, shown: Collection[int] = (), device: str = "GPU"
) -> list[CardView]:
    """Return a card per finding.

    Args:
        findings: The answer of the analysis.
        run: How the commands call the run, as a shell takes it.
        shown: Steps of the timeline beside the cards.
        device: What the time is of, see `Spans.device_word`.
    """
    names = [column.name for column in findings.columns]
    rows: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in findings.rows]
    return [
        CardView(
            row["finding"],
            row["kind"],
            row["confidence"],
            _price(row),
            _cost(row, device),
            row["evidence"],
            _where(row),
            row["step"] if row["step"] in shown else None,
            row["try"],
            row["ruled out if"],
            (row["reproduce"], f"rlprof sql {run} {_quoted(row['query'])}"),
        )
        for row in rows
    ]


def _price(row: dict[str, Any]) -> str:
    if row["cost"] is None:
        return ""
    word = "takes" if row["kind"] == "idea" else "lost"
    return f"{word} {row['share']:.1%} · {duration(row['cost'])}"


def _cost(row: dict[str, Any], device: str) -> str:
    sure = f"{row['confidence']} confidence"
    if row["cost"] is None:
        return f"no time cost, {sure}"
    bounds = ""
    if row["CI low"] is not None and row["CI high"] is not None:
        bounds = f" (95% CI {duration(row['CI low'])}–{duration(row['CI high'])})"
    return (
        f"{duration(row['cost'])} of {device} time{bounds}, {row['share']:.1%} of the job, {sure}"
    )


def _where(row: dict[str, Any]) -> str:
    """Say where the evidence begins; a viewer of the exported trace counts from the same zero."""
    if row["rank"] is None:
        return ""
    step = "" if row["step"] is None else f", step {row['step']}"
    return f"rank {row['rank']}{step}, {row['from'] / 1e9:.6f} s to {row['to'] / 1e9:.6f} s"


def _quoted(query: str) -> str:
    """Return a query as a shell takes it, in double quotes where that is safe: SQL has single."""
    return shlex.quote(query) if set(query) & set('"$`\\!') else f'"{query}"'
