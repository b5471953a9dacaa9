"""Read reports of Nsight Systems as spans, with tables of what the devices did."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.loaders.nsys.device_activity import ACTIVITIES, KERNELS, Device
from lightning_rlprof.loaders.nsys.export import (
    LARGEST,
    STRINGS,
    Export,
    Ranges,
    open_export,
    pid_of,
    process_of,
    read_ranges,
)
from lightning_rlprof.loaders.rank_names import rank_in_name
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import FORMAT, Header
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import parents
from lightning_rlprof.tables.kernels import Kernels
from lightning_rlprof.tables.spans import (
    NO_PARENT,
    RankNote,
    RunWarning,
    Spans,
    Thread,
    note_of,
    warning_of,
)

"""How the problem begins of a report that does not say whose it is."""

_LARGEST_CLOCK = 2**62
# The start of a session and our marks agree within 0.2 ms; a thread that waits for the interpreter
# between reading the clock and marking can be 5 ms late.
_CLOCKS_AGREE_NS = 20_000_000
_FEW = 4
_ABOUT, _VERSION = ("META_DATA_EXPORT", "EXPORT_META_DATA"), "EXPORT_PRODUCT_VERSION"


@dataclass(frozen=True, eq=False)
class _Report:
    """A report read but for its tables.

    Attributes:
        export: Its tables.
        ranges: Its ranges, in its own time.
        processes: globalPids of those that marked or launched anything, by process number.
        launching: Those of them that launched what a device ran.
        zero_ns: Start of the first span, else of the first activity, in its own time.
        unix_ns: Wall-clock time of zero in its own time, None where that is not known.
        problems: What is missing or doubtful.
    """

    export: Export
    ranges: Ranges
    processes: list[int]
    launching: set[int]
    zero_ns: int
    unix_ns: int | None
    problems: list[str]


def read_nsys(path: Path, rank: int | None = None) -> Spans:
    """Read a report or an SQLite export; ranges and marks are spans, tables are read when asked.

    Ranges of the domain ``rlprof`` have kind and step. Those of other domains are regions, in the
    step of the ``rlprof`` range around them. Ranks come from marks, else from the file's name;
    else they are counted, with a warning. Tables: kernels, memcpy, sync and gpu_metrics.

    Args:
        path: The file.
        rank: As the file's name would say it.

    Raises:
        TraceError: It is not a report, is damaged, or is a ``.nsys-rep`` and nsys is not installed.
    """
    report = _read(path)
    ranks, problems = _ranks(report, rank_in_name(path.name) if rank is None else rank)
    ranges, zero = report.ranges, report.zero_ns
    tables = Device(report.export, ranges, ranks, zero).tables()
    threads, codes = np.unique(ranges.thread, return_inverse=True)
    return Spans(
        path,
        tuple(ranges.names),
        _threads(report.export, threads, ranks),
        **_columns(ranges, ranks, codes, zero),
        headers=_headers(report, ranks, path.stem),
        statuses=dict.fromkeys(sorted(set(ranks.values())), "finished"),
        notes=tuple(_notes(report, ranks, tables)),
        warnings=(
            *(warning_of(None, text, Code.TRACE_DOUBTFUL) for text in report.problems),
            *problems,
        ),
        unix_ns=0 if report.unix_ns is None else report.unix_ns + zero,
        tables=tables,
    )


def read_kernels(path: Path) -> tuple[Kernels, int, list[str]]:
    """Read the kernels of a report or an SQLite export, to be put beside those of other files.

    Returns:
        The kernels, with rank -1 where their process does not say its rank; the wall-clock time of
        zero on their axis, 0 where that is not known; and what must be known about them.

    Raises:
        TraceError: As `read_nsys`.
    """
    report = _read(path)
    ranks = {process: report.ranges.ranks.get(process, -1) for process in report.processes}
    kernels, remarks = Device(report.export, report.ranges, ranks, 0).kernels()
    return kernels, report.unix_ns or 0, [*report.problems, *remarks]


def _read(path: Path) -> _Report:
    export = open_export(path)
    ranges = read_ranges(export)
    problems = [*export.problems, *ranges.problems]
    active = [export.least(table, "globalPid", "start") for table in ACTIVITIES]
    seen = {
        *ranges.ranks,
        *np.unique(process_of(ranges.thread)).tolist(),
        *itertools.chain(*active),
    }
    processes = sorted((each for each in seen if each > 0), key=lambda each: (pid_of(each), each))
    starts = [ns for part in active for ns in part.values() if abs(ns) < LARGEST]
    zero = int(ranges.start_ns.min()) if len(ranges.start_ns) else min(starts, default=0)
    unix = _unix_ns(export, ranges, problems)
    launching = set(itertools.chain(*active[:-1]))
    return _Report(export, ranges, processes, launching, zero, unix, problems)


def _unix_ns(export: Export, ranges: Ranges, problems: list[str]) -> int | None:
    """Return when zero was: the start of the session, else the time in rlprof's marks."""
    found = export.numbers("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")["utcEpochNs"]
    started = found[(found > 0) & (found < _LARGEST_CLOCK)]
    if not len(started):
        if ranges.unix_ns is None:
            problems.append("recording time unknown: no TARGET_INFO_SESSION_START_TIME")
        return ranges.unix_ns
    unix_ns = int(started[0])
    if ranges.unix_ns is not None and abs(off := unix_ns - ranges.unix_ns) > _CLOCKS_AGREE_NS:
        problems.append(f"its clock is {off / 1e6:+.0f} ms off the clock of the program")
    return unix_ns


