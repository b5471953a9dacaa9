"""Read torch.profiler traces (CUDA, ROCm, XPU, CPU) as spans and tables."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.chrome.event_stream import read_head
from lightning_rlprof.loaders.kineto.event_kinds import (
    COLLECTIVE,
    COPY,
    COUNTER,
    KERNEL,
    LAUNCH,
    MEMORY,
    OPERATOR,
    PYTHON,
)
from lightning_rlprof.loaders.kineto.tables import (
    call_table,
    collective_table,
    copy_table,
    counter_table,
    kernel_rows,
    kernels_of,
    kernels_table,
    memory_table,
    shape_table,
)
from lightning_rlprof.loaders.kineto.trace import STAGE, STEP, KinetoTrace, ident, read_trace, told
from lightning_rlprof.loaders.rank_names import labels_of_verl
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import EXPORT, FORMAT, Header
from lightning_rlprof.tables.intervals import parents
from lightning_rlprof.tables.kernels import Kernels
from lightning_rlprof.tables.spans import NO_PARENT, Spans, Thread, warning_of
from lightning_rlprof.tables.table import Table

MOST_RANKS = 2**20  # more than any job has: a number from here on is damage
_RANK = re.compile(r"rank[-_]?(\d{1,7})(?:-of-(\d{1,7}))?")
_ROLE = re.compile(r"_([^_]+)_rank\d+-of-\d")


class Distributed(msgspec.Struct):
    """What torch writes of the job before the events."""

    rank: int = -1
    world_size: int = 0


class _Device(msgspec.Struct):
    name: str = ""


def is_chrome_trace(path: Path) -> bool:
    """Tell by its content whether a file is a Chrome trace, compressed or not.

    One compressed by zstd counts by its name where the package that reads it is missing, so that
    reading it says which.
    """
    if not path.is_file():
        return False
    try:
        return read_head(path).events
    except TraceError:
        return path.name.endswith(".json.zst")


def is_export(path: Path) -> bool:
    """Return whether rlprof exported this file; it does not count as a trace of a folder."""
    if not path.is_file():
        return False
    try:
        top = read_head(path).top
    except TraceError:
        return False
    return told(top, "otherData", dict[str, Any], {}).items() >= EXPORT.items()


def read_kineto(path: Path, *, every: bool = False) -> Spans:
    """Read a trace: its annotations are the spans, all else are tables.

    Kernels are the table ``kernels``, and beside it are those of ``memcpy``, ``collectives``,
    ``calls``, ``memory``, ``counters`` and ``shapes`` that the trace has anything for. The first of
    these that is asked for reads the file again.

    A stage is an annotation with a stage's name, ``ProfilerStep#N`` is step N; all others are
    regions. Operators and Python functions are not spans. Where no ``ProfilerStep`` is around, the
    step is the one in the file's name, as `TorchProfilerRecorder` writes it.

    Args:
        path: A plain file, .gz or .zst; one that is cut off is read up to the cut.
        every: All tables will be asked for: read what they need at once.

    Raises:
        TraceError: It cannot be read or is not a Chrome trace.
    """
    trace = read_trace(path, every=every)
    header = _header(trace)
    rank = header.rank
    problems = [(text, Code.TRACE_DOUBTFUL) for text in trace.problems]
    if not trace.unix_ns:
        text = "recording time unknown: no base time in the trace"
        problems.append((text, Code.TIME_UNKNOWN))
    elif "baseTimeNanoseconds" not in trace.top:
        text = "no base time in the trace; its times count from 1970, as before torch 2.3"
        problems.append((text, Code.TRACE_DOUBTFUL))
    return Spans(
        path,
        **_columns(trace, rank),
        headers={rank: header},
        statuses={rank: "finished" if trace.complete else None},
        warnings=tuple(warning_of(rank, text, code) for text, code in problems),
        unix_ns=trace.unix_ns,
        tables={name: partial(read, trace, rank) for name, read in _readers(trace)},
    )


def read_kernels(path: Path) -> tuple[Kernels, int, list[str]]:
    """Read the kernels alone, for a run that has spans of its own.

    Where the trace marks neither stages nor steps, no step is told: the run knows better.

    Returns:
        Kernels, the wall-clock time of zero on their axis (0 where it is not known), and what was
        lost or is doubtful.

    Raises:
        TraceError: It cannot be read or is not a Chrome trace.
    """
    trace = read_trace(path)
    rows, remarks = kernel_rows(trace)
    kernels = kernels_of(trace, _header(trace).rank, rows, 0, len(rows))
    if not np.isin(trace.ranges.kind, (STAGE, STEP)).any():
        kernels = dataclasses.replace(kernels, step=np.zeros_like(kernels.step))
    return kernels, trace.unix_ns, [*trace.problems, *remarks]


def _columns(trace: KinetoTrace, rank: int) -> dict[str, Any]:
    ranges, zero, texts = trace.ranges, trace.zero_ns, list(trace.columns.names)
    names, name = np.unique(ranges.name, return_inverse=True)
    lanes, thread = np.unique(ranges.thread, return_inverse=True)
    ids = np.arange(1, len(name) + 1)
    return {
        "names": tuple(texts[code] for code in names.tolist()),
        "threads": tuple(_threads(trace, lanes.tolist(), rank)),
        "name": name,
        "kind": ranges.kind.astype(np.int64),
        "rank": np.broadcast_to(np.int64(rank), len(name)),
        "step": np.where(ranges.step > 0, ranges.step, trace.file_step),
        "start_ns": ranges.start_ns - zero,
        "end_ns": ranges.end_ns - zero,
        "thread": thread,
        "id": ids,
        "parent": np.append(ids, NO_PARENT)[parents(ranges.thread, ranges.start_ns, ranges.end_ns)],
    }


def _readers(trace: KinetoTrace) -> Iterator[tuple[str, Callable[[KinetoTrace, int], Table]]]:
    """Yield the tables that the trace has anything for; kernels always, to say what lacks."""
    yield "kernels", kernels_table
    for name, read, kinds in (
        ("memcpy", copy_table, (COPY,)),
        ("collectives", collective_table, (COLLECTIVE,)),
        ("memory", memory_table, (MEMORY,)),
        ("counters", counter_table, (COUNTER,)),
        ("shapes", shape_table, (OPERATOR,)),
        # The largest table comes last: who writes one after the other needs the trace no more then.
        ("calls", call_table, (OPERATOR, PYTHON, LAUNCH)),
    ):
        if any(trace.columns.counts[kind] for kind in kinds):
            yield name, read


def _header(trace: KinetoTrace) -> Header:
    """Put together who recorded: the trace says some of it, the file's name some more."""
    top = trace.top
    job = told(top, "distributedInfo", Distributed, Distributed())
    rank, world = _place(job, trace.path.name)
    role = _ROLE.search(trace.path.name)
    devices = [device.name for device in told(top, "deviceProperties", list[_Device], [])]
    counts = trace.columns.counts
    # A trace ends with the names of its devices.
    no_device = trace.complete and not (counts[KERNEL] or counts[COPY])
    lanes = list(trace.columns.lanes)
    pids = (lanes[lane][0] for lane in trace.ranges.thread[:1].tolist())
    return Header(
        format=FORMAT,
        run_id=told(top, "trace_id", str, "") or trace.path.name,
        rank=rank,
        world_size=world,
        role=labels_of_verl(trace.path.name)[0] or (role[1] if role else ""),
        host=told(top, "host_name", str, ""),
        pid=next((pid for pid in pids if isinstance(pid, int)), 0),
        device=next(filter(None, devices), "cpu" if no_device else "unknown"),
        unix_ns=trace.unix_ns,
        clock_ns=0,
        versions={
            key: bytes(value)[:40].decode(errors="replace").strip('"')
            for key, value in top.items()
            if key.endswith("_version")
        },
    )


def _place(job: Distributed, name: str) -> tuple[int, int]:
    """Return rank and world size, the first of those told that can be true."""
    file = _RANK.search(name)
    ranks = [job.rank, int(file[1]) if file else 0]
    rank = next((each for each in ranks if 0 <= each < MOST_RANKS), 0)
    worlds = [job.world_size, int(file[2] or 0) if file else 0]
    return rank, next((each for each in worlds if rank < each <= MOST_RANKS), rank + 1)


def _threads(trace: KinetoTrace, lanes: list[int], rank: int) -> list[Thread]:
    keys = list(trace.columns.lanes)
    several = len({keys[lane][0] for lane in lanes}) > 1
    found = []
    for lane in lanes:
        pid, tid = keys[lane]
        name = trace.columns.thread_names.get((pid, tid), f"thread {tid}")
        found.append(
            Thread(rank, ident(tid, lane), f"{name} of process {pid}" if several else name)
        )
    return found
