"""One time axis for many clocks: where each rank's clock stands in wall-clock time."""

import itertools
from collections.abc import Mapping

from lightning_rlprof.model import Header
from lightning_rlprof.spans import Problem

__all__ = ["anchors", "uncalibrated"]

# Ranks of one host read one monotonic clock, so their anchors differ only by the time between the
# two readings and by what NTP slewed between their starts. More than this is another machine.
_ONE_CLOCK_NS = 1_000_000_000


def anchors(headers: Mapping[int, Header]) -> tuple[dict[int, int], list[Problem]]:
    """Return each rank's ``unix_ns - clock_ns``, one value per clock, and what is doubtful.

    Ranks on one host share a clock, so they get the median of their anchors: an own anchor per
    rank would move them against each other by the noise of reading two clocks.

    Example::

        >>> one = Header(1, "r", 0, 2, "", "a", 1, "cpu", unix_ns=1_000, clock_ns=0)
        >>> two = Header(1, "r", 1, 2, "", "a", 2, "cpu", unix_ns=1_700, clock_ns=600)
        >>> anchors({0: one, 1: two})
        ({0: 1000, 1: 1000}, [])
    """
    found: dict[int, int] = {}
    problems: list[Problem] = []
    clocks = 0
    for host, pairs in _hosts(headers).items():
        groups = _clocks(sorted(pairs))
        clocks += len(groups)
        if len(groups) > 1:
            text = f"host {host}: its ranks' clocks disagree by seconds, as on {len(groups)} hosts"
            problems.append(Problem(None, text))
        for group in groups:
            median = max(group[: (len(group) + 1) // 2])[0]
            found.update((rank, median) for _, rank in group)
    return found, [*problems, *uncalibrated(clocks)]


def uncalibrated(clocks: int) -> list[Problem]:
    """Say that times of several clocks can be compared only roughly; nothing of one clock."""
    text = f"clocks of {clocks} hosts are not calibrated: between hosts, times may be off by ms"
    return [Problem(None, text)] if clocks > 1 else []


def _hosts(headers: Mapping[int, Header]) -> dict[str, list[tuple[int, int]]]:
    """Return each host's (anchor, rank) pairs."""
    hosts: dict[str, list[tuple[int, int]]] = {}
    for rank, header in headers.items():
        hosts.setdefault(header.host, []).append((header.unix_ns - header.clock_ns, rank))
    return hosts


def _clocks(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split one host's sorted (anchor, rank) pairs where neighbours cannot share a clock."""
    groups = [[pairs[0]]]
    for before, pair in itertools.pairwise(pairs):
        if pair[0] - before[0] > _ONE_CLOCK_NS:
            groups.append([])
        groups[-1].append(pair)
    return groups
