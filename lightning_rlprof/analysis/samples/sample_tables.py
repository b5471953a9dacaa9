"""Tables of samples: fates, lengths, balance over ranks, age of weights, and one on its way."""

import heapq
from collections.abc import Sequence

import numpy as np

from lightning_rlprof.analysis.ledger.ledger import accounts_of
from lightning_rlprof.analysis.samples.sample_book import (
    NO_FATE,
    NO_SAMPLES,
    UNKNOWN,
    USED,
    SampleBook,
    rollout_rows,
    sample_book,
)
from lightning_rlprof.analysis.statistics.group_summary import rows_by_group
from lightning_rlprof.analysis.steps.execution_mode import rollouts_and_updates
from lightning_rlprof.analysis.steps.step_selection import in_included
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import FATES, KINDS, LENGTHS, NO_KNOWN_FATE, bin_start
from lightning_rlprof.tables.arrays import Int64s, group_starts
from lightning_rlprof.tables.spans import Histogram, Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_TRAINED = FATES.index("trained")
_FATE_COLUMNS = (
    Column("fate", "text"),
    Column("samples", "count"),
    Column("share of samples", "share"),
    Column("tokens", "count"),
    Column("share of tokens", "share"),
    Column("tokens left", "count"),
    Column("generation time", "duration", "ns"),
)

_LENGTH_COLUMNS = (
    Column("stage", "text"),
    *columns_of("count", "samples", "p50", "p95", "longest"),
    Column("share of longest", "share"),
)
_LENGTH_NOTE = (
    "Lengths are kept in bins of 19%, and shown by the least of their bin. share of longest: in "
    "the last bin, such as responses that reach the limit."
)

_BALANCE_COLUMNS = (
    Column("order", "text"),
    *columns_of("count", "least tokens", "most tokens"),
    *columns_of("ratio", "tokens", "tokens squared"),
    *columns_of("count", "steps", "samples"),
)
_BALANCE_NOTE = (
    "least and most tokens of a rank, mean over steps. tokens, tokens squared: the largest rank "
    "over the mean of all. Time grows with the first, attention with the second. as generated: in "
    "order of start, cut into equal numbers. best: by differencing, equal numbers not required."
)
_ONE_RANK = "Needs samples with tokens that two or more ranks trained in one step"

_STALENESS_COLUMNS = (
    Column("step", "text"),
    *columns_of("count", "samples", "version"),
    Column("staleness mean", "number"),
    Column("staleness max", "count"),
    *columns_of("share", "off-policy", "mixed versions"),
    *columns_of("duration", "wait p50", "wait max", unit="ns"),
    Column("queue", "count"),
)
_STALENESS_NOTE = (
    "staleness: versions between the weights that began the sample and those that the update "
    "starts from. mixed versions: weights changed during the response. wait: from the end of the "
    "last phase to the fate. queue: complete samples that waited when the update began."
)
_NO_VERSIONS = (
    "No sample has both versions. Pass that of the generating weights to sample(version=...), and "
    "that of the weights which are updated to end(trainer_version=...)"
)

_PATH_COLUMNS = (
    Column("phase", "text"),
    Column("rank", "count"),
    Column("role", "text"),
    *columns_of("duration", "from", "duration", unit="ns"),
    *columns_of("count", "tokens", "version"),
)
_MARK = KINDS.index("mark")
_WAIT = "(wait)"


