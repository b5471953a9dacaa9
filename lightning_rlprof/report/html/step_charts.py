"""What the charts of the HTML report draw: the parts, work and memory of every step and rank.

A run of any size fits: many steps are drawn as columns of several, many ranks as the most telling.
The cache of a large run keeps all of it, see `run_charts`.
"""

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.samples.sample_tables import (
    bin_counts,
    included_lengths,
    quantile_bin,
)
from lightning_rlprof.analysis.stages import UNTRACED_PART, Part, PartStatistics, StepTimes
from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.analysis.steps.step_selection import STATES
from lightning_rlprof.records.records import bin_start
from lightning_rlprof.report.terminal import duration
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Histogram, Spans, answer

_MAX_PARTS = 14  # Stages and waits; the rest are drawn as one.
_MAX_COLUMNS = 1_000  # Columns of a chart over the steps; a screen has no more pixels.
_MAX_HEAT_RANKS = 256
_HEAT_STAGES = 3
_MAX_RANK_ROWS = 64
_ALIKE = 1.05  # Times the median of the other ranks; ranks below that are alike.
_SMALL = 0.01  # Share of the step; a slow rank in less does not matter.
_OCTAVE = 12  # Shades of a heat map per doubling; neighbors differ by 6%.

OTHERS = "other stages"
LATE, WAITS = "arrives late by", "waits"

_MEMORY = {
    "device": ("device_allocated_bytes", "allocated on the device"),
    "host": ("host_rss_bytes", "resident in the process of a rank"),
    "child processes": ("children_rss_bytes", "resident in its child processes"),
}


# A stage has the same color in every report, and color-blind readers can distinguish all of them.
# Okabe and Ito's palette (jfly.uni-koeln.de/color) has eight such colors. There are ten stages, so
# related ones share a hue and differ in lightness.
_KNOWN = {
    "actor_generate": "#56b4e9",
    "actor_compute_log_prob": "#009e73",
    "reference_compute_log_prob": "#7ed3b2",
    "actor_update": "#d55e00",
    "critic_compute_values": "#8f4a78",
    "critic_update": "#cc79a7",
    "compute_reward": "#f0e442",
    "compute_advantage": "#e69f00",
    "weight_sync": "#0072b2",
    "actor_image_embeds": "#a9d8f5",
}
# Stages that a user defines get Paul Tol's "muted" scheme (personal.sron.nl/~pault).
_OWN = ("#882255", "#44aa99", "#ddcc77", "#332288", "#999933", "#aa4499", "#88ccee", "#661100")


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


