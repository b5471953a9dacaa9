"""Quantities of steps: shares of their time, slow ranks, changes over the run, and hangs."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.communication.weight_sync import weight_sync
from lightning_rlprof.analysis.comparison.changes import (
    LEVEL,
    OUTLIER,
    TREND,
    changes,
    may_be_longer_responses,
)
from lightning_rlprof.analysis.diagnosis.evidence import (
    HIGH,
    MEDIUM,
    Evidence,
    Fact,
    Measured,
    Measurement,
    NoData,
    Quantity,
    exact,
    exact_share,
    place_of,
    quoted,
    spans_query,
)
from lightning_rlprof.analysis.hangs import line_in_steps
from lightning_rlprof.analysis.steps.execution_mode import Mode, execution_mode
from lightning_rlprof.analysis.steps.time_categories import NAMES, Category, categories_of
from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.analysis.stragglers.verdicts import (
    IMBALANCE,
    INCONCLUSIVE,
    NO_STRAGGLER,
    SLOW_UNCOUNTED,
)
from lightning_rlprof.records.hang_reports import STACK
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import GC_COUNT, GC_PAUSE, KINDS
from lightning_rlprof.records.stage_aliases import LOGS, plain_names, standard_stage
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.intervals import NONE, innermost, nested_order, parents
from lightning_rlprof.tables.spans import Spans, rows_named
from lightning_rlprof.tables.table import rows_of

CPU_WAIT = "cpu_wait_ns"
"""Counter of steps: time in which the training thread was ready, and every CPU was taken."""

CPU_WAITS = 0.05
"""Share of the step time from which on training threads wait for a CPU."""

_WORK = (KINDS.index("stage"), KINDS.index("region"))
_MARK = "Mark it with stage('{0}') or annotate('{0}')"
_CPU_MEANWHILE = "Training threads waited for a CPU meanwhile"
_CRITIC = ("critic_update", "critic_compute_values")
_MAX_SPANS_SHOWN = 3
_MAX_SURE_P_VALUE = 1e-5  # A change of the step time below it has high confidence.

# ---- what counters of steps say was lost
_SHOWN_BY_DEVICES = (Category.HOST_IDLE, Category.COMMUNICATION, Category.MEMCPY)

_DATA_NAMES = frozenset(NAMES[Category.DATA_WAIT].split())
_LOADS = frozenset(
    ("data_fetch", "data_loading", "dataloader_next", "enumerate_dataloader", "load_data")
)
_STEPS = re.compile(r"(?:[\w.<>]*\.)?(?:step|generate|rollout|forward|act|play|play_step)\s")

_MAX_HUNG_RANKS = 4


class Lost(NamedTuple):
    """Time in complete steps that a counter says was lost.

    Attributes:
        steps: Their numbers, ascending.
        ns: The time; shape (steps, ranks).
        wall_ns: Length of the steps; the same shape.
        ranks: The ranks, ascending.
    """

    steps: Int64s
    ns: Int64s
    wall_ns: Int64s
    ranks: Int64s

    def explains_change(self, change: str, step: int, delta_ns: float) -> bool:
        """Return whether half of the longer time of a step, or of all since, is in it.

        A step takes as long as its slowest rank.
        """
        slowest = self.ns.max(axis=1)
        since = self.steps == step if change == OUTLIER else self.steps >= step
        if since.all() or not since.any():
            return False
        return bool(2 * (slowest[since].mean() - slowest[~since].mean()) >= delta_ns)

    def explains_ranks(self, cost_ns: float) -> bool:
        """Return whether half of the waiting for other ranks is because these had no CPU."""
        late = self.ns.max(axis=1, keepdims=True) - self.ns
        return bool(2 * late.sum() >= cost_ns)


def lost_in_steps(run: Evidence, counter: str) -> Lost | None:
    """Return the time that a counter of steps says was lost; None if no step has it.

    A step that has it tells of those of its rank since the last one that had it, too: each gets a
    part by its length. Steps after the last one that has it are left out.
    """
    spans = run.spans
    counted, told_ns = spans.amounts(counter, np.int64)
    if not len(counted):
        return None
    rows = spans.rows(kind="step")
    rows = rows[np.lexsort((spans.end_ns[rows], spans.rank[rows]))]
    tells = np.flatnonzero(np.isin(rows, counted))
    telling = rows[tells]
    teller = np.searchsorted(tells, np.arange(len(rows)))  # Which of these tells of each row.
    rows, teller = rows[teller < len(tells)], teller[teller < len(tells)]
    same = spans.rank[rows] == spans.rank[telling[teller]]
    rows, teller = rows[same], teller[same]
    wall_ns = spans.took_ns(rows)
    whole_ns = np.bincount(teller, wall_ns, len(tells))
    lost_ns = np.minimum(told_ns[np.searchsorted(counted, telling)], whole_ns)
    share = lost_ns / np.maximum(whole_ns, 1)
    steps = np.isin(spans.step[rows], run.included)
    rows, teller, wall_ns = rows[steps], teller[steps], wall_ns[steps]
    if not len(rows):
        return None
    numbers, step = np.unique(spans.step[rows], return_inverse=True)
    ranks, rank = np.unique(spans.rank[rows], return_inverse=True)
    lost, wall = np.zeros((2, len(numbers), len(ranks)), np.int64)
    np.add.at(lost, (step, rank), np.rint(wall_ns * share[teller]).astype(np.int64))
    np.add.at(wall, (step, rank), wall_ns)
    return Lost(numbers, lost, wall, ranks)


def counted_share(text: str, counter: str, how: str, more: str = "") -> Quantity:
    """Return a counter of nanoseconds of steps by the step time."""

    def measure(run: Evidence) -> Measurement:
        lost = lost_in_steps(run, counter)
        if lost is None:
            raise NoData(f"No step has the counter {counter}", how)
        own, whole = (ns.sum(axis=1).astype(np.float64) for ns in (lost.ns, lost.wall_ns))
        longest = int(lost.steps[np.argmax(own)])
        rows = run.spans.rows(kind="step")
        columns = ", ".join(filter(None, ("rank, step, duration_ns", counter, more)))
        return replace(
            exact_share(own, whole),
            facts=(Fact("most in step", longest),),
            query=f"select {columns} from spans where kind = 'step' and {counter} is not null "
            f"order by {counter} desc",
            place=place_of(run.spans, rows[run.spans.step[rows] == longest]),
        )

    return Quantity(text, "share", measure)


# ---- shares of the step time


def category_share(
    category: Category, how: str = "", unless: Callable[[Evidence], None] = lambda run: None
) -> Quantity:
    """Return the share of the step time that the ledger gives to a category of spans.

    Args:
        category: One that spans show; what kernels show is a quantity of devices.
        how: How to record it, if not by marking it.
        unless: Raises `NoData` if something else explains the share.
    """

    def measure(run: Evidence) -> Measurement:
        source = run.accounts.sources.get(category)
        if source is None:
            name = NAMES.get(category, "").split(maxsplit=1)[:1] or ["my_stage"]
            raise NoData(f"No {category.text} was recorded", how or _MARK.format(*name))
        if source != "spans" and category in _SHOWN_BY_DEVICES:
            raise NoData("Kernels show it instead")
        ns = run.category_ns
        steps = np.flatnonzero(ns.any(axis=1))
        own = ns[steps, category]
        found = exact_share(own, ns[steps].sum(axis=1))
        unless(run)
        return _with_spans(run, category, found, steps, own)

    return Quantity(f"{category.text}, of the step time", "share", measure)


def _with_spans(
    run: Evidence, category: Category, found: Measured, steps: Int64s, own: Float64s
) -> Measured:
    """Return a share with its longest spans, or the step with most of it."""
    spans = run.spans
    rows = np.flatnonzero((categories_of(spans.names) == category)[spans.name])
    rows = _longest(spans, rows)
    if not len(rows):
        rows = spans.rows(kind="step")
        number = np.unique(spans.step[rows])[steps[np.argmax(own)]]
        rows = rows[spans.step[rows] == number]
    facts = (Fact("of the step time", found.value, "share"),)
    query = spans_query(spans, rows.tolist())
    return replace(found, facts=facts, query=query, place=place_of(spans, rows))


def _longest(spans: Spans, rows: Int64s) -> Int64s:
    """Return the longest of some spans; of equal ones those that come first."""
    took = spans.took_ns(rows)
    if len(rows) > _MAX_SPANS_SHOWN:
        some = took >= np.partition(took, -_MAX_SPANS_SHOWN)[-_MAX_SPANS_SHOWN]
        rows, took = rows[some], took[some]
    return rows[np.argsort(-took, kind="stable")][:_MAX_SPANS_SHOWN]


def _explained_by_cpu(run: Evidence) -> None:
    lost = lost_in_steps(run, CPU_WAIT)
    cost = float(run.category_ns[:, Category.COLLECTIVE_WAIT].sum())
    if lost is not None and lost.explains_ranks(cost):
        raise NoData(_CPU_MEANWHILE)


def stage_rows(run: Evidence, *stages: str) -> Int64s:
    """Return the spans of stages by their standard names, of training threads, outermost only."""
    return _outermost(run.spans, lambda name: standard_stage(name) in stages)


def _named(spans: Spans, match: Callable[[str], bool]) -> Mask:
    """Mark the spans whose names match."""
    return _matching(spans, match)[spans.name]


def _matching(spans: Spans, match: Callable[[str], bool]) -> Mask:
    """Mark the names that match, and at the end none for the code -1."""
    return np.array([*map(match, spans.names), False], dtype=bool)


def _outermost(spans: Spans, match: Callable[[str], bool]) -> Int64s:
    """Return the stages and regions of threads with steps that match, unless in another one."""
    trains = np.unique(spans.thread[spans.rows(kind="step")])
    rows = rows_named(spans, _matching(spans, match), _WORK)
    rows = rows[np.isin(spans.thread[rows], trains)]
    thread, start, end = spans.thread[rows], spans.start_ns[rows], spans.end_ns[rows]
    order = nested_order(thread, start, end)
    around = parents(thread[order], start[order], end[order])
    return np.sort(rows[order[around == NONE]])


def _critic(run: Evidence) -> Measurement:
    """Return the share of the step time in stages of a critic, without the stages inside them."""
    critic = _named(run.spans, lambda name: standard_stage(name) in _CRITIC)
    rows = np.flatnonzero(critic & (run.spans.kind == KINDS.index("stage")))
    if not len(rows):
        raise NoData(f"No stage {_CRITIC[0]} was recorded", _MARK.format(_CRITIC[0]))
    own = run.by_step(rows, run.exclusive_ns[rows].astype(np.float64))
    return exact_share(own, run.wall_ns)


def _named_share(text: str, names: str) -> Quantity:
    """Return the share of the step time in spans with some names."""
    first, *_ = wanted = names.split()

    def measure(run: Evidence) -> Measurement:
        rows = _outermost(run.spans, lambda name: not set(wanted).isdisjoint(plain_names(name)))
        if not len(rows):
            raise NoData(f"No {text} was recorded", f"Mark it with annotate('{first}')")
        found = exact_share(run.by_step(rows, None), run.wall_ns)
        longest = _longest(run.spans, rows)
        query = spans_query(run.spans, longest.tolist())
        facts = (Fact("of the step time", found.value, "share"),)
        return replace(found, facts=facts, query=query, place=place_of(run.spans, longest))

    return Quantity(f"{text}, of the step time", "share", measure)


def _profiler(run: Evidence) -> Measurement:
    """Return the time of opening and closing captures: none in a run of rlprof without any."""
    ours = any(head.config for head in run.spans.headers.values())
    if Category.PROFILER not in run.accounts.sources and ours:
        return exact(0.0)
    return _CAPTURES.measure(run)


def _garbage(run: Evidence) -> Measurement:
    is_counted = not isinstance(run.measure(_GC_COUNTED), NoData)
    is_marked = Category.PYTHON_GC in run.accounts.sources
    return (_GC_COUNTED if is_counted or not is_marked else _GC_MARKED).measure(run)


# ---- what is inside of a share


def _waits(spans: Spans) -> Int64s:
    """Return the stages and regions that wait for data."""
    waits = _matching(spans, lambda name: not _DATA_NAMES.isdisjoint(plain_names(name)))
    return rows_named(spans, waits, _WORK)


def _is_rollout(spans: Spans) -> Mask:
    """Mark the names of rollouts, rewards and environments."""
    return np.isin(categories_of(spans.names), (Category.ROLLOUT, Category.REWARD))


def _samples_from_others(run: Evidence) -> Measurement:
    """Return whether other ranks generate what is waited for, rather than a loader loads it."""
    if execution_mode(run.spans) not in (Mode.SEPARATED, Mode.ASYNCHRONOUS):
        return exact(0.0)
    spans, waits = run.spans, _waits(run.spans)
    if not len(waits):
        return exact(0.0)
    longest = np.argmax(np.bincount(spans.name[waits], spans.took_ns(waits)))
    return exact(float(spans.names[longest] not in _LOADS))


def _asynchronous(run: Evidence) -> Measurement:
    return exact(float(execution_mode(run.spans) is Mode.ASYNCHRONOUS))


def _rollout_in_loader(run: Evidence) -> Measurement:
    """Return the share of the loader's time in which its thread steps a module or an environment.

    Spans of a rollout or an environment inside of the wait show it, and samples of its stack.
    """
    spans = run.spans
    waits = _waits(spans)
    rollouts = rows_named(spans, _is_rollout(spans), _WORK)
    whole = float(spans.took_ns(waits).sum())
    if not whole:
        return exact(0.0)
    own = rollouts[_inside(spans, waits, rollouts) >= 0]
    part = float(spans.took_ns(own).sum()) / whole
    stacks, steps_in_stack = _stacks_inside(spans, waits)
    share = max(part, steps_in_stack / max(stacks, 1))
    inside = Counter(spans.names[code] for code in spans.name[own].tolist())
    facts = tuple(Fact("inside", name, "text") for name, _ in inside.most_common(1))
    return exact(min(share, 1.0), facts=facts)


def _only_loads(run: Evidence) -> Measurement:
    """Return whether the loader runs no rollout, as one is marked elsewhere, or stacks show it.

    No data if nothing shows what the loader does and no rollout is marked: it may be in there.
    """
    spans, share = run.spans, run.value(ROLLOUT_IN_LOADER)
    if share is not None and share.value > 0:
        return exact(0.0)
    if _is_rollout(spans)[spans.name].any() or _stacks_inside(spans, _waits(spans))[0]:
        return exact(1.0)
    why = "No rollout is marked, so that it may run in the data loader"
    raise NoData(why, "Mark the rollout, or sample stacks: rlprof watch --stacks")


def _inside(spans: Spans, around: Int64s, rows: Int64s) -> Int64s:
    """Return which of some spans is around each of others on the same thread, below 0 if none."""
    return innermost(
        spans.thread[around],
        spans.start_ns[around],
        spans.end_ns[around],
        spans.thread[rows],
        spans.start_ns[rows],
    )


def _stacks_inside(spans: Spans, waits: Int64s) -> tuple[int, int]:
    """Return how many stack samples were taken in waits, and how many of them step a rollout."""
    marks = spans.rows(kind="mark")
    marks = marks[_named(spans, lambda name: name.startswith(STACK))[marks]]
    marks = marks[_inside(spans, waits, marks) >= 0]
    places = [spans.names[code].removeprefix(STACK) for code in spans.name[marks].tolist()]
    return len(places), sum(_STEPS.match(place) is not None for place in places)


def _loader_workers(run: Evidence) -> Measurement:
    """Return whether child processes run beside the training, as workers of a loader are."""
    if "host_rss_bytes" not in run.spans.counters:
        raise NoData("Whether the loader has workers is unknown", "Record on Linux")
    rows = run.spans.amounts("children_rss_bytes").rows
    return exact(float(len(rows) > 0))


def _drain(run: Evidence) -> Measurement:
    """Return the share of weight syncs that waits until rollouts have paused."""
    table = weight_sync(run.spans)
    parts = rows_of(table)
    whole = sum(row["total"] for row in parts if row["part"] == "whole sync")
    if table.abstained is not None or not whole:
        raise NoData("No weight sync was recorded", _MARK.format("weight_sync"))
    of_parts = [row for row in parts if row["part"] != "whole sync"]
    own = sum(row["total"] for row in of_parts if "drain" in row["part"])
    largest = max(of_parts, key=lambda row: int(row["total"]))
    facts = (
        Fact("of the syncs", own / whole, "share"),
        Fact("largest part", largest["part"], "text"),
    )
    return exact(own / whole, facts=facts)


# ---- ranks


def _slow_ranks(run: Evidence) -> Measurement:
    """Return each rank, or group that contains one, that the analysis of stragglers names."""
    harmless = (INCONCLUSIVE, NO_STRAGGLER, IMBALANCE)
    if not run.has_steps:
        return ()
    rows = rows_of(stragglers(run.spans))
    return tuple(slow_rank(run, row) for row in rows if row["verdict"] not in harmless)


def slow_rank(run: Evidence, row: dict[str, Any]) -> Measured:
    """Return one row of `stragglers`: what peers lost, of the job, or at most lost if unknown."""
    spans, is_rank = run.spans, row["rank"] is not None
    listed = row["group"].rpartition("ranks ")[2] if not is_rank else str(row["rank"])
    ranks = [int(rank) for rank in listed.split(", ")]
    first, last = map(int, row["steps"].split("-"))
    rows, condition = _stages_of(spans, ranks, first, last, row["stages"])
    facts = [
        Fact("rank" if is_rank else "one of ranks", int(listed) if is_rank else listed),
        Fact("verdict", row["verdict"], "text"),
        Fact("steps", row["steps"], "text"),
        Fact("stages", row["stages"], "text"),
    ]
    if row["p-value"] is not None:
        facts.append(Fact("p-value", row["p-value"], "number"))
    share = _most_lost(run, row, rows) / max(run.accounts.total_ns, 1)
    sure = is_rank and row["verdict"] != SLOW_UNCOUNTED
    return exact(
        share,
        lost_ns=row["peer time lost"],
        facts=tuple(facts),
        query=f"select * from spans where {condition} order by rank, start_ns",
        place=place_of(spans, rows),
        confidence=HIGH if sure else MEDIUM,
    )


def _most_lost(run: Evidence, row: dict[str, Any], rows: Int64s) -> float:
    """Return what peers lost, or at most lost if nothing shows where they wait."""
    lost, slowdown = row["peer time lost"], row["slowdown"]
    if lost is not None:
        return float(lost)
    if slowdown is None or row["rank"] is None:
        return float("inf")
    excess: float = float(run.spans.took_ns(rows).sum()) * slowdown / (1 + slowdown)
    heads = run.spans.headers
    role = heads[row["rank"]].role
    return excess * (sum(head.role == role for head in heads.values()) - 1)


def _stages_of(
    spans: Spans, ranks: list[int], first: int, last: int, stages: str
) -> tuple[Int64s, str]:
    """Return the stages that a verdict is about, all if it names none, and their SQL condition.

    A verdict may name phases of the training loop, which are regions inside stages.
    """
    named = [spans.names.index(name) for name in stages.split(", ") if name in spans.names]
    condition = f"rank in ({', '.join(map(str, ranks))}) and step between {first} and {last}"
    if named:
        rows = np.flatnonzero(np.isin(spans.name, named) & np.isin(spans.kind, _WORK))
        texts = ", ".join(quoted(spans.names[code]) for code in named)
        condition += f" and kind in ('stage', 'region') and name in ({texts})"
    else:
        rows = spans.rows(kind="stage")
        condition += " and kind = 'stage'"
    step = spans.step[rows]
    return rows[np.isin(spans.rank[rows], ranks) & (step >= first) & (step <= last)], condition


# ---- changes over the run


def _changed(change: str) -> Quantity:
    """Return what each change of a kind cost, of the job."""

    def measure(run: Evidence) -> Measurement:
        if not run.has_steps:
            raise NoData("No complete step was recorded")
        table = changes(run.spans)
        if table.abstained is not None:
            raise NoData(table.abstained.rstrip("."), "Record more steps")
        lost = lost_in_steps(run, CPU_WAIT)
        rows = [row for row in rows_of(table) if row["change"] == change and row["cost"] > 0]
        own = [
            row
            for row in rows
            if lost is None or not lost.explains_change(change, row["step"], row["delta"])
        ]
        if rows and not own:
            raise NoData(_CPU_MEANWHILE)
        return tuple(_change(run, row) for row in own)

    return Quantity(f"{change}, of the job", "share", measure)


def _change(run: Evidence, row: dict[str, Any]) -> Measured:
    spans, step = run.spans, row["step"]
    rows = spans.rows(kind="step")
    rows = rows[spans.step[rows] >= step]
    some = f"step = {step}" if row["change"] == OUTLIER else f"step >= {step}"
    facts = [
        Fact("step" if row["change"] == OUTLIER else "since step", step),
        Fact("times as long", row["ratio"], "ratio"),
        Fact("stage", row["stage"] or "no stage", "text"),
        Fact("more per step", row["delta"] / 1e6, "ms"),
        Fact("steps", row["steps"]),
    ]
    if row["p-value"] is not None:
        facts.append(Fact("p-value", row["p-value"], "number"))
    if unclear := may_be_longer_responses(spans, row["stage"]):
        facts.append(Fact("lengths of responses", "not counted", "text"))
    line = line_in_steps(spans, step, step + row["steps"] - 1)
    if line is not None:
        facts.append(Fact("stacks", str(line), "text"))
    share = row["cost"] / max(run.accounts.total_ns, 1)
    sure = not unclear and (row["p-value"] is None or row["p-value"] < _MAX_SURE_P_VALUE)
    return exact(
        share,
        lost_ns=row["cost"],
        facts=tuple(facts),
        query=f"select * from spans where kind = 'step' and {some} order by rank, step",
        place=place_of(spans, rows[spans.step[rows] == step]),
        confidence=HIGH if sure else MEDIUM,
    )


# ---- hangs


def _hangs(run: Evidence) -> Measurement:
    """Return the ranks that stopped and did not go on, by the notes of their watchdogs."""
    spans, hung = run.spans, dict[int, tuple[float, int, str]]()
    for note in spans.notes:
        if note.rank is None:
            continue
        if note.code == Code.NO_PROGRESS:
            facts = note.facts
            quiet, step, span = (facts.get(name) for name in ("quiet_s", "step", "span"))
            hung[note.rank] = (float(quiet or 0), int(step or 0), str(span or ""))
        elif note.code == Code.PROGRESS_AGAIN:
            hung.pop(note.rank, None)
    hung = {rank: hung[rank] for rank in sorted(hung) if spans.statuses.get(rank) != "finished"}
    if not hung:
        return exact(0.0)
    step = max(each[1] for each in hung.values())
    shown = [
        f"rank {rank} for {quiet:.0f} s" + (f" in {span}" if span else "")
        for rank, (quiet, _, span) in [*hung.items()][:_MAX_HUNG_RANKS]
    ]
    seen = Fact("no progress of", ", ".join(shown), "text")
    facts_shown = (Fact("step", step), Fact("ranks", len(hung)), seen)
    query = f"select * from spans where step >= {step - 1} order by rank, start_ns"
    place = place_of(spans, spans.rows(kind="step")[-1:])
    return exact(float(len(hung)), facts=facts_shown, query=query, place=place)


# ---- the table

ROLLOUT = category_share(Category.ROLLOUT)
TAIL = category_share(
    Category.ROLLOUT_TAIL, "Record a span per request: wrap each response in sample()"
)
WEIGHT_SYNC = category_share(Category.WEIGHT_SYNC)
REWARD = category_share(Category.REWARD)
DATA_WAIT = category_share(Category.DATA_WAIT)
COLLECTIVE_WAIT = category_share(
    Category.COLLECTIVE_WAIT, "Record two or more ranks that meet", _explained_by_cpu
)
BACKPRESSURE = category_share(Category.BACKPRESSURE)
OFFLOAD = category_share(Category.OFFLOAD)
CHECKPOINT_EVALUATION = category_share(Category.EVALUATION)
HOST_WORK = category_share(Category.HOST_IDLE)
COMMUNICATION_SPANS = category_share(Category.COMMUNICATION)
COPY_SPANS = category_share(Category.MEMCPY)
UNTRACED = category_share(Category.UNTRACED)
_CAPTURES = category_share(Category.PROFILER)
PROFILER = Quantity(_CAPTURES.text, "share", _profiler)
_GC_MARKED = category_share(Category.PYTHON_GC)
_GC_COUNTED = counted_share(
    "garbage collection, of the step time",
    GC_PAUSE,
    "Record background_metrics: steps then have gc_pause_ns",
    GC_COUNT,
)
GARBAGE = Quantity(_GC_COUNTED.text, "share", _garbage)
CPU_WAIT_SHARE = counted_share(
    "waiting for a CPU, of the step time", CPU_WAIT, "Record on Linux: steps then have cpu_wait_ns"
)
CRITIC = Quantity("critic, of the step time", "share", _critic)
CHECKPOINTS = _named_share(
    "checkpoints",
    """save_checkpoint checkpoint checkpointing checkpoint_for_recover save_checkpoints save_ckpt
    save_hf_model modelcheckpoint_on_train_batch_end modelcheckpoint_on_train_epoch_end save
    save_model""",
)
EVALUATION = _named_share(
    "evaluation",
    "validation eval eval_rollout evaluate evaluation val val_step validate_time test testing",
)
LOGGING = _named_share("logging", LOGS)
SAMPLES_FROM_OTHERS = Quantity(
    "other ranks generate what is waited for", "yes/no", _samples_from_others
)
ASYNCHRONOUS = Quantity("rollout and update run at the same time", "yes/no", _asynchronous)
ROLLOUT_IN_LOADER = Quantity(
    "a module or an environment runs in the data loader, of its time", "share", _rollout_in_loader
)
ONLY_LOADS = Quantity("the data loader runs no rollout", "yes/no", _only_loads)
LOADER_WORKERS = Quantity("the data loader has workers", "yes/no", _loader_workers)
DRAIN = Quantity("waiting for rollouts to pause, of weight syncs", "share", _drain)
SLOW_RANKS = Quantity("time that peers lost to a slow rank, of the job", "share", _slow_ranks)
LEVEL_CHANGES = _changed(LEVEL)
TRENDS = _changed(TREND)
OUTLIERS = _changed(OUTLIER)
HUNG_RANKS = Quantity("ranks that hung until the end", "count", _hangs)
