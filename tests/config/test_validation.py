import pytest
from pydantic import Field, TypeAdapter, ValidationError

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.validation import (
    Ranks,
    Section,
    SomeRanks,
    Steps,
    _texts,
    explain,
    near,
    refused,
)
from lightning_rlprof.errors import ConfigError

RANKS: TypeAdapter[list[int]] = TypeAdapter(Ranks)
ALL: TypeAdapter[object] = TypeAdapter(SomeRanks)
STEPS: TypeAdapter[object] = TypeAdapter(Steps)


def said(kind: TypeAdapter, value: object) -> str:  # type: ignore[type-arg]
    with pytest.raises(ValidationError) as caught:
        kind.validate_python(value)
    return explain(caught.value)


@pytest.mark.parametrize("value", [[0, 2], (0, 2), {2, 0}, frozenset({0, 2}), range(0, 3, 2)])
def test_ranks_may_come_in_any_collection(value: object) -> None:
    assert RANKS.validate_python(value) == [0, 2]


def test_ranks_may_be_empty() -> None:
    assert RANKS.validate_python([]) == []


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ([-1], "[-1] holds -1; ranks count from 0"),
        ([1, 0, 1], "[1, 0, 1] names 1 twice; name each once"),
        (["0"], "['0'] holds '0'; ranks are whole numbers without quotes"),
        ([True], "[True] holds True; ranks are whole numbers without quotes"),
        ([1.0], "[1.0] holds 1.0; ranks are whole numbers without quotes"),
        (0, "0 is neither 'all' nor a list of ranks such as [0, 1]"),
        ("0", "'0' is neither 'all' nor a list of ranks such as [0, 1]"),
    ],
)
def test_what_is_no_list_of_ranks_is_refused(value: object, part: str) -> None:
    assert said(RANKS, value) == part


@pytest.mark.parametrize("value", ["all", [0], [3, 1]])
def test_all_or_ranks(value: object) -> None:
    assert ALL.validate_python(value) == value


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("0", "'0' is neither 'all' nor a list of ranks such as [0, 1]"),
        (None, "None is neither 'all' nor a list of ranks such as [0, 1]"),
        (0, "0 is neither 'all' nor a list of ranks such as [0, 1]"),
        ([], "[] selects no rank; write 'all', a list such as [0], or profile: false"),
        ([-2], "[-2] holds -2; ranks count from 0"),
    ],
)
def test_what_is_neither_all_nor_ranks_is_refused(value: object, part: str) -> None:
    assert said(ALL, value) == part


@pytest.mark.parametrize("value", [None, "all", [], [1, 5]])
def test_steps(value: object) -> None:
    assert STEPS.validate_python(value) == value


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        ("2-5", [2, 3, 4, 5]),
        ([2, "10-12", 20], [2, 10, 11, 12, 20]),
        (["7 - 7"], [7]),
        (("1-2", 3), [1, 2, 3]),
    ],
)
def test_ranges_of_steps_include_both_ends(value: object, steps: list[int]) -> None:
    assert STEPS.validate_python(value) == steps


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("1", "'1' is neither 'all' nor a list of steps such as [1, 10-20]"),
        (1, "1 is neither 'all' nor a list of steps such as [1, 10-20]"),
        ([0], "[0] holds 0; steps count from 1"),
        (["0-2"], "[0, 1, 2] holds 0; steps count from 1"),
        (["5-2"], "['5-2'] holds '5-2', which ends before it begins"),
        ([1, "1-2"], "[1, 1, 2] names 1 twice; name each once"),
        (["a-b"], "['a-b'] holds 'a-b'; steps are whole numbers without quotes"),
        ([2, 2], "[2, 2] names 2 twice; name each once"),
        ([True], "[True] holds True; steps are whole numbers without quotes"),
    ],
)
def test_what_is_no_choice_of_steps_is_refused(value: object, part: str) -> None:
    assert said(STEPS, value) == part


def test_editors_are_told_the_same_limits() -> None:
    schema = ProfilerConfig.model_json_schema()
    steps, ranks = (schema["properties"][name]["anyOf"] for name in ("steps", "ranks"))
    steps, ranks = steps[0], ranks[1]
    assert (steps["items"]["anyOf"][0]["minimum"], ranks["items"]["minimum"]) == (1, 0)
    block = schema["$defs"]["IntegratedConfig"]["properties"]
    assert block["profile_step_start"]["minimum"] == block["profile_step_end"]["minimum"] == 1
    listed = next(each for each in block["profile_ranks"]["anyOf"] if each.get("type") == "array")
    assert (listed["minItems"], listed["uniqueItems"]) == (1, True)


def test_a_range_of_very_many_steps_is_refused() -> None:
    assert said(STEPS, "1-999999999999").endswith("… holds more than 1,048,576 steps")


