"""Sample host and device once a second on a daemon thread; what steps count of this process."""

import gc
import logging
import os
import threading
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_rlprof.errors import described
from lightning_rlprof.recording.background.readings import (
    HostClaim,
    HostFiles,
    Part,
    Reading,
    ascend_part,
    host_parts,
    nvidia_part,
    process_parts,
    rates,
)
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import GC_COUNT, GC_PAUSE
from lightning_rlprof.records.run_directory import MetricsLine
from lightning_rlprof.system.process import limit_bytes, pages, resident_bytes

if TYPE_CHECKING:
    from lightning_rlprof.recording.session import Session

log = logging.getLogger(__name__)

PERIOD_S = 1.0

MAX_SHARE = 0.001
"""Of a core. A machine on which a sample takes longer than a millisecond is sampled less often."""

_STOP_S = 5.0
_DEVICES: dict[str, Callable[[int, str | None], Part]] = {"cuda": nvidia_part, "npu": ascend_part}
_CONSTANT = {
    "host_cpu_count",
    "cpu_quota_cores",
    "container_memory_limit_bytes",
    "device_max_clock_mhz",
}

LONG_NS = 1_000_000
"""A pause of this length or more becomes a region."""

_MAX_EVENTS = 1 << 17  # Each collection adds two, until `GcPauses.take` is called.
_MAX_PAUSES = 1 << 12  # Long pauses between two steps.

Device = tuple[int, str | None]
"""Number of an accelerator, as torch counts, and its UUID if torch tells it."""


