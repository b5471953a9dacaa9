"""A marked module is copied, pickled, saved and compiled as if it were not marked."""

import asyncio
import copy
import functools
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.recording.method_wrapping import Wraps
from tests.builders.wrapped import MARKABLE, Policy, Trained, X, recording, rule


def test_a_copy_calls_the_copy_and_never_the_original(tmp_path: Path) -> None:
    model = Trained()
    targets = ("policy.forward", "policy.generate", "policy.layer.forward", "policy.short")
    Wraps(model, [rule(target) for target in targets])
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference.policy.layer.weight.zero_()
        reference.policy.layer.bias.fill_(7)
    for call in (reference.policy, reference.policy.generate, reference.policy.short):
        assert torch.equal(call(X), torch.full((1, 2), 7.0))
    assert not torch.equal(model.policy(X), reference.policy(X))
    assert reference.policy.generate.__self__ is reference.policy


def test_a_copied_partial_calls_with_the_arguments_of_the_copy() -> None:
    policy = Policy()
    policy.shout = functools.partial(Policy.generate, policy)
    Wraps(policy, [rule("shout")])
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        reference.layer.weight.zero_()
        reference.layer.bias.fill_(7)
    assert torch.equal(reference.shout(X), torch.full((1, 2), 7.0))


@pytest.mark.parametrize("save", ["pickle", "torch.save"])
def test_a_marked_module_is_saved_and_loaded_as_a_whole(save: str, tmp_path: Path) -> None:
    policy = Policy()
    Wraps(policy, [rule(target) for target in (*MARKABLE, "layer.forward", "name")])
    if save == "pickle":
        loaded = pickle.loads(pickle.dumps(policy))
    else:
        file = io.BytesIO()
        torch.save(policy, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    with recording(tmp_path) as names:
        assert (loaded.score("abc"), loaded.shout("ab"), loaded.constant()) == (3, 6, 4)
        assert asyncio.run(loaded.score_later("ab")) == 2
        for name in ("generate", "forward", "decorated", "short"):
            assert torch.equal(getattr(loaded, name)(X), policy.layer(X))
        assert loaded.layer.forward.__self__ is loaded.layer
        assert loaded.name() == "Policy"
    assert names.count("actor_update") == 4  # the four that compare with policy.layer, alone


def test_the_state_dict_knows_nothing_of_marks() -> None:
    marked, plain = Policy(), Policy()
    Wraps(marked, [rule(target) for target in MARKABLE])
    assert list(marked.state_dict()) == list(plain.state_dict()) == ["layer.weight", "layer.bias"]
    plain.load_state_dict(marked.state_dict())
    assert torch.equal(marked(X), plain(X))


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("how", ["actor_update", {"grad": "actor_update"}])
def test_a_marked_module_can_be_compiled(how: Any, records: bool, tmp_path: Path) -> None:
    torch.compiler.reset()
    policy = Policy()
    expected = policy(X)
    Wraps(policy, [rule("forward", how)])
    compiled = torch.compile(policy, backend="eager")
    if records:
        with recording(tmp_path):
            assert torch.equal(compiled(X), expected)
    assert torch.equal(compiled(X), expected)
