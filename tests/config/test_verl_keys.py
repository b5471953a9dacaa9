from fnmatch import fnmatch
from typing import Any

import pytest

from lightning_rlprof.config.blocks import RoleConfig
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.validation import Section
from lightning_rlprof.config.verl import (
    ANYTHING,
    BLOCKS,
    ROLE,
    ROLES,
    SPELLINGS,
    TOOLS,
    contents,
    interval,
    lookup,
    npu_contents,
    stages,
)


@pytest.mark.parametrize("read", [contents, npu_contents])
def test_stacks_are_recorded_where_contents_name_them(read: Any) -> None:
    assert read(["cpu", "stack"])["with_stack"] is True
    assert read(["cpu"])["with_stack"] is False


def test_empty_contents_say_nothing() -> None:
    assert contents([]) == npu_contents([]) == {}


def test_details_alone_leave_host_and_device_as_they_are() -> None:
    assert "integrated.profile_with_cpu" not in contents(["shapes"])


def test_what_has_another_form_is_left_to_validation() -> None:
    assert interval([1]) == {"steps": [1]}
    assert interval([True, 2]) == {"steps": [True, 2]}
    assert stages("all") == {"integrated.stage": "all"}
    assert stages([3, "rollout_generate"]) == {"integrated.stage": [3, "actor_generate"]}


def exists(dotted: str) -> bool:
    section: Any = ProfilerConfig
    *above, last = dotted.removeprefix(f"roles.{ROLE}.").split(".")
    if dotted.startswith("roles."):
        section = RoleConfig
    for name in above:
        section = section.model_fields[name].annotation
        assert issubclass(section, Section), dotted
    return any(name == last or fnmatch(name, last) for name in section.model_fields)


def test_every_key_of_ours_in_the_table_exists() -> None:
    for row in SPELLINGS:
        assert all(map(exists, filter(None, row.ours.split(", ")))), row
    assert [key for keys in TOOLS.values() for key in keys if not exists(key)] == []


def test_no_key_of_theirs_is_there_twice() -> None:
    theirs = [row.theirs for row in SPELLINGS]
    assert len(theirs) == len(set(theirs))


def test_a_key_that_is_not_in_the_configuration_is_found() -> None:
    assert exists(f"roles.{ROLE}.discrete")
    assert exists("torch_profiler.schedule.active")
    assert not exists("torch_profiler.schedule.actives")
    assert not exists(f"roles.{ROLE}.steps")


def test_a_row_has_ours_or_says_what_it_accepts() -> None:
    for row in SPELLINGS:
        assert not (row.ours and row.accepts == ANYTHING), row
        assert row.accepts == ANYTHING or isinstance(row.accepts, tuple), row
        assert row.tool in (None, *TOOLS), row


def test_lookup_finds_rows_and_whole_blocks() -> None:
    found = lookup(f"{ROLE}.profiler.tool_config.precision_debugger.strict")
    assert found
    assert found.accepts == ANYTHING
    assert lookup("trainer.profile_stepz") is None


def test_blocks_are_the_places_that_hold_keys() -> None:
    assert {"global_profiler.global_tool_config", f"{ROLE}.profiler.tool_config.torch"} <= BLOCKS
    assert not {row.theirs for row in SPELLINGS} & BLOCKS


def test_the_shared_block_comes_before_the_roles_own() -> None:
    places = list(ROLES)
    assert places.index("actor_rollout_ref") < places.index("actor_rollout_ref.actor")
