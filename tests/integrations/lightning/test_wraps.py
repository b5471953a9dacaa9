"""Stages by configuration: methods of the module are marked for one fit, and copies stay copies."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.session import current
from tests.builders.models import (
    PACKAGES,
    Tiny,
    loader,
    make_trainer,
    module_of,
    of,
    only_run,
    trace_of,
)

# Tiny calls it inside of its own stage.
LAYER = {"target": "layer.forward", "stage": "actor_generate", "nested": True}


def wrapping(folder: Path, *rules: dict[str, Any]) -> ProfilerCallback:
    return ProfilerCallback(profile_save_path=str(folder), wrap=list(rules))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("target", ["layer.forward", "training_step", "configure_optimizers"])
def test_a_wrapped_method_is_a_stage_and_is_bare_again_after_the_fit(
    target: str, package: Any, tmp_path: Path
) -> None:
    callback, module = wrapping(tmp_path, {**LAYER, "target": target}), module_of(package)
    make_trainer(callback, package=package).fit(module, loader())
    assert of(trace_of(callback), "actor_generate")
    assert "forward" not in vars(module.layer)
    assert target not in vars(module)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_methods_bare(error: Any, tmp_path: Path) -> None:
    class Raises(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            assert "forward" in vars(self.layer)
            raise error if error is ValueError else SystemExit

    module = Raises()
    with pytest.raises((ValueError, SystemExit)):
        make_trainer(wrapping(tmp_path, LAYER)).fit(module, loader())
    assert "forward" not in vars(module.layer)


def test_a_deep_copy_of_a_wrapped_module_calls_itself(tmp_path: Path) -> None:
    class Copies(Tiny):
        def on_train_start(self) -> None:
            self.reference = copy.deepcopy(self.layer)
            torch.nn.init.zeros_(self.reference.weight)
            torch.nn.init.zeros_(self.reference.bias)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            assert self.reference(batch).eq(0).all()
            assert not self.layer(batch).eq(0).all()
            return super().training_step(batch, batch_idx)

    module = Copies()
    make_trainer(wrapping(tmp_path, LAYER)).fit(module, loader())
    assert len(module.losses) == 4
    (trace,) = only_run(tmp_path)
    assert len(of(trace, "actor_generate")) == 3 * 4


def test_a_module_that_is_made_in_setup_is_marked_too(tmp_path: Path) -> None:
    class Late(Tiny):
        def setup(self, stage: str) -> None:
            self.policy = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return self.policy(batch).pow(2).mean()

    rule = {"target": "policy.forward", "stage": "actor_generate"}
    callback, module = wrapping(tmp_path, rule), Late()
    make_trainer(callback).fit(module, loader())
    assert len(of(trace_of(callback), "actor_generate")) == 4
    assert "forward" not in vars(module.policy)


def test_a_property_that_raises_until_setup_has_run_is_asked_again(tmp_path: Path) -> None:
    class Late(Tiny):
        parts: dict[str, torch.nn.Module] = {}  # noqa: RUF012  replaced, never changed

        def setup(self, stage: str) -> None:
            self.parts = {"policy": self.layer}

        @property
        def policy(self) -> torch.nn.Module:
            return self.parts["policy"]

    rule = {**LAYER, "target": "policy.forward"}
    callback, module = wrapping(tmp_path, rule), Late()
    make_trainer(callback).fit(module, loader())
    assert len(of(trace_of(callback), "actor_generate")) == 4


def test_a_target_that_never_appears_is_refused_before_the_first_step(tmp_path: Path) -> None:
    module = Tiny()
    callback = wrapping(tmp_path, {"target": "missing.forward", "stage": "actor_generate"})
    with pytest.raises(ConfigError, match="has no 'missing'"):
        make_trainer(callback).fit(module, loader())
    assert module.losses == []
    assert current() is None


def test_one_method_is_two_stages_by_grad_mode(tmp_path: Path) -> None:
    class Rolls(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            with torch.no_grad():
                self.layer(batch)
            return self.layer(batch).pow(2).mean()

    rule = {
        "target": "layer.forward",
        "by_grad": {"grad": "actor_update", "no_grad": "actor_generate"},
    }
    callback = wrapping(tmp_path, rule)
    make_trainer(callback).fit(Rolls(), loader())
    trace = trace_of(callback)
    assert len(of(trace, "actor_generate")) == len(of(trace, "actor_update")) == 4


def test_a_target_that_is_missing_is_refused_before_training(tmp_path: Path) -> None:
    module = Tiny()
    rule = {"target": "layer.forwards", "stage": "actor_generate"}
    with pytest.raises(ConfigError, match=r"'layer.forwards'.* did you mean 'forward'\?"):
        make_trainer(wrapping(tmp_path, LAYER, rule)).fit(module, loader())
    assert module.losses == []
    assert "forward" not in vars(module.layer)
    assert current() is None


def test_what_the_user_puts_over_a_wrapped_method_is_left_alone(tmp_path: Path) -> None:
    class Replaces(Tiny):
        def on_train_start(self) -> None:
            ours = self.layer.forward
            self.layer.forward = lambda batch: ours(batch) + 1

    module = Replaces()
    make_trainer(wrapping(tmp_path, LAYER)).fit(module, loader())
    assert "forward" in vars(module.layer)
    assert module.layer(torch.ones(1, 4)).shape == (1, 1)


def test_two_fits_wrap_once_each(tmp_path: Path) -> None:
    callback, module = wrapping(tmp_path, LAYER), Tiny()
    for _ in range(2):
        make_trainer(callback).fit(module, loader())
        assert len(of(trace_of(callback), "actor_generate")) == 4


def test_a_wrapped_module_is_saved_as_if_it_were_bare(tmp_path: Path) -> None:
    class Saves(Tiny):
        def on_train_end(self) -> None:
            torch.save(self.layer, tmp_path / "layer.pt")

    module = Saves()
    make_trainer(wrapping(tmp_path / "runs", LAYER)).fit(module, loader())
    again = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert torch.equal(again(torch.ones(1, 4)), module.layer(torch.ones(1, 4)))


class Kinds(Tiny):
    """Asks itself for something in each step, of one kind after the other."""

    kinds = ("OLD", "x" * 99, "new", *"abcdef")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        for kind in self.kinds:
            self.asked(kind)
        return super().training_step(batch, batch_idx)

    def asked(self, kind: str) -> None: ...


def by_kind(*kinds: str) -> dict[str, Any]:
    stages = dict.fromkeys(kinds, "actor_generate")
    return {"target": "asked", "by_arg": {"arg": "kind", "stages": stages}}


def test_a_rule_whose_values_never_came_is_named_at_the_end(tmp_path: Path) -> None:
    callback, module = wrapping(tmp_path, by_kind("old", "ref")), Kinds()
    make_trainer(callback).fit(module, loader())
    (note,) = trace_of(callback).notes
    assert note.level == "warning"
    assert note.text.startswith("wrap: no call of 'asked' matched a stage: kind was 'OLD', 'a', ")
    assert note.text.endswith(", …; by_arg.stages has old, ref")
    module.kinds = ("x" * 99,)
    make_trainer(callback).fit(module, loader())
    assert f"kind was {'x' * 40!r}; by" in trace_of(callback).notes[0].text


def test_a_rule_whose_method_was_never_called_is_named_and_one_that_served_is_not(
    tmp_path: Path,
) -> None:
    callback, module = wrapping(tmp_path, by_kind("OLD", "ref")), Kinds()
    make_trainer(callback).fit(module, loader())
    assert trace_of(callback).notes == []
    module.kinds = ()
    make_trainer(callback).fit(module, loader())
    assert [note.text for note in trace_of(callback).notes] == ["wrap: 'asked' was never called"]


def test_a_rule_whose_calls_are_all_inside_another_stage_says_how_to_make_one(
    tmp_path: Path,
) -> None:
    callback = wrapping(tmp_path, {**LAYER, "nested": False})
    make_trainer(callback).fit(Tiny(), loader())
    trace = trace_of(callback)
    assert of(trace, "actor_generate") == []
    regions = [span for span in trace.spans if span.name == "layer.forward"]
    assert len(regions) == 4
    assert {span.kind for span in regions} == {"region"}
    assert [note.text for note in trace.notes] == [
        "wrap: every call of 'layer.forward' was inside another stage, which includes it. "
        "To make it a stage, add nested: true to the rule"
    ]


class Policy(torch.nn.Module):
    """Generates token by token through its own forward, as policies without a cache do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(batch)
        return result

    def generate(self, batch: torch.Tensor) -> None:
        for _ in range(5):
            self(batch)


def test_the_recipe_of_the_readme_gives_generation_its_own_forward(tmp_path: Path) -> None:
    class Grpo(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.policy = Policy()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            with torch.no_grad():
                self.policy.generate(batch)
                self.policy(batch)
            return self.policy(batch).pow(2).mean()

    rules = (
        {"target": "policy.generate", "stage": "actor_generate"},
        {
            "target": "policy.forward",
            "by_grad": {"no_grad": "actor_compute_log_prob", "grad": "actor_update"},
        },
    )
    callback = wrapping(tmp_path, *rules)
    make_trainer(callback).fit(Grpo(), loader())
    trace = trace_of(callback)
    stages = [span.name for span in trace.spans if span.kind == "stage" and span.step == 1]
    assert sorted(stages) == ["actor_compute_log_prob", "actor_generate", "actor_update"]
    inside = [span for span in trace.spans if span.name == "policy.forward" and span.step == 1]
    generate = next(span for span in of(trace, "actor_generate") if span.step == 1)
    assert [span.parent for span in inside] == [generate.id] * 5
    assert trace.notes == []
