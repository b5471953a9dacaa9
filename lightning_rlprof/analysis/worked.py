"""How long a stage should have taken for its work, learned from all ranks and steps at once."""

import itertools
from collections.abc import Sequence

import numpy as np

from lightning_rlprof.analysis.exact import Floats

__all__ = ["expected"]

_ROUNDS = 30
_ENOUGH = 20_000  # rows to learn three numbers from; more cost time and change nothing
_HUBER = 1.345  # spreads up to which a residual counts in full: 95 % as good as least squares
_LEAST = 1e-3  # of the median: what the shortest expected time may be


def expected(ns: Floats, work: Sequence[Floats]) -> Floats:
    """Return the time that each span's work explains: ``a + b * work[0] + c * work[1] …``.

    Huber's regression (1964) on relative residuals by iterated weighting; a, b and c not negative:
    more work never takes less time, and a stage that waits for others does not teach the contrary.
    Relative, as noise grows with the time itself. NaN where time or work is not known.

    Args:
        ns: Times; NaN where there was no span.
        work: What each span had to do, of the same shape, such as tokens and their squares.

    Example::

        >>> tokens = np.array([1.0, 2.0, 3.0, 4.0])
        >>> expected(5 + 10 * tokens, [tokens]).round(3).tolist()
        [15.0, 25.0, 35.0, 45.0]
    """
    columns = [np.ones_like(ns), *work]
    usable = np.all([np.isfinite(column) for column in (ns, *columns)], axis=0) & (ns > 0)
    found = np.full(ns.shape, np.nan)
    if not usable.any():
        return found
    table = np.stack([column[usable] for column in columns])
    scale = np.maximum(np.abs(table).max(axis=1), 1e-300)
    table /= scale[:, None]
    floor = _LEAST * float(np.median(ns[usable]))
    found[usable] = np.maximum(_coefficients(ns[usable], table) @ table, floor)
    return found


def _coefficients(ns: Floats, table: Floats) -> Floats:
    """Return one number per row of the table, none negative."""
    if len(ns) > _ENOUGH:
        some = np.random.default_rng(0).choice(len(ns), _ENOUGH, replace=False)
        ns, table = ns[some], table[:, some]
    middle = float(np.median(ns))
    fit, beta = np.full(len(ns), middle), np.zeros(len(table))
    for _ in range(_ROUNDS):
        off = np.abs(ns - fit) / fit
        spread = 1.4826 * float(np.median(off)) * _HUBER + 1e-9
        weight = np.minimum(1.0, spread / np.maximum(off, 1e-300)) / fit**2
        before, beta = beta, _not_negative(table, ns, weight)
        fit = np.maximum(beta @ table, _LEAST * middle)
        if np.allclose(beta, before, rtol=1e-6, atol=1e-9 * middle):
            break
    return beta


def _not_negative(table: Floats, ns: Floats, weight: Floats) -> Floats:
    """Solve weighted least squares for every choice of columns; the best without negative ones."""
    left, right = (table * weight) @ table.T, table @ (weight * ns)
    best, gain = np.zeros(len(table)), 0.0
    for count in range(1, len(table) + 1):
        for chosen in itertools.combinations(range(len(table)), count):
            at = list(chosen)
            part = np.linalg.lstsq(left[np.ix_(at, at)], right[at], rcond=1e-10)[0]
            # What least squares takes off the sum of squares; a tie is for the fewer columns.
            explained = float(part @ right[at])
            if part.min() >= 0 and explained > gain * (1 + 1e-9):
                best, gain = np.zeros(len(table)), explained
                best[at] = part
    return best
