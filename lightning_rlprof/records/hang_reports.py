"""What a rank writes of itself while it trains and while it hangs, and how it is read back.

In the folder ``watchdog`` of a run directory, each rank has a file that it overwrites every few
seconds, ``rank-00000.alive``, and one per report, ``rank-00000-01.json``. A rank that raises an
alarm touches the file ``alarm``, so that all others report, too. The folder also has the newest
request for samples of the stack, and the newest answer of each rank.

A sample names a function and a line of the training's own code, never text of the source or values
of variables. In a rank's file each is a mark, ``stack: Data.decode train.py:27``.
"""

import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from lightning_rlprof.errors import NOT_JSON, RlprofError, TraceError
from lightning_rlprof.records.records import MAX_STACKS_S, Header
from lightning_rlprof.system.files import (
    asked_mode,
    open_file,
    overwrite_inside,
    read_inside,
    write_inside,
)

_T = TypeVar("_T")

FOLDER = "watchdog"
"""Where these files are, in a run directory."""

MOST_REPORTS = 12
"""Reports that one rank writes in a run."""

_MOST_BYTES_OF_REPORT = 1 << 23
_MOST_RANKS = 1 << 17
_BEAT_BYTES = 256
_PER_GROUP = 8
_MOST_COLLECTIVES = 400
_LONGEST_NAME = 200
_MOST_BYTES_OF_PICKLE = 1 << 26

STACK = "stack: "
"""How the name of the mark of a sample begins."""

_MAX_CALLS = 200  # Frames that are looked at from the innermost one.
_LIBRARY = re.compile(r"site-packages/|dist-packages/|/lib/python3|^<")
_OURS = re.compile(r"/lightning_rlprof/(recording|integrations|system|records|config)/")
_MOST_BYTES_OF_REQUEST = 100_000

Cause = Literal["hang", "still", "asked", "recovered"]
"""Why a report was written: the rank hangs, still does, another one does, or it has recovered."""

Ranges = tuple[tuple[int, int, int], ...]
"""Ranks as first, last and step of each range."""


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


def write_report(run: Path, report: HangReport, mode: int = 0o600) -> None:
    """Write a report, whole or not at all; raises OSError."""
    path = run / FOLDER / f"rank-{report.rank:05d}-{report.number:02d}.json"
    write_inside(run, path, msgspec.json.encode(report), mode)


def read_beat(run: Path, rank: int) -> Heartbeat | None:
    """Read a sign of life; None without one that can be read."""
    return _read(run, alive_file(run, rank), Heartbeat)


def read_reports(run: Path, rank: int) -> tuple[HangReport, ...]:
    """Read the reports of a rank, without those that cannot be read.

    Only the last one before progress returned has its stacks, spans and collectives.
    """
    found: list[HangReport] = []
    for number in range(1, MOST_REPORTS + 1):
        report = read_report(run, run / FOLDER / f"rank-{rank:05d}-{number:02d}.json")
        if report is not None and report.cause == "recovered":
            found.append(brief(report))
        elif report is not None:
            found = [*map(brief, found), report]
    return tuple(found)


def brief(report: HangReport) -> HangReport:
    """Return a report without what is large: those of 1,024 ranks would fill the memory."""
    few = HangReport(0, 0, "hang", 0, 0, 0, 0, False)
    large = ("spans", "threads", "collectives", "groups", "children", "remarks")
    return replace(report, **{name: getattr(few, name) for name in large})


def read_report(run: Path, path: Path) -> HangReport | None:
    """Read one report of a run; None without one that can be read."""
    return _read(run, path, HangReport)


def _read(run: Path, path: Path, kind: type[_T]) -> _T | None:
    with suppress(OSError, *NOT_JSON):
        data = read_inside(run, path, _MOST_BYTES_OF_REPORT)
        return msgspec.json.decode(data.strip(), type=kind)
    return None


def as_collectives(dump: Any) -> list[Collective]:
    """Return the last eight collectives of each group, and all that are not complete.

    What is not an entry is left out, as in a file of another program.

    Example::

        >>> entry = {"process_group": ["0", ""], "collective_seq_id": 6, "state": "scheduled",
        ...          "profiling_name": "gloo:all_reduce", "input_sizes": [[4]], "retired": False}
        >>> (found,) = as_collectives({"entries": [entry]})
        >>> found.name, found.seq, found.is_done
        ('gloo:all_reduce', 6, False)
    """
    entries = dump.get("entries") if isinstance(dump, Mapping) else None
    found = [_collective(entry) for entry in entries or () if isinstance(entry, Mapping)]
    kept: list[Collective] = []
    count: dict[str, int] = {}
    for each in reversed(found):
        if each is None or len(kept) >= _MOST_COLLECTIVES:
            continue
        count[each.group] = count.get(each.group, 0) + 1
        if count[each.group] <= _PER_GROUP or not each.is_done:
            kept.append(each)
    return kept[::-1]


