"""The contract of a recorder, and the choice of a run's recorders by configuration and device."""

import logging
import signal
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.records.notes import Code, Fact, Level, Notes, level_of
from lightning_rlprof.records.records import Header, Kind, Number, as_number

log = logging.getLogger(__name__)

_MARKERS = {"npu": "mstx", "cuda": "nvtx"}
_TIMED = ("cuda", "npu", "xpu")
_WITHOUT_TORCH = ("nvtx",)

# MSTX records ranges only inside torch_npu.profiler, which is opened first and closed last.
_ON_NPU = ("npu_profiler", "mstx")

Counters = Mapping[str, Number]
"""Numbers to store with a span."""

Late = Callable[[], Counters | None]
"""Tells a span's numbers once they are known, and None until then."""


def numbers_of(found: Any) -> dict[str, Number]:
    """Return what a recorder tells of a span as plain numbers; None among them is left out.

    Raises:
        TypeError: It is not a mapping of numbers, so the run could not be read.
    """
    given = found if isinstance(found, Mapping) else {} if found is None else {"": found}
    numbers = {name: as_number(value) for name, value in given.items() if value is not None}
    if None in numbers.values() or not all(name and isinstance(name, str) for name in numbers):
        raise TypeError(
            f"{type(found).__name__} was returned for a span, but a mapping of numbers is required"
        )
    return numbers  # type: ignore[return-value]


def is_for_the_process(error: BaseException) -> bool:
    """Return whether an exception is not a recorder's: Ctrl-C, or raised by a signal's handler.

    It only happened to arrive while a recorder ran, and has to reach the training.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = {_code_of(signal.getsignal(each)) for each in signal.valid_signals()}
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in handlers for frame, _ in frames)


def _code_of(handler: Any) -> Any:
    """Return the code of a Python function, method or object that can be called; else None."""
    handler = getattr(handler, "func", handler)  # A functools.partial keeps its function in `func`.
    for each in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004
        if code := getattr(each, "__code__", None):
            return code
    return None


def _log(code: Code | Level, text: str, /, **facts: Fact) -> None:
    log.log(getattr(logging, level_of(code).upper(), logging.INFO), "%s", text)


class Recorder:
    """Mirror a session into one device tool; subclass it and override what you need.

    A session calls ``open (enter exit)* close`` once per capture, always on the thread that trains.
    Whatever raises, `SystemExit` too, costs this recorder its place in the run and nothing else:
    the session logs it, notes it in the run, and continues without it. Ctrl-C and what a signal's
    handler raises pass through.

    Attributes:
        always: Whether `enter`, `exit` and `mark` come outside captures, too.
        why_nothing: Why its tool records nothing in this process, if that is so.
        note: Call ``note(level, text)``, from any thread, to log a text and keep it in the run;
            ``level`` is ``info``, ``warning`` or ``error``. The session puts its own there.

    Example::

        >>> class Counting(Recorder):
        ...     spans = 0
        ...     def enter(self, name: str, kind: str, step: int) -> object:
        ...         self.spans += 1
        ...         return self.spans
        >>> recorder = Counting()
        >>> recorder.enter("actor_update", "stage", 1)
        1
    """

    always: bool = False
    why_nothing: str = ""
    note: Notes = staticmethod(_log)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the session's note behind in copies and other processes."""
        return {key: value for key, value in vars(self).items() if key != "note"}

    def open(self, out: Path) -> None:
        """Start the heavy capture; ``out`` is its folder, made by the first to write."""

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Note that a span began; what is returned comes back to `exit`.

        In a capture of whole steps the step itself is such a span: ``("step", "step", 3)``.
        """
        return None

    def exit(self, token: object) -> Counters | Late | None:
        """Note that a span ended; return numbers to store with it, or None.

        Numbers that the device knows only later come as a function. It is asked at the end of each
        step, and a last time when training is over.
        """
        return None

    def mark(self, name: str, step: int) -> None:
        """Note one instant."""

    def close(self) -> None:
        """Stop capturing; slow work on files belongs on a thread, to be awaited in `finish`."""

    def finish(self) -> None:
        """Wait until all files are complete; called once, at the end of the run."""


def recorder_names(
    config: ProfilerConfig, device: str, rank: int | None = None, *, has_torch: bool = True
) -> tuple[str, ...]:
    """Return the recorders of a run, a pure function that never looks at what is installed.

    ``device_time`` is there with every accelerator. Of the captures, ``tools`` decides when given.
    Otherwise ``mstx`` brings the markers of the device, any level but ``level_none`` brings
    torch.profiler, and ``profile_with_memory`` or ``memory.level`` brings the memory of each span.
    torch.profiler needs torch, and a device that it knows. Every capture on Ascend is one of
    torch_npu.profiler, whose ``level_none`` holds nothing but markers. ``nsight`` always brings
    ``nvtx``, inside of it. Without a rank the answer is that of a captured one.

    Example::

        >>> recorder_names(ProfilerConfig(integrated={"stage": "actor_update"}), "cpu")
        ('torch_profiler',)
    """
    timed = device in _TIMED if config.device_time is None else config.device_time
    names = ["device_time"] if timed else []
    if rank is None or config.wants_rank(rank):
        names += _captured(config, device, has_torch)
    return tuple(names)


def _captured(config: ProfilerConfig, device: str, has_torch: bool) -> list[str]:
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
    if block.profile_level != "level_none" and watches and device != "npu" and has_torch:
        names.append("torch_profiler")
    if block.profile_with_memory or config.memory.level:
        names.append("memory")
    return names


def unmet(config: ProfilerConfig, device: str, *, has_torch: bool = True) -> str | None:
    """Say what the configuration asks for that has no recorder here; None if all is met."""
    if not config.captures or config.tools is not None:
        return None
    names = _captured(config, device, has_torch)
    left = f"spans and {' and '.join(names)} are" if names else "only spans are"
    if config.integrated.mstx and device not in _MARKERS:
        mode = "lightweight mode" if config.integrated.lightweight else "mstx"
        return f"{mode}: {device} has no profiler markers, {left} recorded"
    if not names:
        why = f"the configuration enables no capture on {device!r}"
        return f"{why if has_torch else 'PyTorch is not installed'}: {left} recorded"
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
        ConfigError: One of them needs PyTorch, which is not installed.
        RecorderError: One of them cannot work on this machine.
    """
    from lightning_rlprof.recording.accelerator import torch

    names = recorder_names(config, header.device, header.rank, has_torch=torch is not None)
    built: list[Recorder] = []
    for name in names if always else _captured(config, header.device, torch is not None):
        if torch is None and name not in _WITHOUT_TORCH:
            raise ConfigError(
                f"{name} needs PyTorch, which this Python does not have: remove it from the "
                "configuration of this process, or install torch"
            )
        found = build_recorder(name, config, header)
        built += found if isinstance(found, list) else [found]
    return built


def build_recorder(name: str, config: ProfilerConfig, header: Header) -> Any:
    """Return the recorder of a name, or a list of several.

    Its module is imported here, so that a run loads only its own.
    """
    return import_module(f"{__package__}.{name}").build(config, header)
