"""The command line ``rlprof``: its verbs in help panels, its exit codes, and how errors print."""

import errno
import io
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from lightning_rlprof.cli import (
    analysis_commands,
    ascend,
    compare,
    config,
    nsys,
    run_commands,
    store_commands,
    whatif,
)
from lightning_rlprof.cli.console import CheckFailedError, did_you_mean, say, use_output
from lightning_rlprof.cli.demo.command import demo
from lightning_rlprof.cli.doctor.command import doctor
from lightning_rlprof.cli.open_run import with_output_options
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import redact

# Refusals of the machine: an error of one line wherever they happen, without a traceback.
_REFUSED = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.EDQUOT,
)
_USAGE_ERROR: Any = typer.BadParameter.__base__  # its module differs between versions of Typer


class _Verbs(TyperGroup):
    """A group that raises `RlprofError` for usage errors, and finds ``whatif check``."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a verb, and drop Python types from its help: ``<Path>``, ``<bool>``, ``{RUN}``."""
        command: Any = super().get_command(ctx, cmd_name)
        if command is None:
            return None
        for param in [*command.params, command.get_help_option(ctx)]:
            if param.param_type_name == "argument":
                param.display_type = lambda ctx: ""
                param.get_usage_pieces = lambda ctx, name=param.metavar: [name]
            elif param.is_flag:
                param.metavar = ""
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Find a verb of two words, else of one."""
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words before the verb."""
        try:
            return super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            raise _usage(error) from error

    def invoke(self, ctx: Any) -> Any:
        """Run a verb."""
        try:
            return super().invoke(ctx)
        except _USAGE_ERROR as error:
            raise _usage(error) from error


def _usage(error: Any) -> Exception:
    """Return one line and a hint instead of a usage text and a box."""
    if type(error).__name__ == "NoArgsIsHelpError":  # rlprof without words prints its help
        whole: Exception = error
        return whole
    path = error.ctx.command_path if error.ctx else "rlprof"
    text = str(error.format_message()).rstrip(".")
    return RlprofError(f"{text[:1].lower()}{text[1:]}", hint=f"See {path} --help", code="usage")


_HELP = "Profile RL post-training: see where GPU time goes and what to fix first."

app = typer.Typer(
    cls=_Verbs,
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
"""The command line."""

START, INSPECT, DIAGNOSE, EXPORT, RECORD = "Start", "Inspect", "Diagnose", "Export", "Record"

_TOPICS = {
    "inputs": (
        "RUN is one of:\n"
        "  a run directory            profiler_data/my-run (contains rank-*.jsonl)\n"
        "  a directory of runs        profiler_data (the newest run is used)\n"
        "  a rank file                profiler_data/my-run/rank-00000.jsonl\n"
        "  a torch.profiler trace     trace.json, trace.json.gz, or a directory of traces\n"
        "  an Nsight Systems report   report.nsys-rep, or its export report.sqlite\n"
        "  a torch_npu capture        a *_ascend_pt directory (rlprof ascend parse first)\n"
        "  a URL of one of these      s3://bucket/runs/my-run, for any fsspec store"
    ),
    "exit-codes": (
        "0  done; a table without data is also 0\n"
        "1  check failed: compare --fail-if-slower, config check, doctor, ingest, ascend parse\n"
        "2  usage error, unreadable input or missing dependency\n"
        "3  inconclusive: compare --fail-if-slower only\n"
        "rlprof nsys run returns the exit code of the training."
    ),
    "environment": (
        "RLPROF=1            record every Lightning training of a process, without code changes\n"
        "RLPROF_CONFIG       config file that RLPROF=1 uses\n"
        "RLPROF__KEY         override one key, for example RLPROF__STEPS='[3, 5]'\n"
        "RLPROF_RUN          run of an on_finish command (rlprof sets it)\n"
        "RLPROF_RANK         rank of an on_finish command (rlprof sets it)\n"
        "NO_COLOR            print without colors\n"
        "COLUMNS             width of tables"
    ),
}


def help_topic(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="inputs, exit-codes or environment")
    ] = None,
) -> None:
    """Explain inputs, exit codes or environment variables."""
    if topic is None:
        say("Topics: " + ", ".join(f"rlprof help {name}" for name in _TOPICS))
        say("Help of a verb: rlprof VERB --help")
    elif topic in _TOPICS:
        for line in _TOPICS[topic].splitlines():
            say(line)
    else:
        hint = f"{did_you_mean(topic, _TOPICS)} Topics: {', '.join(_TOPICS)}".strip()
        raise RlprofError(f"unknown topic '{topic}'", hint=hint, code="usage")


