"""Nsight Systems' command line out of a configuration: `nsys profile` and its capture ranges.

All of it is pure except `installed_version`, which asks the program.
"""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError

CaptureRange = Literal["cudaProfilerApi", "nvtx", "none"]
"""What opens and closes a collection of nsys."""

Version = tuple[int, int]
"""Year and release of nsys, as in 2025.3."""

NVTX_CAPTURE = "rlprof.capture@rlprof"
"""The range, and its domain, around each capture on a machine without a GPU."""

_SETTLED = ("capture-range", "capture-range-end", "nvtx-capture", "output", "force-overwrite")
_2022, _2023 = (2022, 4), (2023, 4)
# The last version seen without an option, or without something to trace: by the help of 2022.4.2
# and 2023.4.4, and the guide of 2026. Between two of them nsys decides, before the target starts.
_WITHOUT: dict[str, Version] = {
    "cuda-event-trace": _2023,
    "cuda-trace-all-apis": _2023,
    "cuda-trace-scope": _2023,
    "discard-environment": _2023,
    "flush-on-cudaprofilerstop": _2022,
    "gpu-metrics-devices": _2023,
    "nccl-trace": _2023,
    "python-backtrace": _2022,
    "python-functions-trace": _2023,
    "python-sampling": _2022,
    "python-sampling-frequency": _2022,
    "pytorch": _2023,
    "start-later": _2022,
    "trace=cuda-sw": _2023,
    "trace=cusolver": _2023,
    "trace=gds": _2023,
    "trace=nccl": _2023,
    "trace=python-gil": _2022,
}

_FORKED = (
    "trace-fork-before-exec needs about 20 s at the end and loses the last events of each forked "
    "process; spawned ones are traced without it"
)
_ONCE = (
    "at most {} captures, one per stage and step; if a stage runs more often, give --option "
    "capture-range-end=repeat"
)


class Plan(NamedTuple):
    """A command that can be run, and what to tell people before it runs."""

    argv: list[str]
    remarks: list[str]


def captures(config: ProfilerConfig) -> int | None:
    """Count the captures that a process opens, which is the number of its reports.

    One per wanted step, consecutive ones in one where they are joined; one per wanted stage and
    step where stages were chosen. None where only the training tells: every step, or every stage.
    A stage that begins more than once in a step opens more, a step that never comes opens none.

    Example::

        >>> captures(ProfilerConfig(steps=[1, 2, 5])), captures(ProfilerConfig(steps="all"))
        (3, None)
    """
    if not config.captures:
        return 0
    steps, stages = _step_captures(config), config.integrated.stage
    if steps is None or not config.per_stage:
        return steps
    if stages == "all":
        return None
    return steps * (1 if isinstance(stages, str) else len(stages))


def _step_captures(config: ProfilerConfig) -> int | None:
    joined = config.joins_steps
    if config.steps is None:
        first, end = config.integrated.profile_step_start, config.integrated.profile_step_end
        return 1 if joined else end - first
    if config.steps == "all":
        return 1 if joined else None
    wanted = set(config.steps)
    return sum(not (joined and step - 1 in wanted) for step in wanted)


def capture_range_end(config: ProfilerConfig) -> str:
    """Return the value of ``--capture-range-end``: what was given, else one that fits `captures`.

    ``repeat:N`` matters: with the exact number nsys writes the reports when the last capture has
    closed, and with a larger one, or plain ``repeat``, when the process has ended (measured with
    2022.4 and 2023.4). Neither it nor ``stop`` ends the training, as nsys does left to itself.

    Example::

        >>> [capture_range_end(ProfilerConfig(steps=steps)) for steps in ([3], [3, 5], "all")]
        ['stop', 'repeat:2', 'repeat']
    """
    given = config.nsight.worker.get("capture-range-end")
    if given is not None:
        return given
    number = captures(config)
    if number is None:
        return "repeat"
    return f"repeat:{number}" if number > 1 else "stop"


def plan(
    config: ProfilerConfig,
    target: Sequence[str],
    output: str,
    *,
    opens: CaptureRange,
    version: Version | None,
    force: bool = False,
) -> Plan:
    """Build the `nsys profile` command for a training.

    Options are those of ``nsight.worker``. Sampling of the CPU is off unless asked for: it makes a
    report tens of megabytes larger. Spawned child processes are traced without an option for it.
    Where captures are off, the whole run is recorded.

    Args:
        config: As the training has it, tools included.
        target: The training's program and arguments.
        output: Name of the reports without ``.nsys-rep``; ``%p``, ``%h``, ``%n``, ``%q{NAME}``.
        opens: What opens and closes captures.
        version: Of the installed nsys; None leaves out all that depends on it.
        force: Whether existing reports of that name may be replaced.

    Raises:
        ConfigError: An option is given by its short name.
    """
    options, remarks = _options(config, opens)
    known = [f"--{key}={value}" for key, value in _known(options, version, remarks).items()]
    known += ["--force-overwrite=true"] if force else []
    return Plan(["nsys", "profile", *known, f"--output={output}", *target], remarks)


