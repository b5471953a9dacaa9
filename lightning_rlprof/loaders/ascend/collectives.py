"""Collectives of an Ascend capture, with payload, stage and step, and CANN's analysis of them."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.ascend.capture import (
    COMMUNICATION_FILE,
    KERNEL_SHEET,
    LINKS_FILE,
    Capture,
    Cells,
    Frame,
    TableReader,
    coded_texts,
    texts_of,
)
from lightning_rlprof.loaders.ascend.kernels import (
    Calls,
    Tasks,
    by_start,
    collective_lanes,
    database_collectives,
    database_tasks,
    is_collective,
    read_tasks,
    task_frame,
    trace_tasks,
)
from lightning_rlprof.loaders.ascend.mstx import COLLECTIVE_DOMAIN, STRINGS, Marks, parse_message
from lightning_rlprof.loaders.ascend.trace_view import RowKind
from lightning_rlprof.loaders.chrome_events import scaled
from lightning_rlprof.loaders.host_calls import columns_named
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, matches
from lightning_rlprof.tables.table import Column, columns_of

_TIMES, _BANDWIDTHS, _MATRIX = "CommAnalyzerTime", "CommAnalyzerBandwidth", "CommAnalyzerMatrix"

# Of each operation the analysis lists some collectives (allreduce-top1, -middle, -bottom1) and
# their sum (allreduce-total).
_PART = re.compile(r"-(top|middle|bottom)\d*$")
_STEP = re.compile(r"step(\d{1,15})")

# The analysis keeps starts as doubles of microseconds; in a real one they are 13.4 µs late as well.
_NEAR_NS = 1_000_000
_MAX_BYTES = 1 << 28  # Bytes; a collective takes a kilobyte per step.

# Each of our columns, in milliseconds, has a key in the file and a column in the database.
_MEASURED = {
    "duration": ("Elapse Time(ms)", "elapse_time"),
    "transfer": ("Transit Time(ms)", "transit_time"),
    "wait": ("Wait Time(ms)", "wait_time"),
    "synchronization": ("Synchronization Time(ms)", "synchronization_time"),
    "idle": ("Idle Time(ms)", "idle_time"),
}
_INSIDE_SDMA = {"HCCS", "PCIE", "SIO"}  # SDMA counts the bytes of these links, too.
_OPERATORS, _MARKS = "COMMUNICATION_OP", "MSTX_EVENTS"
_BYTES = {  # Bytes of one element, by its type.
    **dict.fromkeys(("INT8", "UINT8", "HIF8", "FP8E4M3", "FP8E5M2", "FP8E8M0"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FP16", "BFP16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FP32"), 4),
    **dict.fromkeys(("INT64", "UINT64", "FP64"), 8),
    "INT128": 16,
}

# In hcom_allReduce__586_0_1, the hash of the group ends in 586, and 0 numbers its collectives.
_OPERATOR_NAME = re.compile(r"(?:hcom_|hccl)?([a-z]+)_*(?:(\d+)_(\d+)_\d+)?$", re.IGNORECASE)
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "receive": "recv",
    "batchsendrecv": "batch_send_recv",
}

# HCCL counts the elements that one rank sends (HcclAllGather's sendCount) or receives
# (HcclReduceScatter's recvCount). The other side is larger by the size of the group.
_PER_RANK = re.compile("(all_gather|reduce_scatter|all_to_all)(_.*)?")


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


def _communication(opened: Capture) -> tuple[Frame, list[str]]:
    file = opened.file(COMMUNICATION_FILE)
    rows = list(_from_analysis(opened.analysis) if file is None else _from_file(file))  # type: ignore[arg-type]
    moved = [row.moved() for row in rows]
    size, time = scaled([s for s, _ in moved], 10**6), scaled([t for _, t in moved], 10**6)
    rounded = scaled([row.start for row in rows], 1000)
    names, known, exact = [row.name for row in rows], list[str](), np.empty(0, np.int64)
    with suppress(TraceError):  # Reading the kernels reports the error.
        tasks = read_tasks(opened)
        own = matches(tasks.name, is_collective)
        known, exact = texts_of((tasks.name[0][own], tasks.name[1])), tasks.start_ns[own]
    at = np.array(_nearest(names, rounded, known, exact), np.int64)
    near = np.append(exact, UNKNOWN)[at]
    close = (at >= 0) & (rounded != UNKNOWN) & (abs(near - rounded) < _NEAR_NS)
    frame: dict[str, Cells] = {
        "operator": coded_texts(names),
        "kind": coded_texts([row.kind for row in rows]),
        "group": coded_texts([row.group for row in rows]),
        "step": _rl_steps(opened, [row.step for row in rows]),
        "start": np.where(close, near, rounded),
        "size": size,
        "bandwidth": np.where((size > 0) & (time > 0), size / np.where(time > 0, time, 1), np.nan),
    }
    for name in _MEASURED:
        frame[name] = scaled([row.measured.get(name) for row in rows], 10**6)
    return frame, []


def _rl_steps(opened: Capture, steps: Iterable[str]) -> Int64s:
    found = map(_STEP.fullmatch, steps)
    return opened.rl_steps(
        np.array([int(each[1]) if each else UNKNOWN for each in found], np.int64)
    )


def _nearest(
    names: Sequence[str], start_ns: Int64s, others: Sequence[str], their_ns: Int64s
) -> list[int]:
    """Return for each collective the other one of its name that began nearest, -1 without."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(others):
        rows.setdefault(name, []).append(row)
    times = their_ns.tolist()
    return [
        min(rows.get(name, ()), key=lambda row: abs(times[row] - start), default=-1)
        for name, start in zip(names, start_ns.tolist(), strict=True)
    ]


