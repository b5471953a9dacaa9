"""What goes wrong in a demo's training where that is asked for."""

import os
import time
from mmap import mmap
from statistics import median

import torch

from lightning_rlprof.cli.demo.options import DemoOptions

HANGS_IN = 4
"""The batch in which the reward hangs."""

SLOW_STEP, SHIFT = 5.0, 2.0
"""How many times as long the slow step takes, and the stage that becomes slower."""

LEAKED_BYTES = 4 * 2**20
"""What each step keeps of a leak."""


class Faults:
    """Lets one fault happen in a training; without one, nothing.

    Args:
        options: What is injected, `DemoOptions.inject`.
    """

    def __init__(self, options: DemoOptions) -> None:
        self._inject, self._middle = options.inject, options.total_steps // 2
        self._slow_step, self._shift = SLOW_STEP, SHIFT
        self._times: list[float] = []
        self._generated: list[float] = []
        self._kept: list[mmap] = []

    def in_reward(self, batch: int, rank: int) -> None:
        """Hang, stall or leak in the reward."""
        self._times.append(time.perf_counter())
        if self._inject == "hang" and batch == HANGS_IN:
            wait_for_closing_bracket("(" * rank)
        elif self._inject == "slow-step" and batch == self._middle:
            wait_for_reward_server((self._slow_step - 1) * self._usual())
        elif self._inject == "leak":
            # A leak on the heap might reuse freed memory, and a later stage would grow instead.
            self._kept.append(mmap(-1, LEAKED_BYTES))
            self._kept[-1].write(os.urandom(LEAKED_BYTES))

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

    def _usual(self) -> float:
        """Return the usual time of a step, in seconds."""
        pairs = zip(self._times, self._times[1:], strict=False)
        return median(later - earlier for earlier, later in pairs)


def wait_for_closing_bracket(answer: str) -> None:
    """Parse an answer with the bug of many rewards: without its closing bracket it never ends."""
    depth = answer.count("(")
    while depth > 0:
        depth -= answer.count(")")


def wait_for_reward_server(seconds: float) -> None:
    """Wait, as for a server that all ranks ask for their rewards."""
    time.sleep(seconds)


def fault_step(options: DemoOptions) -> int:
    """Return the step in which the fault happens, or begins."""
    return options.total_steps // 2 + 1


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
    }[options.inject or ""]
