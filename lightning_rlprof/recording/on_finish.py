"""Run what the user wants to happen once a run's files are complete, and never let it hurt."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlprof.config.blocks import FinishConfig
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.records.records import Header
from lightning_rlprof.system.plain_text import plain

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """What a finish hook is told.

    Attributes:
        run: The run directory; this rank's files in it are complete.
        tool: Recorders of the run, by commas: ``nsight,nvtx``; empty when only spans were recorded.
        rank: Global rank of this process.
        pid: Its process id.
        role: Its role.
    """

    run: Path
    tool: str
    rank: int
    pid: int
    role: str

    def environment(self) -> dict[str, str]:
        """Return the variables of a command, by our names and by those of verl's hooks."""
        values = {
            "TOOL": self.tool,
            "RANK": str(self.rank),
            "PID": str(self.pid),
            "ROLE": self.role,
        }
        ours = {f"RLPROF_{key}": value for key, value in values.items()}
        verls = {f"VERL_PROFILE_{key}": value for key, value in values.items()}
        return ours | verls | dict.fromkeys(["RLPROF_RUN", "VERL_PROFILE_SAVE_PATH"], str(self.run))


# Not `object`: jsonargparse 4.39 takes any default for one, and then leaves the signature unread.
OnFinish = Callable[[Finished], Any]
"""What is called with a rank's finished capture or run; what it returns is not used."""


def check_callable(action: object) -> None:
    """Refuse what cannot be called when a run is complete.

    Raises:
        ConfigError: It is not a callable, such as the block of the configuration for commands.
    """
    if action is not None and not callable(action):
        raise ConfigError(
            f"on_finish={action!r:.80} is not callable; pass a function that takes a Finished. "
            'A command belongs to the configuration: {"on_finish": {"command": [...]}}'
        )


def run_finish(
    config: ProfilerConfig,
    header: Header,
    run: Path,
    tools: Sequence[str],
    action: OnFinish | None = None,
) -> threading.Thread | None:
    """Start the hooks of this rank on a thread of their own, which the interpreter waits for.

    Ray kills its workers without waiting: in one this returns when the hooks have ended, after
    ``on_finish.timeout_s`` at the latest. What they print is logged, a failure is one warning, and
    after that time a command is stopped and a callable is left behind. Returns the thread, or None
    where there is nothing to do on this rank.

    Args:
        config: Says which command, for how long, on which ranks.
        header: Describes this rank.
        run: The run directory.
        tools: Names of the recorders.
        action: A callable to run before the command.
    """
    hook = config.on_finish
    if not (action or hook.command) or not config.wants_finish(header.rank):
        return None
    finished = Finished(run, ",".join(tools), header.rank, header.pid, header.role)
    thread = threading.Thread(target=_work, args=[hook, finished, action], name="rlprof-finish")
    thread.start()
    if _is_ray_worker():
        thread.join(hook.timeout_s)
    return thread


def _is_ray_worker() -> bool:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    worker = getattr(ray.get_runtime_context(), "worker", None)  # a Ray client has none
    return worker is not None and worker.mode == ray.WORKER_MODE


def _work(hook: FinishConfig, finished: Finished, action: OnFinish | None) -> None:
    if action:
        _call(action, finished, hook.timeout_s)
    if hook.command:
        _command(hook.command, finished, hook.timeout_s)


def _call(action: OnFinish, finished: Finished, timeout_s: float) -> None:
    def call() -> None:
        try:
            action(finished)
        except BaseException as error:  # on a thread of its own, where Ctrl-C never arrives
            log.warning("on_finish failed on rank %d: %r", finished.rank, error, exc_info=error)

    thread = threading.Thread(target=call, name="rlprof-finish-call", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        log.warning(
            "on_finish of rank %d still runs after %g s; no longer waiting for it",
            finished.rank,
            timeout_s,
        )


def _command(command: list[str], finished: Finished, timeout_s: float) -> None:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | finished.environment(),
            start_new_session=True,
        )
    except OSError as error:
        log.warning("on_finish.command could not be started: %s", error)
        return
    timer = threading.Timer(timeout_s, _stop, [process, timeout_s])
    timer.daemon = True
    timer.start()
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            log.info("on_finish, rank %d: %s", finished.rank, plain(line.rstrip("\n")))
    code = process.wait()
    timer.cancel()
    if code:
        log.warning("on_finish.command ended with status %d on rank %d", code, finished.rank)


def _stop(process: "subprocess.Popen[str]", timeout_s: float) -> None:
    log.warning("stopped on_finish.command after %g s", timeout_s)
    with suppress(OSError):  # gone already
        os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