@pytest.mark.parametrize("value", [range(10**30), [*range(2**20 + 1)]])
def test_more_ranks_than_any_job_has_are_refused(value: object) -> None:
    assert said(RANKS, value).endswith(", … holds more than 1,048,576 ranks")


class Inner(Section):
    size: int = 1
    kind: str = Field(default="a")


class Outer(Section):
    inner: Inner = Field(default_factory=Inner)
    inner_list: list[Inner] = Field(default_factory=list)
    on: bool = False
    name: str | None = None


def section_said(data: object, origins: dict[str, str] | None = None) -> str:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data)
    return explain(caught.value, origins)


def test_unknown_key_names_its_place_and_a_near_match() -> None:
    expected = "inner.sizze is not a key here; did you mean 'size'? (allowed: size, kind)"
    assert section_said({"inner": {"sizze": 2}}) == expected


def test_unknown_key_without_likeness_lists_what_is_allowed() -> None:
    expected = "zzz is not a key here (allowed: inner, inner_list, on, name)"
    assert section_said({"zzz": 2}) == expected


def test_places_in_lists_are_numbered() -> None:
    assert section_said({"inner_list": [{}, {"sizze": 2}]}).startswith(
        "inner_list[1].sizze is not a key"
    )


def test_dash_is_read_as_underscore() -> None:
    assert Outer.model_validate({"inner-list": [{"size": 3}]}).inner_list[0].size == 3


def test_empty_block_means_its_defaults() -> None:
    assert Outer.model_validate({"inner": None, "inner_list": None}) == Outer()


def test_null_is_no_default_for_a_scalar() -> None:
    assert section_said({"on": None}) == "on=None should be a valid boolean; write true or false"


@pytest.mark.parametrize("value", ["yes", 1, "true"])
def test_a_switch_is_true_or_false_only(value: object) -> None:
    assert (
        section_said({"on": value})
        == f"on={value!r} should be a valid boolean; write true or false"
    )


def test_a_section_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Outer().on = True  # type: ignore[misc]


def test_what_is_no_mapping_is_refused() -> None:
    assert section_said({"inner": 3}).startswith("inner=3 is not a block of keys")


def test_several_problems_make_one_numbered_line() -> None:
    text = section_said({"on": 3, "name": 4})
    assert text.startswith("2 problems: (1) on=3 ")
    assert "; (2) name=4 should be text" in text
    assert "\n" not in text


def test_origin_of_the_key_is_named() -> None:
    assert section_said({"on": 3}, {"on": "RLPROF__ON"}).endswith("(set by RLPROF__ON)")


def test_origin_below_the_key_is_named() -> None:
    assert section_said({"on": {"x": 1}}, {"on.x": "RLPROF__ON__X"}).endswith(
        "(set by RLPROF__ON__X)"
    )


def test_long_values_are_cut() -> None:
    assert "…" in section_said({"on": "x" * 500})
    assert len(section_said({"on": "x" * 500})) < 200


def test_native_text_of_pydantic_says_the_same() -> None:
    with pytest.raises(ValidationError, match=r"sizze is not a key here; did you mean 'size'\?"):
        Outer.model_validate({"inner": {"sizze": 2}})


def test_refused_without_key_shows_the_value() -> None:
    assert refused("is wrong", [1]).message() == "[1] is wrong"
    assert refused("is wrong", [1], "inner.size").message() == "inner.size=[1] is wrong"


def test_likeness_can_be_asked_for() -> None:
    assert near("integratd", ["integrated"], 0.9) == "; did you mean 'integrated'?"
    assert near("inte", ["integrated"], 0.9) == ""


def test_a_value_gets_no_advice_on_a_key_of_its_name() -> None:
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.build(tools=["token_start"])
    assert "did you mean" not in str(caught.value)
    assert "tokens" not in str(caught.value)


def test_the_source_is_not_read_until_it_is_asked_what_keys_mean() -> None:
    made = {name: field.description for name, field in ProfilerConfig.model_fields.items()}
    assert {*made.values()} == {None}
    assert {*ProfilerConfig.meanings()} == {*made}


def test_where_only_the_compiled_module_is_installed_keys_have_no_meaning(monkeypatch) -> None:
    def missing(module: object) -> str:
        raise OSError("could not get source code")

    _texts.cache_clear()
    monkeypatch.setattr("lightning_rlprof.config.validation.inspect.getsource", missing)
    try:
        assert ProfilerConfig.meanings() == {}
        assert "steps" in ProfilerConfig.model_json_schema()["properties"]
    finally:
        _texts.cache_clear()


def test_a_key_means_what_is_below_it_also_in_a_section_that_inherits_it() -> None:
    assert ProfilerConfig.meanings()["max_file_bytes"].startswith("Bytes that the file of a rank")
    assert Outer.meanings() == {}
