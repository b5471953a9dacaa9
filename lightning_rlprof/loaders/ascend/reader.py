"""Captures of torch_npu.profiler as spans, with tables of what the host and the device did."""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture import (
    Capture,
    Frame,
    StagesOfRun,
    TableReader,
    open_captures,
    read_table,
)
from lightning_rlprof.loaders.ascend.collectives import COLLECTIVES, COMMUNICATION, LINKS
from lightning_rlprof.loaders.ascend.csv_sheets import (
    Convert,
    device,
    mebibytes,
    microseconds,
    read_sheet,
    whole,
)
from lightning_rlprof.loaders.ascend.host_calls import CALLS, SHAPES, SYNC
from lightning_rlprof.loaders.ascend.kernels import KERNELS, MEMCPY
from lightning_rlprof.loaders.ascend.mstx import STRINGS
from lightning_rlprof.loaders.chrome_events import MAX_TIME, scaled
from lightning_rlprof.loaders.host_calls import as_spans, columns_named
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import FORMAT, KINDS, Header
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, end_to_end
from lightning_rlprof.tables.spans import (
    Counter,
    RankNote,
    RunWarning,
    Spans,
    Thread,
    note_of,
    warning_of,
)
from lightning_rlprof.tables.table import Column, Table, with_name

_Cells = Mapping[Column, tuple[str, Convert | None]]
"""The heading of each column in a file, and how to convert it; None: a text."""

_DEVICE, _STEP, _COMPONENT, _WHEN = columns_named("device", "step", "component", "time")
_TOTALS = ("allocated", "reserved", "active")
_RECORD = "MEMORY_RECORD"
_STEP_TABLE = "StepTraceTime"
_STEP_PARTS = {  # These are our columns, and the headings of the file.
    "computing": "computing",
    "communication not overlapped": "communication(notoverlapped)",
    "overlapped": "overlapped",
    "communication": "communication",
    "free": "free",
    "stage": "stage",
    "bubble": "bubble",
    "communication not overlapped and exclude receive": (
        "communication(notoverlappedandexcludereceive)"
    ),
    "preparing": "preparing",
}
_MAX_RANKS = 2**20
_DEVICE_TIME = "device_ns"  # The recorder `device_time` writes this counter.
_MAX_GAP_RATIO = 100  # Longest gap between parts of one step, as a multiple of their length.


def _sheet_table(
    file: str,
    cells: _Cells,
    needed: tuple[str, ...],
    table: Callable[[Capture], bool],
    from_database: Callable[[Capture], Frame],
) -> TableReader:
    """Return the reader of a file, or of a table in the database; all versions write `needed`."""

    def read(opened: Capture) -> tuple[Frame, list[str]]:
        if (path := opened.file(file)) is None:
            return from_database(opened), []
        sheet = read_sheet(path, dict(cells.values()), needed)
        frame = {
            column.name: sheet.number(heading) if convert else sheet.text(heading)
            for column, (heading, convert) in cells.items()
        }
        if "step" in frame:
            frame["step"] = opened.rl_steps(sheet.number("step"))
        return frame, [with_name(file, text) for text in sheet.problems]

    return TableReader(
        tuple(cells),
        lambda opened: table(opened) or opened.file(file) is not None,
        read,
    )


def _memory(opened: Capture) -> Frame:
    database: Any = opened.database
    totals = {name: f"total{name.title()}" for name in _TOTALS}
    rows = database.numbers(_RECORD, "deviceId", "timestamp", "component", *totals.values())
    component = database.decode(rows["component"], STRINGS)
    # The text format has the memory of the process in the same file, a database in this table.
    process = database.numbers("NPU_MEM", "deviceId", "type", "timestampNs", "ddr", "hbm")
    types = database.strings(process["type"], STRINGS)
    app = np.isin(process["type"], [number for number, text in types.items() if text == "app"])
    devices, _, times, ddr, hbm = (column[app] for column in process.values())
    sound = (np.minimum(ddr, hbm) >= 0) & (np.maximum(ddr, hbm) < MAX_TIME)
    unknown = np.full(len(times), UNKNOWN)
    of_process = {
        **dict.fromkeys(_TOTALS, unknown),
        "reserved": np.where(sound, ddr + hbm, UNKNOWN),
    }
    return {
        "device": np.concatenate([rows["deviceId"], devices]),
        "component": end_to_end([component, (np.zeros(len(times), np.int64), ["APP"])]),
        "time": np.concatenate([rows["timestamp"], times]),
        **{name: np.concatenate([rows[totals[name]], own]) for name, own in of_process.items()},
    }


