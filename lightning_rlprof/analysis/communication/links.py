"""How fast each link between two ranks moves data, and which is slow."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.communication.link_observations import Observations, observe
from lightning_rlprof.analysis.communication.slow_links import (
    EXCLUDED,
    FEWEST,
    SLOWER,
    Links,
    judge,
)
from lightning_rlprof.tables.arrays import UNKNOWN
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    *columns_of("count", "source", "destination"),
    *columns_of("text", "group", "transport"),
    Column("bytes", "count", "bytes"),
    Column("time", "duration", "ns"),
    Column("bandwidth", "number", "GB/s"),
    *columns_of("ratio", "of baseline", "CI low", "CI high"),
    Column("seen", "count"),
    Column("verdict", "text"),
)
_NO_LINKS = (
    "This run has no bandwidth of links. torch_npu.profiler records it from level1 on "
    "(integrated: {profile_level: level1}). On GPUs, collectives of groups of two ranks serve: "
    "capture both ranks with torch.profiler."
)
_NUMBERED = "In rows with a group, a rank that recorded nothing has its number within that group."
_BOTH = "From collectives of groups of two ranks: each link is both directions of a pair."
_NAMED = 3  # slow links that the note describes

_Row = tuple[Cell, ...]


def links(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Show the bandwidth of each link between two ranks, the slowest first, and name slow ones.

    ``bandwidth`` is bytes over the time in which the link moved them, over all collectives and
    steps. ``of baseline`` compares it with links of the same transport, in the same operations and
    steps, with sizes within a factor of two; ``CI low`` and ``CI high`` hold for all links together
    at 99%. ``verdict``: "slow" below 0.9, "ok" above 0.75, else "inconclusive". Copies inside a
    device are left out. If the rank at an end is unknown, its number within the ``group`` of the
    row is shown.

    Args:
        spans: The run.
        ranks: Only what these recorded; None for all.
    """
    notes: list[str] = []
    seen = observe(spans, ranks, notes)
    if seen is None:
        return Table("links", _COLUMNS, abstained=" ".join([_NO_LINKS, *notes]))
    found = judge(seen)
    order = _by_score(found)
    names, verdicts = _names(found, seen), found.verdicts()
    rows = [_row(found, seen, at, verdicts[at]) for at in order]
    hosts = {rank: header.host for rank, header in spans.headers.items()}
    if (found.groups != UNKNOWN).any():
        notes.append(_NUMBERED)
    if not seen.directed:
        notes.append(_BOTH)
    note = " ".join([_conclude(_Evidence(found, seen, names, hosts), order), *notes])
    return Table("links", _COLUMNS, rows, note)


def _by_score(found: Links) -> list[int]:
    """Return the links, the slowest first; those without a baseline are last."""
    speed = found.size / found.time
    score = np.where(np.isnan(found.score), np.inf, found.score)
    return np.lexsort((*found.ends[::-1], speed, score)).tolist()  # type: ignore[no-any-return]


def _row(found: Links, seen: Observations, at: int, verdict: str) -> _Row:
    group, transport = int(found.groups[:, at].max()), int(found.transport[at])
    ratios = (_ratio(each[at]) for each in (found.score, found.low, found.high))
    return (
        *found.ends[:, at].tolist(),
        seen.group_names[group] if group >= 0 else None,
        seen.transport[1][transport] if transport >= 0 else None,
        int(found.size[at]),
        int(found.time[at]),
        float(found.size[at] / found.time[at]),  # bytes per ns are GB/s
        *ratios,
        int(found.seen[at]),
        verdict,
    )


def _ratio(score: float) -> float | None:
    return None if np.isnan(score) else float(np.exp(score))


_Names = list[list[str]]
"""Of each link the rank at both ends; see `_names`."""


def _names(found: Links, seen: Observations) -> _Names:
    """Return the rank at both ends of each link, or ``#3`` for number 3 of the only group.

    With several groups the group's name stands before it.
    """
    only = len(np.unique(found.groups[found.groups != UNKNOWN])) == 1
    groups = ["" if only else name for name in seen.group_names]
    return [
        [
            str(number) if group == UNKNOWN else f"{groups[group]}#{number}"
            for group, number in zip(*each, strict=True)
        ]
        for each in zip(found.groups.tolist(), found.ends.tolist(), strict=True)
    ]


