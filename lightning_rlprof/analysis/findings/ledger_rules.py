"""The rules on labels of the ledger: a label that takes more of the steps than it should.

Rules of findings, a row each: which label counts from which share on, and what to try then.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.launches import LOST, Unpaired
from lightning_rlprof.analysis.findings.finding import (
    HIGH,
    MEDIUM,
    Claim,
    Undecided,
    bounds,
    place_of,
    spans_query,
)
from lightning_rlprof.analysis.ledger.accounts import Accounts
from lightning_rlprof.analysis.ledger.ledger import breakdown
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans


class Rule(NamedTuple):
    """A label that should not take more than a share of the job.

    Attributes:
        label: What the time went into.
        above: Share of the job from which on it is a finding.
        claim: What is then held.
        experiment: What to try next.
        refuted: What would show that the claim is wrong.
    """

    label: Category
    above: float
    claim: str
    experiment: str
    refuted: str


RULES = (
    Rule(
        Category.ROLLOUT,
        0.5,
        "most GPU-seconds generate responses",
        "measure one step with a longer batch per engine, a KV cache that fits, or speculative "
        "decoding; compare tokens per second with rlprof compare",
        "tokens per second of the rollout do not rise, or the rest of the step grows by as much",
    ),
    Rule(
        Category.ROLLOUT_TAIL,
        0.1,
        "GPUs wait for the last responses of a rollout",
        "cap the length, cut the tail with partial rollouts, or sample more prompts than needed",
        "the tail is as long with capped lengths: then requests start late or an engine is slow",
    ),
    Rule(
        Category.DATA_WAIT,
        0.05,
        "GPUs wait for samples",
        "prefetch the next batch, use more DataLoader workers, or start the rollout earlier",
        "the wait stays with a batch that is in memory already",
    ),
    Rule(
        Category.BACKPRESSURE,
        0.05,
        "those who generate wait for those who train",
        "allow more staleness, or move GPUs from rollout to training",
        "the buffer is not full while they wait",
    ),
    Rule(
        Category.COLLECTIVE_WAIT,
        0.05,
        "ranks wait in collectives for a late one",
        "rlprof stragglers names the late rank; balance the tokens of the ranks",
        "the wait stays when every rank gets the same batch",
    ),
    Rule(
        Category.COMMUNICATION,
        0.1,
        "collectives move data while nothing computes",
        "overlap them: larger buckets, gradients reduced in the backward pass, fewer gathers",
        "rlprof show RUN overlap tells that they overlap already, and the links are at their limit",
    ),
    Rule(
        Category.HOST_IDLE,
        0.1,
        "the device waits for the host to launch",
        "rlprof show RUN idle and launches; compile, use CUDA graphs, or raise the micro-batch",
        "the same share stays with a micro-batch of twice the size",
    ),
    Rule(
        Category.MEMCPY,
        0.05,
        "copies between host and device are exposed",
        "pin the memory, copy without blocking, and keep the data on the device between stages",
        "the copies take as long from pinned memory",
    ),
    Rule(
        Category.WEIGHT_SYNC,
        0.05,
        "moving weights to the rollout engine takes its time",
        "larger buckets, no copy through the host, or update while the engine drains",
        "the time stays as it is for a model of half the size: then it is a fixed pause",
    ),
    Rule(
        Category.REWARD,
        0.15,
        "GPUs wait for rewards, tools or environments",
        "score samples as they arrive, in parallel, and not a batch at its end",
        "the rewards take as long for one sample as for the batch",
    ),
    Rule(
        Category.OFFLOAD,
        0.05,
        "memory changes hands between training and generation",
        "keep more of it on the device, offload only the optimizer, or separate the two",
        "the phases do not fit into memory together",
    ),
    Rule(
        Category.EVALUATION,
        0.1,
        "checkpoints and validation take their time",
        "do them less often, write checkpoints asynchronously",
        "their number, not their length, is what the schedule asks for",
    ),
    Rule(
        Category.PYTHON_GC,
        0.02,
        "Python's garbage collection stops the ranks",
        "gc.freeze() after set-up, and collect at the same step on all ranks",
        "the pauses stay with gc.disable()",
    ),
    Rule(
        Category.PROFILER,
        0.02,
        "capturing itself takes its time",
        "capture fewer steps, one stage, or a lower level",
        "the share stays with integrated.profile: false",
    ),
    Rule(
        Category.UNTRACED,
        0.2,
        "nobody knows what the GPUs did for much of the time",
        "mark what is between the stages with stage(…) or wrap:, see rlprof show RUN gaps",
        "the untraced time is that of ranks that died: see the integrity sheet",
    ),
)
"""All of them; a label stands in one."""


FEWEST = 5
"""Steps below which nothing is known of how a share changes from one to the next."""

UNSURE = 0.2
"""Threshold at least, where kernels tell a label and nobody knows whether all were recorded.

