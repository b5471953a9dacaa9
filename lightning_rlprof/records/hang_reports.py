"""What a rank writes while it makes no progress, and how it is read back.

In the folder ``watchdog`` of a run directory, each rank has a file that it overwrites every few
seconds, ``rank-00000.alive``, and one per report, ``rank-00000-01.json``. A rank that raises an
alarm touches the file ``alarm``, so that all others report, too.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.records.records import Header
from lightning_rlprof.system.files import overwrite_inside, read_inside, write_inside

FOLDER = "watchdog"
"""Where these files are, in a run directory."""

MOST_REPORTS = 12
"""Reports that one rank writes in a run."""

Cause = Literal["hang", "still", "asked", "recovered"]
"""Why a report was written: the rank hangs, still does, another one does, or it has recovered."""

Ranges = tuple[tuple[int, int, int], ...]
"""Ranks as first, last and step of each range."""

_MOST_BYTES = 1 << 23
_MOST_RANKS = 1 << 17
_BEAT_BYTES = 256
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a stack: where it is, and the text of the line."""

    file: str
    line: int
    function: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """What one thread was doing: its frames, innermost first.

    ``cpu_share`` is how much of a CPU the training thread used just then; None if it is unknown.
    """

    name: str
    frames: tuple[Frame, ...]
    is_training: bool = False
    cpu_share: float | None = None


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span that had not ended, and for how long it was open; ``kind`` is that of a `Span`."""

    name: str
    kind: str
    step: int
    age_ns: int
    is_training: bool


@dataclass(frozen=True, slots=True)
class Collective:
    """One entry of torch's flight recorder.

    Attributes:
        group: Name of the process group.
        seq: Number of the collective in its group, the same on all of its ranks.
        name: Such as ``gloo:all_reduce``.
        sizes: Shapes of the inputs, as text.
        is_done: Whether it is complete.
        is_p2p: Whether it is a send or a receive, whose numbers others do not share.
    """

    group: str
    seq: int
    name: str
    sizes: str = ""
    is_done: bool = False
    is_p2p: bool = False


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A process that the rank started, and its state as in ``/proc``."""

    pid: int
    name: str
    state: str


