"""The command line ``rlprof``: its verbs in help panels, its exit codes, and how errors print."""

import errno
import inspect
import io
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from lightning_rlprof.cli import (
    analysis_commands,
    compare,
    config,
    doctor,
    live_commands,
    mcp,
    record,
    run_commands,
    size,
)
from lightning_rlprof.cli.console import (
    CheckFailedError,
    did_you_mean,
    say,
    use_output,
    without_readers,
)
from lightning_rlprof.cli.demo.command import demo
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import redact
from lightning_rlprof.system.version import VERSION

# The system refuses with these errors. The user gets one line, never a traceback.
_REFUSED = ("EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "ENOSPC", "EDQUOT")
# These are EX_SOFTWARE, and what a shell reports for SIGINT and SIGPIPE.
_BUG, _INTERRUPTED, _NO_READER = 70, 128 + 2, 128 + 13
_USAGE_ERROR: Any = typer.BadParameter.__base__  # Its module differs between versions of Typer.


def _panel(part: Any, default: str) -> str:
    """Return the help panel of an option or a verb."""
    panel = getattr(part, "rich_help_panel", None)
    return panel if isinstance(panel, str) else default


def _write_sections(formatter: Any, rows: Iterable[tuple[str, tuple[str, str]]]) -> None:
    """Write rows of help below the headings of their panels."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for panel, row in rows:
        panels.setdefault(panel, []).append(row)
    for panel, found in panels.items():
        with formatter.section(panel):
            formatter.write_dl(found)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the arguments of a command, and its options by panel."""
    rows = []
    for param in command.get_params(ctx):
        default = "Arguments" if param.param_type_name == "argument" else "Options"
        if record := param.get_help_record(ctx):
            rows.append((_panel(param, default), record))
    _write_sections(formatter, rows)


class _Verb(TyperCommand):
    """A command whose help is plain text in sections: Rich's boxes would take 57 ms."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of a command line; of one to complete, only which are given."""
        if ctx.resilient_parsing:
            for param in self.get_params(ctx):  # Typer would import Pydantic, which takes 50 ms.
                param.process_value = lambda ctx, value: value  # type: ignore[method-assign]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        _write_options(self, ctx, formatter)


class _Verbs(TyperGroup):
    """A group that raises `RlprofError` for usage errors."""

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

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs as they are used; of a verb, its commands as they were added."""
        place = {name: at for at, name in enumerate(_ORDER)}
        return sorted(self.commands, key=lambda name: place.get(name, len(place)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words before the verb; print the help if there is neither."""
        if not args and not ctx.resilient_parsing:
            with _own_exits():
                typer.echo(ctx.get_help())
            raise typer.Exit(2)
        kept = self.params, self.add_help_option
        if not args or not args[0].startswith("-"):
            # Even for options that are not given, Typer imports Pydantic, which takes 50 ms.
            self.params, self.add_help_option = [], False
        try:
            with _own_exits():
                return super().parse_args(ctx, args)
        finally:
            self.params, self.add_help_option = kept

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write verbs by panel, then options."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        _write_sections(
            formatter,
            (
                (_panel(command, "Commands"), (name, command.get_short_help_str(limit=200)))
                for name, command in found
            ),
        )
        _write_options(self, ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run a verb."""
        with _own_exits():
            return super().invoke(ctx)


@contextmanager
def _own_exits() -> Iterator[None]:
    """Raise one line and a hint instead of a usage text and a box; end quietly without a reader."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        # This happens in `rlprof … | head`, where Typer would exit with 1.
        without_readers()
        raise typer.Exit(_NO_READER) from error
    except KeyboardInterrupt as error:  # Typer's exit code differs between versions.
        raise typer.Exit(_INTERRUPTED) from error
    except _USAGE_ERROR as error:
        path = error.ctx.command_path if error.ctx else "rlprof"
        # Typer adds a full stop, and may add this prefix.
        text = str(error.format_message()).rstrip(".").replace("Value error, ", "")
        hint = f"See {path} --help"
        raise RlprofError(f"{text[:1].lower()}{text[1:]}", hint=hint, code="usage") from error


app = typer.Typer(
    cls=_Verbs,
    help="Profile RL post-training: see where GPU time goes and what to fix first.",
    epilog="Start here: rlprof demo. All of a verb: rlprof VERB --help. Topics, as in rlprof help "
    "inputs: inputs, exit-codes, environment, agents.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
"""The command line."""

_TOPICS = {
    "inputs": """\
RUN is one of:
  a run directory            profiler_data/my-run (contains rank-*.jsonl)
  the start of a run's name  20261125, if only one run in profiler_data begins like that
  a directory of runs        profiler_data (the newest run is used)
  a rank file                profiler_data/my-run/rank-00000.jsonl
  a torch.profiler trace     trace.json, trace.json.gz, or a directory of traces
  an Nsight Systems report   report.nsys-rep, or its export report.sqlite
  a torch_npu capture        a *_ascend_pt directory (rlprof ascend parse first) or trace_view.json
  an archive of one of these traces.zip, traces.tar.gz, traces.tgz or traces.tar
  spans of OpenTelemetry     lines of OTLP, as a collector writes them, or a directory of such files
  a URL of one of these      s3://bucket/runs/my-run, for any fsspec store""",
    "exit-codes": """\
0    done; a table without data is also 0
1    check failed: compare --fail-if-slower, config check, doctor --selftest, ingest, ascend parse,
     capture
2    usage error, unreadable input or missing dependency
3    inconclusive: compare --fail-if-slower only
70   bug of rlprof: a traceback is printed, please report it
130  interrupted with Ctrl-C
141  the reader of the output ended early, as in rlprof … | head
rlprof run and rlprof nsys run return the exit code of the training.""",
    "environment": """\
RLPROF=1            record every Lightning training of a process, without code changes
RLPROF_CONFIG       config file that RLPROF=1 uses
RLPROF__KEY         override one key, for example RLPROF__STEPS='[3, 5]'
NO_COLOR            print without colors
COLUMNS             width of tables""",
}


def help_topic(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VERB]", help="A verb, or agents, inputs, exit-codes, environment"),
    ] = None,
) -> None:
    """Print the help of a verb, or a topic such as agents."""
    name = " ".join(words or [])
    if not words:
        app(["--help"], prog_name="rlprof")
    elif name == "agents":
        typer.echo(mcp.skill(), nl=False)
    elif name in _TOPICS:
        for line in _TOPICS[name].splitlines():
            say(line)
    elif words[0] in _ORDER:
        app([*words, "--help"], prog_name="rlprof")
    else:
        topics = ["agents", *_TOPICS]
        near = did_you_mean(name, [*topics, *_ORDER])
        hint = f"{near} Topics: {', '.join(topics)}, and each verb".strip()
        raise RlprofError(f"unknown topic '{name}'", hint=hint, code="usage")


