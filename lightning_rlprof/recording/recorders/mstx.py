"""Mirror spans as MSTX ranges, which the profilers of Ascend NPUs record."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.recording.recorders.npu_profiler import npu_module
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import Header, Kind

_DOMAIN = "rlprof"
_CANARY = "rlprof.canary"
_BROKEN = (
    "MSTX does not work here, so the trace has no stage markers: libms_tools_ext.so of CANN is "
    "missing or broken, the line [ERROR] of torch_npu on the terminal says which"
)


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank.

    Raises:
        RecorderError: torch_npu cannot be imported.
    """
    npu = npu_module("npu")
    stream = npu.current_stream if config.npu.device_ranges else None
    return MstxRecorder(npu.mstx, stream, _why_deaf(config))


def _why_deaf(config: ProfilerConfig) -> str:
    """Say what to look at when no range is heard in a window of this configuration."""
    if config.tools is not None and "npu_profiler" not in config.tools:
        return f"tools={config.tools} lacks npu_profiler, and no other profiler records MSTX"
    if not config.integrated.profile_with_npu:
        return "integrated.profile_with_npu is false, and MSTX is part of the device's trace"
    return "torch_npu.profiler is not running in this capture"


class MstxRecorder(Recorder):
    """Start one MSTX range per span in the domain ``rlprof`` and end it by its number.

    MSTX hears a range only if a profiler runs from its start to its end. So what is open when a
    window opens is restarted in it, and what is open when the window closes is ended before.
    Ranges come outside windows, too, for tools that attach from outside: about 1 µs each.

    Args:
        mstx: The class ``torch_npu.npu.mstx``.
        stream: Returns the stream that ranges are put into, too; None leaves them on the host.
        why_deaf: What to say when a range is not heard in a window.
    """

    always = True

    def __init__(
        self, mstx: Any, stream: Callable[[], Any] | None = None, why_deaf: str = ""
    ) -> None:
        self._mstx, self._stream, self._why_deaf = mstx, stream, why_deaf
        self._open: list[_Range] = []
        self._heard_before: list[_Range] = []
        self._told = self._broken = False

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Start a range."""
        one = _Range(name)
        self._start(one)
        self._open.append(one)
        return one

    def exit(self, token: object) -> None:
        """End the range."""
        assert isinstance(token, _Range)
        self._open.remove(token)
        self._end(token)

    def mark(self, name: str, step: int) -> None:
        """Put one instant."""
        if not self._broken:
            self._mstx.mark(name, domain=_DOMAIN)

    def open(self, out: Path) -> None:
        """Check whether a tool listens, and restart open ranges that it missed."""
        canary = _Range(_CANARY)
        self._start(canary)
        if not canary.number and not self._told:
            self._told = True
            self.note(Code.MSTX_NOT_RECORDED, f"MSTX does not record the stages: {self._why_deaf}")
        self._end(canary)
        self._heard_before = [one for one in self._open if one.number]
        for one in self._open:
            if not one.number:
                self._start(one)

    def close(self) -> None:
        """End open ranges while the profiler still listens; a tool outside keeps listening."""
        for one in reversed(self._open):
            if one not in self._heard_before:
                self._end(one)

    def finish(self) -> None:
        """End ranges that are still open."""
        for one in reversed(self._open):
            self._end(one)

    def _start(self, one: "_Range") -> None:
        if self._broken:
            return
        stream = self._stream() if self._stream is not None else None
        number = self._mstx.range_start(one.message, stream, domain=_DOMAIN)
        # The reason is printed by torch_npu, and would be printed again for every span.
        if number is None:
            self._broken = self._told = True
            self.note(Code.MSTX_NOT_RECORDED, _BROKEN)
        one.number = number or 0

    def _end(self, one: "_Range") -> None:
        if one.number:
            self._mstx.range_end(one.number, domain=_DOMAIN)
            one.number = 0


class _Range:
    """A range and its number, which is 0 while no tool listens."""

    __slots__ = ("message", "number")

    def __init__(self, message: str) -> None:
        self.message, self.number = message, 0
