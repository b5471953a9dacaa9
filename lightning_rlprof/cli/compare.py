"""The verb ``compare``: what changed between two runs at equal work, for people and for CI."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.console import argument, option
from lightning_rlprof.cli.open_run import (
    about,
    as_json,
    complete_run,
    open_run,
    print_warnings,
    run_at,
)
from lightning_rlprof.errors import RlprofError

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Table


_LIMIT, _SHOWN = 20, 3
_EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
_TABLES = {"operators": "calls", "kernels": "kernels"}


def compare(
    a: Annotated[
        Path | None,
        argument("A", "Baseline run, or its URL", parser=run_at, autocompletion=complete_run),
    ] = None,
    b: Annotated[
        Path | None,
        argument("B", "Changed run, or its URL", parser=run_at, autocompletion=complete_run),
    ] = None,
    baseline: Annotated[
        list[Path] | None,
        option("RUN", "Several baseline runs: one option for each", parser=run_at),
    ] = None,
    candidate: Annotated[
        list[Path] | None, option("RUN", "Several changed runs: one option for each", parser=run_at)
    ] = None,
    fail_if_slower: Annotated[
        str | None,
        option(
            "PERCENT",
            "Exit 1 if a stage or the step is significantly slower than PERCENT, 3 if inconclusive",
        ),
    ] = None,
    run_noise: Annotated[
        str | None,
        option(
            "PERCENT",
            "With --fail-if-slower and one run each: how much runs of the same code differ",
        ),
    ] = None,
    level: Annotated[
        Literal["stages", "operators", "kernels"],
        option("LEVEL", "stages; or what profilers recorded: operators, kernels"),
    ] = "stages",
    stage: Annotated[
        str | None, option("STAGE", "With operators or kernels: only launches of this stage")
    ] = None,
) -> None:
    """Compare two runs, or several of each, at equal work.

    Example: rlprof compare A B --fail-if-slower 3%
    """
    before, after = _paths(a, b, baseline or [], candidate or [])
    if level != "stages":
        if fail_if_slower is not None:
            raise RlprofError("--fail-if-slower applies to --level stages only")
        if len(before) + len(after) > 2:
            raise RlprofError(f"--level {level} compares one run with one run")
        _compare_traces(open_run(before[0]), open_run(after[0]), level, stage)
        return
    if stage is not None:
        raise RlprofError("--stage applies to --level operators and --level kernels only")
    slowdown = _share(fail_if_slower, "--fail-if-slower")
    noise = _share(run_noise, "--run-noise")
    if noise is not None and (slowdown is None or len(before) + len(after) > 2):
        raise RlprofError("--run-noise applies to --fail-if-slower with one run each only")
    _compare_runs(
        [open_run(each) for each in before],
        [open_run(each) for each in after],
        slowdown,
        noise or 0.0,
    )


def _paths(
    a: Path | None, b: Path | None, baseline: list[Path], candidate: list[Path]
) -> tuple[list[Path], list[Path]]:
    """Return the runs of each side, given as A and B or by the options."""
    if baseline or candidate:
        if a is not None or not (baseline and candidate):
            raise RlprofError(
                "give A and B, or --baseline and --candidate",
                hint="rlprof compare --baseline R1 --baseline R4 --candidate R2 --candidate R3",
            )
        return baseline, candidate
    if a is None or b is None:
        raise RlprofError("Missing argument 'A' or 'B'", hint="rlprof compare A B")
    return [a], [b]


def _compare_runs(
    before: "list[Spans]",
    after: "list[Spans]",
    slowdown: float | None,
    noise: float,
) -> None:
    from lightning_rlprof.analysis.comparison.compare import compare as compare_table
    from lightning_rlprof.analysis.comparison.compare import gate, judge
    from lightning_rlprof.analysis.comparison.run_pair import comparability, score_of
    from lightning_rlprof.analysis.comparison.settings import settings_diff
    from lightning_rlprof.report.terminal import escape_markdown

    judged = judge(before, after)
    table, alike = compare_table(before, after, judged), comparability(before[0], after[0])
    score, differ = score_of(alike), settings_diff(before[0], after[0])
    check = None if slowdown is None else gate(judged, slowdown, noise=noise, score=score)
    if console.is_json():
        facts: dict[str, Any] = {
            side: [about(run) for run in runs] if len(runs) > 1 else about(runs[0])
            for side, runs in (("a", before), ("b", after))
        }
        facts["comparability_score"] = score
        facts["tables"] = as_json([table, alike, differ])
        console.put_json(facts | ({"fail_if_slower": check._asdict()} if check else {}))
    elif console.is_csv():
        console.print_tables([table])
    else:
        if check:
            text = f"{check.result}: {check.text}"
            if console.is_table():
                console.say(text, "bold")
            else:
                console.say(escape_markdown(text))
                console.say("")
        _print_runs(before, after, table, alike, differ)
        if judged.machine:
            console.warn("all stages changed alike: the machine rather than the code")
    raise typer.Exit(_EXIT_CODES[check.result] if check else 0)


def _compare_traces(
    before: "Spans",
    after: "Spans",
    by: Literal["operators", "kernels"],
    stage: str | None,
) -> None:
    """Print what changed by operator or kernel."""
    from lightning_rlprof.analysis.comparison.trace_diff import trace_diff

    table = trace_diff(before, after, by=by, stage=stage, top=console.limit(_LIMIT))
    if console.is_json():
        facts = {"a": about(before), "b": about(after)}
        console.put_json(facts | {"tables": [table.to_dict()]})
        return
    console.status(f"A: {before.path}")
    console.status(f"B: {after.path}")
    console.print_tables([table])
    console.status("")
    print_warnings(before)
    print_warnings(after)


def _share(text: str | None, option: str) -> float | None:
    """Read ``3%`` or ``0.03``."""
    if text is None:
        return None
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / 100 if percent else float(number)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value < 1:
        raise RlprofError(
            f"{option} {text} is not between 0% and 100%", hint="For example 3% or 0.03"
        )
    return value


def _print_runs(
    before: "list[Spans]",
    after: "list[Spans]",
    table: "Table",
    alike: "Table",
    differ: "Table",
) -> None:
    from lightning_rlprof.analysis.comparison.run_pair import HARDLY, score_of

    for letter, runs in (("A", before), ("B", after)):
        for spans in runs:
            console.status(f"{letter}: {spans.path}")
    one = len(before) == len(after) == 1
    if one and console.is_table() and before[0].path.resolve() == after[0].path.resolve():
        console.say("A and B are the same run, so nothing changed.")
        return
    console.print_tables([_for_people(table)])
    _print_undecided(table)
    if len(differ.rows):
        console.print_tables([differ], rows=_LIMIT)
    score = score_of(alike)
    if score < 1:
        console.print_tables([alike])
    console.status("")
    if score < HARDLY:
        text = f"comparability score {score:.2f}: below {HARDLY}"
        console.warn(f"{text}, don't rely on this comparison")
    for spans in (*before, *after):
        print_warnings(spans)
    # Suggest a level below stages that both runs have data for.
    both = before[0].tables.keys() & after[0].tables.keys()
    if one and (level := next((name for name in _TABLES if _TABLES[name] in both), None)):
        console.next_command("rlprof", "compare", before[0].path, after[0].path, "--level", level)


def _print_undecided(table: "Table") -> None:
    """Say of the step and the largest inconclusive stages what would decide them."""
    from lightning_rlprof.tables.table import rows_of

    if table.abstained is not None:
        return
    found = [
        row
        for row in rows_of(table)
        if row["verdict"] == "inconclusive" and row["detectable"] and row["stage"] != "untraced"
    ]
    for row in sorted(found, key=lambda row: row["stage"] != "step")[:_SHOWN]:
        needed, least = row["steps needed"], row["detectable"]
        more = f"; about {needed} steps a run would decide" if needed else ""
        said = f"only a change of {least:.1%} or more would have shown"
        if least > 1:
            said = "not even a doubling would have shown"
        console.say(f"{row['stage']}: {said}{more}")


def _for_people(table: "Table") -> "Table":
    """Return the columns that matter, first those that answer."""
    if table.abstained is not None:
        return table
    names = ("stage", "A", "B", "work B/A", "adjusted", "CI low", "CI high", "verdict")
    by_name = {column.name: column for column in table.columns}
    rows = [*zip(*map(table.column, names), strict=True)]
    return replace(table, columns=tuple(by_name[name] for name in names), rows=rows)
