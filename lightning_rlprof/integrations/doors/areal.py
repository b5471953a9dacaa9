"""Door to AReaL: `stats_tracker.record_timing`, which its trainers call for every phase.

Its last phase, ``clear_batches``, ends a step. ``rollout`` is a wait for samples, as rollouts run
ahead.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit, Timers
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import current

KIT = Kit("AReaL", "areal", "sglang", "vllm")
_TIMERS = Timers(KIT, stages={"rollout": "wait_for_samples", "train_step": "actor_update"})
_LAST = "clear_batches"  # of a step


def install(module: Any) -> None:
    """Replace ``record_timing`` of ``areal.utils.stats_tracker``."""
    KIT.replace(module, "record_timing", _record_timing)


def _record_timing(function: Any) -> Any:
    @functools.wraps(function)
    def record_timing(key: str, *args: Any, **kwargs: Any) -> Any:
        return _timed(str(key), function(key, *args, **kwargs))

    return record_timing


@contextmanager
def _timed(key: str, inner: Any) -> Iterator[Any]:
    session = KIT.session()
    if session is not None and session.step_start_ns is None:
        KIT.quiet(session.begin_step)(session.next_step)
    with stage(_TIMERS.stage_of(key)), inner as found:
        yield found
    if key == _LAST and session is not None and session is current():
        KIT.quiet(session.end_step)()
