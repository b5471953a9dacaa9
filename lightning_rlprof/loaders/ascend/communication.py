"""The analysis of communication by torch_npu and CANN: each collective, and its group."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.ascend.capture import (
    COMMUNICATION_FILE,
    LINKS_FILE,
    Cells,
    Frame,
    OpenCapture,
    TableReader,
    coded_texts,
    texts_of,
)
from lightning_rlprof.loaders.ascend.tasks import is_collective, read_tasks
from lightning_rlprof.loaders.ascend.units import scaled
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, matches
from lightning_rlprof.tables.table import Column, columns_of

_TIMES, _BANDWIDTHS, _MATRIX = "CommAnalyzerTime", "CommAnalyzerBandwidth", "CommAnalyzerMatrix"
# Of each operation the analysis lists some collectives (allreduce-top1, -middle, -bottom1) and
# their sum (allreduce-total).
_OPERATION = re.compile(r"(.+?)-(total|top\d*|middle\d*|bottom\d*)")
_STEP = re.compile(r"step(\d{1,15})")
# The analysis keeps starts as doubles of microseconds; in a real one they are 13.4 µs late as well.
_NEAR_NS = 1_000_000
_MAX_BYTES = 1 << 28  # a kilobyte per collective and step
# Milliseconds of a collective, by our column: the key of the file, and the database's column.
_MEASURED = {
    "duration": ("Elapse Time(ms)", "elapse_time"),
    "transfer": ("Transit Time(ms)", "transit_time"),
    "wait": ("Wait Time(ms)", "wait_time"),
    "synchronization": ("Synchronization Time(ms)", "synchronization_time"),
    "idle": ("Idle Time(ms)", "idle_time"),
}
_INSIDE_SDMA = {"HCCS", "PCIE", "SIO"}  # links whose bytes SDMA counts as well


@dataclass
class _Collective:
    """One collective; times in milliseconds and sizes in 10**6 bytes, as the files have them."""

    name: str
    group: str
    kind: str
    step: str
    start: float | None
    measured: Mapping[str, Any]
    links: Mapping[str, tuple[Any, Any]]

    def moved(self) -> tuple[Any, Any]:
        """Return size and time of all links, each byte once; None for each if it is 0."""
        pairs = [pair for link, pair in self.links.items() if link not in _INSIDE_SDMA]
        size = sum(size for size, _ in pairs if isinstance(size, int | float))
        time = sum(time for _, time in pairs if isinstance(time, int | float))
        return size or None, time or None


def _communication(opened: OpenCapture) -> tuple[Frame, list[str]]:
    file = opened.file(COMMUNICATION_FILE)
    rows = list(_from_analysis(opened.analysis) if file is None else _from_file(file))  # type: ignore[arg-type]
    moved = [row.moved() for row in rows]
    size, time = scaled([s for s, _ in moved], 10**6), scaled([t for _, t in moved], 10**6)
    steps = [_STEP.fullmatch(row.step) for row in rows]
    numbers = np.array([int(step[1]) if step else UNKNOWN for step in steps], np.int64)
    rounded = scaled([row.start for row in rows], 1000).tolist()
    exact = _exact_starts(opened)
    starts = [_nearest(exact.get(row.name, ()), at) for row, at in zip(rows, rounded, strict=True)]
    frame: dict[str, Cells] = {
        "operator": coded_texts([row.name for row in rows]),
        "kind": coded_texts([row.kind for row in rows]),
        "group": coded_texts([row.group for row in rows]),
        "step": opened.rl_steps(numbers),
        "start": np.array(starts, np.int64),
        "size": size,
        "bandwidth": np.where((size > 0) & (time > 0), size / np.where(time > 0, time, 1), np.nan),
    }
    for name in _MEASURED:
        frame[name] = scaled([row.measured.get(name) for row in rows], 10**6)
    return frame, []


def _nearest(starts: Sequence[int], rounded: int) -> int:
    near = min(starts, key=lambda start: abs(start - rounded), default=UNKNOWN)
    return near if rounded != UNKNOWN and abs(near - rounded) < _NEAR_NS else rounded


def _exact_starts(opened: OpenCapture) -> dict[str, list[int]]:
    """Return when the collectives of each name began on the device."""
    found: dict[str, list[int]] = {}
    with suppress(TraceError):  # reading the kernels reports it
        tasks = read_tasks(opened)
        keep = matches(tasks.name, is_collective)
        names = texts_of((tasks.name[0][keep], tasks.name[1]))
        for name, start in zip(names, tasks.start_ns[keep].tolist(), strict=True):
            found.setdefault(name, []).append(start)
    return found


def _from_analysis(database: SqliteTables) -> Iterator[_Collective]:
    links: dict[tuple[str, ...], dict[str, tuple[Any, Any]]] = {}
    key = ("hccl_op_name", "group_name", "step")
    columns = ", ".join((*key, "transport_type", "transit_size", "transit_time"))
    if database.has(_BANDWIDTHS):  # a row per packet size repeats the numbers of the link
        for *own, link, size, time in database.rows(f"SELECT {columns} FROM {_BANDWIDTHS}"):
            links.setdefault(tuple(own), {})[str(link)] = (size, time)
    names = ", ".join(column for _, column in _MEASURED.values())
    columns = f"{', '.join(key)}, type, start_timestamp, {names}"
    for name, group, step, kind, start, *measured in database.rows(
        f"SELECT {columns} FROM {_TIMES}"
    ):
        times = dict(zip(_MEASURED, measured, strict=True))
        found = links.get((name, group, step), {})
        yield _Collective(str(name), str(group), str(kind), str(step), start, times, found)


def _from_file(file: Path) -> Iterator[_Collective]:
    for step, kind, key, each in _entries(file):
        if "@" not in key:  # a sum
            continue
        times, bandwidths = (
            part if isinstance(part := each.get(f"Communication {word} Info"), dict) else {}
            for word in ("Time", "Bandwidth")
        )
        name, _, group = key.rpartition("@")
        links = {
            link: (of.get("Transit Size(MB)"), of.get("Transit Time(ms)"))
            for link, of in bandwidths.items()
            if isinstance(of, dict)
        }
        measured = {column: times.get(key) for column, (key, _) in _MEASURED.items()}
        start = times.get("Start Timestamp(us)")
        yield _Collective(name, group, kind, step, start, measured, links)


def _entries(file: Path) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield step, kind and name of each entry of CANN's analysis, and what it contains."""
    try:
        with file.open("rb") as opened:
            steps = msgspec.json.decode(
                opened.read(_MAX_BYTES), type=dict[str, dict[str, dict[str, Any]]]
            )
    except (OSError, *NOT_JSON) as error:
        raise TraceError(f"{file}: cannot be read: damaged or cut off") from error
    for step, kinds in steps.items():
        for kind, entries in kinds.items():
            for key, each in entries.items():
                if isinstance(each, dict):
                    yield step, kind, key, each


