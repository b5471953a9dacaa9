"""One rank's recording: buffer spans, open captures, tell recorders, outlive failures."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from lightning_rlprof import marking, window
from lightning_rlprof.capture import Capture
from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.model import Header, Kind, Number, as_number
from lightning_rlprof.recorders.base import Recorder
from lightning_rlprof.tracefile import TraceWriter, rank_directory

__all__ = ["Session", "current"]

log = logging.getLogger(__name__)

_FLUSH_NS = 1_000_000_000
_TOTALLED = ("stage", "step")


class _Process:
    """The one thing that is global to a process: which session records, if any."""

    session: "Session | None" = None
    watches_forks = False


def current() -> "Session | None":
    """Return the session that records in this process, or None."""
    return _Process.session


class Session:
    """Record one rank from construction to `close`; one at a time in a process.

    Args:
        config: What to record.
        run: The run directory, common to all ranks.
        header: First line of this rank's file.
        recorders: What captures consist of.
        clock: Monotonic nanoseconds.

    Raises:
        ConfigError: The run directory cannot be written, or a session is recording already.

    Example::

        >>> import tempfile
        >>> from lightning_rlprof.testing import make_header
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Session(ProfilerConfig(), Path(folder), make_header()) as session:
        ...         session.begin_step(1)
        ...         with marking.stage("actor_update"):
        ...             pass
        ...         session.end_step()
    """

    def __init__(
        self,
        config: ProfilerConfig,
        run: Path,
        header: Header,
        recorders: Sequence[Recorder] = (),
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        _refuse_a_second()
        self.config, self.header, self.clock = config, header, clock
        self.run: Path = run
        self.step = self._ended = 0
        self.step_totals: dict[str, tuple[int, dict[str, Number]]] = {}
        self._writer = _open_writer(run, header)
        self._rows: list[tuple[Any, ...]] = []
        self.append = self._rows.append
        self.flush_at_ns = clock() + _FLUSH_NS
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._lost = 0
        self._totals: dict[str, tuple[int, dict[str, Number]]] = {}
        self._step_start: int | None = None
        self._edge: int | None = None
        self._trainer_thread = threading.get_ident()
        self._closed = False
        self._mode = ""
        self._capture = Capture(self, rank_directory(run, header.rank), recorders)
        _Process.session = self
        _watch_forks()
        self._tune()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self.abandon_step(interrupted=True)
        self.close("finished" if kind is None else f"interrupted by {kind.__name__}")

    # ---- steps

    def begin_step(self, step: int) -> None:
        """Begin a step where the last one ended; a capture that opens now is outside of both."""
        self.step = step
        action = window.at_step(self.config, self.header.rank, step, is_open=self._capture.is_open)
        if action == "open":
            self._capture.open(step, None)
            self._edge = None
        elif action == "close":
            self._capture.close()
            self._edge = None
        self._step_start = self.clock() if self._edge is None else self._edge
        self._tune()

    def end_step(self) -> None:
        """End the step, close a capture that ends with it, and bring everything to the disk."""
        self._edge = self._write_step({})
        self._ended = self.step
        rank, is_open = self.header.rank, self._capture.is_open
        if window.after_step(self.config, rank, self.step, is_open=is_open) == "close":
            self._capture.close()
            self._edge = None
            self._tune()
        self.flush()
        self.step_totals, self._totals = self._totals, {}

    def abandon_step(self, *, interrupted: bool) -> None:
        """Leave a step that will not end: interrupted, it stays in the run and is marked so.

        Else it never really began, and a capture that waited for it does not count.
        """
        if interrupted and self._step_start is not None:
            self._write_step({"interrupted": 1})
        elif self._step_start is not None:
            self._capture.forget(self.step)
        self._step_start = self._edge = None

    def _write_step(self, counters: dict[str, Number]) -> int:
        now = self.clock()
        if self._capture.saw(self.step):
            counters["capture"] = 1
        if self._step_start is not None:
            self.record("step", "step", self._step_start, now, counters)
        self._step_start = None
        return now

    @property
    def captured_last_step(self) -> bool:
        """Tell whether a capture was open in the step that `step_totals` describes."""
        return bool(self.step_totals.get("step", (0, {}))[1].get("capture"))

    def record(
        self,
        name: str,
        kind: Kind,
        start_ns: int,
        end_ns: int,
        counters: Mapping[str, Number] | None = None,
    ) -> None:
        """Add a span whose two ends are known; its parent is the span that is open now."""
        ends = (start_ns, end_ns, threading.get_ident())
        ids = (marking.next_id(), marking.open_id())
        self.append(("span", name, kind, self.step, *ends, *ids, counters or None))

    # ---- what markers call while a capture is open or may open

    def enter(self, name: str, kind: Kind) -> object:
        """Open the capture that this stage asks for and tell the recorders."""
        if threading.get_ident() != self._trainer_thread:
            return None
        opens = kind == "stage" and self._opens_at(name)
        if opens:
            self._capture.open(self.step, name)
        return self._capture.enter(name, closes=opens)

    def _opens_at(self, stage: str) -> bool:
        self._capture.seen.add(stage)
        is_open, rank = self._capture.is_open, self.header.rank
        return window.at_stage(self.config, rank, self.step, stage, is_open=is_open) == "open"

    def exit(self, token: object) -> dict[str, Number] | None:
        """Tell the recorders in reverse order; close the capture that this stage opened."""
        return self._capture.exit(token)

    # ---- lines

    def note(self, level: str, text: str) -> None:
        """Log a remark and keep it in the run; below a warning only rank 0 logs."""
        number = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}[level]
        if self.header.rank == 0 or number > logging.INFO:
            log.log(number, "%s", text)
        self.append(("note", self.clock(), level, text))

    def flush(self) -> None:
        """Append what is complete to the file; a full disk costs lines, never a run."""
        with self._lock:
            rows = self._rows[:]
            if not rows or self._closed:
                return
            self._add_totals(rows)
            self._write(rows)
            del self._rows[: len(rows)]
            self.flush_at_ns = self.clock() + _FLUSH_NS

    def close(self, status: str = "finished") -> None:
        """Finish every file and stop listening; further calls do nothing.

        Args:
            status: ``finished`` or why the run ended early; it becomes the last line.
        """
        if self._closed:
            return
        try:
            self._capture.finish()
            if reason := self._capture.why_nothing(self.config, self.header.rank, self._ended):
                self.note("warning", reason)
            self.append(("end", self.clock(), status))
            self.flush()
        finally:
            marking.listen(None)
            self._closed = True
            self._writer.close()
            if _Process.session is self:
                _Process.session = None

    def _tune(self) -> None:
        """Choose how markers behave: mirrored only where a capture is or may be open."""
        armed = window.arms_stages(self.config, self.header.rank, self.step)
        mirrored = self._capture.is_open or armed
        mode = "mirrored" if mirrored else "spans" if self.config.spans else "off"
        if mode != self._mode:  # a change makes the interpreter forget what it learned of markers
            self._mode = mode
            marking.listen(None if mode == "off" else self, mirrored=mirrored)

    def _write(self, rows: list[tuple[Any, ...]]) -> None:
        named = {row[6] for row in rows if row[0] == "span"} - self._threads
        lines = self._thread_lines(named) + rows
        if self._lost:
            text = f"{self._lost} lines could not be written and are lost"
            lines.insert(0, ("note", self.clock(), "error", text))
        try:
            self._writer.write(lines)
        except OSError as error:
            if not self._lost:
                log.warning("%s cannot be written, spans are lost: %s", self._writer.path, error)
            self._lost += len(rows)
        else:
            self._lost = 0
            self._threads |= named

    def _thread_lines(self, idents: set[int]) -> list[tuple[Any, ...]]:
        if not idents:
            return []
        alive = {thread.ident: thread.name for thread in threading.enumerate()}
        return [("thread", ident, alive.get(ident, f"thread {ident}")) for ident in sorted(idents)]

    def _add_totals(self, rows: list[tuple[Any, ...]]) -> None:
        for row in rows:
            if row[0] == "span" and row[2] in _TOTALLED and row[6] == self._trainer_thread:
                total, numbers = self._totals.get(row[1], (0, {}))
                for name, value in (row[9] or {}).items():
                    numbers[name] = numbers.get(name, 0) + (as_number(value) or 0)
                self._totals[row[1]] = (total + row[5] - row[4], numbers)


def _refuse_a_second() -> None:
    if running := _Process.session:
        raise ConfigError(f"a session is recording into {running.run} already; close it first")


def _open_writer(run: Path, header: Header) -> TraceWriter:
    try:
        return TraceWriter(run, header)
    except OSError as error:
        raise ConfigError(
            f"integrated.profile_save_path: {run} cannot be written ({error.strerror}); "
            "choose a directory that this process may write"
        ) from error


def _watch_forks() -> None:
    if not _Process.watches_forks:
        os.register_at_fork(after_in_child=_leave_to_parent)
        _Process.watches_forks = True


def _leave_to_parent() -> None:
    """Stop recording in a forked child: the file belongs to the parent."""
    _Process.session = None
    marking.listen(None)
