"""The command about two runs: what changed at equal work, for people, pull requests and CI."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from lightning_rlprof.cli.console import next_command, put_json, say, show
from lightning_rlprof.cli.open_run import Json, doubts, facts, opened
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import place

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Cell, Table


_SHOWN = 20

A = Annotated[
    Path, typer.Argument(parser=place, metavar="A", help="The run to compare with, or its URL")
]
B = Annotated[
    Path, typer.Argument(parser=place, metavar="B", help="The run that changed, or its URL")
]
Markdown = Annotated[
    bool, typer.Option("--markdown", help="Print a table for a pull request and nothing else")
]
FailOver = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT",
        help="For CI: exit 1 where a stage is slower by more for sure, 2 where the step may be",
    ),
]

By = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="Compare what device tools recorded, by operators or by kernels, instead of stages",
    ),
]
Stage = Annotated[str | None, typer.Option(help="With --by: only what was launched in this stage")]
Rows = Annotated[
    int | None,
    typer.Option(min=1, help="With --by: print so many rows; unset, 20, as JSON all"),
]

_SHOWN = 20
_SLOWER, _UNSURE = 1, 2
_NOT_JUDGED = "untraced"


class _Gate(NamedTuple):
    """What CI is told: the exit status, and why in a line."""

    status: int
    text: str
    slower: list[str]


def compare(
    a: A,
    b: B,
    as_json: Json = False,
    markdown: Markdown = False,
    fail_over: FailOver = None,
    by: By = None,
    stage: Stage = None,
    rows: Rows = None,
) -> None:
    """Show what changed from run A to run B at equal work, told from the noise between steps."""
    if by is None and (stage, rows) != (None, None):
        raise RlprofError("--stage, --rows: take --by operators or --by kernels, too")
    if by is not None and (markdown or fail_over is not None):
        raise RlprofError("--by: takes neither --markdown nor --fail-over; leave them out")
    if by is not None:
        _compare_traces(a, b, by, stage, rows or (None if as_json else _SHOWN), as_json)
        return
    _compare_runs(a, b, as_json, markdown, fail_over)


def _compare_runs(a: Path, b: Path, as_json: bool, markdown: bool, fail_over: str | None) -> None:
    limit = None if fail_over is None else _limit(fail_over)
    if as_json and markdown:
        raise RlprofError("--json and --markdown: one of them can be printed; leave one out")
    before, after = opened(a), opened(b)
    from lightning_rlprof.analysis.comparison.comparability import comparability
    from lightning_rlprof.analysis.comparison.compare import compare as compare_table

    table, alike = compare_table(before, after), comparability(before, after)
    gate = None if limit is None else _gate(table, alike, limit)
    if as_json:
        put_json(_facts(before, after, table, alike, gate))
    elif markdown:
        _put_markdown(table, alike, gate)
    else:
        _show(before, after, table, alike, gate)
        by = _closer(before, after)
        next_command(*(("rlprof", "compare", a, b, "--by", by) if by else ("rlprof", "report", b)))
    raise typer.Exit(gate.status if gate else 0)


def _closer(before: "Spans", after: "Spans") -> str | None:
    """Return what device tools recorded of both runs that can be compared."""
    both = before.tables.keys() & after.tables.keys()
    return "operators" if "calls" in both else "kernels" if "kernels" in both else None


def _compare_traces(
    a: Path, b: Path, by: str, stage: str | None, top: int | None, as_json: bool
) -> None:
    """Print what changed by operator or kernel."""
    from lightning_rlprof.analysis.comparison.trace_diff import trace_diff

    before, after = opened(a), opened(b)
    table = trace_diff(before, after, by=cast("Any", by), stage=stage, top=top)
    if as_json:
        put_json({"a": facts(before), "b": facts(after), "tables": [table.to_dict()]})
        return
    _say_runs(before, after, table)
    for spans in (before, after):
        doubts(spans)
    next_command("rlprof", "show", b, by)


def _say_runs(before: "Spans", after: "Spans", table: "Table") -> None:
    from lightning_rlprof.report.terminal import render

    say(f"A: {before.path}")
    say(f"B: {after.path}")
    if before.path.resolve() == after.path.resolve():
        say("They are one run: nothing changed in it.")
    show(render(table), "")


def _limit(text: str) -> float:
    """Read ``3%`` or ``0.03``."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / 100 if percent else float(number)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value < 1:
        raise RlprofError(f"--fail-over {text}: takes 0% to below 100%, for instance 3% or 0.03")
    return value


