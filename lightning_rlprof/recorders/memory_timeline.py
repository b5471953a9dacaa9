"""Sample memory every few milliseconds of a capture, on a thread of its own."""

import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter_ns

import msgspec

from lightning_rlprof import device
from lightning_rlprof.errors import described
from lightning_rlprof.recorders.base import Recorder

__all__ = ["MemoryTimelineRecorder"]

_FILE = "memory-timeline.jsonl"
_COLUMNS = (
    "device_allocated_bytes",
    "device_reserved_bytes",
    "device_used_bytes",
    "host_rss_bytes",
)
_WIDTH = 1 + len(_COLUMNS)
_UNKNOWN = -1
# 40 bytes each: 40 MB in all, and close to three hours at the default interval.
_MOST = 1_000_000
_STOP_S = 5.0
_ROWS_AT_ONCE = 10_000


class MemoryTimelineRecorder(Recorder):
    """Write one ``memory-timeline.jsonl`` per capture.

    Its first line is an object that names columns and units; every other line is an array, one
    sample: ``clock_ns`` on the clock of the run's spans, then bytes, null where the device did not
    tell. A column that is never known, as those of a device on a CPU, is left out.

    Args:
        kind: The kind of device, as `device.device_kind` names it.
        interval_ms: Time between two samples.
        most: Samples after which a capture's timeline ends, with a note.
    """

    def __init__(self, kind: str, interval_ms: float, most: int = _MOST) -> None:
        self._kind, self._interval_ms, self._most = kind, interval_ms, most
        self._out = Path()
        self._sampler: _Sampler | None = None

    def open(self, out: Path) -> None:
        """Start sampling the device that the calling thread uses."""
        self._out = out
        sampler = _Sampler(self._kind, self._interval_ms / 1000, self._most, self.note)
        sampler.start()
        self._sampler = sampler

    def close(self) -> None:
        """Stop sampling, sample once more, and write the file."""
        sampler, self._sampler = self._sampler, None
        if sampler is None:
            return
        sampler.stop()
        self._out.mkdir(parents=True, exist_ok=True)
        names, columns = sampler.known()
        units = [name.rpartition("_")[2] for name in names]
        head = {"columns": names, "units": units, "interval_ms": self._interval_ms}
        encode = msgspec.json.Encoder().encode_lines
        with (self._out / _FILE).open("wb") as file:
            file.write(encode([head]))
            for start in range(0, len(columns[0]), _ROWS_AT_ONCE):
                part = [column[start : start + _ROWS_AT_ONCE] for column in columns]
                file.write(encode(list(_rows(part))))


class _Sampler:
    """One capture's thread and its samples, ``_WIDTH`` numbers each."""

    def __init__(
        self, kind: str, interval_s: float, most: int, note: Callable[[str, str], None]
    ) -> None:
        self._kind, self._interval_s, self._most, self._note = kind, interval_s, most, note
        self._index = device.device_index()
        self._numbers = array("q")
        self._end = threading.Event()
        self._failed = False
        # A daemon, since it may be inside a driver that never answers when the process ends.
        self._thread = threading.Thread(target=self._run, name="rlprof-memory", daemon=True)
        self.start = self._thread.start

    def stop(self) -> None:
        """Take a last sample on this thread after the other one has ended."""
        self._end.set()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            self._note("warning", f"the memory timeline hangs in {self._kind}'s driver and stops")
        elif not (self._failed or self._is_full()):
            self._sample()

    def known(self) -> tuple[list[str], list["array[int]"]]:
        """Return the columns of which anything is known, and their names."""
        numbers = self._numbers[:]  # a thread that hangs may still add to the array
        names = ["clock_ns"]
        columns = [numbers[::_WIDTH]]
        for at, name in enumerate(_COLUMNS, start=1):
            column = numbers[at::_WIDTH]
            if max(column, default=_UNKNOWN) != _UNKNOWN:
                names.append(name)
                columns.append(column)
        return names, columns

    def _run(self) -> None:
        try:
            if self._index is not None:
                device.use_device(self._kind, self._index)
            self._sample()
            while not self._end.wait(self._interval_s):
                if self._is_full():
                    most = f"{self._most:,} samples"
                    self._note("warning", f"a memory timeline ends early, after {most}")
                    return
                self._sample()
        except Exception as error:
            self._failed = True
            self._note("error", f"a memory timeline ends early ({described(error)})")

    def _is_full(self) -> bool:
        return len(self._numbers) >= self._most * _WIDTH

    def _sample(self) -> None:
        found: dict[str, int | None] = {**device.memory_bytes(self._kind)}
        found["host_rss_bytes"] = device.host_rss_bytes()
        values = (found.get(name) for name in _COLUMNS)
        known = (_UNKNOWN if value is None else value for value in values)
        self._numbers.extend((perf_counter_ns(), *known))


def _rows(columns: list["array[int]"]) -> Iterator[list[int | None]]:
    for row in zip(*columns, strict=True):
        yield [None if value == _UNKNOWN else value for value in row]
