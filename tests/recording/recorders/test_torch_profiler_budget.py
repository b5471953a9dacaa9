"""Captures that grow too big: real torch.profiler on the CPU, real memory of this process."""

import re
import threading
from pathlib import Path

import pytest
import torch

from lightning_rlprof.recording.recorders import torch_profiler
from lightning_rlprof.recording.recorders.torch_profiler import Budget, TorchProfilerRecorder
from tests.builders.recorder_traces import (
    Noted,
    batches,
    events_of,
    options,
    rows,
    trainer,
)

MOST = 50_000
"""Events of 200 bytes: enough that what a whole test session allocates beside them is little."""


@pytest.fixture(autouse=True)
def _check_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_profiler, "_CHECK_S", 0.0)


def recording(recorder: Noted) -> bool:
    window = recorder._window
    return window is not None and window._is_recording()


def work_until_ended(recorder: Noted) -> int:
    """Run operators, and a span every thousand, until the capture ends; return their number."""
    tensor, number = torch.ones(2), 0
    while recording(recorder) and number < 20 * MOST:
        tensor = tensor + 1
        number += 1
        if number % 1_000 == 0:
            check(recorder)
    return number


def check(recorder: Noted) -> None:
    recorder.exit(recorder.enter("region", "region", 1))


def work_until_over() -> None:
    """Run too many operators for one capture."""
    for _ in range(MOST):
        torch.ones(2)


def operators(path: Path) -> int:
    return sum(e.get("cat") == "cpu_op" for e in events_of(path))


def test_a_capture_of_too_many_events_ends_at_a_span_and_is_kept(tmp_path: Path) -> None:
    recorder = Noted(*options(), max_events=MOST)
    numbers = []
    recorder.window(tmp_path / "step-000003", lambda: numbers.append(work_until_ended(recorder)))
    (path,) = (tmp_path / "step-000003").iterdir()
    assert MOST / 2 < operators(path) < numbers[0] * 5 + 100  # one addition is five operators
    assert numbers[0] < 20 * MOST
    assert {*rows(path)} == {"actor_update", "region"}
    ((level, text),) = recorder.notes
    assert level == "warning"
    assert text.startswith("step-000003 ended early, at about ")
    assert (f" events (at most {MOST:,}); the events so far are kept. Capture fewer") in text


@pytest.mark.deep
def test_the_estimate_is_near_the_truth(tmp_path: Path) -> None:
    """Of 40 MB: another code's few megabytes, which are in the count as well, do not matter."""
    recorder = Noted(*options(), max_events=4 * MOST)
    recorder.window(tmp_path / "window", lambda: work_until_ended(recorder))
    (path,) = (tmp_path / "window").iterdir()
    estimated = int(re.findall(r"about ([\d,]+) events", recorder.notes[0][1])[0].replace(",", ""))
    assert 0.6 < estimated / operators(path) < 1.6


def test_the_second_capture_is_estimated_as_well_as_the_first(tmp_path: Path) -> None:
    """By resident memory it would not: the second uses what the first has freed."""
    recorder = Noted(*options(), max_events=MOST)
    for name in ("first", "second"):
        recorder.window(tmp_path / name, lambda: work_until_ended(recorder))
    sizes = [operators(next((tmp_path / name).iterdir())) for name in ("first", "second")]
    assert sizes[1] < 5 * sizes[0]
    assert len(recorder.notes) == 2


def test_a_capture_whose_writing_takes_too_much_memory_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_profiler, "available_bytes", lambda: 200_000_000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    recorder = Noted(*options())
    recorder.window(tmp_path / "window", lambda: work_until_ended(recorder))
    assert re.search(
        r"about [\d,]+ events, whose writing takes \d\.\d GB of host memory \(allowed here: 0\.1",
        recorder.notes[0][1],
    )
    (path,) = (tmp_path / "window").iterdir()
    assert operators(path) > 10_000


def test_half_of_the_available_memory_is_for_the_ranks_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_profiler, "available_bytes", lambda: 1600)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert TorchProfilerRecorder(*options()).max_bytes() == 800
    assert TorchProfilerRecorder(*options(world_size=2)).max_bytes() == 400
    assert TorchProfilerRecorder(*options(world_size=512)).max_bytes() == 100
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert TorchProfilerRecorder(*options(world_size=512)).max_bytes() == 200
    monkeypatch.setattr(torch_profiler, "available_bytes", lambda: None)
    assert TorchProfilerRecorder(*options()).max_bytes() is None


def test_on_another_thread_it_ends_at_the_next_span(tmp_path: Path) -> None:
    recorder = Noted(*options(), max_events=MOST)
    seen = []

    def train() -> None:
        recorder.open(tmp_path / "window")
        step = recorder.enter("step", "step", 1)
        work_until_over()
        seen.append(recording(recorder))
        recorder.exit(recorder.enter("actor_update", "stage", 1))
        seen.append(recording(recorder))
        recorder.exit(step)
        recorder.close()
        recorder.finish()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [True, False]
    (path,) = (tmp_path / "window").iterdir()
    assert rows(path) == ["ProfilerStep#1"]


def test_a_schedule_collects_nothing_more_after_an_early_end(tmp_path: Path) -> None:
    recorder = Noted(*options({"active": 1}), max_events=MOST)
    mini_batch = trainer()

    def work() -> None:
        mini_batch()
        work_until_ended(recorder)
        mini_batch()
        mini_batch()

    recorder.window(tmp_path / "window", work)
    assert batches(tmp_path / "window") == ["mb0", "mb1"]
    assert [level for level, _ in recorder.notes] == ["warning"]


def test_the_next_window_is_captured_again(tmp_path: Path) -> None:
    recorder = Noted(*options(), max_events=MOST)
    recorder.window(tmp_path / "first", lambda: work_until_ended(recorder))
    recorder.window(tmp_path / "second", lambda: torch.ones(2) + 1)
    (path,) = (tmp_path / "second").iterdir()
    assert rows(path) == ["actor_update"]
    assert len(recorder.notes) == 1


def test_nothing_is_stopped_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    capturing = [True]
    monkeypatch.setattr(torch_profiler, "_is_capturing", lambda: capturing[0])
    recorder = Noted(*options(), max_events=MOST)
    recorder.open(tmp_path / "window")
    work_until_over()
    recorder.exit(recorder.enter("actor_update", "stage", 1))
    assert recording(recorder)
    capturing.clear()
    capturing.append(False)
    work_until_ended(recorder)
    assert not recording(recorder)
    recorder.close()
    recorder.finish()


def test_if_memory_use_is_unknown_nothing_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks: list[str | None] = []
    real = Budget.exceeded

    def look(budget: Budget) -> str | None:
        looks.append(real(budget))
        return looks[-1]

    monkeypatch.setattr(Budget, "exceeded", look)
    recorder = Noted(*options(), max_events=1)
    recorder._used = lambda: None
    recorder.open(tmp_path / "window")
    torch.ones(2)
    check(recorder)
    assert looks
    assert recording(recorder)
    recorder.close()
    recorder.finish()
    assert looks == [None] * len(looks)
    assert recorder.notes == []
