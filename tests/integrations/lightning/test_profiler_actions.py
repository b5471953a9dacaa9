"""The tee on ``trainer.profiler``: what it sees, and that the profiler behind it never notices."""

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from packaging.version import Version
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    PyTorchProfiler,
    SimpleProfiler,
)
from torch.utils.data import DataLoader, IterableDataset

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import current
from tests.builders.models import (
    PACKAGES,
    Tiny,
    loader,
    make_trainer,
    module_of,
    of,
    recorded,
    steps_of,
    trace_of,
)

PROFILERS = {
    "simple": lambda folder: SimpleProfiler(folder, "report"),
    "advanced": lambda folder: AdvancedProfiler(folder, "report"),
    "pytorch": lambda folder: PyTorchProfiler(
        folder, "report", export_to_chrome=False, row_limit=-1, record_module_names=False
    ),
}
COVERED = ("start", "stop", "profile")


@pytest.mark.parametrize("kind", PROFILERS)
def test_lightnings_profilers_keep_their_own_report(kind: str, tmp_path: Path) -> None:
    reports = {}
    for name in ("alone", "watched"):
        profiler = PROFILERS[kind](tmp_path / name)
        callback = ProfilerCallback(profile_save_path=str(tmp_path / "runs"))
        callbacks = [callback] if name == "watched" else []
        trainer = make_trainer(*callbacks, profiler=profiler)
        trainer.fit(Tiny(), loader(8))  # torch's default schedule wants five steps
        assert trainer.profiler is profiler
        assert not set(COVERED) & set(vars(profiler))
        (report,) = (tmp_path / name).iterdir()
        reports[name] = report.read_text()
    assert "run_training_batch" in reports["alone"]
    assert "run_training_batch" in reports["watched"]
    assert len(of(trace_of(callback), "data_fetch")) == 8


@pytest.mark.parametrize("package", PACKAGES)
def test_the_simple_profiler_counts_as_if_nobody_listened(package: Any, tmp_path: Path) -> None:
    counts = []
    for callbacks in ([], [ProfilerCallback(profile_save_path=str(tmp_path))]):
        trainer = make_trainer(*callbacks, package=package, profiler="simple")
        trainer.fit(module_of(package), loader())
        profiler = trainer.profiler
        counts.append(
            {
                name: len(durations)
                for name, durations in profiler.recorded_durations.items()
                if "ProfilerCallback" not in name
            }
        )
        assert profiler.current_actions == {}
    assert counts[0] == counts[1]


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_an_exception_uncovers_the_profiler(profiler: str | None, tmp_path: Path) -> None:
    module = Tiny()
    module.on_batch = lambda batch_idx: 1 / 0
    trainer = make_trainer(ProfilerCallback(profile_save_path=str(tmp_path)), profiler=profiler)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, loader())
    assert not set(COVERED) & set(vars(trainer.profiler))


def test_what_the_user_had_put_on_the_profiler_is_put_back(tmp_path: Path) -> None:
    profiler, heard = PassThroughProfiler(), []
    profiler.start = heard.append
    before = vars(profiler)["start"]
    trainer = make_trainer(ProfilerCallback(profile_save_path=str(tmp_path)), profiler=profiler)
    trainer.fit(Tiny(), loader())
    assert vars(profiler)["start"] == before
    assert len([action for action in heard if action.endswith("train_dataloader_next")]) == 4


