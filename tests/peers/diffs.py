"""How two runs are usually compared, for comparison only: formulas that do not know of work."""

from collections.abc import Callable, Mapping

import numpy as np

from lightning_rlprof.tables.spans import Spans

_OVER = 1.05
_SURE = 2.576  # the normal distribution's quantile of 99 %


def stage_times(spans: Spans, stage: str) -> np.ndarray:
    """Return how long each span of a stage took."""
    found: np.ndarray = spans.duration_ns[spans.rows(kind="stage", name=stage)].astype(float)
    return found


def _tokens(spans: Spans, stage: str) -> np.ndarray:
    rows, values = spans.counters["tokens"]
    found: np.ndarray = values[np.isin(rows, spans.rows(kind="stage", name=stage))].astype(float)
    return found


def _told(ratio: float) -> str:
    return "slower" if ratio > _OVER else "faster" if ratio < 1 / _OVER else "same"


def mean_ratio(a: Spans, b: Spans, stage: str) -> str:
    """Judge by the ratio of means, over 5 %."""
    return _told(float(stage_times(b, stage).mean() / stage_times(a, stage).mean()))


def median_ratio(a: Spans, b: Spans, stage: str) -> str:
    """Judge by the ratio of medians, over 5 %."""
    return _told(float(np.median(stage_times(b, stage)) / np.median(stage_times(a, stage))))


def per_token(a: Spans, b: Spans, stage: str) -> str:
    """Judge by the time per token, over 5 %."""
    rates = [stage_times(run, stage).sum() / _tokens(run, stage).sum() for run in (a, b)]
    return _told(float(rates[1] / rates[0]))


def welch(a: Spans, b: Spans, stage: str) -> str:
    """Judge by Welch's t test of the means, at 99 %."""
    one, two = stage_times(a, stage), stage_times(b, stage)
    off = two.mean() - one.mean()
    t = off / np.sqrt(one.var(ddof=1) / len(one) + two.var(ddof=1) / len(two))
    return "same" if abs(t) < _SURE else "slower" if off > 0 else "faster"


def rank_sum(a: Spans, b: Spans, stage: str) -> str:
    """Judge by the Mann-Whitney test, at 99 %."""
    one, two = stage_times(a, stage), stage_times(b, stage)
    above = float((two[:, None] > one[None, :]).sum())
    n, m = len(one), len(two)
    z = (above - n * m / 2) / np.sqrt(n * m * (n + m + 1) / 12)
    return "same" if abs(z) < _SURE else "slower" if z > 0 else "faster"


DIFFS: Mapping[str, Callable[[Spans, Spans, str], str]] = {
    "mean > 5 %": mean_ratio,
    "median > 5 %": median_ratio,
    "per token > 5 %": per_token,
    "Welch's t": welch,
    "Mann-Whitney": rank_sum,
}
"""Formulas by name; each says faster, slower or same."""
