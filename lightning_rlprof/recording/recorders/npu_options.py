"""What torch_npu.profiler is told; whatever would not take effect is refused before training."""

import inspect
from collections.abc import Mapping, Sequence
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

# Which releases know what; post-releases carry back-ports. Only told to people: the signature of
# what is installed decides.
_LISTS = "2.1.0.post13, 2.4.0.post4, 2.5.1 and later"
_METRICS = "2.1.0.post13, 2.4.0.post4, 2.5.1 and later"
_NUMA = "2.7.1.post11, 2.9.0.post9, 2.10.0.post7, 2.11.0 and later"
_OTHERS = "2.1.0.post13, 2.5.1.post1, 2.6.0 and later"

# torch_npu resets what it does not like and prints a line about it.
_CURES = {
    "aic_metrics": "needs integrated.profile_level: level1 or level2",
    "op_attr": "needs the format db, in integrated.profile_export_type or npu.export_types",
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
            "with_stack": config.npu.with_stack,
        },
        experimental=_experimental(config, profiler),
    )


def _experimental(config: ProfilerConfig, profiler: Any) -> Any:
    made, block = profiler._ExperimentalConfig, config.integrated
    known = inspect.signature(made).parameters
    given = _given(config, profiler)
    for name in given:
        if name not in known:
            _refuse(f"npu.{name}", _OTHERS)
    deep = block.profile_level in ("level1", "level2")
    metrics = config.npu.aic_metrics or ("PipeUtilization" if deep else "AiCoreNone")
    # level_none holds only markers, and torch_npu turns them on.
    markers = block.mstx or block.profile_level == "level_none" or "mstx" in (config.tools or ())
    asked = given | {
        "profiler_level": getattr(profiler.ProfilerLevel, _LEVELS[block.profile_level]),
        "aic_metrics": _member(profiler.AiCMetrics, metrics, "npu.aic_metrics", _METRICS),
        "export_type": _export(config, profiler),
        "data_simplification": config.npu.data_simplification,
        "mstx" if "mstx" in known else "msprof_tx": markers,
    }
    experimental = made(**asked)
    _check_kept(experimental, asked)
    return experimental


def _given(config: ProfilerConfig, profiler: Any) -> dict[str, Any]:
    """Return what is passed only when it is asked for, by torch_npu's keyword."""
    npu, block = config.npu, config.integrated
    threshold = npu.gc_detect_threshold_ms
    if threshold is not None and not block.profile_with_cpu:
        raise RecorderError(
            f"npu.gc_detect_threshold_ms={threshold:g} needs integrated.profile_with_cpu: true"
        )
    flags = ("l2_cache", "op_attr", "record_op_args", "sys_io", "sys_interconnection")
    given: dict[str, Any] = {name: True for name in flags if getattr(npu, name)}
    given |= {name: getattr(npu, name) for name in _FILTERS if getattr(npu, name)}
    if npu.host_sys:
        given["host_sys"] = _host_systems(npu.host_sys, profiler)
    if (given or npu.aic_metrics) and not block.profile_with_npu:
        name = next(iter(given), "aic_metrics")
        raise RecorderError(f"npu.{name} needs integrated.profile_with_npu: true")
    return given if threshold is None else {**given, "gc_detect_threshold": threshold}


def _host_systems(names: Sequence[str], profiler: Any) -> list[Any]:
    known = getattr(profiler, "HostSystem", None)
    if known is None:
        _refuse("npu.host_sys", _OTHERS)
    return [_member(known, name.upper(), "npu.host_sys", _NUMA) for name in names]


def _member(enum: Any, name: str, key: str, releases: str) -> Any:
    if not hasattr(enum, name):
        _refuse(f"{key} {name}", releases)
    return getattr(enum, name)


def _export(config: ProfilerConfig, profiler: Any) -> Any:
    """Return one format as plain text, which every version takes, or a list of two."""
    members = {"text": profiler.ExportType.Text, "db": profiler.ExportType.Db}
    names = config.npu.export_types or [config.integrated.profile_export_type]
    # The same releases learned both; those before set a list to text.
    lists = "async_mode" in inspect.signature(profiler.tensorboard_trace_handler).parameters
    if len(names) > 1 and not lists:
        _refuse(f"npu.export_types={names}", _LISTS)
    return members[names[0]] if len(names) == 1 else [members[name] for name in names]


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
