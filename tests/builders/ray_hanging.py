"""A training on a real Ray that hangs: ``python ray_hanging.py CASE FOLDER``.

A driver waits for a trainer, the trainer waits for what a rollout actor puts into a queue. All
record into one run in the folder, without being told their ranks. In its third step the rollout
actor is killed (``dead``), or stays in its reward (``loop``); then a critic is idle, too.
"""

import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.queue import Queue

from lightning_rlprof import stage, start_session, step
from tests.builders import small_ray

HANGS_IN = 3


def record(folder: Path, role: str) -> None:
    # On a busy machine an actor may start 20 s after another; before its first step has ended, a
    # rank may be quiet for six times the timeout.
    start_session(
        profile_save_path=str(folder), name="run", role=role, hang_timeout=5, summary=False
    )


class Rollout:
    def __init__(self, case: str, folder: Path, queue: Any) -> None:
        self.case, self.queue = case, queue
        record(folder, "rollout")

    def generate(self, number: int) -> None:
        with step(), stage("compute_reward"):
            if number == HANGS_IN and self.case == "loop":
                score_for_ever()
            self.queue.put(number)


def score_for_ever() -> None:
    while True:
        time.sleep(0.01)


class Critic:
    def __init__(self, folder: Path) -> None:
        record(folder, "critic")

    def update(self) -> None:
        with step(), stage("critic_update"):
            pass


class Trainer:
    def __init__(self, folder: Path, queue: Any) -> None:
        self.queue = queue
        record(folder, "trainer")

    def train(self) -> None:
        with step(), stage("data_fetch"):
            next_samples(self.queue)


def next_samples(queue: Any) -> object:
    return queue.get()


def wait_for_training(result: Any) -> None:
    ray.get(result)


def main(case: str, folder: Path) -> None:
    small_ray.start()
    record(folder, "controller")
    free: dict[str, Any] = {"num_cpus": 0}
    queue = Queue(actor_options=free)
    rollout: Any = ray.remote(Rollout).options(**free).remote(case, folder, queue)
    trainer: Any = ray.remote(Trainer).options(**free).remote(folder, queue)
    critic: Any = None
    if case == "loop":
        critic = ray.remote(Critic).options(**free).remote(folder)
        ray.get(critic.update.remote())
    for number in range(1, HANGS_IN + 1):
        with step(), stage("fit"):
            if number == HANGS_IN and case == "dead":
                ray.kill(rollout)
            else:
                rollout.generate.remote(number)
            wait_for_training(trainer.train.remote())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
