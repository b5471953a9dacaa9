"""What rlprof says of programs that know nothing of it: ``python benchmarks/programs.py``.

Each program of `training_programs` runs as it is, under `rlprof run`, and as it is again, which is
the A/A control. It prints what its own clock measured: steps, the share of the rollout, the median
step, a hash of its last weights. Reported are the steps and the rollout as rlprof saw them beside
those, what is untraced, what a step costs more, and the first finding.

It must hold that steps differ by at most one, rollouts by at most 5 points, and weights not at all.
Overhead is CPU time, which other programs disturb less; it has no bound here, so read it next to
the control.

Programs whose packages are missing are left out, with the reason. All of them need::

    pip install "torch==2.13.0" gymnasium stable-baselines3 tianshou torchrl accelerate \
        transformers lightning "ray[rllib]"
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from _measure import Bound, Report, options, verdict

from lightning_rlprof.report.summary import Summary, summary
from lightning_rlprof.run import load

__all__ = ["main"]

FOLDER = Path(__file__).parent / "training_programs"
RLPROF = (sys.executable, "-m", "lightning_rlprof", "run", "--")
ROLLOUT = ("actor_generate",)


class Program(NamedTuple):
    """A program of the table.

    Attributes:
        command: File and arguments.
        package: Whose version is named; it must be installed.
        processes: With how many it runs, each a run of its own.
    """

    command: str
    package: str
    processes: tuple[int, ...] = (1,)


PROGRAMS = {
    "Stable-Baselines3 PPO": Program("sb3.py PPO", "stable-baselines3"),
    "Stable-Baselines3 A2C": Program("sb3.py A2C", "stable-baselines3"),
    "Stable-Baselines3 DQN": Program("sb3.py DQN", "stable-baselines3"),
    "Stable-Baselines3 SAC": Program("sb3.py SAC", "stable-baselines3"),
    "Tianshou DQN": Program("tianshou_loop.py DQN", "tianshou"),
    "Tianshou PPO": Program("tianshou_loop.py PPO", "tianshou"),
    "TorchRL DQN": Program("torchrl_loop.py DQN", "torchrl"),
    "TorchRL PPO": Program("torchrl_loop.py PPO", "torchrl"),
    "RLlib PPO": Program("rllib_ppo.py 0", "ray"),
    "RLlib PPO, one env runner": Program("rllib_ppo.py 1", "ray"),
    "PPO in one file, like CleanRL's": Program("ppo.py", "gymnasium", (1, 2)),
    "PPO in one file, KL stop": Program("ppo.py kl", "gymnasium"),
    "DQN in one file, like CleanRL's": Program("q_learning.py DQN", "gymnasium"),
    "SAC in one file, like CleanRL's": Program("q_learning.py SAC", "gymnasium"),
    "Fabric PPO, like Lightning's": Program("fabric_ppo.py", "lightning", (1, 2)),
    "REINFORCE with generate": Program("reinforce_llm.py", "transformers"),
    "GPT in one file, like nanoGPT": Program("gpt.py", "torch", (1, 2)),
    "accelerate, like its nlp_example": Program("accelerate_nlp.py", "accelerate", (1, 2)),
    "DistributedDataParallel": Program("ddp.py", "torch", (1, 2)),
    "GAN, two optimizers": Program("gan.py", "torch"),
}


class Found(NamedTuple):
    """What runs of a program showed.

    Attributes:
        truth: What each rank says of itself, of the run under rlprof.
        seen: What rlprof says.
        is_same: Whether the weights are those of the plain runs.
        costs: Milliseconds of CPU time of a step above the mean of the plain ones, of each round.
        control: Of the second plain run above the first, likewise.
        step_ms: Median plain step.
    """

    truth: list[dict[str, Any]]
    seen: Summary | None
    is_same: bool
    costs: list[float]
    control: list[float]
    step_ms: float


def run(program: Program, processes: int, before: tuple[str, ...], folder: str) -> list[Any]:
    """Run a program; return what its ranks print of themselves."""
    launch: list[str] = []
    if processes > 1:
        launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
        launch += ["--master-port=29533"]
    file, *arguments = program.command.split()
    command = [*before, sys.executable, *launch, str(FOLDER / file), *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "RLPROF": "0"}
    if before:
        environ.pop("RLPROF")
    done = subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    told = re.findall(r"TRUTH (\{[^}]*\})", done.stdout)  # Two ranks may share a line.
    if done.returncode or len(told) != processes:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-3000:]}")
    return sorted(map(json.loads, told), key=lambda each: each["rank"])


def measure(program: Program, processes: int, rounds: int) -> Found:
    """Run a program plain, under rlprof, and plain again."""
    plains: list[Any] = []
    costs, control, is_same = [], [], True
    truth: list[Any] = []
    seen = None
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            first = run(program, processes, (), folder)
            truth = run(program, processes, RLPROF, folder)
            again = run(program, processes, (), folder)
            runs = list(Path(folder, "profiler_data").glob("2*"))
            seen = summary(load(runs[0])) if len(runs) == 1 else None
        hashes = [[each["hash"] for each in run] for run in (first, truth, again)]
        is_same = is_same and hashes[0] == hashes[1] == hashes[2]
        plain, recorded, plain_again = (run[0]["cpu_ms"] for run in (first, truth, again))
        costs.append(recorded - (plain + plain_again) / 2)
        control.append(plain_again - plain)
        plains += [plain, plain_again]
    return Found(truth, seen, is_same, costs, control, statistics.median(plains))


def row_of(name: str, version: str, processes: int, found: Found) -> list[object]:
    """Return the row of a program."""
    truth, seen = found.truth[0], found.seen
    cost, control = (statistics.median(each) for each in (found.costs, found.control))
    most = max(abs(each) for each in found.control)
    overhead = f"{cost:+.2f} ms (A/A {control:+.2f}, up to {most:.2f}) of {found.step_ms:.1f}"
    row: list[object] = [name, version, processes]
    if seen is None:
        return [*row, f"none ({len(truth['steps_s'])})", "", "", overhead, ""]
    true = true_share(truth, seen)
    share = f"{_share(seen, ROLLOUT):.0%} ({true:.0%})" if true else "–"
    first = seen.first[0].title if seen.first else "none"
    untraced = f"{_share(seen, ('untraced',)):.1%}"
    return [*row, f"{seen.steps} ({len(truth['steps_s'])})", share, untraced, overhead, first]


def bounds_of(name: str, found: Found) -> list[Bound]:
    """Return what must hold of a program."""
    truth, seen = found.truth[0], found.seen
    bounds = [Bound(f"{name}: weights that differ", float(not found.is_same), 0, "")]
    steps = abs((seen.steps if seen else 0) - len(truth["steps_s"]))
    bounds.append(Bound(f"{name}: steps off", steps, 1, ""))
    if seen is not None:
        off = 100 * abs(_share(seen, ROLLOUT) - true_share(truth, seen))
        bounds.append(Bound(f"{name}: rollout off", off, 5, "points"))
    return bounds


def true_share(truth: dict[str, Any], seen: Summary) -> float:
    """Return the share of the rollout by the program's own clock, in the steps that count.

    In the first step, the clock of the program also counts the start of the recording.
    """
    warm_up = max(1, seen.left_out.get("warm-up", 0))
    return float(sum(truth["rollouts_s"][warm_up:]) / sum(truth["steps_s"][warm_up:]))


def _share(seen: Summary, names: tuple[str, ...]) -> float:
    return sum(part.share for part in seen.parts if part.name in names)


def main(chosen: argparse.Namespace) -> int:
    """Measure and print; return the exit status."""
    rows: list[list[object]] = []
    bounds: list[Bound] = []
    controls: list[float] = []
    for name, program in PROGRAMS.items():
        if chosen.only not in name:
            continue
        try:
            version = f"{program.package} {metadata.version(program.package)}"
        except metadata.PackageNotFoundError:
            rows.append([name, f"{program.package} is not installed", *[None] * 6])
            continue
        for processes in program.processes:
            try:
                found = measure(program, processes, 1 if chosen.quick else chosen.rounds)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(error, file=sys.stderr)
                rows.append([name, version, processes, "it failed", *[None] * 4])
                continue
            rows.append(row_of(name, version, processes, found))
            print(*rows[-1], sep=" | ", file=sys.stderr)
            bounds += bounds_of(f"{name}, {processes} processes", found)
            controls.append(statistics.median(found.control) / found.step_ms)
    columns = ["program", "version", "processes", "steps (true)", "rollout (true)"]
    columns += ["untraced", "overhead per step, CPU", "first finding"]
    text = f"two plain runs differ by {100 * statistics.median(map(abs, controls)):.1f}% of a step"
    return verdict(Report("programs", columns, rows, bounds, text, quiet=True), chosen)


def _chosen() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="programs with this in the name")
    parser.add_argument("--rounds", type=int, default=3)
    return options(parser)


if __name__ == "__main__":
    sys.exit(main(_chosen()))
