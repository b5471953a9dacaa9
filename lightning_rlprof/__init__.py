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
    from lightning_rlprof.analysis.efficiency.throughput import flops_of as flops_of
    from lightning_rlprof.config.profiler_config import ProfilerConfig as ProfilerConfig
    from lightning_rlprof.errors import ConfigError as ConfigError
    from lightning_rlprof.errors import RecorderError as RecorderError
    from lightning_rlprof.errors import RlprofError as RlprofError
    from lightning_rlprof.errors import TraceError as TraceError
    from lightning_rlprof.integrations.lightning.profiler_callback import (
        ProfilerCallback as ProfilerCallback,
    )
    from lightning_rlprof.integrations.lightning.stage_metrics import StageMetrics as StageMetrics
    from lightning_rlprof.integrations.loop import start_session as start_session
    from lightning_rlprof.integrations.loop import step as step
    from lightning_rlprof.integrations.ray import ray_runtime_env as ray_runtime_env
    from lightning_rlprof.recording.accelerator import log_memory as log_memory
    from lightning_rlprof.recording.accelerator import log_memory_around as log_memory_around
    from lightning_rlprof.recording.annotations import annotate as annotate
    from lightning_rlprof.recording.annotations import count as count
    from lightning_rlprof.recording.annotations import gather_timings as gather_timings
    from lightning_rlprof.recording.annotations import mark as mark
    from lightning_rlprof.recording.annotations import record as record
    from lightning_rlprof.recording.annotations import reduce_timings as reduce_timings
    from lightning_rlprof.recording.annotations import stage as stage
    from lightning_rlprof.recording.annotations import tail_ratio as tail_ratio
    from lightning_rlprof.recording.recorders.base import Recorder as Recorder
    from lightning_rlprof.recording.samples import Sample as Sample
    from lightning_rlprof.recording.samples import sample as sample
    from lightning_rlprof.recording.session import request_capture as request_capture
    from lightning_rlprof.records.records import FATES as FATES
    from lightning_rlprof.records.records import STAGES as STAGES
    from lightning_rlprof.records.records import Span as Span
    from lightning_rlprof.run import Run as Run
    from lightning_rlprof.run import load as load

_NAMES = {
    "analysis.efficiency.throughput": ("flops_of",),
    "config.profiler_config": ("ProfilerConfig",),
    "errors": ("ConfigError", "RecorderError", "RlprofError", "TraceError"),
    "integrations.lightning.profiler_callback": ("ProfilerCallback",),
    "integrations.lightning.stage_metrics": ("StageMetrics",),
    "integrations.loop": ("start_session", "step"),
    "integrations.ray": ("ray_runtime_env",),
    "recording.accelerator": ("log_memory", "log_memory_around"),
    "recording.annotations": (
        "annotate",
        "count",
        "gather_timings",
        "mark",
        "record",
        "reduce_timings",
        "stage",
        "tail_ratio",
    ),
    "recording.recorders.base": ("Recorder",),
    "recording.samples": ("Sample", "sample"),
    "recording.session": ("request_capture",),
    "records.records": ("FATES", "STAGES", "Span"),
    "run": ("Run", "load"),
}
"""Public names, by the module that has them."""

_HOME = {name: home for home, names in _NAMES.items() for name in names}

__all__ = list(_HOME)


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
