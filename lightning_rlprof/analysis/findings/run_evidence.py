"""Evidence from steps: categories of the ledger, MFU, slow ranks, and memory that grows."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.comparison.changes import LEVEL, OUTLIER, TREND, changes
from lightning_rlprof.analysis.device.launches import LOST
from lightning_rlprof.analysis.device.timeline import idle_causes
from lightning_rlprof.analysis.device.utilization import IDLE_CATEGORIES
from lightning_rlprof.analysis.device.work import COMMUNICATION, COPY
from lightning_rlprof.analysis.efficiency.peak_flops import recorded_device
from lightning_rlprof.analysis.findings.cpu_contention import EXPLAINED
from lightning_rlprof.analysis.findings.finding import (
    FEWEST_KERNELS,
    FEWEST_STEPS,
    HIGH,
    KERNELS_LOST,
    MEDIUM,
    Finding,
    NotChecked,
    Place,
    Results,
    Row,
    Rule,
    RunData,
    judge,
    place_at,
    place_of,
    quoted,
    rows_of,
    share_interval,
    spans_query,
)
from lightning_rlprof.analysis.findings.rules import (
    CATEGORY_RULES,
    HANG,
    LEVEL_CHANGE,
    LOW_MFU,
    MEMORY_GROWTH,
    OUT_OF_MEMORY,
    OUTLIER_STEP,
    STARVED,
    STRAGGLER,
    UNMATCHED,
)
from lightning_rlprof.analysis.findings.rules import TREND as TREND_RULE
from lightning_rlprof.analysis.hangs.stack_lines import line_in_steps
from lightning_rlprof.analysis.ledger.accounts import OUTSIDE, Accounts
from lightning_rlprof.analysis.memory.phases import leaking_phases
from lightning_rlprof.analysis.memory.usage import memory_timeline
from lightning_rlprof.analysis.statistics.growth import (
    FEWEST_TO_GROW,
    FLAT,
    LEAK,
    MAY_LEAK,
    PLATEAU,
    TOO_FEW,
)
from lightning_rlprof.analysis.steps.execution_mode import Mode, execution_mode
from lightning_rlprof.analysis.steps.step_selection import shadow_steps, states
from lightning_rlprof.analysis.steps.time_categories import (
    COLLECTIVE_NAMES,
    Category,
    categories_of,
    kind_of,
)
from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.analysis.stragglers.verdicts import (
    IMBALANCE,
    INCONCLUSIVE,
    NO_STRAGGLER,
    SLOW_UNCOUNTED,
)
from lightning_rlprof.records.background_metrics import GC_PAUSE
from lightning_rlprof.records.notes import Code, Fact
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.interval_nesting import NONE, enclosing
from lightning_rlprof.tables.spans import Spans

UNVERIFIED = 0.2
"""Lowest threshold for a share measured from kernels, if lost kernels cannot be detected.