MEMORY = _sheet_table(
    "memory_record.csv",
    {
        _DEVICE: ("devicetype", device),
        _COMPONENT: ("component", None),
        _WHEN: ("timestamp(us)", microseconds),
        **{own: (f"total{own.name}(mb)", mebibytes) for own in columns_named(*_TOTALS)},
    },
    ("component", "timestamp(us)", "totalallocated(mb)", "totalreserved(mb)"),
    lambda opened: opened.has(_RECORD),
    _memory,
)
"""Memory of torch's allocator (PTA), CANN's (GE) and the process (APP) over time."""


def _steps(opened: Capture) -> Frame:
    analysis: Any = opened.analysis
    numbers = analysis.numbers(_STEP_TABLE, "deviceId", "step")
    names = {part: part.replace(" ", "_") for part in _STEP_PARTS}
    microseconds_of = analysis.reals(_STEP_TABLE, *names.values())
    return {
        "device": numbers["deviceId"],
        "step": opened.rl_steps(numbers["step"]),
        **{part: scaled(microseconds_of[name].tolist(), 1000) for part, name in names.items()},
    }


STEP_TRACE = _sheet_table(
    "step_trace_time.csv",
    {
        _DEVICE: ("deviceid", whole),
        _STEP: ("step", whole),
        **{
            Column(part, "duration", "ns"): (heading, microseconds)
            for part, heading in _STEP_PARTS.items()
        },
    },
    ("step", "computing", "free", "stage"),
    lambda opened: opened.has_analysis(_STEP_TABLE),
    _steps,
)
"""Parts of each step on the device. As in torch_npu, ``stage`` is the length of the whole step."""


_READERS: Mapping[str, TableReader] = {
    "collectives": COLLECTIVES,
    "communication": COMMUNICATION,
    "links": LINKS,
    "memcpy": MEMCPY,
    "memory": MEMORY,
    "shapes": SHAPES,
    "step_trace": STEP_TRACE,
    "sync": SYNC,
    "calls": CALLS,
}


def read_ascend(path: Path) -> Spans:
    """Read one capture or several: their MSTX ranges as spans, and their tables.

    In the domain ``rlprof`` the name of a stage is a stage and ``step`` a step. Ranges of other
    domains are regions in the step around them. A capture is read from its database, or, without
    one, from its text files. Each table is read when it is first used.

    Tables, if a capture may have them: kernels, memcpy, collectives, communication, links,
    step_trace, memory, shapes, sync and calls.

    Args:
        path: A directory ``*_ascend_pt`` or one with several, the folder of parsed files in it, a
            ``trace_view.json`` or an ``ascend_pytorch_profiler*.db``.

    Raises:
        TraceError: It is none of these, or nothing of it can be read.
    """
    captures, warnings = _read_captures(path)
    starts = (each.timeline.first_ns for each in captures)
    zero = min((start for start in starts if start != UNKNOWN), default=0)
    headers = _headers(captures)
    truncated = {each.rank for each in captures if not each.timeline.complete}
    return Spans(
        path,
        **_span_columns(captures, zero),
        headers=headers,
        statuses={rank: None if rank in truncated else "finished" for rank in headers},
        notes=tuple(_notes(captures, zero)),
        warnings=tuple(warnings),
        unix_ns=zero,
        tables=_tables(captures, zero, {**_READERS, "kernels": KERNELS}),
    )


