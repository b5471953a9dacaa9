"""docs/migrate/keys.md: each of its rows is fed to ``rlprof config check``, which must agree."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from lightning_rlprof.config.blocks import IntegratedConfig
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.sources import merge
from lightning_rlprof.config.verl import ROLE, SPELLINGS
from tests.cli.conftest import rlprof  # noqa: F401
from tests.places import ROOT

PAGE = (ROOT / "docs" / "migrate" / "keys.md").read_text(encoding="utf-8")
ACTOR = "actor_rollout_ref.actor"
MINDSPEED = "profiler_config.integrated"
Run = Callable[..., tuple[int, str, str]]


class Row(NamedTuple):
    """One key of the page, in the configuration of its section."""

    key: str
    answer: str
    ours: dict[str, Any]
    file: dict[str, Any]


def _rows() -> list[Row]:
    found = []
    for section in PAGE.split("\n## ")[1:]:
        base = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
        assert base, section[:40]
        for key, example, answer, cell in re.findall(
            r"^\| `([^`]+)` \| `([^`]+)` \| ([a-z ]+) \| (.*) \|$", section, re.MULTILINE
        ):
            value = yaml.safe_load(example)
            for part in reversed(key.replace(ROLE, ACTOR).split(".")):
                value = {part: value}
            words = cell.partition(";")[0] if answer == "ours" else ""
            said = [yaml.safe_load(text) for text in re.findall(r"`([^`]+)`", words)]
            ours = {each: value for one in said for each, value in one.items()}
            file = merge(yaml.safe_load(base[1]), value)
            found.append(Row(key.replace(ROLE, ACTOR), answer, ours, file))
    return found


ROWS = _rows()


def of(*answers: str) -> list[Any]:
    return [pytest.param(row, id=row.key) for row in ROWS if row.answer in answers]


@pytest.fixture
def check(rlprof: Run, tmp_path: Path) -> Callable[[Row], tuple[int, dict[str, Any], str]]:  # noqa: F811
    def run(row: Row) -> tuple[int, dict[str, Any], str]:
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump(row.file))
        status, out, err = rlprof("config", "check", path, "--json")
        return status, json.loads(out or "{}"), err

    return run


Check = Callable[[Row], tuple[int, dict[str, Any], str]]


def at(data: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        data = data[part]
    return data


def test_the_page_has_every_key_of_both_frameworks() -> None:
    keys = {row.key for row in ROWS}
    missing = [f"{MINDSPEED}.{name}" for name in IntegratedConfig.model_fields]
    missing += [row.theirs.replace(ROLE, ACTOR) for row in SPELLINGS]
    missing = [key for key in missing if key not in keys and not key.endswith("*")]
    assert missing == []
    groups = [row.theirs.replace(ROLE, ACTOR)[:-1] for row in SPELLINGS if row.theirs[-1] == "*"]
    assert [each for each in groups if not any(key.startswith(each) for key in keys)] == []


def test_every_row_has_one_of_the_four_answers() -> None:
    assert PAGE.count("\n| `") == len(ROWS)
    assert {row.answer for row in ROWS} == {"same", "ours", "no meaning", "refused"}


@pytest.mark.parametrize("row", of("same"))
def test_a_key_that_is_the_same_means_the_same(row: Row, check: Check) -> None:
    status, answers, err = check(row)
    name = row.key.removeprefix("profiler_config.")
    value = at(row.file, row.key)
    assert (status, err) == (0, "")
    assert answers[f"key {name}"] == f"{name} = {json.dumps(value)}"
    assert at(ProfilerConfig.build(row.file).dump(), name) == value


@pytest.mark.parametrize("row", of("ours"))
def test_a_key_of_ours_has_the_effect_that_the_page_claims(row: Row, check: Check) -> None:
    status, answers, err = check(row)
    assert (status, err) == (0, "")
    assert row.ours
    dumped = ProfilerConfig.build(row.file).dump()
    assert {key: at(dumped, key) for key in row.ours} == row.ours
    for key in row.ours:
        name = ".".join(key.split(".")[:2]) if key.startswith("nsight.") else key
        assert f"{name} = " in answers[f"key {row.key}"]


@pytest.mark.parametrize("row", of("no meaning"))
def test_a_key_without_meaning_is_listed_by_the_check(row: Row, check: Check) -> None:
    status, answers, err = check(row)
    assert (status, err) == (0, "")
    assert row.key in re.split(r"[, ]+", answers["no meaning here"])


@pytest.mark.parametrize("row", of("refused"))
def test_a_refused_key_is_named_with_what_to_do(row: Row, check: Check) -> None:
    status, answers, err = check(row)
    assert (status, answers) == (1, {})
    message = json.loads(err)["error"]["message"]
    assert message.startswith(row.key.removeprefix("profiler_config."))
    assert re.search(r"set it to |allowed: |write ", message), message
