"""MSTX ranges and marks of an Ascend capture, and the stages and steps among them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.loaders.ascend.trace_view import STEP, FlowKind, RowKind, TraceView
from lightning_rlprof.loaders.chrome_events import MAX_TIME
from lightning_rlprof.loaders.host_calls import Launches, Stages, stages_at
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.records.records import KINDS, STAGES
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, distinct, find, matches
from lightning_rlprof.tables.table import Loss

COLLECTIVE_DOMAIN = "communication"
"""The domain in which HCCL marks each of its operators, with a message in JSON."""

MARKS_WANTED = (RowKind.MARKS, RowKind.DEVICE_RANGES, RowKind.STEPS, RowKind.FLOWS)
"""Rows of a trace that `trace_marks` needs."""

STRINGS = "STRING_IDS"
"""The table of a database with its texts."""

THREAD_BITS = 2**32 - 1
"""Bits of the thread in a ``globalTid``; the process is in the upper bits."""

_EVENTS, _TASKS, _CALLS = "MSTX_EVENTS", "TASK", "PYTORCH_API"
_COLUMNS = ("startNs", "endNs", "eventType", "message", "globalTid", "domainId", "connectionId")
_INSTANTS = {0: "marker", 3: "marker_ex"}
_NO_CONNECTION = 2**32 - 1
_DOMAIN, _PREFIX, _SERVICE = "rlprof", "rlprof::", "rlprof."
_STEP, _STAGE, _REGION, _MARK = (KINDS.index(kind) for kind in ("step", "stage", "region", "mark"))
_DUPLICATE = -1
_NUMBER = re.compile(rf"{STEP}(\d{{1,15}})")


@dataclass(frozen=True, eq=False)
class Marks:
    """Rows of one length; times are nanoseconds since 1970.

    Attributes:
        start_ns: Start.
        end_ns: End, not before the start.
        thread: Thread id of the operating system.
        name: Index into ``texts``.
        domain: Index into ``texts``; -1 for steps that are operators of torch.
        texts: Names and domains.
        instant: Whether it is a mark, without a length.
        device_start_ns: Start of the range on the device, `UNKNOWN` if it is on the host only.
        device_end_ns: End of that.
        lost: Number of skipped rows.
    """

    start_ns: Int64s
    end_ns: Int64s
    thread: Int64s
    name: Int64s
    domain: Int64s
    texts: list[str]
    instant: npt.NDArray[np.bool_]
    device_start_ns: Int64s
    device_end_ns: Int64s
    lost: int = 0

    @classmethod
    def none(cls) -> "Marks":
        """Return no marks."""
        empty = np.empty(0, np.int64)
        return cls(empty, empty, empty, empty, empty, [], np.empty(0, bool), empty, empty)


def parse_message(message: str) -> Mapping[str, object]:
    r"""Return the fields of a message of HCCL: opName, groupName, dataType, count, streamId.

    Example::

        >>> parse_message('{\"opName\": \"hcom_allReduce\", \"count\": \"8\"}')
        {'opName': 'hcom_allReduce', 'count': '8'}
    """
    try:  # Some versions escape the quotes.
        return msgspec.json.decode(message.replace('\\"', '"'), type=dict[str, object])
    except NOT_JSON:
        return {}


def trace_marks(view: TraceView) -> Marks:
    """Return the marks of a trace that was read for `MARKS_WANTED`."""
    marks, steps = view.tables[RowKind.MARKS], view.tables[RowKind.STEPS]
    both = {name: np.concatenate([marks[name], steps[name]]) for name in steps}
    kinds = [code for code, text in enumerate(view.names) if text in _INSTANTS.values()]
    of_torch = np.full(len(steps["name"]), -1)
    instant = np.isin(np.concatenate([marks["event_type"], of_torch]), kinds)
    device_start, device_end = _trace_device_times(view)
    unknown = np.full(len(steps["name"]), UNKNOWN)
    return Marks(
        both["start_ns"],
        np.where(instant, both["start_ns"], both["end_ns"]),
        np.append(view.threads(), -1)[both["lane"]],
        both["name"],
        np.concatenate([marks["domain"], of_torch]),
        view.names,
        instant,
        np.concatenate([device_start, unknown]),
        np.concatenate([device_end, unknown]),
    )


def _trace_device_times(view: TraceView) -> tuple[Int64s, Int64s]:
    """Follow the arrow from each mark to the device; lane and time identify both ends."""
    kinds = (RowKind.MARKS, RowKind.DEVICE_RANGES, RowKind.FLOWS)
    marks, ranges, flows = (view.tables[kind] for kind in kinds)
    start, end = (np.full(len(marks["name"]), UNKNOWN) for _ in range(2))
    host = {place: row for row, place in enumerate(_places(marks))}
    device = {place: row for row, place in enumerate(_places(ranges))}
    places = [*zip(flows["kind"].tolist(), flows["id"].tolist(), _places(flows), strict=True)]
    heads = {number: place for kind, number, place in places if kind == FlowKind.DEVICE_RANGE}
    for kind, number, place in places:
        if kind == FlowKind.MARK and number != UNKNOWN:
            row, at = host.get(place), device.get(heads.get(number, (-1, 0)))
            if row is not None and at is not None:
                start[row], end[row] = ranges["start_ns"][at], ranges["end_ns"][at]
    return start, end


def _places(rows: Mapping[str, Int64s]) -> list[tuple[int, int]]:
    return list(zip(rows["lane"].tolist(), rows["start_ns"].tolist(), strict=True))


def database_marks(database: SqliteTables) -> Marks:
    """Return the marks of a database, then the steps that are operators of torch."""
    rows = database.numbers(_EVENTS, *_COLUMNS)
    steps = _steps(database)
    ids = {name: np.concatenate([rows[name], steps[name]]) for name in _COLUMNS}
    code, texts = database.decode(np.concatenate([ids["message"], ids["domainId"]]), STRINGS)
    name, domain = np.split(code, 2)
    instant = np.isin(ids["eventType"], list(_INSTANTS))
    start, end = ids["startNs"], np.where(instant, ids["startNs"], ids["endNs"])
    sound = (start > 0) & (end >= start) & (end < MAX_TIME) & (name >= 0)
    device_start, device_end = _database_device_times(database, ids["connectionId"])
    return Marks(
        start[sound],
        end[sound],
        ids["globalTid"][sound] & THREAD_BITS,
        name[sound],
        domain[sound],
        list(texts),
        instant[sound],
        device_start[sound],
        device_end[sound],
        int(np.count_nonzero(~sound)),
    )


def _steps(database: SqliteTables) -> dict[str, Int64s]:
    if not {"name", "type"} <= database.columns.get(_CALLS, frozenset()):
        return {name: np.empty(0, np.int64) for name in _COLUMNS}
    named = f"SELECT id FROM {STRINGS} WHERE value LIKE '{STEP}%'"
    columns = ("startNs", "endNs", "name", "globalTid")
    rows = database.numbers(_CALLS, *columns, where=f"type = 50001 AND name IN ({named})")
    rows["message"] = rows.pop("name")
    count = len(rows["message"])
    return {name: rows.get(name, np.full(count, UNKNOWN)) for name in _COLUMNS}


def _database_device_times(database: SqliteTables, connection: Int64s) -> tuple[Int64s, Int64s]:
    """Return start and end of the task on the device that each connection leads to."""
    columns = {"connectionId", "startNs", "endNs"}
    present = columns <= database.columns.get(_TASKS, frozenset())
    if not present or "connectionId" not in database.columns.get(_EVENTS, frozenset()):
        return (unknown := np.full(len(connection), UNKNOWN)), unknown
    of_marks = f"connectionId IN (SELECT connectionId FROM {_EVENTS})"
    tasks = database.numbers(_TASKS, "connectionId", "startNs", "endNs", where=of_marks)
    sound = (tasks["connectionId"] != _NO_CONNECTION) & (tasks["connectionId"] != UNKNOWN)
    sound &= (tasks["startNs"] > 0) & (tasks["endNs"] >= tasks["startNs"])
    tasks = {name: column[sound] for name, column in tasks.items()}
    rows = find(tasks["connectionId"], connection)
    start, end = (np.append(tasks[name], UNKNOWN)[rows] for name in ("startNs", "endNs"))
    return start, end


@dataclass(frozen=True, eq=False)
class Ranges(Stages):
    """Ranges and marks by start; of two with the same start the longer one is first.

    Threads are those of the operating system, the process is 0, and times are since 1970.

    Attributes:
        names: Distinct names.
        device_start_ns: As in `Marks`.
        device_end_ns: As in `Marks`.
        problems: What was lost or is doubtful.
    """

    names: list[str]
    device_start_ns: Int64s
    device_end_ns: Int64s
    problems: list[str]


def classify_ranges(marks: Marks, window: tuple[int, str]) -> Ranges:
    """Return the marks of a capture with their kinds and steps.

    In the domain ``rlprof`` the name of a stage is a stage, and ``step`` a step, counted from the
    first step of the window. Without such steps ``ProfilerStep#N`` is step N, as rlprof makes
    torch_npu count; with them it is skipped. Everything else is a region.

    Args:
        marks: Marks of one capture.
        window: First step and stage of the window; 0 and "" if unknown.
    """
    of_rlprof, names = _names(marks)
    service = of_rlprof & matches((marks.name, names), lambda text: text.startswith(_SERVICE))
    order = np.lexsort((-marks.end_ns, marks.start_ns))
    kind = _kinds(marks, names, of_rlprof, window)
    order = order[(kind[order] != _DUPLICATE) & ~service[order]]
    used, name = np.unique(marks.name[order], return_inverse=True)
    name, texts = distinct(name, [names[code] for code in used.tolist()])
    times = (marks.start_ns[order], marks.end_ns[order])
    device = (marks.device_start_ns[order], marks.device_end_ns[order])
    none = np.zeros(len(order), np.int64)
    lost = Loss(f"skipped {marks.lost} MSTX events without a name or with impossible times")
    problems: list[str] = [lost] if marks.lost else []
    columns = (none, marks.thread[order], kind[order], name, none, *times)
    ranges = Ranges(*columns, list(texts), *device, problems)
    return _numbered(ranges, window)


def _names(marks: Marks) -> tuple[npt.NDArray[np.bool_], list[str]]:
    """Return which rows are in the domain of rlprof, and all texts as names."""
    in_domain = matches((marks.domain, marks.texts), lambda text: text == _DOMAIN)
    # For a torch_npu without domains, the recorder puts the domain before the name.
    prefixed = matches((marks.name, marks.texts), lambda text: text.startswith(_PREFIX))
    collectives = matches((marks.domain, marks.texts), lambda text: text == COLLECTIVE_DOMAIN)
    names = [text.removeprefix(_PREFIX) for text in marks.texts]
    for code in np.unique(marks.name[collectives]).tolist():
        names[code] = str(parse_message(marks.texts[code]).get("opName") or names[code])
    return in_domain | prefixed, names


def _kinds(
    marks: Marks, names: list[str], of_rlprof: npt.NDArray[np.bool_], window: tuple[int, str]
) -> Int64s:
    """Return kinds; steps of rlprof make those of torch_npu a `_DUPLICATE`, MSTX those of torch."""
    column = (marks.name, names)
    kind = np.full(len(marks.name), _REGION)
    kind[of_rlprof & matches(column, lambda text: text in STAGES)] = _STAGE
    kind[of_rlprof & matches(column, lambda text: text == "step")] = _STEP
    is_counted = matches(column, _NUMBER.fullmatch)
    of_torch = is_counted & (marks.domain == -1)
    if _STEP in kind or (window[1] and of_rlprof.any()):
        kind[is_counted] = _DUPLICATE
    elif not window[1]:  # A window over one stage contains no whole step.
        kind[is_counted] = _STEP
    if (is_counted & ~of_torch).any():
        kind[of_torch] = _DUPLICATE
    kind[marks.instant] = _MARK
    return kind


def _numbered(ranges: Ranges, window: tuple[int, str]) -> Ranges:
    """Return ranges with the number of their step, or of the step around them."""
    first, problems = window[0], list(ranges.problems)
    rows = np.flatnonzero(ranges.kind == _STEP)
    counted = [_NUMBER.fullmatch(ranges.names[code]) for code in ranges.name[rows].tolist()]
    numbers = [int(each[1]) if each else UNKNOWN for each in counted]
    if UNKNOWN in numbers:
        numbers = list(range(first or 1, (first or 1) + len(rows)))
        if not first:
            problems.append(
                "its steps are counted from 1, because the number of the first step is not recorded"
            )
    step = np.zeros(len(ranges.name), np.int64)
    step[rows] = numbers
    ranges = replace(ranges, step=step, problems=problems)
    launches = Launches(ranges.process, ranges.thread, ranges.start_ns)
    around = stages_at(ranges.only(_STEP), launches).step
    alone = first if not len(rows) else 0
    return replace(ranges, step=np.where(ranges.kind == _STEP, step, np.maximum(around, alone)))