def _from_analysis(database: SqliteTables) -> Iterator[_Collective]:
    links: dict[tuple[str, ...], dict[str, tuple[Any, Any]]] = {}
    key = ("hccl_op_name", "group_name", "step")
    columns = ", ".join((*key, "transport_type", "transit_size", "transit_time"))
    # Every packet size has a row, which repeats the numbers of the link.
    if database.has(_BANDWIDTHS):
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
        if "@" not in key:  # A key without a group is a sum.
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


def _links(opened: Capture) -> tuple[Frame, list[str]]:
    """Read the sums of each operation, its single collectives where a step has no sum."""
    file = opened.file(LINKS_FILE)
    rows = list(_matrix_in_analysis(opened.analysis) if file is None else _matrix_in_file(file))  # type: ignore[arg-type]
    summed = {(row.step, row.group) for row in rows if row.operation.endswith("-total")}
    rows = [
        row
        for row in rows
        if (row.step, row.group) not in summed or not _PART.search(row.operation)
    ]
    source = scaled([row.source for row in rows], 1)
    destination = scaled([row.destination for row in rows], 1)
    members = {
        (group_hash(name), number): rank
        for name, ranks in opened.groups.items()
        for number, rank in enumerate(ranks)
        if isinstance(rank, int)
    }
    own = zip(rows, source.tolist(), strict=True)
    members |= {(row.group, at): opened.rank for row, at in own if row.source == row.destination}

    def ranks(numbers: Int64s) -> Int64s:
        keys = zip((row.group for row in rows), numbers.tolist(), strict=True)
        return np.array([members.get(key, UNKNOWN) for key in keys], np.int64)

    return {
        "step": _rl_steps(opened, [row.step for row in rows]),
        "kind": coded_texts([row.kind for row in rows]),
        "operation": coded_texts(
            [_PART.sub("", row.operation.removesuffix("-total")) for row in rows]
        ),
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
    columns_named(
        *("device", "step", "kind", "operation", "group", "source", "destination"),
        *("source rank", "destination rank", "transport", "size", "transfer"),
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


def collective_groups(opened: Capture, names: Sequence[str], start_ns: Int64s) -> list[str]:
    """Return the group of each collective of the text format, "" if it is unknown.

    Collectives of two groups may have one name. Then the start decides.
    """
    file, rows = opened.file(COMMUNICATION_FILE), list[_Collective]()
    with suppress(TraceError):  # Reading the table reports the error.
        rows = [] if file is None else list(_from_file(file))
    start = scaled([row.start for row in rows], 1_000)  # Starts are up to 14 µs late.
    found = _nearest(names, start_ns, [row.name for row in rows], start)
    return [rows[at].group if at >= 0 else "" for at in found]


COMMUNICATION = TableReader(
    (
        *columns_named("device", "step", "operator", "kind", "group", "start"),
        *columns_of("duration", *_MEASURED, unit="ns"),
        *columns_named("size"),
        Column("bandwidth", "number", "GB/s"),
    ),
    lambda opened: opened.has_analysis(_TIMES) or opened.file(COMMUNICATION_FILE) is not None,
    _communication,
)
"""CANN's analysis of each collective; size and bandwidth are of all links of this rank."""


@dataclass(frozen=True, eq=False)
class _Collectives:
    """Collectives by start; an unknown group or dtype is ""."""

    tasks: Tasks
    group: list[str]
    dtype: list[str]
    count: Int64s


def _read(opened: Capture) -> tuple[Frame, list[str]]:
    """Read the collectives on the device, else those that HCCL marks."""
    found = None
    if opened.database is None:
        found = _from_trace(opened) or _from_sheets(opened)
    elif opened.has(_OPERATORS):
        found = _from_database(opened.database)
    found = found or _from_marks(opened.timeline.marks)
    if found is None:
        return {"device": np.empty(0, np.int64)}, ["this capture has no collectives"]
    frame, remarks = task_frame(opened, found.tasks)
    names = [parse_operator_name(name) for name in texts_of(found.tasks.name)]
    group = [known or end for known, (_, end, _) in zip(found.group, names, strict=True)]
    sizes = {group_hash(name): len(ranks) for name, ranks in opened.groups.items()}
    size = np.array([sizes.get(each, UNKNOWN) for each in group], np.int64)
    operation = [name for name, _, _ in names]
    return {
        **frame,
        "operation": coded_texts(operation),
        "group": coded_texts(group),
        "group size": size,
        "number": np.array([number for _, _, number in names], np.int64),
        "bytes": payload(operation, found.dtype, found.count, size),
        "dtype": coded_texts(found.dtype),
    }, remarks


def _from_database(database: SqliteTables) -> _Collectives:
    rows = database_collectives(database)
    rows = by_start(rows, rows["startNs"], rows["endNs"])
    types = database.strings(rows["dataType"], "ENUM_HCCL_DATA_TYPE", "name")
    return _Collectives(
        database_tasks(database, rows),
        [group_hash(each) for each in texts_of(database.decode(rows["groupName"], STRINGS))],
        [types.get(each, "") for each in rows["dataType"].tolist()],
        rows["count"],
    )


def _from_trace(opened: Capture) -> _Collectives | None:
    """Read the lanes of the groups; only CANN's analysis has the whole identifier of a group."""
    if opened.trace is None:
        return None
    view = opened.read_trace(RowKind.COLLECTIVES, RowKind.FLOWS)
    rows = view.tables[RowKind.COLLECTIVES]
    keep = np.isin(rows["lane"], collective_lanes(view))
    rows = {name: column[keep] for name, column in rows.items()}
    rows = by_start(rows, rows["start_ns"], rows["end_ns"])
    if not len(rows["name"]):
        return None
    tasks = trace_tasks(view, rows)
    return _Collectives(
        tasks,
        collective_groups(opened, texts_of(tasks.name), tasks.start_ns),
        [view.names[code] if code >= 0 else "" for code in rows["data_type"].tolist()],
        rows["count"],
    )


def _from_sheets(opened: Capture) -> _Collectives | None:
    """Read the kernels that are collectives, which have neither types nor counts."""
    if opened.file(KERNEL_SHEET) is None:
        return None
    tasks = read_tasks(opened)
    rows = np.flatnonzero(matches(tasks.name, is_collective))
    if not len(rows):
        return None
    tasks = tasks.at(rows[np.argsort(tasks.start_ns[rows], kind="stable")])
    groups = collective_groups(opened, texts_of(tasks.name), tasks.start_ns)
    return _Collectives(tasks, groups, [""] * len(rows), np.full(len(rows), UNKNOWN))


def _from_marks(marks: Marks) -> _Collectives | None:
    """Read the marks of HCCL, the only record of collectives below level0."""
    on_device = marks.device_start_ns != UNKNOWN
    start = np.where(on_device, marks.device_start_ns, marks.start_ns)
    in_domain = matches((marks.domain, marks.texts), lambda text: text == COLLECTIVE_DOMAIN)
    keep = np.flatnonzero(in_domain)
    keep = keep[np.argsort(start[keep], kind="stable")]
    if not len(keep):
        return None
    messages = [parse_message(marks.texts[code]) for code in marks.name[keep].tolist()]
    names, groups = (
        [str(each.get(key, "")) for each in messages] for key in ("opName", "groupName")
    )
    unknown = np.full(len(keep), UNKNOWN)
    tasks = Tasks(
        start[keep],
        np.where(on_device, marks.device_end_ns, marks.end_ns)[keep],
        unknown,
        unknown,
        coded_texts(names),
        unknown,
        Calls(marks.start_ns[keep], marks.thread[keep], unknown),
        Calls.unknown(len(keep)),
        [],
    )
    types = [str(each.get("dataType", "")).upper() for each in messages]
    count = scaled([str(each.get("count")) for each in messages], 1)
    return _Collectives(tasks, list(map(group_hash, groups)), types, count)


def parse_operator_name(name: str) -> tuple[str, str, int]:
    """Return the operation in an operator's name, the end of its group's hash, and its number.

    Example::

        >>> parse_operator_name("hcom_allReduce__586_3_1")
        ('all_reduce', '586', 3)
        >>> parse_operator_name("HcclAlltoAllV")[0], parse_operator_name("hcom_receive_")[0]
        ('all_to_all_v', 'recv')
    """
    found = _OPERATOR_NAME.match(name)
    if found is None:
        return name, "", UNKNOWN
    word = found[1].lower()
    if known := next(filter(word.startswith, _OPERATIONS), None):
        word = "_".join(filter(None, (_OPERATIONS[known], word.removeprefix(known))))
    number = int(found[3]) if found[3] and len(found[3]) < 18 else UNKNOWN
    return word, found[2] or "", number


def payload(operation: Sequence[str], dtype: Sequence[str], count: Int64s, size: Int64s) -> Int64s:
    """Return the bytes of each collective: the larger of what this rank sent and received.

    `UNKNOWN` if the type, the count or a required group size is unknown, and if counts differ by
    peer.

    Args:
        operation: As `parse_operator_name` returns them; shape (collectives,), as all others.
        dtype: HCCL's name of the element type.
        count: Number of elements.
        size: Number of ranks in the group, `UNKNOWN` without.

    Example::

        >>> counts, ranks = np.array([10, 10, 10]), np.array([8, 8, UNKNOWN])
        >>> names, types = ("all_reduce", "all_gather", "reduce_scatter"), ["FP16"] * 3
        >>> payload(names, types, counts, ranks)[:2].tolist()
        [20, 160]
    """
    element = np.array([_BYTES.get(name, 0) for name in dtype], np.int64)
    per_rank = map(_PER_RANK.fullmatch, operation)
    known = np.array([1 if not found else 0 if found[2] else -1 for found in per_rank], np.int64)
    times = np.where(known < 0, np.maximum(size, 0), known)
    sound = (count >= 0) & (count < 2**40) & (element > 0) & (times > 0) & (times < 2**20)
    return np.where(sound, count * element * times, UNKNOWN)


COLLECTIVES = TableReader(
    columns_named(
        *("device", "stream", "operation", "group", "group size", "number", "bytes", "dtype"),
        *("start", "duration", "stage", "step", "launch"),
    ),
    lambda opened: (
        opened.has(_OPERATORS)
        or opened.has(_MARKS)
        or opened.trace is not None
        or opened.file(KERNEL_SHEET) is not None
    ),
    _read,
)
"""Collectives with their payload.

The group is a text that is the same on all of its ranks. ``number`` is the one in the operator's
name. Bytes are the larger of what this rank sent and received.
"""
