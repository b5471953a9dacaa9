"""Attach memory to the spans of a capture, and watch it more closely where that is wanted."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_rlprof import device
from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import described
from lightning_rlprof.model import Header, Kind, Number
from lightning_rlprof.recorders.base import Recorder
from lightning_rlprof.recorders.memory_snapshot import MemorySnapshotRecorder
from lightning_rlprof.recorders.memory_timeline import MemoryTimelineRecorder

__all__ = ["MemoryRecorder", "build"]


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank: counters, and what ``memory.level`` adds to them."""
    wanted, kind = config.memory, header.device
    parts: list[Recorder] = []
    if wanted.level in ("timeline", "snapshot"):
        parts.append(MemoryTimelineRecorder(kind, wanted.interval_ms))
    if wanted.level == "snapshot":
        sizes = {"max_entries": wanted.max_entries, "stack_depth": wanted.stack_depth}
        parts.append(MemorySnapshotRecorder(kind, header.rank, **sizes))
    return MemoryRecorder(kind, parts)


class MemoryRecorder(Recorder):
    """Store `device.memory_bytes` and ``host_rss_bytes`` with every span that ends in a capture.

    The allocator keeps one peak, so it is reset as spans begin and end, and a span's own peak is
    the highest of its pieces. A piece counts for every span that is open in it, so that tasks which
    interleave get their peaks as nested spans do.

    Args:
        kind: The kind of device, as `device.device_kind` names it.
        parts: Recorders that see the same captures. One that fails is dropped and noted; the
            counters and the others go on.
    """

    def __init__(self, kind: str, parts: Sequence[Recorder] = ()) -> None:
        self._kind = kind
        self._peaks: dict[object, int] = {}
        self._parts = list(parts)
        for part in parts:
            part.note = self._say

    def open(self, out: Path) -> None:
        """Begin with no span open."""
        self._peaks = {}
        self._each(lambda part: part.open(out))

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Open the span's peak, which `exit` asks for by the token."""
        self._each(lambda part: part.enter(name, kind, step))
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

    def close(self) -> None:
        """Let the parts write their files."""
        self._each(lambda part: part.close())

    def finish(self) -> None:
        """Let the parts go."""
        self._each(lambda part: part.finish())

    def _settle(self, found: Mapping[str, Number]) -> None:
        """Give the piece that ends now to all open spans, and start the next."""
        if "device_peak_bytes" in found:
            piece = int(found["device_peak_bytes"])
            self._peaks = {token: max(peak, piece) for token, peak in self._peaks.items()}
            device.reset_peak(self._kind)

    def _each(self, act: Callable[[Recorder], object]) -> None:
        for part in tuple(self._parts):
            try:
                act(part)
            except Exception as error:
                self._parts.remove(part)
                for end in (part.close, part.finish):
                    with suppress(Exception):  # its tool may still be on, and must not stay so
                        end()
                what = described(error)
                self.note("error", f"{type(part).__name__} failed and was dropped ({what})")

    def _say(self, level: str, text: str) -> None:
        """Note what a part says, wherever the session wants it by then."""
        self.note(level, text)
