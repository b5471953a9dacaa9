"""What a rule says: a claim with its price, its evidence, where to look, and what refutes it."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans

HIGH, MEDIUM = "high", "medium"
"""How sure a claim is. A rule that is less sure abstains."""

_DRAWS = 1_000
_MOST = 1_000  # pieces that are drawn; of more, neighbours are drawn together


class Place(NamedTuple):
    """Where in the run to look: one rank, one step, and from when to when on the run's axis.

    ``step`` is None outside of steps, ``from_ns`` and ``to_ns`` where nothing told times.
    """

    rank: int
    step: int | None
    from_ns: int | None
    to_ns: int | None


class Claim(NamedTuple):
    """One finding.

    Attributes:
        text: What is held.
        effect: Its price in nanoseconds of GPU time; None where it is not a time.
        low: Lower bound of the price.
        high: Upper bound of the price.
        confidence: `HIGH` or `MEDIUM`.
        experiment: What to try next.
        refuted: What would show that the claim is wrong.
        evidence: What it rests on, in words.
        query: The SELECT that returns these events and no others.
        place: Where the first of them is.
        command: What reproduces the number; RUN stands for the run.
    """

    text: str
    effect: int | None
    low: int | None
    high: int | None
    confidence: str
    experiment: str
    refuted: str
    evidence: str
    query: str
    place: Place | None
    command: str


class Undecided(NamedTuple):
    """A rule that abstains: its subject, and why."""

    subject: str
    why: str


def bounds(own: Float64s, whole: Float64s, upper: Float64s | None = None) -> tuple[float, float]:
    """Bound a part's share of the whole: the 95 % interval of a bootstrap over pieces of time.

    Args:
        own: Time of the part in each piece.
        whole: Length of each piece.
        upper: What the part may be at most, where some of it is not known; unset, ``own``.
    """
    own, whole, upper = map(_joined, (own, whole, own if upper is None else upper))
    drawn = _drawn(len(own))
    length = np.maximum(drawn @ whole, 1.0)
    low, high = np.quantile(drawn @ own / length, 0.025), np.quantile(drawn @ upper / length, 0.975)
    return float(low), float(high)


def _joined(pieces: Float64s) -> Float64s:
    """Return no more than `_MOST` pieces, neighbours added up."""
    if len(pieces) <= _MOST:
        return pieces
    found: Float64s = np.add.reduceat(pieces, np.arange(_MOST) * len(pieces) // _MOST)
    return found


@lru_cache(maxsize=1)  # the rules of one run ask for the same ones
def _drawn(pieces: int) -> Float64s:
    """Return how often each piece is drawn, shape (draws, pieces)."""
    drawn = np.random.default_rng(0).integers(0, pieces, (_DRAWS, pieces))
    place = (drawn + pieces * np.arange(_DRAWS)[:, None]).ravel()
    return np.bincount(place, minlength=_DRAWS * pieces).reshape(_DRAWS, pieces).astype(np.float64)


def place_of(spans: Spans, rows: Int64s) -> Place | None:
    """Return where the first of some spans is; None without any."""
    if not len(rows):
        return None
    row = int(rows[0])
    step = int(spans.step[row]) or None
    return Place(int(spans.rank[row]), step, int(spans.start_ns[row]), int(spans.end_ns[row]))


def place_at(spans: Spans, rank: int, from_ns: int, to_ns: int) -> Place:
    """Return a place by its time; its step is the one of its rank that is open then."""
    rows = spans.rows(kind="step", rank=rank)
    at = int(np.searchsorted(spans.start_ns[rows], from_ns, "right")) - 1
    inside = at >= 0 and from_ns < int(spans.end_ns[rows[at]])
    return Place(rank, int(spans.step[rows[at]]) if inside else None, from_ns, to_ns)


def quoted(text: str) -> str:
    """Return a text as SQL spells it."""
    return "'" + text.replace("'", "''") + "'"


def spans_query(spans: Spans, rows: Sequence[int]) -> str:
    """Return the SELECT of just these spans, which rank and id name."""
    names = ", ".join(f"({spans.rank[row]}, {spans.id[row]})" for row in rows)
    return f"select * from spans where (rank, id) in ({names}) order by duration_ns desc"
