"""How other tools name a slow rank, written anew from what they publish; for comparison only.

Each formula sees what its tool sees and returns the ranks that it would accuse.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.builders.scripted import Scripted

_NVRX = 0.75  # NVIDIA Resiliency Extension's default threshold of its scores
_MINDSTUDIO = 0.10  # of communication time, below the largest
_DIXON = {3: 0.970, 4: 0.829, 5: 0.710, 6: 0.625, 7: 0.568, 8: 0.526, 9: 0.493, 10: 0.466}  # 95 %


def longest_collective(run: Scripted) -> set[int]:
    """Accuse who is most often longest in the collective: that is who waits."""
    return {_most_often(np.argmax(run.waited_ns, axis=0), len(run.waited_ns))}


def latest_raw_start(run: Scripted) -> set[int]:
    """Accuse who most often starts the collective last by its own clock (TraceLens; HTA)."""
    return {_most_often(np.argmax(run.came_ns, axis=0), len(run.came_ns))}


def widest_collective(run: Scripted) -> set[int]:
    """Accuse the latest starter of the one collective whose durations differ most (HTA)."""
    at = int(np.argmax(np.std(run.waited_ns, axis=0)))
    return {int(np.argmax(run.came_ns[:, at]))}


def median_ratio(run: Scripted) -> set[int]:
    """Accuse every rank whose relative score is below 0.75 (NVRx, sections).

    The score is the least median of all ranks over the rank's own, section by section, averaged
    with the time that the rank spends in them.
    """
    medians = np.median(run.sections_ns, axis=1)
    ratio, weight = medians.min(axis=0) / medians, run.sections_ns.sum(axis=1)
    score = (ratio * weight).sum(axis=1) / weight.sum(axis=1)
    return set(np.flatnonzero(score < _NVRX).tolist())


def least_communication(run: Scripted) -> set[int]:
    """Accuse whose communication in all is 10 % below the largest (MindStudio Insight)."""
    total = run.waited_ns.sum(axis=1)
    return set(np.flatnonzero(total <= (1 - _MINDSTUDIO) * total.max()).tolist())


def outlier_votes(run: Scripted) -> set[int]:
    """Accuse who is most often an outlier as the shortest of a collective (msprof-analyze).

    An outlier by Dixon's Q among up to ten ranks, by three standard deviations among more.
    """
    votes = np.zeros(len(run.waited_ns), dtype=int)
    for durations in run.waited_ns.T:
        if _is_outlier(durations):
            votes[int(np.argmin(durations))] += 1
    return {int(np.argmax(votes))} if votes.any() else set()


def _is_outlier(durations: Any) -> bool:
    ordered = np.sort(durations)
    if len(np.unique(ordered)) <= 3:
        return False
    if len(ordered) in _DIXON:
        return bool((ordered[1] - ordered[0]) / np.ptp(ordered) > _DIXON[len(ordered)])
    return bool(durations.mean() - ordered[0] > 3 * durations.std())


def _most_often(winners: Any, ranks: int) -> int:
    return int(np.argmax(np.bincount(winners, minlength=ranks)))


FORMULAS: Mapping[str, Callable[[Scripted], set[int]]] = {
    "longest collective": longest_collective,
    "latest raw start": latest_raw_start,
    "widest collective": widest_collective,
    "median ratio < 0.75": median_ratio,
    "10 % less communication": least_communication,
    "outlier votes": outlier_votes,
}
