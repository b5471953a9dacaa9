"""Attach memory to the spans of a capture: each span's own device peak, and the host's RSS."""

from collections.abc import Mapping
from pathlib import Path

from lightning_rlprof import device
from lightning_rlprof.model import Number
from lightning_rlprof.recorders.base import Recorder

__all__ = ["MemoryRecorder"]


class MemoryRecorder(Recorder):
    """Store `device.memory_bytes` and ``host_rss_bytes`` with every span that ends in a capture.

    The allocator keeps one peak, so it is reset as spans begin and end, and each span's own peak is
    the highest of its pieces: a stage's peak includes what happened in the spans inside it.

    Args:
        kind: The kind of device, as `device.device_kind` names it.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._peaks: list[int] = []

    def open(self, out: Path) -> None:
        """Begin with no span open."""
        self._peaks = []

    def enter(self, name: str) -> object:
        """Keep the peak so far for the span around, and start a new one."""
        self._raise_peak(device.memory_bytes(self._kind).get("device_peak_bytes", 0))
        device.reset_peak(self._kind)
        self._peaks.append(0)
        return None

    def exit(self, token: object) -> Mapping[str, Number] | None:
        """Return the span's counters in bytes."""
        found: dict[str, Number] = dict(device.memory_bytes(self._kind))
        if "device_peak_bytes" in found:
            self._raise_peak(int(found["device_peak_bytes"]))
            found["device_peak_bytes"] = self._peaks.pop()
            self._raise_peak(int(found["device_peak_bytes"]))
            device.reset_peak(self._kind)
        rss = device.host_rss_bytes()
        if rss is not None:
            found["host_rss_bytes"] = rss
        return found

    def _raise_peak(self, peak: int) -> None:
        if self._peaks:
            self._peaks[-1] = max(self._peaks[-1], peak)