@dataclass(frozen=True, slots=True)
class HangReport:
    """What one rank knew of itself at one moment.

    Attributes:
        rank: Global rank.
        number: Of the reports of this rank, from 1.
        cause: Why it was written.
        unix_ns: When.
        quiet_s: For how long no span had begun or ended.
        limit_s: How long that may take here before the rank reports it.
        step: The step that was open, or expected.
        in_step: Whether it had begun.
        last_span: Name of the span that ended last.
        spans: Open spans, outermost first.
        threads: The training thread first.
        collectives: The last ones, by group in order.
        groups: Ranks of each process group, by its name, as `rank_ranges` writes them.
        children: Child processes, such as DataLoader workers.
        remarks: What could not be found out, and why.
    """

    rank: int
    number: int
    cause: Cause
    unix_ns: int
    quiet_s: float
    limit_s: float
    step: int
    in_step: bool
    last_span: str | None = None
    spans: tuple[OpenSpan, ...] = ()
    threads: tuple[ThreadStack, ...] = ()
    collectives: tuple[Collective, ...] = ()
    groups: dict[str, Ranges] = field(default_factory=dict)
    children: tuple[ChildProcess, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last sign of life of a rank: its watchdog thread ran, whatever the training did."""

    unix_ns: int
    step: int
    quiet_s: float


@dataclass(frozen=True)
class RankEvidence:
    """All that is known of one rank when its run is asked for a hang.

    Attributes:
        rank: Global rank.
        header: Of its file; None if the run lacks it.
        end: Its status at the end, None if it has not ended.
        last_ns: Unix time of its last line.
        process: State of the process as in ``/proc``; ``gone``, or empty on another host.
        beat: Its last sign of life; it removes that when it ends.
        reports: In the order in which they were written.
        dump: What torch's own file of this rank has, read without running it.
    """

    rank: int
    header: Header | None = None
    end: str | None = None
    last_ns: int | None = None
    process: str = ""
    beat: Heartbeat | None = None
    reports: tuple[HangReport, ...] = ()
    dump: tuple[Collective, ...] = ()


def rank_ranges(ranks: Sequence[int]) -> Ranges:
    """Return ascending ranks as ranges: a group of a thousand is one, also with a step.

    Example::

        >>> rank_ranges([0, 1, 2, 3, 8, 16, 24])
        ((0, 3, 1), (8, 24, 8))
    """
    found, at = [], 0
    while at < len(ranks):
        end = at + 1
        step = ranks[end] - ranks[at] if end < len(ranks) else 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        found.append((ranks[at], ranks[end - 1], step))
        at = end
    return tuple(found)


def ranks_in(ranges: Ranges) -> list[int]:
    """Return the ranks of ranges; of a file that names more than there can be, the first 131,072.

    Example::

        >>> ranks_in(((0, 2, 1), (8, 16, 8)))
        [0, 1, 2, 8, 16]
    """
    each = (range(first, last + 1, max(step, 1)) for first, last, step in ranges)
    return list(islice(chain.from_iterable(each), _MOST_RANKS))


def alive_file(run: Path, rank: int) -> Path:
    """Return the file that a rank overwrites every few seconds."""
    return run / FOLDER / f"rank-{rank:05d}.alive"


def dump_file(run: Path, rank: int) -> Path:
    """Return where a rank keeps a copy of the file that torch's flight recorder wrote."""
    return run / FOLDER / f"rank-{rank:05d}-flight-recorder.pickle"


def alarm_file(run: Path) -> Path:
    """Return the file that is touched when a rank hangs."""
    return run / FOLDER / "alarm"


def write_beat(run: Path, rank: int, beat: Heartbeat, mode: int = 0o600) -> None:
    """Overwrite a sign of life; raises OSError."""
    data = msgspec.json.encode(beat).ljust(_BEAT_BYTES)
    overwrite_inside(run, alive_file(run, rank), data, mode)


def write_report(run: Path, report: HangReport, mode: int = 0o600) -> Path:
    """Write a report, whole or not at all; raises OSError."""
    path = run / FOLDER / f"rank-{report.rank:05d}-{report.number:02d}.json"
    write_inside(run, path, msgspec.json.encode(report), mode)
    return path


def read_beat(run: Path, rank: int) -> Heartbeat | None:
    """Read a sign of life; None without one that can be read."""
    return _read(run, alive_file(run, rank), Heartbeat)


@dataclass(frozen=True, slots=True)
class _Brief:
    """What is needed of a report that is not the last one of its rank."""

    rank: int
    number: int
    cause: Cause
    unix_ns: int
    quiet_s: float
    limit_s: float
    step: int
    in_step: bool


def read_reports(run: Path, rank: int) -> tuple[HangReport, ...]:
    """Read the reports of a rank, without those that cannot be read.

    Only the last one before progress returned has its stacks, spans and collectives.
    """
    paths = [
        run / FOLDER / f"rank-{rank:05d}-{number:02d}.json" for number in range(1, MOST_REPORTS + 1)
    ]
    briefs = [(path, brief) for path in paths if (brief := _read(run, path, _Brief)) is not None]
    hung = [path for path, brief in briefs if brief.cause != "recovered"]
    found = []
    for path, brief in briefs:
        whole = read_report(run, path) if path in hung[-1:] else None
        found.append(whole or HangReport(**asdict(brief)))
    return tuple(found)


def read_report(run: Path, path: Path) -> HangReport | None:
    """Read one report of a run; None without one that can be read."""
    return _read(run, path, HangReport)


def _read(run: Path, path: Path, kind: type[_T]) -> _T | None:
    with suppress(OSError, *NOT_JSON):
        data = read_inside(run, path, _MOST_BYTES)
        return msgspec.json.decode(data.strip(), type=kind)
    return None
