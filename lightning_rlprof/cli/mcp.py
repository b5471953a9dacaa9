"""The verb ``mcp``: a server of the Model Context Protocol, through which an agent asks of runs.

Each tool is a verb that only reads, with its Markdown as the answer. All paths are below one root,
and nothing is written, not even a cache.
"""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import typer

from lightning_rlprof.cli import analysis_commands, compare, config, console, live_commands
from lightning_rlprof.cli import run_commands as runs
from lightning_rlprof.cli.console import argument
from lightning_rlprof.cli.open_run import SAVE_PATH, check_exists, inside
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import local_path
from lightning_rlprof.system.version import VERSION

_MAX_TOKENS = 1_900  # Of an answer, with the line that says what is left out below 2,000.
_ROWS = 20
_SQL_S = 60
_TOKEN = re.compile(r"\d{1,3}|[^\W\d_]{1,6}|[^\w\s]|_|\n")
_CODES = {1: "exit code 1: the check failed", 3: "exit code 3: inconclusive"}


def mcp(
    root: Annotated[
        Path, argument("ROOT", "Directory of runs; nothing outside is read", parser=local_path)
    ] = SAVE_PATH,
) -> None:
    """Answer an agent's questions about runs (an MCP server).

    It reads only. The agent's program starts it and speaks to it on standard input and output.

    Example: claude mcp add rlprof -- rlprof mcp profiler_data
    """
    if not root.is_dir():
        raise RlprofError(f"'{root}' is not a directory", hint="Pass a directory of runs.")
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp_types import ToolAnnotations
    except ImportError as error:
        hint = 'pip install "lightning-rlprof[mcp]"'
        raise RlprofError("MCP's SDK is not installed", hint=hint) from error
    console.confine(root.resolve())
    server = MCPServer("rlprof", instructions=skill(), version=VERSION, log_level="WARNING")
    reads = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    for tool in _tools(root.resolve()):
        server.add_tool(tool, annotations=reads, structured_output=False)
    server.run()


def skill() -> str:
    """Return how an agent uses rlprof: which verb first, how to read verdicts, when to stop."""
    from importlib.resources import files

    return files("lightning_rlprof.cli").joinpath("SKILL.md").read_text(encoding="utf-8")


def tokens_of(text: str) -> int:
    """Return how many tokens a text has, rather too many than too few.

    Tokenizers differ: here a token is up to three digits or six letters, or one other sign.

    Example::

        >>> tokens_of("| actor_update | 52.7% |")
        10
    """
    return len(_TOKEN.findall(text))


def shortened(text: str) -> str:
    """Return the lines of an answer that are below 2,000 tokens, and how many are left out."""
    left, lines = _MAX_TOKENS, text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        left -= tokens_of(line)
        if left < 0:
            more = f"{console.count(len(lines) - at, 'more line')} left out"
            return "".join(lines[:at]) + f"\n{more}. Ask for fewer rows (limit), or by sql.\n"
    return text


def _tools(root: Path) -> list[Callable[..., Any]]:
    """Return the tools: their names, parameters and docstrings are what an agent sees."""
    from mcp.server.mcpserver.exceptions import ToolError
    from pydantic import Field

    from lightning_rlprof.analysis.catalog import CATALOG

    analyses = [each.name for each in CATALOG if each.place != "verb"]
    about = "Run directory or trace below the root; of a directory of runs the newest run is read"
    run_ = Annotated[str, Field(description=about)]
    limit_ = Annotated[int, Field(description="Most rows of each table", ge=1, le=200)]
    name_ = Annotated[
        str | None,
        Field(description="Analysis; without one, all that have data are listed"),
        Field(json_schema_extra={"enum": [*analyses, None]}),
    ]
    gate_ = Annotated[str | None, Field(description="Gate: FAIL if slower than this, such as 3%")]
    noise_ = Annotated[
        str | None, Field(description="How much runs of the same code differ, such as 2%")
    ]
    lock = Lock()  # Output is of the whole process.

    def answer(verb: Callable[..., Any], *paths: str, limit: int = _ROWS, **given: Any) -> str:
        text = io.StringIO()
        with lock, redirect_stdout(text), redirect_stderr(text):
            console.use_output("markdown", limit=limit, no_hints=True)
            try:
                verb(*(inside(root, path) for path in paths), **given)
            except typer.Exit as ended:
                text.write(f"\n{_CODES[ended.exit_code]}\n" if ended.exit_code else "")
            except RlprofError as error:
                hint = f". Hint: {error.hint}" if error.hint else ""
                raise ToolError(f"{error}{hint}") from error
        return shortened(text.getvalue())

    def ls(path: run_ = ".") -> str:
        """List the runs of a directory, newest first."""
        return answer(runs.list_runs, path)

    def findings(
        run: run_ = ".",
        every: Annotated[bool, Field(description="Also what was not decided, and why")] = False,
    ) -> str:
        """Say what to fix first: problems with price, evidence, remedies. Start here."""
        return answer(analysis_commands.findings, run, every=every)

    def summary(run: run_ = ".") -> str:
        """Show where the time of a step went, by stage, and whether the recording is complete."""
        return answer(runs.summary, run)

    def compare_(a: run_, b: run_, fail_if_slower: gate_ = None, run_noise: noise_ = None) -> str:
        """Compare two runs at equal work: A is the baseline, B the changed one."""
        return answer(compare.compare, a, b, fail_if_slower=fail_if_slower, run_noise=run_noise)

    def hang(run: run_ = ".") -> str:
        """Name the rank and the line that a hanging or killed run waits for."""
        return answer(live_commands.hang, run)

    def sql(
        query: Annotated[str, Field(description="One SELECT; begin with: show tables")],
        run: run_ = ".",
        limit: limit_ = _ROWS,
    ) -> str:
        """Query a run's tables with DuckDB's SQL, such as spans, steps, kernels."""
        return answer(_sql, run, query=query, limit=limit)

    def show(
        run: run_ = ".",
        name: name_ = None,
        rank: Annotated[int | None, Field(description="Only this rank")] = None,
        limit: limit_ = _ROWS,
    ) -> str:
        """Show one analysis of a run as a table."""
        return answer(analysis_commands.show, run, name=name, rank=rank, limit=limit)

    def config_check(
        path: Annotated[str, Field(description="YAML file below the root")],
        overrides: Annotated[list[str], Field(description="Keys to lay over it: KEY=VALUE")] = [],  # noqa: B006
    ) -> str:
        """Check a configuration of rlprof, and show what each key means."""
        return answer(config.check, path, overrides=overrides)

    compare_.__name__ = "compare"
    return [ls, findings, summary, compare_, hang, sql, show, config_check]


def _sql(run: Path, query: str) -> None:
    """Print the rows of a query, which is asked in memory."""
    check_exists(run)
    from lightning_rlprof.run import load

    found = load(run, cache=False).sql(query, timeout_s=_SQL_S)
    console.print_tables([found], every_column=True)
