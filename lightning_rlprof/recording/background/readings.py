"""What a source of background metrics reads, and how two readings become rates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Number = int | float


class Total(NamedTuple):
    """A number that only grows, and what its growth is divided by: another one, or the seconds."""

    value: Number
    per: Number | None = None


@dataclass(frozen=True)
class Reading:
    """What was read at one time: totals that become rates, and values as they are."""

    totals: Mapping[str, Total] = field(default_factory=dict)
    values: Mapping[str, Number] = field(default_factory=dict)


Read = Callable[[], Reading]
"""Reads a part; raises what it likes where that part cannot be read."""


class Part(NamedTuple):
    """A part of what is sampled: its name for people, how it is read, and its device."""

    name: str
    read: Read
    device: int | None = None


def rates(
    before: Mapping[str, Total], now: Mapping[str, Total], elapsed_ns: int
) -> dict[str, float]:
    """Return how fast totals grew; those that fell, as after a reset, are left out.

    Example::

        >>> rates({"a": Total(5), "b": Total(1, 10)}, {"a": Total(9), "b": Total(2, 12)}, 2 * 10**9)
        {'a': 2.0, 'b': 0.5}
        >>> rates({"a": Total(5), "b": Total(1, 10)}, {"a": Total(4), "b": Total(1, 10)}, 10**9)
        {}
    """
    found = {}
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        per = elapsed_ns / 1e9 if old.per is None or new.per is None else new.per - old.per
        if new.value >= old.value and per > 0:
            found[name] = float(f"{(new.value - old.value) / per:.5g}")
    return dict(sorted(found.items()))
