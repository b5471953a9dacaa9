"""Hooks of Lightning that do not come in pairs, and the shapes that a training can have."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.session import current
from tests.builders.models import (
    PACKAGES,
    Tiny,
    TwoOptimizers,
    Validated,
    cut_steps,
    loader,
    make_trainer,
    module_of,
    of,
    recorded,
    steps_of,
    trace_of,
)


@pytest.mark.parametrize("package", PACKAGES)
def test_both_trainers_take_the_callback_in_a_list(package: Any, tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback, package=package).fit(module_of(package), loader())
    trace = trace_of(callback)
    assert steps_of(trace) == [1, 2, 3, 4]
    assert [span.step for span in of(trace, "actor_update")] == [1, 2, 3, 4]
    assert trace.status == "finished"
    assert load(callback.run).warnings == ()


@pytest.mark.parametrize("package", PACKAGES)
def test_both_trainers_take_the_bare_callback(package: Any, tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    trainer = package.Trainer(callbacks=callback, fast_dev_run=True, enable_progress_bar=False)
    assert callback in trainer.callbacks


def test_steps_tile_the_training_without_a_gap(tmp_path: Path) -> None:
    spans = [span for span in recorded(tmp_path, max_epochs=2).spans if span.kind == "step"]
    assert len(spans) == 8
    for before, after in pairwise(spans):
        assert before.end_ns == after.start_ns


def test_stages_and_regions_lie_inside_their_step(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    steps = {span.step: span for span in trace.spans if span.kind == "step"}
    for span in of(trace, "actor_update") + of(trace, "optimizer_step") + of(trace, "backward"):
        step = steps[span.step]
        assert step.start_ns <= span.start_ns <= span.end_ns <= step.end_ns


def test_epochs_are_recorded(tmp_path: Path) -> None:
    trace = recorded(tmp_path, max_epochs=2)
    assert [span.name for span in trace.spans if span.kind == "epoch"] == ["epoch", "epoch"]


def test_gradient_accumulation_still_counts_batches(tmp_path: Path) -> None:
    trace = recorded(tmp_path, accumulate_grad_batches=2)
    assert steps_of(trace) == [1, 2, 3, 4]
    assert [span.step for span in of(trace, "optimizer_step")] == [2, 4]


def test_several_optimizers_with_inner_epochs_do_not_move_the_step_number(tmp_path: Path) -> None:
    module = TwoOptimizers()
    trace = recorded(tmp_path, module)
    assert module.trainer.global_step == 16
    assert steps_of(trace) == [1, 2, 3, 4]
    assert [span.step for span in of(trace, "optimizer_step")] == [1] * 4 + [2] * 4 + [3] * 4 + [
        4
    ] * 4


def test_a_raw_optimizer_is_seen_though_lightning_does_not(tmp_path: Path) -> None:
    class Raw(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.layer(batch).pow(2).mean().backward()
            optimizer.step()

    module = Raw()
    trace = recorded(tmp_path, module)
    assert module.trainer.global_step == 0
    assert steps_of(trace) == [1, 2, 3, 4]
    assert [span.step for span in of(trace, "optimizer_step")] == [1, 2, 3, 4]


def test_optimizer_step_leaves_out_the_closure_that_lightning_runs_in_it(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    for update, backward in zip(of(trace, "optimizer_step"), of(trace, "backward"), strict=True):
        assert update.start_ns >= backward.end_ns


def test_validation_between_batches_belongs_to_the_step_that_follows(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback, val_check_interval=2).fit(Validated(), loader(), loader())
    trace = trace_of(callback)
    assert [span.step for span in of(trace, "sanity_check")] == [0]
    middle, last = of(trace, "validation")
    assert middle.step == 3
    assert steps_of(trace) == [1, 2, 3, 4]
    steps = {span.step: span for span in trace.spans if span.kind == "step"}
    assert steps[3].start_ns <= middle.start_ns <= middle.end_ns <= steps[3].end_ns
    assert last.start_ns >= steps[4].end_ns


def test_fast_dev_run_is_one_step(tmp_path: Path) -> None:
    trace = recorded(tmp_path, fast_dev_run=True)
    assert (steps_of(trace), trace.status) == ([1], "finished")


@pytest.mark.parametrize("package", PACKAGES)
def test_barebones_still_records(package: Any, tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    trainer = package.Trainer(barebones=True, max_epochs=1, accelerator="cpu", callbacks=[callback])
    trainer.fit(module_of(package), loader())
    assert steps_of(trace_of(callback)) == [1, 2, 3, 4]


# Lightning says so itself; it is what these two tests are about.
@pytest.mark.filterwarnings("ignore:train_dataloader yielded None:UserWarning")
def test_a_batch_of_none_is_no_step(tmp_path: Path) -> None:
    class Gappy:
        def __iter__(self) -> Any:
            yield from (torch.ones(1, 4), None, torch.ones(1, 4))

    trace = recorded(tmp_path, data=Gappy())
    assert steps_of(trace) == [1, 3]
    assert (cut_steps(trace), trace.status) == ([], "finished")
    first, second = [span for span in trace.spans if span.kind == "step"]
    assert first.end_ns == second.start_ns


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_training_step_that_returns_none_is_a_step(tmp_path: Path) -> None:
    class Skips(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    trace = recorded(tmp_path, Skips())
    assert steps_of(trace) == [1, 2, 3, 4]
    assert [span.step for span in of(trace, "backward")] == [1, 3, 4]


def test_an_epoch_ended_by_minus_one_leaves_no_open_step(tmp_path: Path) -> None:
    class Stops(Tiny):
        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    trace = recorded(tmp_path, Stops(), max_epochs=2)
    assert steps_of(trace) == [1, 2, 4, 5]
    assert (cut_steps(trace), trace.status) == ([], "finished")
    spans = [span for span in trace.spans if span.kind == "step"]
    assert spans[1].end_ns == spans[2].start_ns


def test_an_instance_in_two_trainers_records_both(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    for _ in range(2):
        make_trainer(callback).fit(Tiny(), loader())
    assert len(list(tmp_path.iterdir())) == 2


def test_two_callbacks_are_refused(tmp_path: Path) -> None:
    callbacks = [ProfilerCallback(profile_save_path=str(tmp_path)) for _ in range(2)]
    with pytest.raises(ConfigError, match="two ProfilerCallbacks"):
        make_trainer(*callbacks).fit(Tiny(), loader())
    assert current() is None


def test_a_module_that_brings_its_own_callback_replaces_the_trainers(tmp_path: Path) -> None:
    class Brings(Tiny):
        def configure_callbacks(self) -> list[Any]:
            return [ProfilerCallback(profile_save_path=str(tmp_path / "module"))]

    mine = ProfilerCallback(profile_save_path=str(tmp_path / "trainer"))
    make_trainer(mine).fit(Brings(), loader())
    assert mine.run is None
    assert len(list((tmp_path / "module").iterdir())) == 1
    assert not (tmp_path / "trainer").exists()


def test_training_is_bit_identical_with_and_without_the_callback(tmp_path: Path) -> None:
    plain, watched = Tiny(), Tiny()
    make_trainer(max_epochs=3).fit(plain, loader())
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path),
        profile_with_memory=True,
        steps=[2, 3],
        wrap=[{"target": "layer.forward", "stage": "actor_generate"}],
    )
    make_trainer(callback, max_epochs=3).fit(watched, loader())
    assert len(plain.losses) == 12
    assert plain.losses == watched.losses
    assert torch.equal(plain.layer.weight, watched.layer.weight)


def test_a_session_of_the_users_own_goes_on_and_the_fit_is_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lightning_rlprof.recording.start import start_session

    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    with start_session(callback.config) as session:
        make_trainer(callback).fit(Tiny(), loader())
        assert current() is session
    assert callback.run is None
    assert "this fit is not" in caplog.text


def test_a_second_fit_inside_the_first_does_not_end_it(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    module = Tiny()

    def inner(batch_idx: int) -> None:
        if batch_idx == 1:
            make_trainer(ProfilerCallback(profile_save_path=str(tmp_path))).fit(Tiny(), loader(2))

    module.on_batch = inner
    make_trainer(callback).fit(module, loader())
    assert steps_of(trace_of(callback)) == [1, 2, 3, 4]
    assert len(list(tmp_path.iterdir())) == 1


def test_pytorch_lightning_is_the_package_under_test() -> None:
    assert issubclass(ProfilerCallback, pytorch_lightning.Callback)
    assert all(issubclass(ProfilerCallback, package.Callback) for package in PACKAGES)


class Holds(pytorch_lightning.Callback):
    """Holds another callback and forwards every hook that Lightning calls."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattribute__(self, name: str) -> Any:
        if name in FORWARDED:
            return getattr(object.__getattribute__(self, "inner"), name)
        return super().__getattribute__(name)