class _Link(NamedTuple):
    """What one operation moved from one rank of its group to another, as the files have it."""

    step: str
    kind: str
    operation: str
    group: str
    source: str
    destination: str
    transport: str
    size: Any
    time: Any


def _links(opened: OpenCapture) -> tuple[Frame, list[str]]:
    """Read the sums of each operation, or its parts if it has no sum."""
    file = opened.file(LINKS_FILE)
    rows = list(_matrix_in_analysis(opened.analysis) if file is None else _matrix_in_file(file))  # type: ignore[arg-type]
    parsed = [_OPERATION.fullmatch(row.operation) for row in rows]
    names = [found[1] if found else row.operation for found, row in zip(parsed, rows, strict=True)]
    keys = [(row.step, row.group, name) for row, name in zip(rows, names, strict=True)]
    is_sum = [found is not None and found[2] == "total" for found in parsed]
    summed = {key for key, total in zip(keys, is_sum, strict=True) if total}
    keep = [at for at, key in enumerate(keys) if is_sum[at] or key not in summed]
    rows, names = [rows[at] for at in keep], [names[at] for at in keep]
    steps = [_STEP.fullmatch(row.step) for row in rows]
    numbers = np.array([int(step[1]) if step else UNKNOWN for step in steps], np.int64)
    source, destination = (scaled([row[at] for row in rows], 1) for at in (4, 5))
    groups = {group_hash(name): ranks for name, ranks in opened.capture.groups.items()}
    own = {row.group: row.source for row in rows if row.source == row.destination}

    def ranks(numbers: Int64s) -> Int64s:
        found = np.full(len(rows), UNKNOWN)
        for at, (row, number) in enumerate(zip(rows, numbers.tolist(), strict=True)):
            members = groups.get(row.group, [])
            if own.get(row.group) == str(number):
                found[at] = opened.rank
            elif 0 <= number < len(members) and isinstance(members[number], int):
                found[at] = members[number]
        return found

    return {
        "step": opened.rl_steps(numbers),
        "kind": coded_texts([row.kind for row in rows]),
        "operation": coded_texts(names),
        "group": coded_texts([row.group for row in rows]),
        "source": source,
        "destination": destination,
        "source rank": ranks(source),
        "destination rank": ranks(destination),
        "transport": coded_texts([row.transport for row in rows]),
        "size": scaled([row.size for row in rows], 10**6),
        "transfer": scaled([row.time for row in rows], 10**6),
    }, []


