"""Pairs of runs with known work and known change, built in memory for the tests of `compare`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightning_rlprof.records.records import FORMAT, KINDS, Header
from lightning_rlprof.tables.spans import NO_PARENT, Counter, Spans, Thread

_GAP_NS = 10_000
_LENGTHS, _SAMPLES = 0.6, 64  # spread of logarithms of lengths, and how many a step has


@dataclass(frozen=True)
class Half:
    """One run as it is to be: what differs from the usual.

    Attributes:
        steps: How many.
        length: Mean length of answers, times the usual.
        slower: By stage, how much longer it takes for the same work: 0.05 is 5 %.
        noise: Spread of the logarithm of times.
        lengths: Spread of the steps' mean lengths from step to step.
        stages: By name, how much of its usual time does not depend on tokens.
        counted: Whether the stages count their work.
    """

    steps: int = 60
    length: float = 1.0
    slower: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.02
    lengths: float = 0.15
    stages: Mapping[str, float] = field(
        default_factory=lambda: {"actor_generate": 0.2, "actor_update": 0.1, "compute_reward": 1.0}
    )
    counted: bool = True


def scripted(half: Half, seed: int) -> Spans:
    """Return a run in which time is ``(fixed + tokens + squares) * slower * noise`` per stage."""
    random = np.random.default_rng(seed)
    level = half.length * np.exp(random.normal(0, half.lengths, (half.steps, 1)))
    lengths = 500 * level * np.exp(random.normal(0, _LENGTHS, (half.steps, _SAMPLES)))
    work = {"tokens": lengths.sum(axis=1), "tokens_sq": (lengths**2).sum(axis=1)}
    usual = 500 * _SAMPLES * np.exp(_LENGTHS**2 / 2)
    times = {}
    for name, fixed in half.stages.items():
        base = fixed + (1 - fixed) * (0.8 * work["tokens"] + work["tokens_sq"] / 4_500) / usual
        noise = np.exp(random.normal(0, half.noise, half.steps))
        times[name] = base * 1e8 * noise * (1 + half.slower.get(name, 0.0))
    counters = {name: dict.fromkeys(times, values) for name, values in work.items()}
    return run_of(times, counters if half.counted else {})


def run_of(
    times: Mapping[str, Sequence[float]],
    counters: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    *,
    device: str = "cpu",
    world_size: int = 1,
) -> Spans:
    """Return a run of one rank with these times in ns of each stage, one per step, in a row.

    Args:
        times: By stage; NaN where it did not run in a step.
        counters: By counter and stage; NaN where nothing was counted.
        device: What the header says, as ``world_size``.
    """
    names = ("step", *times)
    rows: list[tuple[int, int, int, int]] = []
    places: dict[str, list[int]] = {name: [] for name in times}
    at = 0
    for step in range(len(next(iter(times.values())))):
        begin, head = at, len(rows)
        rows.append((0, 0, 0, 0))
        for code, (name, series) in enumerate(times.items(), start=1):
            ran = not np.isnan(series[step])
            places[name].append(len(rows) if ran else -1)
            if ran:
                rows.append((code, step + 1, at, at + round(series[step])))
                at = rows[-1][3]
        rows[head] = (0, step + 1, begin, at + _GAP_NS)
        at += _GAP_NS
    return _spans(names, np.array(rows), _counters(places, counters or {}), device, world_size)


def _counters(
    places: Mapping[str, list[int]], counters: Mapping[str, Mapping[str, Sequence[float]]]
) -> dict[str, Counter]:
    found = {}
    for counter, by_stage in counters.items():
        pairs = sorted(
            (row, value)
            for stage, values in by_stage.items()
            for row, value in zip(places[stage], values, strict=True)
            if row >= 0 and not np.isnan(value)
        )
        rows, values = zip(*pairs, strict=True)
        found[counter] = Counter(np.array(rows), np.array(values, dtype=float))
    return found


def _spans(
    names: tuple[str, ...],
    rows: np.ndarray,
    counters: dict[str, Counter],
    device: str,
    world_size: int,
) -> Spans:
    name, step, start, end = rows.T
    kind = np.where(name == 0, KINDS.index("step"), KINDS.index("stage"))
    nothing = np.zeros(len(rows), dtype=np.int64)
    head = Header(FORMAT, "run", 0, world_size, "actor", "host", 1, device, 0, 0)
    return Spans(
        Path("scripted"),
        names,
        (Thread(0, 1, "Main"),),
        name=name,
        kind=kind,
        rank=nothing,
        step=step,
        start_ns=start,
        end_ns=end,
        thread=nothing,
        id=np.arange(1, len(rows) + 1),
        parent=np.full(len(rows), NO_PARENT),
        counters=counters,
        headers={0: head},
        statuses={0: "finished"},
    )
