"""Runs that show chosen facts: shares of steps, memory, counters, samples, kernels, background."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_rlprof.records.notes import Code
from lightning_rlprof.tables.rank_tables import SAMPLE_NAMES
from lightning_rlprof.tables.spans import RankNote, Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.device_trace import CALLS, KERNELS, Cells, table
from tests.builders.runs import Row, header, loaded

STEPS = 12
STEP_NS = 1_000_000
H100 = "NVIDIA H100 80GB HBM3"
TOTAL = 80 * 2**30
COLLECTIVES = ("rank", "operation", "group", "start", "duration", "stage", "step")
_PIECE_NS = 10_000
_CAPTURED = (10, 11, 12)
_BF16 = '["c10::BFloat16","c10::BFloat16"]'

Counters = Mapping[str, float]


@dataclass(frozen=True)
class Work:
    """Kernels of each step, in pieces of 10 µs.

    Attributes:
        name: The kernel.
        first: Where in the step they begin, as a share of it.
        last: Where they end.
        busy: Which part of each piece runs; the rest waits for the host, which launches late.
        graph: Whether they run in graph replays.
        stream: Stream of the device.
    """

    name: str = "gemm"
    first: float = 0.0
    last: float = 1.0
    busy: float = 1.0
    graph: bool = False
    stream: int = 7


@dataclass(frozen=True)
class Fact:
    """What a run shows; each step is the same.

    Attributes:
        spans: Share of the step by name, one after the other; the rest is untraced.
        regions: Which of them are regions rather than stages.
        counters: Counters of spans by name, of one step; a callable gets rank and step.
        of_step: Counters of the step.
        memory: Peak, memory outside torch, and reserved, as shares of the device's memory, by stage
            in the captured steps.
        free_host: Share of host memory that is free.
        samples: Counters and fates of the samples of a step.
        first_token: When the first token of a sample comes, as a share of its rollout.
        work: What the device runs.
        host_ranges: Names of host calls.
        collectives: Operation and bytes of collectives of each step.
        matmuls: Share of the device's peak, of each of several kinds of matmuls.
        background: Metrics of the background by name.
        ranks: Number of ranks.
        device: Model of the device.
        versions: Versions of packages.
        notes: Codes of the notes of rank 0.
        status: How ranks ended.
        warm_up: Names that take all of a slow first step.
        requests: Ends of requests as shares of the rollout, each with a span.
        peers: Stages that a second role, on a rank of its own, has, as `spans`.
        steps: Number of steps.
    """

    spans: Mapping[str, float] = field(default_factory=dict)
    regions: Sequence[str] = ()
    counters: Mapping[str, Counters | Callable[[int, int], Counters]] = field(default_factory=dict)
    of_step: Counters = field(default_factory=dict)
    memory: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    free_host: float | None = None
    samples: Sequence[tuple[str, Counters]] = ()
    first_token: float | None = None
    work: Sequence[Work] = ()
    host_ranges: Sequence[str] = ()
    collectives: tuple[str, int] | None = None
    matmuls: float | None = None
    background: Mapping[str, float] = field(default_factory=dict)
    ranks: int = 1
    device: str = H100
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[Code] = ()
    status: str | None = "finished"
    warm_up: str = ""
    requests: Sequence[float] = ()
    peers: Mapping[str, float] = field(default_factory=dict)
    steps: int = STEPS


def advised(fact: Fact) -> Spans:
    """Return a run of 12 steps of 1 ms that shows these facts."""
    many = fact.ranks + bool(fact.peers)
    spans = loaded(*(_rows(fact, rank) for rank in range(many)))
    heads = {
        rank: replace(header(rank, many), device=fact.device, versions=dict(fact.versions))
        for rank in range(many)
    }
    notes = tuple(RankNote(0, 0, code.level, "", code) for code in fact.notes)
    statuses = dict.fromkeys(heads, fact.status)
    tables = {**spans.tables, **{name: (lambda own=own: own) for name, own in _tables(fact)}}
    return replace(spans, headers=heads, notes=notes, statuses=statuses, tables=tables)


def _start(fact: Fact, step: int) -> int:
    return (step - 1) * STEP_NS + (0 if step == 1 or not fact.warm_up else 9 * STEP_NS)


def _rows(fact: Fact, rank: int) -> list[Row]:
    rows: list[Row] = []
    for step in range(1, fact.steps + 1):
        slow = bool(fact.warm_up) and step == 1
        begin = _start(fact, step)
        end = begin + (10 if slow else 1) * STEP_NS
        captured = bool(fact.memory) and step in _CAPTURED
        known = {**fact.of_step, **({"capture": 1} if captured else {})}
        if fact.free_host is not None:
            known |= {"host_rss_bytes": int((1 - fact.free_host) * 2**40)}
            known |= {"host_limit_bytes": 2**40}
        rows.append(Row("step", "step", step, begin, end, counters=known or None))
        shares = {fact.warm_up: 1.0} if slow else fact.peers if rank >= fact.ranks else fact.spans
        now = begin
        for name, share in shares.items():
            until = now + round(share * (end - begin))
            rows += _span(fact, rank, step, name, now, until, captured)
            now = until
        if not slow:
            rows += _samples(fact, rank, step, begin, end)
    return rows


def _span(
    fact: Fact, rank: int, step: int, name: str, start: int, end: int, captured: bool
) -> list[Row]:
    own = fact.counters.get(name, {})
    counters = dict(own(rank, step) if callable(own) else own)
    if captured and name in fact.memory:
        peak, other, reserved = fact.memory[name]
        sizes = {"peak": peak, "other": other, "reserved": reserved, "total": 1.0}
        counters |= {f"device_{what}_bytes": int(part * TOTAL) for what, part in sizes.items()}
    kind: Any = "region" if name in fact.regions else "stage"
    rows = [Row(name, kind, step, start, end, counters=counters or None)]
    if name == "actor_generate":
        ends = (start + round(part * (end - start)) for part in fact.requests)
        rows += [
            Row("generate", "region", step, start, each, thread=at)
            for at, each in enumerate(ends, start=1)
        ]
    return rows


def _samples(fact: Fact, rank: int, step: int, begin: int, end: int) -> list[Row]:
    rows = []
    for at, (fate, counters) in enumerate(fact.samples):
        told = {"sample": (rank * 1_000 + step) * 1_000 + at}
        half = (begin + end) // 2
        own = {name: value for name, value in counters.items() if name in ("tokens", "version")}
        if own or fact.first_token is not None:
            rows.append(
                Row(
                    "generate", "region", step, begin, half, thread=at + 1, counters={**told, **own}
                )
            )
        if fact.first_token is not None:
            first = begin + round(fact.first_token * (half - begin))
            rows.append(Row("first token", "mark", step, first, first, counters=told))
        rest = {name: value for name, value in counters.items() if name not in own}
        rows.append(Row(f"sample {fate}", "mark", step, half, half, counters={**told, **rest}))
    return rows


def _tables(fact: Fact) -> list[tuple[str, Table]]:
    found = []
    if fact.work:
        kernels, calls = _kernels(fact)
        calls += [_range(name) for name in fact.host_ranges]
        found += [("kernels", table("kernels", KERNELS, kernels))]
        found += [("calls", table("calls", CALLS, calls))]
    elif fact.host_ranges:
        found += [("calls", table("calls", CALLS, [_range(name) for name in fact.host_ranges]))]
    if fact.collectives is not None:
        found += [("collectives", _collectives(*fact.collectives))]
    if fact.matmuls is not None:
        found += [("shapes", _shapes(fact.matmuls))]
    if fact.background:
        found += [("background_metrics", _background(fact.background))]
    if any("prompt" in counters for _, counters in fact.samples):
        found += [(SAMPLE_NAMES, _names(fact))]
    return found


def _range(name: str) -> Cells:
    return {"rank": 0, "name": name, "kind": "operator", "start": 5, "duration": 5}


def _kernels(fact: Fact) -> tuple[list[Cells], list[Cells]]:
    kernels: list[Cells] = []
    for step in range(1, STEPS + 1):
        for work in fact.work:
            for at in range(round(work.first * 100), round(work.last * 100)):
                start = _start(fact, step) + at * _PIECE_NS
                took = round(work.busy * _PIECE_NS)
                wait = _PIECE_NS - took
                start += wait
                cells = {"rank": 0, "device": 0, "stream": work.stream, "kernel": work.name}
                stage, ends = None, 0.0
                for name, share in fact.spans.items():
                    stage = name if stage is None and at < round(100 * (ends + share)) else stage
                    ends += share
                launch = max(0, start - (1_000 if wait else 5_000) + work.stream)
                graph = {"graph": step * 1_000 + at} if work.graph else {}
                times = {"start": start, "duration": took, "launch": launch}
                kernels.append({**cells, **times, "step": step, "stage": stage, **graph})
    calls = [
        {"rank": 0, "name": "cudaLaunchKernel", "kind": "runtime", "start": row["launch"]}
        for row in kernels
    ]
    return kernels, [{**call, "duration": 100} for call in calls]


def _collectives(operation: str, size: int) -> Table:
    names = (*COLLECTIVES, "number", "bytes", "group size")
    texts = ("operation", "group", "stage")
    columns = tuple(Column(name, "text" if name in texts else "count") for name in names)
    rows = [
        (0, operation, "world", (step - 1) * STEP_NS + at * 75_000, 75_000, None, step, at, size, 8)
        for step in range(1, STEPS + 1)
        for at in range(4)
    ]
    return Table("collectives", columns, rows)


def _shapes(rate: float) -> Table:
    """Return matmuls without kernels of their own, so that their time is what they say."""
    texts = ("operator", "dims", "types", "values")
    names = ("rank", "thread", "operator", "start", "duration", "dims", "types", "values")
    columns = tuple(Column(name, "text" if name in texts else "count") for name in names)
    rows = []
    for at in range(6):
        size = 4_096 + 256 * at
        took = round(2 * size**3 / (rate * 353.9e12) * 1e9)
        dims = f"[[{size},{size}],[{size},{size}]]"
        rows.append((0, None, "aten::mm", at * 10_000, took, dims, _BF16, None))
    return Table("shapes", columns, rows)


def _background(metrics: Counters) -> Table:
    names = ("rank", "device", "metric", "time", "duration", "value")
    columns = tuple(Column(name, "text" if name == "metric" else "count") for name in names)
    rows = [
        (0, 0, name, (step - 1) * STEP_NS + STEP_NS // 2, 0, value)
        for name, value in metrics.items()
        for step in range(1, STEPS + 1)
    ]
    return Table("background_metrics", columns, rows)


def _names(fact: Fact) -> Table:
    names = ("rank", "sample", "prompt", "prompt group", "attempt")
    columns = tuple(Column(name, "text" if "prompt" in name else "count") for name in names)
    rows = []
    for rank in range(fact.ranks):
        for step in range(1, STEPS + 1):
            for at, (_, counters) in enumerate(fact.samples):
                prompt = f"{rank}/{step}/{counters.get('prompt', at)}"
                rows.append((rank, (rank * 1_000 + step) * 1_000 + at, prompt, prompt, 0))
    return Table(SAMPLE_NAMES, columns, rows)
