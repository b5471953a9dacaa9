"""Settings of advice exist: those of Lightning, PyTorch and TRL in the installed packages."""

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

from lightning_rlprof.analysis.advice.rule import GUIDE, Setting
from lightning_rlprof.analysis.advice.rules import RULES
from lightning_rlprof.records.advice_ids import ADVICE_IDS
from tests.places import ROOT

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # TRL says that what is experimental may change
    from trl.experimental import async_grpo

SETTINGS = [each for rule in RULES.values() for each in rule.settings]
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
    return sorted({each.knob for each in SETTINGS if each.framework in frameworks})


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
    ids=lambda each: each.knob,
)
def test_defaults_of_trl_are_those_of_its_config(setting: Setting) -> None:
    if setting.knob != "GRPOConfig.ddp_bucket_cap_mb":  # None there, which is 25 in torch
        assert str(of_trl(setting.knob)) == setting.default


def test_a_setting_that_does_not_exist_would_be_seen() -> None:
    assert "bucket_cap_gb" not in inspect.signature(DistributedDataParallel).parameters
    with pytest.raises(StopIteration):
        named("NoSuchStrategy")


def test_ids_are_those_that_configuration_and_shell_know() -> None:
    assert (*RULES,) == ADVICE_IDS


def test_the_code_of_zero_2_counts_not_the_inverted_document() -> None:
    (own,) = (
        each
        for each in RULES["fsdp-reshard"].settings
        if each.knob.endswith("reshard_after_forward")
    )
    assert (own.framework, own.change, own.default) == ("verl", "False", "True")


def test_the_budget_of_a_critics_forward_has_its_real_key() -> None:
    assert "critic.forward_max_token_len_per_gpu" in knobs("verl")
    assert not any("critic.forward_micro_batch_size" in each for each in knobs("verl"))
    assert not any(each.endswith("_micro_batch_size") for each in knobs("verl")), "deprecated"


def test_cards_can_split_settings() -> None:
    assert not any("; " in each.text for each in SETTINGS)


def test_the_guide_has_an_anchor_of_each_rule() -> None:
    page = ROOT / GUIDE
    if not page.is_file():
        pytest.skip(f"no {GUIDE} yet")
    text = page.read_text()
    assert [
        name for name in RULES if f'id="{name}"' not in text and f"{{#{name}}}" not in text
    ] == []
