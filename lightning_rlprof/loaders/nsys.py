"""Read reports of Nsight Systems as spans, with tables of what the devices did.

Reports are exported to SQLite by nsys first. Steps and ranks are those that NVTX ranges tell.
Kernels, copies and waits come with their launches, and with the ranges around these.
"""

import itertools
import re
import shlex
import shutil
import subprocess
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.host_calls import (
    NOWHERE,
    Found,
    Launches,
    Stages,
    as_spans,
    columns_named,
    counted,
    launch_remarks,
    stages_at,
)
from lightning_rlprof.loaders.rank_names import rank_in_name
from lightning_rlprof.loaders.sqlite_tables import SqliteTables, coded, is_sqlite
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import FORMAT, KINDS, STAGES, Header
from lightning_rlprof.tables.arrays import Int64s, Mask, distinct_tuples
from lightning_rlprof.tables.event_times import (
    LONGEST_NS,
    device_times,
    of_one_date,
)
from lightning_rlprof.tables.kernels import (
    HIDDEN_IN_GRAPHS,
    UNKNOWN,
    Coded,
    distinct,
    find,
    is_launch,
    known,
    lost_launches,
)
from lightning_rlprof.tables.spans import RankNote, RunWarning, Spans, Thread, note_of, warning_of
from lightning_rlprof.tables.table import ColumnRows, Loss, Table, noted

STRINGS = "StringIds"
"""The table that holds the texts which other columns name by number."""

