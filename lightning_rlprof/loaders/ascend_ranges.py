"""Ranges of one capture with their kinds and steps: what our own domain says, and torch_npu."""

import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.ascend_marks import COLLECTIVES, STEP, Marks, described
from lightning_rlprof.loaders.attribution import Launches, Stages, stages_at
from lightning_rlprof.loaders.kernels import UNKNOWN, distinct
from lightning_rlprof.model import KINDS, STAGES
from lightning_rlprof.spans import Int64s

__all__ = ["Ranges", "ranges_of"]

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
        kind: Index into `lightning_rlprof.model.KINDS`.
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
