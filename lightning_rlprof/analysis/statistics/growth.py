"""Whether memory grows from step to step: the one judge of leaks, plateaus and sawtooths."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_rlprof.analysis.statistics.robust import theil_sen
from lightning_rlprof.tables.arrays import Float64s, Int64s

LEAK, MAY_LEAK, SAWTOOTH, PLATEAU, FLAT = "leak", "may leak", "sawtooth", "plateau", "flat"
TOO_FEW = "too few steps"

MIN_VALUES_TO_GROW = 16
"""Steps below which nothing is judged."""

_BLOCKS = 13
_UNSURE = 1  # Of 12 rises between blocks one may fall: without growth 2 or more do, by 99.7%.
_UNDONE = 0.25  # If this part of a rise is lost again, the memory was released.
_SLOWER = 0.5  # In the last quarter, a leak has this part of its slope in the second one.
_SURE = 2.576  # This is the two-sided 99% quantile of the normal distribution.
_NOISE = 1e-3  # Tokens that vary by less beside their line over the steps explain nothing.


@dataclass(frozen=True)
class Growth:
    """What a series of bytes does over the steps.

    Attributes:
        verdict: `LEAK`: it grows and keeps growing. `PLATEAU`: it grew, and does so no longer.
            `MAY_LEAK`: it grew, and whether it continues is unclear. `SAWTOOTH`: it grows and is
            released. `FLAT`: none of these. `TOO_FEW`: fewer than `MIN_VALUES_TO_GROW` steps.
        per_step: Bytes per step, the median of the slopes of all pairs; None with one step.
        low: Lower end of its 99% CI; None with too few steps.
        high: Upper end.
        rises: Whether it grows from block to block and is not released, also if it stops.
    """

    verdict: str
    per_step: float | None
    low: float | None = None
    high: float | None = None
    rises: bool = False


def grows(steps: Int64s, size: Int64s, tokens: Float64s | None = None) -> Growth:
    """Judge whether memory grows with every step; the only place that does.

    The steps are cut into 13 blocks. Memory grows if at most one of the 12 rises between the
    blocks falls, and no fall undoes a quarter of the growth. The medians of the blocks are asked
    first; then their minima, which a leak below a sawtooth raises, too. If the last quarter rises
    less than half as fast as the second one, the growth stops. The interval is valid for noise that
    accumulates, as a random walk does: then rises are independent, and their median is outside of
    it with a probability of 0.6%.

    Args:
        steps: Ascending step numbers.
        size: Bytes in each step.
        tokens: Tokens of each step, if they were counted: what they explain is taken out.

    Example::

        >>> grows(np.arange(20), 5 * np.arange(20)).verdict
        'leak'
    """
    own: Float64s = size.astype(np.float64)
    if tokens is not None and len(steps) >= MIN_VALUES_TO_GROW:
        own = _without_work(steps, own, tokens)
    per_step = theil_sen(steps, own)
    if len(steps) < MIN_VALUES_TO_GROW:
        return Growth(TOO_FEW, per_step)
    rises = np.sort(np.diff(_blocks(own)) / np.diff(_blocks(steps)))
    low, high = float(rises[_UNSURE]), float(rises[-1 - _UNSURE])
    if _climbs(_blocks(own)):
        parts = np.array_split(np.arange(len(steps)), 4)
        second, last = (theil_sen(steps[at], own[at]) or 0.0 for at in parts[1::2])
        return Growth(_lasts(second, last), per_step, low, high, rises=True)
    floors = _blocks(own, np.min)
    if _climbs(floors):
        rises = np.sort(np.diff(floors) / np.diff(_blocks(steps)))
        low, high = float(rises[_UNSURE]), float(rises[-1 - _UNSURE])
        second, last = (float(floors[at] - floors[at - 3]) for at in (_BLOCKS // 2, -1))
        return Growth(_lasts(second, last), per_step, low, high, rises=True)
    return Growth(_unproven(steps, own, per_step or 0.0), per_step, low, high)


def _blocks(values: Int64s | Float64s, level: Callable[[Any], Any] = np.median) -> Float64s:
    return np.array([float(level(block)) for block in np.array_split(values, _BLOCKS)])


def _climbs(blocks: Float64s) -> bool:
    """Return whether nearly every block is above the one before it, and no fall undoes much."""
    if np.sort(np.diff(blocks))[_UNSURE] <= 0:
        return False
    fall = float((np.maximum.accumulate(blocks) - blocks).max())
    return fall <= _UNDONE * float(blocks[-1] - blocks[0])


def _lasts(second: float, last: float) -> str:
    return LEAK if last >= _SLOWER * second else PLATEAU


def _unproven(steps: Int64s, size: Float64s, per_step: float) -> str:
    """Return the verdict on memory that does not climb from block to block."""
    quarter, half = len(size) // 4, len(size) // 2
    if size[-quarter:].min() > size[: -(-len(size) // _BLOCKS)].max():
        last = theil_sen(steps[half:], size[half:]) or 0.0
        return PLATEAU if last < _SLOWER * per_step else MAY_LEAK
    rises = int(np.sign(np.diff(size)).sum())
    return SAWTOOTH if rises > _SURE * np.sqrt(len(size)) else FLAT


def _without_work(steps: Int64s, size: Float64s, tokens: Float64s) -> Float64s:
    """Take out what tokens explain beside a line over the steps (Frisch and Waugh 1933)."""
    line = np.stack([np.ones(len(steps)), steps - steps.mean()], axis=1)
    apart = tokens - line @ np.linalg.lstsq(line, tokens, rcond=None)[0]
    spread = float(apart @ apart)
    if spread <= _NOISE**2 * float(tokens @ tokens):  # Tokens are a line over the steps.
        return size
    per_token = max(float(apart @ size) / spread, 0.0)
    found: Float64s = size - per_token * (tokens - tokens.mean())
    return found
