"""A file with a limit: each line of a rank is written, or left out and counted."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.recording.annotations import annotate
from lightning_rlprof.recording.span_buffer import Buffer
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import Note
from lightning_rlprof.records.run_directory import (
    CountLine,
    EndLine,
    RankTrace,
    SampleLine,
    TraceWriter,
    read_trace,
)
from lightning_rlprof.testing import FakeClock, make_header
from tests.builders.recorded import recorded
from tests.builders.recording import read

LONG_NS = 200_000_000  # between two steps, so that each is written on its own


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


def counts(trace: RankTrace) -> dict[str, int]:
    """What the last note says was not kept of the run; nothing if it says nothing."""
    last = trace.notes[-1] if trace.notes else None
    facts = last.facts if last is not None and last.code == Code.BUDGET_SUMMARY else {}
    return {name: int(facts.get(name, 0)) for name in ("lines", "steps")}


def run_of(path: Path, limit: int | None) -> tuple[Buffer, FakeClock]:
    clock = FakeClock()
    return Buffer(TraceWriter(path, make_header()), clock, limit), clock


def test_without_limits_all_is_written_and_nothing_is_looked_at(tmp_path):
    buffer, clock = run_of(tmp_path, None)
    for step in range(1, 5):
        clock.advance(LONG_NS)
        a_step(buffer, step, regions=5_000)
    buffer.close()
    assert len(lines_of(tmp_path / "rank-00000.jsonl")) == 4 * 5_006 + 1  # and a thread


def full_run(path: Path, steps: int) -> tuple[Buffer, int]:
    """A run whose steps exceed 100 KB, and how many lines it has."""
    buffer, clock = run_of(path, 100_000)
    lines = 0
    for step in range(1, steps + 1):
        clock.advance(LONG_NS)
        lines += a_step(buffer, step, 20)
    return buffer, lines


def test_steps_beyond_the_limit_are_left_out_and_counted_and_notes_are_written(tmp_path):
    buffer, lines = full_run(tmp_path, 200)
    file = tmp_path / "rank-00000.jsonl"
    (note,) = read_trace(file).notes
    assert (note.code, "max_file_bytes=100,000" in note.text) == (Code.OVER_BUDGET, True)
    buffer.add(Note(5, "warning", "no progress for 300 s"))
    buffer.add(EndLine(5, "finished"))
    buffer.close()
    assert file.stat().st_size <= 100_000
    trace, known = read_trace(file), counts(read_trace(file))
    steps = [span.step for span in trace.spans if span.kind == "step"]
    assert steps == list(range(1, note.facts["step"]))
    assert len(steps) + known["steps"] == 200
    assert [each.text for each in trace.notes][1] == "no progress for 300 s"
    extra = len(trace.notes) + len(trace.threads) + 1  # and how it ended
    assert len(lines_of(file)) - extra + known["lines"] == lines
    assert (trace.status, trace.lost_lines) == ("finished", 0)


def test_the_first_step_that_is_left_out_is_named_also_of_many_that_share_one_write(tmp_path):
    buffer, clock = run_of(tmp_path, 100_000)
    for step in range(1, 401):
        clock.advance(LONG_NS // 20)
        for each in [recorded("f", "region", step, 0, 1, 7, 3, 2)] * 10:
            buffer.append(each)
        buffer.append(recorded("step", "step", step, 0, 3, 7, 1, None, {}))
        buffer.end_step(step)
    buffer.close()
    trace = read_trace(tmp_path / "rank-00000.jsonl")
    last = max(span.step for span in trace.spans if span.kind == "step")
    told = [note.facts["step"] for note in trace.notes if note.code == Code.OVER_BUDGET]
    assert told == [last + 1]


def test_threads_of_what_is_left_out_take_no_room(tmp_path):
    buffer, _ = full_run(tmp_path, 200)
    size = (tmp_path / "rank-00000.jsonl").stat().st_size
    for thread in range(1_000, 3_000):
        buffer.append(recorded("f", "region", 201, 0, 1, thread, 3, 2))
        buffer.flush()
    assert (tmp_path / "rank-00000.jsonl").stat().st_size == size
    buffer.close()


def test_a_process_that_does_not_close_says_how_much_was_left_out(tmp_path):
    buffer, _ = full_run(tmp_path, 150)
    buffer.flush_to_the_end()
    assert counts(read_trace(tmp_path / "rank-00000.jsonl"))["steps"] > 0
    buffer.close()


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
    buffer, clock = run_of(tmp_path, 100_000)
    lines = 0
    for step in range(1, 101):
        disk.full = 20 <= step < 80  # the budget is used up meanwhile
        clock.advance(LONG_NS)
        lines += a_step(buffer, step, 20)
    buffer.close()
    file = tmp_path / "rank-00000.jsonl"
    trace = read_trace(file)
    written = len(lines_of(file)) - len(trace.notes) - len(trace.threads)
    assert written + counts(trace)["lines"] == lines
    assert sum("the disk took nothing for" in note.text for note in trace.notes) == 1
    assert file.stat().st_size <= 100_000


@settings(max_examples=50, deadline=None)
@given(
    total=st.sampled_from([None, 50_000, 100_000]),
    steps=st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.booleans()), max_size=60),
)
def test_each_line_is_in_the_file_or_counted(
    total: int | None, steps: list[tuple[int, bool, bool]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        buffer, clock = run_of(Path(folder), total)
        lines = 0
        for step, (regions, captured, long) in enumerate(steps, 1):
            clock.advance(LONG_NS if long else 1)
            lines += a_step(buffer, step, regions, captured)
        buffer.add(EndLine(5, "finished"))
        buffer.close()
        file = Path(folder, "rank-00000.jsonl")
        trace, known = read_trace(file), counts(read_trace(file))
        written = len(lines_of(file)) - len(trace.notes) - len(trace.threads) - 1
        assert trace.status == "finished"
        assert written + known["lines"] == lines
        told = len([span for span in trace.spans if span.kind == "step"]) + known["steps"]
        assert told == len(steps)


def test_a_session_takes_its_limit_from_the_configuration(start, clock):
    session = start(max_file_bytes=1_000_000)
    for step in range(1, 40):
        session.begin_step(step)
        for _ in range(500):
            with annotate("forward"):
                pass
        clock.advance(LONG_NS)
        session.end_step()
    session.close()
    assert read(session).path.stat().st_size <= 1_000_000
    assert counts(read(session))["lines"] > 0
