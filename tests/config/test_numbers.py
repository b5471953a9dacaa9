import pytest
from pydantic import TypeAdapter, ValidationError

from lightning_rlprof.config.numbers import AllOrRanks, RankList, Steps
from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.config.section import explain

RANKS: TypeAdapter[list[int]] = TypeAdapter(RankList)
ALL: TypeAdapter[object] = TypeAdapter(AllOrRanks)
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
        ([1, 0, 1], "[1, 0, 1] names 1 twice"),
        (["0"], "['0'] holds '0'; ranks are whole numbers without quotes"),
        ([True], "[True] holds True; ranks are whole numbers without quotes"),
        ([1.0], "[1.0] holds 1.0; ranks are whole numbers without quotes"),
        (0, "0 is no list of ranks; write [0, 1]"),
        ("0", "'0' is no list of ranks; write [0, 1]"),
        ({0, "a"}, "[0, 'a'] holds 'a'; ranks are whole numbers without quotes"),
        ({None, 1}, "[None, 1] holds None; ranks are whole numbers without quotes"),
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
        (0, "0 is no list of ranks; write [0, 1]"),
        ([], "[] captures no rank; write 'all', a list such as [0], or profile: false"),
        ([-2], "[-2] holds -2; ranks count from 0"),
    ],
)
def test_what_is_neither_all_nor_ranks_is_refused(value: object, part: str) -> None:
    assert said(ALL, value) == part


@pytest.mark.parametrize("value", [None, "all", [], [1, 5]])
def test_steps(value: object) -> None:
    assert STEPS.validate_python(value) == value


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("1", "'1' is neither 'all' nor a list of steps such as [1, 2]"),
        (1, "1 is no list of steps; write [1, 2]"),
        ([0], "[0] holds 0; steps count from 1"),
        ([2, 2], "[2, 2] names 2 twice"),
        ([True], "[True] holds True; steps are whole numbers without quotes"),
    ],
)
def test_what_is_no_choice_of_steps_is_refused(value: object, part: str) -> None:
    assert said(STEPS, value) == part


def test_editors_are_told_the_same_limits() -> None:
    schema = ProfilerConfig.model_json_schema()
    steps, ranks = (schema["properties"][name]["anyOf"][0] for name in ("steps", "ranks"))
    assert (steps["items"]["minimum"], ranks["items"]["minimum"]) == (1, 0)
    block = schema["$defs"]["IntegratedConfig"]["properties"]
    assert block["profile_step_start"]["minimum"] == block["profile_step_end"]["minimum"] == 1
    listed = next(each for each in block["profile_ranks"]["anyOf"] if each.get("type") == "array")
    assert (listed["minItems"], listed["uniqueItems"]) == (1, True)


@pytest.mark.parametrize("value", [range(10**30), [*range(2**20 + 1)]])
def test_more_ranks_than_any_job_has_are_refused(value: object) -> None:
    assert said(RANKS, value).endswith(", … holds more than 1,048,576 ranks")
