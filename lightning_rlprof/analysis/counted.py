"""Which steps count in statistics: whole ones that no capture slowed down."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["FEWEST", "Counted", "counted", "states"]

_STEP = KINDS.index("step")
FEWEST = 3
"""Steps below which nothing is claimed about a run."""


class Counted(NamedTuple):
    """The choice: a mask over the given step rows, how many distinct steps, and what to say."""

    mask: npt.NDArray[np.bool_]
    steps: int
    note: str


def states(spans: Spans, steps: Int64s) -> list[str]:
    """Return per step row ``interrupted``, ``capture`` or ``complete``.

    A step that one rank did not finish, or in which one rank ran a capture, is so for all: the
    others waited for it.
    """
    state = dict.fromkeys(spans.step[steps].tolist(), "complete")
    for name in ("capture", "interrupted"):  # the later one wins
        flagged = spans.flagged(name)
        flagged = flagged[spans.kind[flagged] == _STEP]
        state.update((n, name) for n in spans.step[flagged].tolist() if n in state)
    return [state[number] for number in spans.step[steps].tolist()]


def counted(spans: Spans, steps: Int64s) -> Counted:
    """Choose the complete steps; where there are none, all of them, and say so."""
    numbers = spans.step[steps]
    state = np.array(states(spans, steps), dtype="U11")
    mask = state == "complete"
    parts = []
    for name, text in (("capture", "under capture"), ("interrupted", "interrupted")):
        count = len(np.unique(numbers[state == name]))
        if count:
            parts.append(f"{count} {text}")
    if not parts:
        return Counted(mask, len(np.unique(numbers)), "")
    if not mask.any():
        text = f"No step is complete: {' and '.join(parts)} are counted all the same."
        return Counted(np.ones_like(mask), len(np.unique(numbers)), text)
    return Counted(mask, len(np.unique(numbers[mask])), f"Steps left out: {', '.join(parts)}.")
