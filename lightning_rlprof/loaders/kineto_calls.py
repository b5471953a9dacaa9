"""What the host called, of a torch.profiler trace: operators, modules, Python, the driver."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lightning_rlprof.loaders.attribution import Launches, stages_at
from lightning_rlprof.loaders.chrome_events import MISSING
from lightning_rlprof.loaders.chrome_kinds import LAUNCH, OPERATOR, PYTHON
from lightning_rlprof.loaders.chrome_scratch import Grown
from lightning_rlprof.loaders.chrome_sort import Columns, beside, in_order
from lightning_rlprof.loaders.kernels import known
from lightning_rlprof.loaders.kineto_ranges import STAGE, STEP
from lightning_rlprof.loaders.kineto_trace import KinetoTrace
from lightning_rlprof.loaders.nesting import (
    CALL_COLUMNS,
    CALL_KINDS,
    MODULE,
    NUMBERED,
    Nesting,
    forwards,
)
from lightning_rlprof.spans import Int64s
from lightning_rlprof.table import ColumnRows, PartRows, Table

__all__ = ["call_table"]

_PYTHON, _RUNTIME, _MODULE = (CALL_KINDS.index(kind) for kind in ("python", "runtime", "module"))
# In the order of `CALL_KINDS`: of two calls that begin and end at once the outer one comes first.
_SOURCES = (PYTHON, OPERATOR, LAUNCH)
_PLACED: dict[str, type[np.generic]] = {
    **dict.fromkeys(("lane", "name", "stage"), np.int32),
    "kind": np.int8,
    **dict.fromkeys(("start_ns", "length_ns", "parent", "step"), np.int64),
}


def call_table(trace: KinetoTrace, rank: int) -> Table:
    """Return one row per call of the host, by thread and start, outer calls first.

    A module's name stands without torch's ``nn.Module: ``. Stage and step are those around the
    start of the call, of the training thread for threads that mark nothing.
    """
    placed, numbered = _placed(trace)
    rows = Grown({**_PLACED, "forward": np.int64})
    for part in beside(placed, in_order(forwards(numbered), "row"), {"forward": 0}):
        rows.add(part)
    names = list(trace.columns.names)
    texts = [name.removeprefix(MODULE) for name in names]
    read = partial(_cells, rows, rank, trace.idents, names, texts)
    note = "; ".join(trace.losses(*_SOURCES))
    return Table("calls", CALL_COLUMNS, PartRows(len(rows), read), note)


def _cells(
    rows: Grown, rank: int, idents: Int64s, names: list[str], texts: list[str], low: int, high: int
) -> ColumnRows:
    """Return some rows of the table."""
    part = rows.rows(low, high)
    cells: list[Any] = [
        np.broadcast_to(np.int64(rank), high - low),
        idents[part["lane"]],
        (part["name"], texts),
        (part["kind"], CALL_KINDS),
        part["start_ns"],
        part["length_ns"],
        np.arange(low + 1, high + 1),
        known(part["parent"], nothing=0),
        (part["stage"], names),
        known(part["step"], nothing=0),
        known(part["forward"], nothing=0),
    ]
    return ColumnRows(cells)


def _placed(trace: KinetoTrace) -> tuple[Grown, Grown]:
    """Return the calls in order, with what is around them, and those that autograd numbers."""
    rows, numbered = Grown(_PLACED), Grown(NUMBERED)
    trace.count(OPERATOR)  # before the names: they may be read with it
    nesting, stages, processes = Nesting(), trace.ranges.stages(STAGE, STEP), trace.processes
    modules = np.array([name.startswith(MODULE) for name in trace.columns.names] or [False])
    for block in in_order(_calls(trace), "thread", "start_ns", "last"):
        lane, start, end = block["lane"].astype(np.int64), block["start_ns"], -block["last"]
        block["kind"][(block["kind"] == _PYTHON) & modules[block["name"]]] = _MODULE
        found = stages_at(stages, Launches(processes[lane], lane, start))
        own = np.flatnonzero(block["sequence"] >= 0)
        told = {name: block[name][own] for name in ("sequence", "start_ns", "lane")}
        process, backward = processes[lane[own]], block["forward"][own] > 0
        numbered.add({**told, "row": own + len(rows), "process": process, "backward": backward})
        rows.add(
            {
                **{name: block[name] for name in ("lane", "name", "kind")},
                "start_ns": start - trace.zero_ns,
                "length_ns": end - start,
                "parent": nesting.parents(lane, start, end, block["kind"] == _RUNTIME),
                "stage": found.stage,
                "step": np.where(found.step > 0, found.step, trace.file_step),
            }
        )
    return rows, numbered


def _calls(trace: KinetoTrace) -> Iterator[Columns]:
    """Yield the calls of all sources."""
    for kind, source in enumerate(_SOURCES):
        for part in trace.parts(source):
            nothing = np.full(len(part["lane"]), MISSING)
            yield {
                **{name: part[name] for name in ("lane", "name", "start_ns")},
                "thread": trace.idents[part["lane"]],
                "last": -part["end_ns"],
                "kind": np.full(len(nothing), kind, np.int8),
                "sequence": part.get("sequence", nothing),
                "forward": part.get("forward", nothing),
            }
