"""Robust statistics: NaN-aware medians over ranks, a robust slope, and Huber regression."""

from collections.abc import Sequence

import numpy as np

from lightning_rlprof.tables.arrays import Float64s, Int64s

_LONG, _FEW = 4_096, 16  # Of more values than the first, this many are found without sorting.
_MAX_PAIRED_VALUES = 1_000  # All their pairs are compared, so that more are thinned evenly.

_MIN_VALUES = 10  # A slope needs this many independent values.
MAD_TO_SPREAD = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""

_SPREAD = 1.2533 * MAD_TO_SPREAD  # It turns the median of absolute residuals into a median's error.

_ROUNDS = 30
_MAX_ROWS = 20_000  # Three numbers are learned from them; more rows cost time and change nothing.
_HUBER = 1.345  # A residual of fewer spreads counts in full: 95% as good as least squares.
_MIN_TIME_SHARE = 1e-3  # No expected time is a smaller part of the median.


def nan_median(values: Float64s, axis: int = 0) -> Float64s:
    """Return the median along an axis, ignoring NaN; NaN if all values are.

    Three times as fast as `numpy.nanmedian`, which takes a slow path once a NaN is present.

    Example::

        >>> nan_median(np.array([1.0, np.nan, 3.0, 10.0])).item()
        3.0
    """
    count = np.sum(~np.isnan(values), axis=axis, keepdims=True)
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, values.shape[axis] - 1)
    middle = np.flatnonzero(np.bincount(np.append(low, high)))
    if values.shape[axis] >= _LONG and len(middle) <= _FEW:
        ordered = np.partition(values, middle, axis=axis)
    else:
        ordered = np.sort(values, axis=axis)
    pair = [np.take_along_axis(ordered, at, axis) for at in (low, high)]
    return np.asarray((pair[0] + pair[1]) / 2).squeeze(axis)


def spread_of(values: Float64s) -> float:
    """Return the standard deviation that a normal distribution of this median deviation has.

    Example::

        >>> round(spread_of(np.array([1.0, 2.0, 3.0, 100.0])), 3)
        1.483
    """
    return MAD_TO_SPREAD * float(np.median(np.abs(values - np.median(values))))


