import pickle
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError

build = ProfilerConfig.build


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, []),
        ({"profile": True}, [1]),
        ({"profile": False, "steps": [2]}, []),
        ({"profile_step_start": 2, "profile_step_end": 4}, [2, 3]),
        ({"steps": [1, 5]}, [1, 5]),
        ({"steps": [1, 5], "profile_step_start": 2, "profile_step_end": 4}, [1, 5]),
        ({"steps": "all"}, [1, 2, 3, 4, 5]),
        ({"steps": []}, []),
    ],
)
def test_wanted_steps(keys: dict[str, Any], wanted: list[int]) -> None:
    assert [step for step in range(-1, 6) if build(**keys).wants_step(step)] == wanted


@pytest.mark.parametrize(
    ("keys", "last"),
    [
        ({}, 0),
        ({"profile": False, "steps": [2]}, 0),
        ({"profile": True}, 1),
        ({"profile_step_start": 2, "profile_step_end": 4}, 3),
        ({"steps": [5, 1]}, 5),
        ({"steps": "all"}, None),
    ],
)
def test_last_step(keys: dict[str, Any], last: int | None) -> None:
    assert build(**keys).last_step == last


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, []),
        ({"profile": True}, [0, 1, 2, 3]),
        ({"profile": False, "ranks": [1]}, []),
        ({"profile_ranks": "all"}, [0, 1, 2, 3]),
        ({"profile_ranks": [1]}, [1]),
        ({"ranks": [1, 3]}, [1, 3]),
        ({"ranks": []}, [0]),
        ({"ranks": "all"}, [0, 1, 2, 3]),
        ({"roles": {"actor": {}}}, [0]),
        ({"roles": {"actor": {"ranks": [1]}, "critic": {"ranks": [2]}}}, [1, 2]),
        ({"roles": {"actor": {"ranks": [1]}, "critic": {"ranks": [2]}}, "role": "critic"}, [2]),
        ({"roles": {"actor": {"ranks": [1]}}, "role": "critic"}, []),
        ({"roles": {"actor": {"ranks": [1]}}, "profile": False}, []),
    ],
)
def test_wanted_ranks(keys: dict[str, Any], wanted: list[int]) -> None:
    assert [rank for rank in range(4) if build(**keys).wants_rank(rank)] == wanted


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, []),
        ({"profile": True}, ["actor_update", "actor", "mine"]),
        ({"stage": "actor_update"}, ["actor_update"]),
        ({"stage": ["mine", "weight_sync"], "custom_stages": ["mine"]}, ["mine"]),
        ({"stage": "actor_update", "profile": False}, []),
    ],
)
def test_wanted_stages(keys: dict[str, Any], wanted: list[str]) -> None:
    config = build(**keys)
    assert [
        name for name in ("actor_update", "actor", "mine") if config.wants_stage(name)
    ] == wanted


@pytest.mark.parametrize(
    ("keys", "joins"),
    [
        ({}, True),
        ({"profile_step_end": 4}, True),
        ({"profile_step_end": 4, "profile_continuous_steps": False}, False),
        ({"steps": [1, 2]}, False),
        ({"steps": "all"}, False),
        ({"steps": [1, 2], "profile_continuous_steps": True}, True),
        ({"profile_step_end": 4, "stage": "actor_update"}, False),
        ({"profile_step_end": 4, "discrete": True}, False),
    ],
)
def test_joining_of_steps(keys: dict[str, Any], joins: bool) -> None:
    assert build(**keys).joins_steps is joins


def test_lightweight_is_that_of_the_block() -> None:
    config = build(mstx=True, profile_level="level_none", profile_with_cpu=False)
    assert config.integrated.lightweight
    assert config.captures
    assert not build(mstx=True).integrated.lightweight


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"profile": True}, ""),
        ({}, "integrated.profile is false, or no capture option was given"),
        ({"steps": []}, "no steps are chosen"),
        ({"tools": []}, "tools is an empty list"),
        (
            {"roles": {"a": {"enable": False}}},
            "no role is enabled (a): set enable or ranks of one",
        ),
        (
            {"roles": {"actor": {}}, "role": "actr"},
            "role 'actr' is not enabled in roles; did you mean 'actor'?",
        ),
        (
            {"roles": {"actor": {}, "critic": {"enable": False}}, "role": "critic"},
            "role 'critic' is not enabled in roles",
        ),
    ],
)
def test_why_nothing_is_captured(keys: dict[str, Any], why: str) -> None:
    assert build(**keys).why_off == why


@pytest.mark.parametrize(
    ("keys", "runs_on"),
    [
        ({}, [0]),
        ({"profile": True}, [0, 1, 2, 3]),
        ({"ranks": [1, 2]}, [1, 2]),
        ({"ranks": [1], "profile": False}, [0]),
        ({"roles": {"actor": {"ranks": [1]}, "critic": {"ranks": [2]}}}, [1, 2]),
        ({"roles": {"actor": {"ranks": [1]}}, "role": "critic"}, []),
    ],
)
def test_ranks_of_the_finish_hook(keys: dict[str, Any], runs_on: list[int]) -> None:
    assert [rank for rank in range(4) if build(**keys).wants_finish(rank)] == runs_on


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"ranks": [0, 2]}, "ranks: [0, 2]"),
        ({"profile_ranks": [2]}, "integrated.profile_ranks: [2]"),
        ({"roles": {"a": {"ranks": [2]}}}, "roles: [2]"),
        ({"roles": {"a": {"ranks": [2]}, "b": {}}, "role": "a"}, "roles: [2]"),
    ],
)
def test_a_rank_that_the_training_does_not_have_is_refused(keys: dict[str, Any], key: str) -> None:
    config = build(**keys)
    config.check_world(3)
    with pytest.raises(ConfigError) as caught:
        config.check_world(2)
    expected = f"{key} holds rank 2, but this training has 2 (allowed: 0 to 1)"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"ranks": [9], "profile": False},
        {"ranks": "all"},
        {"profile": True},
        {"roles": {"a": {"ranks": [9]}, "b": {}}, "role": "b"},
        {"roles": {"a": {"ranks": [9], "enable": False}, "b": {}}},
        {"roles": {"a": {"ranks": [9]}}, "role": "elsewhere"},
    ],
)
def test_ranks_that_do_not_count_here_are_not_checked(keys: dict[str, Any]) -> None:
    build(**keys).check_world(1)


def test_a_relative_path_starts_where_the_configuration_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path)
    config = build(profile_save_path="runs")
    monkeypatch.chdir(tmp_path / "later")
    assert (config.save_path, config.integrated.profile_save_path) == (tmp_path / "runs", "runs")
    again = [pickle.loads(pickle.dumps(config)), ProfilerConfig.build(config, stage="actor_update")]
    assert {each.save_path for each in again} == {tmp_path / "runs"}
    assert config.located("model.json") == tmp_path / "model.json"
    for path in (str(tmp_path), "~/runs"):
        assert build(profile_save_path=path).save_path == Path(path).expanduser()


@pytest.mark.parametrize("exists", [True, False])
def test_a_relative_path_starts_where_rlprof_run_was_typed(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed_in = tmp_path / "typed"
    if exists:  # on another host it may not
        typed_in.mkdir()
    monkeypatch.setenv("RLPROF_FOLDER", str(typed_in))
    monkeypatch.chdir(tmp_path)
    assert build().save_path == (typed_in if exists else tmp_path) / "profiler_data"


def test_in_a_folder_that_is_gone_only_absolute_paths_have_a_meaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert build(profile_save_path="/runs").save_path == Path("/runs")
