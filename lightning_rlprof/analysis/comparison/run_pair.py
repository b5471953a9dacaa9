"""Runs side by side: time and work per step of every stage, and how comparable two runs are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_rlprof.analysis.comparison.settings import REPLICAS, devices
from lightning_rlprof.analysis.listing import listed
from lightning_rlprof.analysis.statistics.robust import nan_median
from lightning_rlprof.analysis.steps.rank_matrix import AMOUNTS
from lightning_rlprof.analysis.steps.step_matrix import WAITING, StepMatrix, find_waits, step_matrix
from lightning_rlprof.analysis.steps.step_selection import Counted, counted, recent
from lightning_rlprof.analysis.steps.time_categories import align_stage_names
from lightning_rlprof.records.records import stated_world_size
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

STEP, UNTRACED = "step", "untraced"
"""Names of the rows of the whole step, and of its time outside stages."""

_SLOWEST = "slowest rank's "

WORK = (
    *(*AMOUNTS, "samples", "batch"),
    *(_SLOWEST + counter for counter in AMOUNTS),
    REPLICAS,
)
"""Amounts that say how much a stage had to do, and how many replicas shared it.

A step waits for its slowest rank. So beside the mean over ranks there is what the rank with most
had beyond the mean.
"""

ROOT = "√tokens"
"""Amount beside tokens, within a run of which no single lengths are known.