def _gate(table: "Table", alike: "Table", limit: float) -> _Gate:
    """Judge: slower for sure wins over not sure, and that over all is well."""
    from lightning_rlprof.analysis.comparison.comparability import HARDLY, score_of

    over = f"slower at equal work by more than {limit * 100:g} %"
    if table.abstained is not None:
        return _Gate(_UNSURE, f"inconclusive: {table.abstained}", [])
    columns = (table.column(name) for name in ("stage", "CI low", "CI high"))
    bounds = {str(name): (low, high) for name, low, high in zip(*columns, strict=True)}
    judged = {name: pair for name, pair in bounds.items() if name != _NOT_JUDGED}
    slower = [name for name, (low, _) in judged.items() if low is not None and low > 1 + limit]
    if slower:
        texts = [f"{name} by {100 * (float(judged[name][0] or 1) - 1):.1f} %" for name in slower]
        return _Gate(_SLOWER, f"{over}: {', '.join(texts)} at least", slower)
    score, high = score_of(alike), bounds["step"][1]
    if score < HARDLY:
        return _Gate(_UNSURE, f"inconclusive: runs hardly compare ({score:.2f} of 1)", [])
    if high is None or float(high) > 1 + limit:
        most = "nothing bounds it" if high is None else f"up to {100 * (float(high) - 1):.1f} %"
        return _Gate(_UNSURE, f"inconclusive: the step may be {over}, {most}", [])
    return _Gate(0, f"the step is not {over}, nor is any stage for sure", [])


def _facts(
    before: "Spans", after: "Spans", table: "Table", alike: "Table", gate: _Gate | None
) -> dict[str, Any]:
    from lightning_rlprof.analysis.comparison.comparability import score_of

    found = {"a": facts(before), "b": facts(after), "comparability": score_of(alike)}
    found["tables"] = [table.to_dict(), alike.to_dict()]
    return found | ({} if gate is None else {"fail_over": gate._asdict()})


def _show(
    before: "Spans", after: "Spans", table: "Table", alike: "Table", gate: _Gate | None
) -> None:
    from lightning_rlprof.analysis.comparison.comparability import HARDLY, score_of
    from lightning_rlprof.report.terminal import render

    _say_runs(before, after, table)
    score = score_of(alike)
    if score < 1:
        show(render(alike), "")
    if score < HARDLY:
        say(f"! these runs are hardly comparable: {score:.2f} of 1", "yellow")
    for spans in (before, after):
        doubts(spans)
    if gate is not None:
        say(f"fail-over: {gate.text}", "bold")


def _put_markdown(table: "Table", alike: "Table", gate: _Gate | None) -> None:
    from lightning_rlprof.analysis.comparison.comparability import score_of

    if table.abstained is not None:
        lines = [f"Not told: {_text(table.abstained)}."]
    else:
        lines = ["| stage | A | B | raw B/A | work B/A | adjusted | 99% CI | verdict |"]
        lines += ["|---|---:|---:|---:|---:|---:|:---:|---|"]
        lines += [_line(table, row) for row in table.rows]
    less = [row for row in alike.rows if float(row[3] or 0) < 1]
    lines += ["", f"Comparability {score_of(alike):.2f} of 1."]
    lines += [f"- {_text(row[0])}: {_text(row[1])} / {_text(row[2])}" for row in less]
    lines += [] if gate is None else ["", f"**fail-over**: {_text(gate.text)}"]
    typer.echo("\n".join(lines))


def _line(table: "Table", row: "tuple[Cell, ...]") -> str:
    from lightning_rlprof.report.terminal import duration

    own = dict(zip((column.name for column in table.columns), row, strict=True))
    times = [duration(int(own[name] or 0)) for name in ("A", "B")]
    ratios = [_ratio(own[name]) for name in ("raw B/A", "work B/A", "adjusted")]
    bounds = (
        f"{_ratio(own['CI low'])} to {_ratio(own['CI high'])}" if own["CI low"] is not None else "-"
    )
    cells = [_text(own["stage"]), *times, *ratios, bounds, _text(own["verdict"])]
    return f"| {' | '.join(cells)} |"


def _ratio(cell: "Cell") -> str:
    return "-" if cell is None else f"{cell:.2f}x"


def _text(cell: "Cell") -> str:
    """Return text that neither Markdown nor HTML reads as anything else."""
    from lightning_rlprof.report.terminal import plain

    text = plain(str(cell)).replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    for sign in "|*_`[]":
        text = text.replace(sign, f"\\{sign}")
    return text
