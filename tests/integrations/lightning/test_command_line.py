"""The callback in the YAML of LightningCLI and of Hydra."""

import copy
from pathlib import Path
from typing import Any

import hydra.utils
import lightning.pytorch.cli
import pytest
import pytorch_lightning.cli
import yaml
from omegaconf import OmegaConf

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from tests.builders.models import Tiny, TinyToo, loader, make_trainer, steps_of, trace_of

CLIS = {
    "pytorch_lightning": (pytorch_lightning.cli.LightningCLI, Tiny),
    "lightning.pytorch": (lightning.pytorch.cli.LightningCLI, TinyToo),
}
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 1,
    "enable_checkpointing": False, "enable_model_summary": False,
}  # fmt: skip
CALLBACK = "lightning_rlprof.ProfilerCallback"

# What users write, and what must come of it.
BLOCKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a block": {"config": {"integrated": {"stage": "actor_update", "profile_step_end": 3}}},
    "switched off": {"config": {"integrated": {"profile": False}, "steps": [1]}},
    "wraps": {"config": {"wrap": [{"target": "layer.forward", "stage": "actor_generate"}]}},
    "roles": {"config": {"roles": {"actor": {"enable": True, "ranks": [0]}}, "steps": "all"}},
    "keywords": {"profile_save_path": "runs", "stage": "actor_update", "steps": [2, "4-6"]},
    "keywords of blocks": {
        "wrap": {"layer.forward": "actor_generate"},
        "torch_profiler": {"schedule": {"active": 1}},
    },
    "keywords and a block": {"config": {"steps": [1]}, "summary": False, "hang_timeout": None},
    "MindSpeed-RL's wrapper": {
        "config": {"profiler_config": {"integrated": {"profile": True, "stage": "all"}}}
    },
}


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])  # pytest's are none of the command line's
    # Lightning 2.6 calls jsonargparse 4.53 in a way that goes with its next major version.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def build(cli: str, init: dict[str, Any], *arguments: str) -> Any:
    """Build what the command line builds, without running it."""
    kind, module = CLIS[cli]
    callbacks = [{"class_path": CALLBACK, "init_args": copy.deepcopy(init)}]  # it is changed
    return kind(
        module, run=False, save_config_callback=None, seed_everything_default=False,
        args={"trainer": {**QUIET, "callbacks": callbacks}} if not arguments else list(arguments),
    )  # fmt: skip


def ours(trainer: Any) -> ProfilerCallback:
    (callback,) = [one for one in trainer.callbacks if isinstance(one, ProfilerCallback)]
    return callback


@pytest.mark.deep
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cli", CLIS)
def test_the_yaml_means_what_python_means(cli: str, block: str) -> None:
    made = ours(build(cli, BLOCKS[block]).trainer)
    assert made.config == ProfilerCallback(**BLOCKS[block]).config


@pytest.mark.deep
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cli", CLIS)
def test_a_saved_configuration_loaded_again_means_the_same(
    cli: str, block: str, tmp_path: Path
) -> None:
    first = build(cli, BLOCKS[block])
    text = first.parser.dump(first.config, skip_none=False)
    (tmp_path / "saved.yaml").write_text(text)
    second = build(cli, {}, "--config", str(tmp_path / "saved.yaml"))
    assert ours(second.trainer).config == ours(first.trainer).config
    assert second.parser.dump(second.config, skip_none=False) == text


@pytest.mark.deep
@pytest.mark.parametrize("cli", CLIS)
def test_a_run_saves_its_configuration_and_the_saved_one_runs(cli: str, tmp_path: Path) -> None:
    kind, module = CLIS[cli]

    class WithData(module):  # type: ignore[misc, valid-type]
        def train_dataloader(self) -> Any:
            return loader()

    init = {"config": {"integrated": {"profile_save_path": str(tmp_path / "runs")}, "steps": [2]}}
    trainer = {
        **QUIET, "default_root_dir": str(tmp_path),
        "callbacks": [{"class_path": CALLBACK, "init_args": init}],
    }  # fmt: skip
    first = kind(
        WithData,
        seed_everything_default=False,
        args={"subcommand": "fit", "fit": {"trainer": trainer}},
    )
    saved = tmp_path / "config.yaml"
    assert saved.exists()
    second = kind(
        WithData,
        args=["fit", "--config", str(saved)],
        save_config_callback=None,
        seed_everything_default=False,
    )
    assert ours(second.trainer).config == ours(first.trainer).config
    for one in (first, second):
        assert steps_of(trace_of(ours(one.trainer))) == [1, 2, 3, 4]


