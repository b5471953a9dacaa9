"""Device work for tests: tables of it, and what every nanosecond of it is, the slow way."""

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import Span
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.runs import Row, header, write_rank

NAMES = {"compute": "gemm", "communication": "ncclDevKernel_AllReduce", "copy": "Memcpy HtoD"}
UNSEEN = "2 CUDA graph replays: kernels inside CUDA graphs aren't visible"
COLUMNS = {"copy": "memcpy"}
_KINDS: dict[str, Any] = {
    **{"rank": "count", "device": "count", "kernel": "text", "kind": "text", "stage": "text"},
    **{"start": "duration", "duration": "duration", "launch": "duration", "graph": "count"},
    **{"operation": "text", "group": "text", "range": "text"},
}


class Work(NamedTuple):
    """A row of the table of kernels, or of copies."""

    kind: str
    start_ns: int
    end_ns: int
    stage: str | None = None
    launch_ns: int | None = None
    graph: int | None = None
    rank: int = 0
    device: int | None = 0


class Job(NamedTuple):
    """What was recorded: the spans of each rank, kernels, copies, and whose recorder it was."""

    ranks: Mapping[int, Sequence[Row]]
    kernels: Sequence[Work] = ()
    copies: Sequence[Work] | None = None
    ours: bool = False
    note: str = ""

    def work(self) -> list[Work]:
        return [*self.kernels, *(self.copies or ())]


def table(name: str, rows: Sequence[Mapping[str, object]], note: str = "") -> Table:
    """Return a table of the columns that any row has, at least those that all tools tell."""
    names = dict.fromkeys(["rank", "device", "stage", "start", "duration"])
    names |= dict.fromkeys(key for row in rows for key in row)
    columns = tuple(Column(each, _KINDS[each]) for each in names)
    return Table(name, columns, [tuple(row.get(each) for each in names) for row in rows], note)


def rows_of(work: Sequence[Work]) -> list[dict[str, object]]:
    return [
        {
            **{"rank": w.rank, "device": w.device, "kernel": NAMES[w.kind], "stage": w.stage},
            **{"start": w.start_ns, "duration": w.end_ns - w.start_ns},
            **{"launch": w.launch_ns, "graph": w.graph},
        }
        for w in work
    ]


def spans_of(job: Job) -> Spans:
    """Return the job as a loader would, by way of files that are gone again."""
    changes: dict[str, Any] = {} if job.ours else {"config": {}}
    with tempfile.TemporaryDirectory() as folder:
        for rank, rows in job.ranks.items():
            write_rank(Path(folder) / "run", header(rank, len(job.ranks), **changes), rows)
        spans = load(Path(folder) / "run")
    tables = {}
    if job.kernels:
        tables["kernels"] = lambda: table("kernels", rows_of(job.kernels), job.note)
    if job.copies is not None:
        copies = [{**row, "kernel": None} for row in rows_of(job.copies)]
        for row in copies:
            row["kind"] = "HtoD" if row.pop("kernel") is None else ""
        tables["memcpy"] = lambda: table("memcpy", copies)
    return replace(spans, tables=tables)