Whatever a fifth of lost kernels hid is up to a fifth of the time exposed.
"""

_SHOWN = 3
_KERNELS = ("kernels", "both")  # evidence in which kernels have a part
_ALONE = "have no counterpart on other ranks"  # the book's remark on collectives
_UNMATCHED = "as collectives lack their counterparts: wait and transfer are not told apart"
_LOSSY = "as kernels were lost: see the integrity sheet"


class _Job(NamedTuple):
    """What the rules look at: the time of each label in each step, summed over ranks."""

    spans: Spans
    book: Accounts
    pairs: Unpaired | None
    numbers: list[int]
    steps: dict[Category, Float64s]
    walls: Float64s


def ledger_claims(
    spans: Spans, book: Accounts, pairs: Unpaired | None
) -> Iterator[Claim | Undecided]:
    """Yield what each rule says; nothing where no step was recorded to its end.

    Where kernels tell what is host bound, that is a matter of the rule on devices: it looks at the
    launches, and so cannot take a lost kernel for a late host.

    Args:
        spans: The run.
        book: Its time, balanced per step, ranks together.
        pairs: Its launches and kernels.
    """
    job = _job(spans, book, pairs)
    if not len(job.walls):
        return
    for rule in RULES:
        if rule.label == Category.HOST_IDLE and book.told.get(rule.label) in _KERNELS:
            continue
        found = _of_label(job, rule)
        if found is not None:
            yield found


def _job(spans: Spans, book: Accounts, pairs: Unpaired | None) -> _Job:
    by_step = breakdown(book)
    names = {label.text: label for label in Category}
    steps: list[Any] = [row for row in by_step.rows if row[0] is not None]
    columns = [column.name for column in by_step.columns]
    table = np.array([row[1:] for row in steps], dtype=np.float64).reshape(-1, len(columns) - 1)
    own = {names[name]: table[:, at] for at, name in enumerate(columns[1:]) if name in names}
    return _Job(spans, book, pairs, [row[0] for row in steps], own, table[:, 0])


def _of_label(job: _Job, rule: Rule) -> Claim | Undecided | None:
    """Return a finding, None where there is none, or why that is not decided."""
    own = job.steps.get(rule.label, np.zeros_like(job.walls))
    if rule.label not in job.book.told:
        return Undecided(rule.label.text, "as nothing tells")
    if len(job.walls) < FEWEST:
        return Undecided(rule.label.text, f"of {len(job.walls)} steps")
    above, low, high = _threshold(job, rule), *bounds(own, job.walls)
    if high < above:
        return None
    if doubt := _doubt(job, rule.label):
        return Undecided(rule.label.text, doubt)
    if low > above:
        return _claim(job, rule, own, (low, high), above)
    why = f"{low:.0%} to {high:.0%} of the steps where {above:.0%} counts"
    return Undecided(rule.label.text, why)


def _threshold(job: _Job, rule: Rule) -> float:
    by_kernels = job.book.told[rule.label] in _KERNELS
    return max(rule.above, UNSURE) if by_kernels and job.pairs is None else rule.above


def _doubt(job: _Job, label: Category) -> str:
    """Return why a label may have time that is another one's."""
    if job.book.told[label] in _KERNELS and job.pairs is not None and job.pairs.lossy:
        return _LOSSY
    return _UNMATCHED if label == Category.COMMUNICATION and _alone(job) else ""


def _alone(job: _Job) -> bool:
    """Tell whether ranks lack collectives that others have: what these waited seems a transfer."""
    spans = job.spans
    if len(job.book.ranks) + len(job.book.silent) < 2:
        return False
    rows = np.flatnonzero((categories_of(spans.names) == Category.COMMUNICATION)[spans.name])
    width = int(spans.rank.max(initial=0)) + 1
    met = (spans.step[rows] * len(spans.names) + spans.name[rows]) * width + spans.rank[rows]
    met, ranks = np.unique(np.unique(met) // width, return_counts=True)
    most = np.zeros(len(spans.names), np.int64)
    np.maximum.at(most, met % len(spans.names), ranks)
    fewer = np.count_nonzero(ranks < most[met % len(spans.names)])
    return bool(fewer > LOST * len(met)) or any(_ALONE in each for each in job.book.remarks)


def _claim(job: _Job, rule: Rule, own: Float64s, share: tuple[float, float], above: float) -> Claim:
    low, high = share
    inside = float(job.walls.sum())
    rows, evidence = _seen(job, rule.label, job.numbers[int(np.argmax(own))])
    return Claim(
        rule.claim,
        *(int(own.sum()), int(low * inside), int(high * inside)),
        HIGH if low > 2 * above or low > (1 + above) / 2 else MEDIUM,
        rule.experiment,
        rule.refuted,
        evidence,
        spans_query(job.spans, rows.tolist()),
        place_of(job.spans, rows),
        "rlprof ledger RUN --per-step",
    )


def _seen(job: _Job, label: Category, step: int) -> tuple[Int64s, str]:
    """Return the label's longest spans; without any, the step that has most of it, on each rank."""
    spans = job.spans
    rows = np.flatnonzero((categories_of(spans.names) == label)[spans.name])
    rows = rows[np.argsort(spans.start_ns[rows] - spans.end_ns[rows], kind="stable")][:_SHOWN]
    named = (f"{spans.rank[row]}/{spans.id[row]}" for row in rows.tolist())
    if len(rows):
        return rows, f"longest spans (rank/id): {', '.join(named)}"
    steps = spans.rows(kind="step")
    return steps[spans.step[steps] == step], f"{len(job.walls)} steps, most of it in step {step}"
