"""Attach memory to the spans of a capture: each span's own device peak, and the host's RSS."""

from collections.abc import Mapping
from pathlib import Path

from lightning_rlprof import device
from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.model import Header, Kind, Number
from lightning_rlprof.recorders.base import Recorder

__all__ = ["MemoryRecorder", "build"]


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank."""
    return MemoryRecorder(header.device)


class MemoryRecorder(Recorder):
    """Store `device.memory_bytes` and ``host_rss_bytes`` with every span that ends in a capture.

    The allocator keeps one peak, so it is reset as spans begin and end, and a span's own peak is
    the highest of its pieces. A piece counts for every span that is open in it, so that tasks which
    interleave get their peaks as nested spans do.

    Args:
        kind: The kind of device, as `device.device_kind` names it.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._peaks: dict[object, int] = {}

    def open(self, out: Path) -> None:
        """Begin with no span open."""
        self._peaks = {}

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Open the span's peak, which `exit` asks for by the token."""
        self._settle(device.memory_bytes(self._kind))
        token = object()
        self._peaks[token] = 0
        return token

    def exit(self, token: object) -> Mapping[str, Number] | None:
        """Return the span's counters in bytes."""
        found: dict[str, Number] = dict(device.memory_bytes(self._kind))
        self._settle(found)
        peak = self._peaks.pop(token)
        if "device_peak_bytes" in found:
            found["device_peak_bytes"] = peak
        rss = device.host_rss_bytes()
        if rss is not None:
            found["host_rss_bytes"] = rss
        return found

    def _settle(self, found: Mapping[str, Number]) -> None:
        """Give the piece that ends now to all open spans, and start the next."""
        piece = int(found.get("device_peak_bytes", 0))
        self._peaks = {token: max(peak, piece) for token, peak in self._peaks.items()}
        device.reset_peak(self._kind)