def _options(config: ProfilerConfig, opens: CaptureRange) -> tuple[dict[str, str], list[str]]:
    given = config.nsight.worker
    for key in given:
        if len(key) == 1:
            raise ConfigError(f"nsight.worker.{key} is a short option: use the long name")
    options = {k: v for k, v in given.items() if v is not None and k not in _SETTLED}
    # nsys takes --cpuctxsw from --sample where that is on
    quiet = ("sample", "cpuctxsw") if "sample" not in given else ()
    options |= {key: "none" for key in quiet if key not in given}
    remarks = [_FORKED] if options.get("trace-fork-before-exec") == "true" else []
    if not config.captures:
        remarks.append(f"captures are off ({config.why_off}), so nsys records the whole run")
        return options, remarks
    if opens == "none":
        return options, [*remarks, "no capture range is set, so nsys records the whole run"]
    options["capture-range"] = opens
    if opens == "nvtx":
        options["nvtx-capture"] = NVTX_CAPTURE
    options["capture-range-end"] = end = capture_range_end(config)
    limited = config.per_stage and not given.get("capture-range-end") and end != "repeat"
    return options, remarks + ([_ONCE.format(captures(config))] if limited else [])


def _known(
    options: Mapping[str, str], version: Version | None, remarks: list[str]
) -> dict[str, str]:
    """Leave out what this version does not know, with a remark each."""
    who = "nsys of unknown version may" if version is None else "nsys {}.{} does".format(*version)
    installed = version or (0, 0)
    known = {}
    for key, value in options.items():
        parts = [f"trace={api}" for api in value.split(",")] if key == "trace" else [key]
        absent = [part for part in parts if installed <= _WITHOUT.get(part, (0, -1))]
        remarks += [f"left out --{part}: {who} not know it" for part in absent]
        if key == "trace":
            kept = [part.removeprefix("trace=") for part in parts if part not in absent]
            known[key] = ",".join(kept) or "none"
        elif not absent:
            known[key] = value
    return known


def tools(config: ProfilerConfig) -> list[str]:
    """Return the tools of a training under nsys: nsight, and those given without torch_profiler.

    A GPU tells only one of the two what it does.
    """
    given = [*(config.tools or (["memory"] if config.memory.level else ()))]
    if "nsight" in given:
        return given
    return ["nsight", *(tool for tool in given if tool != "torch_profiler")]


def variables(config: ProfilerConfig, file: str | None) -> dict[str, str]:
    """Return what to add to the training's environment so that it opens captures for nsys.

    ``RLPROF__TOOLS`` where the configuration does not name nsight; with a file also
    what makes every Lightning training record itself as the file says.
    """
    added = {"RLPROF": "1", "RLPROF_CONFIG": file} if file else {}
    if "nsight" not in (config.tools or ()):
        added["RLPROF__TOOLS"] = json.dumps(tools(config))
    return added


def report_pattern(
    output: str, environment: Mapping[str, str], host: str
) -> tuple[Path, re.Pattern[str]]:
    """Return the directory of an output's reports, and what the name of each matches.

    nsys puts in the target's process (``%p``), a free number (``%n``), the host (``%h``) and
    variables, and appends the number of the capture where ranges repeat. A report that it could
    not convert keeps the suffix ``.qdstrm``.
    """
    texts = {"%%": "%", "%h": host, "%p": "\0", "%n": "\0"}
    parts = re.split(r"(%%|%h|%p|%n|%q\{\w+\})", output)
    path = Path(
        "".join(
            environment.get(part[3:-1], "") if part.startswith("%q{") else texts.get(part, part)
            for part in parts
        )
    )
    # nsys 2022.4 leaves %n as it is
    name = r"(?:\d+|%n)".join(map(re.escape, path.name.split("\0")))
    return path.parent, re.compile(name + r"(\.\d+)?\.(nsys-rep|qdstrm)")


def installed_version(program: str) -> Version | None:
    """Ask a program for its version; None when it does not tell one."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"version (\d{4})\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None
