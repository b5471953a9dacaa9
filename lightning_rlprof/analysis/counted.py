"""Which steps count in statistics: whole ones that no capture slowed down."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["FEWEST", "STATES", "Counted", "counted", "states"]

_STEP = KINDS.index("step")
FEWEST = 3
"""Steps below which nothing is claimed about a run."""

STATES = ("complete", "capture", "interrupted")
"""What a step may be; of two that are said of one step the later one wins."""


class Counted(NamedTuple):
    """The choice: a mask over the given step rows, how many distinct steps, and what to say."""

    mask: npt.NDArray[np.bool_]
    steps: int
    note: str


def states(spans: Spans, steps: Int64s) -> Int64s:
    """Return per step row an index into `STATES`.

    A step that one rank did not finish, or in which one rank ran a capture, is so for all: the
    others waited for it.
    """
    numbers = spans.step[steps]
    found = np.zeros(len(steps), dtype=np.int64)
    for code, name in enumerate(STATES[1:], start=1):
        flagged = spans.flagged(name)
        flagged = flagged[spans.kind[flagged] == _STEP]
        if len(flagged):
            found[np.isin(numbers, spans.step[flagged])] = code
    return found


def counted(spans: Spans, steps: Int64s) -> Counted:
    """Choose the complete steps; where there are none, all of them, and say so."""
    numbers, state = spans.step[steps], states(spans, steps)
    mask = state == 0
    parts = []
    for code, text in ((1, "under capture"), (2, "interrupted")):
        count = len(np.unique(numbers[state == code]))
        if count:
            parts.append(f"{count} {text}")
    if not parts:
        return Counted(mask, len(np.unique(numbers)), "")
    if not mask.any():
        text = f"No step is complete: {' and '.join(parts)} are counted all the same."
        return Counted(np.ones_like(mask), len(np.unique(numbers)), text)
    return Counted(mask, len(np.unique(numbers[mask])), f"Steps left out: {', '.join(parts)}.")
