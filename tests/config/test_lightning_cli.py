"""What LightningCLI and Hydra do with a configuration, without a Trainer."""

from typing import Any

import pytest
from hydra.utils import instantiate
from jsonargparse import ArgumentParser
from omegaconf import OmegaConf

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError


class Door:
    """Takes a configuration as the Lightning callback does."""

    def __init__(
        self, config: ProfilerConfig | dict[str, Any] | str | None = None, **options: Any
    ) -> None:
        self.config = ProfilerConfig.build(config, **options)


def parser() -> ArgumentParser:
    made = ArgumentParser(exit_on_error=False)
    made.add_class_arguments(Door, "door")
    return made


def made(command: ArgumentParser, parsed: Any) -> ProfilerConfig:
    # 4.49 renamed instantiate_classes
    create = getattr(command, "instantiate", None) or command.instantiate_classes
    config: ProfilerConfig = create(parsed).door.config
    return config


CASES: list[tuple[list[str], bool]] = [
    ([], False),
    (["--door.config.integrated.stage=actor_update"], True),
    (["--door.config.integrated.stage=[actor_update, weight_sync]"], True),
    (["--door.config.integrated.profile=true"], True),
    (
        ["--door.config.integrated.profile=false", "--door.config.integrated.stage=actor_update"],
        False,
    ),
    (["--door.config.steps=all"], True),
    (["--door.config.steps=[1, 2]", "--door.config.ranks=[0]"], True),
    (["--door.config.summary=false"], False),
    (["--door.config.roles={actor: {ranks: [1]}}"], True),
    (["--door.config.wrap=[{target: f, stage: actor_update}]"], False),
    (["--door.config.wrap={f: actor_update}"], False),
    (["--door.config={wrap: {f: actor_update}, steps: [1]}"], True),
    (['--door.config={"profiler_config": {"integrated": {"profile": true}}}'], True),
    (['--door.config={"global_profiler": {"tool": "nsys", "steps": [1]}}'], True),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning still says skip_none
@pytest.mark.parametrize(("arguments", "captures"), CASES)
def test_command_line_and_saved_file_mean_the_same(arguments: list[str], captures: bool) -> None:
    command = parser()
    parsed = command.parse_args(arguments)
    config = made(command, parsed)
    assert config.captures is captures
    # as LightningCLI saves: every key, given or not; people start again from that file
    saved = command.dump(parsed, skip_none=False)
    again = parser()
    assert made(again, again.parse_string(saved)) == config


def test_the_command_line_names_a_typo() -> None:
    command = parser()
    parsed = command.parse_args(["--door.config.integrated.stage=actor_updat"])
    with pytest.raises(ValueError, match=r"'actor_updat' is not a stage; did you mean 'actor_upd"):
        made(command, parsed)


def test_the_command_line_names_an_unknown_key() -> None:
    command = parser()
    parsed = command.parse_args(['--door.config={"integrated": {"stge": "all"}}'])
    with pytest.raises(
        ConfigError, match=r"integrated.stge is not a key here; did you mean 'stage"
    ):
        made(command, parsed)


@pytest.mark.parametrize("convert", ["none", "all"])
def test_hydra_passes_its_own_mappings(convert: str) -> None:
    node = OmegaConf.create(
        {
            "_target_": f"{Door.__module__}.{Door.__qualname__}",
            "_convert_": convert,
            "config": {"integrated": {"stage": ["actor_update"], "profile_ranks": [0]}},
            "steps": [1, 2],
        }
    )
    target = instantiate({**node, "_target_": "builtins.dict"})
    config = Door(config=target["config"], steps=target["steps"]).config
    assert config.integrated.stage == ["actor_update"]
    assert config.steps == [1, 2]
    assert config.captures
