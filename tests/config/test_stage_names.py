import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from lightning_rlprof.config.stages import CustomStages, StageChoice, check_stages
from lightning_rlprof.config.validation import explain
from lightning_rlprof.records.records import STAGES

CHOICE: TypeAdapter[object] = TypeAdapter(StageChoice)
CUSTOM: TypeAdapter[object] = TypeAdapter(CustomStages)


def said(kind: TypeAdapter, value: object) -> str:  # type: ignore[type-arg]
    with pytest.raises(ValidationError) as caught:
        kind.validate_python(value)
    return explain(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("all", "all"),
        (["all"], "all"),
        ("actor_update", "actor_update"),
        (["actor_update", "weight_sync"], ["actor_update", "weight_sync"]),
        (("actor_update",), ["actor_update"]),
    ],
)
def test_a_choice_is_all_one_or_a_list(value: object, expected: object) -> None:
    assert CHOICE.validate_python(value) == expected


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ([], "selects no stage; write"),
        (["all", "actor_update"], "lists names besides all, which already contains every stage"),
        (["actor_update", "actor_update"], "names 'actor_update' twice"),
        (3, "is not a stage; write all, one stage, or a list"),
        ([3], "is not a stage; write all, one stage, or a list"),
        (None, "is not a stage; write all, one stage, or a list"),
    ],
)
def test_what_is_no_choice_of_stages_is_refused(value: object, part: str) -> None:
    assert said(CHOICE, value).startswith(f"{value!r} {part}")


@pytest.mark.parametrize("value", [[], ["mine"], ("mine", "my.other-one")])
def test_custom_stages_are_words(value: object) -> None:
    assert CUSTOM.validate_python(value) == list(value)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["all", "untraced", "", "a b", "a/b", "../up"])
def test_a_custom_stage_must_be_usable_as_a_file_name(name: object) -> None:
    assert said(CUSTOM, [name]).startswith(f"[{name!r}] holds {name!r}; a stage is a word of")


def test_custom_stages_are_a_list_without_doubles() -> None:
    assert said(CUSTOM, "mine") == "'mine' is not a list of stage names; write [my_stage]"
    assert said(CUSTOM, ["a", "a"]) == "['a', 'a'] names 'a' twice"


def test_known_and_declared_stages_pass() -> None:
    check_stages([*STAGES, "mine"], ["mine"], "integrated.stage", None)


def test_an_unknown_stage_is_named_with_a_near_match_and_what_is_allowed() -> None:
    with pytest.raises(PydanticCustomError) as caught:
        check_stages(["actor_updat"], ["mine"], "integrated.stage", "actor_updat")
    text = caught.value.message()
    start = "integrated.stage='actor_updat' is not a stage; did you mean 'actor_update'? Allowed: "
    assert text.startswith(start)
    assert text.endswith("weight_sync, mine; add your own to custom_stages")


def test_an_unknown_stage_in_a_list_is_picked_out() -> None:
    with pytest.raises(PydanticCustomError, match=r"holds 'zzz', which is not a stage. Allowed"):
        check_stages(["actor_update", "zzz"], [], "integrated.stage", ["actor_update", "zzz"])


def test_editors_get_the_known_stages() -> None:
    choices = CHOICE.json_schema()["anyOf"]
    assert choices[0] == {"enum": ["all", *STAGES]}
