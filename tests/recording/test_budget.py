"""`budget`: what of a rank's lines is written, and that each line is written or counted."""

import errno
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.recording import budget as budgets
from lightning_rlprof.recording.annotations import annotate, count, mark, stage
from lightning_rlprof.recording.budget import Budget
from lightning_rlprof.recording.span_buffer import Buffer
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.run_directory import (
    CountLine,
    EndLine,
    NoteLine,
    RankTrace,
    SampleLine,
    TraceWriter,
    read_trace,
)
from lightning_rlprof.testing import FakeClock, make_header
from tests.builders.recorded import recorded
from tests.builders.recording import read

LONG_NS = 200_000_000  # between two steps, so that each is written on its own
PARTS = ("regions", "marks and names of samples", "counters of stages and tokens of experts")


def a_step(buffer: Buffer, step: int, regions: int, captured: bool = False) -> int:
    """Add the lines of a step; return how many."""
    own = [recorded("f", "region", step, 0, 1, 7, 3, 2)] * regions
    own += [recorded("first token", "mark", step, 0, 0, 7, 4, 2, {"sample": 9})] * 2
    own.append(recorded("actor_update", "stage", step, 0, 2, 7, 2, None, {"tokens": 8}))
    own.append(recorded("step", "step", step, 0, 3, 7, 1, None, {"capture": 1} if captured else {}))
    for line in own:
        buffer.append(line)
    buffer.add(SampleLine(9, "prompt", "group", 0))
    buffer.add(CountLine(2, {"flops": 1}))
    buffer.end_step(step)
    return len(own) + 2


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines()[1:] if line]


def rungs(trace: RankTrace) -> list[str]:
    """What is left out or written again, in order."""
    found = [re.search(r": ([a-z ]+) are (not written|written again)", n.text) for n in trace.notes]
    return [f"{'-' if each[2].startswith('not') else '+'}{each[1]}" for each in found if each]


def counts(trace: RankTrace) -> dict[str, int]:
    """What the last note says was left out of the run; nothing if it says nothing."""
    names = ("regions", "marks", "counters", "bare_stages", "lines", "steps")
    last = trace.notes[-1] if trace.notes else None
    facts = last.facts if last is not None and last.code == Code.BUDGET_SUMMARY else {}
    return {name: int(facts.get(name, 0)) for name in names}


def run_of(path: Path, budget: Budget) -> tuple[Buffer, FakeClock]:
    clock = FakeClock()
    return Buffer(TraceWriter(path, make_header()), clock, budget), clock


def test_each_step_over_its_budget_leaves_out_one_part_more(tmp_path, caplog):
    buffer, clock = run_of(tmp_path, Budget(step_bytes=200))
    with caplog.at_level(logging.WARNING):
        for step in range(1, 7):
            clock.advance(LONG_NS)
            a_step(buffer, step, regions=5)
        buffer.close()
    trace = read_trace(tmp_path / "rank-00000.jsonl")
    assert rungs(trace) == [f"-{part}" for part in PARTS]
    by_step = {step: [s for s in trace.spans if s.step == step] for step in range(1, 7)}
    kinds = {step: {span.kind for span in own} for step, own in by_step.items()}
    assert kinds[1] == {"region", "mark", "stage", "step"}
    assert kinds[2] == {"mark", "stage", "step"}
    assert kinds[3] == kinds[6] == {"stage", "step"}
    stages = [span.counters for span in trace.spans if span.kind == "stage"]
    assert stages == [{"tokens": 8}] * 3 + [None] * 3
    left_out = {"regions": 25, "marks": 2 * 4 + 4, "counters": 3, "bare_stages": 3}
    assert counts(trace) == {**left_out, "lines": 0, "steps": 0}
    assert "raise budget.step_bytes=200" in trace.notes[-1].text
    assert sum("over budget" in record.message for record in caplog.records) == 1


def test_a_part_is_written_again_after_calm_steps_and_later_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(budgets, "_PATIENCE", 4)
    buffer, clock = run_of(tmp_path, Budget(step_bytes=1_500))
    heavy, changes = {1, 6, 7}, {}
    for step in range(1, 20):
        clock.advance(LONG_NS)
        a_step(buffer, step, regions=50 if step in heavy else 1)
        changes[step] = buffer._budget.rung
    buffer.close()
    # Up after 4 calm steps, down in step 6; in step 7, the regions aren't written; up after 8.
    assert [step for step in range(2, 20) if changes[step] != changes[step - 1]] == [5, 6, 14]
    trace = read_trace(tmp_path / "rank-00000.jsonl")
    assert rungs(trace) == ["-regions", "+regions", "-regions", "+regions"]
    assert counts(trace)["regions"] == 4 + 50 + 7


