"""docs/config.md is written from the configuration and its examples are true."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml

from lightning_rlprof.config.blocks import (
    IntegratedConfig,
    RoleConfig,
    ScheduleConfig,
)
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.stages import WrapRule
from lightning_rlprof.config.validation import Section
from lightning_rlprof.config.verl import SPELLINGS
from tests.places import ROOT

DOCS = ROOT / "docs"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)
    spec = importlib.util.spec_from_file_location("generate_config", DOCS / "generate_config.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def examples() -> list[Any]:
    text = (DOCS / "config.md").read_text(encoding="utf-8")
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


def sections_below(section: type[Section]) -> set[type[Section]]:
    """Return a section and every one that its keys hold, in lists and mappings too."""
    found = {section}
    asked = [field.annotation for field in section.model_fields.values()]
    while asked:
        kind = asked.pop()
        asked += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= sections_below(kind)
    return found


def test_the_page_is_fresh(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0


def test_a_stale_page_is_told_and_rewritten(
    generator: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "config.md"
    monkeypatch.setattr(generator, "PAGE", page)
    assert generator.main(["--check"]) == 1
    page.write_text("old", encoding="utf-8")
    assert generator.main(["--check"]) == 1
    assert "config.md is stale: python docs/generate_config.py" in capsys.readouterr().err
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0


def test_every_key_is_on_the_page(generator: ModuleType) -> None:
    text = generator.page()
    sections = sections_below(ProfilerConfig)
    assert {IntegratedConfig, RoleConfig, WrapRule, ScheduleConfig} <= sections
    assert sections == {section for _, _, section in generator.SECTIONS}
    for name in (name for section in sections for name in section.model_fields):
        assert f"| `{name}` |" in text
    for row in SPELLINGS:
        assert f"| `{row.theirs}` |" in text


def test_there_are_examples() -> None:
    assert len(examples()) >= 9


@pytest.mark.parametrize("number", range(len(examples())))
def test_an_example_is_a_configuration(number: int) -> None:
    config = ProfilerConfig.build(examples()[number])
    assert config.captures or number == 0 or config.wrap
