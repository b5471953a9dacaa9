"""`run_injected_demo`: a training in which something goes wrong, caught by the recorder."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import active_children
from pathlib import Path

import torch

from lightning_rlprof.cli.demo.faults import check_can_inject
from lightning_rlprof.cli.demo.grpo import Grpo, warm_start
from lightning_rlprof.cli.demo.options import INJECTED_STEPS, DemoOptions
from lightning_rlprof.cli.demo.run import (
    Progress,
    be_quiet,
    no_rank_left,
    policy_and_task,
    runs,
    shown,
    trainer,
)
from lightning_rlprof.records.hang_reports import read_reports

TIMEOUT_S = 3.0
"""The ``hang_timeout`` of a demo that hangs, whose steps take less than a second."""

_LOOK_S = 0.5


@dataclass(frozen=True)
class InjectedResult:
    """What a training left in which something went wrong.

    Attributes:
        run: The run directory, None if the training left none.
        error: What the training raised for want of memory, as it came out of the Trainer.
    """

    run: Path | None
    error: BaseException | None = None


def run_injected_demo(options: DemoOptions, progress: Progress = lambda *_: None) -> InjectedResult:
    """Train with a fault, and return the run. A hang is ended when every rank has reported it.

    Without a warm start, so that all steps have the same work: answers of full length. ``progress``
    is called as by `run_demo`.

    Raises:
        ConfigError: This machine cannot show the fault.
    """
    # First: it imports the other Lightning, which resets the loggers.
    from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback

    check_can_inject(options)
    hangs, error = options.inject == "hang", None
    options = replace(options, steps=options.steps or (None if hangs else INJECTED_STEPS))
    more = {"hang_timeout": TIMEOUT_S} if hangs else {"capture_anomalies": True}
    profiler = ProfilerCallback(profile_save_path=str(options.save_path), summary=False, **more)
    be_quiet(options.recipe.threads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        policy, task = policy_and_task(options)
        warm_start(policy, task, options.warmup_steps or 0, options.seed, options.recipe)
        model, known = Grpo(policy, task, options), runs(options)
        with shown(model.rewards, progress), no_rank_left():
            try:
                if hangs:
                    with _ended_when_reported(options, known), suppress(Exception):
                        trainer(options, [profiler]).fit(model)  # raises that its ranks were killed
                else:
                    trainer(options, [profiler]).fit(model)
            except torch.OutOfMemoryError as raised:
                if options.inject != "oom":
                    raise
                error = raised
            finally:
                model.faults.end()
    return InjectedResult(max(runs(options) - known, default=None), error)


@contextmanager
def _ended_when_reported(options: DemoOptions, known: set[Path]) -> Iterator[None]:
    """Kill the ranks that the block has started, as soon as each has reported a hang."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            found = runs(options) - known
            ranks = range(options.ranks)
            if found and all(read_reports(max(found), rank) for rank in ranks):
                for process in active_children():
                    process.kill()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
