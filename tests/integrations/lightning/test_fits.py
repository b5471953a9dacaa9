"""Several fits, resuming, and copies of the callback."""

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.integrations.lightning.stage_metrics import StageMetrics
from lightning_rlprof.testing import FakeRecorder
from tests.builders.models import (
    PACKAGES,
    Tiny,
    cut_steps,
    loader,
    make_trainer,
    module_of,
    of,
    recorded,
    steps_of,
    trace_of,
)

# Lightning's own advice about what these tests do on purpose.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:You're resuming from a checkpoint that ended before the epoch ended:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:Be aware that when using `ckpt_path`, .*ModelCheckpoint:UserWarning"
    ),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_two_fits_in_a_row_are_two_complete_runs(package: Any, tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    module = module_of(package)
    traces = []
    for _ in range(2):
        make_trainer(callback, package=package).fit(module, loader())
        traces.append(trace_of(callback))
    assert traces[0].path != traces[1].path
    assert [steps_of(trace) for trace in traces] == [[1, 2, 3, 4]] * 2
    assert [trace.status for trace in traces] == ["finished"] * 2


def test_one_trainer_that_goes_on_goes_on_counting(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    trainer, module = make_trainer(callback), Tiny()
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert steps_of(trace_of(callback)) == [5, 6, 7, 8]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resuming_in_mid_epoch_goes_on_with_the_step_number(
    accumulate: int, tmp_path: Path
) -> None:
    saves = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=2 // accumulate, save_top_k=-1)
    first = recorded(
        tmp_path / "first", None, saves, max_steps=2 // accumulate, max_epochs=-1,
        enable_checkpointing=True, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    assert steps_of(first) == [1, 2]
    (ckpt,) = (tmp_path / "ckpt").iterdir()

    callback = ProfilerCallback(profile_save_path=str(tmp_path / "second"))
    trainer = make_trainer(callback, accumulate_grad_batches=accumulate)
    module = Tiny()
    trainer.fit(module, loader(), ckpt_path=ckpt)  # weights_only by default: no state of ours
    trace = trace_of(callback)
    # Lightning before 2.5 repeats a batch.
    assert steps_of(trace) == [3 + batch for batch in range(len(module.losses))]
    assert of(trace, "rlprof open capture") == []
    assert trace.spans[0].step == 3  # the first fetch is of the step that it is for


def test_resuming_between_epochs_goes_on_with_the_step_number(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "ckpt")
    recorded(tmp_path / "first", None, saves, enable_checkpointing=True)
    (ckpt,) = (tmp_path / "ckpt").iterdir()
    callback = ProfilerCallback(profile_save_path=str(tmp_path / "second"))
    make_trainer(callback, max_epochs=2).fit(Tiny(), loader(), ckpt_path=ckpt)
    trace = trace_of(callback)
    assert steps_of(trace) == [5, 6, 7, 8]
    assert len(of(trace, "epoch")) == 1


def test_checkpoints_hold_nothing_of_ours(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "ckpt")
    recorded(tmp_path / "run", None, StageMetrics(), saves, enable_checkpointing=True)
    (ckpt,) = (tmp_path / "ckpt").iterdir()
    state = torch.load(ckpt, weights_only=True)
    assert [key for key in state["callbacks"] if "ModelCheckpoint" not in key] == []


def test_capture_windows_count_on_after_a_resume(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "ckpt")
    recorded(tmp_path / "first", None, saves, enable_checkpointing=True)
    (ckpt,) = (tmp_path / "ckpt").iterdir()
    recorder = FakeRecorder()
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path / "second"), recorders=[recorder], steps=[2, 6]
    )
    make_trainer(callback, max_epochs=2).fit(Tiny(), loader(), ckpt_path=ckpt)
    assert [call for call in recorder.calls if call.startswith("open")] == ["open step-000006"]


def test_a_step_without_an_end_leaves_the_next_fit_alone(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    broken = Tiny()
    broken.on_batch = lambda batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        make_trainer(callback).fit(broken, loader())
    make_trainer(callback).fit(Tiny(), loader())
    trace = trace_of(callback)
    assert (steps_of(trace), cut_steps(trace), trace.status) == ([1, 2, 3, 4], [], "finished")


def test_an_epoch_cut_by_an_exception_is_not_ended_by_the_next_fit(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=2, save_top_k=-1)
    callback = ProfilerCallback(profile_save_path=str(tmp_path / "runs"))
    broken = Tiny()
    broken.on_batch = lambda batch_idx: 1 / (2 - batch_idx)
    with pytest.raises(ZeroDivisionError):
        make_trainer(callback, saves, enable_checkpointing=True).fit(broken, loader())
    (ckpt,) = (tmp_path / "ckpt").iterdir()
    module = Tiny()
    make_trainer(callback).fit(module, loader(), ckpt_path=ckpt)
    trace = trace_of(callback)
    repeats = len(module.losses) > 2  # as Lightning before 2.5 does, which begins the epoch anew
    assert steps_of(trace) == [3, 4, 5][: 2 + repeats]
    assert len(of(trace, "epoch")) == repeats  # else it began in another run


def test_a_callback_is_pickled_and_copied_before_and_after_a_fit(tmp_path: Path) -> None:
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path),
        recorders=[FakeRecorder()],
        wrap=[{"target": "layer.forward", "stage": "actor_generate"}],
    )
    for _ in range(2):
        for twin in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
            assert twin.config == callback.config
            make_trainer(twin).fit(Tiny(), loader())
            assert steps_of(trace_of(twin)) == [1, 2, 3, 4]
        make_trainer(callback).fit(Tiny(), loader())


