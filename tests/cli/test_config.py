import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def answers(rlprof: Run, tmp_path: Path) -> Callable[..., dict[str, str]]:
    def ask(text: str, *overrides: str) -> dict[str, str]:
        file = tmp_path / "rlprof.yaml"
        file.write_text(text)
        status, out, err = rlprof("config", "check", file, *overrides, "--json")
        assert (status, err) == (0, "")
        found: dict[str, str] = json.loads(out)
        return found

    return ask


Ask = Callable[..., dict[str, str]]


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
        "capture per": "stage",
        "steps": "2 to 4",
        "stages": "actor_update",
        "ranks": "0, 3",
        "tools on cpu": "torch_profiler (mstx: cpu has no profiler markers, "
        "spans and torch_profiler are recorded)",
        "tools on cuda": "device_time, nvtx, torch_profiler",
        "tools on npu": "device_time, npu_profiler, mstx",
        "key integrated.profile": "integrated.profile = true",
        "key integrated.stage": 'integrated.stage = "actor_update"',
        "key integrated.mstx": "integrated.mstx = true",
        "key integrated.profile_step_start": "integrated.profile_step_start = 2",
        "key integrated.profile_step_end": "integrated.profile_step_end = 5",
        "key integrated.profile_ranks": "integrated.profile_ranks = [0, 3]",
        "key integrated.profile_save_path": 'integrated.profile_save_path = "/data/x"',
    }


def test_what_has_no_effect_on_a_device_is_said(answers: Ask) -> None:
    found = answers("integrated: {profile_analysis: true, profile: true}")
    assert found["note on cuda"] == (
        "no effect on cuda: integrated.profile_analysis; it is for Ascend"
    )
    assert "note on npu" not in found


VERL = """
trainer:
  total_epochs: 30
  profile_steps: [1, 2]
  device: cuda
  npu_profile: {options: {level: level1}}
  worker_nsight_options: {trace: "cuda,nvtx"}
actor_rollout_ref:
  actor:
    profiler: {discrete: true, all_ranks: false, ranks: [0, 1]}
"""


def test_each_key_of_verls_nsight_guide_is_shown_with_what_it_means(answers: Ask) -> None:
    found = answers(VERL)
    assert found["capture per"] == "stage"
    assert found["tools on cuda"] == "device_time, nsight, nvtx"
    assert found["role actor"] == "ranks 0, 1"
    assert json.loads(found["nsys of the worker in Ray"])["trace"] == "cuda,nvtx"
    assert json.loads(found["nsys of the controller in Ray"])["trace"] == "cuda,nvtx,cublas,ucx"
    place = "key actor_rollout_ref.actor.profiler"
    idle = f"trainer.npu_profile.options.level, {place.removeprefix('key ')}.all_ranks"
    assert found["without effect"] == f"{idle} (null, a default, or of what is off)"
    assert {name: text for name, text in found.items() if name.startswith("key")} == {
        "key trainer.profile_steps": "steps = [1, 2]",
        "key trainer.device": 'tools = ["nsight"]',
        "key trainer.worker_nsight_options": found["key trainer.worker_nsight_options"],
        f"{place}.discrete": "roles.actor.discrete = true",
        f"{place}.ranks": "roles.actor.ranks = [0, 1]",
    }


def test_overrides_of_hydras_command_line_are_laid_over_the_file(answers: Ask) -> None:
    words = ["trainer.profile_steps=[7]", "+critic.profiler={discrete: true, all_ranks: true}"]
    found = answers(VERL, *words, '++trainer.worker_nsight_options.trace="nvtx"')
    assert found["steps"] == "7"
    assert found["role critic"] == "ranks all"
    assert json.loads(found["nsys of the worker in Ray"])["trace"] == "nvtx"


@pytest.mark.parametrize("word", ["steps", "=1", "~trainer.device", "steps=["])
def test_a_wrong_override_is_a_usage_error(rlprof: Run, tmp_path: Path, word: str) -> None:
    (tmp_path / "x.yaml").touch()
    status, _, err = rlprof("config", "check", tmp_path / "x.yaml", word)
    assert (status, word in err) == (2, True)


def test_why_nothing_is_captured_is_the_real_reason(answers: Ask) -> None:
    off = answers("trainer: {profile_steps: null}\ncritic: {profiler: {all_ranks: true}}")
    assert "no steps are chosen" in off["captures"]
    off = answers("trainer: {profile_steps: [1]}\ncritic: {profiler: {discrete: true}}")
    assert "set enable or ranks of one" in off["captures"]