# Every export since 2019 has one of these tables; databases of other tools have none.
_SIGNS = {"EXPORT_META_DATA", "META_DATA_EXPORT", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL"}
MAX_NUMBER = 2**60
"""Times and steps beyond it are damage: 36 years."""

_TABLE = "NVTX_EVENTS"
_CATEGORY, _MARK, _PUSHED, _STARTED, _DOMAIN = 33, 34, 59, 60, 75
_OWN = "rlprof"
_CAPTURE, _RANK, _CLOCK = "rlprof.capture", "rlprof.rank", "rlprof.clock"
_MAX_RANKS = 2**20
_MAX_CLOCK = 2**62
_PAYLOADS = ("int64Value", "int32Value", "uint64Value", "uint32Value")
_COLUMNS = ("start", "end", "eventType", "globalTid", "domainId", "category", "textId", *_PAYLOADS)

# The emit_nvtx of torch.autograd adds this to an operator's name, different for each call:
# https://github.com/pytorch/pytorch/blob/main/torch/csrc/profiler/util.cpp, getNvtxStr
_CALL_OF_TORCH = re.compile(
    r"(?<=.)(?:, (?:seq|op_id|sizes|input_op_ids) = (?:-?\d+|\[[][\d, ()-]*\]))+\Z"
)
_KIND = {kind: code for code, kind in enumerate(KINDS)}
REPORTS = (".nsys-rep", ".qdrep")
"""How the names of reports end, and how they did before 2021."""

_SECONDS = 1800  # Gigabytes take nsys minutes; it has hung on reports that a crash cut short.
_EXPORT = ("export", "--type", "sqlite", "--force-overwrite", "true", "--output")
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
"""The table of kernels in the export."""

_COPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_SET = "CUPTI_ACTIVITY_KIND_MEMSET"
_SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALL = "CUPTI_ACTIVITY_KIND_RUNTIME"
_METRICS, _METRIC_NAMES = "GPU_METRICS", "TARGET_INFO_GPU_METRICS"
_DEVICES = "TARGET_INFO_CUDA_DEVICE"
ACTIVITIES = (KERNELS, _GRAPH, _COPY, _SET, _SYNC)
"""Tables whose rows belong to processes; all but the last one are of what devices ran."""

_CALLED = {KERNELS: "kernels", _COPY: "copies", _SYNC: "waits"}
_GRAPHS = ("graphNodeId", "graphId")
_ACTIVITY_COLUMNS = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
_COPIES = {
    **{1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD"},
    **{9: "HtoH", 10: "PtoP", 11: "UVM HtoD", 12: "UVM DtoH", 13: "UVM DtoD", -1: "memset"},
}
_SYNCS = {1: "event", 2: "stream waits for event", 3: "stream", 4: "context"}

# The start of a session and our marks agree within 0.2 ms. A thread that waits for the interpreter
# between reading the clock and marking can be 5 ms late.
_CLOCKS_AGREE_NS = 20_000_000
_FEW = 4
_ABOUT, _VERSION = ("META_DATA_EXPORT", "EXPORT_META_DATA"), "EXPORT_PRODUCT_VERSION"


class Export(SqliteTables):
    """Read tables of one SQLite export; each call opens the file and closes it again.

    Args:
        path: The SQLite file.
        source: What the user named, where that is another file; errors name it.

    Raises:
        TraceError: The file is not an SQLite database that nsys wrote; also from any method
            when the file turns out to be damaged.
    """

    def __init__(self, path: Path, source: Path | None = None) -> None:
        if not is_sqlite(path):
            raise TraceError(f"{source or path}: not an SQLite export of Nsight Systems")
        super().__init__(path, source)
        if not _SIGNS & self.columns.keys():
            found = ", ".join(sorted(self.columns)[:5]) or "none"
            raise TraceError(
                f"{self.source}: not an export of Nsight Systems (its tables: {found})"
            )

    def least(self, table: str, group: str, name: str) -> dict[int, int]:
        """Return the smallest integer of a column for each integer in another one."""
        if not {group, name} <= self.columns.get(table, frozenset()):
            return {}
        kinds = f"typeof(\"{group}\") = 'integer' AND typeof(\"{name}\") = 'integer'"
        sql = f'SELECT "{group}", MIN("{name}") FROM "{table}" WHERE {kinds} GROUP BY "{group}"'
        return dict(self.rows(sql))


def open_export(path: Path) -> Export:
    """Open an SQLite export, or a report, which ``nsys export`` turns into one first.

    The export of a report lies in a temporary folder, for its owner alone, until the `Export` goes.

    Raises:
        TraceError: nsys is not installed or fails, or the file is not an export.
    """
    if path.suffix not in REPORTS or is_sqlite(path):
        return Export(path)
    nsys = shutil.which("nsys")
    if nsys is None:
        files = (f"./{name}" for name in (path.with_suffix(".sqlite").name, path.name))
        command = shlex.join(["nsys", *_EXPORT, *files])
        raise TraceError(
            f"{path}: reading a report needs nsys, which is not on PATH. Where nsys is installed, "
            f"run `{command}` and load its output"
        )
    folder = Path(tempfile.mkdtemp(prefix="rlprof-nsys-"))
    try:
        _export(nsys, path, folder / "report.sqlite")
        export = Export(folder / "report.sqlite", source=path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(export, shutil.rmtree, folder, ignore_errors=True)
    return export


def _export(nsys: str, report: Path, into: Path) -> None:
    command = [nsys, *_EXPORT, str(into), str(report.absolute())]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TraceError(f"{report}: nsys export took more than {_SECONDS} s") from error
    except OSError as error:
        raise TraceError(f"{report}: {nsys} cannot be run ({error.strerror})") from error
    if done.returncode or not into.exists():
        said = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        last = next((line.strip() for line in reversed(said) if line.strip()), "it says nothing")
        raise TraceError(f"{report}: nsys export failed with code {done.returncode}: {last}")


@dataclass(frozen=True, eq=False)
class Ranges(Stages):
    """Ranges and marks as columns of one length, in the export's time and in its order.

    Threads are globalTids: `process_of` finds the process in them. Starts are below zero for what
    began before the capture. The step of other domains' ranges is that of our own around them.

    Attributes:
        names: Distinct names; those of torch's operators without the numbers of the call.
        own: Whether it is of our own domain.
        ranks: What processes say their rank is, by globalPid.
        unix_ns: Wall-clock time of zero as the marks ``rlprof.clock`` tell it, None without any.
        problems: What was lost.
    """

    names: list[str]
    own: Mask
    ranks: dict[int, int]
    unix_ns: int | None
    problems: list[str]


def possible(times: Int64s) -> Mask:
    """Return which times are below `MAX_NUMBER` either way."""
    return (times > -MAX_NUMBER) & (times < MAX_NUMBER)


def process_of(thread: Int64s) -> Int64s:
    """Return the globalPid inside each globalTid: all but the lowest 24 bits."""
    return thread & ~0xFFFFFF


def pid_of(process: int) -> int:
    """Return the number of the process, as the system counts, inside a globalPid or globalTid."""
    return (process >> 24) & 0xFFFFFF


def read_ranges(export: Export) -> Ranges:
    """Read the NVTX events of an export.

    Raises:
        TraceError: The file is damaged.
    """
    events = _Events(export)
    spans, problems = events.sound()
    said = events.own & (events.type == _MARK) & events.named(_RANK, _CLOCK)
    keep = spans & ~said & ~(events.own & events.named(_CAPTURE))
    has_step = events.own & (events.payload >= 0) & (events.payload < MAX_NUMBER)
    used, name = np.unique(events.name[keep], return_inverse=True)
    thread, own = events.thread[keep], events.own[keep]
    read = Ranges(
        process_of(thread),
        thread,
        events.kinds()[keep],
        name,
        np.where(has_step, events.payload, 0)[keep],
        events.start[keep],
        events.end[keep],
        [events.names[code] for code in used.tolist()],
        own,
        events.ranks(),
        events.unix_ns(),
        problems,
    )
    others = read.at(~own)
    launches = Launches(others.process, others.thread, others.start_ns)
    read.step[~own] = stages_at(read.at(own), launches).step
    return read


class _Events:
    """All rows of the table, ranges or not, as columns."""

    def __init__(self, export: Export) -> None:
        columns = export.numbers(_TABLE, *_COLUMNS)
        self.start, self.end, self.type = columns["start"], columns["end"], columns["eventType"]
        self.thread, self.domain = columns["globalTid"], columns["domainId"]
        self.category, self.process = columns["category"], process_of(self.thread)
        self.payload = np.full(len(self.start), UNKNOWN)
        for column in (columns[name] for name in reversed(_PAYLOADS)):
            self.payload = np.where(column == UNKNOWN, self.payload, column)
        text, texts = export.texts(_TABLE, "text")
        named, strings = coded(columns["textId"], export.strings(columns["textId"], STRINGS))
        named = np.where(named < 0, len(strings), named) + len(texts)
        name = np.where(text >= 0, text, named) if len(text) else named
        self.name, self.names = distinct(name, [*texts, *strings, "unnamed"])
        self.own = np.zeros(len(self.start), dtype=bool)
        for row in np.flatnonzero((self.type == _DOMAIN) & self.named(_OWN)).tolist():
            self.own |= self._beside(row)
        name = np.where(self.own, self.name, self.name + len(self.names))
        grouped = [_CALL_OF_TORCH.sub("", text) for text in self.names]
        self.name, self.names = distinct(name, [*self.names, *grouped])

    def _beside(self, row: int) -> Mask:
        """Return what is of the domain of a row; each process numbers its own domains."""
        same: Mask = (self.process == self.process[row]) & (self.domain == self.domain[row])
        return same

    def named(self, *names: str) -> Mask:
        """Return where an event has one of these names."""
        return np.isin(self.name, [self.names.index(name) for name in names if name in self.names])

    def sound(self) -> tuple[Mask, list[str]]:
        """Return which rows are spans, and how many of them are lost for which reason."""
        mark = self.type == _MARK
        span = mark | np.isin(self.type, (_PUSHED, _STARTED))
        self.end = np.where(mark, self.start, self.end)
        placed = possible(self.start) & (self.process > 0)
        placed[placed] = of_one_date(self.start[placed])
        ended = self.end != UNKNOWN
        forward = (self.end >= self.start) & (self.end < MAX_NUMBER)
        forward &= self.end - self.start < LONGEST_NS
        reasons = {
            "events are left out: they have no type": self.type == UNKNOWN,
            "ranges are left out: they never ended": span & placed & ~ended,
            "ranges are left out: their times are invalid": span & ~(placed & (forward | ~ended)),
        }
        counts = {text: np.count_nonzero(rows) for text, rows in reasons.items()}
        lost: list[str] = [Loss(f"{count} NVTX {text}") for text, count in counts.items() if count]
        return span & placed & ended & forward, lost

    def kinds(self) -> Int64s:
        """Return kinds: of our own by their category, else by their name; regions otherwise."""
        kind = np.full(len(self.start), _KIND["region"])
        kind[self.own & self.named("step")] = _KIND["step"]
        kind[self.own & self.named(*STAGES)] = _KIND["stage"]
        categories = self.own & (self.type == _CATEGORY) & self.named(*KINDS)
        for row in np.flatnonzero(categories).tolist():
            same = self._beside(row) & (self.category == self.category[row])
            kind[same] = KINDS.index(self.names[self.name[row]])
        kind[self.type == _MARK] = _KIND["mark"]
        return kind

    def ranks(self) -> dict[int, int]:
        """Return each process's rank as its first mark says it."""
        rows = reversed(self._said(_RANK, _MAX_RANKS))
        return {int(self.process[row]): int(self.payload[row]) for row in rows}

    def unix_ns(self) -> int | None:
        """Return the wall-clock time of zero by the marks that tell it.

        A mark comes a little after the clock was read, never before, so the latest is nearest.
        """
        rows = self._said(_CLOCK, _MAX_CLOCK)
        return max((int(self.payload[row] - self.start[row]) for row in rows), default=None)

    def _said(self, name: str, below: int) -> list[int]:
        """Return the rows of one of our marks whose payload can be true."""
        found = self.own & (self.type == _MARK) & self.named(name) & (self.process > 0)
        found &= (self.payload >= 0) & (self.payload < below) & possible(self.start)
        return np.flatnonzero(found).tolist()


class _Rows(NamedTuple):
    """Rows of activities, sorted by rank and start, with what was found about them.

    Attributes:
        columns: Of the export; ``table`` is the number of the activity that a row is of.
        rank: Rank of its process.
        launches: The call that launched each.
        call_ns: How long that took, `UNKNOWN` where it was not recorded or did not end.
        found: What it lies in.
        remarks: What must be known about them.
    """

    columns: Mapping[str, Int64s]
    rank: Int64s
    launches: Launches
    call_ns: Int64s
    found: Found
    remarks: list[str]


class Report:
    """A report; each of its tables reads the file again and keeps nothing.

    Args:
        path: The file.
        named: The rank of processes that don't mark theirs.

    Attributes:
        export: Its tables.
        ranges: Its ranges, in its own time.
        processes: globalPids of those that marked or launched anything, by process number.
        launching: Those of them that launched what a device ran.
        zero_ns: Start of the first span, else of the first activity, in its own time.
        warnings: What is missing or doubtful.
        unix_ns: Wall-clock time of zero in its own time, None where that is not known.
        ranks: Rank of each process, by globalPid.
    """

    def __init__(self, path: Path, named: int | None) -> None:
        self.export = export = open_export(path)
        self.ranges = ranges = read_ranges(export)
        active = [self._began(table) for table in ACTIVITIES]
        if not any(active):  # Work that names no process is that of one which made calls.
            callers = export.least(_CALL, "globalTid", "start")
            called = process_of(np.array([*callers], np.int64)).tolist()
            active.insert(0, dict(zip(called, callers.values(), strict=True)))
        seen = {*ranges.ranks, *np.unique(ranges.process).tolist(), *itertools.chain(*active)}
        self.processes = sorted((each for each in seen if each > 0), key=lambda p: (pid_of(p), p))
        self.launching = set(itertools.chain(*active[:-1]))
        doubts = (*export.problems, *ranges.problems)
        self.warnings = [warning_of(None, text, Code.TRACE_DOUBTFUL) for text in doubts]
        self.unix_ns = self._find_unix_ns()
        self.ranks = self._find_ranks(named)
        starts = ranges.start_ns
        if not len(starts):
            starts = self._sound_rows(ACTIVITIES)[0]["start"]
        self.zero_ns = int(starts.min()) if len(starts) else 0

    @cached_property
    def host(self) -> tuple[int, int] | None:
        """When the first event of the host began and the last one ended, None without any."""
        calls = self.export.numbers(_CALL, "start", "end")
        start = np.append(calls["start"], self.ranges.start_ns)
        end = np.append(calls["end"], self.ranges.end_ns)
        sound = possible(start) & (end >= start) & (end - start < LONGEST_NS)
        sound[sound] = of_one_date(start[sound])
        return (int(start[sound].min()), int(end[sound].max())) if sound.any() else None

    def _began(self, table: str) -> dict[int, int]:
        """Return when the first row of each process began, by globalPid."""
        if found := self.export.least(table, "globalPid", "start"):
            return found
        rows = self._numbers(table, "start", "globalPid", "correlationId")
        process, start = rows["globalPid"], rows["start"]
        sound = (process != UNKNOWN) & (start != UNKNOWN)
        keys, own = np.unique(process[sound], return_inverse=True)
        first = np.full(len(keys), MAX_NUMBER)
        np.minimum.at(first, own, start[sound])
        return dict(zip(keys.tolist(), first.tolist(), strict=True))

    def _numbers(self, table: str, *names: str) -> dict[str, Int64s]:
        """Return columns of an activity.

        If none of its rows has a process, it is the only one with a call of the row's number.
        """
        rows = self.export.numbers(table, *names)
        if not len(rows["start"]) or (rows["globalPid"] != UNKNOWN).any():
            return rows
        calls = self.export.numbers(_CALL, "globalTid", "correlationId")
        numbered = (calls["correlationId"] != UNKNOWN) & (calls["globalTid"] > 0)
        pairs = np.stack([calls["correlationId"], process_of(calls["globalTid"])])[:, numbered]
        number, process = np.unique(pairs, axis=1)
        number, first, count = np.unique(number, return_index=True, return_counts=True)
        process = np.append(np.where(count == 1, process[first], UNKNOWN), UNKNOWN)
        return {**rows, "globalPid": process[find(number, rows["correlationId"])]}

    def _find_unix_ns(self) -> int | None:
        """Return when zero was: the start of the session, else the time in rlprof's marks."""
        times = self.export.numbers("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")["utcEpochNs"]
        started = next((ns for ns in times.tolist() if 0 < ns < _MAX_CLOCK), None)
        marked, text = self.ranges.unix_ns, ""
        if started is None and marked is None:
            text = "recording time unknown: no TARGET_INFO_SESSION_START_TIME"
        elif started and marked is not None and abs(off := started - marked) > _CLOCKS_AGREE_NS:
            text = f"its clock is {off / 1e6:+.0f} ms off the clock of the program"
        self.warnings += [warning_of(None, text, Code.TRACE_DOUBTFUL)] if text else []
        return marked if started is None else started

    def _find_ranks(self, named: int | None) -> dict[int, int]:
        """Return the rank of each process by globalPid; what is doubtful becomes a warning."""
        ranks = dict(self.ranges.ranks)
        others = [each for each in self.processes if each not in ranks]
        free = max(ranks.values(), default=-1) + 1
        if named is not None:
            ranks |= dict.fromkeys(others, named)
        elif others:
            ranks |= {each: free + at for at, each in enumerate(others)}
            text = f"ranks are guessed, counting from {free}, because no mark contains them: "
            text += f"processes {_some(others)}"
            self.warnings.append(RunWarning(None, text, Code.RANKS_GUESSED.value))
        of_rank = defaultdict[int, list[int]](list)
        for process in self.processes:
            if process in self.launching:
                of_rank[ranks[process]].append(process)
        for rank, own in sorted(of_rank.items()):
            if len(own) > 1:
                text = f"processes {_some(own)} all launched kernels and count as one rank, "
                text += f"{rank}, by the file name or by their marks"
                self.warnings.append(RunWarning(None, text, Code.RANKS_JOINED.value))
        return ranks

    def _ranks_of(self, process: Int64s) -> Int64s:
        """Return the rank of each globalPid, `UNKNOWN` without one."""
        keys, numbers = ([*self.ranks], [*self.ranks.values(), UNKNOWN])
        return np.array(numbers, np.int64)[find(np.array(keys, np.int64), process)]

    def headers(self, run_id: str) -> dict[int, Header]:
        """Return a header per rank; of several processes of one rank the first stands for it."""
        setting, ranks = self.export.setting, self.ranks
        version = next(filter(None, (setting(table, _VERSION) for table in _ABOUT)), "")
        host = setting("TARGET_INFO_SYSTEM_ENV", "Hostname") or "unknown host"
        found = {
            ranks[process]: Header(
                FORMAT,
                run_id,
                ranks[process],
                max(ranks.values()) + 1,
                "",
                host,
                pid_of(process),
                "cuda" if process in self.launching else "cpu",
                unix_ns=self.unix_ns or 0,
                clock_ns=0,
                versions={"nsys": version} if version else {},
            )
            for process in reversed(self.processes)
        }
        return dict(sorted(found.items()))

    def threads(self, threads: Int64s) -> tuple[Thread, ...]:
        """Return threads by globalTid, with the names that the system or the program gave them."""
        given = self.export.numbers("ThreadNames", "globalTid", "nameId")
        texts = self.export.strings(given["nameId"], STRINGS)
        pairs = zip(given["globalTid"].tolist(), given["nameId"].tolist(), strict=True)
        names = {thread: texts[name] for thread, name in pairs if name in texts}
        return tuple(
            Thread(self.ranks[process], each - process, names.get(each, f"thread {each - process}"))
            for each, process in zip(threads.tolist(), process_of(threads).tolist(), strict=True)
        )

    def notes(self) -> Iterator[RankNote]:
        """Say which process each rank is, and what the report does not hold."""
        there = self.export.numbers("PROCESSES", "globalPid")["globalPid"].tolist()
        codes, names = self.export.texts("PROCESSES", "name")
        called = dict(zip(there, codes.tolist(), strict=False))
        for process in self.processes:
            code, pid = called.get(process, -1), pid_of(process)
            name = names[code] if code >= 0 else "without a name"
            text = f"process {pid} ({name}) is rank {self.ranks[process]}"
            yield note_of(self.ranks[process], Code.RANK_OF_PROCESS, text, pid=pid)
        has = self.export.has
        if not has(KERNELS):
            why = "CUDA was not traced or not used"
            if self._launching():
                why = "calls launched some, but none was recorded"
            if has(_GRAPH):
                why = "replays of CUDA graphs hide them (nsys --cuda-graph-trace=node)"
            elif has(_COPY) or has(_SET):
                why = "only copies"
            yield note_of(None, Code.NO_KERNELS, f"no kernels: {why}")
        if not len(self.ranges.start_ns):
            yield note_of(None, Code.NO_RANGES, "no NVTX ranges: NVTX was not traced or not used")

    def columns(self) -> dict[str, Any]:
        """Return the columns of `Spans`, and their threads."""
        ranges = self.ranges
        threads, code = np.unique(ranges.thread, return_inverse=True)
        names = ("name", "kind", "step", "start_ns", "end_ns")
        own = {name: getattr(ranges, name) for name in names}
        own |= {"rank": self._ranks_of(ranges.process), "thread": code}
        return {**as_spans(own, code, self.zero_ns), "threads": self.threads(threads)}

    def tables(self) -> dict[str, Callable[[], Table]]:
        """Return what can be read, by name."""
        tables = (
            ("kernels", self.kernels, (KERNELS, _GRAPH)),
            ("memcpy", self.copies, (_COPY, _SET)),
            ("sync", self.syncs, (_SYNC,)),
            ("gpu_metrics", self.metrics, (_METRICS,)),
        )
        found = {name: read for name, read, of in tables if any(map(self.export.has, of))}
        return found | ({"kernels": self.kernels} if self._launching() else {})

    def kernels(self) -> Table:
        """Return one row per kernel, by rank and start."""
        rows = self._rows((KERNELS,), "demangledName", "shortName", *_GRAPHS)
        name = self._kernel_names(rows.columns)
        around = self.ranges.name_around(rows.launches, rows.found)
        last = {"range": distinct(around, self.ranges.names), **self._launched(rows)}
        rows.remarks.extend(self._graphs(rows.columns))
        rows.remarks.extend(self._launches_alone())
        return self._table("kernels", rows, {"kernel": name}, last)

    def _kernel_names(self, columns: Mapping[str, Int64s]) -> Coded:
        long, short = columns["demangledName"], columns["shortName"]
        names = self.export.strings(np.concatenate([long, short]), STRINGS)
        return coded(np.where(np.isin(long, list(names)), long, short), names)

    def copies(self) -> Table:
        """Return one row per copy between memories and per memset."""
        rows = self._rows((_COPY, _SET), "copyKind", "bytes", *_GRAPHS)
        kinds = _labels(np.where(rows.columns["table"], -1, rows.columns["copyKind"]), _COPIES)
        middle = {"kind": kinds, "bytes": known(rows.columns["bytes"])}
        return self._table("memcpy", rows, middle, self._launched(rows))

    def syncs(self) -> Table:
        """Return one row per wait of the host or of a stream for the device."""
        rows = self._rows((_SYNC,), "syncType")
        return self._table("sync", rows, {"kind": _labels(rows.columns["syncType"], _SYNCS)}, {})

    def metrics(self) -> Table:
        """Return one row per sample in the order of the file; metrics without a name have none.

        The rank is that of the processes whose kernels ran on the GPU. It is unknown if those are
        of several ranks or of none, or if the export doesn't map GPUs to devices.
        """
        rows = self.export.numbers(_METRICS, "timestamp", "typeId", "metricId")
        value = self.export.reals(_METRICS, "value")["value"]
        sound = possible(rows["timestamp"]) & np.isfinite(value)
        rows = {name: column[sound] for name, column in rows.items()}
        kind = rows["typeId"]
        gpu = np.where(kind == UNKNOWN, UNKNOWN, kind & 0xFF)  # The lowest byte is the GPU.
        own = np.array([*_ranks_of_gpus(self.export, self.ranks), UNKNOWN], np.int64)
        cells: dict[str, Any] = {
            "rank": known(own[np.where(kind == UNKNOWN, -1, gpu)]),
            "device": known(gpu),
            "time": rows["timestamp"] - self.zero_ns,
            "metric": _metric_names(self.export, kind, rows["metricId"]),
            "value": value[sound],
        }
        lost = np.count_nonzero(~sound)
        text = Loss(f"{lost} samples are left out: they have no time or no value")
        return _made("gpu_metrics", cells, [text] if lost else [])

    def _table(
        self, name: str, rows: _Rows, middle: Mapping[str, Any], last: Mapping[str, Any]
    ) -> Table:
        columns = rows.columns
        cells: dict[str, Any] = {
            "rank": rows.rank,
            "device": known(columns["deviceId"]),
            "stream": known(columns["streamId"]),
            **middle,
            "start": columns["start"] - self.zero_ns,
            "duration": columns["end"] - columns["start"],
            "stage": distinct(rows.found.stage, self.ranges.names),
            "step": known(rows.found.step, nothing=0),
            **last,
        }
        return _made(name, cells, rows.remarks)

    def _rows(self, tables: Sequence[str], *more: str) -> _Rows:
        columns, rank, lost, doubts = self._sound_rows(tables, *more)
        launches, call_ns = self._launches(columns["globalPid"], columns["correlationId"])
        found = stages_at(self.ranges.at(self.ranges.own), launches)
        text = f"{lost} rows are left out: their times or their process are invalid"
        losses = [Loss(text, rows=lost)] if lost else []
        missing = np.count_nonzero(launches.time_ns == UNKNOWN)
        remarks = launch_remarks(_CALLED[tables[0]], missing, np.count_nonzero(found.lent))
        return _Rows(columns, rank, launches, call_ns, found, [*losses, *doubts, *remarks])

    def _sound_rows(
        self, tables: Sequence[str], *more: str
    ) -> tuple[dict[str, Int64s], Int64s, int, list[str]]:
        """Return rows of activities by rank and start, and their ranks.

        Also return how many are left out, and what is said of times that cannot be true. What else
        ran in the streams is read, too, as it shows which ends these are.
        """
        asked, what = len(tables), _CALLED[tables[0]]
        beside = (table for table in ACTIVITIES[:-1] if table not in tables)
        tables = tables if _SYNC in tables else (*tables, *beside)
        read = [self._numbers(table, *_ACTIVITY_COLUMNS, *more) for table in tables]
        columns = {name: np.concatenate([each[name] for each in read]) for name in read[0]}
        columns["table"] = np.repeat(np.arange(len(read)), [len(each["start"]) for each in read])
        start, end, process = columns["start"], columns["end"], columns["globalPid"]
        if len(self.processes) == 1:
            process = columns["globalPid"] = np.where(process == UNKNOWN, self.processes, process)
        rank = self._ranks_of(process)
        sound = possible(start) & possible(end) & (start <= end) & (rank != UNKNOWN)
        there = np.append(start[sound], self.ranges.start_ns)
        sound[sound] = of_one_date(there)[: np.count_nonzero(sound)]
        own = columns["table"] < asked
        lost = int(np.count_nonzero(own & ~sound))
        order = np.lexsort((start, rank))
        order = order[sound[order]]
        columns = {name: column[order] for name, column in columns.items()}
        stream = [columns[name] for name in ("globalPid", "deviceId", "streamId")]
        lane = np.where(stream[2] == UNKNOWN, -1, distinct_tuples(np.array(stream))[1])
        if _SYNC in tables:  # The host waits while a stream works.
            lane = np.where(columns["table"] == list(tables).index(_SYNC), -1, lane)
        launch = columns["correlationId"]
        times = device_times(lane, columns["start"], columns["end"], launch, self.host)
        columns["end"] = times.end_ns
        mine = np.flatnonzero(own[order])
        times = times.at(mine)
        called = {name: column[mine] for name, column in columns.items()}
        names = self._kernel_names(called) if "demangledName" in called else None
        keep = mine[~times.untimed]
        columns = {name: column[keep] for name, column in columns.items()}
        return columns, rank[order][keep], lost, times.remarks(what, names)

    def _launches(self, process: Int64s, correlation: Int64s) -> tuple[Launches, Int64s]:
        """Find the call that launched each row, and how long it took.

        Correlations are numbered by each process.
        """
        calls = self.export.numbers(_CALL, "start", "end", "globalTid", "correlationId")
        start, thread, number = calls["start"], calls["globalTid"], calls["correlationId"]
        own = np.where(possible(start) & (number != UNKNOWN), process_of(thread), NOWHERE)
        pairs = _pairs(np.append(own, process), np.append(number, correlation))
        of_call, of_row = np.split(pairs, [len(start)])
        order = np.argsort(start, kind="stable")
        found = np.append(order, -1)[find(of_call[order], of_row)]
        ended = possible(calls["end"]) & (calls["end"] >= start)
        call_ns = np.where(ended, calls["end"] - start, UNKNOWN)
        launches = Launches(
            np.where(found >= 0, process, NOWHERE),
            np.append(thread, NOWHERE)[found],
            np.append(start, UNKNOWN)[found],
        )
        return launches, np.append(call_ns, UNKNOWN)[found]

    def _launching(self) -> list[int]:
        """Return the numbers of the names of calls that launch kernels."""
        named = np.unique(self.export.numbers(_CALL, "nameId")["nameId"])
        names = self.export.strings(named, STRINGS)
        return [number for number, name in names.items() if is_launch(name)]

    def _launches_alone(self) -> Iterator[Loss]:
        """Say how many calls launched a kernel that must have begun and is not in the report."""
        calls = self.export.numbers(_CALL, "globalTid", "correlationId", "nameId", "start")
        own = np.isin(calls["nameId"], self._launching())
        kernels = self.export.numbers(KERNELS, "globalPid", "correlationId", "end")
        process, number, end = kernels.values()
        pairs = _pairs(
            np.append(process_of(calls["globalTid"][own]), process),
            np.append(calls["correlationId"][own], number),
        )
        of_call, of_kernel = np.split(pairs, [np.count_nonzero(own)])
        # A kernel without a process may be of any call with its number.
        matched = np.isin(of_call, of_kernel)
        matched |= np.isin(calls["correlationId"][own], number[process == UNKNOWN])
        times = calls["start"][possible(calls["start"])]
        ends = np.append(times, self.ranges.end_ns)
        record = int(times.min(initial=MAX_NUMBER)), int(ends.max(initial=-MAX_NUMBER))
        work_end = int(end[possible(end)].max(initial=-MAX_NUMBER))
        alone = lost_launches(calls["start"][own], matched, work_end, record)
        if count := int(np.count_nonzero(alone)):
            yield Loss(f"{count} launches have no kernel", rows=count)

    def _launched(self, rows: _Rows) -> dict[str, Any]:
        when, thread = rows.launches.time_ns, rows.launches.thread
        return {
            "launch": known(np.where(when == UNKNOWN, UNKNOWN, when - self.zero_ns)),
            "launch duration": known(rows.call_ns),
            # The low bits identify a thread as in `Spans.threads`; the process is in the bits
            # above.
            "thread": known(np.where(thread == NOWHERE, UNKNOWN, thread & 0xFFFFFF)),
            "graph": known(self._replays(rows)),
        }

    def _replays(self, rows: _Rows) -> Int64s:
        """Return the number of each row's graph replay, else `UNKNOWN`.

        Replays of a rank are numbered by their beginnings, over kernels and copies. What one call
        launched has one correlation, also where the call itself was not recorded.
        """
        columns = rows.columns
        if not (in_graph := _replayed(columns)).any():
            return np.full(len(in_graph), UNKNOWN)
        every, rank, *_ = self._sound_rows((KERNELS, _COPY, _SET), *_GRAPHS)
        own = np.flatnonzero(_replayed(every))
        calls = [
            np.append(every[name][own], columns[name]) for name in ("globalPid", "correlationId")
        ]
        replays, of_row = np.split(_pairs(*calls), [len(own)])
        keys, first = np.unique(replays, return_index=True)
        order, number = np.argsort(first), np.empty(len(first), np.int64)
        ranks = rank[own][first[order]]
        number[order] = np.arange(len(order)) - np.searchsorted(ranks, ranks)
        found = np.append(number, UNKNOWN)[find(keys, of_row)]
        return np.where(in_graph, found, UNKNOWN)

    def _graphs(self, columns: Mapping[str, Int64s]) -> list[str]:
        whole = len(self.export.numbers(_GRAPH, "start")["start"])
        text = "kernels ran in CUDA graph replays and belong to the stage of the launch"
        hidden = f"CUDA graph replays: {HIDDEN_IN_GRAPHS} (use nsys --cuda-graph-trace=node)"
        return counted((_replayed(columns).sum(), text), (whole, hidden))


def _made(name: str, cells: Mapping[str, Any], remarks: Sequence[str]) -> Table:
    return Table(name, columns_named(*cells), ColumnRows(list(cells.values())), **noted(remarks))


def _replayed(columns: Mapping[str, Int64s]) -> Any:
    return (columns["graphNodeId"] > 0) | (columns["graphId"] > 0)


def _pairs(first: Int64s, second: Int64s) -> Int64s:
    """Return a number for each row that only rows with the same two values share."""
    _, codes = np.unique(first, return_inverse=True)
    _, more = np.unique(second, return_inverse=True)
    pairs: Int64s = codes * (len(second) + 1) + more
    return pairs


def _labels(numbers: Int64s, labels: Mapping[int, str]) -> Coded:
    there = {each: labels.get(each, f"kind {each}") for each in np.unique(numbers).tolist()}
    there.pop(UNKNOWN, None)
    return coded(numbers, there)


def _ranks_of_gpus(export: Export, ranks: Mapping[int, int]) -> list[int]:
    """Return the rank of each GPU by its number, up to 255."""
    devices = export.numbers(_DEVICES, "pid", "cudaId", "gpuId")
    columns = (column.tolist() for column in devices.values())
    place = {(pid, cuda): gpu for pid, cuda, gpu in zip(*columns, strict=True)}
    users: dict[int, set[int]] = {}
    if {"globalPid", "deviceId"} <= export.columns.get(KERNELS, frozenset()):
        for process, device in export.rows(f"SELECT DISTINCT globalPid, deviceId FROM {KERNELS}"):
            if process in ranks and (pid_of(process), device) in place:
                users.setdefault(place[pid_of(process), device], set()).add(ranks[process])
    own = [users.get(gpu, set()) for gpu in range(256)]
    return [next(iter(each)) if len(each) == 1 else UNKNOWN for each in own]


def _metric_names(export: Export, kind: Int64s, metric: Int64s) -> Coded:
    """Return names of metrics, which are numbered separately for each type of source."""
    there = export.numbers(_METRIC_NAMES, "typeId", "metricId")
    codes, names = export.texts(_METRIC_NAMES, "metricName")
    keys = zip(there["typeId"].tolist(), there["metricId"].tolist(), strict=True)
    known = dict(zip(keys, codes.tolist(), strict=False))
    _, first, pair = np.unique(_pairs(kind, metric), return_index=True, return_inverse=True)
    used = zip(kind[first].tolist(), metric[first].tolist(), strict=True)
    own = [known.get(each, -1) for each in used]
    return np.array(own, dtype=np.int64)[pair], names


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
    report = Report(path, rank_in_name(path.name) if rank is None else rank)
    return Spans(
        path,
        tuple(report.ranges.names),
        **report.columns(),
        headers=report.headers(path.stem),
        statuses=dict.fromkeys(sorted(set(report.ranks.values())), "finished"),
        notes=tuple(report.notes()),
        warnings=tuple(report.warnings),
        unix_ns=0 if report.unix_ns is None else report.unix_ns + report.zero_ns,
        tables=report.tables(),
    )


def _some(processes: list[int]) -> str:
    names = ", ".join(str(pid_of(each)) for each in processes[:_FEW])
    return names + (f" and {len(processes) - _FEW} more" if len(processes) > _FEW else "")
