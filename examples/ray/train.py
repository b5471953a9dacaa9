"""Actors of one's own on Ray: `python train.py` under `rlprof run --` records them as one run."""

import time

import ray

from lightning_rlprof import stage, start_session, step


@ray.remote(num_cpus=0.1)
class Worker:
    """Generates or trains."""

    def __init__(self, role: str) -> None:
        self.role = role
        start_session(role=role)

    def work(self, name: str, seconds: float) -> None:
        """Take some time for a stage."""
        with step(), stage(name, tokens=100):
            time.sleep(seconds)


ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
rollout, actor = Worker.remote("rollout"), Worker.remote("actor")
for _ in range(4):
    ray.get(rollout.work.remote("actor_generate", 0.02))
    ray.get(actor.work.remote("actor_update", 0.01))
ray.shutdown()
