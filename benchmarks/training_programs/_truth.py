"""What a program measures of itself: steps, seconds of rollout, a hash of its last weights.

It shares nothing with rlprof: `time.perf_counter` around what the program calls a rollout.
"""

import hashlib
import json
import os
import resource
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

SKIPPED = 3
"""First steps that are left out of the median step."""


class Truth:
    """Times of a loop: it begins when this is made, and ends with the last step."""

    def __init__(self) -> None:
        self.rollouts_s = [0.0]
        self.ends = [time.perf_counter()]
        self.cpu = [_cpu_s()]

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Count the time inside as rollout."""
        begin = time.perf_counter()
        yield
        self.rollouts_s[-1] += time.perf_counter() - begin

    def step(self) -> None:
        """End a step."""
        self.ends.append(time.perf_counter())
        self.cpu.append(_cpu_s())
        self.rollouts_s.append(0.0)

    def tell(self, parameters: Iterable[Any]) -> None:
        """Print everything as one line of JSON."""
        digest = hashlib.sha256()
        for each in parameters:
            digest.update(each.detach().cpu().numpy().tobytes())
        found = {
            "rank": int(os.environ.get("RANK", "0")),
            "hash": digest.hexdigest()[:16],
            "cpu_ms": 1e3 * statistics.median(b - a for a, b in pairwise(self.cpu[SKIPPED:])),
            "steps_s": [b - a for a, b in pairwise(self.ends)],
            "rollouts_s": self.rollouts_s[:-1],
        }
        print(f"TRUTH {json.dumps(found)}\n", end="", flush=True)  # Ranks print at the same time.


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