A fifth of the kernels may be lost, and what they hid is then up to a fifth of the time.
"""

HIGHLY = 1e-5
"""p-value below which a change of step time has high confidence."""

_SHOWN = 3
_MARKED = (KINDS.index("stage"), KINDS.index("region"))


_BY_DEVICE = (
    Category.COMMUNICATION,
    Category.COLLECTIVE_WAIT,
    Category.MEMCPY,
    Category.LAUNCH_LATENCY,
    Category.UNATTRIBUTED_IDLE,
)
"""Categories whose share of the profiled time counts if kernels show them."""


def category_shares(run: RunData) -> Results:
    """Report categories whose share of the time is too large.

    What kernels show is a share of the time in which devices were profiled, steps or not; all
    else is a share of the step time, and nothing without steps. If kernels show what is host-bound,
    `device_idle` checks that instead: it looks at launches, so a lost kernel cannot be mistaken for
    a late host.
    """
    by_step = run.accounts.job_ns[:OUTSIDE].astype(np.float64)
    by_step = np.where(by_step[:, [Category.WARM_UP]] > 0, 0.0, by_step)
    by_step[np.isin(run.accounts.steps, shadow_steps(run.spans))] = 0.0  # untraced for a reason
    found: list[Finding | NotChecked | None] = []
    for category, rule in CATEGORY_RULES.items():
        source = run.accounts.sources.get(category)
        by_device = source == "kernels" or (source == "both" and _too_few(by_step))
        if category == Category.PYTHON_GC and GC_PAUSE in run.spans.counters:
            continue  # `gc_pauses` checks all of them, not only those that are spans
        if category in _BY_DEVICE and by_device:
            found.append(_device_share(run, category, rule))
        elif by_step.any() and (source is not None or category not in _IDLE):
            found.append(_category_share(run, category, rule, by_step))
    return [each for each in found if each is not None]


_IDLE = (Category.LAUNCH_LATENCY, Category.UNATTRIBUTED_IDLE)  # of no run without kernels


def _too_few(by_step: Float64s) -> bool:
    return int(np.count_nonzero(by_step.any(axis=1))) < FEWEST_STEPS


def _has_peers(spans: Spans) -> bool:
    """Return whether the job may have more than one rank: a lone external trace does not tell."""
    heads = spans.headers.values()
    return len(heads) != 1 or any(head.world_size > 1 or not head.config for head in heads)


def _device_share(run: RunData, category: Category, rule: Rule) -> Finding | NotChecked | None:
    """Check one category that kernels show, by parts of the time in which they were recorded."""
    fewest = min((len(lane.work.start_ns) for lane in run.devices.lanes), default=0)
    if fewest < FEWEST_KERNELS:
        return NotChecked(rule.name, f"needs {FEWEST_KERNELS} kernels, has {fewest}")
    ns = run.device_accounts.job_ns[:OUTSIDE].astype(np.float64)
    ns[:, Category.WARM_UP] = 0.0
    ns = ns[ns.any(axis=1)]
    own, whole = ns[:, category], ns.sum(axis=1)
    low, high = share_interval(own, whole)
    decision = _decide(run, rule, low, high)
    if not isinstance(decision, str):
        return decision
    evidence = f"{own.sum() / whole.sum():.0%} of the captured time"
    alone = run.accounts.unmatched_collectives
    if category == Category.COMMUNICATION and alone and _has_peers(run.spans):
        rule, decision = UNMATCHED, MEDIUM
        evidence += f"; {alone:,} collectives have no counterpart on other ranks"
    interval = (int(low * whole.sum()), int(high * whole.sum()))
    query, place = _longest_work(run, category)
    return Finding(rule, rule.title, int(own.sum()), *interval, decision, evidence, query, place)


def _longest_work(run: RunData, category: Category) -> tuple[str, Place | None]:
    """Return the SELECT of a category's work, and the place of the longest of it.

    Of idle time it is the longest interval, and all work: what ran before and after it.
    """
    longest: tuple[int, int, int, int] | None = None
    for lane in run.devices.lanes:
        if category in IDLE_CATEGORIES and category != Category.COLLECTIVE_WAIT:
            start, end, cause = idle_causes(lane)
            own = cause == IDLE_CATEGORIES.index(category)
        else:
            start, end = lane.work.start_ns, lane.work.end_ns
            own = lane.work.kind == (COPY if category == Category.MEMCPY else COMMUNICATION)
        if own.any():
            at = int(np.argmax(np.where(own, end - start, -1)))
            each = (int(end[at] - start[at]), lane.rank, int(start[at]), int(end[at]))
            longest = max(longest or each, each)
    place = None if longest is None else place_at(run.spans, *longest[1:])
    if category == Category.MEMCPY and run.spans.try_table("memcpy", []) is not None:
        return "select * from memcpy order by duration_ns desc", place
    if category in (Category.COMMUNICATION, Category.COLLECTIVE_WAIT):
        where = f"where regexp_matches(lower(kernel), {quoted(COLLECTIVE_NAMES)})"
        return f"select * from kernels {where} order by duration_ns desc", place
    return "select * from kernels order by rank, start_ns", place


def _decide(run: RunData, rule: Rule, low: float, high: float) -> str | NotChecked | None:
    """Judge a share that kernels show: lost ones must not look like a problem."""
    threshold = max(rule.threshold, UNVERIFIED) if run.launches is None else rule.threshold
    decision = judge(rule, low, high, threshold)
    if decision is not None and run.launches is not None and run.launches.lossy:
        return NotChecked(rule.name, KERNELS_LOST)
    return decision


def _category_share(
    run: RunData, category: Category, rule: Rule, ns: Float64s
) -> Finding | NotChecked | None:
    """Check one category; ``ns`` has the shape (steps, categories)."""
    spans, source = run.spans, run.accounts.sources.get(category)
    if source is None:
        return NotChecked(rule.name, "no data")
    from_kernels = source != "spans"
    if from_kernels and category == Category.HOST_IDLE:
        return None
    steps = np.flatnonzero(ns.any(axis=1))
    if len(steps) < FEWEST_STEPS:
        return NotChecked(rule.name, f"needs {FEWEST_STEPS} steps, has {len(steps)}")
    own, wall = ns[steps, category], ns[steps].sum(axis=1)
    low, high = share_interval(own, wall)
    decision = _decide(run, rule, low, high) if from_kernels else judge(rule, low, high)
    if decision is None:
        return None
    if category == Category.COMMUNICATION and _unmatched(spans, run.accounts):
        return NotChecked(rule.name, "too few collectives are matched across ranks")
    if isinstance(decision, NotChecked):
        return decision
    waits = run.cpu_waits if category == Category.COLLECTIVE_WAIT else None
    if waits is not None and waits.explain_ranks(float(own.sum())):
        return NotChecked(rule.name, EXPLAINED)
    rows = np.flatnonzero((categories_of(spans.names) == category)[spans.name])
    if category == Category.DATA_WAIT and _waits_for_samples(spans, rows):
        rule = STARVED
    rows = rows[np.argsort(-spans.duration_ns[rows], kind="stable")][:_SHOWN]
    evidence = f"longest spans (rank/id): {_named(spans, rows)}"
    if not len(rows):
        rows = spans.rows(kind="step")
        number = np.unique(spans.step[rows])[steps[np.argmax(own)]]
        rows = rows[spans.step[rows] == number]
        evidence = f"{len(steps)} steps, most of it in step {number}"
    whole = float(wall.sum())
    return Finding(
        rule,
        rule.title,
        int(own.sum()),
        int(low * whole),
        int(high * whole),
        decision,
        evidence,
        spans_query(spans, rows.tolist()),
        place_of(spans, rows),
    )


def _waits_for_samples(spans: Spans, waits: Int64s) -> bool:
    """Return whether other ranks generate what is waited for, rather than a DataLoader loads it."""
    if execution_mode(spans) not in (Mode.SEPARATED, Mode.ASYNCHRONOUS) or not len(waits):
        return False
    times = np.bincount(spans.name[waits], spans.duration_ns[waits], len(spans.names))
    return spans.names[int(np.argmax(times))] != "data_fetch"


def _named(spans: Spans, rows: Int64s) -> str:
    """Return spans as rank and id."""
    return ", ".join(f"{spans.rank[row]}/{spans.id[row]}" for row in rows.tolist())


def _unmatched(spans: Spans, accounts: Accounts) -> bool:
    """Return whether ranks lack collectives that others have: then waiting looks like transfer."""
    if len(accounts.ranks) + len(accounts.silent) < 2:
        return False
    rows = np.flatnonzero((categories_of(spans.names) == Category.COMMUNICATION)[spans.name])
    width = int(spans.rank.max(initial=0)) + 1
    calls = (spans.step[rows] * len(spans.names) + spans.name[rows]) * width + spans.rank[rows]
    calls, ranks = np.unique(np.unique(calls) // width, return_counts=True)
    most = np.zeros(len(spans.names), np.int64)
    np.maximum.at(most, calls % len(spans.names), ranks)
    fewer = np.count_nonzero(ranks < most[calls % len(spans.names)])
    return bool(fewer > LOST * len(calls)) or accounts.unmatched_collectives > 0


class TrainingMfu(NamedTuple):
    """FLOPs of training spans, and by step what they used and could have used.

    Attributes:
        rows: The spans.
        rate: MFU of each span.
        took_ns: Length of each span.
        used: FLOPs of each step, in thousands, as `possible`.
        possible: What the devices could have done in the time of the spans.
    """

    rows: Int64s
    rate: Float64s
    took_ns: Float64s
    used: Float64s
    possible: Float64s

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of the MFU, by a bootstrap over steps."""
        return share_interval(self.used, self.possible)