def test_what_somebody_puts_over_ours_is_left_alone(tmp_path: Path) -> None:
    module, heard = Tiny(), []

    def cover(batch_idx: int) -> None:
        if batch_idx == 0:
            ours = module.trainer.profiler.start

            def start(action: str) -> None:
                heard.append(action)
                ours(action)

            module.trainer.profiler.start = start

    module.on_batch = cover
    trainer = make_trainer(ProfilerCallback(profile_save_path=str(tmp_path)))
    trainer.fit(module, loader())
    assert vars(trainer.profiler)["start"].__name__ == "start"
    assert heard
    make_trainer(profiler=trainer.profiler).fit(Tiny(), loader())  # ours, behind it, is harmless


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_the_users_own_actions_become_regions_and_stages(
    profiler: str | None, tmp_path: Path
) -> None:
    class Acts(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            act = self.trainer.profiler.profile
            with act("my action"), act("actor_generate"):
                pass
            with act("own_stage"):
                return super().training_step(batch, batch_idx)

    callback = ProfilerCallback(profile_save_path=str(tmp_path), custom_stages=["own_stage"])
    make_trainer(callback, profiler=profiler).fit(Acts(), loader())
    trace = trace_of(callback)
    assert [span.kind for span in of(trace, "my action")] == ["region"] * 4
    assert [span.kind for span in of(trace, "own_stage")] == ["stage"] * 4
    for inner, outer in zip(of(trace, "actor_generate"), of(trace, "my action"), strict=True):
        assert (inner.kind, inner.parent) == ("stage", outer.id)


def test_names_of_actions_that_are_no_text_are_tolerated(tmp_path: Path) -> None:
    """As Lightning's own PassThroughProfiler does, which looks at none."""
    phase = enum.Enum("Phase", "SCORE")
    names = enum.Enum("Names", {"GENERATE": "actor_generate"}, type=str)
    module = Tiny()

    def act(batch_idx: int) -> None:
        profiler: Any = module.trainer.profiler
        with profiler.profile(phase.SCORE), profiler.profile(3):
            pass
        with profiler.profile(names.GENERATE):  # a text, whatever str() makes of it
            pass

    module.on_batch = act
    trace = recorded(tmp_path, module)
    for name in ("Phase.SCORE", "3"):
        assert [span.kind for span in of(trace, name)] == ["region"] * 4
    assert [span.kind for span in of(trace, "actor_generate")] == ["stage"] * 4


def test_unbalanced_actions_are_tolerated(tmp_path: Path) -> None:
    module = Tiny()

    def act(batch_idx: int) -> None:
        profiler = module.trainer.profiler
        profiler.stop("never started")
        profiler.start("never stopped")
        profiler.start("one")
        profiler.start("two")
        profiler.stop("one")
        profiler.stop("two")

    module.on_batch = act
    trace = recorded(tmp_path, module)
    assert (steps_of(trace), trace.status) == ([1, 2, 3, 4], "finished")
    assert of(trace, "never started") + of(trace, "never stopped") == []
    assert len(of(trace, "one")) == 4
    assert len(of(trace, "actor_update")) == 4


def test_an_action_left_open_is_not_around_the_spans_of_the_next_run(tmp_path: Path) -> None:
    class Leaves(pytorch_lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            trainer.profiler.start("left open")

    assert steps_of(recorded(tmp_path / "first", None, Leaves())) == [1, 2, 3, 4]
    trace = recorded(tmp_path / "second")
    known = {span.id for span in trace.spans}
    assert all(span.parent is None or span.parent in known for span in trace.spans)


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_the_hack_that_keeps_global_step_still_is_tolerated(
    profiler: str | None, tmp_path: Path
) -> None:
    class Hacks(Tiny):  # Lightning #17958: people repair global_step so
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer, act = self.optimizers(), self.trainer.profiler
            optimizer._on_before_step = lambda: act.start("hacked_step")
            optimizer._on_after_step = lambda: act.stop("hacked_step")
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).sum())
            optimizer.step()

    trace = recorded(tmp_path, Hacks(), profiler=profiler)
    assert len(of(trace, "hacked_step")) == len(of(trace, "optimizer_step")) == 4


class Rollouts(IterableDataset[torch.Tensor]):
    """Generates its batches, as RL does; its length is unknown."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(3):
            self.order.append(f"rollout {number}")
            with stage("actor_generate"):
                yielded = torch.ones(4)
            yield yielded


def test_rollouts_in_an_endless_loader_lie_inside_steps_one_batch_ahead(tmp_path: Path) -> None:
    data, module = Rollouts(), Tiny()
    module.on_batch = lambda batch_idx: data.order.append(f"update {batch_idx}")
    trace = recorded(tmp_path, module, data=DataLoader(data, batch_size=1))
    # Lightning fetches one batch ahead where it cannot know the last one.
    assert data.order == [
        "rollout 0", "rollout 1", "update 0", "rollout 2", "update 1", "update 2",
    ]  # fmt: skip
    assert [span.step for span in of(trace, "actor_generate")] == [1, 1, 2]
    steps = {span.step: span for span in trace.spans if span.kind == "step"}
    fetches = {span.id for span in of(trace, "data_fetch")}
    for span in of(trace, "actor_generate"):
        step = steps[span.step]
        assert step.start_ns <= span.start_ns <= span.end_ns <= step.end_ns
    first, *others = of(trace, "actor_generate")
    assert first.parent is None  # Lightning makes the first batch before its profiler listens
    assert all(span.parent in fetches for span in others)


@pytest.mark.skipif(
    Version(pytorch_lightning.__version__) < Version("2.5"),
    reason="Lightning before 2.5 does not report it",
)
def test_a_checkpoint_is_a_region_of_the_step_that_follows(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=2, save_top_k=-1)
    trace = recorded(tmp_path / "runs", None, saves, enable_checkpointing=True)
    first, second = of(trace, "save_checkpoint")
    assert (first.kind, first.step, second.step) == ("region", 3, 5)
    steps = {span.step: span for span in trace.spans if span.kind == "step"}
    assert steps[3].start_ns <= first.start_ns <= first.end_ns <= steps[3].end_ns


class Slow(pytorch_lightning.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        session, real = current(), current().clock
        session.clock = lambda: real() + 2_000_000


class Quick(pytorch_lightning.Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        pass


def test_what_another_callback_takes_between_two_steps_has_its_name(tmp_path: Path) -> None:
    trace = recorded(tmp_path, None, Slow(), Quick())
    assert len(of(trace, "Slow.on_train_batch_end")) == 4
    assert of(trace, "Quick.on_train_batch_start") == []


def test_lightnings_own_bookkeeping_is_left_out(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    assert {span.name for span in trace.spans} == {
        "data_fetch", "batch_transfer", "training_step", "actor_update", "backward",
        "optimizer_step", "step", "epoch",
    }  # fmt: skip