class Sampler:
    """Read parts once a second, on a thread of its own, and add their lines to a run.

    Args:
        session: The session.
        parts: What to read.
        max_share: How much of a core it may take; a machine that is too slow is read less often.
    """

    def __init__(
        self, session: "Session", parts: Sequence[Part], max_share: float = MAX_SHARE
    ) -> None:
        self._session, self._max_share = session, max_share
        self._parts = {part.name: part for part in parts}
        # Per part: time of the sample, time of the reading, and the reading.
        self._before: dict[str, tuple[int, int, Reading]] = {}
        self._written: dict[tuple[str, str], float] = {}
        self._failed: set[str] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. A process that may have no more threads trains without it."""
        # A daemon, since it may be inside a driver that never answers when the process ends.
        thread = threading.Thread(target=self._run, name="rlprof-background", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._session.note(Code.METRICS_MISSING, f"no background metrics: {described(error)}")
        else:
            self._thread = thread

    def stop(self) -> None:
        """End the thread and let everything go; further calls do nothing."""
        self._end.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_S)
            if thread.is_alive():
                text = "background metrics: a call to a driver or server does not return"
                self._session.note(Code.METRICS_MISSING, text)
                return
        self._close()

    def leave(self) -> None:
        """Do nothing from now on, in a forked child, which has no such thread."""
        self._thread = None
        self._end = threading.Event()  # The thread may have held the lock of the old event.
        self._end.set()
        self._close()

    def _close(self) -> None:
        """Let go what is held."""

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            text = f"background metrics ended early ({described(error)})"
            self._session.note(Code.METRICS_MISSING, text)

    def _loop(self) -> None:
        self.sample()  # The first sample opens files, so its cost is not typical.
        pause = PERIOD_S
        while not self._end.wait(pause):
            took = self._cpu_s()
            # It writes samples within a long step, and steps since the last write.
            self._session.buffer.flush_if_free()
            pause = max(PERIOD_S, took / self._max_share)

    def _cpu_s(self) -> float:
        """Read all parts once; return the processor time that it took."""
        begin = time.thread_time()
        self.sample()
        return time.thread_time() - begin

    def sample(self) -> None:
        """Read all parts once, and add their lines. Never raises an `Exception` of a part."""
        missing: dict[str, str] = {}
        sampled = self._session.clock()
        lines: dict[tuple[int, int | None], tuple[dict[str, Any], dict[str, Any]]] = {}
        for part in tuple(self._parts.values()):
            now = self._session.clock()  # Another thread may have run for long since `sampled`.
            try:
                reading = part.read()
            except Exception as error:
                why = str(error) if type(error) is OSError else described(error)
                if part.name not in self._before and not part.may_come:
                    del self._parts[part.name]
                    missing[part.name] = why
                elif part.name not in self._failed:
                    self._failed.add(part.name)
                    text = f"background metrics: no {part.name} at times ({why})"
                    self._session.note(Code.METRICS_MISSING, text, metrics=part.name)
                continue
            since, read, last = self._before.get(part.name, (sampled, now, Reading()))
            self._before[part.name] = sampled, now, reading
            grown, values = lines.setdefault((since, part.device), ({}, {}))
            grown |= rates(last.totals, reading.totals, now - read)
            values |= {
                k: value for k, value in reading.values.items() if self._is_new(part, k, value)
            }
        for (since, device), numbers in lines.items():
            if any(numbers):
                self._session.add(MetricsLine(since, sampled, device, *numbers))
        if missing:
            text = "; ".join(f"{name} ({why})" for name, why in missing.items())
            names = ", ".join(missing)
            self._session.note(
                Code.METRICS_UNSUPPORTED, f"background metrics lack: {text}", metrics=names
            )

    def _is_new(self, part: Part, name: str, value: float) -> bool:
        """Tell whether a limit differs from what was written; all else is written every time."""
        if name not in _CONSTANT:
            return True
        key = part.name, name
        old, self._written[key] = self._written.get(key), value
        return value != old


class Background(Sampler):
    """What is sampled while one session records.

    That is its process and its device and, in the first process of each host, the host.

    Args:
        session: The session.
        parts: What to read instead of process and host.
        device: Returns this process's accelerator once it is used; called on the training thread.
    """

    def __init__(
        self,
        session: "Session",
        parts: Sequence[Part] | None = None,
        device: Callable[[], Device | None] | None = None,
    ) -> None:
        self._kind = session.header.device
        self._held: tuple[HostFiles | HostClaim, ...] = ()
        if parts is None:
            self._held = files, claim = HostFiles(), HostClaim(session.run)
            parts = [*process_parts(files), *(host_parts(files) if claim.is_mine else ())]
        super().__init__(session, parts)
        self._device = device if self._kind in _DEVICES else None
        self._found: Device | None = None
        self._pauses = GcPauses()

    def end_step(self) -> tuple[dict[str, int], list["Pause"]]:
        """Return the garbage collection of a step; called on the training thread."""
        if self._device is not None:
            with suppress(Exception):  # A device that is unknown has no metrics.
                self._found = self._device()
            if self._found is not None:
                self._device = None
        return self._pauses.take()

    def stop(self) -> None:
        """End the thread and let everything go; further calls do nothing."""
        self._pauses.close()
        super().stop()

    def leave(self) -> None:
        """Do nothing from now on, in a forked child, which has no such thread."""
        self._pauses.close()
        super().leave()

    def _close(self) -> None:
        for each in self._held:
            each.close()

    def _cpu_s(self) -> float:
        sets_up = self._found is not None  # This sample imports the device's library, once.
        took = super()._cpu_s()
        return 0.0 if sets_up else took

    def sample(self) -> None:
        """Read all parts once, and add their lines. Never raises an `Exception` of a part."""
        self._pauses.add_up()
        self._add_device()
        super().sample()

    def _add_device(self) -> None:
        device, self._found = self._found, None
        if device is not None:
            part = _DEVICES[self._kind](*device)
            self._parts[part.name] = part


def start(session: "Session", device: Callable[[], Device | None]) -> Background:
    """Start to sample for a session; see `Background`."""
    background = Background(session, device=device)
    background.start()
    return background


class Pause(NamedTuple):
    """One collection of `LONG_NS` or more, and the thread that ran it."""

    thread: int
    start_ns: int
    end_ns: int


def clock_in_c(events: "deque[Any]") -> Any:
    """Return a callback for `gc.callbacks` that runs no Python code.

    It appends ``(time, thread)`` when a collection starts, and the time when it stops. Python
    drops an exception that leaves a callback, and the handler of a signal runs in the next Python
    function: a Ctrl-C in a collection would reach such a callback and be lost. This one is made of
    C functions alone, so that the signal reaches the training.

    Python calls ``callback(phase, info)``, that is ``getattr(phases, phase, info)``: it reads the
    property ``start`` or ``stop``, which appends.
    """
    start: Iterator[None] = map(
        events.append, zip(iter(perf_counter_ns, None), iter(get_ident, None), strict=False)
    )
    stop: Iterator[None] = map(events.append, iter(perf_counter_ns, None))
    names = {"start": property(partial(next, start)), "stop": property(partial(next, stop))}
    return partial(getattr, type("Phases", (), names)())


class GcPauses:
    """Count the pauses of this process, of all its threads: each waits for the interpreter."""

    def __init__(self) -> None:
        self._events: deque[Any] = deque(maxlen=_MAX_EVENTS)
        self._callback = clock_in_c(self._events)
        self._lock = threading.Lock()
        self._open: tuple[int, int] | None = None
        self._ns = self._count = 0
        self._long: deque[Pause] = deque(maxlen=_MAX_PAUSES)
        gc.callbacks.append(self._callback)

    def close(self) -> None:
        """Stop listening; further calls do nothing."""
        with suppress(ValueError):
            gc.callbacks.remove(self._callback)

    def add_up(self) -> None:
        """Take in what was appended so far: a step of minutes may have millions of collections."""
        with self._lock:
            for _ in range(len(self._events)):
                event = self._events.popleft()
                if isinstance(event, tuple):
                    self._open = event
                elif self._open is not None:
                    (start, thread), self._open = self._open, None
                    self._ns += event - start
                    self._count += 1
                    if event - start >= LONG_NS:
                        self._long.append(Pause(thread, start, event))

    def take(self) -> tuple[dict[str, int], list["Pause"]]:
        """Return ``gc_pause_ns`` and ``gc_collections`` since the last call, and long pauses."""
        if not self._events and not self._count:  # Nearly all short steps have none.
            return {GC_PAUSE: 0, GC_COUNT: 0}, []
        self.add_up()
        with self._lock:
            found = {GC_PAUSE: self._ns, GC_COUNT: self._count}, [*self._long]
            self._ns = self._count = 0
            self._long.clear()
        return found


class _OpenFile:
    """A file of ``/proc`` that stays open: to open it at every step takes ten times as long."""

    def __init__(self, path: str) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        number, self._file = self._file, -1
        if number >= 0:
            os.close(number)

    def _read(self) -> bytes:
        return os.pread(self._file, 80, 0)


class HostMemory(_OpenFile):
    """Counters of resident memory for the steps of one thread."""

    def __init__(self) -> None:
        super().__init__("/proc/self/statm")
        self._limit = limit_bytes()

    def counters(self) -> dict[str, int]:
        """Return ``host_rss_bytes`` and ``children_rss_bytes``.

        Children are those that the calling thread started, such as DataLoader workers. Both are
        left out where they are unknown. The first call also returns ``host_limit_bytes``: what the
        container allows, else the memory of the machine.
        """
        found = self.own()
        if found and self._limit is not None:
            found["host_limit_bytes"], self._limit = self._limit, None
        with suppress(OSError), open("/proc/thread-self/children", encoding="ascii") as file:
            sizes = [resident_bytes(pid) for pid in file.read().split()]
            if known := [size for size in sizes if size is not None]:
                found["children_rss_bytes"] = sum(known)
        return found

    def own(self) -> dict[str, int]:
        """Return ``host_rss_bytes``, nothing where it is unknown."""
        with suppress(OSError, IndexError, ValueError):
            return {"host_rss_bytes": pages(self._read())}
        return {}


class CpuWait(_OpenFile):
    """The time that the calling thread waits for a CPU, as Linux counts it."""

    def __init__(self) -> None:
        super().__init__("/proc/thread-self/schedstat")
        self._before = self._total()

    def counters(self) -> dict[str, int]:
        """Return ``cpu_wait_ns`` since the last call; nothing if it is unknown."""
        before, self._before = self._before, self._total()
        if before is None or self._before is None:
            return {}
        return {"cpu_wait_ns": max(self._before - before, 0)}

    def _total(self) -> int | None:
        with suppress(OSError, IndexError, ValueError):  # Not every kernel has the file.
            return int(self._read().split()[1])
        return None
