"""Kernels and collectives of one Ascend capture, with the stage, step and range of each."""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.loaders.ascend.mstx import Ranges
from lightning_rlprof.loaders.ascend.tasks import Calls, Tasks
from lightning_rlprof.loaders.stage_attribution import NOWHERE, Launches, Stages, stages_at
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.interval_nesting import innermost
from lightning_rlprof.tables.kernels import UNKNOWN, Kernels, distinct

_MARK = KINDS.index("mark")


class _Place(NamedTuple):
    """What each task belongs to: codes of names, -1 without, and the step, 0 without."""

    stage: Int64s
    step: Int64s
    range: Int64s

    def filled(self, rows: Mask, other: "_Place") -> "_Place":
        """Return these, and at some rows the other ones."""
        columns = zip(self, other, strict=True)
        return _Place(*(np.where(rows, theirs, own) for own, theirs in columns))


def kernels_of(
    tasks: Tasks, ranges: Ranges, rank: int, window: tuple[int, str]
) -> tuple[Kernels, list[str]]:
    """Return the tasks by start as kernels, times since 1970, and what must be known about them.

    Stage, step and range are those around the launch: on its thread, or, where that marks nothing,
    on the thread that trains. Without a launch, they are what the device made of ranges that went
    through a stream, else what the host was in while the kernel ran. Where no range tells the step,
    it is torch_npu's own count, which our recorder sets; a window of a stage has one step.
    """
    place, remarks = _places(tasks, ranges)
    step = np.where(place.step > 0, place.step, _counted(tasks, window))
    launch = _launches(tasks)
    order = np.argsort(tasks.start_ns, kind="stable")
    kernels = Kernels(
        np.full(len(order), rank, np.int64),
        tasks.device[order],
        tasks.stream[order],
        (tasks.name[0][order], tasks.name[1]),
        tasks.start_ns[order],
        tasks.end_ns[order],
        distinct(place.stage[order], ranges.names),
        step[order],
        distinct(place.range[order], ranges.names),
        launch.time_ns[order],
        None if launch.length_ns is None else launch.length_ns[order],
        np.where(launch.time_ns == UNKNOWN, UNKNOWN, launch.thread)[order],
    )
    empty = [] if len(order) else ["no kernels in it: none are recorded below level0"]
    return kernels, [*tasks.remarks, *remarks, *empty]


def _counted(tasks: Tasks, window: tuple[int, str]) -> Int64s:
    """Return the step of each task by torch_npu's own count, 0 without."""
    counted = (tasks.step >= 0) & (tasks.step < 2**60) & (not window[1])
    return np.where(counted, tasks.step, window[0] if window[1] else 0)


def _launches(tasks: Tasks) -> Calls:
    """Return the call that launched each task: torch's operator, else the call of CANN."""
    torch, cann = tasks.torch, tasks.cann
    of_cann = torch.time_ns == UNKNOWN
    length_ns = None
    if torch.length_ns is not None and cann.length_ns is not None:
        length_ns = np.where(of_cann, cann.length_ns, torch.length_ns)
    return Calls(
        np.where(of_cann, cann.time_ns, torch.time_ns),
        np.where(of_cann, cann.thread, torch.thread),
        length_ns,
    )


def _places(tasks: Tasks, ranges: Ranges) -> tuple[_Place, list[str]]:
    nothing = np.full(len(tasks.start_ns), -1)
    place = _Place(nothing, np.zeros_like(nothing), nothing)
    calls = _telling(tasks, ranges)
    lost = calls.time_ns == UNKNOWN
    if not len(ranges.start_ns):
        return place, []
    around, lent = _around(ranges, ranges.stages(), calls)
    place = place.filled(~lost, around)
    on_device = ranges.shadow_start_ns != UNKNOWN
    if on_device.any():
        shadow, _ = _around(
            *_shadows(ranges, on_device), Calls(tasks.start_ns, np.zeros_like(nothing))
        )
        shown = lost & (shadow.range >= 0)
        place, lost = place.filled(shown, shadow), lost & ~shown
    else:
        shown = np.zeros_like(lost)
    beside, _ = _around(ranges, ranges.stages(), Calls(tasks.start_ns, nothing))
    beside_rows = lost & (beside.stage >= 0)
    place = place.filled(beside_rows, beside)
    return place, _remarks(shown, beside_rows, lost & ~beside_rows, lent & ~lost)


def _telling(tasks: Tasks, ranges: Ranges) -> Calls:
    """Choose the launch that tells: of a thread that marks, then torch's own, then CANN's.

    torch_npu launches from a queue, later and on a thread of its own. Ranges that went through a
    stream stand on that thread, all others on the one that called torch.
    """
    marking = np.isin(tasks.cann.thread, ranges.stages().thread)
    torch = ~marking & (tasks.torch.time_ns != UNKNOWN)
    return Calls(
        np.where(torch, tasks.torch.time_ns, tasks.cann.time_ns),
        np.where(torch, tasks.torch.thread, tasks.cann.thread),
    )


def _around(ranges: Ranges, stages: Stages, calls: Calls) -> tuple[_Place, Mask]:
    """Return what each moment lies in, and where another thread than its own told it."""
    process = np.where(calls.time_ns == UNKNOWN, NOWHERE, 0)
    found = stages_at(stages, Launches(process, calls.thread, calls.time_ns))
    columns = (ranges.thread, ranges.start_ns, ranges.end_ns)
    inner = innermost(*columns, calls.thread, calls.time_ns)
    lent = innermost(*columns, found.thread, calls.time_ns)
    name = np.append(ranges.name, -1)[np.where(inner < 0, lent, inner)]
    return _Place(found.stage, found.step, name), found.lent


def _shadows(ranges: Ranges, rows: Mask) -> tuple[Ranges, Stages]:
    """Return what the device made of ranges as ranges of their own, all on one lane."""
    lane = np.zeros(np.count_nonzero(rows), np.int64)
    columns = (ranges.kind[rows], ranges.name[rows], ranges.step[rows])
    times = (ranges.shadow_start_ns[rows], ranges.shadow_end_ns[rows])
    shadows = Ranges(
        lane, *times, ranges.name[rows], ranges.names, columns[0], columns[2], *times, []
    )
    return shadows, Stages(lane, lane, *columns, *times)


def _remarks(shown: Mask, beside: Mask, lost: Mask, lent: Mask) -> list[str]:
    texts = [
        (
            shown,
            "kernels: their launch was not recorded; they count to the range in which the device "
            "ran them",
        ),
        (
            beside,
            "kernels: their launch was not recorded; they count to what the host was in when they "
            "ran",
        ),
        (lost, "kernels have no recorded launch: their stage may be unknown"),
        (
            lent,
            "kernels were launched by threads that mark nothing, as autograd's do: they count to "
            "what the training thread was in",
        ),
    ]
    return [f"{count} {text}" for rows, text in texts if (count := np.count_nonzero(rows))]
