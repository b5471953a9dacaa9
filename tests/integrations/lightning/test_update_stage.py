"""The update is whole: forward, loss, backward, clipping, optimizer; in spans and captures."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.analysis.steps.step_matrix import step_matrix
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.native import NO_STAGES
from lightning_rlprof.recording.annotations import count, stage
from lightning_rlprof.recording.session import current
from lightning_rlprof.recording.span_buffer import Buffer
from lightning_rlprof.testing import FakeRecorder
from tests.builders.models import Tiny, loader, make_trainer, of, recorded, trace_of

CLIPPED = {"gradient_clip_val": 1.0}


class Loop(Tiny):
    """A rollout, then a loss, under automatic optimization."""

    def rollout(self, batch: torch.Tensor) -> None:
        with stage("actor_generate"), torch.no_grad():
            self.layer(batch)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.rollout(batch)
        return self.loss(batch)


class Marked(Loop):
    """The update's forward pass is marked."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        with stage("actor_update", tokens=8):
            predicted = self.layer(batch)
        return predicted.pow(2).mean()


class Unmarked(Loop):
    def rollout(self, batch: torch.Tensor) -> None: ...


class Manual(Loop):
    """Two inner epochs of an actor, then of a critic; the code marks the rollout."""

    marked = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = torch.nn.Linear(4, 1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layer, self.critic)]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.rollout(batch)
        names = ("actor_update", "critic_update")
        parts = zip(names, self.optimizers(), (self.layer, self.critic), strict=True)
        for name, optimizer, part in parts:
            for _ in range(2):
                optimizer.zero_grad()
                if self.marked:
                    with stage(name):
                        loss = part(batch).pow(2).mean()
                else:
                    loss = part(batch).pow(2).mean()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=1.0)
                optimizer.step()


class ManualMarked(Manual):
    marked = True


def outside(trace: Any, *names: str) -> list[str]:
    """Return the backward passes and optimizer steps that are not inside of a stage."""
    whole = [span for name in names for span in of(trace, name)]
    return [
        f"{part.name} {part.step}"
        for part in (*of(trace, "backward"), *of(trace, "optimizer_step"))
        if not any(one.start_ns <= part.start_ns <= part.end_ns <= one.end_ns for one in whole)
    ]


def updates(trace: Any, name: str = "actor_update") -> list[int]:
    return [span.step for span in of(trace, name)]


def test_a_marked_forward_pass_continues_to_the_end_of_lightnings_closure(tmp_path: Path) -> None:
    trace = recorded(tmp_path, Marked(), **CLIPPED)
    assert updates(trace) == [1, 2, 3, 4]
    assert outside(trace, "actor_update") == []
    for update, rollout in zip(of(trace, "actor_update"), of(trace, "actor_generate"), strict=True):
        assert rollout.end_ns <= update.start_ns
        assert update.counters["tokens"] == 8
    assert trace.notes == []


def test_without_a_mark_of_the_update_the_closure_is_it(tmp_path: Path) -> None:
    trace = recorded(tmp_path, Loop(), **CLIPPED)
    assert updates(trace) == [1, 2, 3, 4]
    assert outside(trace, "actor_update") == []
    for update, step in zip(of(trace, "actor_update"), of(trace, "training_step"), strict=True):
        assert update.start_ns <= step.start_ns
    assert trace.notes == []


def test_a_rollout_in_the_closure_keeps_its_time(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback).fit(Loop(), loader())
    spans = load(callback.run)
    cells = step_matrix(spans)
    own = cells.work_ns[cells.name == spans.names.index("actor_generate")]
    rollouts = of(trace_of(callback), "actor_generate")
    assert own.sum() == sum(each.end_ns - each.start_ns for each in rollouts)


def test_nothing_is_added_to_a_run_without_marks(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path), auto_stages=False)
    make_trainer(callback).fit(Unmarked(), loader())
    spans = load(callback.run)
    assert of(trace_of(callback), "actor_update") == []
    assert NO_STAGES in [note.text for note in spans.notes]


