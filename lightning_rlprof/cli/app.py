"""The command line itself: what ``rlprof`` offers, and how it ends when something is wrong."""

import errno
import io
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
from lightning_rlprof.cli.demo.command import demo
from lightning_rlprof.cli.doctor.command import doctor
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import redact

# What a machine refuses, wherever a command meets it, is no bug of ours.
_REFUSED = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.EDQUOT,
)
_WRONG_WORDS: Any = typer.BadParameter.__base__  # whose module is not the same in all versions


class _Words(TyperGroup):
    """Commands of one word and of two: ``nsys -- python train.py``, and ``nsys scrub FILE``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Find a command by two words, else by one."""
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words before the command; raises `RlprofError` for wrong ones."""
        try:
            return super().parse_args(ctx, args)
        except _WRONG_WORDS as error:
            raise _wrong(error) from error

    def invoke(self, ctx: Any) -> Any:
        """Run a command; raises `RlprofError` for what is wrong with its words."""
        try:
            return super().invoke(ctx)
        except _WRONG_WORDS as error:
            raise _wrong(error) from error


def _wrong(error: Any) -> Exception:
    """Return one line instead of a usage, an error in a box, and where to find help."""
    if type(error).__name__ == "NoArgsIsHelpError":  # help, where no word was given
        whole: Exception = error
        return whole
    where = error.ctx.command_path if error.ctx else "rlprof"
    return RlprofError(f"{error.format_message()} (see {where} --help)")


app = typer.Typer(
    cls=_Words,
    help="Show where the GPU-seconds of an RL training step go.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
"""The command line."""

_config = typer.Typer(help="Check a configuration, or print its schema.", no_args_is_help=True)

app.command()(demo)
app.command()(run_commands.summary)
app.command()(run_commands.report)
app.command()(compare.compare)
app.command()(run_commands.trace)
app.command("show")(analysis_commands.analysis)
app.command()(analysis_commands.findings)
app.command()(analysis_commands.ledger)
app.command()(analysis_commands.stragglers)
app.command()(analysis_commands.path)
app.command()(whatif.whatif)
app.command()(analysis_commands.memory)
app.command()(analysis_commands.throughput)
app.command()(ascend.analyse)
app.command()(store_commands.ingest)
app.command()(store_commands.sql)
app.command()(store_commands.ship)
app.command()(doctor)
app.command("nsys", context_settings={"allow_interspersed_args": False})(nsys.profile)
app.command("nsys scrub")(nsys.scrub)
_config.command()(config.check)
_config.command()(config.schema)
app.add_typer(_config, name="config")


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
    """Show where the GPU-seconds of an RL training step go."""


def main() -> None:
    """Run ``rlprof``; what the user can mend is one line on standard error and exit status 1.

    Anything else is a bug of ours and keeps its traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that its encoding lacks is spelled out
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="rlprof")  # whatever started this process
    except RlprofError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        _fail(f"{error.filename or 'standard output'}: {error.strerror}")


def _fail(text: str) -> NoReturn:
    from lightning_rlprof.report.terminal import plain

    sys.stderr.write(f"rlprof: {plain(' '.join(redact(text).split()))}\n")
    sys.exit(1)
