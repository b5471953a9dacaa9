"""Problems and ideas as cards: texts too long for a table row, and where to look."""

import shlex
from collections.abc import Collection
from dataclasses import dataclass

from lightning_rlprof.analysis.diagnosis.problem import Finding, Offer
from lightning_rlprof.report.terminal import duration


@dataclass(frozen=True)
class CardView:
    """One problem or idea in words.

    Attributes:
        id: Of the problem.
        title: What is wrong, with values of the run.
        kind: ``ended``, ``distorts``, ``problem`` or ``idea``.
        confidence: ``high`` or ``medium``.
        price: What it lost, in short; empty if it costs none.
        cost: The same with its interval, and the confidence.
        evidence: What was measured.
        where: Rank, step and time of the first event; empty if there is none.
        step: That step, if a timeline shows it.
        act: What to do first.
        remedies: What to change.
        ruled_out_if: Observation that disproves it.
        commands: The command that shows more, and the one that prints the events.
    """

    id: str
    title: str
    kind: str
    confidence: str
    price: str
    cost: str
    evidence: str
    where: str
    step: int | None
    act: str
    remedies: tuple["RemedyView", ...]
    ruled_out_if: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class RemedyView:
    """One remedy in words: what to do, what that saves, the settings, and the risk."""

    title: str
    saves: str
    settings: tuple[str, ...]
    risk: str


def cards(
    found: Collection[Finding], run: str, shown: Collection[int] = (), device: str = "GPU"
) -> list[CardView]:
    """Return a card per problem and idea.

    Args:
        found: Problems and ideas.
        run: How the commands call the run, as a shell takes it.
        shown: Steps of the timeline beside the cards.
        device: What the time is of, see `Spans.device_word`.
    """
    return [
        CardView(
            each.id,
            each.heading,
            each.kind,
            each.confidence,
            "" if each.price is None else f"{each.price.text} · {duration(each.price.ns)}",
            _cost(each, device),
            each.evidence,
            _where(each),
            each.place.step if each.place is not None and each.place.step in shown else None,
            each.act,
            tuple(map(_remedy, each.remedies)),
            each.problem.ruled_out_if,
            (each.look, *([f"rlprof sql {run} {_quoted(each.query)}"] if each.query else [])),
        )
        for each in found
    ]


def _remedy(offer: Offer) -> RemedyView:
    saves = "" if offer.saves is None else f"{offer.saves.text}, by a replay"
    settings = tuple(each.text for each in offer.settings)
    return RemedyView(offer.remedy.title, saves, settings, offer.remedy.risk)


def _cost(found: Finding, device: str) -> str:
    sure = f"{found.confidence} confidence"
    if found.price is None:
        return sure
    return f"{found.price.text}, {duration(found.price.ns)} of {device} time; {sure}"


def _where(found: Finding) -> str:
    """Say where the evidence begins; a viewer of the exported trace counts from the same zero."""
    place = found.place
    if place is None or place.from_ns is None or place.to_ns is None:
        return ""
    step = "" if place.step is None else f", step {place.step}"
    return f"rank {place.rank}{step}, {place.from_ns / 1e9:.6f} s to {place.to_ns / 1e9:.6f} s"


def _quoted(query: str) -> str:
    """Return a query as a shell takes it, in double quotes where that is safe: SQL has single."""
    return shlex.quote(query) if set(query) & set('"$`\\!') else f'"{query}"'
