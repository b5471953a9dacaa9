"""Lines of stack samples by stage, and in the evidence of findings."""

from pathlib import Path

import numpy as np

from lightning_rlprof.analysis.hangs import StackLine, line_in_steps, stack_lines
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import Number
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.records.stack_samples import STACK
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.testing import make_header
from tests.builders.diagnosed import found

PLACE = "Data.decode train.py:27"
SLOW = 41


def run_with_samples(folder: Path, samples: int) -> Spans:
    """Return a run of 60 steps, of which one takes five times as long, with samples in it."""
    made, at, number = TraceWriter(folder, make_header()), 1_000_000, 1
    times = 1e8 * np.exp(np.random.default_rng(1).normal(0, 0.02, 60))
    times[SLOW - 1] *= 5
    lines: list[tuple[object, ...]] = [("thread", 7, "MainThread")]

    def add(name: str, kind: str, step: int, start: int, end: int, parent: int | None) -> None:
        nonlocal number
        counters: dict[str, Number] | None = None
        lines.append(("span", name, kind, step, start, end, 7, number, parent, counters))
        number += 1

    for step, ns in enumerate(times.round().astype(int).tolist(), start=1):
        inner = at + 1_000_000
        add("step", "step", step, at, at + ns, None)
        add("actor_update", "stage", step, at, at + ns, number - 1)
        add("data_fetch", "region", step, inner, at + ns - 1_000_000, number - 1)
        if step == SLOW:
            for each in range(samples):
                add(STACK + PLACE, "mark", step, *[inner + each * 50_000_000] * 2, None)
            add(f"{STACK}main train.py:40", "mark", step, *[at + 10] * 2, None)
        at += ns
    made.write([*lines, ("end", at, "finished")])
    made.close()
    return load(folder)


def test_the_most_frequent_line_is_first() -> None:
    samples = [(1, "f train.py:1"), (12, "g train.py:2"), (13, "g train.py:2")]
    assert stack_lines(samples, [("a", 0, 5), ("b", 10, 20)]) == [
        StackLine("b", "g train.py:2", 2, 3),
        StackLine("a", "f train.py:1", 1, 3),
    ]
    assert stack_lines([], [("a", 0, 5)]) == []


def test_a_sample_belongs_to_the_innermost_span_around_it(tmp_path: Path) -> None:
    spans = run_with_samples(tmp_path, 3)
    assert line_in_steps(spans, 1, 60) == StackLine("data_fetch", PLACE, 3, 4)
    assert line_in_steps(spans, SLOW, SLOW) == StackLine("data_fetch", PLACE, 3, 4)
    assert line_in_steps(spans, SLOW + 1, 60) is None


def test_two_samples_name_no_line(tmp_path: Path) -> None:
    assert line_in_steps(run_with_samples(tmp_path, 1), 1, 60) is None


def test_the_evidence_of_an_outlier_step_names_the_line(tmp_path: Path) -> None:
    [own] = found(run_with_samples(tmp_path, 9), "outlier-step")
    assert own.by_name["step"].value == SLOW
    assert own.by_name["stacks"].value == f"90% in data_fetch: {PLACE} (9 of 10 samples)"
