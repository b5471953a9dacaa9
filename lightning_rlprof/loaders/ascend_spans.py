"""Ranges of several Ascend captures as the columns of `Spans`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_rlprof.loaders.ascend_opened import Recorded
from lightning_rlprof.loaders.enclosing import parents
from lightning_rlprof.loaders.kernels import UNKNOWN
from lightning_rlprof.model import FORMAT, Header
from lightning_rlprof.spans import NO_PARENT, Counter, Int64s, RankNote, Thread

__all__ = ["axis_zero", "columns_of", "headers_of", "notes_of"]

_MOST_RANKS = 2**20
_DEVICE_TIME = "device_ns"  # as `lightning_rlprof.recorders.device_time` counts it


def axis_zero(captures: Sequence[Recorded]) -> int:
    """Return when the first thing in any capture began, 0 where none tells."""
    return min((each.first_ns for each in captures if each.first_ns != UNKNOWN), default=0)


def columns_of(captures: Sequence[Recorded], zero_ns: int) -> dict[str, Any]:
    """Return names, threads, columns and counters for `Spans`.

    Device time is how long the device was in a range that went through a stream.
    """
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    parts: dict[str, list[Int64s]] = {}
    for number, each in enumerate(captures):
        for name, column in _own(each, names, threads).items():
            parts.setdefault(name, []).append(column)
        # Threads of two processes may have one number, and yet nothing of one is in the other's.
        parts.setdefault("lane", []).append(parts["thread"][-1] * len(captures) + number)
    joined = {name: np.concatenate(own) for name, own in parts.items()}
    order = np.lexsort((-joined["end_ns"], joined["start_ns"], joined["rank"]))
    columns = {name: column[order] for name, column in joined.items()}
    ids = np.arange(len(order)) - np.searchsorted(columns["rank"], columns["rank"])
    times = (columns["start_ns"], columns["end_ns"])
    outer = parents(columns.pop("lane"), *times, closed=False)
    shadow = columns.pop("shadow")
    rows = np.flatnonzero(shadow != UNKNOWN)
    columns |= {"start_ns": times[0] - zero_ns, "end_ns": times[1] - zero_ns, "id": ids}
    return {
        **columns,
        "names": tuple(names),
        "threads": tuple(threads),
        "parent": np.append(ids, NO_PARENT)[outer],
        "counters": {_DEVICE_TIME: Counter(rows, shadow[rows])} if len(rows) else {},
    }


def _own(
    recorded: Recorded, names: dict[str, int], threads: dict[Thread, int]
) -> dict[str, Int64s]:
    """Return one capture's columns, its names and threads as codes of all captures."""
    ranges, rank = recorded.ranges, recorded.opened.rank
    code = [names.setdefault(text, len(names)) for text in ranges.names]
    idents, thread = np.unique(ranges.thread, return_inverse=True)
    lanes = [
        threads.setdefault(Thread(rank, ident, f"thread {ident}"), len(threads))
        for ident in idents.tolist()
    ]
    length = ranges.shadow_end_ns - ranges.shadow_start_ns
    return {
        "name": np.array([*code, -1], np.int64)[ranges.name],
        "kind": ranges.kind,
        "rank": np.full(len(ranges.name), rank),
        "step": ranges.step,
        "start_ns": ranges.start_ns,
        "end_ns": ranges.end_ns,
        "thread": np.array([*lanes, -1], np.int64)[thread],
        "shadow": np.where(ranges.shadow_start_ns == UNKNOWN, UNKNOWN, length),
    }


def headers_of(captures: Sequence[Recorded]) -> dict[int, Header]:
    """Return a header per rank; of several captures of one rank the first stands for it."""
    found: dict[int, Header] = {}
    world = max(_world(each) for each in captures)
    for each in captures:
        if each.opened.rank not in found:
            found[each.opened.rank] = _header(each, world)
    return dict(sorted(found.items()))


def _world(recorded: Recorded) -> int:
    """Return how many ranks there are, as the groups of processes tell, else up to this one."""
    groups, found = recorded.opened.capture.metadata.get("parallel_group_info"), {0}
    for group in groups.values() if isinstance(groups, dict) else ():
        ranks = group.get("global_ranks") if isinstance(group, dict) else None
        ranks = ranks if isinstance(ranks, list) else []
        found.update(rank for rank in ranks if isinstance(rank, int) and rank < _MOST_RANKS)
    return max(*found, recorded.opened.rank) + 1


def _header(recorded: Recorded, world: int) -> Header:
    opened, capture = recorded.opened, recorded.opened.capture
    activities = capture.option("activities", "common_config")
    only_cpu = isinstance(activities, list) and not any("NPU" in str(each) for each in activities)
    info: Mapping[str, Any] = capture.info
    return Header(
        FORMAT,
        run_id=str(capture.metadata.get("rlprof_run") or capture.path.name),
        rank=opened.rank,
        world_size=world,
        role=str(capture.metadata.get("role") or ""),
        host=opened.host,
        pid=capture.pid,
        device=opened.chip or ("cpu" if only_cpu else "npu"),
        unix_ns=max(recorded.first_ns, 0),
        clock_ns=0,
        versions={
            name: str(info[key])
            for name, key in (("torch_npu", "torch_npu_version"), ("cann", "cann_version"))
            if key in info
        },
    )


def notes_of(captures: Sequence[Recorded], zero_ns: int) -> Iterator[RankNote]:
    """Say what each capture is, and what it does not hold."""
    for each in captures:
        opened, capture = each.opened, each.opened.capture
        forms = (("text", capture.trace), ("database", opened.database))
        said = [name for name, there in forms if there is not None]
        level = capture.option("_profiler_level")
        said += [f"level {level}"] if level else []
        said += [f"window {w}"] if (w := capture.metadata.get("rlprof_window")) else []
        when = each.first_ns - zero_ns if each.first_ns != UNKNOWN else 0
        yield RankNote(opened.rank, when, "info", f"{capture.path.name}: {', '.join(said)}")
        if not each.ranges.own:
            text = f"{capture.path.name} marks no stages and no steps: MSTX was off, or not used"
            yield RankNote(opened.rank, when, "warning", text)
