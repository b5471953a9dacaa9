"""Seconds per name, put together across the ranks of a torch.distributed job.

They take what ``stage(name, into=timings)`` adds up. Every rank must call them; ranks may know
different names, and any backend will do: each call is one gather of small objects.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

_WAYS: dict[str, Callable[[list[float]], float]] = {
    "mean": fmean,
    "max": max,
    "min": min,
    "sum": sum,
}


class Tail(NamedTuple):
    """How a duration spreads over the ranks.

    Attributes:
        ratio: Share of the ``k`` slowest ranks in the sum over all ranks, 0 to 1.
        min: Shortest, in the unit given.
        max: Longest.
    """

    ratio: float
    min: float
    max: float


def gather_timings(timings: Mapping[str, float]) -> dict[str, list[float | None]]:
    """Return every name that some rank knows with the values by rank, None where it has none.

    Without a process group this process is the only rank.

    Example::

        >>> gather_timings({"actor_update": 1.5})
        {'actor_update': [1.5]}
    """
    ranks = _gather(dict(timings))
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: [rank.get(name) for rank in ranks] for name in names}


def reduce_timings(
    timings: Mapping[str, float], how: Literal["mean", "max", "min", "sum"] = "mean"
) -> dict[str, float]:
    """Return one value per name, over the ranks that have it; the same on every rank.

    Raises:
        ValueError: ``how`` is none of the four.

    Example::

        >>> reduce_timings({"actor_update": 1.5}, how="max")
        {'actor_update': 1.5}
    """
    if how not in _WAYS:
        raise ValueError(f"how={how!r} is not one of {', '.join(_WAYS)}")
    gathered = gather_timings(timings)
    known = {name: [one for one in ranks if one is not None] for name, ranks in gathered.items()}
    return {name: float(_WAYS[how](values)) for name, values in known.items()}


def tail_ratio(seconds: float, k: int = 1) -> Tail:
    """Return what share of all ranks' time the ``k`` slowest take, and the extremes.

    With n even ranks the ratio is k / n; it nears 1 when few ranks take nearly all of the time.

    Raises:
        ValueError: ``k`` is below 1.

    Example::

        >>> tail_ratio(2.0)
        Tail(ratio=1.0, min=2.0, max=2.0)
    """
    if k < 1:
        raise ValueError(f"k={k} is not a number of ranks; give 1 or more")
    values = sorted(_gather(float(seconds)), reverse=True)
    total = sum(values)
    return Tail(sum(values[:k]) / total if total else 0.0, values[-1], values[0])


def _gather(value: Any) -> Sequence[Any]:
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found
