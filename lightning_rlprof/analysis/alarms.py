"""What deserves attention now in a run that is being written: hangs, silence, machines, notes.

Alarms have a code and facts; the text is made where they are shown.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_rlprof.analysis.diagnosis.evidence import Evidence
from lightning_rlprof.analysis.diagnosis.machine_quantities import SWAPS
from lightning_rlprof.analysis.diagnosis.step_quantities import CPU_WAIT, CPU_WAITS, lost_in_steps
from lightning_rlprof.records.hang_reports import HangReport
from lightning_rlprof.records.records import Note
from lightning_rlprof.tables.spans import Spans

QUIET_STEPS = 5
"""A rank is an alarm if it writes nothing for as long as this number of its steps."""

_MIN_QUIET_S = 10.0
_MIN_HANG_S = 1.0  # A rank that runs reports less if another one hangs.
_SHARE_PERCENT = 5.0  # The problems of quota, memory and disk have the same limit.
_CPU_PRESSURE_PERCENT = 80.0  # On a full machine some thread waits nearly always.

UNUSUAL: Mapping[str, float] = {
    "cpu_pressure_percent": _CPU_PRESSURE_PERCENT,
    "cpu_throttled_percent": _SHARE_PERCENT,
    "memory_full_pressure_percent": _SHARE_PERCENT,
    "io_full_pressure_percent": _SHARE_PERCENT,
    "swap_in_bytes_per_s": SWAPS,
    "swap_out_bytes_per_s": SWAPS,
    "device_power_throttled": 1.0,
    "device_thermal_throttled": 1.0,
    "device_hardware_slowdown": 1.0,
    "engine_preemptions_per_s": 0.01,  # The problem is any; this is one in 100 seconds.
}
"""Background metrics that are unusual from a value on. The limits are those of the problems that
`rlprof findings` reports from the same metrics; other metrics have no value that is unusual by
itself."""

Code = Literal["hang", "ended", "quiet", "unreadable", "cpu-wait", "metric", "note"]
"""What an alarm is about."""


@dataclass(frozen=True)
class RankState:
    """What is known of a rank while it records.

    Attributes:
        rank: Its number.
        status: How it ended, None while it records.
        last_step: The last step that has ended.
        step_ns: The usual time of its steps, None before the first.
        quiet_s: For how long it has written nothing.
        notes: Its warnings and errors, by time.
        metrics: The last values of background metrics.
    """

    rank: int
    status: str | None = None
    last_step: int = 0
    step_ns: float | None = None
    quiet_s: float = 0.0
    notes: Sequence[Note] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Alarm(NamedTuple):
    """Something that deserves attention.

    Attributes:
        level: ``error`` or ``warning``.
        code: What it is about.
        ranks: Where, ascending.
        facts: What the code needs to be told: ``{"step": 8}``.
    """

    level: str
    code: Code
    ranks: tuple[int, ...]
    facts: Mapping[str, int | float | str]


def alarms(
    ranks: Iterable[RankState],
    spans: Spans | None = None,
    hangs: Mapping[int, HangReport] | None = None,
    problems: Mapping[int, str] | None = None,
) -> list[Alarm]:
    """Return all alarms: ranks that do not go on, then machines, then what ranks noted.

    Args:
        ranks: All that have written.
        spans: Their last steps.
        hangs: The last report of each rank that made no progress.
        problems: Why files of ranks cannot be read.
    """
    known = {each.rank: each for each in ranks}
    found = _Grouped()
    for rank, text in (problems or {}).items():
        found.add("error", "unreadable", rank, text=text)
    for hang in (hangs or {}).values():
        own = known.get(hang.rank)
        is_quiet = hang.cause != "recovered" and hang.quiet_s >= _MIN_HANG_S
        if own is not None and own.status is None and is_quiet:
            facts = {"seconds": round(hang.quiet_s), "step": hang.step, "span": hang.last_span}
            found.add("error", "hang", hang.rank, **facts)
    for each in known.values():
        if each.status not in (None, "finished"):
            found.add("error", "ended", each.rank, status=str(each.status))
        elif each.status is None and _is_quiet(each):
            found.add("error", "quiet", each.rank, steps=QUIET_STEPS, step=each.last_step)
    waits = {} if spans is None else _cpu_waits(spans)
    for rank in [rank for rank, share in waits.items() if share >= CPU_WAITS]:
        found.add("warning", "cpu-wait", rank, share=max(waits.values()))
    for each in known.values():
        for name, limit in UNUSUAL.items() if each.status is None else ():
            # The name of a metric of one engine of several ends with the engine's number.
            if any(v >= limit for key, v in each.metrics.items() if key.startswith(name)):
                found.add("warning", "metric", each.rank, metric=name)
    notes = _Grouped()
    for each in known.values():
        for note in reversed(each.notes):
            notes.add(note.level, "note", each.rank, text=note.text)
    return [*found.all(), *sorted(notes.all(), key=lambda alarm: alarm.level)]  # Errors come first.


class _Grouped:
    """Alarms that say the same of several ranks are one."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[Any, ...], set[int]] = {}

    def add(self, level: str, code: Code, rank: int, **facts: object) -> None:
        self._ranks.setdefault((level, code, *facts.items()), set()).add(rank)

    def all(self) -> list[Alarm]:
        return [
            Alarm(level, code, tuple(sorted(ranks)), dict(facts))
            for (level, code, *facts), ranks in self._ranks.items()
        ]


def _is_quiet(rank: RankState) -> bool:
    """Return whether a rank has written nothing for longer than a few of its steps."""
    if rank.step_ns is None:
        return False
    return rank.quiet_s > max(QUIET_STEPS * rank.step_ns / 1e9, _MIN_QUIET_S)


def _cpu_waits(spans: Spans) -> dict[int, float]:
    """Return the share of the included steps in which a rank's training thread waited for a CPU."""
    lost = lost_in_steps(Evidence(spans), CPU_WAIT)
    if lost is None:
        return {}
    shares = lost.ns.sum(axis=0) / np.maximum(lost.wall_ns.sum(axis=0), 1)
    return dict(zip(lost.ranks.tolist(), shares.tolist(), strict=True))