class Device:
    """One device of a rank, nanosecond by nanosecond."""

    def __init__(self, spans: Spans, job: Job, rank: int, device: int | None) -> None:
        self.replays = {call_of(w) for w in job.work() if w.rank == rank and w.graph is not None}
        theirs = [w for w in job.work() if w.rank == rank and w.end_ns > w.start_ns]
        self.own = [w for w in theirs if w.device == device]
        own = [span for span in spans if span.rank == rank]
        launches = [w.launch_ns for w in theirs if w.launch_ns is not None]
        self.start = min([s.start_ns for s in own] + [w.start_ns for w in theirs] + launches)
        self.end = max([s.end_ns for s in own] + [w.end_ns for w in theirs])
        hidden = job.note or not job.kernels
        self.windows = [] if hidden else windows_of(own, theirs, job.ours, self.start, self.end)
        external = not job.ours and not any(s.name == "rlprof open capture" for s in own)
        self.lost = empty_steps(own, theirs) if external else []
        self.stages = stages_of(spans, rank)

    def running(self, now: int) -> dict[str, Work]:
        """Return of each kind the one that began last."""
        found: dict[str, Work] = {}
        for work in sorted(self.own, key=begin):
            if work.start_ns <= now < work.end_ns:
                found[work.kind] = work
        return found

    def host(self, now: int) -> str | None:
        open_now = [span for span in self.stages if span.start_ns <= now < span.end_ns]
        last = max(open_now, key=lambda span: (span.start_ns, span.id), default=None)
        return None if last is None else last.name

    def seen(self, now: int) -> bool:
        for replay in self.replays:
            its = [w for w in self.own if call_of(w) == replay]
            if its and min(w.start_ns for w in its) <= now < max(w.end_ns for w in its):
                return False
        if any(start <= now < end for start, end in self.lost):
            return False
        return any(start <= now < end for start, end in self.windows)

    def states(self) -> Iterator[tuple[int, str, str | None]]:
        """Yield (time, column, stage) for every nanosecond, overlapped ones beside the others."""
        for now in range(self.start, self.end):
            there = self.running(now)
            first = next((kind for kind in NAMES if kind in there), None)
            if first is None:
                yield now, "idle" if self.seen(now) else "unknown", self.host(now)
                continue
            for kind, work in there.items():
                word = "exposed " if kind == first else "overlapped "
                column = word + COLUMNS.get(kind, kind)
                yield now, kind if kind == "compute" else column, work.stage

    def why(self, latency: int) -> Counter[tuple[int, str, str | None]]:
        """Return idle nanoseconds by (start of the gap, kind, stage of the host)."""
        idle = {now for now, column, _ in self.states() if column == "idle"}
        found = Counter[tuple[int, str, str | None]]()
        for now in idle:
            first, last = now, now + 1
            while first - 1 in idle:
                first -= 1
            while last in idle:
                last += 1
            found[first, self.kind(now, first, last, latency), self.host(now)] += 1
        return found

    def kind(self, now: int, first: int, last: int, latency: int) -> str:
        after = min([w for w in self.own if w.start_ns == last], key=begin, default=None)
        if after is None or after.launch_ns is None or after.launch_ns > last:
            return "unattributed idle"
        late = after.launch_ns > first
        if last - max(after.launch_ns, first) <= latency:
            return "host-bound idle" if late else "launch latency"
        if now < after.launch_ns:
            return "host-bound idle"
        return "collective wait" if after.kind == "communication" else "unattributed idle"


def call_of(work: Work) -> tuple[int | None, int | None]:
    """Return what two rows share if one call launched them."""
    return (None, work.graph) if work.launch_ns is None else (work.launch_ns, None)


def begin(work: Work) -> tuple[int, float]:
    return work.start_ns, math.inf if work.launch_ns is None else work.launch_ns


def devices(spans: Spans, job: Job) -> dict[tuple[int, int | None], Device]:
    there = {(w.rank, w.device) for w in job.work() if w.end_ns > w.start_ns}
    return {each: Device(spans, job, *each) for each in there}


def stages_of(spans: Spans, rank: int) -> list[Span]:
    """Return the stages of the thread with most steps, then stages, then the last of them."""
    own = [(span, thread) for span, thread in zip(spans, spans.thread.tolist(), strict=True)]
    own = [(span, thread) for span, thread in own if span.rank == rank]
    count = Counter((thread, span.kind) for span, thread in own)
    most = max(
        {thread for _, thread in own},
        key=lambda each: (count[each, "step"], count[each, "stage"], each),
        default=None,
    )
    return [span for span, thread in own if thread == most and span.kind == "stage"]


def windows_of(
    own: Sequence[Span], work: Sequence[Work], ours: bool, start: int, end: int
) -> list[tuple[int, int]]:
    """Return when somebody looked at the devices of a rank."""
    opened = sorted(span.end_ns for span in own if span.name == "rlprof open capture")
    closed = sorted(span.start_ns for span in own if span.name == "rlprof close capture")
    if opened:
        pairs = [(max((a for a in opened if a <= b), default=b), b) for b in closed]
        return [(a, b) for a, b in pairs if any(a <= w.start_ns < b for w in work)]
    if ours:
        launches = [w.launch_ns for w in work if w.launch_ns is not None]
        return [(min([*launches, *(w.start_ns for w in work)]), max(w.end_ns for w in work))]
    steps = [span for span in own if span.kind == "step"]
    found = [(start, end)]
    for at, step in enumerate(steps[1:]):
        if step.step > steps[at].step + 1:
            found[-1:] = [(found[-1][0], steps[at].end_ns), (step.start_ns, end)]
    return found


def empty_steps(own: Sequence[Span], work: Sequence[Work]) -> list[tuple[int, int]]:
    """Return the steps without work and launches, if another one has some."""

    def is_empty(step: Span) -> bool:
        return not any(
            (each.start_ns < step.end_ns and each.end_ns > step.start_ns)
            or (each.launch_ns is not None and step.start_ns <= each.launch_ns < step.end_ns)
            for each in work
        )

    steps = [span for span in own if span.kind == "step"]
    empty = [(step.start_ns, step.end_ns) for step in steps if is_empty(step)]
    return empty if len(empty) < len(steps) else []