def training_mfu(run: RunData) -> TrainingMfu | NotChecked | None:
    """Return the MFU of training by counted FLOPs; None if FLOPs or the device's peak are unknown.

    Only spans that counted ``flops``, in complete steps and training stages: decoding is limited by
    memory, so its MFU is always low. An MFU above 100% means wrong inputs, so it is not checked.
    """
    spans = run.spans
    rows, flops = _training_flops(spans)
    devices = {rank: recorded_device(head) for rank, head in spans.headers.items()}
    peaks = {rank: device.tflops if device else 0.0 for rank, device in devices.items()}
    peak = np.array([peaks.get(rank, 0.0) for rank in spans.rank[rows].tolist()])  # TFLOP/s
    rows, flops, peak = rows[peak > 0], flops[peak > 0], peak[peak > 0]
    if not len(rows):
        return None
    steps, place = np.unique(spans.step[rows], return_inverse=True)
    if len(steps) < FEWEST_STEPS:
        why = f"needs {FEWEST_STEPS} steps with counted FLOPs, has {len(steps)}"
        return NotChecked(LOW_MFU.name, why)
    took = spans.duration_ns[rows].astype(np.float64)
    used, possible = flops / 1_000, took * peak  # in thousand FLOPs
    if (used > possible).any():
        return NotChecked(LOW_MFU.name, "some of it is above 100%, see data_quality")
    by_step = [np.bincount(place, each).astype(np.float64) for each in (used, possible)]
    return TrainingMfu(rows, used / possible, took, *by_step)


