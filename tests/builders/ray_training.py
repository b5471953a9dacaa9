"""A training on a real Ray; `test_ray_cluster` runs it as a process of its own, with a folder.

A controller starts four workers, each under the nsys that is on the PATH, and each captures steps 1
and 3. What happened goes to ``facts.json``.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.integrations.ray import collect_reports, ray_runtime_env
from lightning_rlprof.recording.nsys import folder_of
from lightning_rlprof.recording.start import Finished, start_session
from tests.builders import small_ray


def late(finished: Finished) -> None:
    """What each worker calls at its end, a while after it was told to end."""
    time.sleep(1)
    (finished.run / f"late-{finished.rank}").touch()


# What the fake nsys of each worker does when the worker has ended.
WORKERS = {"good": "full", "early": "none", "empty": "empty", "killed": "full"}


def configured(out: Path) -> ProfilerConfig:
    controller = {"trace": "nvtx", "cuda-graph-trace": None}
    return ProfilerConfig.build(
        None,
        tools=["nsight"],
        steps=[1, 3],
        profile_save_path=str(out),
        nsight={"controller": controller, "worker": {"trace": "nvtx,osrt"}},
    )


class Worker:
    def train(self, config: ProfilerConfig, rank: int) -> tuple[int, int]:
        """Return the PIDs of this process and of the nsys around it."""
        self.config = config
        self.session = start_session(
            config, name="run", rank=rank, world_size=len(WORKERS), on_finish=late
        )
        for step in (1, 2, 3):
            self.session.begin_step(step)
            self.session.end_step()
        return os.getpid(), os.getppid()

    def report_early(self) -> None:
        """Do as an nsys that has written the first report before training is over."""
        folder = folder_of(self.config.nsight)
        assert folder is not None
        (folder / f"worker_process_{os.getpid()}.1.nsys-rep").write_text("early")

    def finish(self) -> None:
        self.session.close()


class Controller:
    def train(self, config: ProfilerConfig) -> dict[str, tuple[int, int]]:
        self.workers = {}
        for name, report in WORKERS.items():
            told = {"FAKE_NSYS_RANGES": "2", "FAKE_NSYS_REPORT": report}
            env = {"env_vars": told, **ray_runtime_env(config, "worker")}
            self.workers[name] = ray.remote(Worker).options(num_cpus=0, runtime_env=env).remote()
        running = [one.train.remote(config, rank) for rank, one in enumerate(self.workers.values())]
        pids = dict(zip(WORKERS, ray.get(running), strict=True))
        return {"controller": (os.getpid(), os.getppid()), **pids}

    def end(self, nsys_of_killed: int) -> None:
        """End the workers in order; one is killed, and its nsys with it."""
        ray.get(self.workers["early"].report_early.remote())
        os.kill(nsys_of_killed, signal.SIGKILL)
        ray.kill(self.workers.pop("killed"))
        ray.get([worker.finish.remote() for worker in self.workers.values()])
        for worker in self.workers.values():
            worker.__ray_terminate__.remote()


def lingering(pid: int) -> str:
    """Return what a process is, unless it ends within two minutes."""
    for _ in range(1200):
        if not Path(f"/proc/{pid}").exists():
            return ""
        time.sleep(0.1)
    return " ".join(Path(f"/proc/{pid}/status").read_text().split()[:20])


def run(out: Path) -> dict[str, Any]:
    config = configured(out)
    env = ray_runtime_env(config, "controller")
    controller = ray.remote(Controller).options(num_cpus=0, runtime_env=env).remote()
    pids = ray.get(controller.train.remote(config))
    ray.get(controller.end.remote(pids["killed"][1]))
    controller.__ray_terminate__.remote()
    left_running = [
        f"{name}: {status}"
        for name, both in pids.items()
        for pid in both
        if (status := lingering(pid))
    ]
    folder = folder_of(config.nsight)
    assert folder is not None
    collected = [path.name for path in collect_reports(out / "run")]
    left = sorted(path.name for path in folder.iterdir())
    worker_pids = {name: pid for name, (pid, _) in pids.items()}
    return {
        "pids": worker_pids,
        "left running": left_running,
        "collected": collected,
        "folder": str(folder),
        "left": left,
    }


def main(out: Path) -> None:
    small_ray.start()
    try:
        facts = run(out)
    finally:
        ray.shutdown()
    (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
