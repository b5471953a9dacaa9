"""Conditions decide by whole intervals; settings exist in the installed packages."""

import dataclasses
import gc
import inspect
import re
import warnings
from typing import Any

import pytest
import torch
import trl
from lightning.pytorch import Trainer, callbacks, strategies
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_rlprof.analysis.diagnosis.diagnosis import FRAMEWORKS, PROBLEMS
from lightning_rlprof.analysis.diagnosis.evidence import (
    Fact,
    Measured,
    Quantity,
    exact,
)
from lightning_rlprof.analysis.diagnosis.problem import _KNOBS, Setting

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # TRL says that what is experimental may change
    from trl.experimental import async_grpo

SETTINGS = [
    each for problem in PROBLEMS.values() for remedy in problem.remedies for each in remedy.settings
]
CALL = re.compile(r"([\w.]+)\((\w+)=\)")
# What passes its keyword arguments on.
FORWARDS: dict[Any, Any] = {
    strategies.DDPStrategy: DistributedDataParallel,
    strategies.FSDPStrategy: FullyShardedDataParallel,
}
HOMES = (callbacks, strategies, torch, trl, async_grpo)


def named(name: str) -> Any:
    """Return the object that a setting names."""
    own = {"Trainer": Trainer, "DataLoader": DataLoader, "fully_shard": fully_shard, "gc": gc}
    own |= {"DistributedDataParallel": DistributedDataParallel, "torch": torch}
    first, *rest = name.split(".")
    found = own.get(first) or next(getattr(home, first) for home in HOMES if hasattr(home, first))
    for part in rest:
        found = getattr(found, part)
    return found


def knobs(*frameworks: str) -> list[str]:
    return sorted({each.key for each in SETTINGS if each.framework in frameworks})


@pytest.mark.parametrize("knob", knobs("Lightning", "PyTorch"))
def test_a_setting_of_lightning_or_pytorch_is_a_parameter_or_a_function(knob: str) -> None:
    call = CALL.fullmatch(knob)
    if call is None:
        assert callable(named(knob))
    elif knob == "Tensor.to(non_blocking=)":  # written in C
        assert "non_blocking" in str(torch.Tensor.to.__doc__)
    else:
        owner = named(call[1])
        takers = [owner, *([FORWARDS[owner]] if owner in FORWARDS else [])]
        assert any(call[2] in inspect.signature(each).parameters for each in takers)


@pytest.mark.parametrize("knob", [each for each in knobs("TRL") if "." in each])
def test_a_setting_of_trl_is_a_field_of_its_config(knob: str) -> None:
    kind, field = knob.split(".")
    assert field in {each.name for each in dataclasses.fields(named(kind))}


def test_other_settings_of_trl_are_its_trainers() -> None:
    others = [each for each in knobs("TRL") if "." not in each]
    assert others == ["AsyncGRPOTrainer", "GRPOTrainer(reward_funcs=)"]
    assert inspect.isclass(named("AsyncGRPOTrainer"))
    assert "reward_funcs" in inspect.signature(trl.GRPOTrainer).parameters


def of_trl(knob: str) -> Any:
    kind, field = knob.split(".")
    return next(each.default for each in dataclasses.fields(named(kind)) if each.name == field)


@pytest.mark.parametrize(
    "setting",
    [each for each in SETTINGS if each.framework == "TRL" and each.default],
    ids=lambda each: each.key,
)
def test_defaults_of_trl_are_those_of_its_config(setting: Setting) -> None:
    if setting.key != "GRPOConfig.ddp_bucket_cap_mb":  # None there, which is 25 in torch
        assert str(of_trl(setting.key)) == setting.default


def test_a_setting_that_does_not_exist_would_be_seen() -> None:
    assert "bucket_cap_gb" not in inspect.signature(DistributedDataParallel).parameters
    with pytest.raises(StopIteration):
        named("NoSuchStrategy")


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("verl: trainer.save_freq ↑", ("trainer.save_freq", "raise it", "up", "")),
        ("verl: a.b ↓ (default 8)", ("a.b", "lower it", "down", "8")),
        ("verl: a.b ↓ halve it (default null)", ("a.b", "halve it", "down", "null")),
        ("verl: f(x=) = a, or b (default c)", ("f(x=)", "a, or b", "a, or b", "c")),
    ],
)
def test_a_setting_is_read_from_one_line(line: str, setting: tuple[str, ...]) -> None:
    found = Setting.parse(line)
    assert (found.framework, found.key, found.change, found.turn, found.default) == (
        "verl",
        *setting,
    )


@pytest.mark.parametrize("line", ["trainer.save_freq ↑", "verl: trainer.save_freq", "verl: = 3"])
def test_a_line_that_is_not_a_setting_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a setting"):
        Setting.parse(line)


def test_settings_are_of_known_frameworks() -> None:
    always_shown = {"PyTorch", "environment", "rlprof"}
    assert {each.framework for each in SETTINGS} == {*FRAMEWORKS, *always_shown}


def test_keys_that_turn_the_same_are_keys_of_the_registry() -> None:
    shared = {each.key for each in SETTINGS if each.turns in ("loader workers", "staleness")}
    assert {"DataLoader(num_workers=)", "AsyncGRPOConfig.max_staleness"} <= shared
    assert _KNOBS.keys() <= {each.key for each in SETTINGS}


def test_the_budget_of_a_critics_forward_has_no_deprecated_key() -> None:
    assert not any("critic.forward_micro_batch_size" in each for each in knobs("verl"))
    assert not any(each.endswith("_micro_batch_size") for each in knobs("verl")), "deprecated"


SHARE, ANSWER = Quantity("a share", "share", exact), Quantity("an answer", "yes/no", exact)


def test_a_condition_needs_its_whole_interval_beyond_the_limit() -> None:
    states = [(SHARE > 0.5).state(Measured(0.5, *bounds)) for bounds in ((0.6, 0.7), (0.4, 0.6))]
    assert states == ["met", "undecided"]
    assert (SHARE < 0.5).state(exact(0.5)) == "not met"
    assert [each.state(exact(1.0)) for each in (ANSWER.yes, ANSWER.no)] == ["met", "not met"]


def test_confidence_is_high_far_beyond_the_limit() -> None:
    assert (SHARE > 0.2).confidence(Measured(0.5, 0.45, 0.6)) == "high"
    assert (SHARE > 0.2).confidence(Measured(0.3, 0.25, 0.4)) == "medium"
    assert (SHARE < 0.2).confidence(Measured(0.05, 0.04, 0.06)) == "high"
    assert ANSWER.yes.confidence(exact(1.0)) == "high"


def test_a_fact_is_written_with_its_unit_and_interval() -> None:
    assert Fact("of the job", 0.2, "share", 0.1, 0.3).text == "20% of the job (95% CI 10%–30%)"
    assert Fact("stage", "a", "text").text == "stage a"
    assert Fact("gap", 1.5, "ms").text == "gap 1.5 ms"