def test_a_capture_that_is_requested_later_has_an_update_to_open_with(tmp_path: Path) -> None:
    class Requested(Unmarked):
        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
            if batch_idx == 2:
                session = current()
                asked = ProfilerConfig.build(stage="actor_update", steps=[3])
                assert session is not None
                assert session.switch(asked, [FakeRecorder()])

    callback = ProfilerCallback(profile_save_path=str(tmp_path), auto_stages=False)
    make_trainer(callback).fit(Requested(), loader())
    assert updates(trace_of(callback)) == [3, 4]


def test_marks_in_the_data_loader_make_the_closure_an_update(tmp_path: Path) -> None:
    class Rollouts:
        def __iter__(self) -> Any:
            for _ in range(4):
                with stage("actor_generate"):
                    batch = torch.ones(1, 4)
                yield batch

    trace = recorded(tmp_path, Unmarked(), data=Rollouts())
    assert (updates(trace), outside(trace, "actor_update")) == ([1, 2, 3, 4], [])


@pytest.mark.parametrize("rule", ["layer.forward", "loss", "training_step"])
def test_a_wrapped_update_is_whole_too(rule: str, tmp_path: Path) -> None:
    wrap = {
        "rollout": "actor_generate",
        rule: {"by_grad": {"grad": "actor_update"}},
    }
    callback = ProfilerCallback(profile_save_path=str(tmp_path), wrap=wrap)
    make_trainer(callback).fit(Loop(), loader())
    trace = trace_of(callback)
    assert (updates(trace), outside(trace, "actor_update")) == ([1, 2, 3, 4], [])


def test_a_wrapped_rollout_in_the_closure_stays_a_stage(tmp_path: Path) -> None:
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path), wrap={"layer.forward": "actor_generate"}
    )
    make_trainer(callback).fit(Unmarked(), loader())
    kinds = [(span.kind, span.step) for span in of(trace_of(callback), "actor_generate")]
    assert kinds == [("stage", step) for step in (1, 2, 3, 4)]


def test_what_is_computed_again_in_the_backward_pass_belongs_to_the_update(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(Loop):
        def score(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch)

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.score, batch, use_reentrant=False).pow(2).mean()

    callback = ProfilerCallback(profile_save_path=str(tmp_path), wrap={"score": "compute_reward"})
    make_trainer(callback).fit(Again(), loader())
    trace = trace_of(callback)
    assert updates(trace, "compute_reward") == [1, 2, 3, 4]
    assert [span.kind for span in of(trace, "score")] == ["region"] * 4


def test_accumulated_batches_have_an_update_each(tmp_path: Path) -> None:
    trace = recorded(tmp_path, Marked(), accumulate_grad_batches=2)
    assert (updates(trace), outside(trace, "actor_update")) == ([1, 2, 3, 4], [])
    assert [span.step for span in of(trace, "optimizer_step")] == [2, 4]


@pytest.mark.parametrize("kind", [Loop, Marked])
def test_a_closure_that_is_called_again_and_again_is_one_update(kind: Any, tmp_path: Path) -> None:
    class Searches(kind):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    trace = recorded(tmp_path, Searches())
    assert outside(trace, "actor_update") == []
    assert trace.notes == []


@pytest.mark.parametrize("kind", [Loop, Marked])
def test_mixed_precision(kind: Any, tmp_path: Path) -> None:
    trace = recorded(tmp_path, kind(), precision="bf16-mixed", **CLIPPED)
    assert (updates(trace), outside(trace, "actor_update")) == ([1, 2, 3, 4], [])


@pytest.mark.parametrize("kind", [Loop, Marked])
def test_compiled_parts(kind: Any, tmp_path: Path) -> None:
    module = kind()
    module.layer = torch.compile(module.layer, backend="eager")
    trace = recorded(tmp_path, module)
    assert (updates(trace), outside(trace, "actor_update")) == ([1, 2, 3, 4], [])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_step_without_a_loss_is_still_whole(tmp_path: Path) -> None:
    class Skips(Marked):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    trace = recorded(tmp_path, Skips())
    assert (updates(trace), outside(trace, "actor_update")) == ([1, 2, 3, 4], [])