def _with_output_options(
    verb: Callable[..., None], *, formats: bool = False, json: bool = True
) -> Callable[..., None]:
    """Give a verb the options of `use_output`, which is called with them before it runs."""
    absent = {"output_format": not formats, "limit": not formats, "as_json": not json}
    options = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(use_output).parameters.values()
        if not absent.get(each.name)
    ]

    @wraps(verb)
    def run(**given: Any) -> None:
        use_output(**{each.name: given.pop(each.name) for each in options})
        verb(**given)

    own = inspect.signature(verb)
    run.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*own.parameters.values(), *options]
    )
    return run


_FIRST = 4  # Verbs that a newcomer needs.
_ORDER: list[str] = []  # Verbs in the order in which they are used.
# Options after the program belong to the training.
_BEHIND: dict[str, Any] = {"allow_interspersed_args": False}


def _panel_of_next(name: str) -> str:
    """Return the heading of the verb that is added now."""
    _ORDER.append(name)
    return "Most used" if len(_ORDER) <= _FIRST else "More"


def _verb(
    name: str, verb: Any, *, formats: bool = False, json: bool = True, plain: bool = False
) -> None:
    """Add a verb; a plain one has no output options."""
    command = verb if plain else _with_output_options(verb, formats=formats, json=json)
    panel = _panel_of_next(name)
    settings = _BEHIND if name == "run" else {}
    app.command(name, cls=_Verb, rich_help_panel=panel, context_settings=settings)(command)


