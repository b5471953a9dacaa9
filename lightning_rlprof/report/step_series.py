"""What the charts of the HTML report draw: the parts, work and memory of every step and rank.

A run of any size fits: many steps are drawn as columns of several, many ranks as the most telling.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.samples.lengths import bin_counts, included_lengths, quantile_bin
from lightning_rlprof.analysis.steps.partition import UNTRACED as NO_STAGE
from lightning_rlprof.analysis.steps.step_matrix import step_matrix
from lightning_rlprof.analysis.steps.step_selection import STATES, counted, states
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.analysis.steps.waiting import WAITING
from lightning_rlprof.records.histograms import bin_start
from lightning_rlprof.records.records import KINDS, VALIDATIONS
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.spans import Histogram, Spans

_MOST_PARTS = 14  # stages and waits of their own; the others are drawn as one
_MOST_COLUMNS = 1_000  # of a chart over the steps: a screen has no more pixels
_MOST_HEAT_RANKS = 256
_HEAT_STAGES = 3
_OCTAVE = 12  # shades of a heat map per doubling: neighbors differ by 6%

_KEYS = (
    *("first", "last", "state", "states", "included", "wall", "most", "parts", "tokens", "sizes"),
    *("trained", "levels", "outliers"),
)

OTHERS, UNTRACED = "other stages", "untraced"
LATE, WAITS = "arrives late by", "waits"

_MEMORY = {
    "device": ("device_allocated_bytes", "allocated on the device"),
    "host": ("host_rss_bytes", "resident in the process of a rank"),
    "child processes": ("children_rss_bytes", "resident in its child processes"),
}


@dataclass(frozen=True)
class Part:
    """Time of one kind in each step: a stage, waiting in it, or untraced time.

    Attributes:
        name: What the reader sees.
        stage: The stage it belongs to, which gives its color.
        kind: ``stage``, ``waiting`` or ``untraced``.
        ns: Mean over the ranks of each step.
    """

    name: str
    stage: str
    kind: str
    ns: Float64s


class Heat(NamedTuple):
    """Times by rank and step for a heat map.

    Attributes:
        ranks: The ranks that are drawn, ascending.
        heads: Index of the first step of each column.
        values: Times in ns by name, shape (ranks, columns).
    """

    ranks: Int64s
    heads: Int64s
    values: Mapping[str, Float64s]


class StepSeries:
    """A run by its steps, which `counted` divides into included ones and others.

    Args:
        spans: The run.
    """

    def __init__(self, spans: Spans) -> None:
        self.spans, self.matrix = spans, step_matrix(spans)
        rows = self.matrix.steps
        self.numbers, self._place, count = np.unique(
            spans.step[rows], return_inverse=True, return_counts=True
        )
        self._count = count.astype(np.float64)
        self.state = np.zeros(len(self.numbers), np.int64)
        np.maximum.at(self.state, self._place, states(spans, rows))
        choice = counted(spans, rows)
        self.included = np.zeros(len(self.numbers), bool)
        self.included[self._place[choice.mask]] = True
        self.note = choice.note

    @property
    def _column_steps(self) -> int:
        """How many steps a column of a chart stands for."""
        return max(1, -(-len(self.numbers) // _MOST_COLUMNS))

    @cached_property
    def _heads(self) -> Int64s:
        """Index of the first step of each column of a chart."""
        return np.arange(0, len(self.numbers), self._column_steps)

    @cached_property
    def wall_ns(self) -> Float64s:
        """Duration of each step, mean over its ranks."""
        return self._mean(self.spans.duration_ns[self.matrix.steps])

    def _mean(self, ns: Int64s) -> Float64s:
        found: Float64s = np.bincount(self._place, ns, len(self.numbers)) / self._count
        return found

    @cached_property
    def parts(self) -> list[Part]:
        """What steps consist of, most time first, untraced last; they add up to `wall_ns`."""
        steps, width = len(self.numbers), len(self.spans.names) + 1
        own = self.matrix
        work, waited = (
            own.total(ns, self._place, (steps, width)).T.astype(np.float64)
            for ns in (own.work_ns, own.waits_ns)
        )
        found = [
            Part(name.format(stage), stage, kind, times[code] / self._count)
            for times, name, kind in ((work, "{}", "stage"), (waited, WAITING, "waiting"))
            for code, stage in enumerate(self.spans.names)
            if times[code].any()
        ]
        found.sort(key=lambda part: -float(part.ns[self.included].sum()))
        if len(found) > _MOST_PARTS:
            rest = np.sum([part.ns for part in found[_MOST_PARTS - 1 :]], axis=0)
            found = [*found[: _MOST_PARTS - 1], Part(OTHERS, OTHERS, "stage", rest)]
        return [*found, Part(UNTRACED, UNTRACED, "untraced", work[NO_STAGE] / self._count)]

    @cached_property
    def training_ns(self) -> Float64s:
        """Duration of each step without the validation in it, mean over its ranks."""
        cells = self.matrix
        codes = [code for code, name in enumerate(self.spans.names) if name in VALIDATIONS]
        own = np.isin(cells.name, codes)
        ns = cells.work_ns[own] + cells.waits_ns[own]
        spent = np.bincount(self._place[cells.step[own]], ns, len(self.numbers))
        found: Float64s = self.wall_ns - spent / self._count
        return found

    @cached_property
    def tokens(self) -> tuple[str, Float64s] | None:
        """The stage whose tokens are the run's, and those of all ranks in each step.

        Those in validations do not count: they are of regions.
        """
        rows, amounts = self.spans.amounts("tokens")
        stages = self.spans.kind[rows] == KINDS.index("stage")
        rows, amounts = rows[stages], amounts[stages]
        names = self.spans.name[rows]
        if not len(rows):
            return None
        by_name = np.bincount(names, amounts, len(self.spans.names))
        generates = categories_of(self.spans.names) == Category.ROLLOUT
        chosen = np.where(generates[: len(by_name)], by_name, 0)
        code = int(np.argmax(chosen if chosen.any() else by_name))
        place = np.searchsorted(self.numbers, self.spans.step[rows])
        place = np.minimum(place, max(len(self.numbers) - 1, 0))
        own = (names == code) & np.isin(self.spans.step[rows], self.numbers)
        counted_tokens = np.bincount(place[own], amounts[own], len(self.numbers))
        return self.spans.names[code], counted_tokens.astype(np.float64)

    def data(self, changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what the charts over the steps draw, as plain data for JSON.

        Args:
            changes: Rows of the analysis `changes`.
        """
        heads = self._heads
        last = np.append(heads[1:], len(self.numbers)) - 1 if len(heads) else heads
        sizes = np.diff(np.append(heads, len(self.numbers)))

        def mean(values: Float64s) -> list[int]:
            sums = np.add.reduceat(values, heads) / sizes
            return [round(ns / 1e3) for ns in sums.tolist()]

        if not len(heads):
            return {key: [] for key in _KEYS}
        outliers = [row["step"] for row in changes if row["change"] == "outlier"]
        return {
            "first": self.numbers[heads].tolist(),
            "last": self.numbers[last].tolist(),
            "state": np.maximum.reduceat(self.state, heads).tolist(),
            "states": STATES,
            "included": np.logical_or.reduceat(self.included, heads).astype(int).tolist(),
            "wall": mean(self.wall_ns),
            "trained": mean(self.training_ns),
            "most": np.round(np.maximum.reduceat(self.wall_ns, heads) / 1e3).astype(int).tolist(),
            "parts": [
                {"name": part.name, "stage": part.stage, "kind": part.kind, "us": mean(part.ns)}
                for part in self.parts
            ],
            "tokens": None if self.tokens is None
            else np.add.reduceat(self.tokens[1], heads).astype(int).tolist(),
            "sizes": sizes.tolist(),
            "levels": [[row["step"], row["ratio"]] for row in changes if row["change"] == "level"],
            "outliers": outliers,
        }  # fmt: skip

    def memory(self) -> list[dict[str, Any]]:
        """Return for each kind of memory the lowest and the highest rank of each step, in bytes."""
        found = []
        for name, (counter, title) in _MEMORY.items():
            rows, values = self.spans.amounts(counter)
            own = np.isin(self.spans.step[rows], self.numbers)
            if not own.any():
                continue
            place = np.searchsorted(self.numbers, self.spans.step[rows[own]])
            low, high = np.full(len(self.numbers), np.inf), np.full(len(self.numbers), -np.inf)
            np.minimum.at(low, place, values[own])
            np.maximum.at(high, place, values[own])
            pair = (np.minimum.reduceat(low, self._heads), np.maximum.reduceat(high, self._heads))
            lows, highs = ([int(v) if np.isfinite(v) else None for v in each] for each in pair)
            found.append({"name": name, "title": title, "low": lows, "high": highs})
        return found

    def lengths(self) -> dict[str, Any] | None:
        """Return the histogram of the stage with most samples, and quantiles by step.

        ``starts`` are the least values of the bins, ``counts`` those of included steps; ``p50`` and
        ``p95`` of a step are bins, None without samples.
        """
        found = included_lengths(self.spans)
        if not len(found.rows):
            return None
        names = self.spans.name[found.rows]
        code = int(np.argmax(np.bincount(names, found.counts)))
        found = Histogram(*(column[names == code] for column in found))
        counts = bin_counts(found.bins, found.counts)
        column = np.searchsorted(self.numbers, self.spans.step[found.rows]) // self._column_steps
        by_step = np.zeros((len(self._heads), len(counts)), np.int64)
        inside = np.isin(self.spans.step[found.rows], self.numbers)
        np.add.at(by_step, (column[inside], found.bins[inside]), found.counts[inside])
        quantiles = {
            name: [quantile_bin(each, part) if each.any() else None for each in by_step]
            for name, part in (("p50", 0.5), ("p95", 0.95))
        }
        starts = [round(bin_start(each), 1) for each in range(len(counts) + 1)]
        stage = self.spans.names[code]
        return {"stage": stage, "starts": starts, "counts": counts.tolist(), **quantiles}

    @cached_property
    def ranks(self) -> Int64s:
        """Ranks with steps, ascending."""
        return np.unique(self.spans.rank[self.matrix.steps])

    @cached_property
    def by_rank(self) -> dict[str, Float64s]:
        """Times by rank and step in ns, shape (ranks, steps), of a job of several ranks.

        ``arrives late by`` and ``waits`` where ranks meet, and the work of the largest stages.
        """
        if len(self.ranks) < 2:
            return {}
        found: dict[str, Float64s] = {}
        cells = self.matrix
        waited = self._sum_by_rank(cells.step, cells.waits_ns)
        if waited.any():
            found[LATE], found[WAITS] = np.max(waited, axis=0) - waited, waited
        stages = [part for part in self.parts if part.kind == "stage" and part.stage != OTHERS]
        for part in stages[:_HEAT_STAGES]:
            code = self.spans.names.index(part.stage)
            own = cells.name == code
            found[part.name] = self._sum_by_rank(cells.step[own], cells.work_ns[own])
        return found

    @cached_property
    def thinned(self) -> "Heat":
        """`by_rank` as a heat map can draw it: of several steps in one column the maximum."""
        if not self.by_rank:
            return Heat(self.ranks, self._heads, {})
        shown = _drawn_ranks(self.ranks, next(iter(self.by_rank.values())))
        columns = {
            name: np.maximum.reduceat(ns[shown], self._heads, axis=1)
            for name, ns in self.by_rank.items()
        }
        return Heat(self.ranks[shown], self._heads, columns)

    def heat(self) -> dict[str, Any]:
        """Return `thinned` as shades, as plain data for JSON.

        Values are bytes, base64: 0 is nothing, and n is ``2 ** ((n - 1) / 12) - 1`` µs.
        """
        if not self.by_rank:
            return {"ranks": [], "values": []}
        return {
            "ranks": self.thinned.ranks.tolist(),
            "total": len(self.ranks),
            "values": [
                {"name": name, "bytes": _shades(ns)} for name, ns in self.thinned.values.items()
            ],
        }

    def _sum_by_rank(self, step: Int64s, ns: Int64s) -> Float64s:
        """Sum times by rank and step; shape (ranks, steps)."""
        found = np.zeros((len(self.ranks), len(self.numbers)))
        rank = np.searchsorted(self.ranks, self.spans.rank[self.matrix.steps[step]])
        np.add.at(found, (rank, self._place[step]), ns)
        return found