@pytest.mark.parametrize("kind", [Manual, ManualMarked])
def test_manual_optimization_ends_each_update_with_its_optimizers_step(
    kind: Any, tmp_path: Path
) -> None:
    trace = recorded(tmp_path, kind())
    assert updates(trace) == updates(trace, "critic_update") == [1, 1, 2, 2, 3, 3, 4, 4]
    assert outside(trace, "actor_update", "critic_update") == []
    first = next(span for span in of(trace, "actor_update") if span.step == 2)
    critics = [span for span in of(trace, "critic_update") if span.step == 2]
    assert first.end_ns <= critics[0].start_ns
    assert trace.notes == []


def test_a_manual_update_that_is_marked_as_a_whole_stays_as_it_is(tmp_path: Path) -> None:
    class Whole(Manual):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            actor, _ = self.optimizers()
            with stage("actor_update"):
                self.manual_backward(self.loss(batch))
                actor.step()
            with stage("weight_sync"):
                count(tokens=1)

    trace = recorded(tmp_path, Whole())
    for update, sync in zip(of(trace, "actor_update"), of(trace, "weight_sync"), strict=True):
        assert update.end_ns <= sync.start_ns


def test_a_raw_backward_pass_is_part_of_a_manual_update(tmp_path: Path) -> None:
    class Raw(Manual):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            actor, _ = self.optimizers(use_pl_optimizer=False)
            with stage("actor_update"):
                loss = self.loss(batch)
            with torch.autograd.profiler.record_function("raw"):
                loss.backward()
            actor.step()

    trace = recorded(tmp_path, Raw())
    assert (updates(trace), outside(trace, "actor_update")) == ([1, 2, 3, 4], [])


def test_accumulation_by_hand_ends_with_the_backward_pass(tmp_path: Path) -> None:
    class Accumulates(Manual):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            actor, _ = self.optimizers()
            with stage("actor_update"):
                loss = self.loss(batch)
            self.manual_backward(loss)
            if batch_idx % 2:
                actor.step()
            torch.ones(100).sum()

    trace = recorded(tmp_path, Accumulates())
    assert (updates(trace), outside(trace, "actor_update")) == ([1, 2, 3, 4], [])
    first, step = of(trace, "actor_update")[0], of(trace, "training_step")[0]
    assert first.end_ns < step.end_ns
    assert trace.notes == []


@pytest.mark.parametrize(
    ("part", "stage_name"),
    [("policy", "actor_update"), ("critic", "critic_update"), ("value_head", "critic_update")],
)
def test_whose_update_it_is_follows_from_the_names_of_the_parameters(
    part: str, stage_name: str, tmp_path: Path
) -> None:
    class Named(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(part, torch.nn.Linear(4, 1))

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return getattr(self, part)(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(getattr(self, part).parameters(), lr=0.1)

    assert updates(recorded(tmp_path, Named()), stage_name) == [1, 2, 3, 4]


def test_whose_update_it_is_can_be_said(tmp_path: Path) -> None:
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path),
        optimizer_stages=["generator_update", "actor_update"],
        custom_stages=["generator_update"],
    )
    make_trainer(callback).fit(Manual(), loader())
    trace = trace_of(callback)
    assert updates(trace, "generator_update") == updates(trace) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_another_number_of_optimizers_is_refused_before_the_first_step(tmp_path: Path) -> None:
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path), optimizer_stages=["actor_update", "critic_update"]
    )
    with pytest.raises(ConfigError, match="has 2 stages, but configure_optimizers returned 1 opt"):
        make_trainer(callback).fit(Loop(), loader())


