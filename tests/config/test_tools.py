from typing import Any

import pytest
from pydantic import ValidationError

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.config.section import explain
from lightning_rlprof.config.tools import (
    FinishConfig,
    MemoryConfig,
    ScheduleConfig,
    TorchProfilerConfig,
)
from lightning_rlprof.errors import ConfigError


def said(section: Any, **keys: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        section(**keys)
    return explain(caught.value)


def test_defaults() -> None:
    schedule = {"skip_first": 0, "wait": 0, "warmup": 0, "active": 0, "repeat": 0}
    assert ScheduleConfig().model_dump() == schedule
    assert TorchProfilerConfig().model_dump() == {
        "with_stack": False,
        "schedule": schedule,
        "max_events": 20_000_000,
        "max_host_bytes": None,
    }
    memory = {"level": None, "interval_ms": 10.0, "max_entries": 100_000, "stack_depth": 32}
    assert MemoryConfig().model_dump() == memory
    finish = {"command": None, "timeout_s": 600.0, "all_ranks": False, "ranks": None}
    assert FinishConfig().model_dump() == finish


# The dotted key, what it is without being given, the text of a variable, and what it is then.
OPTIONS: list[tuple[str, Any, str, Any]] = [
    ("torch_profiler.with_stack", False, "true", True),
    ("torch_profiler.schedule.active", 0, "2", 2),
    ("torch_profiler.max_events", 20_000_000, "1000", 1000),
    ("torch_profiler.max_host_bytes", None, "1000", 1000),
    ("memory.level", None, "timeline", "timeline"),
    ("on_finish.command", None, "upload.sh now", ["upload.sh", "now"]),
    ("on_finish.timeout_s", 600.0, "2", 2.0),
    ("on_finish.all_ranks", False, "true", True),
    ("on_finish.ranks", None, "[0, 8]", [0, 8]),
    ("nsight.collect", True, "false", False),
    ("nsight.reports", None, "/data/reports", "/data/reports"),
    ("nsight.wait_s", 30.0, "0", 0.0),
    ("device_time", None, "false", False),
    ("tools", None, "[nsight]", ["nsight"]),
]


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("key", "default", "text", "value"), OPTIONS)
def test_every_option_has_a_default_and_can_be_changed(
    key: str, default: Any, text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert value_of(ProfilerConfig.build(), key) == default
    monkeypatch.setenv(f"RLPROF__{key.replace('.', '__').upper()}", text)
    changed = ProfilerConfig.build()
    assert value_of(changed, key) == value
    assert ProfilerConfig.build(changed.dump()) == changed


@pytest.mark.parametrize("key", ["skip_first", "wait", "warmup", "repeat"])
def test_a_schedule_needs_active(key: str) -> None:
    assert getattr(ScheduleConfig(**{"active": 1, key: 3}), key) == 3
    text = f"{key}=3 needs active above 0: without it there is no schedule"
    assert said(ScheduleConfig, **{key: 3}) == text


@pytest.mark.parametrize(
    ("key", "value", "level"),
    [
        ("interval_ms", 5.0, "timeline"),
        ("max_entries", 7, "snapshot"),
        ("stack_depth", 8, "snapshot"),
    ],
)
def test_how_memory_is_watched_needs_a_level(key: str, value: float, level: str) -> None:
    for given in ("counters", "timeline", "snapshot"):
        assert getattr(MemoryConfig.model_validate({"level": given, key: value}), key) == value
    expected = f"{key}={value} needs a level, such as level: {level}"
    assert said(MemoryConfig, **{key: value}) == expected
    assert MemoryConfig(**MemoryConfig().model_dump()) == MemoryConfig()


@pytest.mark.parametrize(
    ("section", "keys", "part"),
    [
        (ScheduleConfig, {"active": -1}, "active=-1 should be greater than or equal to 0"),
        (ScheduleConfig, {"active": True}, "active=True should be a valid integer"),
        (ScheduleConfig, {"warm_up": 1}, "warm_up is not a key here; did you mean 'warmup'?"),
        (TorchProfilerConfig, {"with_stack": 1}, "with_stack=1 should be a valid boolean"),
        (TorchProfilerConfig, {"stack": True}, "stack is not a key here; did you mean 'with_st"),
        (TorchProfilerConfig, {"max_events": 0}, "max_events=0 should be greater than 0"),
        (TorchProfilerConfig, {"max_host": 1}, "max_host is not a key here; did you mean 'max_h"),
        (TorchProfilerConfig, {"schedule": {"wait": 1}}, "schedule.wait=1 needs active above 0"),
        (MemoryConfig, {"level": "snapshots"}, "level='snapshots' should be 'counters', 'timel"),
        (MemoryConfig, {"interval_s": 1}, "interval_s is not a key here; did you mean 'interval_"),
        (MemoryConfig, {"interval_ms": 0}, "interval_ms=0 should be greater than 0"),
        (MemoryConfig, {"interval_ms": "10"}, "interval_ms='10' should be a valid number"),
        (MemoryConfig, {"max_entries": 0}, "max_entries=0 should be greater than 0"),
        (MemoryConfig, {"stack_depth": 1.5}, "stack_depth=1.5 should be a valid integer"),
        (FinishConfig, {"cmd": "a"}, "cmd is not a key here"),
        (FinishConfig, {"commands": "a"}, "commands is not a key here; did you mean 'command'?"),
        (FinishConfig, {"command": "a | b"}, "command='a | b' holds '|', which only a shell und"),
        (FinishConfig, {"command": ["a", 1]}, "command[1]=1 should be a valid string"),
        (FinishConfig, {"timeout": 1}, "timeout is not a key here; did you mean 'timeout_s'?"),
        (FinishConfig, {"timeout_s": 0}, "timeout_s=0 should be greater than 0"),
        (FinishConfig, {"timeout_s": float("inf")}, "timeout_s=inf should be a finite number"),
        (FinishConfig, {"timeout_s": True}, "timeout_s=True should be a valid number"),
        (FinishConfig, {"ranks": [-1]}, "ranks=[-1] holds -1; ranks count from 0"),
        (FinishConfig, {"ranks": "0,1"}, "ranks='0,1' is no list of ranks; write [0, 1]"),
        (
            FinishConfig,
            {"all_ranks": True, "ranks": [1]},
            "ranks=[1] contradicts all_ranks=True: give one of the two",
        ),
    ],
)
def test_bad_input_names_its_key(section: Any, keys: dict[str, Any], part: str) -> None:
    assert said(section, **keys).startswith(part)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("torch_profiler.schedule.actives", "active"),
        ("memory.levels", "level"),
        ("on_finish.rank", "ranks"),
        ("nsight.colect", "collect"),
    ],
)
def test_a_near_match_is_offered_below_the_dotted_key(key: str, near: str) -> None:
    nested: Any = 1
    for part in reversed(key.split(".")):
        nested = {part: nested}
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.build(nested)
    assert str(caught.value).startswith(f"{key} is not a key here; did you mean '{near}'?")