def _ranks(report: _Report, named: int | None) -> tuple[dict[int, int], list[RunWarning]]:
    """Return the rank of each process by globalPid, and what is doubtful about that."""
    ranks, problems = dict(report.ranges.ranks), list[RunWarning]()
    others = [each for each in report.processes if each not in ranks]
    if named is not None:
        ranks |= dict.fromkeys(others, named)
    elif others:
        free = max(ranks.values(), default=-1) + 1
        ranks |= {each: free + at for at, each in enumerate(others)}
        text = (
            f"ranks are guessed, counting from {free}, because no mark contains them: "
            f"processes {_some(others)}"
        )
        problems.append(RunWarning(None, text, Code.RANKS_GUESSED.value))
    of_rank = defaultdict[int, list[int]](list)
    for process in report.processes:
        if process in report.launching:
            of_rank[ranks[process]].append(process)
    return ranks, problems + [
        RunWarning(
            None,
            f"processes {_some(own)} all launched kernels and count as one rank, {rank}, by the "
            "file name or by their marks",
            Code.RANKS_JOINED.value,
        )
        for rank, own in sorted(of_rank.items())
        if len(own) > 1
    ]


def _some(processes: list[int]) -> str:
    names = ", ".join(str(pid_of(each)) for each in processes[:_FEW])
    return names + (f" and {len(processes) - _FEW} more" if len(processes) > _FEW else "")


def _headers(report: _Report, ranks: dict[int, int], run_id: str) -> dict[int, Header]:
    """Return a header per rank; of several processes of one rank the first stands for it."""
    export = report.export
    version = next((v for t in _ABOUT if (v := export.setting(t, _VERSION))), "")
    found: dict[int, Header] = {}
    for process in report.processes:
        found.setdefault(
            ranks[process],
            Header(
                FORMAT,
                run_id,
                ranks[process],
                max(ranks.values()) + 1,
                "",
                export.setting("TARGET_INFO_SYSTEM_ENV", "Hostname") or "unknown host",
                pid_of(process),
                "cuda" if process in report.launching else "cpu",
                unix_ns=report.unix_ns or 0,
                clock_ns=0,
                versions={"nsys": version} if version else {},
            ),
        )
    return dict(sorted(found.items()))


def _threads(export: Export, threads: Int64s, ranks: dict[int, int]) -> tuple[Thread, ...]:
    """Return threads by globalTid, with the names that the system or the program gave them."""
    given = export.numbers("ThreadNames", "globalTid", "nameId")
    texts = export.strings(given["nameId"], STRINGS)
    names = {
        thread: texts[name]
        for thread, name in zip(given["globalTid"].tolist(), given["nameId"].tolist(), strict=True)
        if name in texts
    }
    return tuple(
        Thread(ranks[process], each - process, names.get(each, f"thread {each - process}"))
        for each, process in zip(threads.tolist(), process_of(threads).tolist(), strict=True)
    )


def _notes(report: _Report, ranks: dict[int, int], tables: Iterable[str]) -> Iterator[RankNote]:
    """Say which process each rank is, and what the report does not hold."""
    there = report.export.numbers("PROCESSES", "globalPid")["globalPid"]
    codes, names = report.export.texts("PROCESSES", "name")
    called = {
        process: names[code]
        for process, code in zip(there.tolist(), codes.tolist(), strict=False)
        if code >= 0
    }
    for process in report.processes:
        rank, name = ranks[process], called.get(process, "without a name")
        text = f"process {pid_of(process)} ({name}) is rank {rank}"
        yield note_of(rank, Code.RANK_OF_PROCESS, text, pid=pid_of(process))
    if not report.export.has(KERNELS):
        why = "only copies" if "memcpy" in tables else "CUDA was not traced or not used"
        if "kernels" in tables:
            why = "replays of CUDA graphs hide them (nsys --cuda-graph-trace=node)"
        yield note_of(None, Code.NO_KERNELS, f"no kernels: {why}")
    if not len(report.ranges.start_ns):
        yield note_of(None, Code.NO_RANGES, "no NVTX ranges: NVTX was not traced or not used")


def _columns(ranges: Ranges, ranks: dict[int, int], thread: Int64s, zero: int) -> dict[str, Any]:
    """Return the columns of `Spans`: sorted, numbered in each rank, and with parents."""
    processes, code = np.unique(process_of(ranges.thread), return_inverse=True)
    rank = np.array([ranks[each] for each in processes.tolist()], np.int64)[code]
    # What began first is outside; of two that began at once, the longer one.
    order = np.lexsort((-ranges.end_ns, ranges.start_ns, rank))
    rank, start, end = rank[order], ranges.start_ns[order], ranges.end_ns[order]
    ids = np.arange(len(order)) - np.searchsorted(rank, rank)
    outer = parents(thread[order], start, end)
    return {
        "name": ranges.name[order],
        "kind": ranges.kind[order],
        "rank": rank,
        "step": ranges.step[order],
        "start_ns": start - zero,
        "end_ns": end - zero,
        "thread": thread[order],
        "id": ids,
        "parent": np.append(ids, NO_PARENT)[outer],
    }
