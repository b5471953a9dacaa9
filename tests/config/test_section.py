import pytest
from pydantic import Field, ValidationError

from lightning_rlprof.config.section import Section, explain, near, refused


class Inner(Section):
    size: int = 1
    kind: str = Field(default="a")


class Outer(Section):
    inner: Inner = Field(default_factory=Inner)
    inner_list: list[Inner] = Field(default_factory=list)
    on: bool = False
    name: str | None = None


def said(data: object, origins: dict[str, str] | None = None) -> str:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data)
    return explain(caught.value, origins)


def test_unknown_key_names_its_place_and_a_near_match() -> None:
    expected = "inner.sizze is not a key here; did you mean 'size'? (allowed: size, kind)"
    assert said({"inner": {"sizze": 2}}) == expected


def test_unknown_key_without_likeness_lists_what_is_allowed() -> None:
    expected = "zzz is not a key here (allowed: inner, inner_list, on, name)"
    assert said({"zzz": 2}) == expected


def test_places_in_lists_are_numbered() -> None:
    assert said({"inner_list": [{}, {"sizze": 2}]}).startswith("inner_list[1].sizze is not a key")


def test_dash_is_read_as_underscore() -> None:
    assert Outer.model_validate({"inner-list": [{"size": 3}]}).inner_list[0].size == 3


def test_empty_block_means_its_defaults() -> None:
    assert Outer.model_validate({"inner": None, "inner_list": None}) == Outer()


def test_null_is_no_default_for_a_scalar() -> None:
    assert said({"on": None}) == "on=None should be a valid boolean; write true or false"


@pytest.mark.parametrize("value", ["yes", 1, "true"])
def test_a_switch_is_true_or_false_only(value: object) -> None:
    assert said({"on": value}) == f"on={value!r} should be a valid boolean; write true or false"


def test_a_section_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Outer().on = True  # type: ignore[misc]


def test_what_is_no_mapping_is_refused() -> None:
    assert said({"inner": 3}).startswith("inner=3 should be a valid dictionary")


def test_several_problems_make_one_numbered_line() -> None:
    text = said({"on": 3, "name": 4})
    assert text.startswith("2 problems: (1) on=3 ")
    assert "; (2) name=4 should be a valid string" in text
    assert "\n" not in text


def test_origin_of_the_key_is_named() -> None:
    assert said({"on": 3}, {"on": "RLPROF__ON"}).endswith("(set by RLPROF__ON)")


def test_origin_below_the_key_is_named() -> None:
    assert said({"on": {"x": 1}}, {"on.x": "RLPROF__ON__X"}).endswith("(set by RLPROF__ON__X)")


def test_long_values_are_cut() -> None:
    assert "…" in said({"on": "x" * 500})
    assert len(said({"on": "x" * 500})) < 200


def test_native_text_of_pydantic_says_the_same() -> None:
    with pytest.raises(ValidationError, match=r"sizze is not a key here; did you mean 'size'\?"):
        Outer.model_validate({"inner": {"sizze": 2}})


def test_refused_without_key_shows_the_value() -> None:
    assert refused("is wrong", [1]).message() == "[1] is wrong"
    assert refused("is wrong", [1], "inner.size").message() == "inner.size=[1] is wrong"


def test_likeness_can_be_asked_for() -> None:
    assert near("integratd", ["integrated"], 0.9) == "; did you mean 'integrated'?"
    assert near("inte", ["integrated"], 0.9) == ""
