"""The verb ``nsys run``: a training under Nsight Systems."""

import os
import re
import secrets
import shlex
import shutil
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.record import run_child
from lightning_rlprof.errors import ConfigError, RecorderError, RlprofError

if TYPE_CHECKING:
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.recording.nsys import CaptureRange


_DEVICES = Path("/dev")
_INSTALL = (
    "Install Nsight Systems (https://developer.nvidia.com/nsight-systems, or nsight-systems-cli "
    "from NVIDIA's package repositories). To see the command only, add --dry-run."
)
_SECRETS = (
    "a report contains the environment variables of the training and of other processes, with "
    "every token: do not share it"
)
_NO_REPORT = (
    "Did the training reach a captured step? Does it use a ProfilerCallback, or --config here?"
)
_NO_REPORT_WITH = {
    "cudaProfilerApi": " A training without GPU work needs --capture-range nvtx.",
    "nvtx": " nsys 2023.4 and older ignores ranges of the package nvtx 0.2.12 and newer.",
    "none": "",
}
_RLPROF_OPTIONS = {
    "capture-range": "--capture-range",
    "nvtx-capture": "--capture-range nvtx",
    "force-overwrite": "--force",
    "output": "-o",
}
# Variables that choose captured steps.
_STEPS = ("RLPROF__STEPS", "RLPROF__INTEGRATED__PROFILE_STEP")


Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND", help="Training to run: python train.py …")
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Config file; also turns rlprof on inside COMMAND"),
]
Name = Annotated[
    str | None,
    typer.Option(
        "-o", "--output", metavar="NAME", help="Name of the reports; may contain %p, %h, %q{RANK}"
    ),
]
Option = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Option of nsys profile (repeatable)"),
]
Range = Annotated[
    Literal["cudaProfilerApi", "nvtx", "none"] | None,
    typer.Option(
        metavar="RANGE",
        help="What opens a capture: cudaProfilerApi (default with a GPU), nvtx (without), none",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command, run nothing")]
Force = Annotated[bool, typer.Option("-f", "--force", help="Overwrite existing files")]


def run(
    command: Command,
    config: Config = None,
    output: Name = None,
    option: Option = None,
    capture_range: Range = None,
    dry_run: DryRun = False,
    force: Force = False,
) -> None:
    """Run a training under Nsight Systems, with one report per captured step or stage.

    Example: rlprof nsys run --config rlprof.yaml -- python train.py
    """
    from lightning_rlprof.integrations.lightning.autoload import is_on
    from lightning_rlprof.recording.nsys import installed_version, plan, variables

    program = shutil.which("nsys")
    if program is None and not dry_run:
        raise RecorderError("nsys is not on PATH", hint=_INSTALL, code="no_nsys")
    if command[0].startswith("-"):
        hint = "Options of nsys: --option key=value"
        raise RlprofError(f"'{command[0]}' is an option, not a program", hint=hint)
    file = str(config) if config else None
    if file is None and is_on():
        file = os.environ.get("RLPROF_CONFIG")
    given, settings = _settings(file, option or [])
    opens = capture_range or _by_device()
    name = _name(output, settings, force=force)
    version = installed_version(program) if program else None
    argv, remarks = plan(settings, command, name, opens=opens, version=version, force=force)
    added = variables(given, file)
    words = [f"{variable}={shlex.quote(value)}" for variable, value in added.items()]
    console.say(" ".join([*words, shlex.join(argv)]))
    for remark in remarks:
        console.note(remark)
    console.warn(_SECRETS)
    if not dry_run:
        raise typer.Exit(_recorded(argv, added, name, opens))


def _settings(file: str | None, options: list[str]) -> tuple["ProfilerConfig", "ProfilerConfig"]:
    """Return the configuration as given, and as the training under nsys will read it."""
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.recording.nsys import tools

    worker = {}
    for word in options:
        key, equals, value = word.removeprefix("--").partition("=")
        key = key.replace("_", "-")
        if not (key and equals):
            raise ConfigError(f"--option {word} is not key=value; for example sample=process-tree")
        if key in _RLPROF_OPTIONS:
            raise ConfigError(f"--option {word}: use {_RLPROF_OPTIONS[key]} instead")
        worker[key] = value
    added: dict[str, Any] = {"nsight": {"worker": worker}} if worker else {}
    given = ProfilerConfig.build(file, **added)
    known = file is not None or any(name.startswith(_STEPS) for name in os.environ)
    if not known and given.nsight.worker.get("capture-range-end") is None:
        # The training's code may choose the captured steps, so their number is unknown here.
        added = {"nsight": {"worker": {**worker, "capture-range-end": "repeat"}}}
    return given, ProfilerConfig.build(file, tools=tools(given), **added)


def _name(given: str | None, config: "ProfilerConfig", *, force: bool) -> str:
    """Return a unique name for the reports, in an existing directory.

    nsys writes reports to /tmp, after the training, if the directory does not exist.
    """
    if given is None:
        folder = Path(config.integrated.profile_save_path)
        now = f"nsys-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
        return str(folder / now).replace("%", "%%")
    name = given.removesuffix(".nsys-rep")
    if name.endswith("/") or Path(name).is_dir():
        raise RlprofError(f"{given} is a directory", hint="-o takes the name of a report in it.")
    folder, there = _reports(name)
    if not folder.is_dir():
        raise RlprofError(f"{given}: directory {folder} does not exist")
    if there and not force and not re.search("%[pn]", name):
        hint = "Replace it with --force, or choose another name with -o."
        raise RlprofError(f"{min(there)} exists already", hint=hint)
    return name


def _by_device() -> "CaptureRange":
    """Choose by whether this machine has a GPU, without loading torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "nvtx"
    if any(_DEVICES.glob("nvidia[0-9]*")):
        return "cudaProfilerApi"
    wsl = (_DEVICES / "dxg").exists() and shutil.which("nvidia-smi")  # other names for devices
    return "cudaProfilerApi" if wsl else "nvtx"


def _recorded(argv: list[str], added: Mapping[str, str], name: str, opens: "CaptureRange") -> int:
    """Run nsys, print new reports or why there are none, and return the training's status."""
    folder, before = _reports(name)
    with console.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    code = run_child(argv, os.environ | dict(added))
    new = {path: facts for path, facts in _reports(name)[1].items() if before.get(path) != facts}
    complete = []
    for path, (size, _) in sorted(new.items()):
        if path.suffix == ".qdstrm":
            console.warn(f"nsys could not convert {path}; its messages are above")
        elif size:
            console.wrote(path)
            complete.append(path)
        else:
            console.warn(f"{path} is empty: nsys was stopped while it wrote")
    if not new:
        failed = f", and nsys or the training ended with status {code}" if code else ""
        console.warn(f"no report was written{failed}. {_NO_REPORT}{_NO_REPORT_WITH[opens]}")
    if complete:
        console.next_command("rlprof", "summary", complete[0])
    return code


def _reports(name: str) -> tuple[Path, dict[Path, tuple[int, int]]]:
    """Return the directory of a name's reports, and size and time of those that are there."""
    from lightning_rlprof.recording.nsys import report_pattern

    folder, pattern = report_pattern(name, os.environ, socket.gethostname())
    found = {}
    for path in folder.glob("*"):
        if pattern.fullmatch(path.name) and path.is_file():
            found[path] = (path.stat().st_size, path.stat().st_mtime_ns)
    return folder, found
