"""Choose a run's recorders from its configuration and device, and build them."""

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.model import Header
from lightning_rlprof.recorders.base import Recorder

__all__ = ["build_recorders", "recorder_names", "unmet"]

_MARKERS = {"npu": "mstx", "cuda": "nvtx"}


def recorder_names(config: ProfilerConfig, device: str) -> tuple[str, ...]:
    """Return the recorders of a run, a pure function that never looks at what is installed.

    ``tools`` decides when given. Otherwise ``mstx`` brings the markers of the device, any level but
    ``level_none`` brings torch.profiler (where it knows the device), and ``profile_with_memory``
    brings the memory of each span.

    Example::

        >>> recorder_names(ProfilerConfig(integrated={"stage": "actor_update"}), "cpu")
        ('torch_profiler',)
    """
    if not config.captures:
        return ()
    if config.tools is not None:
        return tuple(config.tools)
    block = config.integrated
    names = [_MARKERS[device]] if block.mstx and device in _MARKERS else []
    watches = block.profile_with_cpu or (block.profile_with_npu and device in ("cuda", "xpu"))
    if block.profile_level != "level_none" and watches and device != "npu":
        names.append("torch_profiler")
    if block.profile_with_memory:
        names.append("memory")
    return tuple(names)


def unmet(config: ProfilerConfig, device: str) -> str | None:
    """Say what the configuration asks for that has no recorder here; None if all is met."""
    if not config.captures or config.tools is not None:
        return None
    names = recorder_names(config, device)
    left = f"spans and {' and '.join(names)} are" if names else "spans alone are"
    if config.integrated.mstx and device not in _MARKERS:
        mode = "lightweight mode" if config.lightweight else "mstx"
        return f"{mode}: {device} has no markers of its own, {left} recorded"
    if device == "npu" and not config.lightweight:
        return f"torch_npu.profiler captures are not part of this version, {left} recorded"
    if not names:
        return f"the configuration leaves nothing to capture on {device!r}: {left} recorded"
    return None


def build_recorders(config: ProfilerConfig, header: Header) -> list[Recorder]:
    """Build the recorders that `recorder_names` names for this rank.

    Raises:
        RecorderError: One of them cannot work on this machine.
    """
    return [_build(name, config, header) for name in recorder_names(config, header.device)]


def _build(name: str, config: ProfilerConfig, header: Header) -> Recorder:
    # Imported here: a run pays only for the tools that it uses.
    if name == "nvtx":
        from lightning_rlprof.recorders.nvtx import NvtxRecorder

        return NvtxRecorder()
    if name == "mstx":
        from lightning_rlprof.recorders.mstx import MstxRecorder

        return MstxRecorder()
    if name == "memory":
        from lightning_rlprof.recorders.memory import MemoryRecorder

        return MemoryRecorder(header.device)
    return _torch_profiler(config, header)


def _torch_profiler(config: ProfilerConfig, header: Header) -> Recorder:
    from lightning_rlprof.recorders.torch_profiler import (
        TorchProfilerOptions,
        TorchProfilerRecorder,
    )

    block = config.integrated
    options = TorchProfilerOptions(
        device=header.device,
        role=header.role,
        rank=header.rank,
        world_size=header.world_size,
        with_cpu=block.profile_with_cpu,
        with_device=block.profile_with_npu,
        record_shapes=block.profile_record_shapes,
        with_memory=block.profile_with_memory,
        with_modules=block.profile_with_module,
    )
    return TorchProfilerRecorder(options)
