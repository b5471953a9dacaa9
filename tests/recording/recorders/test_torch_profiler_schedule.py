"""Schedules in mini-batches: real torch.profiler, real optimizers, on the CPU."""

import os
import threading
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function

from lightning_rlprof.recording.recorders.torch_profiler import TorchProfilerRecorder, TorchWindow
from tests.builders.recorder_traces import (
    Noted,
    batches,
    ends_of_rows,
    events_of,
    forward,
    options,
    rows,
    trainer,
)


def scheduled(**schedule: int) -> Noted:
    return Noted(*options(schedule))


def named(mini_batches: int) -> Any:
    """Return work of so many mini-batches, each after a row with its number."""
    mini_batch = trainer()

    def work() -> None:
        for number in range(mini_batches):
            with record_function(f"mini_batch{number}"):
                pass
            mini_batch()

    return work


def recorded(folder: Path) -> dict[str, list[int]]:
    """Return the numbers of the mini-batches that began in each file."""
    found = {}
    for path in folder.iterdir():
        names = [name for name in rows(path) if name.startswith("mini_batch")]
        found[path.name.split(".")[0].rpartition("_")[2]] = [int(name[10:]) for name in names]
    return found


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"active": 1, "repeat": 1}, {"mb0": [0]}),
        ({"active": 2, "repeat": 1}, {"mb0-1": [0, 1]}),
        ({"active": 2, "repeat": 2}, {"mb0-1": [0, 1], "mb2-3": [2, 3]}),
        ({"skip_first": 1, "wait": 1, "warmup": 1, "active": 2, "repeat": 1}, {"mb3-4": [3, 4]}),
        ({"wait": 1, "active": 1, "repeat": 2}, {"mb1": [1], "mb3": [3]}),
        ({"warmup": 1, "active": 1, "repeat": 2}, {"mb1": [1], "mb3": [3]}),
        ({"active": 2}, {"mb0-1": [0, 1], "mb2-3": [2, 3], "mb4-5": [4, 5], "mb6": [6]}),
    ],
)
def test_each_cycle_is_a_file_named_by_its_mini_batches(
    schedule: dict[str, int], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    recorder = scheduled(**schedule)
    recorder.window(tmp_path / "window", named(7))
    found = recorded(tmp_path / "window")
    found.pop("mb7", None)  # what follows the last optimizer step
    assert found == expected
    assert recorder.notes == []


def test_what_is_active_follows_torchs_own_schedule() -> None:
    for skip, wait, warmup, active, repeat in product((0, 2), (0, 1), (0, 1), (1, 2), (0, 2)):
        keys = {"skip_first": skip, "wait": wait, "warmup": warmup, "active": active}
        plan = TorchProfilerRecorder(*options({**keys, "repeat": repeat})).plan()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = torch.profiler.schedule(**keys, repeat=repeat)
        assert plan is not None
        assert [plan(number) for number in range(20)] == [own(number) for number in range(20)]


def test_without_warmup_nothing_is_warned_of() -> None:
    plan = TorchProfilerRecorder(*options({"active": 1})).plan()
    assert plan is not None
    assert plan(0) is ProfilerAction.RECORD_AND_SAVE


def test_a_cycle_that_the_window_cuts_off_is_kept(tmp_path: Path) -> None:
    recorder = scheduled(wait=1, active=5)
    recorder.window(tmp_path / "window", named(3))
    assert recorded(tmp_path / "window") == {"mb1-2": [1, 2]}
    assert recorder.notes == []


def test_a_cycle_cut_off_before_its_first_optimizer_step_is_kept(tmp_path: Path) -> None:
    recorder = scheduled(active=2)
    recorder.window(tmp_path / "window", forward)
    assert batches(tmp_path / "window") == ["mb0"]
    assert "aten::linear" in {e["name"] for e in events_of(next((tmp_path / "window").iterdir()))}


def test_a_cycle_cut_off_in_its_warmup_leaves_nothing_and_the_next_window_works(
    tmp_path: Path,
) -> None:
    recorder = scheduled(wait=1, warmup=2, active=1)
    recorder.window(tmp_path / "first", named(2))
    assert list((tmp_path / "first").iterdir()) == []
    recorder.window(tmp_path / "second", named(4))
    assert recorded(tmp_path / "second") == {"mb3": [3]}


def test_the_rows_of_spans_reach_into_each_cycle_and_steps_are_rl_steps(tmp_path: Path) -> None:
    recorder = scheduled(wait=1, active=1)
    recorder.open(tmp_path / "window")
    step = recorder.enter("step", "step", 7)
    update = recorder.enter("actor_update", "stage", 7)
    mini_batch = trainer()
    for _ in range(4):
        mini_batch()
    recorder.exit(update)
    recorder.exit(step)
    recorder.close()
    recorder.finish()
    assert batches(tmp_path / "window") == ["mb1", "mb3"]
    for path in (tmp_path / "window").iterdir():
        assert rows(path) == ["ProfilerStep#7", "actor_update"]


def test_optimizers_own_rows_end_in_the_cycle_that_they_began_in(tmp_path: Path) -> None:
    scheduled(active=1).window(tmp_path / "window", named(3))
    for path in (tmp_path / "window").iterdir():
        steps = [e for e in events_of(path) if e["name"].startswith("Optimizer.step")]
        assert len(steps) == (0 if "mb3" in path.name else 1)


def test_no_row_stays_open_beyond_its_cycle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its end would be written into freed memory, or into the events of the next cycle."""
    recorder, mini_batch, ended = scheduled(active=1), trainer(), ends_of_rows(monkeypatch)
    recorder.open(tmp_path / "window")
    with record_function("all of them"):
        mini_batch()
        assert ended.count("Optimizer.step#SGD.step") == 2  # by us, then by torch
        assert "all of them" in ended
        mini_batch()
    recorder.close()
    recorder.finish()
    first, second, _ = sorted((tmp_path / "window").iterdir())
    assert "all of them" in rows(first)
    assert "all of them" not in rows(second)


@pytest.mark.parametrize("mini_batches", [0, 5])
def test_a_schedule_that_is_never_reached_says_how_many_mini_batches_there_were(
    mini_batches: int, tmp_path: Path
) -> None:
    recorder = scheduled(skip_first=2, wait=2, warmup=2, active=1)
    recorder.window(tmp_path / "step-000003", named(mini_batches))
    ((level, text),) = recorder.notes
    assert level == "warning"
    assert text.startswith("step-000003 has no trace: torch_profiler.schedule starts after 6 mini")
    assert text.endswith(f"and there were {mini_batches} (optimizer steps)")


def test_a_stage_that_steps_no_optimizer_is_captured_whole(tmp_path: Path) -> None:
    recorder = scheduled(skip_first=1, active=1)
    recorder.window(tmp_path / "window", forward, name="reference_compute_log_prob")
    assert batches(tmp_path / "window") == [f"pid{os.getpid()}"]
    (path,) = (tmp_path / "window").iterdir()
    assert "aten::linear" in {e["name"] for e in events_of(path)}
    assert recorder.notes == []


def test_steps_of_another_thread_are_no_mini_batches_of_this_one(tmp_path: Path) -> None:
    def elsewhere() -> None:
        thread = threading.Thread(target=trainer())
        thread.start()
        thread.join()

    recorder = scheduled(skip_first=1, active=1)
    recorder.window(tmp_path / "window", elsewhere)
    assert recorder.notes[0][1].endswith("there were 0 (optimizer steps)")


def test_no_hook_stays_behind_and_none_is_there_without_a_schedule(tmp_path: Path) -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

    before = list(hooks)
    recorder = scheduled(active=1)
    recorder.window(tmp_path / "one", lambda: None)
    assert list(hooks) == before
    Noted(*options()).window(tmp_path / "two", lambda: _equal(list(hooks), before))
    recorder.window(tmp_path / "three", lambda: None, name="compute_reward")
    assert list(hooks) == before


def _equal(found: object, expected: object) -> None:
    assert found == expected


def test_a_cycle_that_cannot_start_is_told_and_training_goes_on(tmp_path: Path) -> None:
    recorder, mini_batch = scheduled(wait=1, active=1, repeat=1), trainer()

    def work() -> None:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]):
            mini_batch()
        mini_batch()

    recorder.window(tmp_path / "window", work)
    (failed, never) = recorder.notes
    assert failed[0] == "error"
    assert "failed between mini-batches (another torch profiler is active" in failed[1]
    assert never[1].startswith("window has no trace")
    recorder.window(tmp_path / "next", named(3))
    assert recorded(tmp_path / "next") == {"mb1": [1]}


def test_a_step_captured_into_a_graph_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "lightning_rlprof.recording.recorders.torch_profiler._is_capturing", lambda: True
    )
    recorder = scheduled(active=1)
    recorder.window(tmp_path / "window", named(3))
    assert recorded(tmp_path / "window") == {"mb0": [0, 1, 2]}


def test_a_window_counts_while_it_is_open(tmp_path: Path) -> None:
    recorder, mini_batch = scheduled(active=2), trainer()
    recorder.open(tmp_path / "window")
    window = recorder._window
    assert isinstance(window, TorchWindow)
    for expected in (0, 1, 2):
        assert window.mini_batches == expected
        mini_batch()
    recorder.close()
    mini_batch()
    assert window.mini_batches == 3
    recorder.finish()