class StepCharts(StepTimes):
    """The step times of a run, and what is drawn of them and beside them."""

    @property
    def _column_steps(self) -> int:
        """How many steps a column of a chart stands for."""
        return max(1, -(-len(self.numbers) // _MAX_COLUMNS))

    @cached_property
    def _heads(self) -> Int64s:
        """Index of the first step of each column of a chart."""
        return np.arange(0, len(self.numbers), self._column_steps)

    @cached_property
    def drawn(self) -> list[Part]:
        """The parts of steps, of very many the smaller ones as one; they add up to each step."""
        *found, untraced = self.parts
        found = [part for part in found if part.ns.any()]
        if len(found) > _MAX_PARTS:
            found, rest = found[: _MAX_PARTS - 1], found[_MAX_PARTS - 1 :]
            ns = np.sum([part.ns for part in rest], axis=0)
            found.append(Part(OTHERS, OTHERS, "stage", ns, sum(part.total_ns for part in rest)))
        return [*found, untraced]

    def data(self) -> dict[str, Any]:
        """Return what the charts over the steps draw, as plain data for JSON."""
        heads = self._heads
        edges = np.append(heads, len(self.numbers))
        last, sizes = edges[1:] - 1, np.diff(edges)

        def mean(values: Float64s) -> list[int]:
            sums = np.add.reduceat(values, heads) / sizes
            return [round(ns / 1e3) for ns in sums.tolist()]

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
                for part in self.drawn
            ],
            "tokens": None if self.tokens is None
            else np.add.reduceat(self.tokens[1], heads).astype(int).tolist(),
            "sizes": sizes.tolist(),
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
        stages = [part for part in self.drawn if part.kind == "stage" and part.stage != OTHERS]
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


def marks(changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is marked in the charts over the steps, given the rows of `changes`."""
    levels = [[row["step"], row["ratio"]] for row in changes if row["change"] == "level"]
    outliers = [row["step"] for row in changes if row["change"] == "outlier"]
    return {"levels": levels, "outliers": outliers}


def _drawn_ranks(ranks: Int64s, ns: Float64s) -> Int64s:
    """Return the ranks to draw, ascending: of very many, spread over the order by their median."""
    if len(ranks) <= _MAX_HEAT_RANKS:
        return np.arange(len(ranks))
    order = np.argsort(np.median(ns, axis=1), kind="stable")
    spread = np.unique(np.linspace(0, len(ranks) - 1, _MAX_HEAT_RANKS).astype(int))
    return np.sort(order[spread])


def times_largest(ns: Float64s) -> Int64s:
    """Return in how many steps each rank has the largest value; shape of ``ns``: (ranks, steps)."""
    some = ns.max(axis=0) > 0
    return np.bincount(np.argmax(ns[:, some], axis=0), minlength=len(ns))


def _shades(ns: Float64s) -> str:
    us = np.maximum(ns, 0.0) / 1e3
    shade = np.where(us > 0, np.round(1 + _OCTAVE * np.log2(us + 1)), 0).clip(0, 255)
    return base64.b64encode(shade.astype(np.uint8).tobytes()).decode()


class StageRow(NamedTuple):
    """One part of a step.

    Attributes:
        name: What the reader sees.
        stage: The stage it belongs to, which gives its color.
        kind: ``stage``, ``waiting`` or ``untraced``.
        times: Means over the ranks, by step: their mean, quantiles and maximum.
        slowest: Slowest rank and its ratio to the others, ``alike``, or empty.
        stands_out: Whether that rank is clearly slower in a stage that matters.
        inclusive: Mean of whole spans in ns, per call, with the stages and the waiting in them;
            None if there are none in them.
        device: Mean of the device's time in ns, per call; None if it was not measured.
    """

    name: str
    stage: str
    kind: str
    times: PartStatistics
    slowest: str
    stands_out: bool
    inclusive: int | None
    device: int | None


def stage_rows(series: StepCharts) -> list[StageRow]:
    """Return a row per part of the included steps, in the order of `StepCharts.drawn`."""
    if not series.included.any():
        return []
    rows = []
    for part in series.drawn:
        if not part.total_ns and part.kind != "untraced":
            continue
        own = series.statistics(part)
        is_stage = part.kind == "stage"
        slow = _slowest(series.slowest.get(part.name) if is_stage else None, own.share or 0.0)
        calls = series.calls.get(part.name) if is_stage else None
        inclusive, device = (calls.whole_ns, calls.device_ns) if calls else (None, None)
        rows.append(StageRow(part.name, part.stage, part.kind, own, *slow, inclusive, device))
    return rows


def _slowest(slowest: tuple[int, float | None] | None, share: float) -> tuple[str, bool]:
    rank, ratio = slowest or (None, None)
    if ratio is None:
        return "", False
    if ratio < _ALIKE:
        return "alike", False
    return f"rank {rank}, {ratio:.2f}x", share >= _SMALL


@dataclass(frozen=True)
class RankRow:
    """One rank beside the others; texts are empty where nothing is known.

    Attributes:
        rank: Its number.
        late: Median of how late it arrives where ranks meet.
        last: In how many steps it was the last to arrive.
        stage: Median time of the largest stage.
        waits: Share of the steps in which it waited for others.
        verdict: What the analysis of stragglers says of it.
        slow: Whether that names it.
        status: How its recording ended, unless it finished.
    """

    rank: int
    late: str
    last: str
    stage: str
    waits: str
    verdict: str = ""
    slow: bool = False
    status: str = ""


def rank_rows(series: StepCharts) -> list[RankRow]:
    """Return a row per rank of a job of several, the latest of very many; without verdicts."""
    values, some = series.by_rank, series.included
    if not values or not some.any():
        return []
    late, waits = values.get(LATE), values.get(WAITS)
    last = None if late is None else times_largest(late[:, some])
    stage = next((ns for name, ns in values.items() if name not in (LATE, WAITS)), None)
    order = np.arange(len(series.ranks))
    if len(order) > _MAX_RANK_ROWS and late is not None:
        latest = np.argsort(-np.median(late[:, some], axis=1), kind="stable")
        order = np.sort(latest[:_MAX_RANK_ROWS])
    wall = _walls(series)
    return [
        RankRow(
            int(series.ranks[at]),
            "" if late is None else duration(int(np.median(late[at, some]))),
            "" if last is None else f"{last[at]} of {int(some.sum())}",
            "" if stage is None else duration(int(np.median(stage[at, some]))),
            "" if waits is None else f"{100 * waits[at, some].sum() / wall[at]:.1f}",
        )
        for at in order[:_MAX_RANK_ROWS].tolist()
    ]


def with_verdicts(
    rows: Iterable[RankRow],
    stragglers: Iterable[Mapping[str, Any]],
    status: Iterable[Mapping[str, Any]],
) -> list[RankRow]:
    """Return the rows of ranks with what analyses say of them.

    Args:
        rows: Of `rank_rows`.
        stragglers: Rows of the analysis `stragglers`.
        status: Rows of the analysis `rank_status`.
    """
    verdicts = {row["rank"]: str(row["verdict"]) for row in stragglers if row["rank"] is not None}
    ended = {row["rank"]: str(row["status"]) for row in status if row["status"] != "finished"}
    return [
        replace(
            row,
            verdict=verdicts.get(row.rank, ""),
            slow=row.rank in verdicts,
            status=ended.get(row.rank, ""),
        )
        for row in rows
    ]


def _ranks_lead(series: StepCharts) -> str:
    """Say which rank arrives last most often, if any does so in most steps."""
    late, some = series.by_rank.get(LATE), series.included
    if late is None or not some.any():
        return "" if len(series.ranks) < 2 else "Work of each rank in each step."
    times, steps = times_largest(late[:, some]), int(some.sum())
    rank = int(np.argmax(times))
    if 2 * times[rank] <= steps:
        return f"No rank arrives last in most of the {steps} steps."
    return (
        f"Rank {series.ranks[rank]} arrives last in {times[rank]} of {steps} steps. "
        "The others wait for it there."
    )


def _walls(series: StepCharts) -> Any:
    """Return the time of the included steps of each rank; at least 1 ns."""
    steps = series.matrix.steps
    steps = steps[np.isin(series.spans.step[steps], series.numbers[series.included])]
    found = summarize(series.spans.rank[steps], series.spans.took_ns(steps))
    walls = np.ones(len(series.ranks))
    walls[np.searchsorted(series.ranks, found.group)] = np.maximum(found.total, 1)
    return walls


# ---- colors


class Paint(NamedTuple):
    """A fill and the ink, black or white, that is readable on it."""

    fill: str
    ink: str


def paints(names: Iterable[str]) -> dict[str, Paint]:
    """Return a paint for every stage; unknown names get one by their spelling, not by their order.

    Example::

        >>> paints(["actor_update", "my_filter"])["actor_update"]
        Paint(fill='#d55e00', ink='#000000')
    """
    chosen: dict[str, Paint] = {}
    taken: set[str] = set()
    for name in sorted(names):
        fill = _KNOWN.get(name) or _own(name, taken)
        taken.add(fill)
        chosen[name] = Paint(fill, _ink(fill))
    return chosen


def stage_paints(spans: Spans, charts: StepCharts) -> dict[str, Paint]:
    """Return the paint of every stage of a run, and of its parts of a step; untraced has none."""
    counts = np.bincount(spans.name[spans.rows(kind="stage")])
    names = {spans.names[code] for code in np.flatnonzero(counts).tolist()}
    return paints((names | {part.stage for part in charts.drawn}) - {UNTRACED_PART})


def _own(name: str, taken: set[str]) -> str:
    # With crc32 a color is the same in every process; hash() differs between them.
    first = zlib.crc32(name.encode("utf-8", "replace"))
    turns = (_OWN[(first + turn) % len(_OWN)] for turn in range(len(_OWN)))
    return next((fill for fill in turns if fill not in taken), _OWN[first % len(_OWN)])


def _ink(fill: str) -> str:
    """Return black or white, whichever has the higher WCAG contrast on a fill."""
    channels = (int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"


# ---- all of it


@dataclass(frozen=True)
class RunCharts:
    """What the page draws of the steps and ranks of a run, as plain data.

    Attributes:
        step_count: How many steps there are.
        rank_count: How many ranks have steps.
        note: Which steps do not count.
        paints: Of every stage.
        steps: `StepCharts.data`.
        heat: `StepCharts.heat`.
        memory: `StepCharts.memory`.
        lengths: `StepCharts.lengths`.
        stages: `stage_rows`.
        ranks: `rank_rows`.
        ranks_lead: Which rank arrives last, if one does so in most steps.
    """

    step_count: int
    rank_count: int
    note: str
    paints: dict[str, Paint]
    steps: dict[str, Any]
    heat: dict[str, Any]
    memory: list[dict[str, Any]]
    lengths: dict[str, Any] | None
    stages: list[StageRow]
    ranks: list[RankRow]
    ranks_lead: str


def run_charts(spans: Spans) -> RunCharts:
    """Return the charts of a run, out of its cache where that keeps them."""
    return answer(spans, "charts", RunCharts, _run_charts)


def _run_charts(spans: Spans) -> RunCharts:
    series = StepCharts(spans)
    return RunCharts(
        len(series.numbers),
        len(series.ranks),
        series.note,
        stage_paints(spans, series),
        series.data(),
        series.heat(),
        series.memory(),
        series.lengths(),
        stage_rows(series),
        rank_rows(series),
        _ranks_lead(series),
    )