def leave_one_out_median(values: Float64s, least: int = 1) -> Float64s:
    """Return for each rank the median of all other ranks.

    Args:
        values: Ranks along axis 0.
        least: With fewer others the answer is NaN, as it is if the rank itself is NaN.

    Example::

        >>> leave_one_out_median(np.array([1.0, 2.0, 4.0])).tolist()
        [3.0, 2.5, 1.5]
    """
    ordered = np.sort(values, axis=0)
    others = np.sum(~np.isnan(values), axis=0, keepdims=True) - 1
    found = np.zeros(values.shape)
    for at in (np.maximum(others - 1, 0) // 2, np.maximum(others, 0) // 2):
        # Without the rank itself, each higher value is one place further down.
        here, behind = (
            np.take_along_axis(ordered, np.minimum(each, len(values) - 1), 0)
            for each in (at, at + 1)
        )
        found += np.where(values > here, here, behind) / 2
    return np.where(np.isnan(values) | (others < max(least, 1)), np.nan, found)


def deviation_from_median(values: Float64s) -> Float64s:
    """Return each rank's deviation from the median of all; NaN if fewer than half are known.

    The answer for a single rank is NaN as well.

    Args:
        values: Ranks along axis 0.

    Example::

        >>> deviation_from_median(np.array([[1.0, 1.0], [2.0, np.nan], [6.0, np.nan]])).tolist()
        [[-1.0, nan], [0.0, nan], [4.0, nan]]
    """
    known = np.sum(~np.isnan(values), axis=0)
    found = values - nan_median(values)[None]
    return np.where(known >= max(2, len(values) / 2), found, np.nan)


def theil_sen(at: Int64s, values: Int64s | Float64s) -> float | None:
    """Return the median slope of values over ascending places; None with fewer than two.

    The median of the slopes of all pairs (doi:10.1080/01621459.1968.10480934).

    Example::

        >>> theil_sen(np.arange(9), 5 * np.arange(9))
        5.0
    """
    thin = -(-len(at) // _MAX_PAIRED_VALUES) or 1
    at, values = at[::thin], values[::thin]
    if len(at) < 2:
        return None
    first, second = np.triu_indices(len(at), 1)
    return float(np.median((values[second] - values[first]) / (at[second] - at[first])))


def slope(late: Float64s, longer: Float64s, work: Float64s | None = None) -> tuple[float, float]:
    """Return the slope of ``longer`` by ``late`` and its standard error, infinite if unknown.

    Both are taken relative to the step's median and to the rank's own. What remains is whether the
    same rank stays longer when it arrives earlier. The line has least absolute deviations, the
    weighted median of the ratios, so a single bad step does not matter.

    Args:
        late: How late each rank was; shape (ranks, steps), NaN if unknown.
        longer: How much longer than expected it stayed.
        work: Its work, to remove what work explains of both (Frisch and Waugh 1933): a rank with
            long responses arrives late and has more to do.
    """
    columns = [late, longer] if work is None else [late, longer, work]
    (x, y, *pulls), freedom = _bare(columns)
    for pull in pulls:
        size = float(pull @ pull)
        if size > 0:
            x, y = (values - pull * (float(pull @ values) / size) for values in (x, y))
    total = float(np.sqrt(x @ x))
    moved = np.abs(x) > 1e-9 * total
    if freedom < _MIN_VALUES or not moved.any():
        return 0.0, np.inf
    few = float(np.sqrt(len(x) / freedom))
    x, y = x[moved], y[moved]
    order = np.argsort(y / x)
    weight = np.cumsum(np.abs(x[order]))
    at = order[int(np.searchsorted(weight, weight[-1] / 2))]
    found = float(y[at] / x[at])
    return found, few * _SPREAD * float(np.median(np.abs(y - found * x))) / total


def _bare(columns: list[Float64s]) -> tuple[list[Float64s], int]:
    """Remove what all ranks share in a step, and what a rank has in all steps (median polish).

    Returns:
        Values that are known in all columns, and how many of them are independent.
    """
    keep = ~np.isnan(columns).any(axis=0)
    rest = [np.where(keep, values, np.nan) for values in columns]
    for _ in range(2):  # With a rank far off, the first median of a step is always the same rank's.
        rest = [deviation_from_median(values) for values in rest]
        rest = [values - nan_median(values, axis=1)[:, None] for values in rest]
    there = ~np.isnan(rest[0])
    taken = int(there.any(axis=0).sum() + there.any(axis=1).sum())
    return [values[there] for values in rest], int(there.sum()) - taken + 1


def expected(ns: Float64s, work: Sequence[Float64s]) -> Float64s:
    """Return the time that each span's work explains: ``a + b * work[0] + c * work[1] …``.

    Huber's regression (1964) on relative residuals by iterated weighting. a, b and c are not
    negative: more work never takes less time. Relative, because noise grows with the time itself.
    NaN if time or work is unknown.

    Args:
        ns: Times; NaN without a span.
        work: Work of each span, of the same shape, such as tokens and their squares.

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
    floor = _MIN_TIME_SHARE * float(np.median(ns[usable]))
    found[usable] = np.maximum(_coefficients(ns[usable], table) @ table, floor)
    return found


def _coefficients(ns: Float64s, table: Float64s) -> Float64s:
    """Return one number per row of the table, none negative."""
    if len(ns) > _MAX_ROWS:
        some = np.random.default_rng(0).choice(len(ns), _MAX_ROWS, replace=False)
        ns, table = ns[some], table[:, some]
    middle = float(np.median(ns))
    fit, beta = np.full(len(ns), middle), np.zeros(len(table))
    for _ in range(_ROUNDS):
        off = np.abs(ns - fit) / fit
        spread = MAD_TO_SPREAD * float(np.median(off)) * _HUBER + 1e-9
        weight = np.minimum(1.0, spread / np.maximum(off, 1e-300)) / fit**2
        before, beta = beta, _not_negative(table, ns, weight)
        fit = np.maximum(beta @ table, _MIN_TIME_SHARE * middle)
        if np.allclose(beta, before, rtol=1e-6, atol=1e-9 * middle):
            break
    return beta


def _not_negative(table: Float64s, ns: Float64s, weight: Float64s) -> Float64s:
    """Solve weighted least squares without negative coefficients; Lawson and Hanson (1974)."""
    left, right = (table * weight) @ table.T, table @ (weight * ns)
    beta, used = np.zeros(len(table)), np.zeros(len(table), dtype=bool)
    close = 1e-9 * float(np.abs(right).max(initial=0.0))
    for _ in range(3 * len(table)):
        gradient = np.where(used, -np.inf, right - left @ beta)
        if gradient.max() <= close:
            break
        used[int(np.argmax(gradient))] = True
        while True:
            part = np.zeros(len(table))
            part[used] = np.linalg.lstsq(left[np.ix_(used, used)], right[used], rcond=1e-10)[0]
            below = used & (part <= 0)
            if not below.any():
                break
            reach = beta[below] / np.maximum(beta[below] - part[below], 1e-300)
            beta = beta + float(reach.min()) * (part - beta)
            used &= beta > 1e-12 * float(beta.max(initial=0.0))
        beta = part
    return beta
