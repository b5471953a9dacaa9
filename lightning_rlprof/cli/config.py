"""The verbs of a configuration: ``config check``, ``config init`` and ``config schema``."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.console import argument, option
from lightning_rlprof.cli.open_run import SAVE_PATH, Force
from lightning_rlprof.errors import ConfigError, TraceError
from lightning_rlprof.system.location import local_path

if TYPE_CHECKING:
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.config.stages import WrapRule


_DEVICES = ("cpu", "cuda", "npu")

_HEAD = """\
# Check: rlprof config check {path}
# Use:   rlprof run --config {path} -- python train.py
"""
_MARKING = """
# Methods, by dotted name from the LightningModule, and the stage that each is.
# wrap:
#   policy.generate: actor_generate
#   reward.forward: compute_reward
#   # If one method serves two stages, by whether gradients are on:
#   policy.forward: {by_grad: {no_grad: actor_compute_log_prob, grad: actor_update}}
#   # Names of your own stages have to be listed:
#   drop_solved: filter_groups
# custom_stages: [filter_groups]
"""
_ANY_DEVICE = f"""
# Spans of all stages are recorded in every step. A capture records more, and costs more.
# steps: [3]  # the first ones are warm-up
integrated:
  # stage: actor_update
  # profile_ranks: [0]
  # profile_record_shapes: true
  # profile_with_memory: true
  profile_save_path: {SAVE_PATH}  # runs go here
"""
_ON_ASCEND = f"""
# Parse it after the training: rlprof ascend parse {SAVE_PATH}
steps: [3]  # the first ones are warm-up
integrated:
  profile: true
  mstx: true
  profile_save_path: {SAVE_PATH}  # runs go here
"""
# MindSpeed-RL's documents capture on Ascend in this order. The more a capture records of a rank,
# the fewer stages and ranks it covers.
_FROM_LIGHT_TO_DETAILED = {
    "1-light": (
        """
# All stages and ranks, markers only: little data. `rlprof summary` shows the longest stage,
# `rlprof stragglers` the slow ranks.""",
        """\
  stage: all
  profile_level: level_none
  profile_with_cpu: false
  profile_ranks: all
""",
    ),
    "2-stage": (
        """
# One stage of all ranks, with operators and communication. Set stage to the longest one of the
# first file.""",
        """\
  stage: actor_update
  profile_level: level1
  profile_export_type: db
  profile_ranks: all
""",
    ),
    "3-few-ranks": (
        """
# The same stage in detail. Set profile_ranks to rank 0 and the slow ranks of the first two
# files.""",
        """\
  stage: actor_update
  profile_level: level1
  profile_export_type: db
  profile_record_shapes: true
  profile_with_memory: true
  profile_with_module: true
  profile_ranks: [0]
""",
    ),
}

File = Annotated[
    Path,
    argument("FILE", "YAML file with rlprof's, MindSpeed-RL's or verl's keys", parser=local_path),
]
Overrides = Annotated[
    list[str] | None,
    argument(
        "[KEY=VALUE]...",
        "Keys to lay over the file, as on Hydra's command line: 'trainer.profile_steps=[1,2]'",
    ),
]

Ascend = Annotated[
    bool,
    typer.Option(
        "--ascend",
        help="Write three files for an NPU, from light to detailed: markers, one stage, few ranks",
    ),
]


def check(file: File, overrides: Overrides = None) -> None:
    """Check a configuration and show what each key means. Exits 1 if it is wrong."""
    from lightning_rlprof.analysis.diagnosis.diagnosis import known_id
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.config.sources import from_words, merge, read

    data = merge(read(file), from_words(overrides or []))
    try:
        config = ProfilerConfig.build(data)
        roles = {name: ProfilerConfig.build(data, role=name) for name in config.roles}
        for name in (*config.ignore_findings, *config.applied):
            known_id(name)
    except (ConfigError, TraceError) as error:
        raise console.CheckFailedError(str(error), hint=error.hint, code="config") from error
    answers = {"spans": "all stages of every step"} | _capture(config)
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


def init(
    output: Annotated[
        Path, option("PATH", "File to write", "-o", "--output", parser=local_path)
    ] = Path("rlprof.yaml"),
    force: Force = False,
    ascend: Ascend = False,
) -> None:
    """Write a configuration to edit: the usual keys, each with an example and what it does.

    With --ascend it also prints the commands that use the three files, in their order.

    Example: rlprof config init -o profiler.yaml
    """
    texts = {output: _MARKING + _ANY_DEVICE}
    if ascend:
        texts = {
            output.with_name(f"{output.stem}-{name}{output.suffix}"): (
                _MARKING + purpose + _ON_ASCEND + keys
            )
            for name, (purpose, keys) in _FROM_LIGHT_TO_DETAILED.items()
        }
    paths = [console.destination(path, Path(), path.name, force=force) for path in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        with console.writing(path):
            head = _HEAD.format(path=shlex.quote(str(path)))
            path.write_text(head + text, encoding="utf-8")
        console.wrote(path)
    if ascend:
        console.status("Run them in this order, and read each run before the next one:")
        for path in paths:
            console.say(f"  rlprof run --config {shlex.quote(str(path))} -- python train.py")
    console.next_command("rlprof", "config", "check", paths[0])


def schema() -> None:
    """Print the JSON schema of a configuration, for editors."""
    from lightning_rlprof.config.profiler_config import ProfilerConfig

    data = ProfilerConfig.model_json_schema()
    about = "MindSpeed-RL's name for the same keys."
    data["properties"]["profiler_config"] = {"$ref": "#", "description": about}
    console.put_json(data)


def _capture(config: "ProfilerConfig") -> dict[str, str]:
    """Return what is captured, when, where and with which recorders per device."""
    from lightning_rlprof.integrations.ray import ray_runtime_env
    from lightning_rlprof.recording.end_remarks import without_effect
    from lightning_rlprof.recording.recorders.base import recorder_names, unmet

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
        answers |= {f"note on {device}": each.text for each in without_effect(config, device)}
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
        if found := [f"{each} = {_value(dumped, each)}" for each in ours or () if each != "wrap"]:
            answers[f"key {key}"] = ", ".join(found)
    if idle := [key for key, ours in given.items() if ours == []]:
        answers["without effect"] = f"{', '.join(idle)} (null, a default, or of what is off)"
    if foreign := [key for key, ours in given.items() if ours is None]:
        answers["no meaning here"] = f"{', '.join(foreign)} (of verl's own code)"
    return answers


def _value(dumped: Any, dotted: str) -> str:
    for part in dotted.split("."):
        # If a role's name contains a dot, the values of all roles are shown.
        dumped = dumped.get(part, dumped)
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