def low_mfu(run: RunData) -> Results:
    """Report a low MFU of training; nothing if FLOPs or the device's peak are unknown.

    The cost is what reaching the threshold would save.
    """
    found = training_mfu(run)
    if found is None:
        return []
    if isinstance(found, NotChecked):
        return [found]
    low, high = found.interval
    decision = judge(LOW_MFU, low, high)
    if decision is None:
        return []
    if isinstance(decision, NotChecked):
        return [decision]
    spans, rows = run.spans, found.rows[np.argsort(found.rate)]
    mfu, whole = float(found.used.sum() / found.possible.sum()), float(found.took_ns.sum())
    cost, least, most = (int(whole * (1 - each / LOW_MFU.threshold)) for each in (mfu, high, low))
    stages = ", ".join(sorted({spans.names[code] for code in spans.name[rows].tolist()}))
    finding = Finding(
        LOW_MFU,
        LOW_MFU.title.format(mfu=mfu, stages=stages),
        *(cost, least, most),
        decision,
        f"MFU {100 * low:.1f}–{high:.1%} by counted FLOPs; lowest spans (rank/id): "
        f"{_named(spans, rows[:_SHOWN])}; the cost is what {LOW_MFU.threshold:.0%} would save",
        spans_query(spans, rows[:_SHOWN].tolist()),
        place_of(spans, rows),
    )
    return [finding]


def _training_flops(spans: Spans) -> tuple[Int64s, Float64s]:
    """Return the training spans of complete steps that counted FLOPs, and how many."""
    rows, flops = spans.amounts("flops")
    trains = np.array([kind_of(name) == "training" for name in spans.names], dtype=bool)
    keep = trains[spans.name[rows]] & (flops > 0) & (spans.duration_ns[rows] > 0)
    keep &= spans.kind[rows] == KINDS.index("stage")  # in validations they are regions
    steps = spans.rows(kind="step")
    complete = np.unique(spans.step[steps[states(spans, steps) == 0]])
    keep &= np.isin(spans.step[rows], complete)
    rows, flops = rows[keep], flops[keep]
    thread, start, end = spans.thread[rows], spans.start_ns[rows], spans.end_ns[rows]
    order = np.lexsort((spans.id[rows], -end, start, thread))
    # Of spans inside one another, the outer one has counted the FLOPs of both.
    outer = order[enclosing(thread[order], start[order], end[order]) == NONE]
    return rows[outer], flops[outer]


def slow_ranks(run: RunData) -> Results:
    """Report each rank, or group that contains one, that the analysis of stragglers names."""
    harmless = (INCONCLUSIVE, NO_STRAGGLER, IMBALANCE)
    rows = rows_of(stragglers(run.spans)) if len(run.spans.rows(kind="step")) else []
    return [
        straggler_finding(run.spans, row)
        for row in rows
        if row["verdict"] not in harmless
        and _most_lost(run.spans, row) >= STRAGGLER.threshold * run.accounts.total_ns
    ]


