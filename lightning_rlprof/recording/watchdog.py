"""A thread that looks once a second whether the training makes progress, and reports if not."""

import json
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlprof.errors import described
from lightning_rlprof.recording.open_spans import numbers
from lightning_rlprof.recording.stacks import (
    StackSampler,
    child_processes,
    open_now,
    thread_stacks,
)
from lightning_rlprof.records.hang_reports import (
    FOLDER,
    MOST_REPORTS,
    Cause,
    Collective,
    HangReport,
    Heartbeat,
    OpenSpan,
    Ranges,
    alarm_file,
    alive_file,
    as_collectives,
    dump_file,
    rank_ranges,
    write_beat,
    write_report,
)
from lightning_rlprof.records.notes import Code, Fact
from lightning_rlprof.records.run_directory import file_mode, rank_file
from lightning_rlprof.records.stage_aliases import is_evaluation
from lightning_rlprof.system.files import (
    make_folder,
    owners_of,
    read_inside,
    remove_inside,
    stamp_of,
    user,
    write_inside,
)

if TYPE_CHECKING:
    from lightning_rlprof.recording.session import Session

log = logging.getLogger(__name__)

_TICK_S = 1.0
_BEAT_S = 5.0
_MAX_TICK_S = 2.0  # Seconds; in a longer pause the process may have been stopped.
_TIMES_UNKNOWN = 6  # The timeout is longer if the usual duration is unknown.
_TIMES_LEARNED = 5  # NVRx allows the same multiple of the longest time before.
_TIMES_REPORTED = (1, 2, 4)  # A hang is reported at these multiples of the limit.
_MAX_NAMES = 10_000
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_VARIABLES = (
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_HCCL_DEBUG_INFO_TEMP_FILE",
)
_MAX_DUMP_BYTES = 1 << 26
Known = tuple[tuple[Collective, ...], dict[str, Ranges], tuple[str, ...]]


