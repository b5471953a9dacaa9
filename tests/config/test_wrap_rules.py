from enum import Enum, IntEnum
from typing import Any

import pytest
from pydantic import ValidationError

from lightning_rlprof.config.profiler_config import Options
from lightning_rlprof.config.stages import WrapRule
from lightning_rlprof.config.validation import explain


class Model(Enum):
    OLD = "o"
    REFERENCE = "r"


def rule(**keys: object) -> WrapRule:
    return WrapRule.model_validate({"target": "policy.forward", **keys})


def said(**keys: object) -> str:
    with pytest.raises(ValidationError) as caught:
        rule(**keys)
    return explain(caught.value)


def test_one_stage_for_every_call() -> None:
    one = rule(stage="actor_update")
    assert one.names() == {"stage": "actor_update"}
    assert one.stage_for(grad=True) == one.stage_for(grad=False) == "actor_update"


def test_stage_by_grad_mode() -> None:
    both = rule(by_grad={"grad": "actor_update", "no_grad": "actor_generate"})
    assert both.stage_for(grad=True) == "actor_update"
    assert both.stage_for(grad=False) == "actor_generate"
    assert both.names() == {"by_grad.grad": "actor_update", "by_grad.no_grad": "actor_generate"}


def test_one_grad_mode_is_enough() -> None:
    one = rule(by_grad={"no_grad": "actor_generate"})
    assert one.stage_for(grad=True) is None
    assert one.names() == {"by_grad.no_grad": "actor_generate"}


def test_stage_by_argument() -> None:
    stages = {"Old": "actor_compute_log_prob", "Reference": "reference_compute_log_prob"}
    one = rule(by_arg={"arg": "model_type", "stages": stages})
    assert one.stage_for(grad=True, value="Old") == "actor_compute_log_prob"
    assert one.stage_for(grad=True, value="Active") is None
    assert one.stage_for(grad=True) is None
    assert one.names()["by_arg.stages.Old"] == "actor_compute_log_prob"


class Text(str, Enum):
    OLD = "old"
    REFERENCE = "reference"


class Number(IntEnum):
    ONE = 1


def test_an_enum_is_matched_by_name_by_value_and_by_text() -> None:
    one = rule(
        by_arg={"arg": "m", "stages": {"OLD": "a", "Model.REFERENCE": "b", "o": "c", 1: "d"}}
    )
    assert one.stage_for(grad=True, value=Model.OLD) == "a"
    assert one.stage_for(grad=True, value=Model.REFERENCE) == "b"
    assert one.stage_for(grad=True, value=Number.ONE) == "d"
    one = rule(by_arg={"arg": "m", "stages": {"old": "a", "r": "b"}})
    assert one.stage_for(grad=True, value=Text.OLD) == one.stage_for(grad=True, value="old") == "a"
    assert one.stage_for(grad=True, value=Text.REFERENCE) is None
    assert one.stage_for(grad=True, value=Model.REFERENCE) == "b"


def test_keys_that_yaml_reads_as_no_text_are_matched_as_text() -> None:
    one = rule(by_arg={"arg": "m", "stages": {True: "a", 0: "b"}})
    assert one.stage_for(grad=True, value=True) == "a"
    assert one.stage_for(grad=True, value=0) == "b"


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({}, "target='policy.forward' needs exactly one of stage, by_grad, by_arg; 0 given"),
        (
            {"stage": "a", "by_grad": {"grad": "b"}},
            "target='policy.forward' needs exactly one of stage, by_grad, by_arg; 2 given",
        ),
        ({"by_grad": {}}, "by_grad is empty: give grad, no_grad or both"),
        (
            {"by_arg": {"arg": "m", "stages": {}}},
            "by_arg.stages={} is not a mapping of argument values to stages",
        ),
        (
            {"by_arg": {"arg": "m", "stages": ["a"]}},
            "by_arg.stages=['a'] is not a mapping of argument values to stages",
        ),
        ({"by_arg": {"stages": {"a": "b"}}}, "by_arg.arg is missing"),
        (
            {"by_arg": {"arg": "a b", "stages": {"a": "b"}}},
            "by_arg.arg='a b' is not an argument name, such as model_type",
        ),
        ({"by_arg": {"arg": 3, "stages": {"a": "b"}}}, "by_arg.arg=3 should be text"),
        ({"stage_by_arg": {}}, "stage_by_arg is not a key here; did you mean"),
        (
            {"target": "a..b", "stage": "x"},
            "target='a..b' is not a dotted method name, such as policy.generate",
        ),
        (
            {"target": "f()", "stage": "x"},
            "target='f()' is not a dotted method name, such as policy.generate",
        ),
        ({"target": 3, "stage": "x"}, "target=3 should be text"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(keys: dict[str, object], part: str) -> None:
    assert said(**keys).startswith(part)


def wrapped(rules: Any) -> list[WrapRule]:
    return Options.model_validate({"wrap": rules}).wrap


def test_rules_may_be_written_by_method() -> None:
    by_grad, by_arg = {"no_grad": "actor_generate"}, {"arg": "m", "stages": {1: "actor_update"}}
    listed = (
        {"target": "policy.generate", "stage": "actor_generate"},
        {"target": "policy.forward", "by_grad": by_grad},
        {"target": "scores", "by_arg": by_arg},
    )
    ways = {
        "policy.generate": "actor_generate",
        "policy.forward": {"by_grad": by_grad},
        "scores": {"by_arg": by_arg},
    }
    assert wrapped(ways) == wrapped(listed) == wrapped([*listed])
    assert [rule.target for rule in wrapped(ways)] == [*ways]


@pytest.mark.parametrize(
    ("rules", "part"),
    [
        ({"f": "actor_updat"}, "wrap[0].stage='actor_updat' is not a stage; did you"),
        ({"f": {"by_grd": {}}}, "wrap[0].by_grd is not a key here; did you mean"),
        ({"f": None}, "wrap[0].target='f' needs exactly one of stage, by_grad, by_arg"),
        (
            {"f g": "actor_update"},
            "wrap[0].target='f g' is not a dotted method name, such as policy.generate",
        ),
        ({3: "actor_update"}, "wrap[0].target=3 should be text"),
        (
            {"target": "f", "stage": "actor_update"},
            (
                "wrap={'target': 'f', 'stage': 'actor_update'} is a single rule; wrap "
                "takes a list: write"
            ),
        ),
        ("f", "wrap='f' is neither a list of rules nor a mapping such as {policy.gen"),
    ],
)
def test_a_mistake_in_rules_by_method_is_told(rules: Any, part: str) -> None:
    with pytest.raises(ValidationError) as caught:
        wrapped(rules)
    assert explain(caught.value).startswith(part)
