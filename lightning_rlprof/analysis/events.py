"""One steady step as a graph of places that every step passes: where ranks come, wait and go on.

Nodes are places: the n-th time in a step that a thread comes to a join of a name, hands something
over, or goes on. An edge is what takes place between two of them, over so many steps on.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.handed import Handed
from lightning_rlprof.analysis.joins import Joins
from lightning_rlprof.spans import Int64s

__all__ = ["HAND_OVER", "TRANSFER", "Steady", "steady"]

TRANSFER, HAND_OVER = -1, -2
"""Stand in place of a thread: the time is that of a join, or of handing something over."""

Mask = npt.NDArray[np.bool_]

_UNKNOWN = -1
_MOSTLY = 0.5  # of the steps must have an edge, else it is none of the steady step


class Steady(NamedTuple):
    """The edges of one steady step.

    Attributes:
        source: Place at which each edge begins.
        target: Place at which it ends.
        ns: How long it takes in the mean.
        steps: How many steps it goes on.
        chain: Thread whose time it is, or `TRANSFER` or `HAND_OVER`.
        what: Name with which it ends.
        at: Of the times that an edge was passed: which edge.
        begin_ns: And when it began.
        end_ns: And when it ended.
    """

    source: Int64s
    target: Int64s
    ns: Int64s
    steps: Int64s
    chain: Int64s
    what: Int64s
    at: Int64s
    begin_ns: Int64s
    end_ns: Int64s


class _Events(NamedTuple):
    """What threads attend: by thread and time. ``join`` is -1 where something is handed over."""

    chain: Int64s
    come_ns: Int64s
    leave_ns: Int64s
    join: Int64s
    name: Int64s
    step: Int64s
    place: Int64s


def steady(met: Joins, got: Handed) -> Steady:
    """Lay all steps over one another."""
    count = len(met.size)
    own = _events(met, got)
    size = count + len(got.chain)
    last = np.full(size, np.iinfo(np.int64).min)
    waits = own.join >= 0
    np.maximum.at(last, own.join[waits], own.come_ns[waits])
    fine = got.given_ns <= got.end_ns[got.to]
    np.maximum.at(last, count + got.to[fine], got.given_ns[fine])
    transfer = np.append(met.transfer_ns, got.end_ns - last[count:])
    return _overlaid(_edges(own, got, transfer, last, fine))


def _events(met: Joins, got: Handed) -> _Events:
    """Return all that is attended, numbered by place."""
    waits, none = len(got.chain), np.full(len(got.to), -1)
    columns = (
        (met.chain, got.chain, got.giver),
        (met.start_ns, got.start_ns, got.given_ns),
        (met.end_ns, got.end_ns, got.given_ns),
        (met.group, len(met.size) + np.arange(waits), none),
        (met.name, got.name, got.what),
        (met.step[met.group], got.step, got.given_step),
        (np.full(len(met.chain), 1), np.full(waits, 1), np.where(got.mark, 2, 0)),
    )
    own = [np.concatenate(each) for each in columns]
    order = np.lexsort((own[6], own[2], own[1], own[0]))
    chain, come, leave, join, name, step, _ = (each[order] for each in own)
    kind = name * 2 + (join >= 0)
    key = (chain * (int(kind.max(initial=0)) + 1) + kind) * (int(step.max(initial=0)) + 1) + step
    by = np.argsort(key, kind="stable")
    heads = np.flatnonzero(np.diff(key[by], prepend=-1))
    nth = np.empty_like(by)
    nth[by] = np.arange(len(by)) - np.repeat(heads, np.diff(np.append(heads, len(by))))
    every = (chain * (int(kind.max(initial=0)) + 1) + kind) * (int(nth.max(initial=0)) + 1) + nth
    place = np.unique(every, return_inverse=True)[1]
    return _Events(chain, come, leave, join, name, step, place)


def _edges(own: _Events, got: Handed, transfer: Int64s, last: Int64s, fine: Mask) -> Int64s:
    """Return source, target, ns, steps, chain, name, begin and end of all that was passed.

    To come to a place and to go on from it are two nodes: 2 x place, and that + 1. All who come to
    a join share one place to go on from: that of its first thread. How long a hand-over takes is
    known of what came last, after who waits for it.
    """
    count = len(transfer) - len(got.chain)
    waits = np.flatnonzero(own.join >= 0)
    whose = np.full(len(transfer), -1)
    whose[own.join[waits][::-1]] = waits[::-1]
    goes = own.place * 2 + 1
    goes[waits] = goes[whose[own.join[waits]]]
    step = own.step.copy()
    step[waits] = step[whose[own.join[waits]]]
    nobody = np.where((own.join >= 0) & (own.join < count), TRANSFER, HAND_OVER)
    passes = np.append(transfer, 0)[own.join]
    passes[(own.join >= count) & (own.come_ns < np.append(last, 0)[own.join])] = 0
    ready = own.leave_ns - passes
    inner = (own.place * 2, goes, passes, step - own.step, nobody, own.name)
    through = np.stack([*inner, ready, own.leave_ns])
    same = np.flatnonzero(own.chain[1:] == own.chain[:-1])
    after = same + 1
    begin, end = own.leave_ns[same], np.maximum(own.come_ns[after], own.leave_ns[same])
    way = (goes[same], own.place[after] * 2, end - begin, own.step[after] - step[same])
    ways = np.stack([*way, own.chain[after], own.name[after], begin, end])
    to = whose[count + got.to[fine]]
    return np.hstack([through, ways, _overs(own, got, fine, to, goes[to], (transfer, last))])


def _overs(
    own: _Events, got: Handed, fine: Mask, to: Int64s, goes: Int64s, when: tuple[Int64s, Int64s]
) -> Int64s:
    """Return the same of what is handed over: from where that is done to where somebody goes on."""
    (transfer, last), giver, join = when, _giving(own, got)[fine], own.join[to]
    late = (got.given_ns[fine] == last[join]) & (own.come_ns[to] < last[join])
    ns, until = np.where(late, transfer[join], _UNKNOWN), own.leave_ns[to]
    over = (own.place[giver] * 2, goes, ns, own.step[to] - own.step[giver])
    return np.stack([*over, np.full(len(to), HAND_OVER), own.name[to], until, until])


def _giving(own: _Events, got: Handed) -> Int64s:
    """Return which event each hand-over is."""
    gives = np.flatnonzero(own.join < 0)
    mine = np.lexsort((own.name[gives], own.come_ns[gives], own.chain[gives]))
    theirs = np.lexsort((got.what, got.given_ns, got.giver))
    found = np.empty(len(gives), dtype=np.int64)
    found[theirs] = gives[mine]
    return found


def _overlaid(every: Int64s) -> Steady:
    """Add up what is passed in most steps."""
    low, places = int(every[3].min(initial=0)), int(every[:2].max(initial=0)) + 1
    key = (every[3] - low) * places**2 + every[0] * places + every[1]
    _, first, at = np.unique(key, return_index=True, return_inverse=True)
    times = np.bincount(at)
    kept = np.flatnonzero(times >= max(_MOSTLY * times.max(initial=0), 2))
    number = np.full(len(times), -1)
    number[kept] = np.arange(len(kept))
    known = every[2] != _UNKNOWN
    sums = np.bincount(at[known], every[2, known], len(times))
    mean = np.rint(sums / np.maximum(np.bincount(at[known], minlength=len(times)), 1))
    source, target, _, steps, chain, what = every[:6, first[kept]]
    some = number[at] >= 0
    passed = (number[at][some], every[6, some], every[7, some])
    return Steady(source, target, mean[kept].astype(np.int64), steps, chain, what, *passed)
