"""`run_demo`: warm start, GRPO under `ProfilerCallback`, and held-out accuracy before and after."""

import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from lightning_rlprof.cli.demo.grpo import Grpo, exact_match, warm_start
from lightning_rlprof.cli.demo.options import DemoOptions
from lightning_rlprof.cli.demo.policy import Characters, Policy, SmallPolicy, SpellBackward, Task
from lightning_rlprof.records.hang_reports import read_reports

# Both names are needed: the one imported last owns the logger of messages that only rank 0 sends.
_LOGGERS = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
_ADVICE = (
    ".*does not have many workers",  # The data loader needs no workers for eight numbers a step.
    ".*GPU available but not used",
    ".*srun.*",
    ".*LeafSpec.*is deprecated",  # Lightning itself uses LeafSpec.
)
TIMEOUT_S = 3.0
"""The ``hang_timeout`` of a demo that hangs, whose steps take less than a second."""

# A hang may raise any exception, since its ranks are killed. The Trainer passes OutOfMemoryError on
# unchanged.
_RAISED: dict[str | None, tuple[type[Exception], ...]] = {
    "hang": (Exception,),
    "oom": (torch.OutOfMemoryError,),
}
_LOOK_S = 0.1

Progress = Callable[[int, int, float], None]
"""Called after each step with its number, the number of steps and the step's mean reward."""


@dataclass(frozen=True)
class DemoResult:
    """What `run_demo` measured.

    Attributes:
        exact_before: Share of held-out prompts answered right after the warm start.
        exact_after: The same after GRPO.
        rewards: Mean reward of each step, over all ranks.
        seconds: Wall time of everything: task, warm start, training, both evaluations.
        parameters: Size of the policy.
        run: The run directory, None if the training left none.
    """

    exact_before: float
    exact_after: float
    rewards: tuple[float, ...]
    seconds: float
    parameters: int
    run: Path | None


def run_demo(
    options: DemoOptions,
    callbacks: Sequence[pl.Callback] = (),
    progress: Progress = lambda *_: None,
    given: tuple[Policy, Task] | None = None,
) -> DemoResult:
    """Train a policy by GRPO and say how much better it answers prompts that it never saw.

    Lightning is quiet from then on, and torch computes on the recipe's threads. With several ranks
    the callbacks are pickled and run in the ranks' processes, and the script that calls this needs
    ``if __name__ == "__main__":``. ``progress`` is called here, on a thread. A
    ``given`` policy and its task are trained instead of those of the options. A fault may end the
    training early: one that hangs is ended when every rank has reported it.
    """
    # This import comes first: it imports the other Lightning, which resets the loggers, and it may
    # refuse the path.
    from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback

    more: dict[str, Any] = {"capture_anomalies": True} if options.inject else {}
    if options.inject == "hang":
        more = {"hang_timeout": TIMEOUT_S}
    profiler = ProfilerCallback(profile_save_path=str(options.save_path), summary=False, **more)
    raised = suppress(*_RAISED.get(options.inject, ()))
    be_quiet(options.recipe.threads)
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        policy, task = given or policy_and_task(options)
        warmup = 0 if options.inject else task.warmup_steps
        warmup = warmup if options.warmup_steps is None else options.warmup_steps
        warm_start(policy, task, warmup, options.seed, options.recipe)
        before = exact_match(policy, task)
        model = Grpo(policy, task, options)
        known = runs(options)
        with _shown(model.rewards, progress), no_rank_left(), raised, _ended(options, known):
            trainer(options, [profiler, *callbacks]).fit(model)
        after = exact_match(model.policy, task)
    return DemoResult(
        exact_before=before,
        exact_after=after,
        rewards=tuple(model.rewards.tolist()),
        seconds=time.perf_counter() - start,
        parameters=sum(weights.numel() for weights in policy.parameters()),
        # A callback in another process cannot report its run, so the new directory is taken.
        run=max(runs(options) - known, default=None),
    )


def policy_and_task(options: DemoOptions) -> tuple[Policy, Task]:
    """Return what the options train, before the warm start."""
    task = SpellBackward(options.seed, options.recipe.held_out)
    assert isinstance(task.tokenizer, Characters)
    return SmallPolicy(task.tokenizer.vocabulary, task.prompt_width + task.answer_width), task


def runs(options: DemoOptions) -> set[Path]:
    """Return the run directories that are there."""
    return {file.parent for file in options.save_path.glob("*/rank-*.jsonl")}


def be_quiet(threads: int = 1) -> None:
    """Let Lightning log errors only, and torch compute on that many threads, in this process."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in _ADVICE:
        warnings.filterwarnings("ignore", message=message)
    torch.set_num_threads(threads)


class _QuietDDP(DDPStrategy):
    """DDP over gloo in spawned processes, each as quiet and as single-threaded as the parent.

    Spawned, not forked: autograd refuses to run in a fork of a process that has used it beside a
    GPU, and the warm start uses it.
    """

    def __init__(self) -> None:
        super().__init__(start_method="spawn", process_group_backend="gloo")

    def setup_environment(self) -> None:
        be_quiet()
        super().setup_environment()


def trainer(options: DemoOptions, callbacks: Sequence[pl.Callback]) -> pl.Trainer:
    """Return what trains a `Grpo` on the CPU, on one rank or on several."""
    return pl.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=_QuietDDP() if options.ranks > 1 else "auto",
        plugins=LightningEnvironment(),  # A demo must not join the cluster job around it.
        max_epochs=1,
        callbacks=[*callbacks],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@contextmanager
def _looking(look: Callable[[], None]) -> Iterator[None]:
    """Look ten times a second while the block runs, on a thread, and once at its end."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_S):
            look()
        look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _shown(rewards: Tensor, progress: Progress) -> AbstractContextManager[None]:
    """Report the rewards that appear while the block runs, in whichever process."""
    step = 0

    def look() -> None:
        nonlocal step
        while step < len(rewards) and not math.isnan(reward := float(rewards[step])):
            step += 1
            progress(step, len(rewards), reward)

    return _looking(look)


def _ended(options: DemoOptions, known: set[Path]) -> AbstractContextManager[None]:
    """Kill the ranks that the block has started, as soon as each has reported a hang."""

    def look() -> None:
        found = max(runs(options) - known, default=None)
        if found and all(read_reports(found, rank) for rank in range(options.ranks)):
            for process in active_children():
                process.kill()

    return _looking(look) if options.inject == "hang" else nullcontext()


@contextmanager
def no_rank_left() -> Iterator[None]:
    """Kill the processes that the block has started: after Ctrl-C they may wait for one another."""
    others = {*active_children()}
    try:
        yield
    finally:
        for rank in {*active_children()} - others:
            rank.kill()
