"""By how much captures slowed the steps down that they looked at."""

import numpy as np

from lightning_rlprof.analysis.counted import FEWEST, STATES, states
from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import Spans

__all__ = ["slowdown"]

_COMPLETE, _CAPTURE = STATES.index("complete"), STATES.index("capture")
_FIRST = 1  # steps at the start that are left out: they warm up


def slowdown(spans: Spans) -> float | None:
    """Return how much longer a captured step takes than others, in the median; None if not known.

    0.1 is 10 % longer. The first step counts on neither side. It takes `FEWEST` steps of each.
    """
    rows = np.flatnonzero(spans.kind == KINDS.index("step"))
    if not len(rows):
        return None
    state, number = states(spans, rows), spans.step[rows]
    late = number >= int(number.min()) + _FIRST
    took = []
    for code in (_CAPTURE, _COMPLETE):
        own = (state == code) & late
        if len(np.unique(number[own])) < FEWEST:
            return None
        took.append(float(np.median(spans.duration_ns[rows[own]])))
    return took[0] / took[1] - 1 if took[1] else None
