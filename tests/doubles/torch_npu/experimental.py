"""The part of the fake torch_npu that takes options and resets those it does not like."""

from collections.abc import Callable
from typing import Any

_OP_ATTR = "op_attr switch is invalid with export type set as text."
_METRICS = "Please use level1 or level2 if you want to collect aic metrics, reset them to None!"
_NO_METRICS = "ACL_AICORE_NONE"
_SHALLOW = ("Level0", "Level_none")


class Options:
    """What was given and what is left of it, under torch_npu's private names."""

    marks: bool

    def kept(self, name: str) -> Any:
        """Return what is left of an option, None where this version has none of that name."""
        return getattr(self, f"_{name}", None)


def make_experimental_config(device: Any, strict: Callable[..., Any]) -> type:
    """Return ``_ExperimentalConfig`` of the device's version."""
    parameters = device.facts["_ExperimentalConfig.__init__"]
    lists = any(text.startswith("async_mode") for text in device.facts["tensorboard_trace_handler"])

    def init(self: Any, **given: Any) -> None:
        self.given = given
        for name, value in given.items():
            setattr(self, name if name == "record_op_args" else f"_{name}", value)
        self._export_type = _formats(device, given["export_type"], lists)
        _reset_what_is_alone(device, self)

    return type("_ExperimentalConfig", (Options,), {"__init__": strict(init, parameters, "self")})


def _formats(device: Any, given: Any, lists: bool) -> Any:
    if isinstance(given, str):
        return [given] if lists else given
    if lists and isinstance(given, list) and given:
        return list(given)
    device.printed.append(f"Invalid parameter export_type: {given}, reset it to text.")
    return ["text"] if lists else "text"


def _reset_what_is_alone(device: Any, config: Any) -> None:
    """Reset what needs something else to be asked for, too."""
    printed, shallow = device.printed, config._profiler_level in _SHALLOW
    parameters = device.facts["_ExperimentalConfig.__init__"]
    # What is None by default adds counters by itself; the same releases leave level_none alone.
    adds_metrics = "aic_metrics=Constant.AicMetricsNone" in parameters
    if adds_metrics and not shallow and config._aic_metrics == _NO_METRICS:
        config._aic_metrics = "ACL_AICORE_PIPE_UTILIZATION"
    if shallow and config._aic_metrics != _NO_METRICS:
        printed.append(_METRICS)
        config._aic_metrics = _NO_METRICS
    if config._op_attr and "db" not in config._export_type:
        printed.append(_OP_ATTR)
        config._op_attr = False
    if config._msprof_tx and config.kept("mstx") is not None:
        printed.append("msprof_tx will be deprecated")
    config.marks = config._msprof_tx or bool(config.kept("mstx"))
    if config._profiler_level == "Level_none" and not (config.marks or adds_metrics):
        printed.append("mstx or msprof_tx must be True if profiler_level is set to Level_none.")
        config.marks = config._mstx = True
    for name in ("mstx_domain_include", "mstx_domain_exclude"):
        if config.kept(name) and not config.marks:
            printed.append(f"{name} is valid when mstx is True.")
            setattr(config, f"_{name}", [])
