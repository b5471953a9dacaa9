"""What a run shows of the fault that a demo injected, in sentences, with the commands for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.comparison.changes import LEVEL, OUTLIER, changes
from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.diagnosis.step_quantities import CPU_WAIT
from lightning_rlprof.analysis.memory import leaking_phases, memory_phases
from lightning_rlprof.analysis.stages import rank_status
from lightning_rlprof.cli.demo.faults import HANGS_IN
from lightning_rlprof.cli.demo.options import INJECTED_STEPS, DemoOptions
from lightning_rlprof.records.notes import Code, Fact
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, rows_of

_NEAR = 3  # steps by which noise moves a change


@dataclass(frozen=True)
class Caught:
    """What a demo says at its end.

    Attributes:
        lines: What was caught, or that it was not, and why that may be.
        commands: Commands that show it, ``RUN`` for the run.
        complete: Whether everything was caught that the fault should show.
    """

    lines: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    complete: bool


def fault_step(options: DemoOptions) -> int:
    """Return the step in which the fault happens, or begins."""
    return (options.steps or INJECTED_STEPS) // 2 + 1


def injected(options: DemoOptions) -> str:
    """Return what was done to the training, for people."""
    step = fault_step(options)
    return {
        "slow-step": f"step {step} waits for its rewards, and takes 5 times as long.",
        "shift": f"from step {step} on, actor_generate takes twice as long.",
        "hang": f"in step {HANGS_IN + 1}, the last rank never leaves its reward.",
        "oom": f"step {step} raises torch.OutOfMemoryError in actor_update. "
        "It's simulated: no device is full, the demo trains on a CPU.",
        "leak": "each step keeps 4 MiB in compute_reward.",
        "throttle": f"from step {step} on, 3 other processes use the CPU of the training thread. "
        "A throttled GPU isn't simulated: that needs a GPU.",
    }[options.inject or ""]


def caught(spans: Spans, options: DemoOptions) -> Caught:
    """Return what the run shows of the fault that was injected."""
    find = {
        "slow-step": _slow_step,
        "shift": _shift,
        "oom": _out_of_memory,
        "leak": _leak,
        "throttle": _throttle,
    }[options.inject or ""]
    lines, commands = find(spans, fault_step(options))
    missing = [line for line in lines if line.startswith("Not caught")]
    if missing:
        lines.append("Other programs on this machine may hide it: try again when it is idle.")
    commands += [("findings", "RUN"), ("report", "RUN", "--open")]
    return Caught(tuple(lines), tuple(commands), not missing)


_Found = tuple[list[str], list[tuple[str, ...]]]


def _slow_step(spans: Spans, step: int) -> _Found:
    near = [row for row in rows_of(changes(spans)) if row["change"] == OUTLIER]
    own = [row for row in near if row["step"] == step]
    line = "Not caught: no outlier in show RUN changes."
    if own:
        line = f"Caught by changes: step {step} took {own[0]['ratio']:.1f}x as long as its "
        line += f"neighbors, most of it in {own[0]['stage']}."
    lines = [line, *_captures(spans, lambda found: found == step)]
    return lines, [("show", "RUN", "changes"), ("show", "RUN", "steps")]


def _shift(spans: Spans, step: int) -> _Found:
    higher = [row for row in rows_of(changes(spans)) if row["change"] == LEVEL and row["ratio"] > 1]
    own = [row for row in higher if abs(row["step"] - step) <= _NEAR]
    line = "Not caught: no change of the level in show RUN changes."
    if own:
        line = f"Caught by changes: from step {own[0]['step']} on (injected: {step}), steps take "
        line += f"{own[0]['ratio']:.2f}x as long, most of it in {own[0]['stage']}."
    lines = [line, *_captures(spans, lambda found: found is None or found >= step)]
    return lines, [("show", "RUN", "changes")]


def _captures(spans: Spans, is_own: Callable[[int | None], bool]) -> list[str]:
    """Return why a capture was requested, and which steps each rank captured.

    Args:
        spans: Of the run.
        is_own: Whether the fault is what the recorder found in a step, or in the last steps (None):
            other programs may have slowed down an earlier one.
    """
    requests = [note for note in spans.notes if note.code == Code.CAPTURE_REQUESTED]
    why = [note.text for note in requests if is_own(_spike(note.facts))]
    taken = [note for note in spans.notes if note.code == Code.CAPTURE_TAKEN]
    ranks = [note.rank for note in taken]
    steps = sorted({str(note.facts["capture"]) for note in taken})
    if not why or not ranks:
        return ["Not caught: no capture was taken of it during the training."]
    once = len(ranks) == len(set(ranks)) == len(spans.headers) and len(steps) == 1
    how = "one capture on each rank" if once else f"{len(ranks)} captures on ranks"
    return [f"Caught during the training: {why[0]}.", f"Captured: {how}, {', '.join(steps)}."]


def _spike(facts: Mapping[str, Fact]) -> int | None:
    """Return the step that was unusual alone; None if several were."""
    return int(facts["found_step"]) if facts.get("found") == "spike" else None


def _out_of_memory(spans: Spans, step: int) -> _Found:
    wanted = {"rank": 0, "step": step, "stage": "actor_update"}
    own = [
        each
        for each in diagnose(spans).problems
        if each.id == "out-of-memory"
        and all(each.by_name[name].value == value for name, value in wanted.items())
    ]
    line = "Not caught: findings name no rank without memory."
    if own:
        line = f"Caught by findings: {own[0].heading} ({own[0].evidence})."
    status = [f"rank {row['rank']} {row['status']}" for row in rows_of(rank_status(spans))]
    lines = [line, f"The run is readable; status: {'; '.join(status)}."]
    return lines, [("show", "RUN", "rank_status"), ("show", "RUN", "memory_phases")]


def _leak(spans: Spans, step: int) -> _Found:
    phases = leaking_phases(spans, 0, "host")
    line = "Not caught: memory_phases names no stage that leaks."
    if phases:
        table = memory_phases(spans)
        (own, *_) = [row for row in rows_of(table) if row["phase"] == phases[0]]
        line = f"Caught by memory_phases: {phases[0]} leaks {_mib(own['added per step'])} of host "
        line += "memory per step."
    return [line], [("show", "RUN", "memory_phases")]


def _throttle(spans: Spans, step: int) -> _Found:
    own = [each for each in diagnose(spans).problems if each.id in ("cpu-contention", "cpu-quota")]
    waits = _waits(spans, step)
    if not own or waits is None:
        return ["Not caught: findings name no wait for a CPU."], []
    before, after = waits
    lines = [
        f"Caught by findings: {own[0].heading}.",
        f"The training thread waited for a CPU in {before:.0%} of the time before step {step}, and "
        f"in {after:.0%} since.",
    ]
    if after <= before:
        lines.append("Not caught: the machine was as busy before.")
    return lines, [("show", "RUN", "changes"), ("show", "RUN", "steps")]


def _waits(spans: Spans, step: int) -> tuple[float, float] | None:
    """Return the share of time in which rank 0 waited for a CPU, before a step and since."""
    rows, ns = spans.amounts(CPU_WAIT, np.int64)
    is_step = spans.kind[rows] == KINDS.index("step")
    rows, ns = rows[is_step], ns[is_step]
    lasted, since = spans.end_ns[rows] - spans.start_ns[rows], spans.step[rows] >= step
    if not since.any() or since.all():
        return None
    before, after = (float(ns[each].sum() / lasted[each].sum()) for each in (~since, since))
    return before, after


def _mib(value: Cell) -> str:
    return f"{float(value or 0) / 2**20:.1f} MiB"
