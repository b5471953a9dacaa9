"""The command that prints one analysis of a run, whichever there is.

The command that says what to act on, after how far the run can be trusted.

The command about the whole job: where its GPU-seconds went, and what they cost.

The command about slow ranks: who makes the others wait, and how sure that is.

The command about the critical path: what a step's length hangs on, and what it does not.

The command about memory: its peaks per stage, and the files that say more.

The command about speed: tokens per second of each stage, and how much of the device that is.
"""

import math
import re
import shlex
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.cli.console import next_command, put_json, say, show
from lightning_rlprof.cli.open_run import Json, Run, count_doubts, facts, opened, tell
from lightning_rlprof.errors import RlprofError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_rlprof.analysis.ledger.accounts import Accounts
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Table

_SHOWN = 50


Name = Annotated[str | None, typer.Argument(help="Which analysis; left out, all are listed")]
Rank = Annotated[int | None, typer.Option(help="Only the rows of this rank")]
Rows = Annotated[
    int | None, typer.Option(min=1, help=f"Print so many rows; unset, {_SHOWN}, as JSON all")
]


def analysis(
    run: Run, name: Name = None, as_json: Json = False, rank: Rank = None, rows: Rows = None
) -> None:
    """Show one analysis of a run; without a name, which there are and what each answers.

    Example: rlprof show RUN breakdown
    """
    from lightning_rlprof.analysis.catalog import ANALYSES

    if name is None:
        _list(run, as_json=as_json)
        return
    if name not in ANALYSES:
        raise RlprofError(f"{name}: is no analysis (there are: {', '.join(ANALYSES)})")
    spans = opened(run)
    table = _told(ANALYSES[name].run, spans, rank)
    if as_json:
        shown = replace(table, rows=list(table.rows[:rows]))
        put_json(facts(spans) | {"tables": [shown.to_dict()]})
        return
    _print(spans, table, rows or _SHOWN)
    next_command("rlprof", "show", run)


def _print(spans: "Spans", table: "Table", rows: int) -> None:
    from lightning_rlprof.report.terminal import render

    say(str(spans.path), "bold")
    show("", render(table, rows=rows), "")
    count_doubts(spans)


def _list(run: Run, *, as_json: bool) -> None:
    from lightning_rlprof.analysis.catalog import CATALOG

    answers = {each.name: each.answers for each in CATALOG}
    if as_json:
        put_json(answers)
        return
    for name, text in answers.items():
        say(f"{name:16} {text}")
    next_command("rlprof", "show", run, "stages")


def _told(function: "Callable[..., Table]", spans: "Spans", rank: int | None) -> "Table":
    """Return the answer of an analysis, of one rank where that was asked for."""
    if rank is None:
        return function(spans)
    from lightning_rlprof.loaders.rank_names import as_ranges

    if rank not in spans.ranks:
        raise RlprofError(f"--rank {rank}: is not in this run, which has {as_ranges(spans.ranks)}")
    if "ranks" in signature(function).parameters:
        return function(spans, ranks=[rank])
    table = function(spans)
    names = [column.name for column in table.columns]
    if "rank" not in names:
        raise RlprofError(f"--rank {rank}: {table.name} has no rows of single ranks")
    at = names.index("rank")
    return replace(table, rows=[row for row in table.rows if row[at] == rank])


_STYLES = {"ok": "green", "warn": "yellow", "not checked": "dim"}


def findings(run: Run, as_json: Json = False) -> None:
    """Say what is worth acting on, with its price, its evidence, and what would refute it."""
    from lightning_rlprof.analysis.findings.data_quality import data_quality
    from lightning_rlprof.analysis.findings.findings import findings as findings_table

    spans = opened(run)
    sheet, found = data_quality(spans), findings_table(spans)
    if as_json:
        put_json(facts(spans) | {"tables": [sheet.to_dict(), found.to_dict()]})
        return
    say(f"{spans.path}: Data quality", "bold")
    for check, state, detail in sheet.rows:
        say(f"{state:12}{check}: {detail}", _STYLES[str(state)])
    say("")
    say("What to fix first", "bold")
    _findings_print(found, run)
    next_command("rlprof", "report", run)


