"""The verb ``init``: a first configuration, proposed from the code of a training."""

import json
import shlex
import sys
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
    str | None, typer.Option(metavar="STEPS", help="Steps to capture [default: \\[3]]")
]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Ask nothing, take the defaults")]


def init(
    source: Source = None,
    output: Target = Path("rlprof.yaml"),
    module: Class = None,
    stage: Stage = None,
    steps: Steps = None,
    yes: Yes = False,
    force: Force = False,
) -> None:
    """Write a configuration for a training, proposed from its code. Nothing is imported or run.

    On a terminal it asks what no option says: at most three questions.

    Example: rlprof init train.py --stage actor_update
    """
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.config.sources import from_words
    from lightning_rlprof.config.wrap_proposal import find_script, lightning_modules

    path = console.destination(output, Path(), output.name, force=force)
    script = find_script(source) if source else _only_script()
    ask = not yes and sys.stdin.isatty() and console.on_terminal()
    found = lightning_modules(script)
    if not found:
        raise RlprofError(
            f"{script} and the files beside it that it imports define no LightningModule",
            hint="Give the file that does: rlprof init FILE",
            code="no_module",
        )
    code = _chosen(found, module, ask=ask)
    if stage is None:
        known = [_NONE, "all", *dict.fromkeys(each.stage for each in code.targets.values())]
        stage = _answer(f"Capture which stage? ({', '.join(known)})", _NONE, ask=ask)
    if steps is None and stage != _NONE:
        steps = _answer("Capture in which steps?", _STEPS, ask=ask)
    capture = {}
    if stage != _NONE or steps is not None:
        words = [f"steps={steps or _STEPS}", *([f"stage={stage}"] if stage != _NONE else [])]
        capture = from_words(words)
    targets = {name: each.stage for name, each in code.targets.items() if each.sure}
    ProfilerConfig.build({"wrap": targets}, **capture)
    with console.writing(path):
        path.write_text(_text(script, path, code, capture), encoding="utf-8")
    console.wrote(path)
    console.status(f"{code.name} in {code.file}: {console.count(len(targets), 'wrap rule')}")
    if not code.targets and not code.marked:
        console.note(
            "no method's name means a stage. Add rules by hand, or mark stages in the code"
        )
    console.next_command("rlprof", "config", "check", path)


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
        names = ", ".join(map(str, found[:5])) or "none"
        raise RlprofError(
            f"cannot choose a script: {len(found)} here train with Lightning ({names})",
            hint="Name it: rlprof init FILE",
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


def _text(script: Path, path: Path, code: "ModuleCode", capture: Mapping[str, object]) -> str:
    """Return the YAML file."""
    run = shlex.join(["rlprof", "run", "--config", str(path), "--", "python", str(script)])
    lines = [
        f"# What rlprof records of {code.name} in {code.file}.",
        f"# Check: {shlex.join(['rlprof', 'config', 'check', str(path)])}",
        f"# Use:   {run}",
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
        "# Spans of all stages are recorded in every step. A capture records more, and costs more.",
    ]
    lines += [
        _line("steps", capture.get("steps"), [3]),
        "integrated:",
        f"  {_line('stage', capture.get('stage'), 'actor_update')}",
        f"  profile_save_path: {SAVE_PATH}  # runs go here",
    ]
    return "\n".join(lines) + "\n"


def _line(key: str, given: object, example: object) -> str:
    """Return a key with its value, or with an example behind a #."""
    value = example if given is None else given
    return (
        f"{'# ' * (given is None)}{key}: {value if isinstance(value, str) else json.dumps(value)}"
    )
