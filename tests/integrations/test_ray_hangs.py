"""Trainings on a real Ray that hang, explained while they hang and after they ended."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_rlprof.analysis.hangs import Hang, find_hang
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.live_run import hang_evidence
from tests.places import ROOT

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs pip install lightning-rlprof[ray]"),
    pytest.mark.skipif(sys.platform != "linux", reason="states of processes are of Linux' /proc"),
]
PROGRAM = ROOT / "tests" / "builders" / "ray_hanging.py"
PATIENCE_S = 240


class Training:
    """A driver with its actors, which hangs in one case."""

    def __init__(self, folder: Path, temporary: str, case: str) -> None:
        self.run, self.output = folder / "run", folder / "output.txt"
        quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with self.output.open("wb") as output:
            self.driver = subprocess.Popen(
                [sys.executable, str(PROGRAM), case, str(folder)],
                stdout=output,
                stderr=output,
                env={**os.environ, **quiet, "PYTHONPATH": path, "RAY_TEMPORARY": temporary},
            )

    def hang(self) -> Hang:
        return find_hang(hang_evidence(self.run), time.time_ns())

    def wait_for(self, known: Callable[[dict[str, str]], object]) -> Hang:
        """Look until the states of the roles are as wanted."""
        end, states = time.monotonic() + PATIENCE_S, {}
        while time.monotonic() < end and self.driver.poll() is None:
            with suppress(TraceError):  # the ranks have not started
                found = self.hang()
                states = {each.role: each.state for each in found.ranks}
                if known(states):
                    return found
            time.sleep(0.1)
        raise AssertionError(f"{states}\n{self.output.read_text()}")

    def end(self) -> None:
        """End as Ray does at a SIGTERM: its processes end, too."""
        self.driver.send_signal(signal.SIGTERM)
        try:
            self.driver.wait(PATIENCE_S)
        finally:
            self.driver.kill()
            self.driver.wait()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[[str], Training]]:
    started: list[Training] = []
    # A short path: Ray puts sockets below it, whose names may have 107 bytes.
    temporary = tempfile.mkdtemp(prefix="rl")

    def start(case: str) -> Training:
        started.append(Training(tmp_path, temporary, case))
        return started[0]

    yield start
    for each in started:
        each.end()
    shutil.rmtree(temporary, ignore_errors=True)


def test_an_actor_that_is_dead_is_named_and_what_driver_and_trainer_wait_in(training):
    job = training("dead")
    waiting = {"controller": "waits", "rollout": "killed", "trainer": "waits"}

    hang = job.wait_for(lambda states: states == waiting)

    (cause,) = hang.causes
    assert hang.headline.startswith(f"Rank {cause.rank} (rollout) was killed or crashed: process ")
    assert hang.headline.endswith(" wait in Ray.")
    at = {each.role: each.at.function for each in hang.ranks if each.at is not None}
    assert at == {"controller": "wait_for_training", "trainer": "next_samples"}


def test_an_actor_in_an_endless_reward_is_named_and_not_who_waits_for_it_nor_who_is_idle(training):
    job = training("loop")
    states = {"controller": "waits", "rollout": "hangs", "trainer": "waits", "critic": "idle"}

    hang = job.wait_for(lambda found: found == states)

    (cause,) = hang.causes
    assert (cause.role, cause.at.function) == ("rollout", "score_for_ever")
    assert "(rollout) is in compute_reward, at builders/ray_hanging.py:" in hang.headline
    assert hang.headline.endswith(" wait in Ray.")