def _findings_print(found: "Table", run: Run) -> None:
    from lightning_rlprof.report.finding_cards import cards

    if found.abstained is not None:
        say(f"No data: {found.abstained}")
    elif not found.rows:
        say("No problems found.")
    for at, card in enumerate(cards(found, shlex.quote(str(run))), start=1):
        say(f"{at}. {card.title}", "bold")
        say(f"   {card.cost}; {card.evidence}")
        say(f"   try: {card.suggestion}")
        say(f"   ruled out if: {card.ruled_out_if}")
        if card.where:
            say(f"   look at {card.where}, in the report and in what rlprof trace writes")
        for command in card.commands:
            say(f"   {command}", "dim")
    if found.note:
        say(found.note, "dim")


PerRank = Annotated[bool, typer.Option("--per-rank", help="Also every rank by itself")]
PerStep = Annotated[bool, typer.Option("--per-step", help="Also every step by itself")]
Price = Annotated[
    float | None,
    typer.Option(metavar="EUR_PER_GPU_HOUR", help="What a GPU-hour costs, in euros"),
]


def ledger(
    run: Run,
    as_json: Json = False,
    per_rank: PerRank = False,
    per_step: PerStep = False,
    price: Price = None,
) -> None:
    """Show where the GPU-seconds of the whole job went, and what they cost."""
    if price is not None and not 0 <= price < math.inf:
        raise RlprofError(f"--price {price}: a GPU-hour costs 0 euros or more, for instance 2.5")
    from lightning_rlprof.analysis.ledger.accounts import compute_accounts
    from lightning_rlprof.analysis.ledger.ledger import category_breakdown, category_totals

    spans = opened(run)
    accounts = compute_accounts(spans, per_step=per_step, per_rank=per_rank)
    tables = [category_totals(accounts, price=price)]
    tables += [category_breakdown(accounts)] if per_rank or per_step else []
    if as_json:
        put_json(_facts(spans, accounts) | {"tables": [table.to_dict() for table in tables]})
        return
    _show(spans, tables)
    next_command("rlprof", "report", run)


def _show(spans: "Spans", tables: "list[Table]") -> None:
    from lightning_rlprof.report.terminal import render

    say(f"{spans.path}: where the GPU-seconds of the job went", "bold")
    for table in tables:
        show("", render(table))
    show("")
    count_doubts(spans)


def _facts(spans: "Spans", accounts: "Accounts") -> dict[str, object]:
    """Return what the totals add up to, ``wall_ns`` times all ranks, and what is doubtful."""
    return {
        "run": str(spans.path),
        "wall_ns": accounts.wall_ns,
        "ranks": list(accounts.ranks),
        "silent_ranks": list(accounts.silent),
        "warnings": [problem._asdict() for problem in spans.warnings],
    }


def stragglers(run: Run, as_json: Json = False) -> None:
    """Name the ranks that make the others wait, or say why nobody can be named."""
    from lightning_rlprof.analysis.stragglers.stragglers import stragglers as stragglers_table

    spans = opened(run)
    table = stragglers_table(spans)
    tell(spans, table, "who makes the others wait", as_json=as_json, follow=("report", run))


PathPerRank = Annotated[bool, typer.Option("--per-rank", help="A row per rank")]
PerSample = Annotated[bool, typer.Option("--per-sample", help="A row per sample on the path")]