def _most_lost(spans: Spans, row: Row) -> float:
    """Return what peers lost, or at most lost if nothing shows where they wait."""
    lost, slowdown = row["peer time lost"], row["slowdown"]
    if lost is not None:
        return float(lost)
    if slowdown is None or row["rank"] is None:
        return float("inf")
    first, last = map(int, row["steps"].split("-"))
    rows, _ = _stages_of(spans, [row["rank"]], first, last, row["stages"])
    excess: float = float(spans.duration_ns[rows].sum()) * slowdown / (1 + slowdown)
    role = spans.headers[row["rank"]].role
    peers = sum(header.role == role for header in spans.headers.values()) - 1
    return excess * peers


def straggler_finding(spans: Spans, row: Row) -> Finding:
    """Return the finding on one row of `stragglers`; its keys are the columns."""
    lost, is_rank = row["peer time lost"], row["rank"] is not None
    ranks, who = [row["rank"]], f"Rank {row['rank']}"
    if not is_rank:
        listed = row["group"].rpartition("ranks ")[2]
        ranks, who = [int(rank) for rank in listed.split(", ")], f"One of ranks {listed}"
    first, last = map(int, row["steps"].split("-"))
    rows, condition = _stages_of(spans, ranks, first, last, row["stages"])
    chance = "" if row["p-value"] is None else f", p-value {row['p-value']:.2g}"
    stage = row["stages"] if row["stages"] in spans.names else ""
    where = f" in {stage}" if stage and stage not in row["verdict"] else ""
    low, high = (
        int(lost * row[bound] / row["slowdown"])
        if lost is not None and row["slowdown"] and row[bound] is not None
        else None
        for bound in ("CI low", "CI high")
    )
    return Finding(
        STRAGGLER,
        STRAGGLER.title.format(who=who, where=where, verdict=row["verdict"]),
        lost,
        low,
        high,
        HIGH if is_rank and row["verdict"] != SLOW_UNCOUNTED else MEDIUM,
        f"steps {row['steps']}, stages {row['stages']}{chance}",
        f"select * from spans where {condition} order by rank, start_ns",
        place_of(spans, rows),
    )


def _stages_of(
    spans: Spans, ranks: list[int], first: int, last: int, stages: str
) -> tuple[Int64s, str]:
    """Return the stages that a verdict is about, all if it names none, and their SQL condition.

    A verdict may name phases of the training loop, which are regions inside stages.
    """
    named = [spans.names.index(name) for name in stages.split(", ") if name in spans.names]
    condition = f"rank in ({', '.join(map(str, ranks))}) and step between {first} and {last}"
    if named:
        rows = np.flatnonzero(np.isin(spans.name, named) & np.isin(spans.kind, _MARKED))
        texts = ", ".join(quoted(spans.names[code]) for code in named)
        condition += f" and kind in ('stage', 'region') and name in ({texts})"
    else:
        rows = spans.rows(kind="stage")
        condition += " and kind = 'stage'"
    step = spans.step[rows]
    return rows[np.isin(spans.rank[rows], ranks) & (step >= first) & (step <= last)], condition


def step_changes(run: RunData) -> Results:
    """Report steps at which the time grew, a trend, and outlier steps, if they cost enough."""
    spans = run.spans
    if not len(spans.rows(kind="step")):
        return []
    table = changes(spans)
    if table.abstained is not None:
        return [NotChecked(LEVEL_CHANGE.name, table.abstained.rstrip("."))]
    rows = [row for row in rows_of(table) if row["cost"] > 0]
    found: Results = []
    for row in rows:
        rule, cpu = _CHANGE_RULES[row["change"]], run.cpu_waits
        if row["cost"] < rule.threshold * run.accounts.total_ns:
            continue
        if cpu is not None and cpu.explain_change(row["change"], row["step"], row["delta"]):
            found.append(NotChecked(rule.name, EXPLAINED))
        else:
            found.append(_change_finding(spans, row))
    return found


_CHANGE_RULES = {LEVEL: LEVEL_CHANGE, TREND: TREND_RULE, OUTLIER: OUTLIER_STEP}


