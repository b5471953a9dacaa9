"""Captures that are asked for while the training runs: found, waited for, and limited.

Requests reach hosts that do not share the run directory by the store of the process group.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import ValidationError

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.validation import explain
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.recording.accelerator import torch
from lightning_rlprof.recording.anomalies import MOST_FOR_ALL, Anomalies, Anomaly, choose, facts_of
from lightning_rlprof.recording.clock_sync import default_store
from lightning_rlprof.recording.open_spans import Span
from lightning_rlprof.recording.recorders.base import build_recorders, unmet
from lightning_rlprof.records.capture_request import (
    CaptureRequest,
    decode_request,
    read_request,
    request_file,
    steps_ahead,
    write_request,
)
from lightning_rlprof.records.notes import Code, Fact, Remark
from lightning_rlprof.records.run_directory import rank_file
from lightning_rlprof.system.files import owners_of, stamp_of

if TYPE_CHECKING:
    from lightning_rlprof.recording.session import Session


LOOK_NS = 500_000_000
"""How often a rank looks for a request, in ns: a look takes up to 0.1 ms on a busy machine."""

_MAX_CAPTURES = 20  # Captures that the configuration names do not count.
_ANOMALIES, _PER_HOUR, _HOUR_NS = 10, 3, 3_600_000_000_000
_STEPS = 2
_CHOICES = ("roles", "ranks", "steps", "discrete", "tokens")

POLL_S = 0.5
"""How often the store is asked: an answer takes its thread some 0.15 ms."""


def requested(config: ProfilerConfig, request: CaptureRequest) -> ProfilerConfig:
    """Return a configuration that captures what is asked for, with the tools that were chosen.

    Raises:
        ValidationError: They don't go together.
    """
    left_out: Any = {**dict.fromkeys(_CHOICES, True), "integrated": {"profile_ranks"}}
    kept = config.model_dump(exclude_unset=True, exclude=left_out)
    kept["integrated"] = {
        **kept.get("integrated", {}),
        "profile": True,
        "stage": request.stages or "all",
    }
    kept["steps"] = list(range(request.first_step, request.last_step + 1))
    kept["profile_continuous_steps"] = None if request.stages else True
    kept["ranks"] = "all" if request.ranks is None else request.ranks
    return ProfilerConfig.model_validate(kept)


class CaptureRequests:
    """Ask after each step whether to capture the next ones.

    Args:
        run: The session.
        clock: Monotonic nanoseconds.
    """

    def __init__(self, run: "Session", clock: Callable[[], int]) -> None:
        self._run = run
        self._own = run.config
        self._look_at = clock() + LOOK_NS
        self._stamp = stamp_of(request_file(run.run))
        self._owners = owners_of(rank_file(run.run, run.header.rank))
        self._refused: set[str] = set()
        self._relay: StoreRelay | None = None
        self._relays = may_span_hosts(run.header.world_size)
        self._last_id = ""
        self._waiting: CaptureRequest | None = None
        self._open: CaptureRequest | None = None
        self._count = 0
        learns = run.config.capture_anomalies and not run.header.rank
        self.learned = Anomalies() if learns else None
        """What learns how long steps take; None if this rank looks for no unusual ones."""
        self._anomalies: list[int] = []  # Times at which anomalies were found.
        self._found: Anomaly | None = None  # It waits to be captured.

    def learn(self, step: int, ns: int, now_ns: int, spans: Iterable[Span]) -> None:
        """Let a step count unless it was captured or evaluated; it may be unusual."""
        if self.learned is None or ns <= 0 or (facts := facts_of(spans)).evaluated:
            return
        if (found := self.learned.add(step, ns, facts)) is None:
            return
        lately = [time for time in self._anomalies if time > now_ns - _HOUR_NS]
        if len(self._anomalies) >= _ANOMALIES or len(lately) >= _PER_HOUR:
            text = f"{found}; not captured, as {len(lately)} were in this hour"
            code = Code.ANOMALY_NOT_CAPTURED
            self._run.note(code, text, found=found.kind, found_step=found.step)
            return
        self._anomalies.append(now_ns)
        self._found = found
        if self._run.header.world_size <= MOST_FOR_ALL:
            self._ask_for_found(step)
        else:  # The other ranks have not written this step yet.
            self._look_at = max(self._look_at, now_ns + LOOK_NS)

    def _ask_for_found(self, step: int) -> None:
        """Request a capture of what was unusual, on the ranks that show it."""
        found, self._found = self._found, None
        if found is None:
            return
        run, alone = self._run, found.kind == "spike"
        choice = choose(run.header, run.run, found.step, alone=alone)
        why = f"{found}; {choice.why}" if choice.why else str(found)
        first = step + steps_ahead(found.usual_ns)
        self.ask(first, _STEPS, choice.ranks, (), why, found=found.kind, found_step=found.step)

    def ask(
        self,
        first: int,
        steps: int,
        ranks: list[int] | None,
        stages: Sequence[str],
        why: str,
        **facts: Fact,
    ) -> bool:
        """Request a capture on all ranks of the run; return whether that was possible.

        ``facts`` are kept with the note of the request.
        """
        name = secrets.token_hex(8)
        request = CaptureRequest(name, time.time_ns(), first, steps, ranks, list(stages), why)
        try:
            write_request(self._run.run, request)
        except (OSError, RlprofError) as error:
            text = f"{why}; the capture cannot be requested: {error}"
            self._run.note(Code.CAPTURE_REFUSED, text, **_facts(request))
            return False
        shown = "" if ranks is None else f" on ranks {', '.join(map(str, ranks))}"
        text = f"{why}; requested a capture of {_where(request)}{shown}"
        self._run.note(Code.CAPTURE_REQUESTED, text, **_facts(request), **facts)
        if self._relay is not None:
            self._relay.send(request)
        return True

    def unmet(self, ended: int) -> list[Remark]:
        """Say at the end of training which request never came to its first step."""
        if self._waiting is None:
            self._look(ended)
        if (request := self._waiting) is None:
            return []
        text = f"nothing was captured of {_where(request)}: the training ended after step {ended}"
        facts = {**_facts(request), "ended": ended}
        return [Remark(Code.CAPTURE_NOT_REACHED, f"{text} ({request.why})", facts)]

    def close(self) -> None:
        """Stop listening to other hosts."""
        if self._relay is not None:
            self._relay.close()

    def is_due(self, now_ns: int) -> bool:
        """Return whether `after` has something to do, or steps are learned from."""
        waits = self._waiting is not None or self._open is not None or self._relay is not None
        return waits or self.learned is not None or now_ns >= self._look_at

    def after(self, step: int, now_ns: int) -> None:
        """Look for a request if it is time; switch to it before its first step, and back."""
        if self._open is not None and step >= self._open.last_step:
            self._open = None
            self._run.switch(self._own, None)
        if now_ns >= self._look_at:
            self._look_at = now_ns + LOOK_NS
            self._ask_for_found(step)
            self._look(step)
        if self._relay is not None:
            if self._relay.refused:
                self._refuse(self._relay.refused)
            if (request := self._relay.received) is not None:
                self._consider(request, step)
        waiting = self._waiting
        if waiting is not None and step + 1 >= waiting.first_step and self._open is None:
            self._waiting = None
            self._begin(waiting)

    def _look(self, step: int) -> None:
        if self._relays and self._relay is None and (store := store_of_the_job()) is not None:
            self._relay = StoreRelay(store, self._run.run.name)
        stamp = stamp_of(request_file(self._run.run))
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if stamp is None:
            return
        try:
            request = read_request(self._run.run, self._owners)
        except (OSError, RlprofError) as error:
            self._refuse(str(error))
            return
        if self._relay is not None:
            self._relay.send(request)
        self._consider(request, step)

    def _refuse(self, why: str) -> None:
        """Say once of each reason that a request does not count."""
        if why not in self._refused:
            self._refused.add(why)
            self._run.note(Code.CAPTURE_REFUSED, f"a request to capture was refused: {why}")

    def _consider(self, request: CaptureRequest, step: int) -> None:
        """Wait for the first step of a request that is new."""
        if request.id == self._last_id or request.unix_ns < self._run.header.unix_ns:
            return
        self._last_id = request.id
        if request.ranks is not None and self._run.header.rank not in request.ranks:
            return
        if request.first_step <= step:
            late = f"capture of step {request.first_step} was requested too late, in step {step}"
            if self._run.buffer.is_full:  # `rlprof capture` counts from its last step.
                late += ", as its file is full: raise max_file_bytes in the next run"
            self._run.note(Code.CAPTURE_REFUSED, f"{late} ({request.why})", **_facts(request))
        elif self._count >= _MAX_CAPTURES:
            text = f"no capture: {_MAX_CAPTURES} were requested in this run already"
            self._run.note(Code.CAPTURE_REFUSED, text, **_facts(request))
        else:
            self._waiting = request

    def _begin(self, request: CaptureRequest) -> None:
        self._count += 1
        try:
            config = requested(self._own, request)
            recorders = build_recorders(config, self._run.header, always=False)
        except (RlprofError, ValidationError) as error:
            why = explain(error) if isinstance(error, ValidationError) else error
            self._cannot(request, f"{why}")
            return
        if not recorders:
            reason = unmet(config, self._run.header.device, has_torch=torch is not None)
            self._cannot(request, f"{reason} ({request.why})")
            return
        if self._run.switch(config, recorders):
            self._open = request
            text = f"capturing {_where(request)} ({request.why})"
            self._run.note(Code.CAPTURE_BEGINS, text, **_facts(request))
        else:
            self._cannot(request, f"another capture is open ({request.why})")

    def _cannot(self, request: CaptureRequest, why: str) -> None:
        text = f"{_where(request)} cannot be captured: {why}"
        self._run.note(Code.CAPTURE_REFUSED, text, **_facts(request))


def may_span_hosts(ranks: int) -> bool:
    """Tell whether a job may have ranks on several hosts; torchrun says where it hasn't."""
    local, world = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return ranks > 1 and (world is None or local != world)


