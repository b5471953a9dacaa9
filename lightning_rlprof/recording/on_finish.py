"""Call what the user wants to happen once a run's files are complete, and never let it hurt."""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.records.records import Header

log = logging.getLogger(__name__)

_LONGEST_CALL_S = 600.0


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


# Not `object`: jsonargparse 4.39 takes any default for one, and then leaves the signature unread.
OnFinish = Callable[[Finished], Any]
"""What is called with a rank's finished capture or run; what it returns is not used."""


def check_callable(action: object) -> None:
    """Refuse what cannot be called when a run is complete.

    Raises:
        ConfigError: It is not a callable, such as a command.
    """
    if action is not None and not callable(action):
        raise ConfigError(
            f"on_finish={action!r:.80} is not callable; pass a function that takes a Finished"
        )


def run_finish(
    config: ProfilerConfig,
    header: Header,
    run: Path,
    tools: Sequence[str],
    action: OnFinish | None = None,
) -> threading.Thread | None:
    """Start a callable on a thread of its own; the interpreter waits for it, ten minutes at most.

    Ray kills its workers without waiting: in one this returns when the call has ended. A failure is
    one warning, and a call that takes longer is left behind. Returns the thread, or None if this
    rank has nothing to do.

    Args:
        config: Says which ranks are captured.
        header: Describes this rank.
        run: The run directory.
        tools: Names of the recorders.
        action: What to call.
    """
    if action is None or not config.wants_finish(header.rank):
        return None
    finished = Finished(run, ",".join(tools), header.rank, header.pid, header.role)
    thread = threading.Thread(target=_call, args=[action, finished], name="rlprof-finish")
    thread.start()
    if _is_ray_worker():
        thread.join(_LONGEST_CALL_S)
    return thread


def _is_ray_worker() -> bool:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    worker = getattr(ray.get_runtime_context(), "worker", None)  # a Ray client has none
    return worker is not None and worker.mode == ray.WORKER_MODE


def _call(action: OnFinish, finished: Finished) -> None:
    def call() -> None:
        try:
            action(finished)
        except BaseException as error:  # on a thread of its own, where Ctrl-C never arrives
            log.warning("on_finish failed on rank %d: %r", finished.rank, error, exc_info=error)

    thread = threading.Thread(target=call, name="rlprof-finish-call", daemon=True)
    thread.start()
    thread.join(_LONGEST_CALL_S)
    if thread.is_alive():
        log.warning(
            "on_finish of rank %d still runs after %g s; no longer waiting for it",
            finished.rank,
            _LONGEST_CALL_S,
        )