def _change_finding(spans: Spans, row: Row) -> Finding:
    rule, step, ratio = _CHANGE_RULES[row["change"]], row["step"], row["ratio"]
    # Of the time since the change, 1 - 1 / ratio is more than before.
    low, high = (
        None if bound is None else int(row["cost"] * (1 - 1 / bound) / (1 - 1 / ratio))
        for bound in (row["CI low"], row["CI high"])
    )
    rows = spans.rows(kind="step")
    rows = rows[spans.step[rows] >= step]
    some = f"step = {step}" if row["change"] == OUTLIER else f"step >= {step}"
    steps = "1 step" if row["steps"] == 1 else f"{row['steps']} steps"
    chance = "" if row["p-value"] is None else f", p-value {row['p-value']:.2g}"
    line = line_in_steps(spans, step, step + row["steps"] - 1)
    at = f"; stacks: {line}" if line is not None else ""
    return Finding(
        rule,
        rule.title.format(ratio=ratio, step=step, stage=row["stage"] or "no stage"),
        row["cost"],
        low,
        high,
        HIGH if row["p-value"] is None or row["p-value"] < HIGHLY else MEDIUM,
        f"{row['delta'] / 1e6:.3g} ms more in {steps}{chance}{at}",
        f"select * from spans where kind = 'step' and {some} order by rank, step",
        place_of(spans, rows[spans.step[rows] == step]),
    )


_OUT_OF_MEMORY = "OutOfMemoryError"  # in the status of a rank: torch's class, of any device


def out_of_memory(run: RunData) -> Results:
    """Report the ranks that torch's OutOfMemoryError ended, and the stage that began last."""
    spans = run.spans
    ranks = [rank for rank, status in spans.statuses.items() if _OUT_OF_MEMORY in (status or "")]
    found: Results = []
    for rank in ranks:
        steps = spans.rows(kind="step", rank=rank)
        if len(steps):
            found.append(_out_of_memory_finding(spans, rank, int(spans.step[steps].max())))
    return found


def _out_of_memory_finding(spans: Spans, rank: int, step: int) -> Finding:
    rows = spans.rows(kind="stage", rank=rank)
    rows = rows[spans.step[rows] == step]
    last = rows[np.argsort(spans.start_ns[rows], kind="stable")][-1:]
    stage = spans.names[int(spans.name[last[0]])] if len(last) else "no stage"
    known = [_last_memory(spans, rank, *each) for each in _COUNTERS.items()]
    return Finding(
        OUT_OF_MEMORY,
        OUT_OF_MEMORY.title.format(rank=rank, step=step, stage=stage),
        *(None, None, None),
        HIGH,
        "; ".join(["it raised OutOfMemoryError", *filter(None, known)]),
        f"select * from spans where rank = {rank} and step = {step} order by start_ns",
        place_of(spans, last if len(last) else spans.rows(kind="step", rank=rank)[-1:]),
    )


def _last_memory(spans: Spans, rank: int, component: str, counter: str) -> str:
    """Return the memory at the end of the last stage that has it, for people."""
    rows, values = spans.amounts(counter, np.int64)
    own = np.flatnonzero((spans.rank[rows] == rank) & (spans.kind[rows] == KINDS.index("stage")))
    if not len(own):
        return ""
    last = own[np.argmax(spans.end_ns[rows[own]])]
    stage = spans.names[int(spans.name[rows[last]])]
    return f"{component} memory {values[last] / _MIB:,.0f} MiB after {stage}"


_MOST_HUNG = 4  # ranks that are named


def hangs(run: RunData) -> Results:
    """Report a hang that did not end, from the notes of the ranks' watchdogs."""
    hung: dict[int, Mapping[str, Fact]] = {}
    for note in run.spans.notes:
        if note.rank is None:
            continue
        if note.code == Code.NO_PROGRESS:
            hung[note.rank] = note.facts
        elif note.code == Code.PROGRESS_AGAIN:
            hung.pop(note.rank, None)
    spans = run.spans
    hung = {rank: hung[rank] for rank in sorted(hung) if spans.statuses.get(rank) != "finished"}
    if not hung:
        return []
    step = max(int(facts["step"]) for facts in hung.values())
    parts = [
        f"rank {rank} made no progress for {facts['quiet_s']:.0f} s"
        + (f" in {facts['span']}" if "span" in facts else "")
        for rank, facts in [*hung.items()][:_MOST_HUNG]
    ]
    if (more := len(hung) - len(parts)) > 0:
        parts.append(f"and {more} more ranks")
    query = f"select * from spans where step >= {step - 1} order by rank, start_ns"
    place = place_of(spans, spans.rows(kind="step")[-1:])
    title = HANG.title.format(step=step)
    return [Finding(HANG, title, *(None, None, None), HIGH, "; ".join(parts), query, place)]