class _Evidence(NamedTuple):
    """What the verdict is made of, and what its text needs."""

    found: Links
    seen: Observations
    names: _Names
    hosts: Mapping[int, str]

    def link(self, at: int) -> str:
        """Return the ends of a link and its transport in words."""
        one, other = (self.rank(each[at]) for each in self.names)
        code = int(self.found.transport[at])
        over = f" over {self.seen.transport[1][code]}" if self.seen.directed and code >= 0 else ""
        return f"rank {one} {'to' if self.seen.directed else 'and'} rank {other}{over}"

    def rank(self, name: str) -> str:
        """Return a rank with its host, if the run has several."""
        host = self.hosts.get(int(name)) if name.isdigit() else None
        return f"{name} ({host})" if host and len({*self.hosts.values()}) > 1 else name

    def times(self, at: int) -> str:
        """Return how often a link was slower."""
        return f"{self.found.below[at]} of {self.found.seen[at]} observations"


def _conclude(evidence: _Evidence, order: Sequence[int]) -> str:
    """Name the slow links with their evidence, or say that there are none, or what is missing."""
    verdicts = evidence.found.verdicts()
    slow = [at for at in order if verdicts[at] == "slow"]
    missing = _missing(evidence, [at for at in order if verdicts[at] == "inconclusive"])
    if slow:
        return " ".join(filter(None, [_slow(evidence, slow), missing]))
    if missing:
        return f"Inconclusive: {missing}"
    return (
        f"No slow link: each of {len(order)} links has more than {EXCLUDED:g}x the speed of "
        "comparable ones (99% CI)."
    )


def _slow(evidence: _Evidence, slow: list[int]) -> str:
    """Describe slow links; all links of one rank are named as that rank's."""
    score, names = evidence.found.score, evidence.names
    texts, left = [], {*slow}
    every = Counter([*names[0], *names[1]])
    for name, count in Counter(each[at] for at in slow for each in names).most_common():
        own = [at for at in left if name in (names[0][at], names[1][at])]
        if len(own) == count == every[name] and count > 2:
            part = float(np.exp(np.median(score[own])))
            texts.append(
                f"All {count} links of rank {evidence.rank(name)} are slow, {part:.2f}x the "
                "speed of comparable ones: check its port or network card."
            )
            left -= {*own}
    rest = [at for at in slow if at in left]
    texts += [f"Slow link: {_described(evidence, at)}" for at in rest[:_NAMED]]
    if len(rest) > _NAMED:
        texts.append(f"{len(rest) - _NAMED} more links are slow, see the column verdict.")
    return " ".join(texts)


def _described(evidence: _Evidence, at: int) -> str:
    found = evidence.found
    ratio, low, high = (float(np.exp(each[at])) for each in (found.score, found.low, found.high))
    return (
        f"{evidence.link(at)}, {found.size[at] / found.time[at]:.4g} GB/s, {ratio:.2f}x the speed "
        f"of {found.others[at]} links in the same operations and sizes (99% CI {low:.2f}\u2013"
        f"{high:.2f}), slower in {evidence.times(at)}."
    )


def _missing(evidence: _Evidence, undecided: list[int]) -> str:
    """Say why some links are neither slow nor ok, and how to find out."""
    found = evidence.found
    texts, whole = [], len(found.size)
    alone = [at for at in undecided if found.others[at] < FEWEST]
    rare = [at for at in undecided if found.high[at] < np.log(SLOWER)]
    wide = len(undecided) - len(alone) - len(rare)
    if alone:
        texts.append(
            f"{len(alone)} of {whole} links have fewer than {FEWEST} others of the same "
            "transport, operation and size to compare with. Record more ranks."
        )
    if rare:
        part = float(np.exp(found.score[rare[0]]))
        texts.append(
            f"{evidence.link(rare[0])} had {part:.2f}x the speed of others, slower in "
            f"{evidence.times(rare[0])}. Congestion comes and goes: capture more steps."
        )
    if wide:
        texts.append(
            f"the speeds of {wide} of {whole} links vary too much to tell. Capture more steps."
        )
    return " ".join(texts)
