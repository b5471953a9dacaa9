"""Quantities of samples, memory and what was recorded: lengths, fates, growth, lost data."""

from typing import Any

import numpy as np

from lightning_rlprof.analysis.device.device_counters import background_samples
from lightning_rlprof.analysis.diagnosis.evidence import (
    FEWEST_STEPS,
    HIGH,
    MEDIUM,
    Evidence,
    Fact,
    Measured,
    Measurement,
    NoData,
    Quantity,
    exact,
    place_of,
    sampled_share,
    share_interval,
)
from lightning_rlprof.analysis.diagnosis.machine_quantities import KV_CACHE, REQUESTS_WAIT
from lightning_rlprof.analysis.diagnosis.step_quantities import stage_rows
from lightning_rlprof.analysis.memory import ALL, leaking_phases, memory, memory_phases
from lightning_rlprof.analysis.samples.sample_book import USED, SampleBook, sample_book
from lightning_rlprof.analysis.samples.sample_tables import trainer_versions
from lightning_rlprof.analysis.statistics.growth import (
    FLAT,
    LEAK,
    MAY_LEAK,
    MIN_VALUES_TO_GROW,
    PLATEAU,
    TOO_FEW,
)
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import BACKGROUND_METRICS, KINDS, stated_world_size
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.intervals import edges
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of

_LIMIT = "response_limit"
_FEWEST_SAMPLES = 20
_STAGE = KINDS.index("stage")

# ---- samples
_PREEMPTED = "engine_preemptions_per_s"
_OF_ENGINES = {
    "of the time requests waited at the engine": REQUESTS_WAIT,
    "of its KV cache was in use then": KV_CACHE,
}
_COUNTED_MEMORY = {
    "torch": "device_allocated_bytes",
    "host": "host_rss_bytes",
    "child processes": "children_rss_bytes",
}
_PARTS_OF_DEVICES = ("torch reserved", "device", "non-PyTorch")
_MIN_GROWTH = 0.02  # A growth by less of the peak over all steps is not worth a look.

# The status of a rank contains this class of torch, which is the same for any device.
_OUT_OF_MEMORY = "OutOfMemoryError"

_LOSSES = (Code.LINES_LOST, Code.FILE_DAMAGED, Code.NUMBERS_LOST, Code.RECORDING_FAILED)
_MAX_RANKS_SHOWN = 8


def _ended_samples(run: Evidence) -> tuple[SampleBook, Int64s]:
    """Return the samples, and which of the training have a fate in an included step.

    Raises:
        NoData: They are too few.
    """
    book = sample_book(run.spans)
    at = np.flatnonzero((book.fate_row >= 0) & ~book.fates("evaluation"))
    at = at[np.isin(run.spans.step[book.fate_row[at]], run.included)]
    if len(at) < _FEWEST_SAMPLES:
        how = "Wrap each response in sample(prompt_id), and tell its fate"
        raise NoData("No samples were recorded", how)
    return book, at


def _with_tokens(book: SampleBook, at: Int64s) -> Int64s:
    """Return those of some samples whose tokens are known; raises `NoData` if there are none."""
    found = at[book.tokens[at] >= 0]
    if not len(found):
        raise NoData("No response has tokens", "Call count(tokens=...) in its phase")
    return found


def _mean(run: Evidence, rows: Int64s, values: Any) -> Measured:
    """Return the mean of a value per row, with its interval over the steps of the rows."""
    values, ones = np.asarray(values, np.float64), np.ones(len(rows))
    return sampled_share(run.by_step(rows, values), run.by_step(rows, ones))


def _clipped(run: Evidence) -> Measurement:
    """Return the share of responses that reached the limit of their length.

    A response is clipped if it has as many tokens as the counted limit, or the fate ``truncated``.
    That many end together, or in one bin of a histogram, does not show it.
    """
    book, at = _ended_samples(run)
    limits = run.spans.amounts(_LIMIT, np.int64).values
    limits = limits[limits > 0]
    if len(limits):
        at = _with_tokens(book, at)
    clipped = book.fates("truncated")[at]
    if len(limits):
        own = run.spans.per_row(_LIMIT, 0, book.fate_row[at])
        # A stage that counts twice has the sum, so that the least number is the limit.
        clipped = clipped | (book.tokens[at] >= np.where(own > 0, own, int(limits.min())))
    elif not clipped.any():
        raise NoData(
            "No response has the fate truncated, and no limit was counted",
            f"Pass {_LIMIT}=... to end() of each sample, or count it in the stage that generates",
        )
    return _mean(run, book.fate_row[at], clipped)


