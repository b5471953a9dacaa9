"""The log of verl's file logger, in the form that it writes."""

import json
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.run import load

MS = 1_000_000


def log(path: Path, *seconds: object) -> Path:
    """Write a step for each time of a step."""
    rows = [
        {"step": at, "data": {"timing_s/gen": 0.05, "timing_s/step": each, "perf/mfu": 0.1}}
        for at, each in enumerate(seconds, 7)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_steps_of_verls_log_have_their_times_and_no_stage(tmp_path: Path) -> None:
    path = log(tmp_path / "experiment.jsonl", 0.1, 0.3)
    with path.open("a") as file:
        file.write('{"step": 9, "da')
    run = load(path)
    assert [(span.name, span.step, span.start_ns // MS, span.end_ns // MS) for span in run] == [
        ("step", 7, 0, 100),
        ("step", 8, 100, 400),
    ]
    assert [note.level for note in run.notes] == ["info"]
    assert [warning.text for warning in run.warnings] == ["1 of its lines can't be read"]


@pytest.mark.parametrize("wrong", [1e8, -1.0, "nan", True])
def test_a_time_that_cannot_be_moves_no_other_step(wrong: object, tmp_path: Path) -> None:
    run = load(log(tmp_path / "experiment.jsonl", wrong, 1.0))
    assert [(span.step, span.start_ns) for span in run] == [(8, 0)]


def test_a_log_without_the_time_of_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has no timings of a step"):
        load(log(tmp_path / "experiment.jsonl", "nan"))