def test_every_wrap_rule_is_shown(answers: Ask) -> None:
    found = answers(
        "wrap:\n  policy.generate: actor_generate\n"
        "  policy.forward: {by_grad: {no_grad: actor_compute_log_prob}, nested: true}\n"
    )
    assert {name: text for name, text in found.items() if name.startswith(("wrap", "key"))} == {
        "wrap policy.generate": "actor_generate",
        "wrap policy.forward": "actor_compute_log_prob (by_grad.no_grad), "
        "also inside another stage",
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
        ("{ranks: all, steps: [1]}", "ranks", "all"),
        ("{ranks: [], steps: [1]}", "ranks", "0"),
        ("{steps: [1], roles: {a: {ranks: [5000]}}}", "role a", "ranks 5000"),
        ("{steps: [1], roles: {a: {ranks: all}}}", "role a", "ranks all"),
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


def test_the_schema_is_json(rlprof: Run) -> None:
    printed = json.loads(rlprof("config", "schema")[1])
    assert "integrated" in printed["properties"]
    assert printed["properties"]["profiler_config"]["$ref"] == "#"


@pytest.mark.parametrize("text", [None, "a: [", "- a list"])
def test_what_is_no_configuration_is_unreadable_input_not_a_failed_check(
    rlprof: Run, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    assert rlprof("config", "check", path)[0] == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: 2-4", {"steps": "steps = [2, 3, 4]"}),
        (
            "nsight: {worker: {env-var: A=SECRET, sample: none}, reports: /data}",
            {"nsight.worker": "A", "nsight.reports": 'nsight.reports = "/data"'},
        ),
        (
            "{roles: {a.b: {ranks: [1]}, my-role: {}}, steps: [1]}",
            {"roles.a.b": '"a.b"', "roles.my_role": '"my-role"', "steps": "[1]"},
        ),
        ("{integrated: null, parallel: {}}", {"integrated": "{", "parallel": "{"}),
        (
            "profiler_config: {integrated: {profile-level: level1}, torch-profiler: "
            "{schedule: {active: 2}}}",
            {
                "integrated.profile_level": '"level1"',
                "torch_profiler.schedule": '"active": 2',
            },
        ),
    ],
)
def test_every_key_is_shown_with_its_value_and_without_secrets(
    answers: Ask, text: str, expected: dict[str, str]
) -> None:
    found = answers(text)
    keys = {name: value for name, value in found.items() if name.startswith("key ")}
    assert set(keys) == {f"key {name}" for name in expected}
    assert [part for name, part in expected.items() if part not in keys[f"key {name}"]] == []
    assert "SECRET" not in str(found)


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=str)
def test_every_example_is_explained(answers: Ask, path: Path) -> None:
    assert answers(path.read_text())["captures"]


# ---- config init

STAGED = ["rlprof-1-light.yaml", "rlprof-2-stage.yaml", "rlprof-3-few-ranks.yaml"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_template_records_as_without_a_file_until_it_is_edited(
    rlprof: Run, folder: Path, hints: None
) -> None:
    status, out, err = rlprof("config", "init")
    assert (status, out) == (0, "Wrote rlprof.yaml\n")
    assert err == "next: rlprof config check rlprof.yaml\n"
    config = ProfilerConfig.build("rlprof.yaml")
    assert config == ProfilerConfig.build(profile_save_path="profiler_data")


@pytest.mark.parametrize("name", ["rlprof.yaml", *STAGED])
def test_every_example_of_a_template_is_a_valid_key(rlprof: Run, folder: Path, name: str) -> None:
    rlprof("config", "init", *(["--ascend"] if name in STAGED else []))
    text = Path(name).read_text()
    assert f"rlprof run --config {name} -- python train.py" in text
    Path(name).write_text(re.sub(r"# ?(?= *[a-z_.]+:)", "", text))
    config = ProfilerConfig.build(name)
    assert {rule.target for rule in config.wrap} == {
        "policy.generate",
        "reward.forward",
        "policy.forward",
        "drop_solved",
    }
    assert config.captures
    assert config.steps == [3]
    assert rlprof("config", "check", name)[0] == 0


def test_ascend_goes_from_light_to_one_stage_to_few_ranks(rlprof: Run, folder: Path) -> None:
    status, out, _ = rlprof("config", "init", "--ascend")
    assert status == 0
    commands = [line.strip() for line in out.splitlines() if line.startswith("  ")]
    assert commands == [f"rlprof run --config {name} -- python train.py" for name in STAGED]
    light, stage, ranks = map(ProfilerConfig.build, STAGED)
    assert light.integrated.lightweight
    assert [config.integrated.stage for config in (light, stage, ranks)] == [
        "all",
        "actor_update",
        "actor_update",
    ]
    assert [config.wanted_ranks for config in (light, stage, ranks)] == ["all", "all", [0]]
    assert [each.integrated.profile_with_memory for each in (stage, ranks)] == [False, True]


@pytest.mark.parametrize("name", STAGED)
def test_each_file_for_ascend_passes_the_check(
    rlprof: Run, answers: Ask, folder: Path, name: str
) -> None:
    rlprof("config", "init", "--ascend", "-o", "rlprof.yaml")
    found = answers(Path(name).read_text())
    assert found["tools on npu"].startswith("device_time, npu_profiler, mstx")
    assert "note on npu" not in found  # a key without effect there


def test_files_for_ascend_are_named_after_the_output(rlprof: Run, folder: Path) -> None:
    Path("files").mkdir()
    assert rlprof("config", "init", "--ascend", "-o", "files/npu.yaml")[0] == 0
    names = sorted(path.name for path in Path("files").iterdir())
    assert names == ["npu-1-light.yaml", "npu-2-stage.yaml", "npu-3-few-ranks.yaml"]


@pytest.mark.parametrize(("words", "kept"), [([], "rlprof.yaml"), (["--ascend"], STAGED[2])])
def test_an_existing_file_is_kept_without_force_and_no_other_is_written(
    rlprof: Run, folder: Path, words: list[str], kept: str
) -> None:
    Path(kept).write_text("mine")
    status, _, err = rlprof("config", "init", *words)
    assert (status, f"{kept} exists already" in err) == (2, True)
    assert [path.name for path in folder.iterdir()] == [kept]
    assert Path(kept).read_text() == "mine"
    assert rlprof("config", "init", *words, "--force")[0] == 0
