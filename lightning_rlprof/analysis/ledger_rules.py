"""The rules on labels of the ledger: a label that takes more of the steps than it should."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.book import Book
from lightning_rlprof.analysis.claims import (
    HIGH,
    MEDIUM,
    Claim,
    Undecided,
    bounds,
    place_of,
    spans_query,
)
from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.labels import Label, labels_of
from lightning_rlprof.analysis.ledger import breakdown
from lightning_rlprof.analysis.rules import RULES, Rule
from lightning_rlprof.analysis.unpaired import LOST, Unpaired
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["FEWEST", "UNSURE", "ledger_claims"]

FEWEST = 5
"""Steps below which nothing is known of how a share changes from one to the next."""

UNSURE = 0.2
"""Threshold at least, where kernels tell a label and nobody knows whether all were recorded.

Whatever a fifth of lost kernels hid is up to a fifth of the time exposed.
"""

_SHOWN = 3
_KERNELS = ("kernels", "both")  # evidence in which kernels have a part
_ALONE = "have no counterpart on other ranks"  # the book's remark on collectives
_UNMATCHED = "as collectives lack their counterparts: wait and transfer are not told apart"
_LOSSY = "as kernels were lost: see the integrity sheet"


class _Job(NamedTuple):
    """What the rules look at: the time of each label in each step, summed over ranks."""

    spans: Spans
    book: Book
    pairs: Unpaired | None
    numbers: list[int]
    steps: dict[Label, Floats]
    walls: Floats


def ledger_claims(spans: Spans, book: Book, pairs: Unpaired | None) -> Iterator[Claim | Undecided]:
    """Yield what each rule says; nothing where no step was recorded to its end.

    Where kernels tell what is host bound, that is a matter of the rule on devices: it looks at the
    launches, and so cannot take a lost kernel for a late host.

    Args:
        spans: The run.
        book: Its time, balanced per step, ranks together.
        pairs: Its launches and kernels.
    """
    job = _job(spans, book, pairs)
    if not len(job.walls):
        return
    for rule in RULES:
        if rule.label == Label.HOST and book.told.get(rule.label) in _KERNELS:
            continue
        found = _of_label(job, rule)
        if found is not None:
            yield found


def _job(spans: Spans, book: Book, pairs: Unpaired | None) -> _Job:
    by_step = breakdown(book)
    names = {label.text: label for label in Label}
    steps: list[Any] = [row for row in by_step.rows if row[0] is not None]
    columns = [column.name for column in by_step.columns]
    table = np.array([row[1:] for row in steps], dtype=np.float64).reshape(-1, len(columns) - 1)
    own = {names[name]: table[:, at] for at, name in enumerate(columns[1:]) if name in names}
    return _Job(spans, book, pairs, [row[0] for row in steps], own, table[:, 0])


def _of_label(job: _Job, rule: Rule) -> Claim | Undecided | None:
    """Return a finding, None where there is none, or why that is not decided."""
    own = job.steps.get(rule.label, np.zeros_like(job.walls))
    if rule.label not in job.book.told:
        return Undecided(rule.label.text, "as nothing tells")
    if len(job.walls) < FEWEST:
        return Undecided(rule.label.text, f"of {len(job.walls)} steps")
    above, low, high = _threshold(job, rule), *bounds(own, job.walls)
    if high < above:
        return None
    if doubt := _doubt(job, rule.label):
        return Undecided(rule.label.text, doubt)
    if low > above:
        return _claim(job, rule, own, (low, high), above)
    why = f"{low:.0%} to {high:.0%} of the steps where {above:.0%} counts"
    return Undecided(rule.label.text, why)


def _threshold(job: _Job, rule: Rule) -> float:
    by_kernels = job.book.told[rule.label] in _KERNELS
    return max(rule.above, UNSURE) if by_kernels and job.pairs is None else rule.above


def _doubt(job: _Job, label: Label) -> str:
    """Return why a label may have time that is another one's."""
    if job.book.told[label] in _KERNELS and job.pairs is not None and job.pairs.lossy:
        return _LOSSY
    return _UNMATCHED if label == Label.TRANSFER and _alone(job) else ""


def _alone(job: _Job) -> bool:
    """Tell whether ranks lack collectives that others have: what these waited seems a transfer."""
    spans = job.spans
    if len(job.book.ranks) + len(job.book.silent) < 2:
        return False
    rows = np.flatnonzero((labels_of(spans.names) == Label.TRANSFER)[spans.name])
    width = int(spans.rank.max(initial=0)) + 1
    met = (spans.step[rows] * len(spans.names) + spans.name[rows]) * width + spans.rank[rows]
    met, ranks = np.unique(np.unique(met) // width, return_counts=True)
    most = np.zeros(len(spans.names), np.int64)
    np.maximum.at(most, met % len(spans.names), ranks)
    fewer = np.count_nonzero(ranks < most[met % len(spans.names)])
    return bool(fewer > LOST * len(met)) or any(_ALONE in each for each in job.book.remarks)


def _claim(job: _Job, rule: Rule, own: Floats, share: tuple[float, float], above: float) -> Claim:
    low, high = share
    inside = float(job.walls.sum())
    rows, evidence = _seen(job, rule.label, job.numbers[int(np.argmax(own))])
    return Claim(
        rule.claim,
        *(int(own.sum()), int(low * inside), int(high * inside)),
        HIGH if low > 2 * above or low > (1 + above) / 2 else MEDIUM,
        rule.experiment,
        rule.refuted,
        evidence,
        spans_query(job.spans, rows.tolist()),
        place_of(job.spans, rows),
        "rlprof ledger RUN --per-step",
    )


def _seen(job: _Job, label: Label, step: int) -> tuple[Int64s, str]:
    """Return the label's longest spans; without any, the step that has most of it, on each rank."""
    spans = job.spans
    rows = np.flatnonzero((labels_of(spans.names) == label)[spans.name])
    rows = rows[np.argsort(spans.start_ns[rows] - spans.end_ns[rows], kind="stable")][:_SHOWN]
    named = (f"{spans.rank[row]}/{spans.id[row]}" for row in rows.tolist())
    if len(rows):
        return rows, f"longest spans (rank/id): {', '.join(named)}"
    steps = spans.rows(kind="step")
    return steps[spans.step[steps] == step], f"{len(job.walls)} steps, most of it in step {step}"
