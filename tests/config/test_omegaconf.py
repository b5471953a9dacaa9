import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from lightning_rlprof.config.blocks import RoleConfig
from lightning_rlprof.config.omegaconf import escaped, plain, resolvable, resolving
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError


def test_omegas_mappings_become_dicts_and_lists() -> None:
    data = OmegaConf.create({"a": [1, {"b": "${c}"}], "c": 3})
    result = plain(data)
    assert result == {"a": [1, {"b": 3}], "c": 3}
    assert type(result["a"]) is list
    assert type(result["a"][1]) is dict


def test_a_model_gives_what_was_set() -> None:
    assert plain({"r": RoleConfig(ranks=[1])}) == {"r": {"ranks": [1]}}


@pytest.mark.parametrize("value", ["text", b"bytes", range(2), 3, None, {1}])
def test_other_values_stay(value: object) -> None:
    assert plain(value) is value


def test_references_in_a_plain_mapping_are_resolved() -> None:
    data = resolvable({"a": {"b": "${oc.select:c,7}"}, "c": 3}, {"a"})
    assert plain(data["a"]) == {"b": 3}


def test_a_mapping_without_references_is_itself() -> None:
    data = {"a": 1}
    assert resolvable(data, data) is data
    omega: Any = OmegaConf.create({"a": "${b}", "b": 1})
    assert resolvable(omega, omega) is omega


@pytest.mark.parametrize("text", ["a ${ b", "${root}/x", "${missing:1}"])
def test_references_where_nothing_is_looked_at_are_left_alone(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib, "import_module", None)  # nor is OmegaConf needed for them
    for block in ({"profiler_config": {"steps": [2]}}, {"trainer": {"profile_steps": [2]}}):
        assert ProfilerConfig.build({"data": {"template": text}, **block}).steps == [2]


def test_a_date_beside_a_reference_is_text(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "trainer: {name: 2025-01-01, dir: runs, more: [2025-01-02 03:04:05]}\n"
        "profiler_config: {integrated: {profile_save_path: '${trainer.dir}/${trainer.name}'}}\n"
    )
    assert ProfilerConfig.build(path).integrated.profile_save_path == "runs/2025-01-01"


MODEL = r"models/\${HOME}/${role}"


@pytest.mark.parametrize("text", [r"\${a}", r"b\\\${a}", r"\${a} \${b}"])
def test_what_is_escaped_is_text_once_and_again(text: str) -> None:
    once = plain(OmegaConf.create({"x": [{"y": text}], "z": 1}))
    assert "${a}" in once["x"][0]["y"]
    assert plain(OmegaConf.create(escaped(once))) == once


def test_an_escaped_reference_in_any_source_is_text(tmp_path: Path) -> None:
    data = {"role": "actor", "model": MODEL}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    config = ProfilerConfig.build(path)
    assert config.model == "models/${HOME}/actor"
    assert ProfilerConfig.build(None, **data) == config
    assert ProfilerConfig.build(OmegaConf.create(data)) == config  # type: ignore[arg-type]
    assert ProfilerConfig.build(config.dump()) == config
    assert ProfilerConfig.build(config, role="critic").model == config.model


def test_without_omegaconf_references_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=r"refers to other keys by .* load it with OmegaConf"):
        resolvable({"a": "${b}"}, {"a"})


@pytest.mark.parametrize("value", ["${nowhere}", "???"])
def test_what_cannot_be_resolved_is_one_line(value: str) -> None:
    with (
        pytest.raises(ConfigError, match="cannot resolve the configuration") as caught,
        resolving(),
    ):
        plain(OmegaConf.create({"a": value}))
    assert "\n" not in str(caught.value)


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), resolving():
        raise KeyError("x")
