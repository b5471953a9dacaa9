"""The rule on memory: what is held grows from step to step, and did not stop growing.

The rule on ranks that make the others wait: each verdict of `stragglers` that accuses one.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_rlprof.analysis.findings.finding import (
    HIGH,
    MEDIUM,
    Claim,
    Undecided,
    place_at,
    place_of,
    quoted,
)
from lightning_rlprof.analysis.memory import growth, memory_timeline, series
from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.analysis.stragglers.verdicts import (
    IMBALANCE,
    INCONCLUSIVE,
    NO_STRAGGLER,
    SLOW_UNCOUNTED,
)
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans

_SILENT = (INCONCLUSIVE, NO_STRAGGLER, IMBALANCE)


def slow_claims(spans: Spans) -> Iterator[Claim]:
    """Yield a claim per rank, or group of which one is meant, that surely makes others wait."""
    table = stragglers(spans)
    names = [column.name for column in table.columns]
    for row in table.rows:
        one = dict(zip(names, row, strict=True))
        if one["verdict"] not in _SILENT:
            yield _claim(spans, one)


def _claim(spans: Spans, one: dict[str, Any]) -> Claim:
    single, lost = one["rank"] is not None, one["peer time lost"]
    ranks = [one["rank"]] if single else _ranks(str(one["group"]))
    who = f"rank {one['rank']}" if single else f"one of ranks {', '.join(map(str, ranks))}"
    first, last = map(int, str(one["steps"]).split("-"))
    rows, condition = _seen(spans, ranks, first, last, str(one["stages"]))
    chance = "" if one["p-value"] is None else f", p-value {one['p-value']:.2g}"
    sure = HIGH if single and one["verdict"] != SLOW_UNCOUNTED else MEDIUM
    return Claim(
        f"{who} makes the others wait: {one['verdict']}",
        *(lost, *_bounds(one), sure),
        f"move the work of {who} to another machine for some steps",
        "whoever takes its place is slow as well: then it is the work, and not the machine",
        f"steps {one['steps']}, stages {one['stages']}{chance}",
        f"select * from spans where kind = 'stage' and {condition} order by rank, start_ns",
        place_of(spans, rows),
        "rlprof stragglers RUN --json",
    )


def _ranks(group: str) -> list[int]:
    """Return the ranks that a group's name ends with."""
    return [int(rank) for rank in group.rpartition("ranks ")[2].split(", ")]