def _matrix_in_file(file: Path) -> Iterator[_Link]:
    for step, kind, key, each in _entries(file):
        operation, _, group = key.rpartition("@")
        for pair, link in each.items():
            source, _, destination = pair.partition("-")
            if isinstance(link, dict):
                values = (link.get(f"Transit {word}") for word in ("Size(MB)", "Time(ms)"))
                transport = str(link.get("Transport Type", ""))
                yield _Link(step, kind, operation, group, source, destination, transport, *values)


def _matrix_in_analysis(database: SqliteTables) -> Iterator[_Link]:
    columns = "step, type, hccl_op_name, group_name, src_rank, dst_rank, transport_type"
    for row in database.rows(f"SELECT {columns}, transit_size, transit_time FROM {_MATRIX}"):
        yield _Link(*map(str, row[:7]), *row[7:])


LINKS = TableReader(
    (
        Column("device", "count"),
        Column("step", "count"),
        *columns_of("text", "kind", "operation", "group"),
        *columns_of("count", "source", "destination", "source rank", "destination rank"),
        Column("transport", "text"),
        Column("size", "count", "bytes"),
        Column("transfer", "duration", "ns"),
    ),
    lambda opened: opened.has_analysis(_MATRIX) or opened.file(LINKS_FILE) is not None,
    _links,
)
"""What each operation moved between two ranks; ``source`` and ``destination`` are numbers in its
group. Global ranks are known from the metadata, and that of the own rank from its copy to itself.
"""


def group_hash(name: str) -> str:
    """Return the number by which CANN's analysis identifies a communicator.

    Example::

        >>> group_hash("90.91.105.46%enp189s0f0_60000_0_1736410538306028")
        '17148521525495523210'
    """
    if name.isdecimal():
        return name
    high = low = 0
    for character in name:
        high = (high * 29 + ord(character)) & 0xFFFFFFFF
        low = (low * 131 + ord(character)) & 0xFFFFFFFF
    return str(high << 32 | low) if name else ""


def analyzed_collectives(opened: OpenCapture) -> tuple[list[str], list[str], Int64s, Int64s]:
    """Return name, group, start and end of each collective that CANN analyzed in text files.

    Starts are up to 14 µs late; unknown ones are `UNKNOWN`.
    """
    file, rows = opened.file(COMMUNICATION_FILE), []
    with suppress(TraceError):  # reading the table reports it
        rows = [] if file is None else list(_from_file(file))
    start = scaled([row.start for row in rows], 1_000)
    took = scaled([row.measured["duration"] for row in rows], 10**6)
    end = np.where((start == UNKNOWN) | (took == UNKNOWN), UNKNOWN, start + took)
    return [row.name for row in rows], [row.group for row in rows], start, end


def collective_groups(opened: OpenCapture, names: Sequence[str], start_ns: Int64s) -> list[str]:
    """Return the group of each collective of the text format, "" if it is unknown.

    Collectives of two groups may have one name. Then the start decides.
    """
    known: dict[str, list[tuple[int, str]]] = {}
    for name, group, start, _ in zip(*analyzed_collectives(opened), strict=True):
        known.setdefault(name, []).append((int(start), group))
    return [
        min(known.get(name, [(0, "")]), key=lambda each: abs(each[0] - start))[1]
        for name, start in zip(names, start_ns.tolist(), strict=True)
    ]


COMMUNICATION = TableReader(
    (
        Column("device", "count"),
        Column("step", "count"),
        Column("operator", "text"),
        Column("kind", "text"),
        Column("group", "text"),
        Column("start", "time", "ns"),
        *(Column(name, "duration", "ns") for name in _MEASURED),
        Column("size", "count", "bytes"),
        Column("bandwidth", "number", "GB/s"),
    ),
    lambda opened: opened.has_analysis(_TIMES) or opened.file(COMMUNICATION_FILE) is not None,
    _communication,
)
"""CANN's analysis of each collective; size and bandwidth are of all links of this rank."""
