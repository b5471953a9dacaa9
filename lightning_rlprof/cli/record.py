"""The verb ``run``: a program whose trainings are recorded, without a change of code."""

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.child_process import run_child
from lightning_rlprof.cli.launched_processes import Processes, is_isolated
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.integrations.end_summary import print_summary
from lightning_rlprof.integrations.launch import launched
from lightning_rlprof.records.records import FOLDER_VARIABLE, SIGNS_VARIABLE
from lightning_rlprof.records.run_directory import rank_files, read_trace
from lightning_rlprof.system.location import local_path

_OVERRIDE = re.compile(r"\+?\w[\w.]*=")
_HOW = (
    "Options come before KEY=VALUE, then the program: rlprof run -- python train.py, or "
    "python -m train"
)
_NOTHING = (
    "See which frameworks are recorded: rlprof doctor. A loop of your own needs start_session()."
)

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="[KEY=VALUE]... -- COMMAND",
        help="Keys to lay over the file, then the program: stage=actor_update -- python train.py …",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        parser=local_path,
        metavar="FILE",
        help="Config file; without it, the one that RLPROF_CONFIG names",
    ),
]
Stages = Annotated[
    list[str] | None,
    typer.Option(metavar="STAGE", help="Stage to capture (repeatable); spans are always recorded"),
]


def run(words: Words, config: Config = None, stage: Stages = None) -> None:
    """Record a program's trainings without a change of its code.

    It knows Lightning, TRL, verl and others: rlprof doctor lists them.

    The exit status is that of the program. Processes that it starts are recorded as well.

    Example: rlprof run --config rlprof.yaml -- torchrun --nproc-per-node 8 train.py
    """
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.config.sources import from_overrides, from_words

    overrides, command = _split(words)
    laid = from_words(overrides)
    if stage and "stage" in laid:
        raise RlprofError("--stage and stage= both choose stages", hint="Give one of them.")
    if stage:
        laid["stage"] = stage[0] if len(stage) == 1 else stage
    given = from_overrides(laid, tuple(ProfilerConfig.model_fields))
    file = str(config) if config else os.environ.get("RLPROF_CONFIG") or None
    checked = ProfilerConfig.build(file, **given)
    folder = checked.save_path
    before = _entries(folder)
    if is_isolated(command):
        text = f"'{shlex.join(command[:2])}' ignores PYTHONPATH"
        console.say(f"warning: {text}, so only Lightning is recorded", "yellow", err=True)
    with TemporaryDirectory(prefix="rlprof-run-", ignore_cleanup_errors=True) as signs:
        processes = Processes(Path(signs))
        code = run_child(command, _environment(file, given, Path(signs)), processes.look)
        runs, why = processes.runs(), processes.why_nothing()
    # Those of other hosts are known by their folder alone.
    runs = [path for path in runs or sorted(_entries(folder) - before) if rank_files(path)]
    if not runs:
        failed = f", and the program ended with status {code}" if code else ""
        text = f"no training reached its first step{failed}, so {_from_here(folder)} has no new run"
        console.say(f"warning: {text}. {why or _NOTHING}", "yellow", err=True)
    for path in runs:
        trace, here = read_trace(rank_files(path)[0]), _from_here(path)
        says = trace.header.config.get("summary", True)
        if says and not code and trace.status is None:  # killed, as workers of Ray are
            print_summary(here, "finished")
        elif code or not says:  # its own summary may not have said where
            console.say(f"Recorded {here}", err=True)
    raise typer.Exit(code)


def _from_here(path: Path) -> Path:
    """Return a path as it may be typed here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return leading KEY=VALUE words, and the command behind them."""
    at = next((at for at, word in enumerate(words) if not _OVERRIDE.match(word)), len(words))
    command = list(words[at:])
    if command[:1] == ["--"]:
        command.pop(0)
    if not command:
        raise RlprofError("no program to run", hint=_HOW, code="usage")
    if command[0].startswith("-"):
        raise RlprofError(f"'{command[0]}' is an option, not a program", hint=_HOW, code="usage")
    return list(words[:at]), command


def _environment(file: str | None, given: dict[str, Any], signs: Path) -> dict[str, str]:
    """Return the program's variables: ours, with keys laid over those of the same name."""
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.config.sources import PREFIX, from_environment, merge

    known = from_environment(os.environ, tuple(ProfilerConfig.model_fields))[0]
    laid = merge(known, given)
    names = {key: PREFIX + key.upper() for key in given}
    inner = tuple(f"{name}__" for name in names.values())
    kept = {name: value for name, value in os.environ.items() if not name.startswith(inner)}
    kept |= {name: json.dumps(laid[key], default=str) for key, name in names.items()}
    if file:
        kept["RLPROF_CONFIG"] = os.path.abspath(file)  # the program may change its directory
    kept |= {SIGNS_VARIABLE: str(signs)}
    return {FOLDER_VARIABLE: os.getcwd(), **kept, **launched(kept)}


def _entries(folder: Path) -> set[Path]:
    return {*folder.iterdir()} if folder.is_dir() else set()
