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
    from lightning_rlprof.callbacks.metrics import StageMetrics
    from lightning_rlprof.callbacks.profiler import ProfilerCallback
    from lightning_rlprof.config.profiler import ProfilerConfig
    from lightning_rlprof.loaders.load import load
    from lightning_rlprof.marking import annotate, count, mark, stage
    from lightning_rlprof.model import STAGES, Span
    from lightning_rlprof.recorders.base import Recorder
    from lightning_rlprof.run import start_session

__all__ = [
    "STAGES",
    "ProfilerCallback",
    "ProfilerConfig",
    "Recorder",
    "Span",
    "StageMetrics",
    "annotate",
    "count",
    "load",
    "mark",
    "stage",
    "start_session",
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
    "load": "loaders.load",
    "mark": "marking",
    "stage": "marking",
    "start_session": "run",
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