def ascend_tables(
    ranks: Mapping[Path, int], zero_ns: int, stages: StagesOfRun
) -> dict[str, Callable[[], Table]]:
    """Return the tables of captures in a run directory; that of kernels says why there are none.

    Args:
        ranks: The rank of each capture, by its directory.
        zero_ns: Wall-clock time of zero on the run's time axis.
        stages: Returns stage and step of the run, for captures that have neither.
    """
    captures = [
        replace(each, rank=rank, stages_of_run=stages)
        for path, rank in ranks.items()
        for each in open_captures(path)[0]
    ]
    always = KERNELS._replace(available=lambda opened: True)
    return _tables(captures, zero_ns, {**_READERS, "kernels": always})


def _tables(
    captures: Sequence[Capture], zero_ns: int, readers: Mapping[str, TableReader]
) -> dict[str, Callable[[], Table]]:
    return {
        name: partial(read_table, name, reader, captures, zero_ns)
        for name, reader in readers.items()
        if any(reader.available(each) for each in captures)
    }


def _read_captures(path: Path) -> tuple[list[Capture], list[RunWarning]]:
    """Read the ranges of all captures; an unreadable one becomes a warning, if others are read."""
    opened, remarks = open_captures(path)
    warnings = [warning_of(None, text, Code.CAPTURE_DOUBTFUL) for text in remarks]
    captures: list[Capture] = []
    errors: list[TraceError] = []
    for each in opened:
        try:
            _ = each.timeline
            captures.append(each)
        except TraceError as error:
            errors.append(error)
            warnings.append(RunWarning(each.rank, str(error), Code.RANK_UNREADABLE.value))
    if not captures:
        raise errors[0]
    captures.sort(key=lambda each: (each.rank, max(each.timeline.first_ns, 0)))
    captures, copies = _without_copies(captures)
    for each in captures:
        warnings += [
            warning_of(each.rank, text, Code.CAPTURE_DOUBTFUL) for text in each.timeline.problems
        ]
    return captures, [*warnings, *copies, *_shared_ranks(captures), *_repeated_steps(captures)]


def _without_copies(
    captures: Sequence[Capture],
) -> tuple[list[Capture], list[RunWarning]]:
    """Leave out copies of captures, as their times would be added up."""
    first: dict[object, Capture] = {}
    warnings = []
    for each in captures:
        ranges, first_ns = each.timeline.ranges, each.timeline.first_ns
        times = (ranges.start_ns.tobytes(), ranges.end_ns.tobytes(), first_ns)
        same = (each.rank, str(each.metadata.get("role")), times, tuple(ranges.names))
        key = each.path if first_ns == UNKNOWN else same
        if (original := first.setdefault(key, each)) is not each:
            text = f"skipped {each.path}: a copy of {original.path}"
            warnings.append(RunWarning(each.rank, text, Code.CAPTURE_DOUBTFUL.value))
    return list(first.values()), warnings


def _shared_ranks(captures: Sequence[Capture]) -> list[RunWarning]:
    """Warn of ranks with captures of several processes."""
    processes = {(each.rank, each.process, str(each.metadata.get("role"))) for each in captures}
    counts = collections.Counter(rank for rank, *_ in processes)
    text = "captures of {} processes have this rank; rlprof shows them side by side"
    code = Code.CAPTURE_DOUBTFUL.value
    return [
        RunWarning(rank, text.format(count), code)
        for rank, count in sorted(counts.items())
        if count > 1
    ]


def _repeated_steps(captures: Sequence[Capture]) -> list[RunWarning]:
    """Warn of ranks with a step in captures far apart: two runs may be in one folder.

    Captures of several stages of a step are close together.
    """
    times: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in captures:
        steps = each.timeline.ranges.only(KINDS.index("step"))
        columns = (steps.step.tolist(), steps.start_ns.tolist(), steps.end_ns.tolist())
        for step, start, end in zip(*columns, strict=True):
            times.setdefault((each.rank, step), []).append((start, end))
    found = {}
    for (rank, step), parts in times.items():
        gap = max(start for start, _ in parts) - min(end for _, end in parts)
        if step > 0 and gap > _MAX_GAP_RATIO * sum(end - start for start, end in parts):
            text = f"step {step} is in captures far apart, and added up. Are they of one run?"
            found[rank] = RunWarning(rank, text, Code.CAPTURE_DOUBTFUL.value)
    return [*found.values()]


