"""`run_demo`: warm start, GRPO under `ProfilerCallback`, and held-out accuracy before and after."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment

from lightning_rlprof.cli.demo.grpo import Grpo, GrpoSettings, exact_match, warm_start
from lightning_rlprof.cli.demo.lightning_setup import QuietDDP, one_thread, quiet
from lightning_rlprof.cli.demo.policy import Policy
from lightning_rlprof.cli.demo.task import make_task
from lightning_rlprof.errors import ConfigError

Progress = Callable[[int, int, float], None]
"""Called after each step with its number, the number of steps and the step's mean reward."""

Report = Callable[[int, float], None]

_MOST_RANKS = 64


@dataclass(frozen=True)
class DemoOptions:
    """What `run_demo` trains.

    Attributes:
        task: One of `demo.task.TASKS`.
        steps: RL steps.
        kv_cache: Generate with a cache of keys and values; without it, generation dominates a step.
        ranks: Processes; more than one train together by DDP over gloo.
        save_path: Where the run directory goes; None records nothing.
        seed: Chooses weights, prompts and samples; on one rank it decides the whole result.
        warmup_steps: Steps of the supervised warm start; None takes the task's own number.
        slow_rank: A rank that is made slow, to see it found; None for none.
        slow_by: How much longer it takes for its own stages, those without waiting for others.

    Raises:
        ConfigError: A number is too small or too large, or `slow_rank` is not one of the ranks.
    """

    task: str = "spell_backward"
    steps: int = 300
    kv_cache: bool = False
    ranks: int = 1
    save_path: Path | None = None
    seed: int = 0
    warmup_steps: int | None = None
    slow_rank: int | None = None
    slow_by: float = 0.15

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        for name, least in (("steps", 1), ("ranks", 1), ("seed", 0), ("warmup_steps", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} is too small; give a number from {least} up")
        if self.ranks > _MOST_RANKS:
            text = f"ranks={self.ranks} is too large: each is a process here"
            raise ConfigError(f"{text}; give a number up to {_MOST_RANKS}")
        if self.slow_rank is not None and not 0 <= self.slow_rank < self.ranks:
            have = f"0 to {self.ranks - 1}"
            raise ConfigError(f"slow_rank={self.slow_rank} is not trained here; ranks are {have}")
        if not 0 < self.slow_by <= 10:
            raise ConfigError(f"slow_by={self.slow_by} is not allowed; 0.15 is 15 %, 10 the most")


@dataclass(frozen=True)
class DemoResult:
    """What `run_demo` found out; nothing in it is known before the training.

    Attributes:
        exact_before: Share of held-out prompts answered right after the warm start.
        exact_after: The same after GRPO.
        rewards: Mean reward of each step, over all ranks.
        steps: RL steps made.
        seconds: Wall time of everything: task, warm start, training, both evaluations.
        parameters: Size of the policy.
        run: The run directory, if one was asked for.
    """

    exact_before: float
    exact_after: float
    rewards: tuple[float, ...]
    steps: int
    seconds: float
    parameters: int
    run: Path | None


def run_demo(
    options: DemoOptions,
    callbacks: Sequence[pl.Callback] = (),
    progress: Progress | None = None,
) -> DemoResult:
    """Train a small policy by GRPO and say how much better it answers prompts that it never saw.

    Torch computes on one thread meanwhile. With several ranks the callbacks are pickled and run in
    the ranks' processes, ``progress`` is called here, on a thread, and the script that calls this
    needs ``if __name__ == "__main__":``.

    Raises:
        ConfigError: The task is unknown.
        RecorderError: reasoning-gym is not installed.

    Example::

        >>> result = run_demo(DemoOptions(steps=2, warmup_steps=2))
        >>> len(result.rewards)
        2
    """
    # First: it imports the other Lightning, which resets the loggers, and may refuse the path.
    callbacks = [*_recording(options.save_path), *callbacks]
    with one_thread(), quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return _run(options, callbacks, progress)


def _run(
    options: DemoOptions, callbacks: Sequence[pl.Callback], progress: Progress | None
) -> DemoResult:
    start = time.perf_counter()
    model = _warm_model(options)
    before = exact_match(model.policy, model.task)
    run = _fit(model, options, callbacks, progress)
    after = exact_match(model.policy, model.task)
    return DemoResult(
        exact_before=before,
        exact_after=after,
        rewards=tuple(model.rewards.tolist()),
        steps=options.steps,
        seconds=time.perf_counter() - start,
        parameters=sum(weights.numel() for weights in model.policy.parameters()),
        run=run,
    )


def _warm_model(options: DemoOptions) -> Grpo:
    task = make_task(options.task, options.seed)
    policy = Policy(task.vocabulary, task.prompt_width + task.answer_width)
    steps = task.warmup_steps if options.warmup_steps is None else options.warmup_steps
    warm_start(policy, task, steps, options.seed)
    settings = GrpoSettings(
        options.steps,
        options.seed,
        options.kv_cache,
        slow_rank=options.slow_rank,
        slow_by=options.slow_by,
    )
    return Grpo(policy, task, settings)


def _fit(
    model: Grpo,
    options: DemoOptions,
    callbacks: Sequence[pl.Callback],
    progress: Progress | None,
) -> Path | None:
    known = _runs(options.save_path)
    with _reports(options, progress) as report, _own_port():
        pl.Trainer(
            accelerator="cpu",
            devices=options.ranks,
            strategy=QuietDDP() if options.ranks > 1 else "auto",
            plugins=LightningEnvironment(),  # a demo does not join the cluster job around it
            max_epochs=1,
            callbacks=[*callbacks, _Reporter(report)],
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(model)
    # A callback in another process cannot tell us its run: the new directory is it.
    return max(_runs(options.save_path) - known, default=None)


def _recording(save_path: Path | None) -> list[Any]:
    if save_path is None:
        return []
    from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback

    return [ProfilerCallback(profile_save_path=str(save_path))]


def _runs(save_path: Path | None) -> set[Path]:
    return set() if save_path is None else {path for path in save_path.glob("*") if path.is_dir()}


class _Reporter(pl.Callback):
    """Tells one listener the reward of each step, from the first rank."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.is_global_zero and isinstance(pl_module, Grpo):
            self.report(batch_idx + 1, float(pl_module.rewards[batch_idx]))


class _Sender:
    """Reports through a pipe, which unlike a function reaches another process."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self.pipe = pipe

    def __call__(self, step: int, reward: float) -> None:
        self.pipe.send((step, reward))


@contextmanager
def _reports(options: DemoOptions, progress: Progress | None) -> Iterator[Report]:
    def report(step: int, reward: float) -> None:
        if progress is not None:
            progress(step, options.steps, reward)

    if options.ranks == 1:
        yield report
        return
    others = {*active_children()}
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    done = threading.Event()
    reader = threading.Thread(target=_relay, args=(receiver, report, done), daemon=True)
    reader.start()
    try:
        yield _Sender(sender)
    finally:
        for rank in {*active_children()} - others:  # after Ctrl-C: they may wait for one another
            rank.kill()
        done.set()
        reader.join()
        receiver.close()
        sender.close()


def _relay(pipe: "Connection[Any, Any]", report: Report, done: threading.Event) -> None:
    # done is read before poll: what was sent before it is set is still reported
    while not done.is_set() or pipe.poll():
        if pipe.poll(0.1):
            report(*pipe.recv())


@contextmanager
def _own_port() -> Iterator[None]:
    # Lightning leaves a spawned job's port in the environment, where the next job would take it.
    leftover = {"MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
    try:
        yield
    finally:
        for name in leftover:
            os.environ.pop(name, None)