def _add(panel: str, name: str, verb: Any, *, formats: bool = False, json: bool = True) -> None:
    command = with_output_options(verb, formats=formats, json=json)
    hidden = " " in name
    app.command(name, rich_help_panel=panel, hidden=hidden)(command)


_add(START, "demo", demo, json=False)
_add(START, "doctor", doctor)
app.command("help", rich_help_panel=START)(help_topic)
_add(INSPECT, "summary", run_commands.summary, formats=True)
_add(INSPECT, "show", analysis_commands.show, formats=True)
_add(INSPECT, "report", run_commands.report, json=False)
_add(INSPECT, "sql", store_commands.sql, formats=True)
_add(DIAGNOSE, "findings", analysis_commands.findings, formats=True)
_add(DIAGNOSE, "ledger", analysis_commands.ledger, formats=True)
_add(DIAGNOSE, "stragglers", analysis_commands.stragglers, formats=True)
_add(DIAGNOSE, "critical-path", analysis_commands.critical_path, formats=True)
_add(DIAGNOSE, "whatif", whatif.whatif, formats=True)
_add(DIAGNOSE, "whatif check", whatif.check, formats=True)
_add(DIAGNOSE, "compare", compare.compare, formats=True)
_add(EXPORT, "export", run_commands.export, json=False)
_add(EXPORT, "upload", store_commands.upload, json=False)
_add(EXPORT, "ingest", store_commands.ingest)


def _group(name: str, text: str) -> typer.Typer:
    group = typer.Typer(cls=_Verbs, help=text, no_args_is_help=True)
    app.add_typer(group, name=name, rich_help_panel=RECORD)
    return group


_nsys = _group("nsys", "Run a training under Nsight Systems.")
_nsys.command("run", context_settings={"allow_interspersed_args": False})(nsys.run)
_config = _group("config", "Check a configuration, or print its schema.")
_config.command("check")(with_output_options(config.check))
_config.command("schema")(config.schema)
_ascend = _group("ascend", "Parse raw profiler output of Ascend NPUs.")
_ascend.command("parse")(with_output_options(ascend.parse))


def _version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"rlprof {version('lightning-rlprof')}")
        except PackageNotFoundError:  # run from a source tree that was never installed
            typer.echo("rlprof, not installed")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version"),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run ``rlprof``; an error that the user can fix is printed, and the exit code is 1 or 2.

    Any other exception is a bug of rlprof and keeps its traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters outside its encoding are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    use_output()
    try:
        app(prog_name="rlprof")  # whatever name started this process
    except RlprofError as error:
        _fail(error)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        _fail(RlprofError(f"{error.filename or 'standard output'}: {error.strerror}"))


def _fail(error: RlprofError) -> NoReturn:
    """Print an error, and its hint if it has one, without credentials or control characters."""
    from lightning_rlprof.report.terminal import plain

    text, hint = (plain(" ".join(redact(each).split())) for each in (str(error), error.hint))
    if _wants_json(sys.argv[1:]):
        found = {"code": error.code or "error", "message": text, "hint": hint or None}
        sys.stderr.write(json.dumps({"error": found}) + "\n")
    else:
        sys.stderr.write(f"rlprof: error: {text}\n" + (f"  hint: {hint}\n" if hint else ""))
    sys.exit(1 if isinstance(error, CheckFailedError) else 2)


def _wants_json(words: list[str]) -> bool:
    """Return whether a command line asks for JSON, even if it cannot be parsed."""
    own = words[: words.index("--")] if "--" in words else words
    return "--json" in own or "--format=json" in own or "--format json" in " ".join(own)
