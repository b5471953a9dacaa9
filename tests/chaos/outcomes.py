"""What became of a training that something went wrong in, and whether the promise was kept."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.run_directory import read_trace

WAITS_NS = 100_000_000
"""How long steps that have ended may wait in memory."""


class Outcome(NamedTuple):
    """One training, on all its ranks.

    Attributes:
        broken: What of the promise was not kept; empty if the training survived.
        ended: How many steps ended.
        lost: How many of these are not in the run.
        lost_ms: From the end of the last step that is in the run to the end of the last one.
        readable_s: How long it takes to read the run afterwards.
    """

    broken: str = ""
    ended: int = 0
    lost: int = 0
    lost_ms: float = 0.0
    readable_s: float = 0.0


class Ends(NamedTuple):
    """When steps ended on one rank, from step 1 on: just before it was said, and just after."""

    before_ns: Sequence[int]
    after_ns: Sequence[int]


def judge(
    run: Path, ranks: Sequence[Ends], *, most_lost_ns: int = WAITS_NS, most_torn: int = 0
) -> Outcome:
    """Read a run whose training has ended somehow, and compare it with what it has done."""
    began = time.perf_counter()
    if any(ends.after_ns for ends in ranks):
        try:
            load(run)
        except Exception as error:
            return Outcome(f"cannot be read: {error!r}", sum(len(ends[1]) for ends in ranks))
    readable_s = time.perf_counter() - began
    files = [run / f"rank-{rank:05d}.jsonl" for rank in range(len(ranks))]
    found = [
        _judge_rank(file, *each, most_lost_ns, most_torn)
        for file, each in zip(files, ranks, strict=True)
    ]
    return Outcome(
        "; ".join(filter(None, (each.broken for each in found))),
        sum(each.ended for each in found),
        max(each.lost for each in found),
        max(each.lost_ms for each in found),
        readable_s,
    )


def _judge_rank(
    path: Path,
    before_ns: Sequence[int],
    after_ns: Sequence[int],
    most_lost_ns: int,
    most_torn: int,
) -> Outcome:
    ended = len(after_ns)
    if not ended:
        return Outcome()
    trace = read_trace(path)
    steps = [span.step for span in trace.spans if span.kind == "step"]
    if trace.lost_lines > most_torn:
        return Outcome(f"{path.name}: {trace.lost_lines} torn lines", ended)
    steps = [*dict.fromkeys(steps)]
    if steps != [*range(1, len(steps) + 1)]:
        return Outcome(f"{path.name}: not all steps from the first one on: {steps}", ended)
    kept = len(steps)
    if kept >= ended:
        return Outcome(ended=ended)
    lost_ms = (after_ns[-1] - (after_ns[kept - 1] if kept else before_ns[0])) / 1e6
    # The first lost step ended before this, and the last one after that.
    apart_ns = before_ns[-1] - after_ns[kept]
    late = f"{path.name}: steps of {apart_ns / 1e6:.0f} ms are lost"
    return Outcome(late if apart_ns >= most_lost_ns else "", ended, ended - kept, lost_ms)