@pytest.mark.parametrize("kind", [Loop, Marked])
def test_an_exception_passes_through_and_ends_the_update(kind: Any, tmp_path: Path) -> None:
    class Breaks(kind):  # type: ignore[misc]
        def on_after_backward(self) -> None:
            raise ZeroDivisionError

    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        make_trainer(callback).fit(Breaks(), loader())
    trace = trace_of(callback)
    assert updates(trace) == [1]
    assert trace.status == "interrupted by ZeroDivisionError"


# ---- captures


def captured_names(tmp_path: Path, module: Any, **options: Any) -> dict[str, list[str]]:
    """Return the names of all events by capture."""
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path), stage="actor_update", profile_step_end=3, **options
    )
    trainer = {} if isinstance(module, Manual) else CLIPPED
    make_trainer(callback, **trainer).fit(module, loader())
    assert callback.run is not None
    return {
        file.parent.name: [
            event.get("name", "")
            for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        ]
        for file in sorted(callback.run.glob("rank-00000/*/*.json.gz"))
    }


@pytest.mark.parametrize("kind", [Loop, Marked, Unmarked, ManualMarked])
def test_a_capture_of_the_update_has_forward_backward_clipping_and_optimizer(
    kind: Any, tmp_path: Path
) -> None:
    found = captured_names(tmp_path, kind())
    assert list(found) == ["step-000001-actor_update", "step-000002-actor_update"]
    for names in found.values():
        assert "aten::linear" in names
        assert any("AddmmBackward0" in name for name in names)
        assert any("norm" in name for name in names)
        assert any("ptimizer" in name for name in names)
        assert "aten::_foreach_add_" in names or "aten::add_" in names


def test_a_capture_of_a_marked_update_leaves_the_rollout_out(tmp_path: Path) -> None:
    for names in captured_names(tmp_path, Marked()).values():
        assert "actor_generate" not in names
        assert names.count("aten::linear") == 1


def test_a_capture_of_a_wrapped_update_leaves_the_rollout_out(tmp_path: Path) -> None:
    for names in captured_names(tmp_path, Loop(), wrap={"loss": "actor_update"}).values():
        assert "actor_generate" not in names
        assert any("Backward0" in name for name in names)


def test_captures_of_all_stages_keep_one_for_each(tmp_path: Path) -> None:
    recorder = FakeRecorder()
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path), discrete=True, steps=[2], recorders=[recorder]
    )
    make_trainer(callback).fit(Loop(), loader())
    opened = [call for call in recorder.calls if call.startswith("open")]
    assert opened == ["open step-000002-actor_generate", "open step-000002-actor_update"]


class Device(FakeRecorder):
    """Tells ten nanoseconds of each stage once its step is over."""

    always = True

    def exit(self, token: object) -> Any:
        super().exit(token)
        return lambda: {"device_ns": 10}


def test_device_times_of_a_continued_update_are_added_up(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path), recorders=[Device()])
    make_trainer(callback).fit(Marked(), loader())
    spans = load(callback.run)
    found = [spans.counters_of(row) for row in spans.rows(kind="stage")]
    assert found == [{"device_ns": 10}, {"device_ns": 20, "tokens": 8}] * 4


def test_what_breaks_in_it_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*arguments: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(Buffer, "last_stages", breaks)
    module, plain = Marked(), Marked()
    trace = recorded(tmp_path, module)
    assert trace.status == "stopped by an error in rlprof: RuntimeError"
    assert "recording stopped, training continues: ours" in caplog.text
    make_trainer().fit(plain, loader())
    assert torch.equal(module.layer.weight, plain.layer.weight)
    assert current() is None


def test_a_training_is_the_same_with_it(tmp_path: Path) -> None:
    for kind in (Loop, Marked, Unmarked, Manual, ManualMarked):
        watched, plain = kind(), kind()
        recorded(tmp_path / kind.__name__, watched)
        make_trainer().fit(plain, loader())
        assert torch.equal(watched.layer.weight, plain.layer.weight)
