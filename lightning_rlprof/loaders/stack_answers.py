"""What a rank answered to a request for stack samples, with the span that each sample was in."""

from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.loaders.live_run import new_lines
from lightning_rlprof.records.stack_samples import StackAnswer
from lightning_rlprof.tables.interval_nesting import innermost

_NEVER = 2**63 - 1


def sampled_in(answer: StackAnswer, file: Path, start: int) -> list[tuple[str, str]]:
    """Return of each sample the innermost stage or region, ``""`` outside of all, and its place.

    Args:
        answer: Of a rank.
        file: The rank's file, which has the spans that ended meanwhile.
        start: Where it ended when the request was made.

    Raises:
        OSError: The file cannot be read.
    """
    spans = [(name, began, _NEVER) for name, began in answer.spans]
    spans += [span for line in new_lines(file, start)[0] if (span := _span(line, answer.thread))]
    lanes, points = np.zeros(len(spans), dtype=np.int64), len(answer.samples)
    found = innermost(
        lanes,
        np.array([began for _, began, _ in spans], dtype=np.int64),
        np.array([end for _, _, end in spans], dtype=np.int64),
        np.zeros(points, dtype=np.int64),
        np.array([at for at, _ in answer.samples], dtype=np.int64),
    )
    places = [place for _, place in answer.samples]
    inside = [spans[row][0] if row >= 0 else "" for row in found.tolist()]
    return list(zip(inside, places, strict=True))


def _span(line: list[Any], thread: int) -> tuple[str, int, int] | None:
    match line:
        case ["span", str(name), "stage" | "region", _, int(start), int(end), int(own), *_]:
            if own == thread and 0 <= start <= end < _NEVER:
                return name, start, end
    return None
