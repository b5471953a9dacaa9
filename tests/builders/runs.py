"""Deterministic run directories for tests of the reading wing, written through `TraceWriter`."""

import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import Header, Kind
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.tables.spans import Spans

MAIN = 140_000_000_000_001
STAGES = ("actor_generate", "compute_reward", "actor_compute_log_prob", "actor_update")


class Row(NamedTuple):
    """One span to write; ids are given by position, from 1, unless set."""

    name: str
    kind: Kind
    step: int
    start_ns: int
    end_ns: int
    thread: int = MAIN
    parent: int | None = None
    counters: Mapping[str, float] | None = None
    id: int | None = None


def header(rank: int = 0, world_size: int = 1, **changes: Any) -> Header:
    values: dict[str, Any] = {
        "format": 1,
        "run_id": "run",
        "rank": rank,
        "world_size": world_size,
        "role": "actor",
        "host": "node-a",
        "pid": 100 + rank,
        "device": "cpu",
        "unix_ns": 1_700_000_000_000_000_000,
        "clock_ns": 0,
        "config": {"integrated": {"stage": "all"}},
        "versions": {"torch": "2.13.0"},
    }
    return Header(**{**values, **changes})


def write_rank(
    run: Path,
    head: Header,
    rows: Sequence[Row],
    *,
    status: str | None = "finished",
    notes: Sequence[tuple[int, str, str]] = (),
    threads: Mapping[int, str] | None = None,
) -> Path:
    """Write one rank's file; returns it."""
    writer = TraceWriter(run, head)
    writer.write([("thread", ident, name) for ident, name in (threads or {MAIN: "Main"}).items()])
    writer.write(
        [
            ("span", *r[:6], at if r.id is None else r.id, r.parent, r.counters)
            for at, r in enumerate(rows, start=1)
        ]
    )
    writer.write([("note", *note) for note in notes])
    if status is not None:
        writer.write([("end", 0, status)])
    writer.close()
    return writer.path


def spans_of(run: Path, *ranks: Sequence[Row]) -> Spans:
    """Write and load a run with these rows per rank."""
    for rank, rows in enumerate(ranks):
        write_rank(run, header(rank, len(ranks)), rows)
    return load(run)


def loaded(*ranks: Sequence[Row]) -> Spans:
    """Return spans with these rows per rank, through files that are gone again."""
    with tempfile.TemporaryDirectory() as folder:
        return spans_of(Path(folder) / "run", *ranks)


def grpo_rows(
    steps: int, seed: int = 0, *, slow: Mapping[str, float] | None = None, first: int = 1_000_000
) -> list[Row]:
    """Return plausible steps: four stages in milliseconds with noise, gaps, an epoch, a region."""
    noise = random.Random(seed)
    typical = {"actor_generate": 60, "compute_reward": 4, "actor_compute_log_prob": 9}
    typical["actor_update"] = 20
    rows: list[Row] = []
    now = first
    for step in range(1, steps + 1):
        begin = now
        region = len(rows) + len(STAGES) + 1
        now += noise.randint(100_000, 200_000)
        entered = now
        for stage in STAGES:
            length = int(typical[stage] * 1e6 * noise.uniform(0.95, 1.05))
            length = int(length * (slow or {}).get(stage, 1.0))
            counters = {"tokens": 1000 + step} if stage == "actor_generate" else None
            rows.append(Row(stage, "stage", step, now, now + length, MAIN, region, counters))
            now += length + noise.randint(10_000, 50_000)
        rows.append(Row("training_step", "region", step, entered, now))
        rows.append(Row("step", "step", step, begin, now + 5_000))
        now += 5_000
    rows.append(Row("epoch 1", "epoch", steps, first, now))
    return rows


def grpo_run(run: Path, steps: int = 5, ranks: int = 1, **changes: Any) -> Spans:
    """Write and load a plausible run."""
    return spans_of(run, *(grpo_rows(steps, seed, **changes) for seed in range(ranks)))
