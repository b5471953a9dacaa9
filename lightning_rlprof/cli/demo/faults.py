"""What goes wrong in a demo's training where that is asked for, and what the run shows of it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from lightning_rlprof.analysis.comparison.changes import LEVEL, OUTLIER, changes
from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.diagnosis.step_quantities import CPU_WAIT
from lightning_rlprof.analysis.memory import leaking_phases, memory_phases
from lightning_rlprof.analysis.stages import rank_status
from lightning_rlprof.cli.demo.options import INJECTED_STEPS, DemoOptions
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.records.notes import Code, Fact
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of

HANGS_IN = 4
"""The batch in which the reward hangs."""

SLOW_STEP, SHIFT = 5.0, 2.0
"""How many times as long the slow step takes, and the stage that becomes slower."""

LEAKED_BYTES = 4 * 2**20
"""What each step keeps of a leak."""

_NEIGHBORS, _NEIGHBORS_LIVE_S = 3, 300
# A neighbor ends with the training, whose process is its parent, and in any case some time later.
_NEIGHBOR = """
import os, sys, time
parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
os.sched_setaffinity(0, {int(sys.argv[2])})
while os.getppid() == parent and time.monotonic() < end:
    sum(range(10_000))
"""

_NEAR = 3  # steps by which noise moves a change


class Faults:
    """Lets one fault happen in a training; without one, nothing.

    Args:
        options: What is injected, `DemoOptions.inject`.
        steps: Steps of the training.
    """

    def __init__(self, options: DemoOptions, steps: int) -> None:
        self._inject, self._middle = options.inject, steps // 2
        self._slow_step, self._shift = SLOW_STEP, SHIFT
        self._times: list[float] = []
        self._generated: list[float] = []
        self._kept: list[mmap] = []
        self._neighbors: list[subprocess.Popen[bytes]] = []
        self._cpus: set[int] = set()

    def in_reward(self, batch: int, rank: int) -> None:
        """Hang, stall or leak in the reward, or let neighbors begin."""
        self._times.append(time.perf_counter())
        if self._inject == "hang" and batch == HANGS_IN:
            wait_for_closing_bracket("(" * rank)
        elif self._inject == "slow-step" and batch == self._middle:
            wait_for_reward_server((self._slow_step - 1) * self._usual())
        elif self._inject == "leak":
            # Not of the heap, where it may take what was freed: a later stage would grow instead.
            self._kept.append(mmap(-1, LEAKED_BYTES))
            self._kept[-1].write(os.urandom(LEAKED_BYTES))
        elif self._inject == "throttle" and batch == self._middle:
            self._crowd_cpu()

    def at_end_of(self, stage: str, batch: int, seconds: float) -> None:
        """Make the rollout longer, from the middle of the run on, by the same time in each step."""
        if self._inject != "shift" or stage != "actor_generate":
            return
        if batch < self._middle:
            self._generated.append(seconds)
        else:
            time.sleep((self._shift - 1) * median(self._generated))

    def in_update(self, batch: int) -> None:
        """Run out of memory in the update of the policy.

        Raises:
            OutOfMemoryError: torch's own, as its allocator raises it on a device.
        """
        if self._inject == "oom" and batch == self._middle:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def end(self) -> None:
        """End the neighbors, and give the training its CPUs back."""
        for each in self._neighbors:
            each.kill()
            each.wait()
        self._neighbors.clear()
        if self._cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, self._cpus)

    def _usual(self) -> float:
        """Return the usual time of a step, in seconds."""
        pairs = zip(self._times, self._times[1:], strict=False)
        return median(later - earlier for earlier, later in pairs)

    def _crowd_cpu(self) -> None:
        """Let other programs compute on the CPU of the training thread."""
        self._cpus = os.sched_getaffinity(0)
        cpu = min(self._cpus)
        os.sched_setaffinity(0, {cpu})
        words = [sys.executable, "-S", "-c", _NEIGHBOR, str(_NEIGHBORS_LIVE_S), str(cpu)]
        self._neighbors += [subprocess.Popen(words) for _ in range(_NEIGHBORS)]


def check_can_inject(options: DemoOptions) -> None:
    """Refuse what this machine cannot show.

    Raises:
        ConfigError: Linux does not count here how long a thread waits for a CPU.
    """
    if options.inject == "throttle" and not os.path.exists("/proc/thread-self/schedstat"):
        text = "inject=throttle needs /proc/thread-self/schedstat, in which Linux counts how long"
        raise ConfigError(f"{text} a thread waits for a CPU; it is not there")


def wait_for_closing_bracket(answer: str) -> None:
    """Parse an answer with the bug of many rewards: without its closing bracket it never ends."""
    depth = answer.count("(")
    while depth > 0:
        depth -= answer.count(")")


def wait_for_reward_server(seconds: float) -> None:
    """Wait, as for a server that all ranks ask for their rewards."""
    time.sleep(seconds)


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
    find, tables = {
        "slow-step": (_slow_step, ("changes", "steps")),
        "shift": (_shift, ("changes",)),
        "oom": (_out_of_memory, ("rank_status", "memory_phases")),
        "leak": (_leak, ("memory_phases",)),
        "throttle": (_throttle, ("changes", "steps")),
    }[options.inject or ""]
    found = find(spans, fault_step(options))
    complete, lines = all(each.is_caught for each in found), [each.text for each in found]
    if not complete:
        lines.append("Other programs on this machine may hide it: try again when it is idle.")
    commands = [*(("show", "RUN", name) for name in tables), ("findings", "RUN")]
    return Caught(tuple(lines), (*commands, ("report", "RUN", "--open")), complete)


class _Line(NamedTuple):
    """A sentence about the fault; a part of it that the run doesn't show was not caught."""

    text: str
    is_caught: bool = True