@pytest.mark.parametrize(("each", "rung"), [(50, 0), (51, 1), (100, 1)])
def test_steps_of_more_than_half_of_the_budget_bring_nothing_back(each: int, rung: int) -> None:
    budget = Budget(step_bytes=100)
    for step, encoded in enumerate([101, *(101 + each * at for at in range(1, 301))], 1):
        budget.steps += 1
        budget.after_step(encoded, step)
    assert budget.rung == rung


def test_regions_that_others_need_are_always_written(start, clock):
    session = start(budget={"step_bytes": 1})
    for step in (1, 2):
        session.begin_step(step)
        for name in ("validation", "rlprof open capture", "mine"):
            with annotate(name):
                clock.advance(LONG_NS)
        session.end_step()
    session.close()
    names = [s.name for s in read(session).spans if s.step == 2]
    assert names == ["validation", "rlprof open capture", "step"]


def test_without_limits_all_is_written_and_nothing_is_looked_at(tmp_path):
    buffer, clock = run_of(tmp_path, Budget())
    for step in range(1, 5):
        clock.advance(LONG_NS)
        a_step(buffer, step, regions=5_000)
    buffer.close()
    assert len(lines_of(tmp_path / "rank-00000.jsonl")) == 4 * 5_006 + 1  # and a thread


def full_run(path: Path, steps: int, regions: int = 20, captured: int = 0) -> tuple[Buffer, int]:
    """A run whose steps exceed 100 KB, and how many lines it has."""
    buffer, clock = run_of(path, Budget(total_bytes=100_000))
    lines = 0
    for step in range(1, steps + 1):
        clock.advance(LONG_NS)
        lines += a_step(buffer, step, regions, captured=step == captured)
    return buffer, lines


def test_the_first_and_the_last_steps_are_in_a_full_file_and_the_others_are_counted(tmp_path):
    buffer, lines = full_run(tmp_path, 200)
    file = tmp_path / "rank-00000.jsonl"
    before = read_trace(file)
    assert "budget.total_bytes=100,000" in before.notes[-1].text
    buffer.add(EndLine(5, "finished"))
    buffer.close()
    assert file.stat().st_size <= 100_000
    trace, known = read_trace(file), counts(read_trace(file))
    steps = [span.step for span in trace.spans if span.kind == "step"]
    gap = next(at for at, step in enumerate(steps, 1) if step != at)
    assert steps[gap - 1 :] == list(range(steps[gap - 1], 201))
    assert (len(steps), known["steps"]) == (200 - known["steps"], 200 - len(steps))
    extra = len(trace.notes) + len(trace.threads) + 1  # and how it ended
    assert len(lines_of(file)) - extra + known["lines"] == lines
    assert (trace.status, trace.lost_lines) == ("finished", 0)


def test_a_captured_step_and_a_hang_are_written_with_the_steps_before_them(tmp_path):
    buffer, _ = full_run(tmp_path, 150, captured=120)
    file = tmp_path / "rank-00000.jsonl"
    steps = [span.step for span in read_trace(file).spans if span.kind == "step"]
    assert (steps[-1], steps[-2]) == (120, 119)
    buffer.add(NoteLine(5, "warning", "no progress for 300 s"))
    buffer.flush()
    trace = read_trace(file)
    assert [span.step for span in trace.spans if span.kind == "step"][-1] == 150
    assert trace.notes[-1].text == "no progress for 300 s"
    buffer.close()
    assert file.stat().st_size <= 100_000


def test_a_second_captured_step_has_room_too(tmp_path):
    buffer, clock = run_of(tmp_path, Budget(total_bytes=100_000))
    for step in range(1, 301):
        clock.advance(LONG_NS)
        a_step(buffer, step, 20, captured=step in (150, 200, 250))
    spans = read_trace(tmp_path / "rank-00000.jsonl").spans
    assert {150, 200, 250} <= {span.step for span in spans if span.kind == "step"}
    buffer.close()


def test_what_is_in_memory_is_written_at_the_exit_of_a_process_that_does_not_close(tmp_path):
    buffer, _ = full_run(tmp_path, 150)
    buffer.flush_to_the_end()
    trace = read_trace(tmp_path / "rank-00000.jsonl")
    assert [span.step for span in trace.spans if span.kind == "step"][-1] == 150
    assert counts(trace)["steps"] > 0
    buffer.close()


def test_a_step_larger_than_the_memory_is_cut_to_its_newest_lines(tmp_path):
    buffer, lines = full_run(tmp_path, 2, regions=5_000)
    buffer.close()
    trace = read_trace(tmp_path / "rank-00000.jsonl")
    spans, size = len(trace.spans), (tmp_path / "rank-00000.jsonl").stat().st_size
    assert [trace.spans[at].step for at in (0, -1)] == [1, 2]
    assert trace.spans[-1].name == "step"
    assert 90_000 < size <= 100_000  # though the first step alone is larger
    assert spans + 2 + counts(trace)["lines"] == lines  # a sample and a count are in its end


