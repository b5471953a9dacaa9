"""The verb ``compare``: what changed between two runs at equal work, for people and for CI."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.open_run import Limit, about, limited, open_run, print_warnings
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import place

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Cell, Table


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
    Literal["stages", "operators", "kernels"],
    typer.Option(metavar="LEVEL", help="stages; or what profilers recorded: operators, kernels"),
]
Stage = Annotated[
    str | None,
    typer.Option(metavar="STAGE", help="With operators or kernels: only launches of this stage"),
]

_LIMIT = 20
_EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
_NOT_JUDGED = "untraced"
_TABLES = {"operators": "calls", "kernels": "kernels"}
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
    level: Level = "stages",
    stage: Stage = None,
    limit: Limit = None,
) -> None:
    """Compare two runs, adjusting for different amounts of work.

    Example: rlprof compare A B --fail-if-slower 3%
    """
    if level != "stages":
        if fail_if_slower is not None:
            raise RlprofError("--fail-if-slower applies to --level stages only")
        _compare_traces(open_run(a), open_run(b), level, stage, limit)
        return
    if stage is not None:
        raise RlprofError("--stage applies to --level operators and --level kernels only")
    from lightning_rlprof.analysis.comparison.comparability import comparability, score_of
    from lightning_rlprof.analysis.comparison.compare import compare as compare_table
    from lightning_rlprof.report.terminal import escape_markdown

    slowdown = None if fail_if_slower is None else _share(fail_if_slower)
    before, after = open_run(a), open_run(b)
    table, alike = compare_table(before, after), comparability(before, after)
    check = None if slowdown is None else _check(table, alike, slowdown)
    if console.is_json():
        facts = {"a": about(before), "b": about(after), "comparability_score": score_of(alike)}
        facts["tables"] = [limited([table], limit)[0].to_dict(), alike.to_dict()]
        console.put_json(facts | ({"fail_if_slower": check._asdict()} if check else {}))
    elif console.is_csv():
        console.print_tables([table], limit=limit)
    else:
        if check:
            text = f"{check.result}: {check.text}"
            if console.is_table():
                console.say(text, "bold")
            else:
                console.say(escape_markdown(text))
                console.say("")
        _print_runs(before, after, table, alike, limit)
    raise typer.Exit(_EXIT_CODES[check.result] if check else 0)


def _compare_traces(
    before: "Spans",
    after: "Spans",
    by: Literal["operators", "kernels"],
    stage: str | None,
    limit: int | None,
) -> None:
    """Print what changed by operator or kernel."""
    from lightning_rlprof.analysis.comparison.trace_diff import trace_diff

    top = limit or (None if console.is_json() else _LIMIT)
    table = trace_diff(before, after, by=by, stage=stage, top=top)
    if console.is_json():
        facts = {"a": about(before), "b": about(after)}
        console.put_json(facts | {"tables": [table.to_dict()]})
        return
    _print_paths(before, after)
    console.print_tables([table])
    console.status("")
    print_warnings(before)
    print_warnings(after)


def _print_paths(before: "Spans", after: "Spans") -> None:
    console.status(f"A: {before.path}")
    console.status(f"B: {after.path}")


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
    rows = {row[0]: row for row in _bounds(table)}
    limit = f"{100 * slowdown:g}%"
    slower = [
        name
        for name, _, low, _ in rows.values()
        if name != _NOT_JUDGED and low is not None and low > 1 + slowdown
    ]
    if slower:
        texts = ", ".join(_change(*rows[name]) for name in slower)
        return _Check("FAIL", f"{texts}; the limit is {limit}", slower)
    score, high = score_of(alike), rows["step"][3]
    if score < HARDLY:
        return _Check("INCONCLUSIVE", f"comparability score {score:.2f} is below {HARDLY}", [])
    if high is None or high > 1 + slowdown:
        most = "has no upper bound" if high is None else f"may be {high - 1:.1%}"
        return _Check("INCONCLUSIVE", f"the slowdown of the step {most}", [])
    text = f"step is at most {limit} slower at equal work"
    return _Check("PASS", f"{text}; no stage is significantly slower than that", [])


def _bounds(table: "Table") -> "list[tuple[Any, ...]]":
    """Return name, adjusted ratio, and the ends of its interval of each stage and the step."""
    columns = map(table.column, ("stage", "adjusted", "CI low", "CI high"))
    return list(zip(*columns, strict=True))


def _change(name: str, ratio: float, low: float, high: float | None) -> str:
    """Return a change with its interval: ``actor_update +12.0% (99% CI 8.0% to 15.1%)``."""
    most = (high or 1) - 1
    return f"{name} {ratio - 1:+.1%} (99% CI {low - 1:.1%} to {most:.1%})"


def _print_runs(
    before: "Spans", after: "Spans", table: "Table", alike: "Table", limit: int | None
) -> None:
    from lightning_rlprof.analysis.comparison.comparability import HARDLY, score_of

    _print_paths(before, after)
    if console.is_table() and before.path.resolve() == after.path.resolve():
        console.say("A and B are the same run, so nothing changed.")
        return
    console.print_tables([_for_people(table)], limit=limit)
    score = score_of(alike)
    if score < 1:
        console.print_tables([alike])
    console.status("")
    if score < HARDLY:
        text = f"comparability score {score:.2f}: below {HARDLY}"
        console.warn(f"{text}, don't rely on this comparison")
    if _all_alike(table):
        console.warn("all stages changed by a similar factor: likely the machine, not the code")
    print_warnings(before)
    print_warnings(after)
    # the level below stages that both runs have data for
    both = before.tables.keys() & after.tables.keys()
    if level := next((name for name in _TABLES if _TABLES[name] in both), None):
        console.next_command("rlprof", "compare", before.path, after.path, "--level", level)


def _for_people(table: "Table") -> "Table":
    """Return the columns that matter first, with the interval as one of them."""
    from lightning_rlprof.tables.table import Column

    if table.abstained is not None:
        return table
    names = ("stage", "A", "B", "work B/A", "adjusted", "CI low", "CI high", "verdict")
    by_name = {column.name: column for column in table.columns}
    stage, a, b, work, adjusted, _, _, verdict = (by_name[name] for name in names)
    columns = (stage, a, b, work, adjusted, Column("99% CI", "text"), verdict)
    rows = [
        (*first, _interval(low, high), verdict)
        for *first, low, high, verdict in zip(*map(table.column, names), strict=True)
    ]
    return replace(table, columns=columns, rows=rows)


def _interval(low: "Cell", high: "Cell") -> str | None:
    return None if low is None or high is None else f"{float(low):.2f}–{float(high):.2f}"


def _all_alike(table: "Table") -> bool:
    """Return whether every stage is significantly slower, or faster, by nearly the same factor."""
    stages = [row for row in _bounds(table) if row[0] not in ("step", _NOT_JUDGED) and row[1]]
    if len(stages) < _ENOUGH_STAGES:
        return False
    all_slower = all(low is not None and low > 1 for _, _, low, _ in stages)
    all_faster = all(high is not None and high < 1 for _, _, _, high in stages)
    middle = statistics.median(ratio for _, ratio, _, _ in stages)
    near = all(abs(ratio / middle - 1) <= _ALIKE for _, ratio, _, _ in stages)
    return near and abs(middle - 1) > _ALIKE and (all_slower or all_faster)
