"""The verb ``init``: a first configuration, proposed from the code of a training."""

import json
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.completion import SAVE_PATH
from lightning_rlprof.cli.open_run import Force
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import local_path

if TYPE_CHECKING:
    from lightning_rlprof.config.wrap_proposal import ModuleCode

_NONE = "none"
_BY_GRAD = "{by_grad: {no_grad: actor_compute_log_prob, grad: actor_update}}"
_STEPS = "[3]"  # the first ones are warm-up
_ONE_STAGE = "actor_update"

# The order in which MindSpeed-RL's documents capture on Ascend: the more a capture records of a
# rank, the fewer stages and ranks it is taken of.
_ON_ASCEND: dict[str, tuple[str, dict[str, object]]] = {
    "1-light": (
        "All stages and ranks, markers only: little data. `rlprof summary` shows the longest "
        "stage, `rlprof stragglers` the slow ranks.",
        {
            "profile_level": "level_none",
            "profile_with_cpu": False,
            "profile_with_npu": True,
            "profile_ranks": "all",
        },
    ),
    "2-stage": (
        "One stage of all ranks, with operators and communication. Set stage to the longest one "
        "of the first file.",
        {"profile_level": "level1", "profile_export_type": "db", "profile_ranks": "all"},
    ),
    "3-few-ranks": (
        "The same stage in detail. Set profile_ranks to rank 0 and the slow ranks of the first "
        "two files.",
        {
            "profile_level": "level1",
            "profile_export_type": "db",
            "profile_record_shapes": True,
            "profile_with_memory": True,
            "profile_with_module": True,
            "profile_ranks": [0],
        },
    ),
}

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[FILE|MODULE]",
        help="Training script, or dotted name of a module; default: the only one here that trains",
    ),
]
Target = Annotated[
    Path, typer.Option("-o", "--output", parser=local_path, metavar="PATH", help="File to write")
]
Class = Annotated[
    str | None, typer.Option("--class", metavar="NAME", help="LightningModule, if there are more")
]
Stage = Annotated[
    str | None, typer.Option(metavar="STAGE", help="Stage to capture, all, or none [default: none]")
]
Steps = Annotated[
    str | None, typer.Option(metavar="STEPS", help="Steps to capture; default: the third, [3]")
]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Ask nothing, take the defaults")]
Ascend = Annotated[
    bool,
    typer.Option(
        "--ascend",
        help="Write three files for an NPU, from light to detailed: markers, one stage, few ranks",
    ),
]


def init(
    source: Source = None,
    output: Target = Path("rlprof.yaml"),
    module: Class = None,
    stage: Stage = None,
    steps: Steps = None,
    yes: Yes = False,
    force: Force = False,
    ascend: Ascend = False,
) -> None:
    """Write a configuration for a training, proposed from its code. Nothing is imported or run.

    On a terminal it asks what no option says: at most three questions. With --ascend it also prints
    the commands that use the three files, in their order.

    Example: rlprof init train.py --stage actor_update
    """
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.config.sources import from_words
    from lightning_rlprof.config.wrap_proposal import ModuleCode, find_script, lightning_modules

    names = [f"{output.stem}-{name}{output.suffix}" for name in _ON_ASCEND if ascend]
    wanted = [output.with_name(name) for name in names or [output.name]]
    paths = [console.destination(path, Path(), path.name, force=force) for path in wanted]
    script = find_script(source) if source else _only_script()
    ask = not yes and sys.stdin.isatty() and console.on_terminal()
    found = lightning_modules(script)
    if ascend and not found:  # a loop of the user's own, which marks its stages
        found = [ModuleCode(script.stem, script)]
    if not found:
        raise RlprofError(
            f"{script} and the files beside it that it imports define no LightningModule",
            hint="Give the file that does: rlprof init FILE",
            code="no_module",
        )
    code = _chosen(found, module, ask=ask)
    if stage is None:
        known = [_NONE, "all", *dict.fromkeys(each.stage for each in code.targets.values())]
        known = known[2:] if ascend else known
        default = _ONE_STAGE if ascend else _NONE
        stage = _answer(f"Capture which stage? ({', '.join(known)})", default, ask=ask)
    if ascend and stage in (_NONE, "all"):
        raise RlprofError(
            f"--ascend captures one stage after the light capture, not '{stage}'",
            hint=f"Give one: --stage {_ONE_STAGE}",
            code="usage",
        )
    if steps is None and stage != _NONE:
        steps = _answer("Capture in which steps?", _STEPS, ask=ask)
    capture = {}
    if stage != _NONE or steps is not None:
        words = [f"steps={steps or _STEPS}", *([f"stage={stage}"] if stage != _NONE else [])]
        capture = from_words(words)
    targets = {name: each.stage for name, each in code.targets.items() if each.sure}
    ProfilerConfig.build({"wrap": targets}, **capture)
    parts = [*_ON_ASCEND.values()] if ascend else []
    captures = [_on_ascend(*each, capture) for each in parts] or [_commented(capture)]
    for path, lines in zip(paths, captures, strict=True):
        with console.writing(path):
            path.write_text(_text(script, path, code, lines), encoding="utf-8")
        console.wrote(path)
    console.status(f"{code.name} in {code.file}: {console.count(len(targets), 'wrap rule')}")
    if not code.targets and not code.marked:
        console.note(
            "no method's name means a stage. Add rules by hand, or mark stages in the code"
        )
    if ascend:
        console.status("Run them in this order, and read each run before the next one:")
        for path in paths:
            console.say(f"  {_command(path, script)}")
    console.next_command("rlprof", "config", "check", paths[0])


