"""Sample host and device once a second on a daemon thread, and write what was read to the run."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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
from lightning_rlprof.recording.background.sampler import GcPauses, Pause
from lightning_rlprof.records.notes import Code, Notes
from lightning_rlprof.records.run_directory import MetricsLine

log = logging.getLogger(__name__)

PERIOD_S = 1.0
MOST_SHARE = 0.001
"""Of a core. A machine on which a sample takes longer than a millisecond is sampled less often."""

_STOP_S = 5.0
_DEVICES: dict[str, Callable[[int, str | None], Part]] = {"cuda": nvidia_part, "npu": ascend_part}


Device = tuple[int, str | None]
"""Number of an accelerator, as torch counts, and its UUID if torch tells it."""


class Background:
    """What is sampled while one session records; see `start`.

    Args:
        add: Takes a line of the rank's file.
        note: Keeps a note in the run.
        clock: Clock of the run, in nanoseconds.
        parts: What to read.
        device: Returns this process's accelerator once it is used; called on the training thread.
        kind: Kind of the device.
        claim: Held until the end.
        files: Closed at the end.
        flush: Writes what the run has in memory, if no other thread does.
    """

    def __init__(
        self,
        add: Callable[[MetricsLine], None],
        note: Notes,
        clock: Callable[[], int],
        parts: Sequence[Part],
        *,
        device: Callable[[], Device | None] | None = None,
        kind: str = "cpu",
        claim: HostClaim | None = None,
        files: HostFiles | None = None,
        flush: Callable[[], object] = bool,
    ) -> None:
        self._flush = flush
        self._add, self._note, self._clock = add, note, clock
        self._parts = {part.name: part for part in parts}
        self._device = device if kind in _DEVICES else None
        self._kind, self._claim, self._files = kind, claim, files
        self._found: Device | None = None
        # Of each part the time of the sample, the time at which it was read, and what was read.
        self._before: dict[str, tuple[int, int, Reading]] = {}
        self._written: dict[tuple[str, str], float] = {}
        self._failed: set[str] = set()
        self._pauses = GcPauses()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. A process that may have no more threads trains without it."""
        # A daemon, since it may be inside a driver that never answers when the process ends.
        thread = threading.Thread(target=self._run, name="rlprof-background", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._note(Code.METRICS_MISSING, f"no background metrics: {described(error)}")
        else:
            self._thread = thread

    def end_step(self) -> tuple[dict[str, int], list[Pause]]:
        """Return the garbage collection of a step; called on the training thread."""
        if self._device is not None:
            with suppress(Exception):  # a device that cannot say so has no metrics
                self._found = self._device()
            if self._found is not None:
                self._device = None
        return self._pauses.take()

    def stop(self) -> None:
        """End the thread and let everything go; further calls do nothing."""
        self._pauses.close()
        self._end.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_S)
            if thread.is_alive():
                text = "background metrics: a call into a driver does not return"
                self._note(Code.METRICS_MISSING, text)
                return
        self._close()

    def leave(self) -> None:
        """Do nothing from now on, in a forked child, which has no such thread."""
        self._pauses.close()
        self._thread = None
        self._end = threading.Event()  # which the thread may have been locking
        self._end.set()
        self._close()

    def _close(self) -> None:
        for part in (self._claim, self._files):
            if part is not None:
                part.close()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            text = f"background metrics ended early ({described(error)})"
            self._note(Code.METRICS_MISSING, text)

    def _loop(self) -> None:
        self.sample()  # which opens files: its cost is not that of others
        pause = PERIOD_S
        while not self._end.wait(pause):
            sets_up = self._found is not None  # imports the device's library, once
            begin = time.thread_time()
            self.sample()
            took = 0.0 if sets_up else time.thread_time() - begin
            self._flush()  # samples within a long step, and steps since the last write
            pause = max(PERIOD_S, took / MOST_SHARE)

    def sample(self) -> None:
        """Read all parts once, and add their lines. Never raises an `Exception` of a part."""
        self._pauses.add_up()
        self._add_device()
        missing: dict[str, str] = {}
        sampled = self._clock()
        lines: dict[tuple[int, int | None], tuple[dict[str, Any], dict[str, Any]]] = {}
        for part in tuple(self._parts.values()):
            now = self._clock()  # once more, as another thread may have run for long
            try:
                reading = part.read()
            except Exception as error:
                why = str(error) if type(error) is OSError else described(error)
                if part.name not in self._before:
                    del self._parts[part.name]
                    missing[part.name] = why
                elif part.name not in self._failed:
                    self._failed.add(part.name)
                    text = f"background metrics: no {part.name} at times ({why})"
                    self._note(Code.METRICS_MISSING, text, metrics=part.name)
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
                self._add(MetricsLine(since, sampled, device, *numbers))
        if missing:
            text = "; ".join(f"{name} ({why})" for name, why in missing.items())
            names = ", ".join(missing)
            self._note(Code.METRICS_UNSUPPORTED, f"background metrics lack: {text}", metrics=names)

    def _add_device(self) -> None:
        device, self._found = self._found, None
        if device is not None:
            part = _DEVICES[self._kind](*device)
            self._parts[part.name] = part

    def _is_new(self, part: Part, name: str, value: float) -> bool:
        """Tell whether a limit differs from what was written; all else is written every time."""
        if name not in _CONSTANT:
            return True
        key = part.name, name
        old, self._written[key] = self._written.get(key), value
        return value != old


_CONSTANT = {
    "host_cpu_count",
    "cpu_quota_cores",
    "container_memory_limit_bytes",
    "device_max_clock_mhz",
}


def start(
    add: Callable[[MetricsLine], None],
    note: Notes,
    clock: Callable[[], int],
    *,
    flush: Callable[[], object],
    run: Path,
    kind: str,
    device: Callable[[], Device | None],
) -> Background:
    """Start sampling: this process and its device; and the host, in the first process of each.

    Args:
        add: Takes a line of the rank's file.
        note: Keeps a note in the run.
        clock: Clock of the run.
        flush: Writes what the run has in memory, if no other thread does.
        run: Directory of the run.
        kind: Kind of the device.
        device: Returns the accelerator that the calling thread uses, None until it is used.
    """
    files, claim = HostFiles(), HostClaim(run)
    parts = [*process_parts(files), *(host_parts(files) if claim.is_mine else ())]
    background = Background(
        add, note, clock, parts, device=device, kind=kind, claim=claim, files=files, flush=flush
    )
    background.start()
    return background
