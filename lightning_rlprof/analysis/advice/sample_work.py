"""Quantities of samples and tokens: clipped and discarded responses, padding, balance, staleness.

Counters that no framework names are what a run counts with ``count(...)`` in a stage.
"""

import numpy as np

from lightning_rlprof.analysis.advice.evidence import Evidence
from lightning_rlprof.analysis.advice.rule import Measured, Measurement, NoData, Quantity
from lightning_rlprof.analysis.advice.time_shares import named_rows, share_by_step, stage_rows
from lightning_rlprof.analysis.findings.finding import FEWEST_STEPS, share_interval
from lightning_rlprof.analysis.samples.lengths import bin_counts, included_lengths, quantile_bin
from lightning_rlprof.analysis.samples.sample_book import UNKNOWN, USED, sample_book
from lightning_rlprof.analysis.samples.staleness import trainer_versions
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.records.histograms import bin_start
from lightning_rlprof.records.records import FIRST_TOKEN, KINDS
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.tables.arrays import Float64s, Int64s

_NO_SAMPLES = NoData(
    "No samples were recorded", "Wrap each response in sample(prompt_id), and tell its fate"
)
_LIMIT = "response_limit"
_FEWEST_SAMPLES = 20


def _told(run: Evidence) -> tuple[Int64s, Int64s] | None:
    """Return samples of the training with a fate in included steps, and the step of each.

    None if they are too few.
    """
    book = sample_book(run.spans)
    at = np.flatnonzero((book.fate_row >= 0) & ~book.fates("evaluation"))
    step = run.spans.step[book.fate_row[at]]
    keep = np.isin(step, run.included)
    return (at[keep], step[keep]) if np.count_nonzero(keep) >= _FEWEST_SAMPLES else None


def _by_step(run: Evidence, step: Int64s, values: Float64s) -> Float64s:
    place = np.searchsorted(run.included, step)
    return np.bincount(place, values, len(run.included)).astype(np.float64)


def _clipped(run: Evidence) -> Measurement:
    """Return the share of responses that reached the limit of their length.

    A response is clipped if it has as many tokens as the counted limit, or the fate ``truncated``.
    That many end together, or in one bin of a histogram, does not show it.
    """
    book, told = sample_book(run.spans), _told(run)
    if told is None:
        return _NO_SAMPLES
    at, step = told
    limits = run.spans.amounts(_LIMIT, np.int64).values
    limits = limits[limits > 0]
    truncated = book.fates("truncated")[at]
    if len(limits):
        known = book.tokens[at] >= 0
        at, step, truncated = at[known], step[known], truncated[known]
        own = run.spans.per_row(_LIMIT, 0)[book.fate_row[at]]
        # What a stage counts twice is a sum, so that the least one is the limit.
        own = np.where(own > 0, own, int(limits.min()))
        truncated = truncated | (book.tokens[at] >= own)
    elif not truncated.any():
        return NoData(
            "No response has the fate truncated, and no limit was counted",
            f"Pass {_LIMIT}=... to end() of each sample, or count it in the stage that generates",
        )
    if not len(at):
        return NoData("No response has tokens", "Call count(tokens=...) in its phase")
    ones = np.ones(len(at))
    return share_by_step(_by_step(run, step, truncated.astype(float)), _by_step(run, step, ones))


def _discarded(run: Evidence) -> Measurement:
    """Return the share of generated tokens that no update took."""
    book, told = sample_book(run.spans), _told(run)
    if told is None:
        return _NO_SAMPLES
    at, step = told
    known = book.tokens[at] >= 0
    at, step = at[known], step[known]
    if not len(at):
        return NoData("No response has tokens", "Call count(tokens=...) in its phase")
    tokens = book.tokens[at].astype(np.float64)
    lost = book.fates("stale", "aborted", "retried", "filtered")[at]
    return share_by_step(
        _by_step(run, step, np.where(lost, tokens, 0.0)), _by_step(run, step, tokens)
    )


def _staleness(run: Evidence) -> Measurement:
    """Return how many versions old the weights were that generated trained samples, in the mean."""
    book, told = sample_book(run.spans), _told(run)
    if told is None:
        return _NO_SAMPLES
    at, step = told
    used = book.fates(*USED)[at]
    at, step = at[used], step[used]
    trained = trainer_versions(run.spans, book.fate_row[at])
    known = (trained >= 0) & (book.version[at] >= 0)
    if not known.any():
        how = "Pass version=... to sample(), and trainer_version=... to end()"
        return NoData("No sample has the versions of its weights", how)
    behind = (trained - book.version[at])[known].astype(np.float64)
    step = step[known]
    return share_by_step(_by_step(run, step, behind), _by_step(run, step, np.ones(len(step))))


def _responses_per_prompt(run: Evidence) -> Measurement:
    """Return how many responses a prompt has, in the mean of the run."""
    book = sample_book(run.spans)
    prompts = book.prompt[book.prompt != UNKNOWN]
    if len(prompts) < _FEWEST_SAMPLES:
        return _NO_SAMPLES
    found = len(prompts) / len(np.unique(prompts))
    return Measured(found, found, found)