_MIB = 2**20
_TOO_NOISY = "steps differ too much"
# Counted by spans.
_COUNTERS = {
    "torch": "device_allocated_bytes",
    "host": "host_rss_bytes",
    "child processes": "children_rss_bytes",
}


def memory_growth(run: RunData) -> Results:
    """Report memory that leaks, the worst rank of each component; nothing without memory data.

    `grows` is the judge, as in memory_timeline and memory_phases. The finding has no cost in time:
    either the run goes out of memory, or nothing happens.
    """
    rows = [row for row in rows_of(memory_timeline(run.spans)) if row["stage"] == "all"]
    leaks = [row for row in rows if row["verdict"] == LEAK and _is_large(row, "growth per step")]
    if rows and all(row["verdict"] == TOO_FEW for row in rows):
        has = max(row["steps"] for row in rows)
        why = f"needs {FEWEST_TO_GROW} steps with memory data, has {has}"
        return [NotChecked(MEMORY_GROWTH.name, why)]
    if not leaks:
        unclear = [row["verdict"] for row in rows if _is_large(row, "CI high")]
        reasons = {PLATEAU: "it nearly stopped", **dict.fromkeys((FLAT, MAY_LEAK), _TOO_NOISY)}
        found = [reasons[each] for each in unclear if each in reasons]
        return [NotChecked(MEMORY_GROWTH.name, why) for why in found[:1]]
    components: dict[str | None, list[Row]] = {}
    for row in leaks:
        components.setdefault(row["component"], []).append(row)
    return [
        _memory_finding(run.spans, max(each, key=lambda row: row["growth per step"]), len(each))
        for each in components.values()
    ]


def _is_large(row: Row, rate: str) -> bool:
    peak = max(row["peak"] or 0, row["reserved"] or 0)
    return bool((row[rate] or 0.0) * row["steps"] >= MEMORY_GROWTH.threshold * peak > 0)


def _memory_finding(spans: Spans, row: Row, ranks: int) -> Finding:
    rank, component, count = row["rank"], row["component"], row["steps"]
    slope, low, high = row["growth per step"], row["CI low"], row["CI high"]
    where = f"rank {rank}" + (f" and {ranks - 1} more" if ranks > 1 else "")
    phases = leaking_phases(spans, rank, component)
    named = f", added by {', '.join(phases)}" if phases else ""
    rows = spans.rows(kind="step", rank=rank)
    return Finding(
        MEMORY_GROWTH,
        MEMORY_GROWTH.title.format(what=f"{component} on {where}"),
        *(None, None, None),
        HIGH if low > slope / 2 else MEDIUM,
        f"{slope / _MIB:.3g} MiB per step (99% CI {low / _MIB:.3g}–{high / _MIB:.3g}) "
        f"over {count} steps{named}",
        _memory_query(spans, rank, component, rows),
        place_of(spans, rows[-1:]),
    )


def _memory_query(spans: Spans, rank: int, component: str | None, steps: Int64s) -> str:
    """Return the SELECT of the samples, from the counters of spans or from the table."""
    counter = _COUNTERS.get(component or "")
    if counter is not None and counter in spans.counters:
        first, last = spans.step[steps[[0, -1]]]
        return (
            f"select step, kind, name, start_ns, {counter} from spans where rank = {rank} "
            f"and kind in ('stage', 'step') and step between {first} and {last} "
            f"and {counter} is not null order by start_ns"
        )
    of = "is null" if component is None else f"= {quoted(component)}"
    return (
        f"select * from memory where rank = {rank} and component {of} and time_ns "
        f"between {spans.start_ns[steps[0]]} and {spans.end_ns[steps[-1]]} order by time_ns"
    )
