from typing import Any

import pytest
from pydantic import ValidationError

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.config.roles import RoleConfig
from lightning_rlprof.config.section import explain
from lightning_rlprof.errors import ConfigError


@pytest.mark.parametrize(
    ("role", "wanted"),
    [
        (RoleConfig(), [0]),
        (RoleConfig(all_ranks=True), [0, 1, 2, 3]),
        (RoleConfig(ranks=[1, 3]), [1, 3]),
        (RoleConfig(enable=False, all_ranks=True), []),
    ],
)
def test_wanted_ranks(role: RoleConfig, wanted: list[int]) -> None:
    assert [rank for rank in range(4) if role.wants_rank(rank)] == wanted


def test_an_empty_block_means_its_defaults() -> None:
    config = ProfilerConfig.build({"steps": [1], "roles": {"actor": None}})
    assert config.roles == {"actor": RoleConfig()}


def test_all_ranks_and_ranks_contradict() -> None:
    with pytest.raises(ValidationError) as caught:
        RoleConfig(all_ranks=True, ranks=[1])
    text = "ranks=[1] contradicts all_ranks=True: give one of the two"
    assert explain(caught.value) == text


ROLES = [
    RoleConfig(),
    RoleConfig(ranks=[2]),
    RoleConfig(ranks=[1, 2]),
    RoleConfig(all_ranks=True),
    RoleConfig(enable=False, ranks=[3]),
]


@pytest.mark.parametrize("one", ROLES)
@pytest.mark.parametrize("other", ROLES)
def test_union_wants_what_either_wants(one: RoleConfig, other: RoleConfig) -> None:
    both = one.union(other)
    for rank in range(5):
        assert both.wants_rank(rank) == (one.wants_rank(rank) or other.wants_rank(rank))
    assert both.enable == (one.enable or other.enable)


def test_union_keeps_discrete() -> None:
    one = RoleConfig(discrete=True, ranks=[1])
    assert one.union(RoleConfig(discrete=True)).discrete is True
    assert one.union(RoleConfig(discrete=True, all_ranks=True)).discrete is True


def test_union_refuses_different_discrete() -> None:
    with pytest.raises(ConfigError, match="discrete=True and discrete=False share a process"):
        RoleConfig(discrete=True).union(RoleConfig(discrete=False))


def test_a_role_that_is_off_has_no_say_about_discrete() -> None:
    off = RoleConfig(enable=False, discrete=True)
    assert off.union(RoleConfig(discrete=False)).discrete is False
    assert RoleConfig(discrete=False).union(off).discrete is False


@pytest.mark.parametrize(
    "off", [{"integrated": {"profile": False}}, {"steps": []}, {"steps": [1], "tools": []}]
)
def test_roles_that_cannot_share_a_capture_may_be_off(off: dict[str, Any]) -> None:
    roles = {"actor": {"discrete": False}, "rollout": {"discrete": True}}
    config = ProfilerConfig.build({"roles": roles, **off})
    assert not config.captures
    assert not config.wants_rank(0)
    with pytest.raises(ConfigError, match="discrete=False and discrete=True share"):
        ProfilerConfig.build({"roles": roles, "steps": [1]})