def _facts(request: CaptureRequest) -> dict[str, Fact]:
    return {
        "first_step": request.first_step,
        "last_step": request.last_step,
        "why": request.why,
    }


def _where(request: CaptureRequest) -> str:
    if request.steps == 1:
        return f"step {request.first_step}"
    return f"steps {request.first_step} to {request.last_step}"


class StoreRelay:
    """Pass the newest request of a run between its ranks, by a thread of its own.

    A store whose server has stopped answers no call, and heeds no timeout: then its thread waits
    for ever, and the training does not.

    Attributes:
        received: The newest request that has arrived.
        refused: Why the newest request that came was none.

    Args:
        store: The store, for this thread alone.
        run: Name of the run, which all ranks know.
    """

    def __init__(self, store: Any, run: str) -> None:
        self._store, self._key = store, f"rlprof/{run}/capture-request"
        self._outgoing: CaptureRequest | None = None
        self.received: CaptureRequest | None = None
        self.refused = ""
        self._news, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="rlprof capture relay", daemon=True)
        self._thread.start()

    def send(self, request: CaptureRequest) -> None:
        """Pass a request to the other ranks."""
        self._outgoing = request
        self._news.set()

    def close(self) -> None:
        """End the thread, when it is free."""
        self._ended = True
        self._news.set()

    def _work(self) -> None:
        try:
            while not self._ended:
                self.exchange()
                self._news.wait(POLL_S)
                self._news.clear()
        except Exception:  # The server has ended, as it does at the end of a job.
            return

    def exchange(self) -> None:
        """Ask the store once."""
        request, self._outgoing = self._outgoing, None
        if request is not None:
            self._store.set(self._key, msgspec.json.encode(request))
        if self._store.check([self._key]):
            try:
                self.received = decode_request(self._store.get(self._key))
            except RlprofError as error:
                self.refused = str(error)


def store_of_the_job() -> Any:
    """Return the store of the process group for one more thread; None if there is none yet."""
    try:
        store = default_store()
        return None if store is None else store.clone()
    except Exception:
        # These functions of torch are not documented, and not every store can be cloned.
        return None