def _collective(entry: Mapping[Any, Any]) -> Collective | None:
    group = entry.get("process_group")
    name = group[0] if isinstance(group, list | tuple) and group else entry.get("pg_id")
    is_p2p = entry.get("is_p2p") is True
    seq = entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")
    if not isinstance(seq, int) or not isinstance(name, str | int):
        return None
    is_done = entry.get("retired") is True or entry.get("state") == "completed"
    operation, sizes = entry.get("profiling_name"), entry.get("input_sizes")
    return Collective(
        group=str(name)[:_LONGEST_NAME],
        seq=min(seq, 2**53),
        name=operation[:_LONGEST_NAME] if isinstance(operation, str) else "?",
        sizes=_sizes(sizes),
        is_done=is_done,
        is_p2p=is_p2p,
    )


def _sizes(shapes: Any) -> str:
    """Return shapes as text; only what is one, as a file may nest anything."""
    found = [
        [min(size, 2**53) for size in shape[:_PER_GROUP] if isinstance(size, int)]
        for shape in (shapes[:_PER_GROUP] if isinstance(shapes, list | tuple) else ())
        if isinstance(shape, list | tuple)
    ]
    return str(found)[:_LONGEST_NAME]


# The unpickler in C allocates as much as a number in the file says; this one in Python does not.
class _Plain(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it names an object outside of the file")


def read_plain_pickle(path: Path) -> Any:
    """Return what a pickle holds if that is lists, dicts, tuples, sets, text and numbers.

    Raises:
        TraceError: It cannot be read, is larger than 64 MiB, or names anything else. Nothing that
            it names is imported or called.
    """
    try:
        with open_file(path) as file:
            data = file.read(_MOST_BYTES_OF_PICKLE + 1)
        if len(data) > _MOST_BYTES_OF_PICKLE:
            raise pickle.UnpicklingError("it is larger than 64 MiB")
        return _Plain(BytesIO(data)).load()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:  # A damaged pickle raises errors of any kind.
        raise TraceError(f"{path}: is not a pickle of plain data ({error})") from error


@dataclass(frozen=True, slots=True)
class StackRequest:
    """Which ranks are to sample their training thread, and for how long.

    Attributes:
        id: Unique in the run.
        seconds: At most `MAX_STACKS_S`.
        ranks: Of these ranks; None means all.
    """

    id: str
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_STACKS_S)]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StackAnswer:
    """What a rank sampled, and what was open on its training thread in the end.

    Attributes:
        id: That of the request.
        thread: Identity of the training thread.
        samples: Time on the rank's monotonic clock, function and line of each.
        spans: Name and start of the open stages and regions.
    """

    id: str
    thread: int
    samples: tuple[tuple[int, str], ...] = ()
    spans: tuple[tuple[str, int], ...] = ()


def is_own_code(file: str) -> bool:
    """Return whether a file is of the training's own code, not of a library or of rlprof.

    Example::

        >>> is_own_code("/code/train.py"), is_own_code("/env/lib/python3.11/queue.py")
        (True, False)
    """
    return not _LIBRARY.search(file) and not _OURS.search(file)


def own_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the training's own code, in or around a frame; None without."""
    for _ in range(_MAX_CALLS):
        if frame is None or is_own_code(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return frame


def stack_request_file(run: Path) -> Path:
    """Return the path of a run's newest request."""
    return run / FOLDER / "stack-request.json"


def stack_answer_file(run: Path, rank: int) -> Path:
    """Return the path of a rank's newest answer."""
    return run / FOLDER / f"rank-{rank:05d}.stacks"


def write_stack_request(run: Path, request: StackRequest) -> None:
    """Ask the ranks of a run for samples; raises OSError, also if no rank can answer."""
    write_inside(run, stack_request_file(run), msgspec.json.encode(request), asked_mode())


def write_stack_answer(run: Path, rank: int, answer: StackAnswer) -> None:
    """Write what a rank sampled; raises OSError."""
    write_inside(run, stack_answer_file(run, rank), msgspec.json.encode(answer))


def read_stack_request(run: Path, owners: Collection[int]) -> StackRequest:
    """Return the newest request of a run.

    Args:
        run: The run directory.
        owners: The users who may ask, see `lightning_rlprof.system.files.owners_of`.

    Raises:
        OSError: There is none that can be read, or it is of another user.
        RlprofError: It is none, or asks for more than is allowed.
    """
    data = read_inside(run, stack_request_file(run), _MOST_BYTES_OF_REQUEST, owners)
    try:
        return msgspec.json.decode(data, type=StackRequest)
    except NOT_JSON as error:
        raise RlprofError(f"not a valid request for stacks ({error})") from error


def read_stack_answer(run: Path, rank: int) -> StackAnswer | None:
    """Return the newest answer of a rank, None if there is none that can be read."""
    return _read(run, stack_answer_file(run, rank), StackAnswer)
