"""What the door to PyTorch costs a step of 5 ms: ``python benchmarks/optimizer_step.py``.

A loop without a framework trains a small network of 17 modules under `rlprof run`. Blocks of ten
steps run in turn in that one process: with torch's own functions, with the door's, and with torch's
again, which is the A/A control. A block's first step is not timed. Reported are the medians of the
rounds.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

import torch
from _measure import Bound, Report, options, quiet_enough, verdict
from torch import nn
from torch.optim import optimizer as torch_optimizer

__all__ = ["main", "measure"]

SHARE = 0.02
ROUNDS, BLOCK, WIDTH, BATCH = 300, 10, 256, 90
QUIET_MS = 0.05
TRIES = 3
_INSIDE = "RLPROF_BENCHMARK_ROUNDS"


class _Door:
    """Puts the door's functions and torch's own in the place of each other.

    Raises:
        RuntimeError: This process does not record.
    """

    def __init__(self) -> None:
        self._own = nn.Module.__call__, torch.autograd.backward
        self._hooks = torch_optimizer._global_optimizer_post_hooks  # Those of its session, too.
        self._kept = dict(self._hooks)
        if not self._kept or not all(hasattr(each, "__wrapped__") for each in self._own):
            raise RuntimeError("the door to PyTorch is not in place; run it under `rlprof run`")

    def put(self, *, present: bool) -> None:
        call, backward = self._own
        nn.Module.__call__ = call if present else call.__wrapped__  # type: ignore[attr-defined, method-assign]
        torch.autograd.backward = backward if present else backward.__wrapped__  # type: ignore[attr-defined]
        self._hooks.clear()
        if present:
            self._hooks.update(self._kept)


def measure(rounds: int) -> list[tuple[float, float, float]]:
    """Return per round how long a step takes plain, with the door, and plain again; in ms."""
    torch.manual_seed(0)
    layers = [each for _ in range(8) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    network = nn.Sequential(*layers, nn.Linear(WIDTH, 8))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randint(0, 8, (BATCH,))

    def step() -> None:
        nn.functional.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    def block(*, present: bool) -> float:
        door.put(present=present)
        step()
        start = time.perf_counter()
        for _ in range(BLOCK):
            step()
        return (time.perf_counter() - start) / BLOCK * 1e3

    for _ in range(2 * BLOCK):
        step()
    door = _Door()
    found = [tuple(block(present=at == 1) for at in range(3)) for _ in range(rounds)]
    door.put(present=True)
    return found  # type: ignore[return-value]


def _recorded(rounds: int) -> list[tuple[float, float, float]]:
    """Measure in a process that records."""
    command = [sys.executable, "-m", "lightning_rlprof", "run", "--", sys.executable, __file__]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, _INSIDE: str(rounds)}, text=True,
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
    lines = (line.split() for line in done.stdout.splitlines() if line.startswith("round "))
    return [(float(a), float(b), float(c)) for _, a, b, c in lines]


def main(chosen: argparse.Namespace) -> int:
    """Measure and print; return the exit status."""

    def control(found: list[tuple[float, float, float]]) -> float:
        return median(again - plain for plain, _, again in found)

    found = quiet_enough(
        lambda: _recorded(2 if chosen.quick else ROUNDS),
        lambda rows: chosen.quick or abs(control(rows)) <= QUIET_MS,
        TRIES,
    )
    plain = median(each for first, _, last in found for each in (first, last))
    door = median(own - (first + last) / 2 for first, own, last in found)
    again = control(found)
    rows = [
        [name, round(cost, 3), round(100 * cost / plain, 2)]
        for name, cost in (("the door", door), ("plain again (A/A)", again))
    ]
    bound = Bound("the door's share of a step", 100 * door / plain, 100 * SHARE, "%")
    fact = f"A plain step takes {plain:.2f} ms; {len(found)} rounds of {BLOCK} steps."
    report = Report(
        "optimizer_step", ["against plain", "ms a step", "% of step"], rows, [bound],
        f"{again:+.3f} ms", abs(again) <= QUIET_MS, [fact],
    )  # fmt: skip
    return verdict(report, chosen)


if __name__ == "__main__":
    if _INSIDE in os.environ:
        for each in measure(int(os.environ[_INSIDE])):
            print("round", *each)
        sys.exit()
    sys.exit(main(options((__doc__ or "").partition("\n")[0])))