def _discarded(run: Evidence) -> Measurement:
    """Return the share of generated tokens that no update took."""
    book, at = _ended_samples(run)
    at = _with_tokens(book, at)
    tokens = book.tokens[at].astype(np.float64)
    lost = book.fates("stale", "aborted", "retried", "filtered")[at]
    whole = run.by_step(book.fate_row[at], tokens)
    return sampled_share(run.by_step(book.fate_row[at], np.where(lost, tokens, 0.0)), whole)


def _staleness(run: Evidence) -> Measurement:
    """Return how many versions old the weights were that generated trained samples, in the mean."""
    book, at = _ended_samples(run)
    at = at[book.fates(*USED)[at]]
    trained = trainer_versions(run.spans, book.fate_row[at])
    known = (trained >= 0) & (book.version[at] >= 0)
    if not known.any():
        how = "Pass version=... to sample(), and trainer_version=... to end()"
        raise NoData("No sample has the versions of its weights", how)
    return _mean(run, book.fate_row[at][known], (trained - book.version[at])[known])


def _tokens_of_samples(run: Evidence) -> tuple[Int64s, Int64s]:
    """Return the rows at which trained samples ended, and the tokens of each."""
    try:
        book, at = _ended_samples(run)
    except NoData:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    at = at[book.fates(*USED)[at] & (book.tokens[at] >= 0)]
    return book.fate_row[at], book.tokens[at]


def _imbalance(run: Evidence) -> Measurement:
    """Return the tokens of the rank with most over the mean of the ranks, in the mean of steps."""
    spans = run.spans
    rows, tokens = _tokens_of_samples(run)
    if len(np.unique(spans.rank[rows])) < 2:
        counted, counts = spans.amounts("tokens", np.int64)
        keep = np.isin(counted, stage_rows(run, "actor_update"))
        keep &= np.isin(spans.step[counted], run.included)
        rows, tokens = counted[keep], counts[keep]
    ranks, place = np.unique(spans.rank[rows], return_inverse=True)
    if len(ranks) < 2:
        how = "Record several ranks, and call count(tokens=...) in their update"
        raise NoData("Fewer than two ranks counted the tokens of an update", how)
    numbers, at_step = np.unique(spans.step[rows], return_inverse=True)
    sums = np.zeros((len(numbers), len(ranks)))
    np.add.at(sums, (at_step, place), tokens)
    sums = sums[(sums > 0).all(axis=1)]
    return sampled_share(sums.max(axis=1), sums.mean(axis=1))


def _preemptions(run: Evidence) -> Measurement:
    """Return how many requests a step preempts, in the mean of the steps.

    ``num_preempted`` is what a span counted. ``num_preemptions_total`` is a running total of an
    engine, as in Prometheus: what a step adds is the difference to the step before it. Without
    both it is what the pages of engines say.
    """
    spans, steps = run.spans, run.included
    rows, counts = spans.amounts("num_preempted")
    keep = np.isin(spans.step[rows], steps)
    facts, query = tuple[Fact, ...](), ""
    if keep.any():
        sums = run.by_step(rows[keep], counts[keep])
    elif len(rows := (totals := spans.amounts("num_preemptions_total")).rows):
        sums = np.zeros(len(steps))
        for rank in np.unique(spans.rank[rows]).tolist():
            own = spans.rank[rows] == rank
            number, place = np.unique(spans.step[rows[own]], return_inverse=True)
            last = np.zeros(len(number))
            np.maximum.at(last, place, totals.values[own])
            added = np.maximum(np.diff(last), 0)
            inside = np.isin(number[1:], steps)
            np.add.at(sums, np.searchsorted(steps, number[1:][inside]), added[inside])
    else:
        sums = _sampled_preemptions(run)
        known = {name: run.value(each) for name, each in _OF_ENGINES.items()}
        facts = tuple(Fact(name, v.value, "share") for name, v in known.items() if v is not None)
        query = f"select * from {BACKGROUND_METRICS} where name = '{_PREEMPTED}' order by time_ns"
    NoData.unless(len(sums), FEWEST_STEPS, "complete steps")
    ones = np.ones(len(sums))
    return Measured(float(sums.mean()), *share_interval(sums, ones), facts=facts, query=query)