def test_a_callback_is_pickled_and_copied_while_it_records(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path / "run"))
    module = Tiny()
    twins: list[ProfilerCallback] = []

    def copies(batch_idx: int) -> None:
        if batch_idx == 1:
            twins.extend([pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)])

    module.on_batch = copies
    make_trainer(callback).fit(module, loader())
    assert steps_of(trace_of(callback)) == [1, 2, 3, 4]
    for twin in twins:  # a copy records nothing until a fit of its own
        make_trainer(twin).fit(Tiny(), loader())
        assert steps_of(trace_of(twin)) == [1, 2, 3, 4]


# The finder's own tiny loops, and its choice of the smallest rate that it tried.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_batches_of_a_tuner_are_no_steps(tmp_path: Path) -> None:
    class Tunes(Tiny):
        lr = 0.1

    recorder = FakeRecorder()
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path / "runs"), steps=[1], recorders=[recorder]
    )
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    order = (callback, finder)
    module = Tunes()
    make_trainer(*order, default_root_dir=tmp_path).fit(module, loader())
    trace = trace_of(callback)
    trained = len(module.losses) - 3  # Lightning before 2.5.6 ends the fit early
    assert steps_of(trace) == [1, 2, 3, 4][:trained] != []
    assert trace.status == "finished"
    assert recorder.calls.count("open step-000001") == 1
    first = of(trace, "step")[0]
    tuned = [span for span in of(trace, "actor_update") if span.step == 0]
    assert len(tuned) == 3
    assert all(span.end_ns <= first.start_ns for span in tuned)


@pytest.mark.parametrize("breaks", [False, True])
def test_the_loop_of_the_trainer_is_its_own_again_after_a_fit(breaks: bool, tmp_path: Path) -> None:
    module = Tiny()
    trainer = make_trainer(ProfilerCallback(profile_save_path=str(tmp_path)))
    seen = []

    def act(batch_idx: int) -> None:
        seen.append("run" in vars(trainer.fit_loop))
        assert not breaks

    module.on_batch = act
    with pytest.raises(AssertionError) if breaks else nullcontext():
        trainer.fit(module, loader())
    assert all(seen)
    assert "run" not in vars(trainer.fit_loop)


def test_a_fit_inside_of_every_step_is_warned_of_once(tmp_path: Path, caplog: Any) -> None:
    class Nests(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            inner = ProfilerCallback(profile_save_path=str(tmp_path / "inner"))
            make_trainer(inner).fit(Tiny(), loader())
            return super().training_step(batch, batch_idx)

    make_trainer(ProfilerCallback(profile_save_path=str(tmp_path / "outer"))).fit(Nests(), loader())
    assert caplog.text.count("this fit is not") == 1
