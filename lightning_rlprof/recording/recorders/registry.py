"""Choose a run's recorders from its configuration and device, and build them."""

from importlib import import_module
from typing import Any

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.records.records import Header

_MARKERS = {"npu": "mstx", "cuda": "nvtx"}
_TIMED = ("cuda", "npu", "xpu")
# MSTX hears ranges only inside of torch_npu.profiler, which is opened first and closed last.
_ON_NPU = ("npu_profiler", "mstx")


def recorder_names(config: ProfilerConfig, device: str, rank: int | None = None) -> tuple[str, ...]:
    """Return the recorders of a run, a pure function that never looks at what is installed.

    ``device_time`` is there with every accelerator. Of the captures, ``tools`` decides when given.
    Otherwise ``mstx`` brings the markers of the device, any level but ``level_none`` brings
    torch.profiler (where it knows the device), and ``profile_with_memory`` or ``memory.level``
    brings the memory of each span. Every capture on Ascend is one of torch_npu.profiler, whose
    ``level_none`` holds nothing but markers. ``nsight`` always brings ``nvtx``, inside of it.
    Without a rank the answer is that of a captured one.

    Example::

        >>> recorder_names(ProfilerConfig(integrated={"stage": "actor_update"}), "cpu")
        ('torch_profiler',)
    """
    timed = device in _TIMED if config.device_time is None else config.device_time
    names = ["device_time"] if timed else []
    if rank is None or config.wants_rank(rank):
        names += _captured(config, device)
    return tuple(names)


def _captured(config: ProfilerConfig, device: str) -> list[str]:
    if not config.captures:
        return []
    if config.tools is not None:
        first = ["nsight", "nvtx"] if "nsight" in config.tools else []
        first += [name for name in _ON_NPU if name in config.tools]
        return list(dict.fromkeys([*first, *config.tools]))
    block = config.integrated
    names = ["npu_profiler"] if device == "npu" else []
    alone = device == "npu" and block.profile_level == "level_none" and block.profile_with_npu
    marks = block.mstx or alone
    names += [_MARKERS[device]] if marks and device in _MARKERS else []
    watches = block.profile_with_cpu or (block.profile_with_npu and device in ("cuda", "xpu"))
    if block.profile_level != "level_none" and watches and device != "npu":
        names.append("torch_profiler")
    if block.profile_with_memory or config.memory.level:
        names.append("memory")
    return names


def unmet(config: ProfilerConfig, device: str) -> str | None:
    """Say what the configuration asks for that has no recorder here; None if all is met."""
    if not config.captures or config.tools is not None:
        return None
    names = _captured(config, device)
    left = f"spans and {' and '.join(names)} are" if names else "only spans are"
    if config.integrated.mstx and device not in _MARKERS:
        mode = "lightweight mode" if config.lightweight else "mstx"
        return f"{mode}: {device} has no profiler markers, {left} recorded"
    if not names:
        return f"the configuration enables no capture on {device!r}: {left} recorded"
    return None


def build_recorders(
    config: ProfilerConfig, header: Header, *, always: bool = True
) -> list[Recorder]:
    """Build the recorders that `recorder_names` names for this rank.

    Args:
        config: What to record.
        header: Describes the rank.
        always: Whether those that work outside of captures are among them.

    Raises:
        RecorderError: One of them cannot work on this machine.
    """
    names = recorder_names(config, header.device, header.rank)
    built: list[Recorder] = []
    for name in names if always else _captured(config, header.device):
        found = build_recorder(name, config, header)
        built += found if isinstance(found, list) else [found]
    return built


def build_recorder(name: str, config: ProfilerConfig, header: Header) -> Any:
    """Return the recorder of a name, or a list of several.

    Its module is imported here, so that a run loads only its own.
    """
    module = "torch_profiler.recorder" if name == "torch_profiler" else name
    return import_module(f"{__package__}.{module}").build(config, header)
