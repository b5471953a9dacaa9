"""The verb ``compare``: what changed between two runs at equal work, for people and for CI."""

import statistics
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lightning_rlprof.cli.console import (
    is_csv,
    is_json,
    is_table,
    next_command,
    print_tables,
    put_json,
    say,
    status,
    warn,
)
from lightning_rlprof.cli.open_run import Limit, about, limited, open_run, print_warnings
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import place

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Cell, Table


class _Level(str, Enum):
    """What ``--level`` takes."""

    STAGES = "stages"
    OPERATORS = "operators"
    KERNELS = "kernels"


A = Annotated[Path, typer.Argument(parser=place, metavar="A", help="Baseline run, or its URL")]
B = Annotated[Path, typer.Argument(parser=place, metavar="B", help="Changed run, or its URL")]
FailIfSlower = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT",
        help="Exit 1 if a stage or the step is significantly slower than PERCENT, "
        "3 if inconclusive",
    ),
]
Level = Annotated[
    _Level,
    typer.Option(metavar="LEVEL", help="stages; or what profilers recorded: operators, kernels"),
]
Stage = Annotated[
    str | None,
    typer.Option(metavar="STAGE", help="With operators or kernels: only launches of this stage"),
]

_LIMIT = 20
_EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
_NOT_JUDGED = "untraced"
# A change of code touches some stages, a slower machine touches all of them alike.
_ALIKE = 0.15
_ENOUGH_STAGES = 3


class _Check(NamedTuple):
    """Result of ``--fail-if-slower``: PASS, FAIL or INCONCLUSIVE, why, and the slower stages."""

    result: str
    text: str
    slower: list[str]


def compare(
    a: A,
    b: B,
    fail_if_slower: FailIfSlower = None,
    level: Level = _Level.STAGES,
    stage: Stage = None,
    limit: Limit = None,
) -> None:
    """Compare two runs, adjusting for different amounts of work.

    Example: rlprof compare A B --fail-if-slower 3%
    """
    if level is not _Level.STAGES:
        if fail_if_slower is not None:
            raise RlprofError("--fail-if-slower applies to --level stages only")
        _compare_traces(a, b, level, stage, limit)
        return
    if stage is not None:
        raise RlprofError("--stage applies to --level operators and --level kernels only")
    slowdown = None if fail_if_slower is None else _share(fail_if_slower)
    _compare_runs(open_run(a), open_run(b), slowdown, limit)


def _compare_runs(
    before: "Spans", after: "Spans", slowdown: float | None, limit: int | None
) -> None:
    from lightning_rlprof.analysis.comparison.comparability import comparability
    from lightning_rlprof.analysis.comparison.compare import compare as compare_table

    table, alike = compare_table(before, after), comparability(before, after)
    check = None if slowdown is None else _check(table, alike, slowdown)
    if is_json():
        put_json(_json(before, after, limited([table], limit)[0], alike, check))
    else:
        _print_runs(before, after, table, alike, check, limit)
    raise typer.Exit(_EXIT_CODES[check.result] if check else 0)


def _compare_traces(a: Path, b: Path, level: _Level, stage: str | None, limit: int | None) -> None:
    """Print what changed by operator or kernel."""
    from lightning_rlprof.analysis.comparison.trace_diff import trace_diff

    before, after = open_run(a), open_run(b)
    top = limit or (None if is_json() else _LIMIT)
    by: Any = level.value
    table = trace_diff(before, after, by=by, stage=stage, top=top)
    if is_json():
        put_json({"a": about(before), "b": about(after), "tables": [table.to_dict()]})
        return
    _print_paths(before, after)
    print_tables([table])
    status("")
    for spans in (before, after):
        print_warnings(spans)


def _print_paths(before: "Spans", after: "Spans") -> None:
    status(f"A: {before.path}")
    status(f"B: {after.path}")