def _bounds(one: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return what was lost where the effect is as small or as large as it may be."""
    lost, effect = one["peer time lost"], one["slowdown"]
    if lost is None or not effect:
        return None, None
    low, high = (
        None if one[name] is None else int(lost * one[name] / effect)
        for name in ("CI low", "CI high")
    )
    return low, high


def _seen(spans: Spans, ranks: list[int], first: int, last: int, stages: str) -> tuple[Int64s, str]:
    """Return the stages that a verdict is about, all where it names none, and their condition."""
    rows = spans.rows(kind="stage")
    step = spans.step[rows]
    rows = rows[np.isin(spans.rank[rows], ranks) & (step >= first) & (step <= last)]
    condition = f"rank in ({', '.join(map(str, ranks))}) and step between {first} and {last}"
    named = [spans.names.index(name) for name in stages.split(", ") if name in spans.names]
    if named:
        rows = rows[np.isin(spans.name[rows], named)]
        texts = ", ".join(quoted(spans.names[code]) for code in named)
        condition += f" and name in ({texts})"
    return rows, condition


GROWS = 0.02
"""Share of the peak by which what is held must surely have grown over the recorded steps."""

FEWEST = 16
"""Steps below which nothing is said: each half of them must tell by itself."""

_SUBJECT = "growth of memory"
_ALL = "all"
_POINTS = 2**40  # no sample is left out
_MIB = 2**20
_COUNTERS = {"torch": "device_allocated_bytes", "host": "host_rss_bytes"}  # of spans in captures


def memory_claims(spans: Spans) -> Iterator[Claim | Undecided]:
    """Yield what grows, the worst rank of each component; nothing where no memory was recorded.

    A finding takes growth in the second half of the steps by itself: set-up and warm-up grow, too,
    and stop. Its price is no time: it ends in an error, or does not.
    """
    table = memory_timeline(spans)
    names = [column.name for column in table.columns]
    rows: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in table.rows]
    rows = [row for row in rows if row["stage"] == _ALL]
    grown = [row for row in rows if row["growing"] == "yes" and _matters(row, "CI low")]
    few = max((row["steps"] for row in rows), default=0)
    if rows and few < FEWEST:
        yield Undecided(_SUBJECT, f"of {few} steps with memory")
        return
    if not grown and any(row["growing"] == "no" and _matters(row, "CI high") for row in rows):
        yield Undecided(_SUBJECT, "as steps differ too much")
    for component in dict.fromkeys(row["component"] for row in grown):
        own = [row for row in grown if row["component"] == component]
        yield from _worst(spans, max(own, key=lambda row: row["CI low"]), len(own))


def _matters(row: dict[str, Any], bound: str) -> bool:
    most = max(row["peak"] or 0, row["reserved"] or 0)
    return bool(row[bound] * row["steps"] >= GROWS * most > 0)


def _worst(spans: Spans, row: dict[str, Any], ranks: int) -> Iterator[Claim | Undecided]:
    steps, held = _floors(spans, row)
    half = len(steps) // 2
    slope, low, high = growth(steps[half:], held[half:])
    if slope is None or low is None or high is None or len(steps) < FEWEST:
        yield Undecided(_SUBJECT, f"of {len(steps)} steps on rank {row['rank']}")
        return
    where = f"rank {row['rank']}" + (f" and {ranks - 1} more" if ranks > 1 else "")
    if low * len(steps) < GROWS * held.max():
        yield Undecided(_SUBJECT, f"as it stopped, or nearly, on {where}")
        return
    first, last = int(steps[half]), int(steps[-1])
    yield Claim(
        f"memory grows from step to step: {row['component']} on {where}",
        *(None, None, None, HIGH if low > slope / 2 else MEDIUM),
        "rlprof show RUN memory_timeline tells the stage; then a memory snapshot of two steps far "
        "apart (memory.level: snapshot), and see what only the later one holds",
        "it stops later: run twice as many steps; or batches become longer",
        f"{slope / _MIB:.3g} MiB a step ({low / _MIB:.3g} to {high / _MIB:.3g}, 99 %) "
        f"in steps {first}-{last}; no time, so no price",
        _query(spans, row, first, last),
        place_at(spans, row["rank"], *_when(spans, row["rank"], last)),
        "rlprof show RUN memory_timeline",
    )


def _floors(spans: Spans, row: dict[str, Any]) -> tuple[Int64s, Int64s]:
    """Return steps and the least that was held in each, as `memory_timeline` takes them."""
    table = series(spans, row["rank"], _POINTS)
    own = [each for each in table.rows if each[:2] == (row["component"], row["device"])]
    told = 3 if any(each[3] is not None for each in own) else 4  # allocated, or else reserved
    known = np.array([(each[2], each[told]) for each in own if each[told] is not None], np.int64)
    if not len(known):
        return known, known
    rows = spans.rows(kind="step", rank=row["rank"])
    if not len(rows):
        return rows, rows
    at = np.searchsorted(spans.start_ns[rows], known[:, 0], "left") - 1  # an end is no beginning
    inside = (at >= 0) & (known[:, 0] <= spans.end_ns[rows[at]])
    step, held = spans.step[rows[at[inside]]], known[inside, 1]
    order = np.lexsort((held, step))
    heads = np.flatnonzero(np.diff(step[order], prepend=-1))
    return step[order][heads], held[order][heads]


def _when(spans: Spans, rank: int, step: int) -> tuple[int, int]:
    rows = spans.rows(kind="step", rank=rank)
    row = rows[spans.step[rows] == step][0]
    return int(spans.start_ns[row]), int(spans.end_ns[row])


def _query(spans: Spans, row: dict[str, Any], first: int, last: int) -> str:
    """Return the SELECT of the samples, from the table or from what spans counted."""
    counter = _COUNTERS.get(str(row["component"]))
    if counter is not None and counter in spans.counters:
        return (
            f"select step, kind, name, start_ns, {counter} from spans where rank = {row['rank']} "
            f"and kind in ('stage', 'step') and step between {first} and {last} "
            f"and {counter} is not null order by start_ns"
        )
    since, until = _when(spans, row["rank"], first)[0], _when(spans, row["rank"], last)[1]
    of = "is null" if row["component"] is None else f"= {quoted(row['component'])}"
    return (
        f"select * from memory where rank = {row['rank']} and component {of} "
        f"and time_ns between {since} and {until} order by time_ns"
    )