def _drawn_ranks(ranks: Int64s, ns: Float64s) -> Int64s:
    """Return the ranks to draw, ascending: of very many, spread over the order by their median."""
    if len(ranks) <= _MOST_HEAT_RANKS:
        return np.arange(len(ranks))
    order = np.argsort(np.median(ns, axis=1), kind="stable")
    spread = np.unique(np.linspace(0, len(ranks) - 1, _MOST_HEAT_RANKS).astype(int))
    return np.sort(order[spread])


def times_largest(ns: Float64s) -> Int64s:
    """Return in how many steps each rank has the largest value; shape of ``ns``: (ranks, steps)."""
    some = ns.max(axis=0) > 0
    return np.bincount(np.argmax(ns[:, some], axis=0), minlength=len(ns))


def _shades(ns: Float64s) -> str:
    us = np.maximum(ns, 0.0) / 1e3
    shade = np.where(us > 0, np.round(1 + _OCTAVE * np.log2(us + 1)), 0).clip(0, 255)
    return base64.b64encode(shade.astype(np.uint8).tobytes()).decode()


def mean_parts(series: StepSeries, some: Mask) -> list[tuple[Part, float]]:
    """Return the mean time of each part in some steps, in the order of `StepSeries.parts`."""
    return [(part, float(part.ns[some].mean())) for part in series.parts] if some.any() else []