def _share(text: str) -> float:
    """Read ``3%`` or ``0.03``."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / 100 if percent else float(number)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value < 1:
        raise RlprofError(
            f"--fail-if-slower {text} is not between 0% and 100%", hint="For example 3% or 0.03"
        )
    return value


def _check(table: "Table", alike: "Table", slowdown: float) -> _Check:
    """Judge: a significant slowdown fails, else missing evidence is inconclusive."""
    from lightning_rlprof.analysis.comparison.comparability import HARDLY, score_of

    if table.abstained is not None:
        return _Check("INCONCLUSIVE", table.abstained, [])
    columns = (table.column(name) for name in ("stage", "CI low", "CI high"))
    bounds = {str(name): (low, high) for name, low, high in zip(*columns, strict=True)}
    adjusted = dict(zip(table.column("stage"), table.column("adjusted"), strict=True))
    slower = [
        name
        for name, (low, _) in bounds.items()
        if name != _NOT_JUDGED and low is not None and float(low) > 1 + slowdown
    ]
    if slower:
        texts = [f"{name} {_change(adjusted[name], *bounds[name])}" for name in slower]
        return _Check("FAIL", f"{', '.join(texts)}; the limit is {_percent(slowdown)}", slower)
    score, high = score_of(alike), bounds["step"][1]
    if score < HARDLY:
        return _Check("INCONCLUSIVE", f"comparability score {score:.2f} is below {HARDLY}", [])
    if high is None or float(high) > 1 + slowdown:
        most = "has no upper bound" if high is None else f"may be {float(high) - 1:.1%}"
        return _Check("INCONCLUSIVE", f"the slowdown of the step {most}", [])
    text = (
        f"step is at most {_percent(slowdown)} slower at equal work; "
        "no stage is significantly slower than that"
    )
    return _Check("PASS", text, [])


def _percent(share: float) -> str:
    return f"{100 * share:g}%"


def _change(ratio: "Cell", low: "Cell", high: "Cell") -> str:
    """Return a change with its interval: ``+12.0% (99% CI 8.0% to 15.1%)``."""
    value, least, most = (float(each or 1) - 1 for each in (ratio, low, high))
    return f"{value:+.1%} (99% CI {least:.1%} to {most:.1%})"


def _json(
    before: "Spans", after: "Spans", table: "Table", alike: "Table", check: _Check | None
) -> dict[str, Any]:
    from lightning_rlprof.analysis.comparison.comparability import score_of

    found = {"a": about(before), "b": about(after), "comparability_score": score_of(alike)}
    found["tables"] = [table.to_dict(), alike.to_dict()]
    return found | ({} if check is None else {"fail_if_slower": check._asdict()})


def _print_runs(
    before: "Spans",
    after: "Spans",
    table: "Table",
    alike: "Table",
    check: _Check | None,
    limit: int | None,
) -> None:
    from lightning_rlprof.analysis.comparison.comparability import HARDLY, score_of
    from lightning_rlprof.report.terminal import escape_markdown

    if check is not None and not is_csv():
        text = f"{check.result}: {check.text}"
        say(text if is_table() else escape_markdown(text), "bold")
        if not is_table():
            say("")
    if is_csv():
        print_tables([table], limit=limit)
        return
    score = score_of(alike)
    _print_paths(before, after)
    if is_table() and before.path.resolve() == after.path.resolve():
        say("A and B are the same run, so nothing changed.")
        return
    print_tables([_for_people(table)], limit=limit)
    if score < 1:
        print_tables([alike])
    status("")
    if score < HARDLY:
        warn(f"comparability score {score:.2f}: below {HARDLY}, don't rely on this comparison")
    if _all_alike(table):
        warn("all stages changed by a similar factor: likely the machine, not the code")
    for spans in (before, after):
        print_warnings(spans)
    if level := _closer(before, after):
        next_command("rlprof", "compare", before.path, after.path, "--level", level)


def _closer(before: "Spans", after: "Spans") -> str | None:
    """Return the level below stages that both runs have data for."""
    both = before.tables.keys() & after.tables.keys()
    return "operators" if "calls" in both else "kernels" if "kernels" in both else None


def _for_people(table: "Table") -> "Table":
    """Return the columns that matter first, with the interval as one of them."""
    from lightning_rlprof.tables.table import Column

    if table.abstained is not None:
        return table
    names = [column.name for column in table.columns]
    first = [names.index(name) for name in ("stage", "A", "B", "work B/A", "adjusted")]
    low, high, verdict = (names.index(name) for name in ("CI low", "CI high", "verdict"))
    columns = [*(table.columns[at] for at in first), Column("99% CI", "text")]
    rows = [
        (*(row[at] for at in first), _interval(row[low], row[high]), row[verdict])
        for row in table.rows
    ]
    return replace(table, columns=(*columns, table.columns[verdict]), rows=rows)


def _interval(low: "Cell", high: "Cell") -> str | None:
    return None if low is None or high is None else f"{float(low):.2f}–{float(high):.2f}"


def _all_alike(table: "Table") -> bool:
    """Return whether every stage is significantly slower, or faster, by nearly the same factor."""
    if table.abstained is not None:
        return False
    rows = zip(*map(table.column, ("stage", "adjusted", "CI low", "CI high")), strict=True)
    stages = [row for row in rows if row[0] not in ("step", _NOT_JUDGED) and row[1] is not None]
    ratios = [float(row[1]) for row in stages]
    if len(ratios) < _ENOUGH_STAGES:
        return False
    all_slower = all(row[2] is not None and float(row[2]) > 1 for row in stages)
    all_faster = all(row[3] is not None and float(row[3]) < 1 for row in stages)
    middle = statistics.median(ratios)
    near = all(abs(ratio / middle - 1) <= _ALIKE for ratio in ratios)
    return near and abs(middle - 1) > _ALIKE and (all_slower or all_faster)