def _first_token(run: Evidence) -> Measurement:
    """Return the share of a response's time before its first token: waiting in line and prefill."""
    spans, book = run.spans, sample_book(run.spans)
    marks = spans.rows(kind="mark", name=FIRST_TOKEN)
    of = book.of_row[marks]
    marks, of = marks[of >= 0], of[of >= 0]
    generates = (categories_of(spans.names) == Category.ROLLOUT)[spans.name[book.rows]]
    rows = book.rows[generates & (spans.kind[book.rows] != KINDS.index("mark"))]
    first = np.full(len(book), np.iinfo(np.int64).max)
    last = np.zeros(len(book), np.int64)
    np.minimum.at(first, book.of_row[rows], spans.start_ns[rows])
    np.maximum.at(last, book.of_row[rows], spans.end_ns[rows])
    keep = (last[of] > first[of]) & np.isin(spans.step[marks], run.included)
    marks, of = marks[keep], of[keep]
    if len(marks) < _FEWEST_SAMPLES:
        return NoData("No first tokens were recorded", "Call first_token() of each sample")
    step = spans.step[marks]
    before = np.clip(spans.start_ns[marks] - first[of], 0, last[of] - first[of]).astype(float)
    whole = (last[of] - first[of]).astype(float)
    return share_by_step(_by_step(run, step, before), _by_step(run, step, whole))


def counted_share(text: str, part: str, whole: str, stages: str, *, rest: bool = False) -> Quantity:
    """Return one counter by another, both of spans in some stages; ``rest`` is 1 less that."""

    def measure(run: Evidence) -> Measurement:
        spans = run.spans
        rows = stage_rows(run, *stages.split())
        values = [np.zeros(len(spans)), np.zeros(len(spans))]
        both = np.ones(len(spans), dtype=bool)
        for name, own in zip((part, whole), values, strict=True):
            at, amount = spans.amounts(name)
            own[at] = amount
            both &= np.isin(np.arange(len(spans)), at)
        rows = rows[both[rows]]
        if not len(rows):
            stage = stages.split(maxsplit=1)[0]
            how = f"Call count({part}=..., {whole}=...) in {stage}"
            return NoData(f"No span of {stage} counted {part} and {whole}", how)
        own, every = (run.by_step(rows, each[rows]) for each in values)
        return share_by_step(every - own if rest else own, every)

    return Quantity(text, "share", measure)


def _imbalance(run: Evidence) -> Measurement:
    """Return the tokens of the rank with most over the mean of the ranks, in the mean of steps."""
    spans = run.spans
    book, told = sample_book(spans), _told(run)
    rank = step = tokens = np.zeros(0, np.int64)
    if told is not None:
        at = told[0][book.fates(*USED)[told[0]] & (book.tokens[told[0]] >= 0)]
        rows = book.fate_row[at]
        rank, step, tokens = spans.rank[rows], spans.step[rows], book.tokens[at]
    if len(np.unique(rank)) < 2:
        rows, counts = spans.amounts("tokens", np.int64)
        updates = np.isin(rows, stage_rows(run, "actor_update"))
        keep = updates & np.isin(spans.step[rows], run.included)
        rank, step, tokens = spans.rank[rows[keep]], spans.step[rows[keep]], counts[keep]
    ranks, place = np.unique(rank, return_inverse=True)
    if len(ranks) < 2:
        how = "Record several ranks, and call count(tokens=...) in their update"
        return NoData("Fewer than two ranks counted the tokens of an update", how)
    numbers, at_step = np.unique(step, return_inverse=True)
    sums = np.zeros((len(numbers), len(ranks)))
    np.add.at(sums, (at_step, place), tokens)
    sums = sums[(sums > 0).all(axis=1)]
    return share_by_step(sums.max(axis=1), sums.mean(axis=1))


def _lengths(run: Evidence) -> Int64s:
    """Return how many responses are in each bin of length; empty if lengths are unknown."""
    found = included_lengths(run.spans)
    names = run.spans.names
    own = [standard_stage(name) == "actor_generate" for name in names]
    keep = np.array([*own, False], dtype=bool)[run.spans.name[found.rows]]
    if not keep.any():
        keep[:] = True
    return bin_counts(found.bins[keep], found.counts[keep])


def _spread(run: Evidence) -> Measurement:
    """Return the 95th percentile of response lengths by their median, to the width of a bin."""
    counts = _lengths(run)
    if counts.sum() < _FEWEST_SAMPLES:
        return NoData("No lengths were counted", "Call count(lengths=[...]) in actor_generate")
    middle, high = (quantile_bin(counts, part) for part in (0.5, 0.95))
    bounds = (
        bin_start(high) / bin_start(middle + 1),
        bin_start(high + 1) / max(bin_start(middle), 1.0),
    )
    return Measured(bin_start(high) / max(bin_start(middle), 1.0), *bounds, "bins")