def path(
    run: Run, as_json: Json = False, per_rank: PathPerRank = False, per_sample: PerSample = False
) -> None:
    """Show the critical path of a step by stage, role and rank, and what has slack.

    Where steps overlap, also the cycle that their rate hangs on.
    """
    from lightning_rlprof.analysis.critical_path.bottleneck_cycle import bottleneck_cycle
    from lightning_rlprof.analysis.critical_path.critical_path import critical_path as analysis
    from lightning_rlprof.report.terminal import render

    spans = opened(run)
    tables = [analysis(spans, per_rank=per_rank, per_sample=per_sample), bottleneck_cycle(spans)]
    if tables[1].abstained is not None:
        del tables[1]
    if as_json:
        problems = [problem._asdict() for problem in spans.warnings]
        about = {"run": str(spans.path), "ranks": list(spans.ranks), "warnings": problems}
        put_json(about | {"tables": [table.to_dict() for table in tables]})
        return
    say(f"{spans.path}: what a step's length hangs on", "bold")
    for table in tables:
        show("", render(table), "")
    count_doubts(spans)
    next_command("rlprof", "whatif", run)


_VIEWER = "https://docs.pytorch.org/memory_viz"
# What the recorders of the recording half write; importing them would load torch.
_FILES = {
    "snapshot": re.compile(r"memory-snapshot_rank\d+_pid\d+\.pickle"),
    "timeline": re.compile(r"memory-timeline\.jsonl"),
}
_HOW = {
    "snapshot": f"Drop a snapshot on {_VIEWER} (it stays in your browser)",
    "timeline": "A timeline is one JSON array per sample; its first line names the columns",
}


def memory(run: Run, as_json: Json = False) -> None:
    """Show how much memory each stage took on each rank, and the files that say more."""
    from lightning_rlprof.analysis.memory import memory as memory_table
    from lightning_rlprof.report.terminal import render

    spans = opened(run)
    table, files = memory_table(spans), _files(spans)
    if as_json:
        problems = [problem._asdict() for problem in spans.warnings]
        tables = [table.to_dict()]
        put_json({"run": str(spans.path), "warnings": problems, "tables": tables, "files": files})
        return
    say(f"{spans.path}: memory by stage and rank", "bold")
    show("", render(table), "")
    count_doubts(spans)
    for name in _FILES:
        found = [file for file in files if file["what"] == name]
        for file in found:
            say(f"{name}, rank {file['rank']}, {file['window']}: {file['path']}")
        if found:
            say(_HOW[name], "dim")
    next_command("rlprof", "report", run)


def _files(spans: "Spans") -> list[dict[str, Any]]:
    """Return the files about memory by rank and window, as the recorders name them."""
    from lightning_rlprof.records.run_directory import rank_directory

    run = spans.path if spans.path.is_dir() else spans.path.parent
    found = []
    for rank in spans.ranks:
        for path in sorted(rank_directory(run, rank).glob("*/memory-*")):
            for name, pattern in _FILES.items():
                if pattern.fullmatch(path.name):
                    at = {"what": name, "rank": rank, "window": path.parent.name}
                    found.append({**at, "path": str(path)})
    return found


Parameters = Annotated[
    float | None,
    typer.Option(help="Of the model, such as 7.6e9: FLOPs are then those of its matrices"),
]
Peak = Annotated[
    float | None,
    typer.Option(help="Of each device, dense, in TFLOP/s; unset, what its data sheet says"),
]


def throughput(
    run: Run, as_json: Json = False, parameters: Parameters = None, peak_tflops: Peak = None
) -> None:
    """Show tokens and samples per second of each stage, and MFU where FLOPs are stated."""
    _check("--parameters", parameters, "7.6e9")
    _check("--peak-tflops", peak_tflops, "989")
    from lightning_rlprof.analysis.efficiency.throughput import throughput as throughput_table
    from lightning_rlprof.report.terminal import render

    spans = opened(run)
    table = throughput_table(spans, parameters=parameters, peak_tflops=peak_tflops)
    if as_json:
        put_json(facts(spans) | {"tables": [table.to_dict()]})
        return
    say(f"{spans.path}: tokens per second, and MFU", "bold")
    show("", render(table), "")
    count_doubts(spans)
    next_command("rlprof", "report", run)


def _check(option: str, value: float | None, instance: str) -> None:
    if value is not None and not 0 < value < 1e18:
        text = f"{option} {value}: takes a number above 0 and below 1e18, for instance {instance}"
        raise RlprofError(text)