class Watchdog:
    """Report when no span has begun or ended for long, until `stop`; training continues.

    A rank may be quiet for ``timeout_s``, or five times as long as it was before where it is now,
    if that is more. It may for six times ``timeout_s``:

    - before the first step has ended, and between steps
    - in a stage or an outermost region that it enters for the first time, where it may compile
    - in each checkpoint and evaluation
    - in a shadow step, which has no spans

    An actor that waits for its next call, and a session at a prompt, may wait for ever.

    Time in which the whole process was stopped does not count.

    Args:
        session: Whose progress is watched.
        timeout_s: Seconds.
    """

    def __init__(self, session: "Session", timeout_s: float) -> None:
        self._session, self._timeout_s = session, timeout_s
        self._clock, self._rank, self._run = session.clock, session.header.rank, session.run
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rlprof-watchdog", daemon=True)
        self._began_unix_s = time.time()
        self._ticked_ns = self._clock()
        self._quiet_ns = 0
        self._seen: tuple[Any, ...] = ()
        self._first = self._number = next(numbers)  # Spans of this session have higher numbers.
        # Names and kinds of open spans, outermost first; they are known only in a long silence.
        self._open: tuple[tuple[str, str], ...] | None = None
        self._last = self._after = ""  # These spans ended last, now and when the silence began.
        self._known: set[str] = set()
        self._longest_s: dict[str, float] = {}  # The keys are the spans before a silence.
        self._alarms = 0  # Alarms of the current hang.
        self._reports = 0
        self._reported_ns: int | None = None
        self._beat_ns: int | None = None
        self._mode = file_mode(session.header.config)
        self._owners = owners_of(rank_file(self._run, self._rank))
        self._alarm_seen = self._alarm_time()
        # It samples the stack of the training thread, until it fails.
        self._sampler: StackSampler | None = StackSampler(session, self._first)

    def start(self) -> "Watchdog":
        """Begin to watch. A process that may have no more threads trains without it."""
        with suppress(OSError):  # From now on, other processes may ask for stacks.
            make_folder(self._run, self._run / FOLDER)
        try:
            self._thread.start()
        except RuntimeError as error:
            text = f"hangs are not watched for: {described(error)}"
            self._session.note(Code.HANGS_NOT_WATCHED, text)
        return self

    def stop(self) -> None:
        """Leave the session alone from now on, and remove the sign of life."""
        self._end.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_TICK_S)
        if self._sampler is not None and not self._thread.is_alive():
            self._sampler.end()
        if self._beat_ns is not None:
            with suppress(OSError):
                remove_inside(self._run, alive_file(self._run, self._rank))
        with suppress(OSError):
            (self._run / FOLDER).rmdir()  # It stays if there are reports or other ranks.

    def _watch(self) -> None:
        look_at = time.monotonic() + _TICK_S
        while not self._end.wait(_TICK_S if self._sampler is None else self._sampler.wait_s):
            if self._sampler is not None:
                self._sample(self._sampler)
                if time.monotonic() < look_at:
                    continue
                look_at = time.monotonic() + _TICK_S
            try:
                self.look()
            except Exception as error:  # The training continues after any error.
                log.warning("the watchdog for hangs stopped: %s", error, exc_info=error)
                return

    def _sample(self, sampler: StackSampler) -> None:
        try:
            sampler.look()
        except Exception as error:  # The training continues after any error.
            self._sampler = None
            text = f"stacks are no longer sampled: {described(error)}"
            self._session.note(Code.STACKS_NOT_SAMPLED, text)

    # ---- once a second

    def look(self) -> None:
        """Look once: at the progress, at alarms of other ranks; write what is due."""
        now = self._clock()
        passed_s, self._ticked_ns = (now - self._ticked_ns) / 1e9, now
        if self._has_progress():
            self._end_quiet()
        else:
            self._quiet_ns += round(min(passed_s, _MAX_TICK_S) * 1e9)
        quiet_s = self._quiet_ns / 1e9
        if self._beat_ns is None or now - self._beat_ns >= min(_BEAT_S, self._timeout_s) * 1e9:
            self._beat(now, quiet_s)
        if self._is_due(quiet_s):
            self._alarms += 1
            self._raise_alarm(quiet_s)
        elif self._alarm_seen != (alarm := self._alarm_time()):
            self._alarm_seen = alarm
            if self._reported_ns is None or now - self._reported_ns > self._timeout_s * 5e8:
                self._report("asked", quiet_s)
        if self._reports and quiet_s:
            keep_dump(self._run, self._rank, self._began_unix_s, self._mode)

    def _is_due(self, quiet_s: float) -> bool:
        """Return whether the rank has been quiet for too long, again if it has reported that."""
        if quiet_s < self._timeout_s or self._alarms == len(_TIMES_REPORTED):
            return False
        if self._open is None:
            thread, spans = self._session.training_thread, open_now(self._first)
            self._open = tuple((one.name, one.kind) for one in spans if one.thread == thread)
        return quiet_s >= self._limit_s() * _TIMES_REPORTED[self._alarms] and not self._is_excused()

    def _has_progress(self) -> bool:
        """Return whether a span or a step has begun or ended since the last look."""
        session, before = self._session, self._number
        recent = session.buffer.recent()
        last, self._last = (recent[-1].id, recent[-1].name) if recent else (None, "")
        # Spans take numbers from the same counter, so a gap shows new spans without a cost to them.
        self._number = next(numbers)
        seen = (last, session.step, session.waiting)
        own = 1 if self._sampler is None else 1 + self._sampler.take_numbers()
        changed = self._number != before + own or seen != self._seen
        self._seen = seen
        if changed and len(self._known) < _MAX_NAMES:
            self._known.update(span.name for span in recent)
        return changed

    def _end_quiet(self) -> None:
        quiet_s, self._quiet_ns = self._quiet_ns / 1e9, 0
        if quiet_s >= self._timeout_s / _TIMES_LEARNED:
            self._longest_s[self._after] = max(self._longest_s.get(self._after, 0.0), quiet_s)
        self._open, self._after = None, self._last
        if self._alarms:
            self._alarms = 0
            self._report("recovered", quiet_s)
            text = f"progress again after {quiet_s:.0f} s without any"
            self._session.note(Code.PROGRESS_AGAIN, text, quiet_s=round(quiet_s, 3))

    def _limit_s(self) -> float:
        """Return how long the rank may be quiet where it is."""
        times = 1 if self._session.has_steps and self._is_usual() else _TIMES_UNKNOWN
        return max(times * self._timeout_s, _TIMES_LEARNED * self._longest_s.get(self._after, 0.0))

    def _is_usual(self) -> bool:
        """Return whether the rank is where it was before, and in what is usually short."""
        inside = self._open or ()
        if not inside:
            return not (self._session.waiting or self._session.silent_thread)
        if any(is_evaluation(name) for name, _ in inside):
            return False
        # Inner regions may be named after their data, so only inner stages count. Code that takes
        # long because it is compiled is a stage.
        chosen = [name for at, (name, kind) in enumerate(inside) if not at or kind == "stage"]
        return self._known.issuperset(chosen)

    def _is_excused(self) -> bool:
        """Return whether it is right to wait here, for however long."""
        session = self._session
        is_idle = session.waiting and not self._open
        return is_idle and (session.loop.idles or hasattr(sys, "ps1"))

    # ---- what is written

    def _beat(self, now: int, quiet_s: float) -> None:
        with suppress(OSError):  # The disk may be full, or gone.
            make_folder(self._run, self._run / FOLDER)
            beat = Heartbeat(time.time_ns(), self._session.step, round(quiet_s, 3))
            write_beat(self._run, self._rank, beat, self._mode)
        self._beat_ns = now

    def _raise_alarm(self, quiet_s: float) -> None:
        session, is_first = self._session, self._alarms == 1
        where = f" in {self._open[-1][0]}" if self._open else ""
        if is_first:
            facts: dict[str, Fact] = {"quiet_s": round(quiet_s, 3), "step": session.step}
            session.note(
                Code.NO_PROGRESS,
                f"no progress for {quiet_s:.0f} s{where}, step {session.step}. "
                f"See where: rlprof hang {self._run}",
                **facts,
                **({"span": self._open[-1][0]} if self._open else {}),
            )
        self._report("hang" if is_first else "still", quiet_s)
        with suppress(OSError):
            write_inside(self._run, alarm_file(self._run), b"", self._mode)
        self._alarm_seen = self._alarm_time()
        session.buffer.flush_if_free()

    def _report(self, cause: Cause, quiet_s: float) -> None:
        if self._reports >= MOST_REPORTS or self._end.is_set():
            return
        self._reports += 1
        session, thread = self._session, self._session.training_thread
        self._reported_ns = now = self._clock()
        spans = [
            OpenSpan(each.name, each.kind, each.step, now - each.start_ns, each.thread == thread)
            for each in open_now(self._first)
        ]
        collectives, groups, remarks = last_collectives()
        report = HangReport(
            rank=self._rank,
            number=self._reports,
            cause=cause,
            unix_ns=time.time_ns(),
            quiet_s=round(quiet_s, 3),
            limit_s=self._limit_s(),
            step=session.step,
            in_step=not session.waiting,
            last_span=self._last or None,
            spans=tuple(spans),
            threads=() if cause == "recovered" else thread_stacks(thread, self._end),
            collectives=collectives,
            groups=groups,
            children=child_processes(),
            remarks=remarks,
        )
        try:
            make_folder(self._run, self._run / FOLDER)
            write_report(self._run, report, self._mode)
        except OSError as error:
            log.warning("the report of a hang cannot be written: %s", error)

    def _alarm_time(self) -> tuple[int, int] | None:
        return stamp_of(alarm_file(self._run), self._owners)


