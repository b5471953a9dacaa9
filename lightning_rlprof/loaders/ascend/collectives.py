"""Collectives of an Ascend capture with their payload, stage and step."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.loaders.ascend.capture import (
    COMMUNICATION_FILE,
    KERNEL_SHEET,
    Frame,
    OpenCapture,
    TableReader,
    coded_texts,
    texts_of,
)
from lightning_rlprof.loaders.ascend.communication import (
    analyzed_collectives,
    collective_groups,
    group_hash,
)
from lightning_rlprof.loaders.ascend.kernels import columns_named, task_frame
from lightning_rlprof.loaders.ascend.mstx import COLLECTIVE_DOMAIN, STRINGS, Marks, parse_message
from lightning_rlprof.loaders.ascend.tasks import (
    Calls,
    Tasks,
    by_start,
    collective_lanes,
    database_collectives,
    database_tasks,
    is_collective,
    read_tasks,
    trace_tasks,
)
from lightning_rlprof.loaders.ascend.trace_view import RowKind
from lightning_rlprof.loaders.ascend.units import plausible, scaled
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, matches
from lightning_rlprof.tables.table import Column

_OPERATORS, _MARKS = "COMMUNICATION_OP", "MSTX_EVENTS"
_BYTES = {  # of one element, by its type
    **dict.fromkeys(("INT8", "UINT8", "HIF8", "FP8E4M3", "FP8E5M2", "FP8E8M0"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FP16", "BFP16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FP32"), 4),
    **dict.fromkeys(("INT64", "UINT64", "FP64"), 8),
    "INT128": 16,
}
# hcom_allReduce__586_0_1: of the group whose hash ends in 586, its collective 0.
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


@dataclass(frozen=True, eq=False)
class _Collectives:
    """Collectives by start; an unknown group or dtype is ""."""

    tasks: Tasks
    group: list[str]
    dtype: list[str]
    count: Int64s


def _read(opened: OpenCapture) -> tuple[Frame, list[str]]:
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
    sizes = {group_hash(name): len(ranks) for name, ranks in opened.capture.groups.items()}
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


def _from_trace(opened: OpenCapture) -> _Collectives | None:
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


def _from_sheets(opened: OpenCapture) -> _Collectives | None:
    """Read the kernels that are collectives, else CANN's analysis; neither has types and counts."""
    if opened.file(KERNEL_SHEET) is not None:
        tasks = read_tasks(opened)
        rows = np.flatnonzero(matches(tasks.name, is_collective))
        tasks = tasks.at(rows[np.argsort(tasks.start_ns[rows], kind="stable")])
    else:
        tasks = _analyzed_tasks(opened)
    count = len(tasks.start_ns)
    if not count:
        return None
    groups = collective_groups(opened, texts_of(tasks.name), tasks.start_ns)
    return _Collectives(tasks, groups, [""] * count, np.full(count, UNKNOWN))


def _analyzed_tasks(opened: OpenCapture) -> Tasks:
    names, _, start, end = analyzed_collectives(opened)
    rows = np.flatnonzero(plausible(start, end))
    rows = rows[np.argsort(start[rows], kind="stable")]
    unknown, none = np.full(len(rows), UNKNOWN), Calls.unknown(len(rows))
    code, texts = coded_texts(names)
    columns = (unknown, unknown, (code[rows], texts), unknown, none, none)
    return Tasks(start[rows], end[rows], *columns, ["starts are up to 14 µs late"])


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
    for spelling, operation in _OPERATIONS.items():
        if word.startswith(spelling):
            word = "_".join(filter(None, (operation, word[len(spelling) :])))
            break
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
    times = np.ones_like(element)
    for row, found in enumerate(map(_PER_RANK.fullmatch, operation)):
        if found:
            times[row] = 0 if found[2] else max(int(size[row]), 0)
    sound = (count >= 0) & (count < 2**40) & (element > 0) & (times > 0) & (times < 2**20)
    return np.where(sound, count * element * times, UNKNOWN)


COLLECTIVES = TableReader(
    (
        *columns_named("device", "stream"),
        Column("operation", "text"),
        Column("group", "text"),
        Column("group size", "count"),
        Column("number", "count"),
        Column("bytes", "count", "bytes"),
        Column("dtype", "text"),
        *columns_named("start", "duration", "stage", "step", "launch"),
    ),
    lambda opened: (
        opened.has(_OPERATORS)
        or opened.has(_MARKS)
        or opened.trace is not None
        or any(opened.file(name) is not None for name in (KERNEL_SHEET, COMMUNICATION_FILE))
    ),
    _read,
)
"""Collectives with their payload.

The group is a text that is the same on all of its ranks. ``number`` is the one in the operator's
name. Bytes are the larger of what this rank sent and received.
"""
