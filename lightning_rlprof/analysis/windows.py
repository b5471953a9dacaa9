"""When captures of our own were open, by the regions that opening and closing them leave."""

import numpy as np

from lightning_rlprof.spans import Int64s, Spans

__all__ = ["CLOSED", "OPENED", "captures"]

OPENED, CLOSED = "rlprof open capture", "rlprof close capture"
"""What the session calls the regions."""


def captures(spans: Spans, rank: int, start_ns: Int64s) -> tuple[Int64s, Int64s] | None:
    """Return where the captures of a rank begin and end in which any of these starts lies.

    None where the rank opened none: then a tool of another kind recorded it.
    """
    opened = np.sort(spans.end_ns[spans.rows(kind="region", name=OPENED, rank=rank)])
    if not len(opened):
        return None
    closed = np.sort(spans.start_ns[spans.rows(kind="region", name=CLOSED, rank=rank)])
    at = np.searchsorted(opened, closed, "right") - 1
    first, last = opened[at[at >= 0]], closed[at >= 0]
    starts = np.sort(start_ns, kind="stable")  # quick where they are in order
    some = np.searchsorted(starts, last) > np.searchsorted(starts, first)
    return first[some], last[some]
