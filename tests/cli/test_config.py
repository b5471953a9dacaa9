import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def answers(rlprof: Run, tmp_path: Path) -> Callable[[str], dict[str, str]]:
    def ask(text: str) -> dict[str, str]:
        file = tmp_path / "rlprof.yaml"
        file.write_text(text)
        status, out, err = rlprof("config", "check", file, "--json")
        assert (status, err) == (0, "")
        found: dict[str, str] = json.loads(out)
        return found

    return ask


Ask = Callable[[str], dict[str, str]]


def test_the_block_of_mindspeed_rl_is_explained(answers: Ask) -> None:
    found = answers(
        "profiler_config:\n  integrated:\n    profile: true\n    stage: actor_update\n"
        "    mstx: true\n    profile_step_start: 2\n    profile_step_end: 5\n"
        "    profile_ranks: [0, 3]\n    profile_save_path: /data/x\n"
    )
    assert found == {
        "spans": "all stages of every step",
        "captures": "on",
        "saved in": "/data/x",
        "steps": "2 to 4",
        "stages": "actor_update",
        "ranks": "0, 3",
        "tools on cpu": "torch_profiler (mstx: cpu has no profiler markers, "
        "spans and torch_profiler are recorded)",
        "tools on cuda": "device_time, nvtx, torch_profiler",
        "tools on npu": "device_time, npu_profiler, mstx",
    }


@pytest.mark.parametrize(
    ("text", "key", "answer"),
    [
        ("integrated: {profile: true}", "steps", "1"),
        ("integrated: {profile: true}", "ranks", "all"),
        ("steps: [2, 9]", "steps", "2, 9"),
        ("steps: all", "steps", "all"),
        ("integrated: {stage: [actor_update, actor_generate]}", "stages", "actor_update, actor_g"),
        ("{ranks: [1], steps: [1]}", "ranks", "1"),
        ("{ranks: [2047, 1024], steps: [1]}", "ranks", "1024, 2047"),
        ("{all_ranks: true, steps: [1]}", "ranks", "all"),
        ("{ranks: [], steps: [1]}", "ranks", "0"),
        ("{steps: [1], roles: {a: {ranks: [5000]}}}", "role a", "ranks 5000"),
        ("{steps: [1], roles: {a: {all_ranks: true}}}", "role a", "ranks all"),
        ("spans: false", "spans", "off"),
        ("integrated: {profile: false}", "captures", "off: "),
    ],
)
def test_each_choice_has_its_answer(answers: Ask, text: str, key: str, answer: str) -> None:
    assert answers(text)[key].startswith(answer)


def test_without_captures_nothing_is_said_about_them(answers: Ask) -> None:
    assert list(answers("{}")) == ["spans", "captures", "saved in"]


def test_roles_are_told_one_by_one(answers: Ask) -> None:
    found = answers(
        "steps: [1]\nroles:\n  actor: {enable: true, ranks: [0, 2]}\n  rollout: {enable: false}\n"
    )
    assert "ranks" not in found
    assert found["role actor"] == "ranks 0, 2"
    assert "not enabled" in found["role rollout"]


def test_people_see_lines_and_what_to_do_next(rlprof: Run, tmp_path: Path) -> None:
    file = tmp_path / "rlprof.yaml"
    file.write_text("steps: [3]")
    _, out, _ = rlprof("config", "check", file)
    assert "steps          3\n" in out
    assert out.endswith(f'Use it: ProfilerCallback("{file}")\n')


def test_a_mistake_is_one_line_with_a_near_match(rlprof: Run, tmp_path: Path) -> None:
    file = tmp_path / "rlprof.yaml"
    file.write_text("integrated: {stage: actor_updat}")
    status, out, err = rlprof("config", "check", file)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "actor_update" in err


def test_the_schema_is_json_and_goes_to_a_file(rlprof: Run, tmp_path: Path) -> None:
    printed = json.loads(rlprof("config", "schema")[1])
    assert "integrated" in printed["properties"]
    assert printed["properties"]["profiler_config"]["$ref"] == "#"

    path = tmp_path / "schema.json"
    status, out, _ = rlprof("config", "schema", "-o", path)
    assert (status, json.loads(path.read_text())) == (0, printed)
    assert out == f"Wrote {path}\n"
    assert rlprof("config", "schema", "-o", path)[0] == 2
    assert rlprof("config", "schema", "-o", path, "--force")[0] == 0


@pytest.mark.parametrize("text", [None, "a: [", "- a list"])
def test_what_is_no_configuration_is_unreadable_input_not_a_failed_check(
    rlprof: Run, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    assert rlprof("config", "check", path)[0] == 2