FORWARDED = [
    name
    for name in dir(pytorch_lightning.Callback)
    if name.startswith("on_") or name in ("setup", "teardown")
]


def test_a_callback_that_holds_it_and_forwards_every_hook_records_the_same(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(Holds(callback)).fit(Tiny(), loader())
    trace = trace_of(callback)
    assert [span.step for span in trace.spans if span.kind == "step"] == [1, 2, 3, 4]
    assert len(of(trace, "actor_update")) == 4
    assert trace.status == "finished"


class Forwards(pytorch_lightning.Callback):
    """Calls every hook of those that `inner` returns, before its own Lightning hook ends."""

    def inner(self) -> list[Any]:
        raise NotImplementedError


def forwarding(name: str) -> Any:
    def hook(self: Forwards, *args: Any, **kwargs: Any) -> None:
        for each in self.inner():
            getattr(each, name)(*args, **kwargs)

    return hook


for forwarded in FORWARDED:
    setattr(Forwards, forwarded, forwarding(forwarded))


class InAttribute(Forwards):
    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def inner(self) -> list[Any]:
        return [self.callback]


class InList(InAttribute):
    def inner(self) -> list[Any]:
        return [pytorch_lightning.Callback(), self.callback]


class MadeAtSetup(InAttribute):
    """Has nothing before setup."""

    made: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.made = self.callback
        self.made.setup(trainer, pl_module, stage)

    def inner(self) -> list[Any]:
        return [self.made] if self.made is not None else []


class TakesOver(InAttribute):
    """Takes the Trainer's own callbacks at setup, and is its only one from then on."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.others = [each for each in trainer.callbacks if each is not self]
        trainer.callbacks = [self]
        for each in self.others:
            each.setup(trainer, pl_module, stage)

    def inner(self) -> list[Any]:
        return self.others


class Repeats(TakesOver):
    """Calls the Trainer's own callbacks at setup and in every hook, as Lightning does, too."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.others = [each for each in trainer.callbacks if each is not self]
        for each in self.others:
            each.setup(trainer, pl_module, stage)


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [InAttribute, InList, MadeAtSetup, TakesOver, Repeats])
def test_a_callback_that_holds_it_in_any_form_records_the_same(
    kind: Any, first: bool, automatic: bool, tmp_path: Path
) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    callbacks = [kind(callback)]
    if kind in (TakesOver, Repeats):
        callbacks.insert(0 if first else 1, callback)
    module = Validated() if automatic else TwoOptimizers()
    data = [loader(), loader()] if automatic else [loader()]
    make_trainer(*callbacks).fit(module, *data)
    trace = trace_of(callback)
    assert (steps_of(trace), trace.status) == ([1, 2, 3, 4], "finished")
    assert len(of(trace, "optimizer_step")) == (4 if automatic else 16)
    assert len(list(tmp_path.iterdir())) == 1
    assert current() is None


def test_its_hooks_can_be_called_at_any_time(tmp_path: Path) -> None:
    callback, module = ProfilerCallback(profile_save_path=str(tmp_path)), Tiny()
    trainer = make_trainer(callback)

    def all_can_be_called(_: object) -> None:
        for name in FORWARDED:
            assert callable(getattr(callback, name)), name

    module.on_batch = all_can_be_called
    for _ in range(2):
        all_can_be_called(None)
        trainer.fit(module, loader())