def _missed(text: str) -> _Line:
    return _Line(f"Not caught: {text}", is_caught=False)


def _slow_step(spans: Spans, step: int) -> list[_Line]:
    near = [row for row in rows_of(changes(spans)) if row["change"] == OUTLIER]
    own = [row for row in near if row["step"] == step]
    line = _missed("no outlier in show RUN changes.")
    if own:
        text = f"Caught by changes: step {step} took {own[0]['ratio']:.1f}x as long as its "
        line = _Line(f"{text}neighbors, most of it in {own[0]['stage']}.")
    return [line, *_captures(spans, lambda found: found == step)]


def _shift(spans: Spans, step: int) -> list[_Line]:
    higher = [row for row in rows_of(changes(spans)) if row["change"] == LEVEL and row["ratio"] > 1]
    own = [row for row in higher if abs(row["step"] - step) <= _NEAR]
    line = _missed("no change of the level in show RUN changes.")
    if own:
        text = f"Caught by changes: from step {own[0]['step']} on (injected: {step}), steps take "
        line = _Line(f"{text}{own[0]['ratio']:.2f}x as long, most of it in {own[0]['stage']}.")
    return [line, *_captures(spans, lambda found: found is None or found >= step)]


def _captures(spans: Spans, is_own: Callable[[int | None], bool]) -> list[_Line]:
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
        return [_missed("no capture was taken of it during the training.")]
    once = len(ranks) == len(set(ranks)) == len(spans.headers) and len(steps) == 1
    how = "one capture on each rank" if once else f"{len(ranks)} captures on ranks"
    texts = f"Caught during the training: {why[0]}.", f"Captured: {how}, {', '.join(steps)}."
    return [*map(_Line, texts)]


def _spike(facts: Mapping[str, Fact]) -> int | None:
    """Return the step that was unusual alone; None if several were."""
    return int(facts["found_step"]) if facts.get("found") == "spike" else None


def _out_of_memory(spans: Spans, step: int) -> list[_Line]:
    wanted = {"rank": 0, "step": step, "stage": "actor_update"}
    own = [
        each
        for each in diagnose(spans).problems
        if each.id == "out-of-memory"
        and all(each.by_name[name].value == value for name, value in wanted.items())
    ]
    line = _missed("findings name no rank without memory.")
    if own:
        line = _Line(f"Caught by findings: {own[0].heading} ({own[0].evidence}).")
    status = [f"rank {row['rank']} {row['status']}" for row in rows_of(rank_status(spans))]
    return [line, _Line(f"The run is readable; status: {'; '.join(status)}.")]


def _leak(spans: Spans, step: int) -> list[_Line]:
    phases = leaking_phases(spans, 0, "host")
    if not phases:
        return [_missed("memory_phases names no stage that leaks.")]
    (own, *_) = [row for row in rows_of(memory_phases(spans)) if row["phase"] == phases[0]]
    mib = float(own["added per step"] or 0) / 2**20
    text = f"Caught by memory_phases: {phases[0]} leaks {mib:.1f} MiB of host memory per step."
    return [_Line(text)]


def _throttle(spans: Spans, step: int) -> list[_Line]:
    own = [each for each in diagnose(spans).problems if each.id in ("cpu-contention", "cpu-quota")]
    waits = _waits(spans, step)
    if not own or waits is None:
        return [_missed("findings name no wait for a CPU.")]
    before, after = waits
    text = f"The training thread waited for a CPU in {before:.0%} of the time before step {step}, "
    lines = [_Line(f"Caught by findings: {own[0].heading}."), _Line(f"{text}in {after:.0%} since.")]
    return lines if after > before else [*lines, _missed("the machine was as busy before.")]


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
