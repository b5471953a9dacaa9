"""The verbs ``config check``, what a file will record, and ``config schema``, for editors."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.open_run import Force, Output
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.system.location import local_path

if TYPE_CHECKING:
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.config.wrap_rules import WrapRule


_DEVICES = ("cpu", "cuda", "npu")

File = Annotated[
    Path,
    typer.Argument(
        parser=local_path,
        metavar="FILE",
        help="YAML file with rlprof's, MindSpeed-RL's or verl's keys",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Keys to lay over the file, as on Hydra's command line: trainer.profile_steps=[1,2]",
    ),
]


def check(file: File, overrides: Overrides = None) -> None:
    """Check a configuration and show what each key means. Exits 1 if it is wrong."""
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.config.sources import from_words, merge, read

    data = merge(read(file), from_words(overrides or []))
    try:
        config = ProfilerConfig.build(data)
        roles = {name: ProfilerConfig.build(data, role=name) for name in config.roles}
    except ConfigError as error:
        raise console.CheckFailedError(str(error), hint=error.hint, code="config") from error
    answers = {"spans": "all stages of every step" if config.spans else "off"}
    answers |= _capture(config)
    for name, role in roles.items():
        answers[f"role {name}"] = f"ranks {_ranks(role)}" if role.captures else role.why_off
    for rule in config.wrap:
        answers[f"wrap {rule.target}"] = _stages_of(rule)
    answers |= _keys(data, config)
    if console.is_json():
        console.put_json(answers)
        return
    width = max(map(len, answers))
    for name, answer in answers.items():
        console.say(f"{name:{width}}  {answer}")
    if not overrides:
        console.status(f'Use it: ProfilerCallback("{file}")')


def schema(output: Output = None, force: Force = False) -> None:
    """Print the JSON schema of a configuration, for editors."""
    from lightning_rlprof.config.profiler_config import ProfilerConfig

    data = ProfilerConfig.model_json_schema()
    about = "MindSpeed-RL's name for the same keys."
    data["properties"]["profiler_config"] = {"$ref": "#", "description": about}
    if output is None:
        console.put_json(data)
        return
    path = console.destination(output, Path(), output.name, force=force)
    with console.writing(path):
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    console.wrote(path)


def _capture(config: "ProfilerConfig") -> dict[str, str]:
    """Return what is captured, when, where and with which recorders per device."""
    from lightning_rlprof.integrations.ray import ray_runtime_env
    from lightning_rlprof.recording.end_remarks import without_effect
    from lightning_rlprof.recording.recorders.registry import recorder_names, unmet

    answers = {"captures": "on" if config.captures else f"off: {config.why_off}"}
    answers["saved in"] = config.integrated.profile_save_path
    if not config.captures:
        return answers
    joined = "run of consecutive steps" if config.joins_steps else "step"
    answers["capture per"] = "stage" if config.per_stage else joined
    answers["steps"] = _steps(config)
    answers["stages"] = _listed(config.integrated.stage)
    if config.role is not None or not config.roles:
        answers["ranks"] = _ranks(config)
    for device in _DEVICES:
        tools = ", ".join(recorder_names(config, device)) or "none"
        said = unmet(config, device)
        answers[f"tools on {device}"] = f"{tools} ({said})" if said else tools
        answers |= {f"note on {device}": text for text in without_effect(config, device)}
    for process in ("controller", "worker"):
        if nsight := ray_runtime_env(config, process).get("nsight"):
            answers[f"nsys of the {process} in Ray"] = json.dumps(nsight)
    return answers


def _stages_of(rule: "WrapRule") -> str:
    ways = [stage if key == "stage" else f"{stage} ({key})" for key, stage in rule.names().items()]
    return ", ".join(ways) + (", also inside another stage" if rule.nested else "")


def _keys(data: Mapping[str, Any], config: "ProfilerConfig") -> dict[str, str]:
    """Return for each key of the file the values that follow from it."""
    from lightning_rlprof.config.sources import given_keys

    dumped, answers = config.masked(), {}
    given = given_keys(data, type(config).model_fields)
    for key, ours in given.items():
        if found := [f"{each} = {_value(dumped, each)}" for each in ours if each != "wrap"]:
            answers[f"key {key}"] = ", ".join(found)
    if idle := [key for key, ours in given.items() if not ours]:
        answers["without effect"] = f"{', '.join(idle)} (null, or of what is off)"
    return answers


def _value(dumped: Any, dotted: str) -> str:
    for part in dotted.split("."):
        dumped = dumped.get(part, dumped)  # a role of any name, in all roles
    return json.dumps(dumped)


def _steps(config: "ProfilerConfig") -> str:
    if config.steps is None:
        first, end = config.integrated.profile_step_start, config.integrated.profile_step_end
        return str(first) if end == first + 1 else f"{first} to {end - 1}"
    return _listed(config.steps)


def _ranks(config: "ProfilerConfig") -> str:
    wanted = config.wanted_ranks
    return _listed(wanted if isinstance(wanted, str) else sorted(wanted)) or "none"


def _listed(words: str | Sequence[object]) -> str:
    return words if isinstance(words, str) else ", ".join(map(str, words))
