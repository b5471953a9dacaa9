"""The verbs that print analyses of a run.

They are show, findings, stragglers and whatif.
"""

import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.analysis.listing import listed
from lightning_rlprof.cli import console
from lightning_rlprof.cli.console import argument, option
from lightning_rlprof.cli.open_run import (
    RUN_HELP,
    SAVE_PATH,
    Run,
    about,
    answer,
    complete_analysis,
    complete_problem,
    complete_run_or_analysis,
    complete_stage,
    is_absent,
    is_inside,
    open_run,
    run_at,
)
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import RemotePath, place

if TYPE_CHECKING:
    from lightning_rlprof.analysis.catalog import Analysis
    from lightning_rlprof.analysis.diagnosis.diagnosis import Diagnosis
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Table

_LIMIT = 50


class _Part(str, Enum):  # Typer doesn't accept a list of literals.
    RANK = "rank"
    STEP = "step"


# Each row has an option, its parameter in Python, and the analysis that it applies to.
_OPTIONS = (
    ("--params", "parameters", "throughput"),
    ("--peak-tflops", "peak_tflops", "throughput"),
    ("--model", "model", "throughput"),
    ("--sample", "sample", "sample_path"),
    ("--price", "price", "ledger"),
)
_EXAMPLES = {"--params": "7.6e9", "--peak-tflops": "989"}
_PARTS = {"ledger": ("rank", "step"), "critical_path": ("rank",)}
_NEXT = {"ledger": "findings", "critical_path": "whatif"}  # The verb to run after an analysis.


def show(
    run: Annotated[
        Path, argument("RUN", RUN_HELP, parser=run_at, autocompletion=complete_run_or_analysis)
    ] = SAVE_PATH,
    name: Annotated[
        str | None,
        argument(
            "[NAME]", "Analysis to show; omit it to list them all", autocompletion=complete_analysis
        ),
    ] = None,
    rank: Annotated[int | None, option("N", "Show only this rank")] = None,
    by: Annotated[
        list[_Part] | None,
        option(
            "PART",
            "One row for each: rank or step in ledger, rank in critical_path",
        ),
    ] = None,
    price: Annotated[
        float | None, option("N", "ledger: price of a GPU-hour, for example 2.50")
    ] = None,
    params: Annotated[
        float | None,
        option("N", "throughput: model parameters (e.g. 7.6e9), to estimate FLOPs for MFU"),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        option("N", "throughput: peak of one device, dense, in TFLOP/s (default: data sheet)"),
    ] = None,
    model: Annotated[
        str | None,
        option("PATH", "throughput: config.json of the model, for FLOPs and MFU", "--model"),
    ] = None,
    sample: Annotated[
        int | None, option("N", "sample_path: number of the sample to follow", "--sample")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List also analyses without data in this run")
    ] = False,
) -> None:
    """Show one table, such as ledger, critical_path or kernels.

    Without NAME, it lists those that have data in this run.

    Example: rlprof show RUN ledger --price 2.50 --by rank
    """
    run, name = _run_and_name(run, name)
    if name is None:
        _list_analyses(open_run(run), run, every=every)
        return
    _check_name(name, run)
    if price is not None and not 0 <= price < math.inf:
        raise RlprofError(f"--price {price} is not a price", hint="For example --price 2.50")
    parts = [each.value for each in by or ()]
    given = _given(name, (params, peak_tflops, model, sample, price), parts)
    spans = open_run(run)
    tables, facts = _tables(name, spans, rank, parts, given)
    then = (_NEXT[name], run) if name in _NEXT else ()
    answer(spans, tables, "", facts=facts, rows=_LIMIT, then=then)


def _named(name: str) -> str:
    """Return the name of an analysis, which a shell's user may write with hyphens."""
    return name.replace("-", "_")


def _run_and_name(run: Path, name: str | None) -> tuple[Path, str | None]:
    """Return a run, the newest if none was given, and an analysis; they may be in any order."""
    from lightning_rlprof.analysis.catalog import ANALYSES

    if name is None and is_absent(run) and console.did_you_mean(_named(str(run)), ANALYSES):
        return SAVE_PATH, _named(str(run))
    if name is not None and _named(name) not in ANALYSES and _named(str(run)) in ANALYSES:
        return place(name), _named(str(run))
    return run, None if name is None else _named(name)


