"""What goes wrong in a demo's training, from the middle of the run on, where that is asked for."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from mmap import mmap
from statistics import median

import torch

from lightning_rlprof.cli.demo.options import DemoOptions
from lightning_rlprof.errors import ConfigError

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