def _group(name: str, text: str) -> typer.Typer:
    """Add a verb of which each second word is a command."""
    group = typer.Typer(cls=_Verbs, help=text, rich_markup_mode=None)
    app.add_typer(group, name=name, rich_help_panel=_panel_of_next(name))
    return group


_verb("run", record.run, plain=True)
_verb("report", run_commands.report, json=False)
_verb("findings", analysis_commands.findings, formats=True)
_verb("watch", live_commands.watch, formats=True)
_verb("summary", run_commands.summary, formats=True)
_verb("compare", compare.compare, formats=True)
_verb("hang", live_commands.hang, formats=True)
_verb("show", analysis_commands.show, formats=True)
_verb("stragglers", analysis_commands.stragglers, formats=True)
_verb("whatif", analysis_commands.whatif, formats=True)
_verb("sql", run_commands.sql, formats=True)
_verb("ls", run_commands.list_runs, formats=True)
_verb("open", run_commands.open_in_perfetto, json=False)
_verb("serve", live_commands.serve, plain=True)
_verb("export", run_commands.export, json=False)
_verb("ingest", run_commands.ingest)
_verb("capture", live_commands.capture, plain=True)
_verb("mcp", mcp.mcp, plain=True)
_nsys = _group("nsys", "Run a training under Nsight Systems.")
_nsys.command("run", cls=_Verb, context_settings=_BEHIND)(record.nsys_run)
_ascend = _group("ascend", "Parse raw profiler output of Ascend NPUs.")
_ascend.command("parse", cls=_Verb)(_with_output_options(run_commands.ascend_parse))
_config = _group("config", "Write, check or describe a configuration.")
_config.command("check", cls=_Verb)(_with_output_options(config.check))
_config.command("init", cls=_Verb)(_with_output_options(config.init, json=False))
_config.command("schema", cls=_Verb)(config.schema)
_verb("size", size.size, formats=True)
_verb("demo", demo, json=False)
_verb("doctor", doctor.doctor)
_verb("help", help_topic, plain=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlprof {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run ``rlprof``; an error that the user can fix is printed, and the exit code is 1 or 2.

    Any other exception is a bug of rlprof: its traceback is printed, and the exit code is 70.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stdout is None:  # The caller may have closed it.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    use_output()
    try:
        app(prog_name="rlprof")  # This process may have been started under another name.
    except RlprofError as error:
        _fail(error)
    except OSError as error:
        if errno.errorcode.get(error.errno or 0) not in _REFUSED:
            _say_bug()
        _fail(RlprofError(f"{error.filename or 'standard output'}: {error.strerror}"))
    except Exception:
        _say_bug()


def _say_bug() -> NoReturn:
    traceback.print_exc()
    sys.exit(_BUG)


def _fail(error: RlprofError) -> NoReturn:
    """Print an error, and its hint if it has one, without credentials or control characters."""
    from lightning_rlprof.system.location import plain

    text, hint = (plain(" ".join(redact(each).split())) for each in (str(error), error.hint))
    said = f"rlprof: error: {text}\n" + (f"  hint: {hint}\n" if hint else "")
    if _wants_json(sys.argv[1:]):
        found = {"code": error.code or "error", "message": text, "hint": hint or None}
        said = json.dumps({"error": found}) + "\n"
    try:
        sys.stderr.write(said)
    except BrokenPipeError:
        without_readers()
    status = 1 if isinstance(error, CheckFailedError) else 2
    from lightning_rlprof.store.sql import ABANDONED

    if any(thread.name == ABANDONED for thread in threading.enumerate()):
        # At an orderly exit DuckDB would print all that the query still has.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _wants_json(words: list[str]) -> bool:
    """Return whether a command line asks for JSON, even if it cannot be parsed."""
    own = words[: words.index("--")] if "--" in words else words
    return "--json" in own or "--format=json" in own or "--format json" in " ".join(own)
