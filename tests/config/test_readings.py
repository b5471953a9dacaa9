from typing import Any

import pytest

from lightning_rlprof.config.readings import (
    contents,
    either,
    interval,
    npu_contents,
    stages,
    union,
)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ([0, 1], [1, 2], [0, 1, 2]),
        ([], [3], [3]),
        ([1], [], [1]),
        ([1, 1], [2], [1, 1, 2]),  # named twice stays so, to be refused
        ("0,1", [1], "0,1"),
        ([1], 3, 3),
    ],
)
def test_ranks_of_two_roles_are_united_and_what_is_no_list_is_kept(
    one: Any, other: Any, both: Any
) -> None:
    assert union(one, other) == both


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [(False, True, True), (True, False, True), (False, False, False), (False, "yes", "yes")],
)
def test_a_switch_of_two_roles_is_on_where_one_is(one: Any, other: Any, both: Any) -> None:
    assert either(one, other) == both


@pytest.mark.parametrize(
    ("read", "key", "other"),
    [
        (contents, "torch_profiler.with_stack", "npu.with_stack"),
        (npu_contents, "npu.with_stack", "torch_profiler.with_stack"),
    ],
)
def test_stacks_are_those_of_the_tool(read: Any, key: str, other: str) -> None:
    assert read(["cpu", "stack"])[key] is True
    assert read(["cpu"])[key] is False
    assert other not in read(["cpu", "stack"])


def test_empty_contents_say_nothing() -> None:
    assert contents([]) == npu_contents([]) == {}


def test_details_alone_leave_host_and_device_as_they_are() -> None:
    assert "integrated.profile_with_cpu" not in contents(["shapes"])


def test_what_has_another_form_is_left_to_validation() -> None:
    assert interval([1]) == {"steps": [1]}
    assert interval([True, 2]) == {"steps": [True, 2]}
    assert stages("all") == {"integrated.stage": "all"}
    assert stages([3, "rollout_generate"]) == {"integrated.stage": [3, "actor_generate"]}
