"""The verb ``doctor``: check what this machine can record, and prove it by a tiny recording."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import local_path

if TYPE_CHECKING:
    from lightning_rlprof.cli.doctor.machine import Check, Framework


_STYLES = {"ok": "green", "missing": "dim", "warn": "yellow", "broken": "red"}
_WIDTH = max(map(len, _STYLES))


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            parser=local_path,
            metavar="FILE",
            help="YAML file; exits 1 if this machine cannot record what it asks for",
        ),
    ] = None,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Record a tiny run and check its contents")
    ] = False,
) -> None:
    """Check what this machine can record, and how to get the rest.

    Example: rlprof doctor --selftest
    """
    if selftest and config:
        raise RlprofError("--selftest does not use a configuration: leave out --config")
    if selftest:
        _selftest()
        return
    from lightning_rlprof.cli.doctor.machine import check_needs, diagnose, doors, recordable
    from lightning_rlprof.config.profiler_config import ProfilerConfig

    settings = ProfilerConfig.build(config)
    with console.bar("Checking"):
        found = diagnose(Path(settings.integrated.profile_save_path))
        needs = check_needs(settings, found) if config else []
    checks, records = [*found.checks.values()], recordable(found)
    if console.is_json():
        data: dict[str, Any] = {"device": found.device, "records": records}
        data |= {"checks": _data(checks), "needs": _data(needs)}
        console.put_json(data | {"frameworks": [each._asdict() for each in doors()]})
    else:
        _print_checks(checks)
        _print_doors(doors())
        if config:
            console.say(f"{config} needs:", "bold")
            _print_checks(needs)
        console.say(f"This machine can record: {', '.join(records)}", "bold")
    if lacking := [need.name for need in needs if need.state in ("missing", "broken")]:
        keys = ", ".join(dict.fromkeys(lacking))
        raise console.CheckFailedError(f"this machine lacks what {config} needs: {keys}")
    console.next_command("rlprof", "doctor", "--selftest")


def _selftest() -> None:
    from lightning_rlprof.cli.doctor.selftest import run_selftest

    with console.bar("Recording"):
        checks = run_selftest()
    if console.is_json():
        console.put_json({"selftest": _data(checks)})
    else:
        _print_checks(checks)
    if failed := [check.name for check in checks if check.state != "ok"]:
        raise console.CheckFailedError(f"self-test failed: {', '.join(failed)}")
    console.status("Self-test passed. Temporary files were removed.", "bold")


def _print_doors(found: "list[Framework]") -> None:
    """Print the frameworks that ``rlprof run`` records, first those that are installed."""
    console.say("Frameworks that rlprof run records:", "bold")
    width = max(len(each.name) for each in found)
    for each in found:
        if each.installed:
            console.say(f"  {each.name:{width}}  {each.installed}, tested with {each.tested}")
    if absent := [each.name for each in found if not each.installed]:
        console.say(f"  not installed here: {', '.join(absent)}", "dim")


def _data(checks: "list[Check]") -> list[dict[str, str]]:
    return [check._asdict() for check in checks]


def _print_checks(checks: "list[Check]") -> None:
    """Print a line per check, and below it how to fix it."""
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        text = f"{check.state:{_WIDTH}}  {check.name:{width}}  {check.message}"
        console.say(text, _STYLES[check.state])
        if check.fix:
            console.say(f"{'':{_WIDTH + width + 4}}{check.fix}", "dim")
