"""YAML of files and of variables: what YAML itself would let pass in silence is refused."""

from pathlib import Path

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.sources import from_environment, read
from lightning_rlprof.errors import ConfigError


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("integrated:\n  profile: true\n  profile: false\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"profile is set twice .* line 2"):
        read(path)


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}"])
def test_what_holds_itself_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="contains itself: check its aliases"):
        read(path)


@pytest.mark.parametrize("depth", [100, 3000])
@pytest.mark.parametrize("bracket", ["[", "{a: "])
def test_what_is_nested_without_end_is_one_line(bracket: str, depth: int, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    close = "]" if bracket == "[" else "}"
    path.write_text(f"steps: {bracket * depth}{close * depth}", encoding="utf-8")
    with pytest.raises(ConfigError, match="nested too deep" if depth > 100 else "steps=") as caught:
        ProfilerConfig.build(path)
    assert "\n" not in str(caught.value)


def test_aliases_that_multiply_are_refused_and_merged_keys_are_not(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    lines = [
        "a0: &a0 [1]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)),
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match="more than 10,000 values"):
        read(path)
    path.write_text("x: &x {steps: [1]}\ny: {<<: *x, all_ranks: true}\n", encoding="utf-8")
    assert read(path)["y"] == {"steps": [1], "all_ranks": True}


@pytest.mark.parametrize(
    ("text", "why"),
    [("{stage: all, stage: step}", "stage is set twice in line 1"), ("&a [*a]", "contains itself")],
)
def test_the_yaml_of_a_variable_is_held_to_the_same(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment({"RLPROF__INTEGRATED": text}, tuple(ProfilerConfig.model_fields))
    assert str(caught.value).startswith(f"RLPROF__INTEGRATED='{text}' ")
    assert why in str(caught.value)
