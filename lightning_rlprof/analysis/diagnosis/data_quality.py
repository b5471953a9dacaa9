"""Checks of the data before any number: missing ranks and steps, lost events, clocks, overhead."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.losses import (
    LaunchMatch,
    LossCode,
    launch_match,
    loss_texts,
)
from lightning_rlprof.analysis.device.timeline import device_losses
from lightning_rlprof.analysis.device.work import NO_REPLAY, device_work
from lightning_rlprof.analysis.efficiency.throughput import throughput
from lightning_rlprof.analysis.listing import listed
from lightning_rlprof.analysis.statistics.rank_tests import median_bounds
from lightning_rlprof.analysis.steps.step_selection import (
    CLOSED,
    OPENED,
    STATES,
    capture_slowdown,
    counted,
    states,
)
from lightning_rlprof.analysis.steps.sync_points import uncertainty_ns, unsynchronized_clocks
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import SHADOW, STEP_END
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans, world_size
from lightning_rlprof.tables.table import Column, Table, rows_of

_COLUMNS = (Column("check", "text"), Column("state", "text"), Column("detail", "text"))
_OK, _WARN, _NOT_CHECKED = "ok", "warn", "not checked"
_MAX_OVERHEAD = 0.01  # Opening and closing captures may take this much of the recorded time.
_MAX_SLOWDOWN = 0.05  # Captured steps, and recorded ones, may be slower than the rest by this much.
_MAX_LOST = 0.01  # The last launches of a capture have no kernel, which is less than this.
_MAX_UNCERTAINTY_NS = 1_000_000

_TEXTS_SHOWN = 4  # Of warnings, and of remarks.
MIN_PAIRS = 20
"""Below it, the interval of a median is nearly the range of the values."""

_Result = tuple[str, str]
_OF_TIME = (LossCode.STEPS, LossCode.EDGES)
_OVER_BUDGET = (Code.OVER_BUDGET, Code.BUDGET_SUMMARY)

_NO_SHADOW = "cost of recording: no data, as every step has a span open around it"

_NEEDS = {"kernel/launch match": "a capture", "CUDA graphs": "a capture", "MFU": "FLOPs"}


class Check(NamedTuple):
    """One check of the recording.

    Attributes:
        name: What is checked.
        state: ``ok``, ``warn`` or ``not checked``.
        detail: What was found.
        needs: What a check lacks that was not made, such as ``a capture``.
    """

    name: str
    state: str
    detail: str
    needs: str = ""


@dataclass(frozen=True)
class Quality:
    """Whether the recording is complete, in one line, with every check."""

    checks: tuple[Check, ...]

    @property
    def doubts(self) -> tuple[Check, ...]:
        """The checks that warn."""
        return tuple(each for each in self.checks if each.state == _WARN)

    @property
    def line(self) -> str:
        """One line, as in ``Recording: complete; 2 checks need a capture``."""
        if self.doubts:
            return f"Recording: {len(self.doubts)} doubt{'s' * (len(self.doubts) > 1)}"
        needs = [each.needs for each in self.checks if each.state == _NOT_CHECKED]
        parts = [
            f"{needs.count(each)} check{' needs' if needs.count(each) == 1 else 's need'} {each}"
            for each in dict.fromkeys(needs)
        ]
        return "; ".join(["Recording: complete", *parts])


@dataclass(frozen=True)
class Overhead:
    """How much longer recorded steps are than shadow steps.

    Attributes:
        pairs: How many pairs of neighboring steps were compared.
        share: Median of their ratios, less 1; NaN with fewer than `MIN_PAIRS` pairs.
        low: Lower end of its 95% interval.
        high: Upper end.
    """

    pairs: int
    share: float
    low: float
    high: float


def check_quality(spans: Spans) -> Quality:
    """Check what could make the numbers of this run wrong.

    What concerns accelerators is not checked of a run on CPUs that has no such data.
    """
    devices = {head.device.partition(":")[0].lower() for head in spans.headers.values()}
    on_cpu = devices == {"cpu"}
    # A capture is there if it has kernels, and then a check lacks something else.
    has_work = launch_match(spans).kernels or device_losses(spans)
    needs = _NEEDS | ({"kernel/launch match": "launches"} if has_work else {})
    found = [
        Check(name, *result, needs.get(name, "steps") if result[0] == _NOT_CHECKED else "")
        for name, check in _CHECKS.items()
        for result in check(spans)
    ]
    return Quality(
        tuple(
            each
            for each in found
            if not (on_cpu and each.state == _NOT_CHECKED and each.name in _NEEDS)
        )
    )


def data_quality(spans: Spans) -> Table:
    """Check what could make the numbers of this run wrong, one row per check.

    ``state`` is ``ok``, ``warn``, or ``not checked`` if the run lacks the data for it.
    """
    rows = [each[:3] for each in check_quality(spans).checks]
    return Table("data_quality", _COLUMNS, rows)


def _ranks(spans: Spans) -> Iterator[_Result]:
    world, present = world_size(spans), len(spans.ranks)
    missing = sorted(set(range(world)) - set(spans.ranks))
    if missing:
        yield _WARN, f"{present} of {present + len(missing)} present; missing: {listed(missing)}"
    else:
        yield _OK, f"{present} of {present} present"


def _complete_files(spans: Spans) -> Iterator[_Result]:
    truncated = [rank for rank, status in spans.statuses.items() if status is None]
    failed = [rank for rank, status in spans.statuses.items() if status not in (None, "finished")]
    if truncated:
        yield _WARN, f"{listed(truncated, 'rank')}: file is truncated (killed or still running)"
    if failed:
        yield _WARN, f"{listed(failed, 'rank')}: recording ended early"
    if not truncated and not failed:
        yield _OK, "all rank files ended cleanly"


def _steps(spans: Spans) -> Iterator[_Result]:
    rows = spans.rows(kind="step")
    if not len(rows):
        yield _NOT_CHECKED, "needs a complete step"
        return
    steps = np.unique(spans.step[rows])
    count = len(steps)
    by_rank = {rank: spans.step[spans.rows(kind="step", rank=rank)] for rank in spans.ranks}
    of_role: dict[str, set[int]] = {}  # In asynchronous training, each role has its own steps.
    for rank, header in spans.headers.items():
        of_role.setdefault(header.role, set()).update(by_rank[rank].tolist())
    incomplete = [
        rank for rank, own in by_rank.items() if of_role[spans.headers[rank].role] - {*own.tolist()}
    ]
    text = f"{count} of {count} complete"
    if incomplete:
        text = f"some of {count} are missing on {listed(incomplete, 'rank')}"
    yield _WARN if incomplete else _OK, f"{text}. {counted(spans, rows).note}".rstrip(". ")
    lost = int(steps[-1] - steps[0]) + 1 - count
    configs = [header.config for header in spans.headers.values()]
    # Runs of earlier versions may have recorded captured steps alone.
    if lost and all(config and config.get("spans", True) for config in configs):
        first = int(steps[np.flatnonzero(np.diff(steps) > 1)[0]]) + 1
        yield _WARN, f"{lost} between the others are in no file, the first is {first}"


def _dropped_events(spans: Spans) -> Iterator[_Result]:
    over = {each.rank: each.text for each in spans.notes if each.code in _OVER_BUDGET}
    if over:  # The last one of each rank has the counts.
        ranks = [rank for rank in over if rank is not None]
        yield _WARN, f"{listed(ranks, 'rank')}: {over[ranks[0]]}"
    texts = [*dict.fromkeys(each.text for each in spans.warnings)]
    for name in ("kernels", "memcpy", "collectives"):
        table = spans.try_table(name, [])
        said = {*texts}  # A trace may have said it of the whole file.
        texts += [f"{name}: {text}" for text in table.losses if text not in said] if table else []
    # The others are about launches, which have a check of their own.
    texts += loss_texts(each for each in device_losses(spans) if each.code in _OF_TIME)
    if texts:
        yield _WARN, _first(texts, "warnings")
    elif not over:
        yield _OK, "none detected"


def _remarks(spans: Spans) -> Iterator[_Result]:
    """What the run noted at its end or on the way: a request that came to nothing, a full disk."""
    texts = [
        note.text for note in spans.notes if note.level != "info" and note.code not in _OVER_BUDGET
    ]
    yield (_WARN, _first(texts, "remarks")) if texts else (_OK, "none")


def _first(texts: list[str], what: str) -> str:
    if len(texts) == 1:
        return texts[0]
    more = f"; and {len(texts) - _TEXTS_SHOWN} more" if len(texts) > _TEXTS_SHOWN else ""
    return f"{len(texts)} {what}: {'; '.join(texts[:_TEXTS_SHOWN])}{more}"


def _kernel_launch_match(spans: Spans) -> Iterator[_Result]:
    found = launch_match(spans)
    alone = found.unlaunched > _MAX_LOST * found.kernels
    if found.unmatched > _MAX_LOST * found.launches:
        text = f"{found.unmatched:,} of {found.launches:,} launches have no kernel"
        yield _WARN, f"{text}: events were dropped, or a CUDA graph captured them"
    elif found.launches and not alone:
        text = f"{found.launches - found.unmatched:,} of {found.launches:,} launches have a kernel"
        yield _OK, text
    if alone:
        text = f"{found.unlaunched:,} of {found.kernels:,} kernels have no launch"
        yield _WARN, f"{text}: they were launched before the recording, or the calls were dropped"
    elif not found.launches:
        yield _NOT_CHECKED, _no_launches(spans, found)


def _no_launches(spans: Spans, found: LaunchMatch) -> str:
    """Return why it is not known whether each launch has its kernel."""
    if not found.kernels:
        return "no kernels were read"
    if (device_work(spans).replay != NO_REPLAY).all():
        return "all kernels ran in graph replays"
    return "no call that launches a single kernel was recorded"


def _clocks(spans: Spans) -> Iterator[_Result]:
    uncertainty = uncertainty_ns(spans)
    if uncertainty == 0:
        yield _OK, "one host, one clock"
    elif uncertainty is not None:
        state = _OK if uncertainty <= _MAX_UNCERTAINTY_NS else _WARN
        yield state, f"synchronized within {uncertainty / 1e6:.3f} ms between ranks"
    else:
        text = f"{unsynchronized_clocks(spans)}: times of ranks may be off by milliseconds"
        yield _WARN, text


def _cuda_graphs(spans: Spans) -> Iterator[_Result]:
    remarks: list[str] = []
    table = spans.try_table("kernels", remarks)
    if table is None and remarks:
        yield _WARN, " ".join(remarks)
    elif table is None or not len(table.rows):
        yield _NOT_CHECKED, "no kernels were recorded"
    elif device_work(spans).hidden_in_graphs:
        yield _WARN, "kernels inside CUDA graphs aren't visible: device idle time is unknown"
    elif replayed := int(np.count_nonzero(table.numbers("graph", -1) >= 0)):
        text = f"{replayed:,} kernels ran in graph replays: idle time inside replays is unknown"
        yield _WARN, text
    else:
        yield _OK, "no kernel ran in a graph replay"


def _mfu(spans: Spans) -> Iterator[_Result]:
    rates = [(row["TFLOP/s"], row["peak TFLOP/s"]) for row in rows_of(throughput(spans))]
    known = [done > peak for done, peak in rates if done is not None and peak is not None]
    if not known:
        yield _NOT_CHECKED, "FLOPs or the device's peak are unknown"
    elif any(known):
        yield _WARN, "above 100%: FLOPs, tokens or peak are wrong"
    else:
        yield _OK, "below 100%"


def _profiler_overhead(spans: Spans) -> Iterator[_Result]:
    rows = np.concatenate([spans.rows(kind="region", name=name) for name in (OPENED, CLOSED)])
    took, recorded = int(spans.took_ns(rows).sum()), 0
    for rank in spans.ranks:
        own = spans.rows(rank=rank)
        times = np.append(spans.start_ns[own], spans.end_ns[own])
        recorded += int(np.ptp(times)) if len(own) else 0
    share, slower = took / recorded if recorded else 0.0, capture_slowdown(spans)
    text = f"opening and closing captures took {share:.2%} of the recorded time"
    if slower is not None:
        text += f"; captured steps are {abs(slower):.1%} {'faster' if slower < 0 else 'slower'}"
    is_high = share > _MAX_OVERHEAD or (slower or 0.0) > _MAX_SLOWDOWN
    if (found := measured_overhead(spans)) is not None:
        text = f"{_recording(found)}; {text}"
        is_high |= found.low > _MAX_SLOWDOWN
    elif any(header.config.get("measure_overhead") for header in spans.headers.values()):
        text = f"{_NO_SHADOW}; {text}"
    yield _WARN if is_high else _OK, text


def _recording(found: Overhead) -> str:
    """Say what recording costs."""
    if found.pairs < MIN_PAIRS:
        pairs = f"{found.pairs} pair{'' if found.pairs == 1 else 's'} of steps"
        return f"cost of recording: no data yet ({pairs}; {MIN_PAIRS} are needed)"
    interval = f"95% CI {100 * found.low:.2f} to {100 * found.high:.2f}"
    share = f"{100 * found.share:.2f} points"
    return f"recording adds {share} to a step ({interval}, {found.pairs:,} pairs of steps)"


_CHECKS = {
    "ranks": _ranks,
    "files": _complete_files,
    "steps": _steps,
    "dropped events": _dropped_events,
    "remarks of the run": _remarks,
    "kernel/launch match": _kernel_launch_match,
    "clocks": _clocks,
    "CUDA graphs": _cuda_graphs,
    "MFU": _mfu,
    "profiler overhead": _profiler_overhead,
}


# ---- what recording costs, from pairs of steps of which one recorded only its length


def measured_overhead(spans: Spans) -> Overhead | None:
    """Compare the steps of a run with its shadow steps; None if it has none.

    Steps 1 and 2 are a pair, steps 3 and 4, and so on: a slow drift changes both alike. The ranks
    of a role wait for each other, so a pair's ratio is that of the sums over them. A pair counts if
    one step is complete and the other a shadow step on all of them. The end of a step runs within
    the span of the next one: it is added to the step that it is of, and nowhere if that is a shadow
    step, as without rlprof there is none.

    The interval is that of order statistics, which holds whatever the noise is.
    """
    rows = spans.rows(kind="step")
    state = states(spans, rows)
    if not (state == STATES.index(SHADOW)).any():
        return None
    roles = [spans.headers[rank].role for rank in spans.ranks]
    ratios = []
    for role in dict.fromkeys(roles):
        own = [rank for rank, its in zip(spans.ranks, roles, strict=True) if its == role]
        chosen = np.isin(spans.rank[rows], own)
        ratios.append(_ratios(spans, rows[chosen], state[chosen]))
    values = np.concatenate(ratios) - 1
    bounds = median_bounds(values)
    if len(values) < MIN_PAIRS or bounds is None:
        return Overhead(len(values), np.nan, np.nan, np.nan)
    return Overhead(len(values), float(np.median(values)), *bounds)


def _ratios(spans: Spans, rows: Int64s, state: Int64s) -> Float64s:
    """Return a ratio per pair of steps."""
    order = np.lexsort([spans.start_ns[rows], spans.rank[rows]])
    rows, state = rows[order], state[order]
    # It is the time that the end of the previous step took.
    after = spans.per_row(STEP_END, rows=rows)
    follows = np.append((np.diff(spans.rank[rows]) == 0) & (after[1:] >= 0), False)
    end = np.append(after[1:], 0)
    is_shadow = state == STATES.index(SHADOW)
    length = spans.took_ns(rows) - np.maximum(after, 0) + np.where(is_shadow, 0, end)
    steps, place = np.unique(spans.step[rows], return_inverse=True)
    count = np.bincount(place)
    sums = np.bincount(place, length)
    known = (np.bincount(place, follows) == count) & (sums > 0)
    complete = known & (np.bincount(place, state == 0) == count)
    shadow = known & (np.bincount(place, is_shadow) == count)
    is_pair = (np.diff(steps) == 1) & (steps[:-1] % 2 == 1)  # `pair_of` has the same pairs.
    first = np.flatnonzero(is_pair & (np.diff(count) == 0))
    early = first[complete[first] & shadow[first + 1]]
    late = first[shadow[first] & complete[first + 1]] + 1
    on, off = np.append(early, late), np.append(early + 1, late - 1)
    ratios: Float64s = sums[on] / sums[off]
    return ratios