def samples(spans: Spans) -> Table:
    """Return how many samples had which fate, and what that leaves of the tokens generated.

    Each sample is in one row between ``generated`` and ``trained``, so that the fates add up to
    ``generated`` exactly. ``tokens left`` takes the rows away one after another; what is left at
    the end trains. ``generation time`` sums the rollout phases, which may overlap.

    Abstains if no samples were recorded.
    """
    book = sample_book(spans)
    if not len(book):
        return Table("samples", _FATE_COLUMNS, abstained=NO_SAMPLES)
    tokens = np.maximum(book.tokens, 0)
    took = _generation_ns(spans, book)
    count, total = len(book), int(tokens.sum())
    left = total
    rows: list[tuple[Cell, ...]] = [
        ("generated", count, 1.0, total, 1.0 if total else None, left, int(took.sum()))
    ]
    for code in (*reversed(range(_TRAINED + 1, len(FATES))), NO_FATE, _TRAINED):
        own = book.fate == code
        if not own.any() and code != _TRAINED:
            continue
        name = FATES[code] if code != NO_FATE else NO_KNOWN_FATE
        part = int(tokens[own].sum())
        left -= 0 if code == _TRAINED else part
        number = int(own.sum())
        shares = number / count, part, part / total if total else None
        rows.append((name, number, *shares, left, int(took[own].sum())))
    return Table("samples", _FATE_COLUMNS, rows, _fates_note(spans, book, total, left))


def _generation_ns(spans: Spans, book: SampleBook) -> Int64s:
    """Return how long the rollout phases of each sample took."""
    rows = rollout_rows(spans, book)
    found = np.zeros(len(book), np.int64)
    np.add.at(found, book.of_row[rows], spans.took_ns(rows))
    return found


def _fates_note(spans: Spans, book: SampleBook, total: int, useful: int) -> str:
    texts = []
    seconds = accounts_of(spans).total_ns / 1e9
    unknown = int((book.fate == NO_FATE).sum())
    if total and seconds:
        per, every = f"{spans.device_word}-second", f"{total / seconds:,.3g}"
        known = f"{useful / seconds:,.3g} useful tokens per {per}, of {every} generated."
        texts.append(known if useful or not unknown else f"{every} tokens generated per {per}.")
    if unknown:
        texts.append(
            "unknown: no fate was recorded, as of samples that were in flight when the run ended."
        )
    silent = int((book.fates(*USED) & (book.tokens < 0)).sum())
    if silent:
        text = "of the samples that an update took have no tokens"
        texts.append(f"{silent:,} {text}: call count(tokens=...) in their phase.")
    return " ".join(texts)


def lengths(spans: Spans) -> Table:
    """Return for each stage how long its samples were, all ranks together.

    Abstains if no stage counted lengths, ``count(lengths=[...])``. Excluded steps are left out.
    """
    found = included_lengths(spans)
    if not len(found.rows):
        reason = "No stage counted lengths. Call count(lengths=[...]) in the stage that generates."
        return Table("lengths", _LENGTH_COLUMNS, abstained=reason)
    rows: list[tuple[Cell, ...]] = []
    names = spans.name[found.rows]
    for code in np.unique(names).tolist():
        own = names == code
        counts = bin_counts(found.bins[own], found.counts[own])
        low, high = (round(bin_start(quantile_bin(counts, part))) for part in (0.5, 0.95))
        last = int(np.flatnonzero(counts)[-1])
        total = int(counts.sum())
        share = float(counts[last]) / total
        rows.append((spans.names[code], total, low, high, round(bin_start(last)), share))
    rows.sort(key=lambda row: -int(row[1] or 0))
    return Table("lengths", _LENGTH_COLUMNS, rows, _LENGTH_NOTE)


def included_lengths(spans: Spans) -> Histogram:
    """Return the lengths of included steps, and those outside steps."""
    found = spans.histogram(LENGTHS)
    keep = in_included(spans, found.rows)
    return Histogram(*(column[keep] for column in found))


def bin_counts(bins: Int64s, counts: Int64s) -> Int64s:
    """Sum counts by bin, from bin 0 on."""
    return np.bincount(bins, counts).astype(np.int64)


def quantile_bin(counts: Int64s, part: float) -> int:
    """Return the bin that holds a quantile.

    Example::

        >>> quantile_bin(np.array([0, 2, 2]), 0.5), quantile_bin(np.array([0, 2, 2]), 0.95)
        (1, 2)
    """
    sums = np.cumsum(counts)
    return int(np.searchsorted(sums, part * sums[-1]))


