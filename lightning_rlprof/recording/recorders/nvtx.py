"""Mirror spans as NVTX ranges, which Nsight Systems shows and records."""

import asyncio
import os
import zlib
from importlib import metadata
from pathlib import Path
from time import time_ns
from typing import Any

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import Header, Kind

_DOMAIN = "rlprof"
_ATTACHED = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")

# These are the colors of the HTML report, so that a stage looks the same in both.
# A test compares the two.
_KNOWN = {
    "actor_generate": 0x56B4E9,
    "actor_compute_log_prob": 0x009E73,
    "reference_compute_log_prob": 0x7ED3B2,
    "actor_update": 0xD55E00,
    "critic_compute_values": 0x8F4A78,
    "critic_update": 0xCC79A7,
    "compute_reward": 0xF0E442,
    "compute_advantage": 0xE69F00,
    "weight_sync": 0x0072B2,
    "actor_image_embeds": 0xA9D8F5,
}
_OWN = (0x882255, 0x44AA99, 0xDDCC77, 0x332288, 0x999933, 0xAA4499, 0x88CCEE, 0x661100)
# Other ranges stay grey behind them.
_GREYS = {"epoch": 0x606060, "step": 0x808080, "region": 0xA0A0A0, "mark": 0xC0C0C0}
_OPAQUE = 0xFF000000


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank."""
    return NvtxRecorder(header.rank)


def color(name: str, kind: Kind) -> int:
    """Return the colour of a span as ARGB: the same in every process and every run.

    Example::

        >>> hex(color("actor_update", "stage")), hex(color("actor_update", "region"))
        ('0xffd55e00', '0xffa0a0a0')
    """
    if kind in _GREYS:
        return _OPAQUE | _GREYS[kind]
    # A name has the same color in every process, which `hash` would not give.
    own = _OWN[zlib.crc32(name.encode("utf-8", "replace")) % len(_OWN)]
    return _OPAQUE | _KNOWN.get(name, own)


class NvtxRecorder(Recorder):
    """Push one NVTX range per span into the domain ``rlprof``, at every step, captured or not.

    The span's name is the message, its kind the category and its step the payload: NVTX keeps every
    message for ever, so none holds a number. As a capture opens, two marks tell a reader whose
    report this is and when: ``rlprof.rank`` and ``rlprof.clock`` (payload: ``time.time_ns()``).

    Ranges are pushed and popped, which lets Nsight project them onto the kernels launched inside.
    Inside an asyncio loop spans interleave, so there each range is started and ended by its own id.

    NVTX decides at the first call of a process whether a tool listens. Where none does, this is the
    base class, which does nothing; a tool that is there and gets nothing is noted, with the cure.

    Args:
        rank: The payload of ``rlprof.rank``.

    Raises:
        RecorderError: The package ``nvtx`` is not installed.
    """

    always = True

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._domain = _domain()
        self._events: dict[tuple[str, Kind | None], Any] = {}

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return (NvtxRecorder, (self._rank,))

    def open(self, out: Path) -> None:
        """Mark the rank and the clock."""
        rank = self._event("rlprof.rank", None, self._rank)
        if rank is None:
            return
        self._domain.mark(rank)
        clock = self._event("rlprof.clock", None, 0)
        clock.payload = time_ns()
        self._domain.mark(clock)

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Push a range, or start one inside an asyncio loop."""
        event = self._event(name, kind, step)
        if event is None:
            return None
        if asyncio._get_running_loop() is None:
            self._domain.push_range(event)
            return None
        return self._domain.start_range(event)

    def exit(self, token: object) -> None:
        """Pop the range, or end it by its id."""
        if token is None:
            self._domain.pop_range()
        else:
            self._domain.end_range(token)

    def mark(self, name: str, step: int) -> None:
        """Mark an instant."""
        event = self._event(name, "mark", step)
        if event is not None:
            self._domain.mark(event)

    def _event(self, name: str, kind: Kind | None, payload: int) -> Any:
        """Return the one object of a name and kind with this payload; None without a listener."""
        event = self._events.get((name, kind))
        if event is None:
            paint = _OPAQUE if kind is None else color(name, kind)
            event = self._domain.get_event_attributes(message=name, color=paint, category=kind)
            if event is None:
                self._rest()
                return None
            self._events[name, kind] = event
        if event.payload != payload:
            event.payload = payload
        return event

    def _rest(self) -> None:
        """Do nothing from now on, as the base class; say why where a tool should hear us."""
        self.why_nothing = "no profiler gets the NVTX ranges of this process"
        if remark := _why_unheard():
            self.note(Code.NVTX_NOT_RECORDED, remark)
        base = Recorder()
        self.open, self.enter, self.mark = base.open, base.enter, base.mark  # type: ignore[method-assign]
        self.exit = base.exit  # type: ignore[method-assign, assignment]


def _domain() -> Any:
    try:
        import nvtx
    except ImportError as error:
        raise RecorderError(
            "NVTX ranges need the package nvtx, which is not installed; pip install nvtx"
        ) from error
    return nvtx.get_domain(_DOMAIN)


def _why_unheard() -> str | None:
    """Say why an attached tool gets nothing; None where no tool is attached."""
    attached = [name for name in _ATTACHED if os.environ.get(name)]
    if not attached:
        return None
    if os.environ.get("NVTX_DISABLE"):
        return "Nsight Systems gets no NVTX ranges: NVTX_DISABLE is set; unset it"
    return (
        f"a profiler is attached ({attached[0]} is set) but gets no NVTX ranges: it "
        f"does not trace NVTX, or is too old for nvtx {metadata.version('nvtx')}; "
        "use nsys 2025.3 or newer with nvtx in --trace"
    )