A rollout lasts as long as its longest response, and that grows more slowly than the sum: with a
line alone, lengths that grow over a run look like a pace that does.
"""

_OFTEN = 0.5

Amounts = tuple[Float64s, ...]
"""The same amount per step in each run."""


HARDLY = 0.5
"""Below this score two runs should not be compared, and a warning says so."""

_COLUMNS = (
    *columns_of("text", "what", "A", "B"),
    Column("score", "number"),
)
# Score without common work; deduction if only one run uses graphs; score without counted work.
_APART, _EAGER, _UNCOUNTED = 0.5, 0.3, 0.9
_NONE, _UNKNOWN = "none", "unknown"
_AlikeRow = tuple[Cell, ...]
# In more than this share of the steps, the last rank to arrive must also finish last.
_MIN_SHARE_LAST = 0.5


@dataclass(frozen=True, eq=False)
class Side:
    """What is compared of a run, by its included steps.

    Attributes:
        stages: Own work per step, mean over ranks, by stage, and the waiting in each; `STEP` is
            the sum of all.
        waiting: Names of the rows that are waiting for other ranks.
        work: What a stage counted per step, by stage and name of `WORK`: the mean over ranks and
            the excess of the rank with most; NaN where it counted nothing. `STEP`: all stages.
        number: Step numbers, ascending.
        steps: How many steps.
        note: What was left out.
    """

    stages: Mapping[str, Int64s]
    waiting: frozenset[str]
    work: Mapping[str, Mapping[str, Float64s]]
    number: Int64s
    steps: int
    note: str


def shared_work(runs: Sequence[Side], stage: str) -> dict[str, Amounts]:
    """Return what all runs counted in a stage, by name; of the whole step where it has none.

    A counter that is missing in half of the steps of a run does not count.
    """
    own = _shared(runs, stage)
    amounts = own if set(own) - {REPLICAS} else own | _shared(runs, STEP)
    found = {name: amounts[name] for name in WORK if name in amounts}
    alone = len(runs) == 1  # Any curve could join two runs whose tokens lie apart.
    if "tokens" in found and alone and not {"tokens_sq", "tokens_max"} & set(found):
        found[ROOT] = tuple(np.sqrt(np.maximum(each, 0)) for each in found["tokens"])
    return found


def _shared(runs: Sequence[Side], stage: str) -> dict[str, Amounts]:
    work = [run.work.get(stage, {}) for run in runs]
    common = [name for name in work[0] if all(name in each for each in work)]
    found = {name: tuple(each[name] for each in work) for name in common}
    return {name: each for name, each in found.items() if _known(each)}


def _known(amounts: Amounts) -> bool:
    return all(np.isfinite(each).mean() > _OFTEN for each in amounts)


def sides(runs: Sequence[Spans]) -> list[Side]:
    """Return the runs, their stages under common names; of very large ones the last steps."""
    names = [_stage_names(spans) for spans in runs]
    found = []
    for at, (spans, own) in enumerate(zip(runs, names, strict=True)):
        others = [name for each in names[:at] + names[at + 1 :] for name in each]
        found.append(_side(spans, _apart(align_stage_names(own, others))))
    return found


def _stage_names(spans: Spans) -> list[str]:
    """Return the names of stages, and of known regions outside of them."""
    there = np.zeros(len(spans.names) + 1, bool)  # Untraced is last.
    there[step_matrix(spans).name] = there[spans.name[spans.rows(kind="stage")]] = True
    return [name for name, is_there in zip(spans.names, there.tolist(), strict=False) if is_there]


def _apart(called: Mapping[str, str]) -> dict[str, str]:
    """Rename a stage whose name is that of another row, such as untraced."""
    rows = (STEP, UNTRACED)
    return {own: f"{name} (stage)" if name in rows else name for own, name in called.items()}


@dataclass(frozen=True, eq=False)
class _Frame:
    """Where things go: step rows to columns (-1: left out), names to rows; ranks per column."""

    at: Int64s
    number: Int64s
    ranks: Int64s
    row: Int64s
    names: tuple[str, ...]


def _side(spans: Spans, called: Mapping[str, str]) -> Side:
    matrix, (first, note) = step_matrix(spans), recent(spans)
    choice = counted(spans, matrix.steps, first)
    frame = _frame(spans, matrix, choice, called)
    shape = (len(frame.ranks), len(spans.names) + 1)
    work, waits = matrix.totals(frame.at, shape, matrix.work_ns, matrix.waits_ns)
    sums = np.zeros((len(frame.names), len(frame.ranks)), dtype=np.int64)
    np.add.at(sums, frame.row, work.T)
    sums //= np.maximum(frame.ranks, 1)
    waited: dict[str, Int64s] = {}
    for code in np.flatnonzero(waits.any(axis=0)).tolist():
        name = WAITING.format(called.get(spans.names[code], spans.names[code]))
        ns = waits[:, code] // np.maximum(frame.ranks, 1)
        waited[name] = waited.get(name, 0) + ns
    some = np.flatnonzero(sums.any(axis=1)).tolist()
    stages = {frame.names[at]: sums[at] for at in some} | waited
    walls = np.sum([*stages.values(), np.zeros(len(frame.ranks), np.int64)], axis=0)
    note = " ".join(filter(None, [note, choice.note]))
    amounts = _work(spans, matrix, frame, _last_arrivals(spans, frame))
    own = stages | {STEP: walls}
    return Side(own, frozenset(waited), amounts, frame.number, len(walls), note)


def _frame(spans: Spans, matrix: StepMatrix, choice: Counted, called: Mapping[str, str]) -> _Frame:
    mine = matrix.steps[choice.mask]
    numbers, place = np.unique(spans.step[mine], return_inverse=True)
    at = np.full(len(matrix.steps), -1, dtype=np.int64)
    at[choice.mask] = place
    names = tuple(dict.fromkeys([*called.values(), UNTRACED]))
    rows = {name: row for row, name in enumerate(names)}
    row = [rows[called.get(name, UNTRACED)] for name in spans.names]
    by_code = np.array([*row, rows[UNTRACED]], dtype=np.int64)  # Untraced is the last.
    return _Frame(at, numbers, np.bincount(place, minlength=len(numbers)), by_code, names)


@dataclass(frozen=True, eq=False)
class _Last:
    """The last ranks to arrive in stages in which ranks wait, and the ranks that waited.

    The time of the last rank is what such a stage takes without waiting, so its work explains it.

    Attributes:
        rank: The rank by row and step; -1 where no rank waited.
        row: Row of each stay that has waiting, and of its stage.
        at: Its step.
        waiter: Its rank.
        earlier_ns: How much earlier than the last rank it came: all leave at one time.
        stay_ns: How long the last rank stayed.
    """

    rank: Int64s
    row: Int64s
    at: Int64s
    waiter: Int64s
    earlier_ns: Int64s
    stay_ns: Int64s


def _last_arrivals(spans: Spans, frame: _Frame) -> _Last:
    waits = find_waits(spans)
    own, last = waits.row[waits.whole_stage], waits.last[waits.whole_stage]
    at = np.minimum(np.searchsorted(frame.number, spans.step[last]), len(frame.number) - 1)
    known = frame.number[at] == spans.step[last]
    own, last, at = own[known], last[known], at[known]
    # Of several spans, the longest one counts.
    order = np.argsort(spans.took_ns(last), kind="stable")
    row = frame.row[spans.name[last]]
    found = np.full((len(frame.names), len(frame.number)), -1)
    found[row[order], at[order]] = spans.rank[last[order]]
    earlier = spans.took_ns(own) - spans.took_ns(last)
    return _Last(found, row, at, spans.rank[own], earlier, spans.took_ns(last))


def _work(
    spans: Spans, matrix: StepMatrix, frame: _Frame, last: _Last
) -> dict[str, dict[str, Float64s]]:
    found: dict[str, dict[str, Float64s]] = {name: {} for name in (*frame.names, STEP)}
    shape = len(frame.names), len(frame.ranks)
    for counter in WORK:
        cell, name, values, times = matrix.amounts(spans, counter)
        step = frame.at[cell]
        known = step >= 0
        if not known.any():
            continue
        row, at, values = frame.row[name[known]], step[known], values[known]
        cells, rank = row * shape[1] + at, spans.rank[matrix.steps[cell[known]]]
        size = shape[0] * shape[1]
        sums, count = np.zeros((2, size))
        np.add.at(sums, cells, values)
        np.add.at(count, cells, times[known])
        sums, count = sums.reshape(shape), count.reshape(shape)
        # The number of replicas is a property, not an amount, so it is averaged over its counts.
        per: Float64s | Int64s = count if counter == REPLICAS else frame.ranks
        each = {counter: [*_over(sums, per, count)]}
        if counter != REPLICAS:
            each[counter].append(_over(sums.sum(axis=0), frame.ranks, count.sum(axis=0)))
        if counter in AMOUNTS and frame.ranks.max() > 1:
            most = _most(cells, rank, values, size).reshape(shape)
            whole = _most(at, rank, values, shape[1])
            mean = each[counter]
            excess = [*(most - mean[:-1]), whole - mean[-1]]
            for code in np.unique(last.row).tolist():
                own = _of_the_last(last, code, at=at, rank=rank, values=values, inside=row == code)
                some = last.rank[code] >= 0
                mean[code] = np.where(some, own, mean[code])
                excess[code] = np.where(some, 0.0, excess[code])
            each[_SLOWEST + counter] = excess
        for name_of, by_stage in each.items():
            for stage, series in zip((*frame.names, STEP), by_stage, strict=False):
                if not np.isnan(series).all():
                    found[stage][name_of] = series
    return found


def _of_the_last(
    last: _Last, row: int, *, at: Int64s, rank: Int64s, values: Float64s, inside: Mask
) -> Float64s:
    """Return what the last rank counted in each step: in a stage, or if it never does, in all.

    Unknown where another rank came shortly before it with so much more to do that it was done
    later.

    Args:
        last: The last ranks to arrive.
        row: Row of the stage.
        at: Step of each number that was counted, in any stage.
        rank: Its rank.
        values: The number.
        inside: Whether it was counted in this stage.
    """
    keep = inside if inside.any() else np.ones_like(inside)
    ranks = max(int(rank.max(initial=0)), int(last.waiter.max(initial=0))) + 1
    shape = (ranks, last.rank.shape[1])
    table = np.full(shape, np.nan)
    cells, place = np.unique(rank[keep] * shape[1] + at[keep], return_inverse=True)
    table.flat[cells] = np.bincount(place, values[keep])
    chosen = last.rank[row]
    own = table[chosen, np.arange(shape[1])]
    mine = last.row == row
    step = last.at[mine]
    more = table[last.waiter[mine], step] - own[step]
    stay = last.stay_ns[mine]
    rate = float(nan_median(stay / np.where(own[step] > 0, own[step], np.nan)))
    later = rate * more > last.earlier_ns[mine]
    sure = np.ones(shape[1], dtype=bool)
    sure[step[later]] = False
    return np.where(sure, own, np.nan) if sure.mean() > _MIN_SHARE_LAST else own


def _most(cells: Int64s, rank: Int64s, values: Float64s, size: int) -> Float64s:
    """Return the sum of the rank with most, by cell."""
    ranks = int(rank.max(initial=0)) + 1
    key, place = np.unique(cells * ranks + rank, return_inverse=True)
    found = np.zeros(size)
    np.maximum.at(found, key // ranks, np.bincount(place, values))
    return found


def _over(sums: Float64s, per: Float64s | Int64s, count: Float64s) -> Float64s:
    found: Float64s = np.where(count > 0, sums / np.maximum(per, 1), np.nan)
    return found


def comparability(a: Spans, b: Spans, pair: Sequence[Side] | None = None) -> Table:
    """Return what makes two runs alike or different; ``score`` is 0 to 1 and multiplies.

    Stages: share of time in stages that both have, of the run with less. Ranks, device and
    counters: 1 if equal. Work: share of all steps with an amount of work that the other run had,
    too. Graph capture: share of kernels that ran in CUDA graphs, if a profiler recorded that.

    Args:
        a: Run A.
        b: Run B.
        pair: Their `sides`, if already computed.
    """
    left, right = pair or sides([a, b])
    counters = [listed(side.work.get(STEP, {})) or _NONE for side in (left, right)]
    counted = counters != [_NONE, _NONE]
    rows: list[_AlikeRow] = [
        _stages(left, right),
        _alike("ranks", 0.8, _ranks(a), _ranks(b)),
        _alike("device", 0.7, devices(a) or _NONE, devices(b) or _NONE),
        _graphs(a, b),
        _alike("counters", 0.8, *counters) if counted else ("counters", *counters, _UNCOUNTED),
        _alike_work(left, right),
    ]
    table = Table("comparability", _COLUMNS, rows)
    note = (
        f"Comparability score: {score_of(table):.2f} (product of the rows). "
        f"Below {HARDLY}, don't rely on the comparison."
    )
    return replace(table, note=note)


def score_of(table: Table) -> float:
    """Return the score of two runs, the product of what `comparability` found."""
    return math.prod(float(score or 0) for score in table.column("score"))


def _alike(what: str, otherwise: float, a: str, b: str) -> _AlikeRow:
    return what, a, b, 1.0 if a == b else otherwise


def _stages(a: Side, b: Side) -> _AlikeRow:
    shares, texts = [], []
    for side, other in ((a, b), (b, a)):
        ns = {name: float(ns.sum()) for name, ns in side.stages.items() if name != STEP}
        alone = [name for name in ns if name not in other.stages]
        whole, both = sum(ns.values()), sum(ns[name] for name in ns if name not in alone)
        shares.append(both / whole if whole else 1.0)
        texts.append(f"only here: {listed(alone)}" if alone else "all in both")
    return "stages", *texts, min(shares)


def _ranks(spans: Spans) -> str:
    world, have = stated_world_size(spans.headers.values()), len(spans.ranks)
    return f"{have}" if have >= world else f"{have} of {world}"


def _graphs(a: Spans, b: Spans) -> _AlikeRow:
    shares = []
    for spans in (a, b):
        table = spans.try_table("kernels", [])
        if table is not None and len(table.rows) and "graph" in {c.name for c in table.columns}:
            shares.append(float(np.mean(table.numbers("graph", -1) >= 0)))
        else:
            shares.append(np.nan)
    texts = [_UNKNOWN if np.isnan(share) else f"{share:.0%} of kernels" for share in shares]
    apart = abs(shares[0] - shares[1])
    return "graph capture", *texts, 1.0 if np.isnan(apart) else 1.0 - _EAGER * apart


def _alike_work(a: Side, b: Side) -> _AlikeRow:
    shared = shared_work([a, b], STEP)
    if not shared:
        return "work", _UNKNOWN, _UNKNOWN, 1.0
    name, pair = next(iter(shared.items()))
    known = [each[np.isfinite(each)] for each in pair]
    low, high = max(each.min() for each in known), min(each.max() for each in known)
    inside = min(float(np.mean((each >= low) & (each <= high))) for each in known)
    texts = [f"{each.min():,.0f} to {each.max():,.0f} {name}" for each in known]
    return "work", *texts, _APART + (1 - _APART) * inside
