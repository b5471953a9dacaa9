"""The last steps of a run that is too large to be compared whole."""

from lightning_rlprof.analysis.last_steps import MOST_SPANS, cut_before
from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import Spans

__all__ = ["recent"]


def recent(spans: Spans, most: int = MOST_SPANS) -> tuple[Spans, str]:
    """Return the last steps of a run, up to so many steps and stages, and what to say of it.

    Steps go or stay as a whole, on all ranks. A run that is small enough comes back as it is.
    """
    if len(spans) <= most:
        return spans, ""
    compared = (spans.kind == KINDS.index("step")) | (spans.kind == KINDS.index("stage"))
    spans, kept, steps = cut_before(spans, most, compared)
    if kept == steps:
        return spans, ""
    return spans, f"Compared are the last {kept} steps: with all, they were too many."