def _check_name(name: str, run: Path) -> None:
    """Raise an error if ``show`` has no such analysis."""
    from lightning_rlprof.analysis.catalog import ANALYSES

    if name not in ANALYSES:
        near = console.did_you_mean(name, ANALYSES)
        hint = f"{near} List all: rlprof show {shlex.quote(str(run))}".strip()
        raise RlprofError(f"unknown analysis '{name}'", hint=hint, code="unknown_analysis")
    if ANALYSES[name].place == "verb":
        hint = f"rlprof {name} {shlex.quote(str(run))}"
        raise RlprofError(f"'{name}' is a verb of its own", hint=hint, code="unknown_analysis")


def _given(name: str, values: Sequence[Any], by: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of an analysis, once the options fit it."""
    given = {}
    for (flag, parameter, analysis), value in zip(_OPTIONS, values, strict=True):
        if value is None:
            continue
        if name != analysis:
            raise RlprofError(f"{flag} applies to '{analysis}', not to '{name}'")
        if flag in _EXAMPLES and not 0 < value < 1e18:
            text = f"{flag} {value} is not between 0 and 1e18"
            raise RlprofError(text, hint=f"For example {flag} {_EXAMPLES[flag]}")
        given[parameter] = value
    for part in by:
        if part not in _PARTS.get(name, ()):
            fits = " and ".join(f"'{each}'" for each, parts in _PARTS.items() if part in parts)
            raise RlprofError(f"--by {part} applies to {fits}, not to '{name}'")
    return given


def _tables(
    name: str, spans: "Spans", rank: int | None, by: Sequence[str], given: dict[str, Any]
) -> "tuple[list[Table], dict[str, Any]]":
    """Return the tables of an analysis, of one rank if that was asked for, and facts for JSON."""
    from lightning_rlprof.analysis.catalog import ANALYSES
    from lightning_rlprof.loaders.rank_names import as_ranges

    if rank is not None and rank not in spans.ranks:
        raise RlprofError(f"rank {rank} is not in this run (ranks: {as_ranges(spans.ranks)})")
    if name == "ledger":
        tables, facts = _ledger(spans, by, **given)
        return _of_rank(tables, rank, name), facts
    if name == "critical_path":
        given["per_rank"] = "rank" in by
    run = ANALYSES[name].run
    if rank is not None and "ranks" in signature(run).parameters:
        return [run(spans, ranks=[rank], **given)], {}  # type: ignore[call-arg]
    return _of_rank([run(spans, **given)], rank, name), {}


def _ledger(
    spans: "Spans", by: Sequence[str], price: float | None = None
) -> "tuple[list[Table], dict[str, Any]]":
    """Return the hours by category, by rank and step if asked for, and the facts of JSON."""
    from lightning_rlprof.analysis.ledger.ledger import (
        category_breakdown,
        category_totals,
        compute_accounts,
    )

    accounts = compute_accounts(spans, per_rank="rank" in by)
    tables = [category_totals(accounts, price=price)]
    tables += [category_breakdown(accounts, per_step="step" in by)] if by else []
    return tables, {"wall_ns": accounts.wall_ns, "missing_ranks": list(accounts.silent)}


def _of_rank(tables: "list[Table]", rank: int | None, name: str) -> "list[Table]":
    """Return the rows of one rank, if one is given, of the tables that have a rank in each row."""
    if rank is None:
        return tables
    found = []
    for table in tables:
        names = [column.name for column in table.columns]
        if "rank" in names:
            at = names.index("rank")
            found.append(replace(table, rows=[row for row in table.rows if row[at] == rank]))
    if not found:
        raise RlprofError(f"--rank does not apply to '{name}': it has no rank column")
    return found


def _list_analyses(spans: "Spans", run: Path, *, every: bool) -> None:
    """Print the analyses by group: those that this run has data for, or all."""
    from lightning_rlprof.analysis.catalog import CATALOG

    found = [(each, _has_data(each, spans)) for each in CATALOG if each.place != "verb"]
    if console.is_json():
        facts = [
            {"name": each.name, "group": each.group, "answers": each.answers, "data": data}
            for each, data in found
        ]
        console.put_json(about(spans) | {"analyses": facts})
        return
    shown = [(each, data) for each, data in found if data or every]
    width = max(len(each.name) for each, _ in found)
    for group in dict.fromkeys(each.group for each, _ in shown):
        console.line(group, "bold")
        for each, data in shown:
            if each.group == group:
                text = f"  {each.name:{width}}  {each.answers}"
                console.line(text if data else f"{text} (no data)", "" if data else "dim")
    if hidden := len(found) - len(shown):
        text = f"{hidden} more have no data in this run. List them: rlprof show RUN --all"
        console.status(text, "dim")
    console.next_command("rlprof", "show", run, "stages")


def _has_data(analysis: "Analysis", spans: "Spans") -> bool:
    """Return whether an analysis has data; of large tables only whether they exist is checked."""
    from lightning_rlprof.analysis.device.device_counters import COUNTERS

    if analysis.name == "device_counters":
        return not spans.tables.keys().isdisjoint(COUNTERS)
    if analysis.name == "communication":
        return "collectives" in spans.tables
    if analysis.group == "Device" and not analysis.summary:
        return bool({"kernels", "memcpy", "calls", "operators"} & spans.tables.keys())
    table = analysis.run(spans)
    return table.abstained is None and len(table.rows) > 0


_MAX_TITLE = 120  # Characters; a kernel's name may have thousands.
_MAX_SETTING = 60
_STYLES = {"ok": "green", "warn": "yellow", "not checked": "dim"}


def findings(
    run: Run = SAVE_PATH,
    every: Annotated[
        bool, typer.Option("--all", help="Also list what was not decided, and what to record")
    ] = False,
    explain: Annotated[
        str | None,
        option(
            "ID",
            "Explain a problem or remedy; 'all' lists the ids",
            autocompletion=complete_problem,
        ),
    ] = None,
    framework: Annotated[
        str | None,
        option("NAME", "Show the settings of verl, TRL, vLLM, Lightning, ...", "--framework"),
    ] = None,
) -> None:
    """List what to fix first, with prices, evidence and remedies.

    Example: rlprof findings RUN --explain data-wait
    """
    if explain is not None:
        _explain(explain)
        return
    from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
    from lightning_rlprof.analysis.diagnosis.diagnosis import findings as table_of

    spans = open_run(run)
    found, change = diagnose(spans, framework), _change(spans)
    if console.is_json():
        facts = {"change": change} if change else {}
        console.put_json(about(spans) | found.to_dict() | facts)
        return
    if console.is_csv():
        answer(spans, [table_of(spans)], "")
        return
    console.line(f"{spans.path}: findings", "bold")
    if change:
        console.line(_change_text(change))
    console.line(found.quality.line)
    for check in found.quality.checks if every else found.quality.doubts:
        console.line(f"  {check.state:11}  {check.name}: {check.detail}", _STYLES[check.state])
    for each in found.speed:
        console.line(f"Speed: {each.text}")
    commands = _print_cards(found, spans, events=console.is_table() or every)
    _print_undecided(found, spans, every=every)
    console.next_command(*(commands or ("rlprof", "report", str(run))))


def _change(spans: "Spans") -> dict[str, Any] | None:
    """Return what changed since the run before, and what it brought; None if nothing changed."""
    from lightning_rlprof.analysis.comparison.compare import compare
    from lightning_rlprof.analysis.comparison.run_pair import HARDLY, comparability, score_of
    from lightning_rlprof.analysis.comparison.settings import settings_diff
    from lightning_rlprof.tables.table import rows_of

    heads = spans.headers.values()
    applied: list[str] = next(filter(None, (head.config.get("applied") for head in heads)), [])
    before = _baseline(spans.path)
    if before is None:
        return {"applied": applied, "baseline": None} if applied else None
    differ = settings_diff(before, spans)
    asked = bool(applied)
    if not asked and (not differ.rows or score_of(comparability(before, spans)) < HARDLY):
        return None
    table = compare(before, spans)
    step = next((row for row in rows_of(table) if row["stage"] == "step"), {})
    return {
        "applied": applied,
        "settings": [*rows_of(differ)],
        "baseline": str(before.path),
        **{name: step.get(name) for name in ("adjusted", "CI low", "CI high")},
        "verdict": step.get("verdict", "inconclusive"),
        "why": table.abstained,
    }


def _baseline(run: Path) -> "Spans | None":
    """Return the run that started last before a run directory, if there is one to read."""
    from lightning_rlprof.loaders.load import run_before

    root = console.root()
    if isinstance(run, RemotePath) or not run.is_dir() or run == root:
        return None
    before = run_before(run, lambda each: root is None or is_inside(root, each))
    with suppress(RlprofError):
        return None if before is None else open_run(before)
    return None


def _change_text(change: dict[str, Any]) -> str:
    """Return what changed since the run before, and what it brought, in a line."""
    from lightning_rlprof.report.terminal import shortened

    rows = change.get("settings", ())
    texts = [shortened(f"{row['setting']} {row['A']} → {row['B']}", _MAX_SETTING) for row in rows]
    found = [("applied", change["applied"]), ("changed", texts)]
    parts = [f"{word} {listed(items)}" for word, items in found if items]
    text = "; ".join(parts)
    text = f"{text[:1].upper()}{text[1:]}"
    if change["baseline"] is None:
        return f"{text}: no run before this one is beside it, so what it brought is unknown"
    beside = f"beside {change['baseline']}"
    if change["CI low"] is None:
        return f"{text}: inconclusive {beside}. {change['why'] or ''}".rstrip()
    interval = f"99% CI {change['CI low']:.2f}–{change['CI high']:.2f}"
    step = f"step {change['adjusted']:.2f}x at equal work ({interval})"
    return f"{text}: {change['verdict']}, {step}, {beside}"


def _print_cards(found: "Diagnosis", spans: "Spans", *, events: bool) -> list[str]:
    """Print problems, then ideas; returns the words of the command that shows the first one.

    ``events`` also says where the evidence is, and prints the command that lists it.
    """
    from lightning_rlprof.report.summary import finding_commands, finding_cost, finding_place
    from lightning_rlprof.report.terminal import shortened

    if not found.problems:
        console.line(found.nothing)
    path, commands = shlex.quote(str(spans.path)), list[str]()
    for at, each in enumerate(found.found, start=1):
        if at == len(found.problems) + 1:
            console.line("Ideas, which may need other hardware or another algorithm", "bold")
        console.line(f"{at}. {shortened(each.heading, _MAX_TITLE)} [{each.id}]", "bold")
        console.line(f"   {finding_cost(each, spans.device_word)}; {each.evidence}")
        console.line(f"   do: {each.act}")
        for offer in each.remedies:
            gain = f" ({offer.gain})" if offer.gain else ""
            console.line(f"   remedy: {offer.remedy.title}{gain}. Risk: {offer.remedy.risk}")
            for setting in offer.settings:
                console.line(f"     {setting.text}")
        console.line(f"   ruled out if: {each.problem.ruled_out_if}")
        if events and (place := finding_place(each)):
            console.line(f"   see {place} in the report and in the exported trace")
        for command in (own := finding_commands(each, path)[: None if events else 1]):
            console.line(f"   {command}", "dim")
        commands += own
    return shlex.split(commands[0]) if commands else []


def _print_undecided(found: "Diagnosis", spans: "Spans", *, every: bool) -> None:
    say = console.status if console.is_table() else console.line
    if found.explained:
        say(f"Explained by another: {', '.join(found.explained)}", "dim")
    if found.unknown:
        say(f"ignore_findings has ids that do not exist: {', '.join(found.unknown)}")
    if not found.undecided:
        return
    if not every:
        count = console.count(len(found.undecided), "check")
        command = f"rlprof findings {shlex.quote(str(spans.path))} --all"
        say(f"{count} not decided. See why, and what to record: {command}", "dim")
        return
    console.line("Not decided", "bold")
    for each in found.undecided:
        console.line(f"  {each.id}: {each.why}.{f' {each.how}.' if each.how else ''}")


def _explain(name: str) -> None:
    """Print what a problem or remedy is, or list all."""
    from lightning_rlprof.analysis.diagnosis.diagnosis import PROBLEM_GROUPS, explained, known_id

    if name != "all":
        if console.is_json():
            console.put_json(explained(known_id(name)))
        else:
            _say_explained(explained(known_id(name)))
        return
    if console.is_json():
        console.put_json(
            {
                group: [{"id": each.id, "title": each.title} for each in own]
                for group, own in PROBLEM_GROUPS.items()
            }
        )
        return
    for group, own in PROBLEM_GROUPS.items():
        console.say(group, "bold")
        for each in own:
            console.say(f"  {each.id:22}  {each.title}")
            for remedy in each.remedies:
                console.say(f"    {remedy.id:22}  {remedy.title}", "dim")


def _say_explained(facts: dict[str, Any]) -> None:
    console.say(f"{facts['id']}: {facts['title']}", "bold")
    if facts["when"]:
        console.say(f"Reported if: {'; '.join(facts['when'])}")
    for key, word in (("act", "Do"), ("ruled_out_if", "Ruled out if"), ("look", "See")):
        if key in facts:
            console.say(f"{word}: {facts[key]}")
    for remedy in facts["remedies"]:
        when = f" (if {'; '.join(remedy['when'])})" if remedy["when"] else ""
        console.say(f"Remedy {remedy['id']}: {remedy['title']}{when}")
        for setting in remedy["settings"]:
            console.say(f"  {setting}")
        console.say(f"  Risk: {remedy['risk']}")
    console.say(f"Page of the documentation, in a clone: {facts['guide']}")


def stragglers(run: Run = SAVE_PATH) -> None:
    """Find ranks that slow the others down."""
    from lightning_rlprof.analysis.stragglers.stragglers import stragglers as find

    spans = open_run(run)
    answer(spans, [find(spans)], "stragglers", then=("whatif", run))


def whatif(
    run: Run = SAVE_PATH,
    speedup: Annotated[
        list[str] | None,
        option(
            "STAGE=N", "Make a stage N times as fast (repeatable)", autocompletion=complete_stage
        ),
    ] = None,
    remove: Annotated[
        list[str] | None,
        option("STAGE", "Remove a stage (repeatable)", autocompletion=complete_stage),
    ] = None,
    overlap: Annotated[
        list[str] | None,
        option(
            "STAGE",
            "Assume a stage fully overlaps with the rest (repeatable)",
            autocompletion=complete_stage,
        ),
    ] = None,
    stop_rollout_at: Annotated[
        float | None, option("SHARE", "End each rollout at this share of its requests (0 to 1)")
    ] = None,
    add_replicas: Annotated[int | None, option("N", "Add N rollout replicas")] = None,
) -> None:
    """Estimate step time after a change, such as a faster stage.

    Changes are: no straggler, a stage sped up, removed or overlapped, another rollout.

    After the change, compare the runs: rlprof compare RUN NEW_RUN

    Example: rlprof whatif RUN --speedup compute_reward=2 --overlap weight_sync
    """
    from lightning_rlprof.analysis.whatif.whatif import whatif as predict

    factors = dict(map(_factor, speedup or ()))
    spans = open_run(run)
    table = predict(
        spans,
        speedup=factors,
        remove=remove or [],
        overlap=overlap or [],
        stop_rollout_at=stop_rollout_at,
        add_replicas=add_replicas,
    )
    answer(spans, [table], "step time after a change", then=("findings", run))


def _factor(text: str) -> tuple[str, float]:
    stage, _, factor = text.rpartition("=")
    try:
        return stage, float(factor)
    except ValueError:
        example = "For example --speedup actor_generate=2"
        raise RlprofError(f"--speedup {text} is not STAGE=N", hint=example) from None
