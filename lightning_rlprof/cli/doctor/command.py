"""The command that says what this machine can record, and proves it by a tiny recording."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.cli.console import bar, next_command, put_json, say
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import local_path

if TYPE_CHECKING:
    from lightning_rlprof.cli.doctor.check import Check


_STYLES = {"ok": "green", "missing": "dim", "unknown": "yellow", "broken": "red"}
_WIDTH = max(map(len, _STYLES))


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            parser=local_path,
            metavar="PATH",
            help="A YAML file; also say what it needs, and fail without it",
        ),
    ] = None,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Record a tiny run and check what is in it")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON")] = False,
) -> None:
    """Say what this machine can record, what is missing, and how to get it.

    Example: rlprof doctor --selftest
    """
    if selftest and config:
        raise RlprofError("--selftest records with what the machine has: leave out --config")
    if selftest:
        _selftest(as_json=as_json)
    else:
        _look(config, as_json=as_json)


def _look(config: Path | None, *, as_json: bool) -> None:
    from lightning_rlprof.cli.doctor.diagnosis import diagnose, recordable
    from lightning_rlprof.cli.doctor.requirements import check_needs
    from lightning_rlprof.config.profiler_config import ProfilerConfig

    settings = ProfilerConfig.build(config)
    with bar("Looking"):
        found = diagnose(Path(settings.integrated.profile_save_path))
        needs = check_needs(settings, found) if config else []
    if as_json:
        data: dict[str, Any] = {"device": found.device, "records": recordable(found)}
        put_json(data | {"checks": _data(found.checks), "needs": _data(needs)})
    else:
        _tell(found.checks)
        if config:
            say(f"{config} needs:", "bold")
            _tell(needs)
        say(f"A run here can hold: {', '.join(recordable(found))}", "bold")
    lacking = [need.name for need in needs if need.state in ("missing", "broken")]
    if lacking:
        keys = ", ".join(dict.fromkeys(lacking))
        raise RlprofError(f"{config} needs what is not here: {keys}")
    if not as_json:
        next_command("rlprof", "doctor", "--selftest")


def _selftest(*, as_json: bool) -> None:
    from lightning_rlprof.cli.doctor.selftest import run_selftest

    with bar("Recording"):
        checks = run_selftest()
    if as_json:
        put_json({"selftest": _data(checks)})
    else:
        _tell(checks)
    failed = [check.name for check in checks if check.state != "ok"]
    if failed:
        raise RlprofError(f"the self-test failed: {', '.join(failed)}")
    if not as_json:
        say("All of it is as it should be; nothing of it was kept", "bold")


def _data(checks: "list[Check] | tuple[Check, ...]") -> list[dict[str, str]]:
    return [asdict(check) for check in checks]


def _tell(checks: "list[Check] | tuple[Check, ...]") -> None:
    """Print a finding a line, and below it the cure, where it can be mended."""
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        say(f"{check.state:{_WIDTH}}  {check.name:{width}}  {check.says}", _STYLES[check.state])
        if check.cure:
            say(f"{'':{_WIDTH + width + 4}}{check.cure}", "dim")
