"""Slow and obvious: every nanosecond of small runs labelled one by one."""

from collections import Counter

from hypothesis import strategies as st

from lightning_rlprof.records.records import Span
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row

UNTRACED = "untraced"


def labels(spans: Spans) -> list[tuple[Span, int, str]]:
    """Return (step, instant, name of the innermost stage) for every nanosecond inside a step."""
    return [(step, now, stage.name if stage else UNTRACED) for step, now, stage in innermost(spans)]


def innermost(spans: Spans) -> list[tuple[Span, int, Span | None]]:
    """Return (step, instant, innermost stage) for every nanosecond inside a step."""
    every = list(spans)
    found = []
    for now in range(max((span.end_ns for span in every), default=0)):
        for rank, thread in sorted({(span.rank, span.thread) for span in every}):
            here = [
                span
                for span in every
                if (span.rank, span.thread) == (rank, thread) and span.start_ns <= now < span.end_ns
            ]
            steps = [span for span in here if span.kind == "step"]
            stages = [span for span in here if span.kind == "stage"]
            if steps:
                inner = max(stages, key=lambda span: (span.start_ns, span.id), default=None)
                step = max(steps, key=lambda span: (span.start_ns, span.id))
                found.append((step, now, inner))
    return found


def totals(spans: Spans, chosen: set[int] | None = None) -> Counter[tuple[int, str]]:
    """Sum the labels of some step numbers by rank and stage."""
    return Counter(
        (step.rank, name)
        for step, _, name in labels(spans)
        if chosen is None or step.step in chosen
    )


@st.composite
def runs(draw: st.DrawFn, overlapping_steps: bool = False) -> list[list[Row]]:
    """Draw one to three ranks with tiling steps and stages anywhere, nested or not, on threads."""
    ranks = []
    for _ in range(draw(st.integers(1, 3))):
        rows, now = [], draw(st.integers(0, 5))
        for step in range(1, draw(st.integers(0, 4)) + 1):
            length, back = draw(st.integers(0, 12)), draw(st.integers(0, 3))
            start = max(0, now - back) if overlapping_steps else now
            flags = draw(st.sampled_from([None, None, {"capture": 1}, {"interrupted": 1}]))
            rows.append(Row("step", "step", step, start, start + length, counters=flags))
            now = start + length
        for _ in range(draw(st.integers(0, 8))):
            start, length = draw(st.integers(0, 45)), draw(st.integers(0, 20))
            thread = draw(st.sampled_from([Row("", "step", 0, 0, 0).thread] * 3 + [7]))
            name = draw(st.sampled_from(["a", "b", "c"]))
            kind = draw(st.sampled_from(["stage", "stage", "stage", "region", "mark"]))
            rows.append(Row(name, kind, 1, start, start + length, thread))
        ranks.append(draw(st.permutations(rows)))
    return ranks
