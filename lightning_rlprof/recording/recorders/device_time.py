"""Measure the device time of stages with a pair of events each, without synchronising."""

import logging
from collections.abc import Callable
from functools import partial
from time import monotonic, sleep
from typing import Any

import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording.recorders.base import Counters, Late, Recorder
from lightning_rlprof.records.records import Header, Kind

log = logging.getLogger(__name__)

_MAX_WAITING = 10_000
_LAST_WAIT_S = 2.0


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank; one that does nothing where events exist only on paper.

    Raises:
        RecorderError: Device time was asked for, and the device has no events that tell a time.
    """
    kind = header.device
    try:
        return DeviceTimeRecorder(_telling_time(kind), _capturing(kind))
    except Exception as error:
        text = f"{kind!r} has no events with timestamps ({error})"
        if config.device_time:
            raise RecorderError(
                f"device_time=true: {text}; remove it, or set it to false"
            ) from error
        log.warning("device times are not recorded: %s", text)
        return Recorder()


def _telling_time(kind: str) -> Callable[[], Any]:
    """Return what makes events of a device: torch's, or with torch_npu 2.6 the device's own."""
    new = partial(torch.Event, device=kind, enable_timing=True)
    try:
        return _tried(new)
    except Exception:
        own = getattr(getattr(torch, kind, None), "Event", None)
        if kind == "cpu" or own is None:
            raise
        return _tried(partial(own, enable_timing=True))


def _tried(new: Callable[[], Any]) -> Callable[[], Any]:
    """Raise where events exist only on paper, or cannot be compared."""
    start, end = new(), new()
    start.record()
    end.record()
    end.synchronize()
    start.elapsed_time(end)
    return new


def _capturing(kind: str) -> Callable[[], bool]:
    found = getattr(getattr(torch, kind, None), "is_current_stream_capturing", None)
    return found if callable(found) else lambda: False


class DeviceTimeRecorder(Recorder):
    """Store ``device_ns`` with every stage, at every step.

    One event is put into the current stream when a stage begins and one when it ends, and no thread
    waits for them: the time between the two is read at the end of a later step, when the device
    has passed both. It is the time that the stream took from the one to the other, so it covers
    kernels and the gaps between them, as precise as the device's events (CUDA: about 0.5 µs).

    Nothing is measured while a CUDA graph is captured, where an event would become part of it.

    Args:
        new_event: Makes an event with ``record``, ``query`` and ``elapsed_time`` (milliseconds).
        is_capturing: Whether the current stream is capturing a graph.
    """

    always = True

    def __init__(
        self, new_event: Callable[[], Any], is_capturing: Callable[[], bool] = lambda: False
    ) -> None:
        self._new, self._is_capturing = new_event, is_capturing
        self._pool: list[Any] = []
        self._waiting = 0
        self._last: Any = None

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Put the first event of a stage into the stream."""
        if kind != "stage" or self._waiting >= _MAX_WAITING or self._is_capturing():
            return None
        return self._recorded()

    def exit(self, token: object) -> Late | None:
        """Put the second event into the stream; the time between them is known later."""
        if token is None or self._is_capturing():
            return None
        self._last = self._recorded()
        self._waiting += 1
        return partial(self._read, token, self._last)

    def finish(self) -> None:
        """Wait a moment for what the device has not passed yet; a device that hangs keeps it."""
        end = monotonic() + _LAST_WAIT_S
        while self._waiting and not self._last.query() and monotonic() < end:
            sleep(0.001)

    def _recorded(self) -> Any:
        event = self._pool.pop() if self._pool else self._new()
        event.record()
        return event

    def _read(self, start: Any, end: Any) -> Counters | None:
        if not end.query():
            return None
        self._waiting -= 1
        nanoseconds = round(start.elapsed_time(end) * 1e6)
        self._pool += (start, end)
        return {"device_ns": nanoseconds}