@pytest.mark.parametrize("cli", CLIS)
def test_a_key_of_the_block_is_set_on_the_command_line(cli: str) -> None:
    made = build(
        cli, {}, f"--trainer.callbacks={CALLBACK}",
        "--trainer.callbacks.config.integrated.stage=actor_update",
        "--trainer.accelerator=cpu", "--trainer.logger=false",
    )  # fmt: skip
    assert ours(made.trainer).config.integrated.stage == "actor_update"
    assert ours(made.trainer).config.captures


@pytest.mark.parametrize("cli", CLIS)
def test_keywords_are_set_on_the_command_line(cli: str) -> None:
    made = build(
        cli, {}, f"--trainer.callbacks+={CALLBACK}",
        "--trainer.callbacks.profile_save_path=out", "--trainer.callbacks.steps=[2, 4-6]",
        "--trainer.callbacks.auto_stages=false", "--trainer.callbacks.hang_timeout=null",
        "--trainer.accelerator=cpu", "--trainer.logger=false",
    )  # fmt: skip
    assert ours(made.trainer).config.model_dump(exclude_unset=True) == {
        "integrated": {"profile_save_path": "out"},
        "steps": [2, 4, 5, 6],
        "auto_stages": False,
        "hang_timeout": None,
    }


@pytest.mark.parametrize("cli", CLIS)
def test_help_lists_the_keywords(cli: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build(cli, {}, f"--trainer.callbacks.help={CALLBACK}")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--trainer.callbacks.profile_export_type {text,db}" in shown
    assert "Stages to capture: all (whole steps), one stage, or a list." in shown


@pytest.mark.parametrize("cli", CLIS)
def test_a_wrong_keyword_is_named(cli: str) -> None:
    with pytest.raises(ValueError, match="did you mean 'actor_update'"):
        build(cli, {}, f"--trainer.callbacks+={CALLBACK}", "--trainer.callbacks.stage=actor_updat")


@pytest.mark.parametrize("cli", CLIS)
def test_a_path_of_a_yaml_file_is_read(cli: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("integrated:\n  stage: actor_generate\n")
    made = build(cli, {"config": str(tmp_path / "x.yaml")})
    assert ours(made.trainer).config.integrated.stage == "actor_generate"


@pytest.mark.parametrize("cli", CLIS)
def test_print_config_shows_the_callback(cli: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build(
            cli, {}, f"--trainer.callbacks={CALLBACK}",
            "--trainer.callbacks.config.integrated.stage=actor_update", "--print_config",
        )  # fmt: skip
    assert caught.value.code == 0
    (callback,) = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert callback["class_path"].endswith("ProfilerCallback")
    assert callback["init_args"]["config"]["integrated"]["stage"] == "actor_update"


@pytest.mark.parametrize("cli", CLIS)
def test_a_wrong_key_is_answered_with_our_text(
    cli: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)) as caught:
        build(cli, {"config": {"integrated": {"stage": "actor_updat"}}})
    said = str(caught.value) + capsys.readouterr().err
    assert "integrated.stage='actor_updat' is not a stage; did you mean 'actor_update'" in said


@pytest.mark.parametrize("convert", ["none", "partial", "object", "all"])
def test_hydra_instantiates_the_callback(convert: str, tmp_path: Path) -> None:
    node = OmegaConf.create(
        {
            "save": str(tmp_path),
            "callback": {
                "_target_": CALLBACK,
                "_convert_": convert,
                "config": {"integrated": {"profile_save_path": "${save}", "stage": "all"}},
                "steps": [2, 3],
                "wrap": [{"target": "layer.forward", "stage": "actor_generate"}],
            },
        }
    )
    callback = hydra.utils.instantiate(node.callback)
    assert (
        callback.config
        == ProfilerCallback(
            {"integrated": {"profile_save_path": str(tmp_path), "stage": "all"}},
            steps=[2, 3],
            wrap=[{"target": "layer.forward", "stage": "actor_generate"}],
        ).config
    )
    make_trainer(callback).fit(Tiny(), loader())
    assert steps_of(trace_of(callback)) == [1, 2, 3, 4]


def test_hydra_instantiates_trainer_and_callbacks_together(tmp_path: Path) -> None:
    node = OmegaConf.create(
        {
            "_target_": "pytorch_lightning.Trainer",
            **QUIET,
            "callbacks": [{"_target_": CALLBACK, "profile_save_path": str(tmp_path)}],
        }
    )
    trainer = hydra.utils.instantiate(node)
    trainer.fit(Tiny(), loader())
    assert steps_of(trace_of(ours(trainer))) == [1, 2, 3, 4]


def test_a_dict_config_is_a_configuration() -> None:
    block = OmegaConf.create({"integrated": {"stage": ["actor_update", "actor_generate"]}})
    assert ProfilerCallback(block).config.integrated.stage == ["actor_update", "actor_generate"]