def _span_columns(captures: Sequence[Capture], zero_ns: int) -> dict[str, Any]:
    """Return names, threads, columns and counters for `Spans`.

    The counter of device time is the length on the device of ranges that went through a stream.
    """
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    parts: list[dict[str, Int64s]] = []
    for number, each in enumerate(captures):
        own = each.timeline.ranges
        code = [names.setdefault(text, len(names)) for text in own.names]
        idents, thread = np.unique(own.thread, return_inverse=True)
        named = (Thread(each.rank, ident, f"thread {ident}") for ident in idents.tolist())
        codes = [threads.setdefault(one, len(threads)) for one in named]
        placed = np.array([*codes, -1], np.int64)[thread]
        length = own.device_end_ns - own.device_start_ns
        parts.append(
            {
                "name": np.array([*code, -1], np.int64)[own.name],
                "kind": own.kind.astype(np.int64),
                "rank": np.full(len(own.name), each.rank),
                "step": own.step,
                "start_ns": own.start_ns,
                "end_ns": own.end_ns,
                "thread": placed,
                "device_ns": np.where(own.device_start_ns == UNKNOWN, UNKNOWN, length),
                # Threads of two processes may have one number, but their ranges do not nest.
                "lane": placed * len(captures) + number,
            }
        )
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    columns = as_spans(joined, joined.pop("lane"), zero_ns, closed=False)
    device_ns = columns.pop("device_ns")
    rows = np.flatnonzero(device_ns != UNKNOWN)
    counters = {_DEVICE_TIME: Counter(rows, device_ns[rows])} if len(rows) else {}
    return {**columns, "names": tuple(names), "threads": tuple(threads), "counters": counters}


def _headers(captures: Sequence[Capture]) -> dict[int, Header]:
    """Return a header per rank, that of its first capture."""
    groups = (ranks for each in captures for ranks in each.groups.values())
    told = (rank for group in groups for rank in group if isinstance(rank, int))
    world = max(*(rank for rank in told if rank < _MAX_RANKS), *(each.rank for each in captures), 0)
    found = {each.rank: _header(each, world + 1) for each in reversed(captures)}
    return dict(sorted(found.items()))


def _header(opened: Capture, world_size: int) -> Header:
    versions = (("torch_npu", "torch_npu_version"), ("cann", "cann_version"))
    return Header(
        FORMAT,
        run_id=str(opened.metadata.get("rlprof_run") or opened.path.name),
        rank=opened.rank,
        world_size=world_size,
        role=str(opened.metadata.get("role") or ""),
        host=opened.host,
        pid=opened.process[1],
        device=opened.chip or ("cpu" if opened.is_cpu_only else "npu"),
        unix_ns=max(opened.timeline.first_ns, 0),
        clock_ns=0,
        versions={name: str(opened.info[key]) for name, key in versions if key in opened.info},
    )


def _notes(captures: Sequence[Capture], zero_ns: int) -> Iterator[RankNote]:
    """Yield the format, level and window of each capture, and whether it has stages."""
    for each in captures:
        first_ns, name = each.timeline.first_ns, each.path.name
        when = first_ns - zero_ns if first_ns != UNKNOWN else 0
        properties = {
            "text": each.trace,
            "database": each.database,
            f"level {(level := each.option('_profiler_level'))}": level,
            f"window {(window := each.metadata.get('rlprof_window'))}": window,
        }
        text = f"{name}: {', '.join(told for told, there in properties.items() if there)}"
        yield note_of(each.rank, Code.CAPTURE_SETTINGS, text, when)
        if not len(each.timeline.ranges.marking.kind):
            text = f"{name} has no stages and no steps: MSTX was off or not used"
            yield note_of(each.rank, Code.NO_RANGES, text, when)
