"""Methods get their stages by configuration, and lose them again."""

import asyncio
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.recording.method_wrapping import Wraps
from tests.builders.wrapped import (
    MARKABLE,
    Model,
    Policy,
    Slotted,
    Trained,
    X,
    recording,
    rule,
    score,
)

# ---- which stage a call gets


def test_every_call_of_a_method_is_its_stage(tmp_path: Path) -> None:
    model = Trained()
    Wraps(model, [rule("policy.generate", "actor_generate")])
    with recording(tmp_path) as names:
        expected = model.policy.layer(X)
        assert torch.equal(model.policy.generate(X), expected)
        model.policy.generate(x=X)
    assert names == ["actor_generate", "actor_generate"]


def test_the_forward_of_a_child_module_is_marked_however_it_is_called(tmp_path: Path) -> None:
    model = Trained()
    Wraps(model, [rule("policy.forward", "actor_compute_log_prob")])
    with recording(tmp_path) as names:
        model.policy(X)
        model.policy.generate(X)
    assert names == ["actor_compute_log_prob"] * 2


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ({"grad": "actor_update", "no_grad": "actor_generate"}, ["actor_update", "actor_generate"]),
        ({"grad": "actor_update"}, ["actor_update"]),
        ({"no_grad": "actor_generate"}, ["actor_generate"]),
    ],
)
def test_grad_mode_chooses_the_stage(
    modes: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    model = Trained()
    Wraps(model, [rule("policy.forward", modes)])
    with recording(tmp_path) as names:
        assert model.policy(X).requires_grad
        with torch.no_grad():
            assert not model.policy(X).requires_grad
    assert names == expected


BY_KIND = {
    "arg": "kind",
    "stages": {
        "OLD": "actor_compute_log_prob",
        "REFERENCE": "reference_compute_log_prob",
        "3": "actor_update",
        "None": "weight_sync",
    },
}


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((0, Model.REFERENCE), {}, ["reference_compute_log_prob"]),
        ((0,), {"kind": Model.REFERENCE}, ["reference_compute_log_prob"]),
        ((), {"kind": "REFERENCE", "batch": 0}, ["reference_compute_log_prob"]),
        ((0,), {}, ["actor_compute_log_prob"]),
        ((0, 3), {}, ["actor_update"]),
        ((0, None), {}, ["weight_sync"]),
        ((0, "active"), {}, []),
        ((0, "reference"), {}, []),
    ],
    ids=["place", "keyword", "text", "default", "number", "none", "unknown", "case"],
)
def test_an_argument_chooses_the_stage(
    args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    model = Trained()
    unmarked = model.log_probs(*args, **kwargs)
    Wraps(model, [rule("log_probs", BY_KIND)])
    with recording(tmp_path) as names:
        assert model.log_probs(*args, **kwargs) == unmarked
    assert names == expected


def test_an_argument_that_has_a_name_alone_is_not_looked_for_by_place(tmp_path: Path) -> None:
    model = Trained()
    Wraps(model, [rule("log_probs", {"arg": "flag", "stages": {"7": "actor_update"}})])
    with recording(tmp_path) as names:
        model.log_probs(0, 1, 7, 7, 7)
        assert names == []
        model.log_probs(0, 1, 2, flag=7)
    assert names == ["actor_update"]


def test_an_argument_may_come_through_kwargs(tmp_path: Path) -> None:
    class Passes(Trained):
        def scores(self, x: int, **kwargs: Any) -> Any:
            return self.log_probs(x, **kwargs)

    model = Passes()
    Wraps(model, [rule("scores", BY_KIND)])
    with recording(tmp_path) as names:
        assert model.scores(0, kind=Model.REFERENCE)[1] is Model.REFERENCE
        model.scores(0, flag=1)
    assert names == ["reference_compute_log_prob", "weight_sync"]  # without it: None


def test_a_part_of_a_list_of_modules_is_named_by_its_number(tmp_path: Path) -> None:
    model = Trained()
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    Wraps(model, [rule("blocks.1.forward")])
    with recording(tmp_path) as names:
        model.blocks[1](model.blocks[0](torch.ones(1, 2)))
    assert names == ["actor_update"]


def test_items_of_lists_and_dictionaries_are_reached(tmp_path: Path) -> None:
    model = Trained()
    model.critics, model.adapters = [Policy(), Policy()], {"math": Policy(), "code": Policy()}
    rules = [rule("critics.1.generate", "critic"), rule("adapters.math.generate", "adapter")]
    Wraps(model, rules)
    with recording(tmp_path) as names:
        for each in (*model.critics, *model.adapters.values()):
            each.generate(X)
    assert names == ["critic", "adapter"]
    for target, text in (("critics.2.x", "list has no '2'"), ("adapters.mat.x", "mean 'math'")):
        with pytest.raises(ConfigError, match=text):
            Wraps(model, [rule(target)])


def test_a_call_that_does_not_fit_raises_as_it_always_did(tmp_path: Path) -> None:
    model = Trained()
    Wraps(model, [rule("log_probs", {"arg": "batch", "stages": {"1": "actor_update"}})])
    with recording(tmp_path) as names, pytest.raises(TypeError, match="argument: 'batch'"):
        model.log_probs()
    assert names == []


# ---- what can be marked


def test_a_coroutine_is_marked_until_it_is_awaited_to_its_end(tmp_path: Path) -> None:
    model = Trained()
    Wraps(model, [rule("policy.reward", "compute_reward")])
    assert inspect.iscoroutinefunction(model.policy.reward)

    async def both() -> list[Any]:
        calls = model.policy.reward(), model.policy.reward(fails=True)
        return await asyncio.gather(*calls, return_exceptions=True)

    with recording(tmp_path) as names:
        value, error = asyncio.run(both())
    assert (value, str(error)) == (1, "no reward")
    assert names == ["compute_reward", "compute_reward"]


def test_functions_kept_as_attributes_are_marked(tmp_path: Path) -> None:
    policy = Policy()
    targets = ("score", "shout", "constant", "name", "short")
    Wraps(policy, [rule(target) for target in targets])
    with recording(tmp_path) as names:
        assert (policy.score("abc"), policy.shout("ab"), policy.constant()) == (3, 6, 4)
        assert policy.name() == "Policy"
        assert torch.equal(policy.short(X), policy.layer(X))
    assert len(names) == len(targets)


def test_a_coroutine_function_kept_as_an_attribute_stays_one(tmp_path: Path) -> None:
    policy = Policy()
    Wraps(policy, [rule("score_later", "compute_reward")])
    assert inspect.iscoroutinefunction(policy.score_later)
    with recording(tmp_path) as names:
        assert asyncio.run(policy.score_later("ab")) == 2
    assert names == ["compute_reward"]


def test_generators_are_marked_item_by_item(tmp_path: Path) -> None:
    model = Trained()
    Wraps(model, [rule("items"), rule("stream", "actor_generate")])

    async def collect() -> list[int]:
        return [item async for item in model.stream()]

    with recording(tmp_path) as names:
        assert list(model.items()) == [1, 2]
        assert asyncio.run(collect()) == [1]
    assert set(names) == {"actor_update", "actor_generate"}


def test_the_users_exception_passes_through_and_the_span_is_closed(tmp_path: Path) -> None:
    model = Trained()
    Wraps(model, [rule("fails"), rule("log_probs", BY_KIND)])
    with recording(tmp_path) as names, pytest.raises(KeyError, match="user") as caught:
        model.fails()
    assert caught.value.__cause__ is None
    assert names == ["actor_update"]


# ---- taking the marks off


def test_removal_leaves_every_instance_as_it_was(tmp_path: Path) -> None:
    model = Trained()
    own = functools.partial(score, "own")
    model.policy.own = own
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    wraps = Wraps(
        model, [rule(f"policy.{target}") for target in (*MARKABLE, "own", "layer.forward")]
    )
    assert {name: dict(vars(module)) for name, module in model.named_modules()} != before
    wraps.remove()
    wraps.remove()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert model.policy.own is own
    with recording(tmp_path) as names:
        model.policy.generate(X)
    assert names == []


def test_a_method_that_somebody_replaced_meanwhile_is_left_alone() -> None:
    model = Trained()
    wraps = Wraps(model, [rule("policy.generate"), rule("policy.forward"), rule("items")])
    model.policy.generate = theirs = lambda x: x
    del model.policy.forward
    wraps.remove()
    assert model.policy.generate is theirs
    assert "forward" not in vars(model.policy)
    assert "items" not in vars(model)


def test_one_method_under_two_names_is_restored(tmp_path: Path) -> None:
    model = Trained()
    model.actor = model.policy
    rules = [rule("policy.generate", "actor_generate"), rule("actor.generate", "rollout")]
    wraps = Wraps(model, rules)
    with recording(tmp_path) as names:
        model.policy.generate(X)
    assert names == ["rollout"]  # the first one is a region in it
    wraps.remove()
    assert "generate" not in vars(model.policy)


# ---- what is refused, before anything stays marked


@pytest.mark.parametrize(
    ("target", "how", "text"),
    [
        (
            "policy.generates",
            "s",
            r"'policy\.generates': Policy has no 'generates'; did you mean 'gener",
        ),
        (
            "polisy.generate",
            "s",
            r"'polisy\.generate': Trained has no 'polisy'; did you mean 'poli",
        ),
        ("zzz", "s", r"'zzz': Trained has no 'zzz'$"),
        ("policy", "s", r"'policy' is a module; name its method, as in 'policy\.forward'"),
        ("steps", "s", r"'steps' is int, which cannot be called"),
        ("reward_object", "s", r"'reward_object' is an object of Reward; name a method that it"),
        ("policy.__class__", "s", r"is an object of type; name a method"),
        (
            "log_probs",
            {"arg": "kin", "stages": {"a": "s"}},
            r"no argument 'kin'; did you mean 'kin",
        ),
        ("log_probs", {"arg": "zzz", "stages": {"a": "s"}}, r"has no argument 'zzz'$"),
        ("log_probs", {"arg": "rest", "stages": {"a": "s"}}, r"has no argument 'rest'$"),
        ("slotted.method", "s", r"'slotted\.method' cannot be replaced"),
        ("numbers.append", "s", r"'numbers\.append' cannot be replaced"),
        ("largest", {"arg": "x", "stages": {"a": "s"}}, r"the arguments of 'largest' are unknown"),
    ],
)
def test_a_rule_that_cannot_hold_is_refused_and_nothing_stays(
    target: str, how: Any, text: str
) -> None:
    model = Trained()
    model.slotted, model.numbers, model.largest = Slotted(), [1], max
    before = dict(vars(model.policy)), dict(vars(model))
    with pytest.raises(ConfigError, match=f"^wrap: .*{text}"):
        Wraps(model, [rule("policy.generate"), rule("items"), rule(target, how)])
    assert (dict(vars(model.policy)), dict(vars(model))) == before


def test_a_property_that_raises_passes_through_and_nothing_stays() -> None:
    class Unattached(Trained):
        @property
        def trainer(self) -> Any:
            raise RuntimeError("not attached to a Trainer")

    model = Unattached()
    with pytest.raises(RuntimeError, match="not attached"):
        Wraps(model, [rule("items"), rule("trainer.fit")])
    assert "items" not in vars(model)


def test_without_rules_nothing_is_touched() -> None:
    model = Trained()
    before = dict(vars(model))
    Wraps(model, []).remove()
    assert dict(vars(model)) == before
