"""Methods whose names mean a stage are marked, unless code or configuration marks any."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_rlprof
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import stage
from tests.builders.models import Tiny, loader, make_trainer, of, trace_of


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch)

    @torch.no_grad()
    def generate(self, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            self.log_probs(batch)
        return batch

    def log_probs(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch)


class Scorer:
    """No module."""

    def score(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum(1)


class Plain(Tiny):
    """A GRPO-like loop in which nothing is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.scorer = Policy(), Scorer()
        self.parts = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1)})

    def compute_advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        return rewards - rewards.mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        batch = self.policy.generate(batch)
        advantages = self.compute_advantages(self.scorer.score(batch))
        list(self.parts.values())
        return (self.policy(batch).squeeze(1) * advantages).mean()


def trained(folder: Path, module: Any, **options: Any) -> tuple[ProfilerCallback, Any]:
    callback = ProfilerCallback(profile_save_path=str(folder), **options)
    make_trainer(callback).fit(module, loader())
    return callback, trace_of(callback)


def stages_of(trace: Any) -> set[str]:
    return {span.name for span in trace.spans if span.kind == "stage"}


def test_methods_whose_names_mean_a_stage_are_stages(tmp_path: Path) -> None:
    callback, trace = trained(tmp_path, Plain())
    shown = set(stages(load(callback.run)).column("stage"))
    assert shown == {
        *("actor_generate", "compute_reward", "compute_advantage", "actor_update", "untraced"),
        *("data_fetch", "batch_transfer"),  # known regions outside any stage
    }
    assert [note.text for note in trace.notes] == [
        "methods marked by their names: compute_advantages (compute_advantage), "
        "scorer.score (compute_reward), policy.generate (actor_generate), "
        "policy.log_probs (actor_compute_log_prob). To turn off: auto_stages: false"
    ]
    assert trace.notes[0].level == "info"


def test_only_the_outermost_of_them_is_a_stage(tmp_path: Path) -> None:
    _, trace = trained(tmp_path, Plain())
    assert len(of(trace, "actor_generate")) == 4
    assert of(trace, "actor_compute_log_prob") == []
    assert [span.kind for span in of(trace, "policy.log_probs")] == ["region"] * 12


def test_one_key_switches_it_off(tmp_path: Path) -> None:
    _, trace = trained(tmp_path, Plain(), auto_stages=False)
    assert (stages_of(trace), trace.notes) == (set(), [])


def test_a_rule_replaces_them(tmp_path: Path) -> None:
    _, trace = trained(tmp_path, Plain(), wrap={"policy.generate": "actor_generate"})
    assert stages_of(trace) == {"actor_generate", "actor_update"}
    assert trace.notes == []


class Decorated(Plain):
    @stage("compute_advantage")
    def compute_advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        return super().compute_advantages(rewards)


class Inside(Plain):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with stage("compute_advantage"):
            pass
        return super().training_step(batch, batch_idx)


class ByPackage(Plain):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with lightning_rlprof.stage("compute_advantage"):
            pass
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Decorated, Inside, ByPackage])
def test_a_mark_in_the_code_replaces_them(kind: type[Plain], tmp_path: Path) -> None:
    _, trace = trained(tmp_path, kind())
    assert stages_of(trace) == {"compute_advantage", "actor_update"}
    assert trace.notes == []


def test_a_mark_elsewhere_replaces_them_from_its_step_on(tmp_path: Path) -> None:
    module = Plain()
    with_mark = stage("weight_sync")(lambda: None)

    class Late(Plain):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 1:
                with_mark()
            return super().training_step(batch, batch_idx)

    module = Late()
    _, trace = trained(tmp_path, module)
    assert [span.step for span in of(trace, "actor_generate")] == [1, 2]
    assert trace.notes[-1].text == (
        "methods are no longer marked by their names, as the code marks stages"
    )
    assert "generate" not in vars(module.policy)


def test_a_training_leaves_no_trace_in_the_module(tmp_path: Path) -> None:
    module = Plain()
    before = {name: dict(vars(part)) for name, part in vars(module.policy)["_modules"].items()}
    trained(tmp_path, module)
    assert {name: dict(vars(part)) for name, part in module.policy._modules.items()} == before
    assert "generate" not in vars(module.policy)
    assert "score" not in vars(module.scorer)


def test_copies_and_pickles_made_in_training_work(tmp_path: Path) -> None:
    made: list[Any] = []

    class Copies(Plain):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            made.append(copy.deepcopy(self.policy))
            made.append(pickle.loads(pickle.dumps(self.policy)))
            return super().training_step(batch, batch_idx)

    trained(tmp_path, Copies())
    for policy in made:
        assert policy.generate(torch.ones(1, 4)).shape == (1, 4)


def test_compiled_code_is_left_whole(tmp_path: Path) -> None:
    class Whole(Policy):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.log_probs(batch)

    class Compiled(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.policy = torch.compile(Whole(), backend="eager", fullgraph=True)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.policy(batch).mean()

    _, trace = trained(tmp_path, Compiled())
    assert trace.status == "finished"


def test_a_rollout_in_validation_alone_makes_no_stages_of_training(tmp_path: Path) -> None:
    class Validates(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.policy = Policy()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.policy(batch).mean()

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.policy.generate(batch)

    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback, val_check_interval=2).fit(Validates(), loader(), loader())
    assert {"training_step", "backward"} < set(stages(load(callback.run)).column("stage"))


@pytest.mark.parametrize("what", ["property", "slots", "weird"])
def test_a_module_of_any_kind_still_trains(what: str, tmp_path: Path) -> None:
    class Slots:
        __slots__ = ()

        def generate(self) -> None: ...

    class Weird:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __setattr__(self, name: str, value: Any) -> None:
            raise RuntimeError(name)

    class Odd(Plain):
        def __init__(self) -> None:
            super().__init__()
            vars(self)["engine"] = Slots() if what == "slots" else Weird()

        @property
        def rollout(self) -> Any:
            raise ZeroDivisionError

    _, trace = trained(tmp_path, Odd())
    assert trace.status == "finished"
