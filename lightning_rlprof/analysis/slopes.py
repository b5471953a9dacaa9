"""How much longer a rank stays per time that it came later: a robust line through zero."""

import numpy as np

from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.others import apart, middle

__all__ = ["slope"]

_FEWEST = 10  # independent values below which a slope says nothing
_SPREAD = 1.2533 * 1.4826  # a median's standard error by the median of absolute residuals


def slope(late: Floats, longer: Floats, work: Floats | None = None) -> tuple[float, float]:
    """Return the slope of ``longer`` by ``late`` and its standard error, infinite where unknown.

    Both are taken relative to the step's median and to the rank's own: what remains is whether the
    same rank stays longer when it comes earlier. The line is that of least absolute deviations, the
    weighted median of the ratios, so that a single bad step does not matter.

    Args:
        late: How late each rank was; shape (ranks, steps), NaN where that is not known.
        longer: How much longer than expected it stayed.
        work: What it had to do, if both are to be freed of what work explains of them (Frisch and
            Waugh 1933): a rank with long answers comes late and has more to do.
    """
    columns = [late, longer] if work is None else [late, longer, work]
    (x, y, *pulls), freedom = _bare(columns)
    for pull in pulls:
        size = float(pull @ pull)
        if size > 0:
            x, y = (values - pull * (float(pull @ values) / size) for values in (x, y))
    total = float(np.sqrt(x @ x))
    moved = np.abs(x) > 1e-9 * total
    if freedom < _FEWEST or not moved.any():
        return 0.0, np.inf
    few = float(np.sqrt(len(x) / freedom))
    x, y = x[moved], y[moved]
    order = np.argsort(y / x)
    weight = np.cumsum(np.abs(x[order]))
    at = order[int(np.searchsorted(weight, weight[-1] / 2))]
    found = float(y[at] / x[at])
    return found, few * _SPREAD * float(np.median(np.abs(y - found * x))) / total


def _bare(columns: list[Floats]) -> tuple[list[Floats], int]:
    """Take off what all ranks share in a step and what a rank has in all steps (median polish).

    Returns:
        Values that are known in all columns, and how many of them are independent.
    """
    keep = ~np.isnan(columns).any(axis=0)
    rest = [np.where(keep, values, np.nan) for values in columns]
    for _ in range(2):  # with a rank far off the first median of a step is always the same rank's
        rest = [apart(values) for values in rest]
        rest = [values - middle(values, axis=1)[:, None] for values in rest]
    there = ~np.isnan(rest[0])
    taken = int(there.any(axis=0).sum() + there.any(axis=1).sum())
    return [values[there] for values in rest], int(there.sum()) - taken + 1
