"""`run_hanging_demo`: a training whose last rank never leaves its reward, caught and ended."""

import threading
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path

from lightning_rlprof.cli.demo.grpo import Grpo, warm_start
from lightning_rlprof.cli.demo.options import DemoOptions
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
"""The ``hang_timeout`` of the demo, whose steps take less than a second."""

_LOOK_S = 0.5


def run_hanging_demo(options: DemoOptions, progress: Progress = lambda *_: None) -> Path | None:
    """Train until every rank has reported the hang, end the ranks, and return the run.

    None is returned if the training left no run. ``progress`` is called as by `run_demo`.
    """
    # First: it imports the other Lightning, which resets the loggers.
    from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback

    profiler = ProfilerCallback(
        profile_save_path=str(options.save_path), summary=False, hang_timeout=TIMEOUT_S
    )
    be_quiet(options.recipe.threads)
    policy, task = policy_and_task(options)
    warm_start(policy, task, options.warmup_steps or 0, options.seed, options.recipe)
    model = Grpo(policy, task, options)
    known, ended = runs(options), threading.Event()

    def end_when_reported() -> None:
        while not ended.wait(_LOOK_S):
            found = runs(options) - known
            ranks = range(options.ranks)
            if found and all(read_reports(max(found), rank) for rank in ranks):
                for process in active_children():
                    process.kill()
                return

    watcher = threading.Thread(target=end_when_reported, daemon=True)
    watcher.start()
    try:
        with shown(model.rewards, progress), no_rank_left(), suppress(Exception):
            trainer(options, [profiler]).fit(model)  # raises that its ranks were killed
    finally:
        ended.set()
        watcher.join()
    return max(runs(options) - known, default=None)