def _only_script() -> Path:
    """Return the only Python file of this directory that has a Trainer or a LightningModule."""
    words = (b"Trainer(", b"LightningCLI(", b"LightningModule")
    found = [
        path
        for path in sorted(Path().glob("*.py"))
        if path.is_file() and any(word in path.read_bytes() for word in words)
    ]
    trains = [path for path in found if any(word in path.read_bytes() for word in words[:2])]
    found = trains or found
    if len(found) != 1:
        names = ", ".join(map(str, found[:5]))
        text = f"{len(found)} scripts here train with Lightning: {names}"
        raise RlprofError(
            text if found else "no script here trains with Lightning",
            hint="Name the script of the training, with any loop: rlprof init FILE",
            code="usage",
        )
    return found[0]


def _chosen(found: "Sequence[ModuleCode]", name: str | None, *, ask: bool) -> "ModuleCode":
    """Return the LightningModule that was named, else the one with the most stages."""
    names = [each.name for each in found]
    if name is None:
        best = max(found, key=lambda each: len({*each.targets} | each.marked))
        question = f"Which LightningModule? ({', '.join(names)})"
        name = _answer(question, best.name, ask=ask and len(found) > 1)
    if name not in names:
        hint = f"{console.did_you_mean(name, names)} There are: {', '.join(names)}".strip()
        raise RlprofError(f"unknown LightningModule '{name}'", hint=hint, code="usage")
    return found[names.index(name)]


def _answer(question: str, default: str, *, ask: bool) -> str:
    return str(typer.prompt(question, default=default, err=True)) if ask else default


def _command(path: Path, script: Path) -> str:
    return shlex.join(["rlprof", "run", "--config", str(path), "--", "python", str(script)])


def _text(script: Path, path: Path, code: "ModuleCode", capture: Sequence[str]) -> str:
    """Return the YAML file: its rules, then the lines of a capture."""
    lines = [
        f"# What rlprof records of {code.name} in {code.file}.",
        f"# Check: {shlex.join(['rlprof', 'config', 'check', str(path)])}",
        f"# Use:   {_command(path, script)}",
        "",
        "# Methods, by dotted name from the LightningModule, and the stage that each is.",
    ]
    if code.marked:
        lines.append(f"# Marked in the code, so without a rule: {', '.join(sorted(code.marked))}.")
    rules = [(name, each) for name, each in code.targets.items() if each.sure]
    unsure = [(name, each) for name, each in code.targets.items() if not each.sure]
    lines += ["wrap:"] if rules else ["# wrap:", "#   policy.generate: actor_generate"]
    lines += [f"  {name}: {each.stage}  # {each.where}" for name, each in rules]
    indent = "  " if rules else ""
    if unsure:
        lines.append(
            f"{indent}# If these are methods or functions, remove the #. Of a module, add .forward."
        )
        lines += [f"{indent}# {name}: {each.stage}  # {each.where}" for name, each in unsure]
    lines += [
        f"{indent}# If one method serves two stages, by whether gradients are on:",
        f"{indent}# policy.forward: {_BY_GRAD}",
        "",
        *capture,
    ]
    return "\n".join(lines) + "\n"


def _commented(capture: Mapping[str, object]) -> list[str]:
    """Return the lines of what is captured, with examples of what isn't."""
    return [
        "# Spans of all stages are recorded in every step. A capture records more, and costs more.",
        _line("steps", capture.get("steps"), [3]),
        "integrated:",
        f"  {_line('stage', capture.get('stage'), 'actor_update')}",
        f"  profile_save_path: {SAVE_PATH}  # runs go here",
    ]


def _on_ascend(
    purpose: str, keys: Mapping[str, object], capture: Mapping[str, object]
) -> list[str]:
    """Return the lines of one of the captures of `_ON_ASCEND`."""
    stage = "all" if keys["profile_level"] == "level_none" else capture["stage"]
    block = {"profile": True, "mstx": True, "stage": stage, **keys}
    return [
        *(f"# {line}" for line in textwrap.wrap(purpose, 96)),
        "# Parse it after the training: rlprof ascend parse profiler_data",
        _line("steps", capture["steps"], None),
        "integrated:",
        *(f"  {_line(key, value, None)}" for key, value in block.items()),
        f"  profile_save_path: {SAVE_PATH}  # runs go here",
    ]


def _line(key: str, given: object, example: object) -> str:
    """Return a key with its value, or with an example behind a #."""
    value = example if given is None else given
    return (
        f"{'# ' * (given is None)}{key}: {value if isinstance(value, str) else json.dumps(value)}"
    )