def _sampled_preemptions(run: Evidence) -> Float64s:
    """Return the preemptions in each included step of the rank that sampled the engines.

    A sample that is longer than a step is spread evenly over its time.
    """
    spans = run.spans
    samples = background_samples(spans, _PREEMPTED)
    if samples is None:
        how = "Set engine_metrics, or call count(num_preempted=...) in actor_generate"
        raise NoData("Preemptions of the rollout engine were not counted", how)
    rows = spans.rows(kind="step", rank=int(samples.rank[0]))
    rows = rows[np.isin(spans.step[rows], run.included)]
    first, last = samples.time.min(), (samples.time + samples.duration).max()
    rows = rows[(spans.end_ns[rows] > first) & (spans.start_ns[rows] < last)]
    sums = np.zeros(len(rows))
    for device in np.unique(samples.device).tolist():
        own = samples.rows(samples.device == device)
        ends = own.time + own.duration
        total = np.cumsum(own.value * own.duration / 1e9)
        times, totals = np.append(own.time[0], ends), np.append(0.0, total)
        sums += np.interp(spans.end_ns[rows], times, totals)
        sums -= np.interp(spans.start_ns[rows], times, totals)
    return np.round(sums, 6)  # The differences of sums leave 1e-17 where nothing was preempted.


def _transfer_bytes(run: Evidence) -> Measurement:
    """Return the bytes of each transfer of a weight sync, in the mean of the steps."""
    spans = run.spans
    rows, moved = spans.amounts("bytes")
    syncs = (categories_of(spans.names) == Category.WEIGHT_SYNC)[spans.name]
    ids = spans.rank * (int(spans.id.max(initial=0)) + 2)
    inside = np.isin(ids[rows] + spans.parent[rows], (ids + spans.id)[syncs]) | syncs[rows]
    if not inside.any():
        how = "Call count(bytes=...) in each transfer inside of weight_sync"
        raise NoData("No transfer of a weight sync counted its bytes", how)
    return _mean(run, rows[inside], moved[inside])


# ---- memory


def _host_room(run: Evidence) -> Measurement:
    """Return the free host memory, on the host with the least; ranks of one host share it."""
    spans = run.spans
    resident = ("host_rss_bytes", "children_rss_bytes")
    rows = edges(*(spans.amounts(name, np.int64).rows for name in resident))
    rss = np.sum([np.maximum(spans.per_row(name, rows=rows), 0) for name in resident], axis=0)
    known = (rss > 0) & np.isin(spans.step[rows], run.included)
    rows, rss = rows[known], rss[known]
    names, host = np.unique([head.host for head in spans.headers.values()], return_inverse=True)
    is_on = np.zeros((max([*spans.headers, *spans.ranks], default=0) + 1, len(names)), np.int64)
    is_on[[*spans.headers], host] = 1
    limits = np.zeros(len(is_on), np.int64)  # Bytes, by rank first and then by host.
    told, limit = spans.amounts("host_limit_bytes", np.int64)
    np.maximum.at(limits, spans.rank[told], limit)
    limits = (limits[:, None] * is_on).max(axis=0)
    if not len(rows) or not (limits > 0).all():
        raise NoData("Host memory and its limit were not recorded", "Record on Linux")
    steps, step = np.unique(spans.step[rows], return_inverse=True)
    most = np.zeros((len(steps), len(is_on)), np.int64)  # Each rank counts with its highest value.
    np.maximum.at(most, (step, spans.rank[rows]), rss)
    used = most @ is_on
    free = (1 - used / limits).min(axis=1)
    return Measured(float(np.median(free)), float(free.min()), float(free.max()))


def _growth(run: Evidence) -> Measurement:
    """Return what leaks of memory add up to, of the peak: the worst rank of each component.

    `grows` is the judge, as in memory_phases.
    """
    rows = [
        row
        for row in rows_of(memory_phases(run.spans))
        if row["phase"] == ALL and row["component"] not in _PARTS_OF_DEVICES
    ]
    peaks: dict[tuple[int, str], int] = {}
    for row in rows_of(memory(run.spans)):
        if row["stage"] == ALL:
            place = (row["rank"], row["component"])
            peaks[place] = max(peaks.get(place, 0), row["peak"] or 0, row["reserved"] or 0)
    rows = [row | {"peak": peaks[row["rank"], row["component"]]} for row in rows]
    if not rows:
        raise NoData("No memory of steps was recorded", "Record on Linux, or on a device")
    if all(row["verdict"] == TOO_FEW for row in rows):
        NoData.unless(max(row["steps"] for row in rows), MIN_VALUES_TO_GROW, "steps with memory")
    leaks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["verdict"] == LEAK:
            leaks.setdefault(row["component"], []).append(row)
    found = tuple(
        _leak(run.spans, max(each, key=lambda row: row["added per step"]), len(each))
        for each in leaks.values()
    )
    if any(each.value > _MIN_GROWTH for each in found):
        return found
    unclear = [row["verdict"] for row in rows if _part_of_peak(row, "CI high") > _MIN_GROWTH]
    if any(each in (PLATEAU, FLAT, MAY_LEAK) for each in unclear):
        raise NoData("Memory may grow, and steps differ too much", "Record more steps")
    return exact(0.0)


