"""Profile RL post-training: where GPU time goes, which rank slows the others, what to fix first.

Two lines record a run::

    from lightning_rlprof import ProfilerCallback
    trainer = Trainer(callbacks=[ProfilerCallback()])

and ``rlprof summary profiler_data`` reads it. Names are imported on first use: the command line
starts without torch, and a training loads no reader.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rlprof.analysis.efficiency.throughput import flops_of
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.errors import ConfigError, RecorderError, RlprofError, TraceError
    from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
    from lightning_rlprof.integrations.lightning.stage_metrics import StageMetrics
    from lightning_rlprof.integrations.loop import start_session, step
    from lightning_rlprof.integrations.ray import ray_runtime_env
    from lightning_rlprof.recording.annotations import annotate, count, mark, record, stage
    from lightning_rlprof.recording.memory_log import log_memory, log_memory_around
    from lightning_rlprof.recording.rank_timings import gather_timings, reduce_timings, tail_ratio
    from lightning_rlprof.recording.recorders.base import Recorder
    from lightning_rlprof.recording.samples import Sample, sample
    from lightning_rlprof.recording.session import request_capture
    from lightning_rlprof.records.records import FATES, STAGES, Span
    from lightning_rlprof.run import Run, load

__all__ = [
    "FATES",
    "STAGES",
    "ConfigError",
    "ProfilerCallback",
    "ProfilerConfig",
    "Recorder",
    "RecorderError",
    "RlprofError",
    "Run",
    "Sample",
    "Span",
    "StageMetrics",
    "TraceError",
    "annotate",
    "count",
    "flops_of",
    "gather_timings",
    "load",
    "log_memory",
    "log_memory_around",
    "mark",
    "ray_runtime_env",
    "record",
    "reduce_timings",
    "request_capture",
    "sample",
    "stage",
    "start_session",
    "step",
    "tail_ratio",
]

_HOME = {
    "ConfigError": "errors",
    "ProfilerCallback": "integrations.lightning.profiler_callback",
    "ProfilerConfig": "config.profiler_config",
    "Recorder": "recording.recorders.base",
    "RecorderError": "errors",
    "RlprofError": "errors",
    "FATES": "records.records",
    "Run": "run",
    "STAGES": "records.records",
    "Sample": "recording.samples",
    "Span": "records.records",
    "StageMetrics": "integrations.lightning.stage_metrics",
    "TraceError": "errors",
    "annotate": "recording.annotations",
    "count": "recording.annotations",
    "flops_of": "analysis.efficiency.throughput",
    "gather_timings": "recording.rank_timings",
    "load": "run",
    "log_memory": "recording.memory_log",
    "log_memory_around": "recording.memory_log",
    "mark": "recording.annotations",
    "ray_runtime_env": "integrations.ray",
    "reduce_timings": "recording.rank_timings",
    "request_capture": "recording.session",
    "stage": "recording.annotations",
    "record": "recording.annotations",
    "sample": "recording.samples",
    "start_session": "integrations.loop",
    "step": "integrations.loop",
    "tail_ratio": "recording.rank_timings",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use.

    Raises:
        ImportError: PyTorch or Lightning is missing or too old; the text says how to install them.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"{__name__}.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        text = f'{name} needs PyTorch. Run: pip install "lightning-rlprof[lightning]"'
        raise ImportError(text) from None
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
