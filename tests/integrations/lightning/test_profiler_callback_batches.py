"""Steps begin and end around Lightning's own action of a batch, whoever the profiler is."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import current
from lightning_rlprof.recording.torch_hooks import OptimizerSteps
from tests.builders.models import Tiny, cut_steps, loader, make_trainer, of, steps_of, trace_of

PROFILERS = [None, "simple"]


class Marks(pytorch_lightning.Callback):
    """Another callback with a stage at each end of a batch."""

    def on_train_batch_start(self, *args: Any) -> None:
        with stage("before"):
            pass

    def on_train_batch_end(self, *args: Any) -> None:
        with stage("after"):
            pass


@pytest.mark.parametrize("profiler", PROFILERS)
@pytest.mark.parametrize("before_ours", [True, False])
def test_what_follows_a_batch_belongs_to_the_next_step_wherever_we_are_in_the_list(
    before_ours: bool, profiler: str | None, tmp_path: Path
) -> None:
    ours, other = ProfilerCallback(profile_save_path=str(tmp_path)), Marks()
    order = (other, ours) if before_ours else (ours, other)
    make_trainer(*order, profiler=profiler).fit(Tiny(), loader())
    trace = trace_of(ours)
    assert [span.step for span in of(trace, "before")] == [1, 2, 3, 4]
    assert [span.step for span in of(trace, "after")] == [2, 3, 4, 5]
    assert (steps_of(trace), cut_steps(trace)) == ([1, 2, 3, 4], [])


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_batch_that_raises_ends_no_step(profiler: str | None, tmp_path: Path) -> None:
    module, ours = Tiny(), ProfilerCallback(profile_save_path=str(tmp_path))
    module.on_batch = lambda batch_idx: 1 // (2 - batch_idx)
    with pytest.raises(ZeroDivisionError):
        make_trainer(ours, profiler=profiler).fit(module, loader())
    trace = trace_of(ours)
    assert (steps_of(trace), cut_steps(trace)) == ([1, 2], [3])


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_step_that_cannot_begin_ends_the_recording_not_the_training(
    profiler: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, ours = Tiny(), ProfilerCallback(profile_save_path=str(tmp_path))

    def act(batch_idx: int) -> None:
        if batch_idx == 1:
            monkeypatch.setattr(current(), "begin_step", lambda step: 1 / 0)

    module.on_batch = act
    make_trainer(ours, profiler=profiler).fit(module, loader())
    trace = trace_of(ours)
    assert trace.status == "stopped by an error in rlprof: ZeroDivisionError"
    assert (steps_of(trace), len(module.losses)) == ([1, 2], 4)


def test_a_recording_that_ends_inside_a_batch_hears_nothing_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, ours = Tiny(), ProfilerCallback(profile_save_path=str(tmp_path))
    ended: list[int] = []

    def act(batch_idx: int) -> None:
        if batch_idx == 2:
            monkeypatch.setattr(current(), "end_step", lambda: ended.append(batch_idx))
            monkeypatch.setattr(OptimizerSteps, "closure_done", lambda self: 1 / 0)

    module.on_batch = act
    caplog.clear()
    make_trainer(ours).fit(module, loader())
    trace = trace_of(ours)
    assert trace.status == "stopped by an error in rlprof: ZeroDivisionError"
    assert (steps_of(trace), cut_steps(trace), len(module.losses)) == ([1, 2], [3], 4)
    assert sum(record.levelname in ("ERROR", "WARNING") for record in caplog.records) == 1
    assert ended == []