def length_balance(spans: Spans) -> Table:
    """Compare how evenly tokens are spread over ranks: as generated, as trained, and at best.

    A sample belongs to the rank and step that recorded its fate. Abstains unless two ranks trained.
    """
    book = sample_book(spans)
    if not len(book):
        return Table("length_balance", _BALANCE_COLUMNS, abstained=NO_SAMPLES)
    used = np.flatnonzero(book.fates(*USED) & (book.tokens >= 0))
    order = np.lexsort((used, spans.start_ns[_first_rows(book.first, book.rows)[used]]))
    used = used[order]
    step = spans.step[book.fate_row[used]]
    rank = spans.rank[book.fate_row[used]]
    sums: dict[str, list[list[Int64s]]] = {"as generated": [], "as trained": [], "best": []}
    samples = 0
    for own in rows_by_group(step):
        ranks, place = np.unique(rank[own], return_inverse=True)
        if len(ranks) < 2:
            continue
        lengths, parts = book.tokens[used[own]], len(ranks)
        samples += len(own)
        chunks = np.minimum(np.arange(len(own)) // max(len(own) // parts, 1), parts - 1)
        found = {"as generated": chunks, "as trained": place, "best": balanced(lengths, parts)}
        for name, of in found.items():
            both = (np.bincount(of, each, parts) for each in (lengths, lengths**2))
            sums[name].append([each.astype(np.int64) for each in both])
    if not samples:
        return Table("length_balance", _BALANCE_COLUMNS, abstained=_ONE_RANK)
    rows: list[tuple[Cell, ...]] = []
    for name, steps in sums.items():
        tokens = [each[0] for each in steps]
        least = round(float(np.mean([each.min() for each in tokens])))
        most = round(float(np.mean([each.max() for each in tokens])))
        ratios = [_imbalance([each[at] for each in steps]) for at in (0, 1)]
        rows.append((name, least, most, *ratios, len(steps), samples))
    return Table("length_balance", _BALANCE_COLUMNS, rows, _BALANCE_NOTE)


def _first_rows(first: Int64s, rows: Int64s) -> Int64s:
    """Return the first row of each sample; the first of all for one without rows."""
    starts = np.minimum(first[:-1], max(len(rows) - 1, 0))
    return rows[starts] if len(rows) else np.zeros(len(first) - 1, np.int64)


def _imbalance(steps: Sequence[Int64s]) -> float | None:
    ratios = [float(each.max() / each.mean()) for each in steps if each.any()]
    return float(np.mean(ratios)) if ratios else None


def balanced(lengths: Int64s, parts: int) -> Int64s:
    """Return the part of each length so that the sums of parts are nearly even.

    The largest differencing method for several parts (Karmarkar and Karp 1982): the two partial
    solutions with the largest spread are joined, heavy parts with light ones.

    Example::

        >>> balanced(np.array([8, 7, 6, 5, 4]), 2).tolist()
        [1, 0, 1, 0, 0]
    """
    # A partial solution has a spread, a number to break ties, and per part its sum and members.
    heap = []
    for at, length in enumerate(lengths.tolist()):
        sums = [(length, [at])] + [(0, list[int]()) for _ in range(parts - 1)]
        heap.append((-length, at, sums))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        light = reversed(other)
        joined = [(a + b, own + more) for (a, own), (b, more) in zip(one, light, strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    found = np.zeros(len(lengths), np.int64)
    for part, (_, members) in enumerate(heap[0][2] if heap else ()):
        found[members] = part
    return found


def staleness(spans: Spans) -> Table:
    """Return for each update how stale its samples were; the first row is of all updates.

    An update is the step in which the fates of its samples were recorded. Without
    ``trainer_version`` the version is the last one that a weight sync published before the fate.

    Abstains if no versions were recorded.
    """
    book = sample_book(spans)
    if not len(book):
        return Table("staleness", _STALENESS_COLUMNS, abstained=NO_SAMPLES)
    used = np.flatnonzero(book.fates(*USED))
    version = trainer_versions(spans, book.fate_row[used])
    used, version = used[version >= 0], version[version >= 0]
    used, version = used[book.version[used] >= 0], version[book.version[used] >= 0]
    if not len(used):
        return Table("staleness", _STALENESS_COLUMNS, abstained=_NO_VERSIONS)
    step = spans.step[book.fate_row[used]]
    order = np.argsort(step, kind="stable")
    first = group_starts(step[order])
    ready = _ready_ns(spans, book)
    rows = [("all", *_numbers(spans, book, used, version, ready), None)]
    for own, queue in zip(
        np.split(order, first[1:]), _queues(spans, book, ready, used, order, first), strict=True
    ):
        name, numbers = str(step[own[0]]), _numbers(spans, book, used[own], version[own], ready)
        rows.append((name, *numbers, queue))
    return Table("staleness", _STALENESS_COLUMNS, rows, _STALENESS_NOTE)


def trainer_versions(spans: Spans, fates: Int64s) -> Int64s:
    """Return the version of the weights that each fate's update starts from, or `UNKNOWN`."""
    version = spans.per_row("trainer_version", UNKNOWN, fates)
    at, values = spans.amounts("version", np.int64)
    syncs = (categories_of(spans.names) == Category.WEIGHT_SYNC)[spans.name[at]]
    at, values = at[syncs], values[syncs]
    order = np.argsort(spans.end_ns[at], kind="stable")
    highest = np.maximum.accumulate(values[order]) if len(order) else values
    place = np.searchsorted(spans.end_ns[at[order]], spans.start_ns[fates], "right") - 1
    published = np.append(highest, UNKNOWN)[place]
    return np.where(version >= 0, version, published)


def _ready_ns(spans: Spans, book: SampleBook) -> Int64s:
    """Return when the last phase of each sample ended; of one without phases, its fate."""
    found = np.where(book.fate_row >= 0, spans.end_ns[book.fate_row], np.iinfo(np.int64).max)
    last = np.full(len(book), np.iinfo(np.int64).min)
    phases = spans.kind[book.rows] != KINDS.index("mark")
    np.maximum.at(last, book.owner[phases], spans.end_ns[book.rows[phases]])
    return np.where(last > np.iinfo(np.int64).min, last, found)


def _queues(
    spans: Spans, book: SampleBook, ready: Int64s, used: Int64s, order: Int64s, first: Int64s
) -> list[int]:
    """Return how many complete samples wait when each update begins, with its first fate."""
    begins = np.minimum.reduceat(spans.start_ns[book.fate_row[used[order]]], first)
    left = np.where(book.fate_row >= 0, spans.start_ns[book.fate_row], np.iinfo(np.int64).max - 1)
    # A sample that leaves as the update begins is still in the queue.
    gone = np.sort(np.maximum(ready, left + 1))
    here = np.searchsorted(np.sort(ready), begins, "right")
    found: list[int] = (here - np.searchsorted(gone, begins, "right")).tolist()
    return found


def _numbers(
    spans: Spans, book: SampleBook, used: Int64s, version: Int64s, ready: Int64s
) -> tuple[Cell, ...]:
    """Return the cells of some samples but the first and the last."""
    behind = version - book.version[used]
    wait = np.maximum(spans.start_ns[book.fate_row[used]] - ready[used], 0)
    whole = len(np.unique(version)) == 1
    return (
        len(used),
        int(version[0]) if whole else None,
        float(behind.mean()),
        int(behind.max()),
        float((behind > 0).mean()),
        float((book.version_end[used] > book.version[used]).mean()),
        int(np.median(wait)),
        int(wait.max()),
    )


def sample_path(spans: Spans, sample: int | None = None) -> Table:
    """Return the phases of one sample in order of time, the waits between them, and its update.

    ``from`` counts from the sample's first event. Unless a sample is named, it is the one that took
    longest from its first phase to its fate, among those trained if there are some.

    Args:
        spans: The run.
        sample: Its number, the counter ``sample`` of its spans.

    Raises:
        TraceError: The run has no such sample.
    """
    book = sample_book(spans)
    if not len(book):
        return Table("sample_path", _PATH_COLUMNS, abstained=NO_SAMPLES)
    at = _slowest(spans, book) if sample is None else _place(spans, book, sample)
    if at is None:
        reason = "no sample has both a phase and a fate"
        return Table("sample_path", _PATH_COLUMNS, abstained=reason)
    rows = [*_events(spans, book, at)]
    if not rows:
        return Table("sample_path", _PATH_COLUMNS, abstained=f"sample {book.id[at]} has no phases")
    zero = int(spans.start_ns[rows].min())
    cells: list[tuple[Cell, ...]] = []
    reached = zero
    for row in rows:
        start, end = int(spans.start_ns[row]), int(spans.end_ns[row])
        if start > reached and cells:
            cells.append((_WAIT, None, None, reached - zero, start - reached, None, None))
        rank = int(spans.rank[row])
        counters = spans.counters_of(row) or {}
        name, role = spans.names[spans.name[row]], spans.headers[rank].role
        told = counters.get("tokens"), counters.get("version")
        cells.append((name, rank, role, start - zero, end - start, *told))
        reached = max(reached, end)
    return Table("sample_path", _PATH_COLUMNS, cells, _path_note(book, at, reached - zero))


def _place(spans: Spans, book: SampleBook, sample: int) -> int:
    found = np.flatnonzero(book.id == sample)
    if not len(found):
        raise TraceError(
            f"{spans.path} has no sample {sample}. List them: "
            'rlprof sql "select distinct sample from spans where sample is not null"'
        )
    return int(found[0])


def _slowest(spans: Spans, book: SampleBook) -> int | None:
    has = (np.diff(book.first) > 0) & (book.fate_row >= 0)
    trained = has & book.fates("trained")
    some = np.flatnonzero(trained if trained.any() else has)
    if not len(some):
        return None
    begin = spans.start_ns[book.rows[book.first[some]]]
    return int(some[np.argmax(spans.end_ns[book.fate_row[some]] - begin)])


def _events(spans: Spans, book: SampleBook, at: int) -> list[int]:
    """Return the rows of a sample, its fate, and the update that it was part of, by start."""
    rows = book.spans_of(at).tolist()
    fate = int(book.fate_row[at])
    if fate != UNKNOWN:
        rows.append(fate)
        update = int(updates_of(spans, book.fate_row[at : at + 1])[0])
        rows += [update] if update != UNKNOWN and update not in rows else []
    return sorted(rows, key=lambda row: (int(spans.start_ns[row]), int(spans.end_ns[row])))


def updates_of(spans: Spans, fates: Int64s) -> Int64s:
    """Return the row of the update nearest to each fate in its step and on its rank.

    `UNKNOWN` stands for none.
    """
    updates = rollouts_and_updates(spans)[1]
    both = np.append(updates, fates)
    lane = np.unique(np.stack([spans.rank[both], spans.step[both]]), axis=1, return_inverse=True)[1]
    lane = lane.ravel()
    order = np.argsort(lane[: len(updates)], kind="stable")
    updates, lanes = updates[order], lane[: len(updates)][order]
    wanted, found = lane[len(updates) :], np.full(len(fates), UNKNOWN)
    for at in rows_by_group(wanted):
        rows = updates[slice(*np.searchsorted(lanes, wanted[at[0]] + np.arange(2)))]
        if len(rows):
            time = spans.start_ns[fates[at]][:, None]
            away = np.maximum(spans.start_ns[rows] - time, 0)
            away += np.maximum(time - spans.end_ns[rows], 0)
            found[at] = rows[away.argmin(axis=1)]
    return found


def _path_note(book: SampleBook, at: int, took_ns: int) -> str:
    code = int(book.fate[at])
    fate = FATES[code] if code != NO_FATE else NO_KNOWN_FATE
    prompt = book.prompts[book.prompt[at]] if book.prompt[at] != UNKNOWN else "unknown"
    attempt = f", attempt {book.attempt[at] + 1}" if book.attempt[at] > 0 else ""
    return (
        f"Sample {book.id[at]} of prompt {prompt}{attempt}: {fate}, {took_ns / 1e9:.3g} s from its "
        "first event to the end of its update."
    )
