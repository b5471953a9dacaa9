"""Ranges and marks of MSTX as the files of Ascend's profilers hold them, whichever format it is.

Ranges of one capture with their kinds and steps: what our own domain says, and torch_npu.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.loaders.ascend.trace_view import Flow, Kept, TraceView
from lightning_rlprof.loaders.ascend.units import LARGEST_TIME
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.loaders.stage_attribution import Launches, Stages, stages_at
from lightning_rlprof.records.records import KINDS, STAGES
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, distinct

COLLECTIVES = "communication"
"""The domain in which HCCL marks each of its operators, with a message in JSON."""

MARKS_WANTED = (Kept.MARKS, Kept.SHADOWS, Kept.STEPS, Kept.FLOWS)
"""What `trace_marks` needs of a trace."""

STEP = "ProfilerStep#"
"""How the name of a step begins that torch_npu.profiler marks by itself."""

STRINGS = "STRING_IDS"
"""The table of a database that holds its texts."""

_EVENTS, _TASKS, _CALLS = "MSTX_EVENTS", "TASK", "PYTORCH_API"
_COLUMNS = ("startNs", "endNs", "eventType", "message", "globalTid", "domainId", "connectionId")
_INSTANTS = {0: "marker", 3: "marker_ex"}
_NO_CONNECTION = 2**32 - 1
_THREAD = 2**32 - 1  # of a globalTid; the process stands above


@dataclass(frozen=True, eq=False)
class Marks:
    """Rows of one length; times are nanoseconds since 1970.

    Attributes:
        start_ns: Start.
        end_ns: End, never before the start.
        thread: The system's number of the thread.
        name: Index into ``texts``.
        domain: Index into ``texts``; -1 for steps that torch's operators show.
        texts: Names and domains.
        instant: Whether it is a mark and no range.
        shadow_start_ns: Start of what the device made of it, `UNKNOWN` where it made nothing.
        shadow_end_ns: End of that.
        lost: How many rows are left out.
    """

    start_ns: Int64s
    end_ns: Int64s
    thread: Int64s
    name: Int64s
    domain: Int64s
    texts: list[str]
    instant: npt.NDArray[np.bool_]
    shadow_start_ns: Int64s
    shadow_end_ns: Int64s
    lost: int = 0


def described(message: str) -> Mapping[str, object]:
    r"""Return what a message of HCCL says: opName, groupName, dataType, count, streamId.

    Example::

        >>> described('{\"opName\": \"hcom_allReduce\", \"count\": \"8\"}')
        {'opName': 'hcom_allReduce', 'count': '8'}
    """
    try:  # some versions escape the quotes
        return msgspec.json.decode(message.replace('\\"', '"'), type=dict[str, object])
    except NOT_JSON:
        return {}


def trace_marks(view: TraceView) -> Marks:
    """Return the marks of a trace that was read for `MARKS_WANTED`."""
    marks, steps = view.tables[Kept.MARKS], view.tables[Kept.STEPS]
    both = {name: np.concatenate([marks[name], steps[name]]) for name in steps}
    kinds = [code for code, text in enumerate(view.names) if text in _INSTANTS.values()]
    torchs = np.full(len(steps["name"]), -1)
    instant = np.isin(np.concatenate([marks["kind"], torchs]), kinds)
    shadow_start, shadow_end = _shadows(view)
    unknown = np.full(len(steps["name"]), UNKNOWN)
    return Marks(
        both["start_ns"],
        np.where(instant, both["start_ns"], both["end_ns"]),
        np.append(view.threads(), -1)[both["lane"]],
        both["name"],
        np.concatenate([marks["domain"], torchs]),
        view.names,
        instant,
        np.concatenate([shadow_start, unknown]),
        np.concatenate([shadow_end, unknown]),
    )


def _shadows(view: TraceView) -> tuple[Int64s, Int64s]:
    """Follow the arrow from each mark to the device; both ends are known by lane and time."""
    marks, shadows, flows = (view.tables[k] for k in (Kept.MARKS, Kept.SHADOWS, Kept.FLOWS))
    start, end = (np.full(len(marks["name"]), UNKNOWN) for _ in range(2))
    device = _places(shadows)
    arrows = zip(
        *(flows[name].tolist() for name in ("kind", "id", "lane", "start_ns")), strict=True
    )
    ends: dict[int, dict[int, tuple[int, int]]] = {Flow.MARK: {}, Flow.SHADOW: {}}
    for kind, number, lane, at in arrows:
        if kind in ends and number != UNKNOWN:
            ends[kind][number] = (lane, at)
    if not device:
        return start, end
    host = _places(marks)
    for number, place in ends[Flow.MARK].items():
        row, shadow = host.get(place), device.get(ends[Flow.SHADOW].get(number, (-1, 0)))
        if row is not None and shadow is not None:
            start[row], end[row] = shadows["start_ns"][shadow], shadows["end_ns"][shadow]
    return start, end


def _places(rows: Mapping[str, Int64s]) -> dict[tuple[int, int], int]:
    lanes, starts = rows["lane"].tolist(), rows["start_ns"].tolist()
    return {place: row for row, place in enumerate(zip(lanes, starts, strict=True))}


def database_marks(database: SqliteTables) -> Marks:
    """Return the marks of a database; steps that torch's operators show stand behind the others."""
    rows = database.numbers(_EVENTS, *_COLUMNS)
    steps = _steps(database)
    ids = {name: np.concatenate([rows[name], steps[name]]) for name in _COLUMNS}
    strings = database.strings(np.concatenate([ids["message"], ids["domainId"]]), STRINGS)
    codes = {number: code for code, number in enumerate(strings)}
    code = {
        name: np.array([codes.get(each, -1) for each in ids[name].tolist()], np.int64)
        for name in ("message", "domainId")
    }
    instant = np.isin(ids["eventType"], list(_INSTANTS))
    start, end = ids["startNs"], np.where(instant, ids["startNs"], ids["endNs"])
    sound = (start > 0) & (end >= start) & (end < LARGEST_TIME) & (code["message"] >= 0)
    shadow_start, shadow_end = _tasks(database, ids["connectionId"])
    return Marks(
        start[sound],
        end[sound],
        ids["globalTid"][sound] & _THREAD,
        code["message"][sound],
        code["domainId"][sound],
        list(strings.values()),
        instant[sound],
        shadow_start[sound],
        shadow_end[sound],
        int(np.count_nonzero(~sound)),
    )


