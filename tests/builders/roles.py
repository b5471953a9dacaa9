"""One of four processes that play a job by a script of sleeps over gloo; not a test.

Usage: ``python -m tests.builders.roles FOLDER RANK HOW``; ``HOW`` is ``whole`` or ``dies``. Each
process writes what it measured of itself, a JSON line per step, beside the run: of every part the
nanoseconds inside of its marker and around it, as the scheduler may stop a process between the two.
"""

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import annotate, stage
from lightning_rlprof.recording.start import start_session

STEPS = 3
DIES = 2
"""The rank that is killed in its last part of the second step, where that is asked for."""


class Part(NamedTuple):
    """A stage or region that sleeps, and the label that it should have."""

    name: str
    is_stage: bool
    ms: int
    label: str


SCRIPT = {
    "actor": (
        Part("actor_compute_log_prob", True, 90, "compute"),
        Part("sleep", True, 50, "offload/onload"),
    ),
    "rollout": (
        Part("actor_generate", True, 80, "rollout"),
        Part("queue_put", False, 55, "backpressure"),
        Part("weight_sync", True, 60, "weight sync"),
    ),
    "reward": (
        Part("wait_for_samples", False, 65, "data wait"),
        Part("compute_reward", True, 75, "reward/tool/env"),
    ),
    "trainer": (
        Part("data_fetch", False, 50, "data wait"),
        Part("actor_update", True, 100, "compute"),
        Part("save_checkpoint", False, 70, "checkpoint/eval"),
    ),
}


def measure(marker: AbstractContextManager[object], work: Callable[[], object]) -> tuple[int, int]:
    """Work inside of a marker; return how long that took inside of it, and around it."""
    around = time.perf_counter_ns()
    with marker:
        inside = time.perf_counter_ns()
        work()
        inside = time.perf_counter_ns() - inside
    return inside, time.perf_counter_ns() - around


def play(part: Part) -> tuple[int, int]:
    """Sleep as long as the script says, inside of a marker."""
    marker = stage(part.name) if part.is_stage else annotate(part.name)
    return measure(marker, lambda: time.sleep(part.ms / 1e3))


def gather() -> tuple[int, int]:
    """Meet the others in a collective, which ends for all at once."""
    one = torch.ones(1)
    return measure(annotate("all_reduce"), lambda: dist.all_reduce(one))


def main(folder: Path, rank: int, how: str) -> None:
    """Play one role for some steps."""
    role = [*SCRIPT][rank]
    gc.disable()  # a collection would be a label of its own inside of a part
    # Nothing but steps writes: what is in the file of a process that was killed is then known.
    more = {"profile_save_path": str(folder / "runs"), "background_metrics": False}
    config = ProfilerConfig.build(role=role, **more)
    together = gather if how == "whole" else lambda: (0, 0)
    file = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=len(SCRIPT))
    dist.barrier()
    with (
        (folder / f"measured-{rank}.jsonl").open("w") as measured,
        start_session(config, name="run", rank=rank, world_size=len(SCRIPT)) as session,
    ):
        for step in range(1, STEPS + 1):
            session.begin_step(step)
            took = {part.label: play(part) for part in SCRIPT[role][:-1]}
            if how == "dies" and rank == DIES and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            took |= {part.label: play(part) for part in SCRIPT[role][-1:]}
            took["all_reduce"] = together()
            session.end_step()
            measured.write(json.dumps(took) + "\n")
            measured.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