def test_steps_that_are_all_written_at_the_end_are_counted_too(tmp_path):
    """They ended within 100 ms of each other, and exceed the total together."""
    buffer, _ = run_of(tmp_path, Budget(total_bytes=100_000))
    for step in range(201):
        for _ in range(50):
            buffer.append(recorded("f", "region", step, 0, 1, 7, 3, 2, None))
        buffer.append(recorded("step", "step", step, 0, 3, 7, 1, None, None))
        buffer.end_step(step)
    assert not buffer._budget.is_full
    buffer.add(EndLine(5, "finished"))
    buffer.close()
    trace = read_trace(tmp_path / "rank-00000.jsonl")
    steps = [span.step for span in trace.spans if span.kind == "step"]
    known = counts(trace)
    assert (steps[-1], len(steps) + known["steps"], trace.status) == (200, 201, "finished")
    extra = len(trace.notes) + len(trace.threads) + 1  # and how it ended
    assert len(lines_of(trace.path)) - extra + known["lines"] == 201 * 51


def test_many_notes_do_not_exceed_the_total(tmp_path):
    buffer, _ = full_run(tmp_path, 150)
    for number in range(5_000):
        buffer.add(NoteLine(number, "info", f"note {number}"))
        buffer.flush()
    buffer.add(EndLine(5, "finished"))
    buffer.close()
    file = tmp_path / "rank-00000.jsonl"
    assert file.stat().st_size <= 100_000
    assert read_trace(file).status == "finished"


class Disk:
    """Stands in for ``os`` in the writer; takes nothing while it is full."""

    full = False

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, data: bytes) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, data)


def test_a_disk_that_is_full_meanwhile_costs_no_line_more(tmp_path, monkeypatch):
    disk = Disk()
    monkeypatch.setattr("lightning_rlprof.records.run_directory.os", disk)
    buffer, clock = run_of(tmp_path, Budget(total_bytes=100_000))
    lines = 0
    for step in range(1, 101):
        disk.full = 20 <= step < 80  # the budget is used up meanwhile
        clock.advance(LONG_NS)
        lines += a_step(buffer, step, 20)
    assert buffer._budget.is_full
    buffer.close()
    file = tmp_path / "rank-00000.jsonl"
    trace = read_trace(file)
    written = len(lines_of(file)) - len(trace.notes) - len(trace.threads)
    assert written + counts(trace)["lines"] == lines
    assert sum("the disk took nothing for" in note.text for note in trace.notes) == 1
    assert file.stat().st_size <= 100_000


@settings(max_examples=50, deadline=None)
@given(
    step_bytes=st.sampled_from([None, 300, 1_500, 4_000]),
    total=st.sampled_from([None, 50_000, 100_000]),
    steps=st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.booleans()), max_size=60),
)
def test_each_line_is_in_the_file_or_counted(
    step_bytes: int | None, total: int | None, steps: list[tuple[int, bool, bool]]
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "_PATIENCE", 3)
        buffer, clock = run_of(Path(folder), Budget(step_bytes, total))
        lines = 0
        for step, (regions, captured, long) in enumerate(steps, 1):
            clock.advance(LONG_NS if long else 1)
            lines += a_step(buffer, step, regions, captured)
        buffer.add(EndLine(5, "finished"))
        buffer.close()
        file = Path(folder, "rank-00000.jsonl")
        trace, known = read_trace(file), counts(read_trace(file))
        whole = sum(span.kind == "stage" and span.counters is None for span in trace.spans)
        written = len(lines_of(file)) - len(trace.notes) - len(trace.threads) - 1
        assert trace.status == "finished"
        assert total is None or file.stat().st_size <= total
        left_out = ("regions", "marks", "counters", "lines")
        assert written + sum(known[name] for name in left_out) == lines
        assert whole <= known["bare_stages"] <= whole + known["lines"]
        told = len([span for span in trace.spans if span.kind == "step"]) + known["steps"]
        assert told == len(steps)


def test_a_session_takes_its_budget_from_the_configuration(start, clock):
    session = start(budget={"step_bytes": 300, "total_bytes": None})
    for step in (1, 2, 3, 4):
        session.begin_step(step)
        with stage("actor_update"):
            count(tokens=3)
            for _ in range(4):
                with annotate("forward"):
                    clock.advance(LONG_NS)
            mark("here")
        session.end_step()
    session.close()
    assert rungs(read(session))[:1] == ["-regions"]
    assert {span.step for span in read(session).spans if span.name == "forward"} == {1}