def last_collectives() -> Known:
    """Return the last collectives, the ranks of each group, and what could not be found out.

    It takes a millisecond or, if the recorder is full, some 60.
    """
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    torch = sys.modules.get("torch")
    if distributed is None or torch is None:
        return (), {}, ()
    module = getattr(torch._C, "_distributed_c10d", None)
    found: list[Collective] = []
    remarks: tuple[str, ...] = ()
    for name in _DUMPS:
        dump = getattr(module, name, None)
        if dump is None:
            continue
        try:
            found += as_collectives(json.loads(dump(True, False)))
        except Exception as error:  # Another version may write another format.
            remarks += (f"torch's flight recorder: {error}",)
    if not any(hasattr(module, name) for name in _DUMPS):
        remarks += ("this version of torch has no flight recorder",)
    return tuple(dict.fromkeys(found)), _groups(distributed), remarks


def _groups(distributed: Any) -> dict[str, Ranges]:
    with suppress(Exception):  # The names are private, so any version may lack them.
        world = distributed._world
        ranks = world.pg_group_ranks
        named = world.pg_names.items()
        return {str(name): rank_ranges(sorted(ranks[group])) for group, name in named}
    return {}


def keep_dump(run: Path, rank: int, since_unix_s: float, mode: int = 0o600) -> None:
    """Copy the file that torch writes when a collective times out, once, to the run directory.

    torch ends the process soon after. A file from before ``since_unix_s`` is another training's,
    and one of another user in a folder for all, such as ``/tmp``, is not read.
    """
    copy = dump_file(run, rank)
    if os.path.lexists(copy):
        return
    for prefix in (*map(os.environ.get, _VARIABLES), _default()):
        if not prefix:
            continue
        path = Path(f"{prefix}{rank}")
        with suppress(OSError):
            if path.lstat().st_mtime < since_unix_s:
                continue
            if data := read_inside(path.parent, path, _MAX_DUMP_BYTES, (user(),)):
                write_inside(run, copy, data, mode)
                return


def _default() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "torch", "comm_lib_trace_rank_")