def _part_of_peak(row: dict[str, Any], rate: str) -> float:
    return float((row[rate] or 0.0) * row["steps"] / row["peak"]) if row["peak"] else 0.0


def _leak(spans: Spans, row: dict[str, Any], ranks: int) -> Measured:
    rank, component = row["rank"], row["component"]
    slope, low, high = row["added per step"], row["CI low"], row["CI high"]
    facts = [
        Fact("component", component, "text"),
        Fact("rank", rank),
        Fact("ranks", ranks),
        Fact("growth per step", slope, "bytes", low, high),
        Fact("steps", row["steps"]),
    ]
    if phases := leaking_phases(spans, rank, component):
        facts.append(Fact("added by", ", ".join(phases), "text"))
    rows, counter = spans.rows(kind="step", rank=rank), _COUNTED_MEMORY[component]
    first, last = spans.step[rows[[0, -1]]]
    share = _part_of_peak(row, "added per step")
    return exact(
        share,
        facts=tuple(facts),
        query=f"select step, kind, name, start_ns, {counter} from spans where rank = {rank} "
        f"and kind in ('stage', 'step') and step between {first} and {last} "
        f"and {counter} is not null order by start_ns",
        place=place_of(spans, rows[-1:]),
        confidence=HIGH if low > slope / 2 else MEDIUM,
    )


def _out_of_memory(run: Evidence) -> Measurement:
    """Return each rank that torch's OutOfMemoryError ended, and the stage that began last."""
    spans = run.spans
    ranks = [rank for rank, status in spans.statuses.items() if _OUT_OF_MEMORY in (status or "")]
    steps = {rank: spans.rows(kind="step", rank=rank) for rank in ranks}
    return tuple(_ran_out(spans, rank, rows) for rank, rows in steps.items() if len(rows))


def _ran_out(spans: Spans, rank: int, steps: Int64s) -> Measured:
    step = int(spans.step[steps].max())
    rows = spans.rows(kind="stage", rank=rank)
    rows = rows[spans.step[rows] == step]
    last = rows[np.argsort(spans.start_ns[rows], kind="stable")][-1:]
    stage = spans.names[int(spans.name[last[0]])] if len(last) else "no stage"
    facts = [Fact("rank", rank), Fact("step", step), Fact("stage", stage, "text")]
    for note in spans.notes:
        if note.code == Code.OUT_OF_MEMORY and note.rank == rank:
            facts += [
                Fact(name.replace("_bytes", ""), float(note.facts[name]), "bytes")
                for name in ("wanted_bytes", "free_bytes")
                if name in note.facts
            ]
    return exact(
        1.0,
        facts=tuple(facts),
        query=f"select * from spans where rank = {rank} and step = {step} order by start_ns",
        place=place_of(spans, last if len(last) else steps[-1:]),
    )


# ---- what the recording lost


def _lost_data(run: Evidence) -> Measurement:
    """Return how many ranks are missing or have lost lines, of a run that rlprof recorded."""
    spans = run.spans
    heads = [head for head in spans.headers.values() if head.config]
    world = stated_world_size(heads)
    missing = sorted(set(range(world)) - set(spans.ranks))
    losing = sorted({note.rank or 0 for note in spans.notes if note.code in _LOSSES})
    facts = [
        Fact(name, ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN])), "text")
        for name, ranks in (("missing ranks", missing), ("ranks that lost lines", losing))
        if ranks
    ]
    return exact(float(len(missing) + len(losing)), facts=tuple(facts))


CLIPPED = Quantity("responses that reach the limit of their length", "share", _clipped)
DISCARDED = Quantity("generated tokens that no update takes", "share", _discarded)
STALENESS = Quantity("staleness of trained samples in versions", "number", _staleness)
TOKEN_IMBALANCE = Quantity("tokens of the fullest rank by the mean of ranks", "ratio", _imbalance)
PREEMPTIONS = Quantity("preempted requests per step", "number", _preemptions)
TRANSFER_BYTES = Quantity("size of one transfer of a weight sync", "bytes", _transfer_bytes)
HOST_ROOM = Quantity("free host memory, of its limit", "share", _host_room)
GROWTH = Quantity("growth of memory over all steps, of the peak", "share", _growth)
OUT_OF_MEMORY = Quantity("ranks that ran out of device memory", "count", _out_of_memory)
LOST_DATA = Quantity("ranks whose data is lost", "count", _lost_data)