def _steps(database: SqliteTables) -> dict[str, Int64s]:
    if not {"name", "type"} <= database.columns.get(_CALLS, frozenset()):
        return {name: np.empty(0, np.int64) for name in _COLUMNS}
    named = f"SELECT id FROM {STRINGS} WHERE value LIKE '{STEP}%'"
    named = named if STRINGS in database.columns else ""
    columns = ("startNs", "endNs", "name", "globalTid")
    rows = database.numbers(_CALLS, *columns, where=f"type = 50001 AND name IN ({named})")
    rows["message"] = rows.pop("name")
    count = len(rows["message"])
    return {name: rows.get(name, np.full(count, UNKNOWN)) for name in _COLUMNS}


def _tasks(database: SqliteTables, connection: Int64s) -> tuple[Int64s, Int64s]:
    """Return start and end of the task on the device that each connection leads to."""
    columns = {"connectionId", "startNs", "endNs"}
    there = columns <= database.columns.get(_TASKS, frozenset())
    if not there or "connectionId" not in database.columns.get(_EVENTS, frozenset()):
        return (nothing := np.full(len(connection), UNKNOWN)), nothing
    of_marks = f"connectionId IN (SELECT connectionId FROM {_EVENTS})"
    tasks = database.numbers(_TASKS, "connectionId", "startNs", "endNs", where=of_marks)
    sound = (tasks["connectionId"] != _NO_CONNECTION) & (tasks["connectionId"] != UNKNOWN)
    sound &= (tasks["startNs"] > 0) & (tasks["endNs"] >= tasks["startNs"])
    places = {each: row for row, each in enumerate(tasks["connectionId"].tolist()) if sound[row]}
    rows = np.array([places.get(each, -1) for each in connection.tolist()], np.int64)
    start, end = (np.append(tasks[name], UNKNOWN)[rows] for name in ("startNs", "endNs"))
    return start, end


_OWN, _PREFIX, _SERVICE = "rlprof", "rlprof::", "rlprof."
_STEP, _STAGE, _REGION, _MARK = (KINDS.index(kind) for kind in ("step", "stage", "region", "mark"))
_NOTHING = -1
_NUMBER = re.compile(rf"{STEP}(\d{{1,15}})")


@dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges and marks by start, and of two that begin at once the longer one first.

    Attributes:
        thread: The system's number of the thread.
        start_ns: Nanoseconds since 1970.
        end_ns: The same.
        name: Index into ``names``.
        names: Distinct names.
        kind: Index into `lightning_rlprof.records.records.KINDS`.
        step: RL step, 0 where it is not known.
        shadow_start_ns: Start of what the device made of it, `UNKNOWN` where it made nothing.
        shadow_end_ns: End of that.
        problems: What was lost or is doubtful.
    """

    thread: Int64s
    start_ns: Int64s
    end_ns: Int64s
    name: Int64s
    names: list[str]
    kind: Int64s
    step: Int64s
    shadow_start_ns: Int64s
    shadow_end_ns: Int64s
    problems: list[str]

    def stages(self, rows: npt.NDArray[np.bool_] | None = None) -> Stages:
        """Return stages and steps, or those of these rows, for `stages_at`; of one process, 0."""
        told = np.isin(self.kind, (_STAGE, _STEP)) if rows is None else rows
        columns = (self.thread, self.kind, self.name, self.step, self.start_ns, self.end_ns)
        nobody = np.zeros(np.count_nonzero(told), np.int64)
        return Stages(nobody, *(column[told] for column in columns))

    @property
    def own(self) -> bool:
        """Whether stages or steps are among them."""
        return bool(np.isin(self.kind, (_STAGE, _STEP)).any())


def ranges_of(marks: Marks, window: tuple[int, str]) -> Ranges:
    """Tell kinds and steps of what one capture marked.

    In our own domain a stage's name is a stage, and ``step`` a step, counted from the first one of
    the window. Where no such step is marked, ``ProfilerStep#N`` is step N, as our recorder has
    torch_npu count. Beside ours it is left out. All others are regions.

    Args:
        marks: What the files hold.
        window: First step and stage of the window, 0 and "" where that is not known.
    """
    own, names = _names(marks)
    service = {code for code, text in enumerate(names) if text.startswith(_SERVICE)}
    order = np.lexsort((-marks.end_ns, marks.start_ns))
    order = order[~(own[order] & np.isin(marks.name[order], list(service)))]
    kind = _kinds(marks, names, own, window)
    order = order[kind[order] != _NOTHING]
    used, name = np.unique(marks.name[order], return_inverse=True)
    name, texts = distinct(name, [names[code] for code in used.tolist()])
    times = (marks.start_ns[order], marks.end_ns[order])
    shadow = (marks.shadow_start_ns[order], marks.shadow_end_ns[order])
    kinds = (kind[order], np.zeros(len(order), np.int64))
    lost = f"{marks.lost} MSTX events are left out: they have no name, or their times are wrong"
    problems = [lost] if marks.lost else []
    ranges = Ranges(marks.thread[order], *times, name, list(texts), *kinds, *shadow, problems)
    return _numbered(ranges, window)


def _names(marks: Marks) -> tuple[npt.NDArray[np.bool_], list[str]]:
    """Return which rows are of our own domain, and all texts as names."""
    domains = [code for code, text in enumerate(marks.texts) if text == _OWN]
    # Before torch_npu knew domains, the recorder put ours before the name.
    prefixed = [code for code, text in enumerate(marks.texts) if text.startswith(_PREFIX)]
    collectives = [code for code, text in enumerate(marks.texts) if text == COLLECTIVES]
    messages = set(np.unique(marks.name[np.isin(marks.domain, collectives)]).tolist())
    names = [text.removeprefix(_PREFIX) for text in marks.texts]
    for code in messages:
        names[code] = str(described(marks.texts[code]).get("opName") or names[code])
    return np.isin(marks.domain, domains) | np.isin(marks.name, prefixed), names


def _kinds(
    marks: Marks, names: list[str], own: npt.NDArray[np.bool_], window: tuple[int, str]
) -> Int64s:
    """Return kinds, `_NOTHING` for a step that is there twice: ours, of MSTX, of an operator."""
    stages = [code for code, text in enumerate(names) if text in STAGES]
    steps = [code for code, text in enumerate(names) if text == "step"]
    counted = [code for code, text in enumerate(names) if _NUMBER.fullmatch(text)]
    kind = np.full(len(marks.name), _REGION)
    kind[own & np.isin(marks.name, stages)] = _STAGE
    kind[own & np.isin(marks.name, steps)] = _STEP
    is_counted = np.isin(marks.name, counted)
    of_torch = is_counted & (marks.domain == -1)
    if _STEP in kind or (window[1] and own.any()):
        kind[is_counted] = _NOTHING  # ours say it better
    elif not window[1]:  # a window of one stage holds no whole step
        kind[is_counted] = _STEP
    if (is_counted & ~of_torch).any():
        kind[of_torch] = _NOTHING
    kind[marks.instant] = _MARK
    return kind


def _numbered(ranges: Ranges, window: tuple[int, str]) -> Ranges:
    """Give steps their numbers, and all others that of the step around them."""
    first, problems = window[0], list(ranges.problems)
    rows = np.flatnonzero(ranges.kind == _STEP)
    told = [_NUMBER.fullmatch(ranges.names[code]) for code in ranges.name[rows].tolist()]
    numbers = [int(each[1]) if each else UNKNOWN for each in told]
    if UNKNOWN in numbers:
        numbers = list(range(first or 1, (first or 1) + len(rows)))
        if not first:
            problems.append("its steps are counted from 1: nothing says which steps they are")
    own = np.zeros(len(ranges.name), np.int64)
    own[rows] = numbers
    ranges = replace(ranges, step=own, problems=problems)
    lane = np.zeros(len(own), np.int64)
    stages = ranges.stages(ranges.kind == _STEP)
    around = stages_at(stages, Launches(lane, ranges.thread, ranges.start_ns)).step
    alone = first if not len(rows) else 0
    return replace(ranges, step=np.where(ranges.kind == _STEP, own, np.maximum(around, alone)))
