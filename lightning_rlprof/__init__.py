"""Show where the GPU-seconds of an RL training step go, who makes the others wait, what to change.

Two lines record a run::

    from lightning_rlprof import ProfilerCallback
    trainer = Trainer(callbacks=[ProfilerCallback()])

and ``rlprof summary profiler_data`` reads it. Names are imported when they are first used, so that
the command line starts without torch and training pays for no reader.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
    from lightning_rlprof.integrations.lightning.stage_metrics import StageMetrics
    from lightning_rlprof.integrations.ray import ray_runtime_env
    from lightning_rlprof.recording.annotations import annotate, count, mark, stage
    from lightning_rlprof.recording.memory_log import log_memory, log_memory_around
    from lightning_rlprof.recording.rank_timings import gather_timings, reduce_timings, tail_ratio
    from lightning_rlprof.recording.recorders.base import Recorder
    from lightning_rlprof.recording.start import start_session
    from lightning_rlprof.records.records import STAGES, Span
    from lightning_rlprof.run import load

__all__ = [
    "STAGES",
    "ProfilerCallback",
    "ProfilerConfig",
    "Recorder",
    "Span",
    "StageMetrics",
    "annotate",
    "count",
    "gather_timings",
    "load",
    "log_memory",
    "log_memory_around",
    "mark",
    "ray_runtime_env",
    "reduce_timings",
    "stage",
    "start_session",
    "tail_ratio",
]

_HOME = {
    "STAGES": "model",
    "ProfilerCallback": "callbacks.profiler",
    "ProfilerConfig": "config.profiler",
    "Recorder": "recorders.base",
    "Span": "model",
    "StageMetrics": "callbacks.metrics",
    "annotate": "marking",
    "count": "marking",
    "gather_timings": "timings",
    "load": "notebook",
    "log_memory": "memory_log",
    "log_memory_around": "memory_log",
    "mark": "marking",
    "ray_runtime_env": "ray",
    "reduce_timings": "timings",
    "stage": "marking",
    "start_session": "run",
    "tail_ratio": "timings",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
