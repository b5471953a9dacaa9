"""One of four processes that play a pipeline of sleeps over gloo, changed or not; not a test.

Usage: ``python -m tests.builders.pipeline FOLDER RANK``. Every condition is a run of its own, all
of them in turns, so that a busy machine hits them alike.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import annotate, count, stage
from lightning_rlprof.recording.start import start_session

STEPS, ROUNDS = 6, 2
ROLES = ("rollout", "reward", "trainer", "trainer")
BASE = {"actor_generate": 80, "compute_reward": 50, "weight_sync": 40, "actor_update": 1.2}
"""Milliseconds, and for the update those per token."""

CONDITIONS = {
    "as it is": BASE,
    "actor_generate 2x faster": BASE | {"actor_generate": 40},
    "compute_reward 2x faster": BASE | {"compute_reward": 25},
    "weight_sync removed": BASE | {"weight_sync": 0},
    "no straggler": BASE | {"slow": 1.0},
    "balanced load": BASE | {"even": True},
}
SLOW = 1.4
"""How many times as long the last trainer takes, but where that is changed."""


def tokens(rank: int, step: int, *, even: bool) -> int:
    """Return what a trainer has to do: 100 in turns with 40 and back, or evenly 70."""
    return 70 if even else (40, 100)[(rank + step) % 2]


def sleep(name: str, ms: float) -> None:
    """Play a stage."""
    with stage(name):
        time.sleep(ms / 1e3)


def meet() -> None:
    """Hand over: all wait for all."""
    with annotate("all_reduce"):
        dist.all_reduce(torch.ones(1))


def play(rank: int, step: int, script: dict[str, float]) -> None:
    """Play one step: rollout, reward, training, and weights to the rollout."""
    role = ROLES[rank]
    if role == "rollout":
        sleep("actor_generate", script["actor_generate"])
    meet()
    if role == "reward":
        sleep("compute_reward", script["compute_reward"])
    meet()
    if role == "trainer":
        work = tokens(rank, step, even=bool(script.get("even")))
        slower = script.get("slow", SLOW) if rank == len(ROLES) - 1 else 1.0
        with stage("actor_update"):
            count(tokens=work)
            time.sleep(work * script["actor_update"] * slower / 1e3)
    meet()
    if role in ("rollout", "trainer") and script["weight_sync"]:
        sleep("weight_sync", script["weight_sync"])
    meet()


def main(folder: Path, rank: int) -> None:
    """Play all conditions in turns."""
    world = len(ROLES)
    config = ProfilerConfig.build(profile_save_path=str(folder / "runs"), role=ROLES[rank])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    for turn in range(ROUNDS):
        for number, script in enumerate(CONDITIONS.values()):
            dist.barrier()
            name = f"{number}-{turn}"
            with start_session(config, name=name, rank=rank, world_size=world) as session:
                for step in range(1, STEPS + 1):
                    session.begin_step(step)
                    play(rank, step, script)
                    session.end_step()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
