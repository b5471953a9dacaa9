"""Open SQLite exports of Nsight Systems, and read their NVTX ranges and marks.

Reports are exported by nsys first. Steps and ranks are those that the ranges tell.
"""

import re
import shlex
import shutil
import subprocess
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.host_calls import Launches, Stages, stages_at
from lightning_rlprof.loaders.sqlite_tables import SqliteTables, coded, is_sqlite
from lightning_rlprof.records.records import KINDS, STAGES
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.kernels import UNKNOWN, distinct
from lightning_rlprof.tables.table import Loss

STRINGS = "StringIds"
"""The table that holds the texts which other columns name by number."""

# Any of these is in every export from 2019 on; none is in another tool's database.
_SIGNS = {"EXPORT_META_DATA", "META_DATA_EXPORT", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL"}
LARGEST = 2**60
"""Times and steps beyond it are damage: 36 years."""

_TABLE = "NVTX_EVENTS"
_CATEGORY, _MARK, _PUSHED, _STARTED, _DOMAIN = 33, 34, 59, 60, 75
_OWN = "rlprof"
_CAPTURE, _RANK, _CLOCK = "rlprof.capture", "rlprof.rank", "rlprof.clock"
_MOST_RANKS = 2**20
_LARGEST_CLOCK = 2**62
_PAYLOADS = ("int64Value", "int32Value", "uint64Value", "uint32Value")
_COLUMNS = ("start", "end", "eventType", "globalTid", "domainId", "category", "textId", *_PAYLOADS)
# What torch.autograd's emit_nvtx adds to an operator's name, different for each call:
# https://github.com/pytorch/pytorch/blob/main/torch/csrc/profiler/util.cpp, getNvtxStr
_CALL_OF_TORCH = re.compile(
    r"(?<=.)(?:, (?:seq|op_id|sizes|input_op_ids) = (?:-?\d+|\[[][\d, ()-]*\]))+\Z"
)
_KIND = {kind: code for code, kind in enumerate(KINDS)}


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


REPORT = ".nsys-rep"
"""How the names of reports end."""

_SECONDS = 1800  # gigabytes take nsys minutes; it has hung on reports that a crash cut short
_EXPORT = ("export", "--type", "sqlite", "--force-overwrite", "true", "--output")


def open_export(path: Path) -> Export:
    """Open an SQLite export, or a report, which ``nsys export`` turns into one first.

    The export of a report lies in a temporary folder, for its owner alone, until the `Export` goes.

    Raises:
        TraceError: nsys is not installed or fails, or the file is not an export.
    """
    if path.suffix != REPORT or is_sqlite(path):
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
class Ranges:
    """Ranges and marks as columns of one length, in the export's time and in its order.

    Attributes:
        thread: globalTid of each: `process_of` finds the process in it.
        start_ns: Start; below zero for what began before the capture.
        end_ns: End, never before the start.
        name: Index into ``names``.
        names: Distinct names; those of torch's operators without the numbers of the call.
        kind: Index into `lightning_rlprof.records.records.KINDS`.
        step: RL step; of other domains' ranges, that of our own around them, 0 without.
        own: Whether it is of our own domain.
        ranks: What processes say their rank is, by globalPid.
        unix_ns: Wall-clock time of zero as the marks ``rlprof.clock`` tell it, None without any.
        problems: What was lost.
    """

    thread: Int64s
    start_ns: Int64s
    end_ns: Int64s
    name: Int64s
    names: list[str]
    kind: Int64s
    step: Int64s
    own: Mask
    ranks: dict[int, int]
    unix_ns: int | None
    problems: list[str]

    def stages(self) -> Stages:
        """Return our own ranges, which tell stage and step."""
        thread = self.thread[self.own]
        columns = (self.kind, self.name, self.step, self.start_ns, self.end_ns)
        return Stages(process_of(thread), thread, *(column[self.own] for column in columns))


def possible(times: Int64s) -> Mask:
    """Return which times are below `LARGEST` either way."""
    return (times > -LARGEST) & (times < LARGEST)


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
    has_step = events.own & (events.payload >= 0) & (events.payload < LARGEST)
    used, name = np.unique(events.name[keep], return_inverse=True)
    read = Ranges(
        events.thread[keep],
        events.start[keep],
        events.end[keep],
        name,
        [events.names[code] for code in used.tolist()],
        events.kinds()[keep],
        np.where(has_step, events.payload, 0)[keep],
        events.own[keep],
        events.ranks(problems),
        events.unix_ns(),
        problems,
    )
    thread, start = read.thread[~read.own], read.start_ns[~read.own]
    around = stages_at(read.stages(), Launches(process_of(thread), thread, start))
    read.step[~read.own] = around.step
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
        ended = self.end != UNKNOWN
        forward = (self.end >= self.start) & (self.end < LARGEST)
        reasons = {
            "events are left out: they have no type": self.type == UNKNOWN,
            "ranges are left out: they have no time or no thread": span & ~placed,
            "ranges are left out: they never ended": span & placed & ~ended,
            "ranges are left out: they end before they start": span & placed & ended & ~forward,
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

    def ranks(self, problems: list[str]) -> dict[int, int]:
        """Return each process's rank as its first mark says it; another one is a problem."""
        found: dict[int, int] = {}
        wrong = set()
        for row in self._said(_RANK, _MOST_RANKS):
            process, rank = int(self.process[row]), int(self.payload[row])
            if found.setdefault(process, rank) != rank:
                wrong.add((process, rank))
        for process, rank in sorted(wrong):
            problems.append(
                f"process {pid_of(process)} is taken as rank {found[process]}, "
                f"but marks in it also say rank {rank}"
            )
        return found

    def unix_ns(self) -> int | None:
        """Return the wall-clock time of zero by the marks that tell it.

        A mark comes a little after the clock was read, never before, so the latest is nearest.
        """
        rows = self._said(_CLOCK, _LARGEST_CLOCK)
        return max((int(self.payload[row] - self.start[row]) for row in rows), default=None)

    def _said(self, name: str, below: int) -> list[int]:
        """Return the rows of one of our marks whose payload can be true."""
        found = self.own & (self.type == _MARK) & self.named(name) & (self.process > 0)
        found &= (self.payload >= 0) & (self.payload < below) & possible(self.start)
        return np.flatnonzero(found).tolist()