def _longest(run: Evidence) -> Measurement:
    """Return the tokens of the longest response, exactly or to the width of a bin."""
    book = sample_book(run.spans)
    if (book.tokens >= 0).any():
        most = float(book.tokens.max())
        return Measured(most, most, most)
    counts = _lengths(run)
    if not counts.sum():
        return NoData("No lengths were counted", "Call count(lengths=[...]) in actor_generate")
    last = int(np.flatnonzero(counts)[-1])
    return Measured(bin_start(last), bin_start(last), bin_start(last + 1), "bin")


def _backwards(run: Evidence) -> Measurement:
    """Return how many backward passes a step has for each optimizer step."""
    backward, step = (named_rows(run, frozenset({name})) for name in ("backward", "optimizer_step"))
    if not len(backward) or not len(step):
        how = "Train with rlprof's callback for Lightning, or mark both with annotate()"
        return NoData("No regions backward and optimizer_step were recorded", how)
    ones = (run.by_step(rows, np.ones(len(rows))) for rows in (backward, step))
    return share_by_step(*ones)


def _preemptions(run: Evidence) -> Measurement:
    """Return how many requests a step preempts, in the mean of the steps.

    ``num_preempted`` is what a span counted. ``num_preemptions_total`` is a running total of an
    engine, as in Prometheus: what a step adds is the difference to the step before it.
    """
    spans, steps = run.spans, run.included
    rows, counts = spans.amounts("num_preempted")
    keep = np.isin(spans.step[rows], steps)
    if keep.any():
        sums = run.by_step(rows[keep], counts[keep])
    else:
        rows, totals = spans.amounts("num_preemptions_total")
        if not len(rows):
            how = "Call count(num_preempted=...) in actor_generate"
            return NoData("Preemptions of the rollout engine were not counted", how)
        sums = np.zeros(len(steps))
        for rank in np.unique(spans.rank[rows]).tolist():
            own = spans.rank[rows] == rank
            number, place = np.unique(spans.step[rows[own]], return_inverse=True)
            last = np.zeros(len(number))
            np.maximum.at(last, place, totals[own])
            added = np.maximum(np.diff(last), 0)
            inside = np.isin(number[1:], steps)
            np.add.at(sums, np.searchsorted(steps, number[1:][inside]), added[inside])
    if len(sums) < FEWEST_STEPS:
        return NoData(f"{len(sums)} complete steps; {FEWEST_STEPS} are needed", "Record more steps")
    ones = np.ones(len(sums))
    return Measured(float(sums.mean()), *share_interval(sums, ones))


def _transfer_bytes(run: Evidence) -> Measurement:
    """Return the bytes of each transfer of a weight sync, in the mean of the steps."""
    spans = run.spans
    rows, moved = spans.amounts("bytes")
    syncs = (categories_of(spans.names) == Category.WEIGHT_SYNC)[spans.name]
    ids = spans.rank * (int(spans.id.max(initial=0)) + 2)
    inside = np.isin(ids[rows] + spans.parent[rows], (ids + spans.id)[syncs]) | syncs[rows]
    rows, moved = rows[inside], moved[inside]
    if not len(rows):
        how = "Call count(bytes=...) in each transfer inside of weight_sync"
        return NoData("No transfer of a weight sync counted its bytes", how)
    return share_by_step(run.by_step(rows, moved), run.by_step(rows, np.ones(len(rows))))


CLIPPED = Quantity("responses that reach the limit of their length", "share", _clipped)
CLIPPED_PROMPTS = counted_share(
    "prompts that were cut", "truncated_prompts", "samples", "actor_generate"
)
DISCARDED = Quantity("generated tokens that no update takes", "share", _discarded)
STALENESS = Quantity("staleness of trained samples in versions", "number", _staleness)
RESPONSES_PER_PROMPT = Quantity("responses per prompt", "number", _responses_per_prompt)
FIRST_TOKENS = Quantity("time before the first token, of a response's time", "share", _first_token)
PADDING = counted_share(
    "padding, of the tokens that the update computes",
    "tokens",
    "padded_tokens",
    "actor_update",
    rest=True,
)
PREFIX_HITS = counted_share(
    "prompt tokens found in the prefix cache",
    "cached_prompt_tokens",
    "prompt_tokens",
    "actor_generate",
)
IMBALANCE = Quantity("tokens of the fullest rank by the mean of ranks", "ratio", _imbalance)
LENGTH_SPREAD = Quantity("95th percentile of lengths by their median", "ratio", _spread)
LONGEST = Quantity("tokens of the longest response", "count", _longest)
BACKWARDS = Quantity("backward passes per optimizer step", "number", _backwards)
PREEMPTIONS = Quantity("preempted requests per step", "number", _preemptions)
TRANSFER_BYTES = Quantity("size of one transfer of a weight sync", "bytes", _transfer_bytes)
