"""What torch_npu.profiler is told; whatever would not take effect is refused before training."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError

_LEVELS = {
    "level_none": "Level_none",
    "level0": "Level0",
    "level1": "Level1",
    "level2": "Level2",
}
_FILTERS = ("mstx_domain_include", "mstx_domain_exclude")
_OF_THE_HOST = {"gc_detect_threshold"}
_CHOSEN_BY = {
    "profiler_level": "profile_level",
    "export_type": "profile_export_type",
    "mstx": "mstx",
    "msprof_tx": "mstx",
}

# Which releases know what; post-releases carry back-ports. Only told to people: the signature of
# what is installed decides.
_METRICS = "2.1.0.post13, 2.4.0.post4, 2.5.1 and later"
_NUMA = "2.7.1.post11, 2.9.0.post9, 2.10.0.post7, 2.11.0 and later"
_OTHERS = "2.1.0.post13, 2.5.1.post1, 2.6.0 and later"

# torch_npu resets what it does not like and prints a line about it.
_CURES = {
    "aic_metrics": "needs integrated.profile_level: level1 or level2",
    "op_attr": "needs integrated.profile_export_type: db",
    **dict.fromkeys(_FILTERS, "needs integrated.mstx: true"),
}


@dataclass(frozen=True)
class NpuOptions:
    """What the installed torch_npu is told.

    Attributes:
        profile: Keywords of ``torch_npu.profiler.profile`` but for schedule and handler.
        experimental: A ``torch_npu.profiler._ExperimentalConfig``.
    """

    profile: Mapping[str, Any]
    experimental: Any


def npu_options(config: ProfilerConfig, profiler: Any) -> NpuOptions:
    """Translate a configuration for a ``torch_npu.profiler`` module.

    Raises:
        RecorderError: Something was asked for that this version does not know, or that would have
            no effect together with the rest.
    """
    block, kind = config.integrated, profiler.ProfilerActivity
    activities = [kind.CPU] if block.profile_with_cpu else []
    activities += [kind.NPU] if block.profile_with_npu else []
    return NpuOptions(
        profile={
            "activities": activities,
            "record_shapes": block.profile_record_shapes,
            "profile_memory": block.profile_with_memory,
            "with_modules": block.profile_with_module,
            "with_stack": config.with_stack,
        },
        experimental=_experimental(config, profiler),
    )


def _experimental(config: ProfilerConfig, profiler: Any) -> Any:
    made, block = profiler._ExperimentalConfig, config.integrated
    known = inspect.signature(made).parameters
    given = _given(config, profiler)
    for name, value in given.items():
        if name not in known:
            _refuse(f"npu.experimental.{name}", _OTHERS)
        if isinstance(known[name].default, bool) and not isinstance(value, bool):
            raise RecorderError(f"npu.experimental.{name}={value!r} is neither true nor false")
    deep = block.profile_level in ("level1", "level2")
    metrics = profiler.AiCMetrics
    # level_none holds only markers, and torch_npu turns them on.
    markers = block.mstx or block.profile_level == "level_none" or "mstx" in (config.tools or ())
    formats = {"text": profiler.ExportType.Text, "db": profiler.ExportType.Db}
    asked = {
        "profiler_level": getattr(profiler.ProfilerLevel, _LEVELS[block.profile_level]),
        "aic_metrics": metrics.PipeUtilization if deep else metrics.AiCoreNone,
        "export_type": formats[block.profile_export_type],
        "data_simplification": True,
        "mstx" if "mstx" in known else "msprof_tx": markers,
        **given,
    }
    experimental = made(**asked)
    _check_kept(experimental, asked)
    return experimental


def _given(config: ProfilerConfig, profiler: Any) -> dict[str, Any]:
    """Return `npu.experimental`, with torch_npu's members in place of their names."""
    block, given = config.integrated, dict(config.npu.experimental)
    for name, ours in _CHOSEN_BY.items():
        if name in given:
            raise RecorderError(f"npu.experimental.{name} is chosen by integrated.{ours}")
    for name in given:
        needs = "profile_with_cpu" if name in _OF_THE_HOST else "profile_with_npu"
        if not getattr(block, needs):
            raise RecorderError(f"npu.experimental.{name} needs integrated.{needs}: true")
    if "host_sys" in given:
        systems = getattr(profiler, "HostSystem", None)
        if systems is None:
            _refuse("npu.experimental.host_sys", _OTHERS)
        names = given["host_sys"] if isinstance(given["host_sys"], list) else [given["host_sys"]]
        key = "npu.experimental.host_sys"
        given["host_sys"] = [_member(systems, str(each).upper(), key, _NUMA) for each in names]
    if "aic_metrics" in given:
        name, key = str(given["aic_metrics"]), "npu.experimental.aic_metrics"
        given["aic_metrics"] = _member(profiler.AiCMetrics, name, key, _METRICS)
    return given


def _member(enum: Any, name: str, key: str, releases: str) -> Any:
    if not hasattr(enum, name):
        _refuse(f"{key} {name}", releases)
    return getattr(enum, name)


def _check_kept(experimental: Any, asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        kept = getattr(experimental, f"_{name}", getattr(experimental, name, value))
        if _comparable(kept) != _comparable(value):
            cure = _CURES.get(name, "leave it out, or try another version")
            raise RecorderError(
                f"{name}={value!r} would have no effect: torch_npu makes {kept!r} of it; {cure}"
            )


def _comparable(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else [value]


def _refuse(what: str, releases: str) -> NoReturn:
    raise RecorderError(
        f"{what} is not known to the installed torch_npu: leave it out, or install a version that "
        f"has it ({releases})"
    )
