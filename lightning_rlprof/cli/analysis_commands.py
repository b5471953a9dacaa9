"""The verbs that print analyses of a run.

They are show, findings, ledger, stragglers, critical-path, whatif and whatif check.
"""

import json
import math
import shlex
import time
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.completion import (
    SAVE_PATH,
    complete_analysis,
    complete_run,
    complete_run_or_analysis,
    complete_stage,
)
from lightning_rlprof.cli.open_run import (
    RUN_HELP,
    Run,
    about,
    answer,
    is_absent,
    open_run,
    run_at,
)
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import RemotePath, place

if TYPE_CHECKING:
    from lightning_rlprof.analysis.catalog import Analysis
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Table

_LIMIT = 50

RunOrName = Annotated[
    Path,
    typer.Argument(
        parser=run_at, autocompletion=complete_run_or_analysis, metavar="RUN", help=RUN_HELP
    ),
]
Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        autocompletion=complete_analysis,
        help="Analysis to show; omit it to list them all",
    ),
]
Rank = Annotated[int | None, typer.Option(metavar="N", help="Show only this rank")]
Params = Annotated[
    float | None,
    typer.Option(
        metavar="N", help="throughput: model parameters (e.g. 7.6e9), to estimate FLOPs for MFU"
    ),
]
Peak = Annotated[
    float | None,
    typer.Option(
        metavar="N", help="throughput: peak of one device, dense, in TFLOP/s (default: data sheet)"
    ),
]

ModelConfig = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="PATH", help="throughput: config.json of the model, for FLOPs and MFU"
    ),
]
SampleNumber = Annotated[
    int | None,
    typer.Option("--sample", metavar="N", help="sample_path: number of the sample to follow"),
]
_OPTIONS = {
    "parameters": ("--params", "throughput"),
    "peak_tflops": ("--peak-tflops", "throughput"),
    "model": ("--model", "throughput"),
    "sample": ("--sample", "sample_path"),
}


def show(
    run: RunOrName = SAVE_PATH,
    name: Name = None,
    rank: Rank = None,
    params: Params = None,
    peak_tflops: Peak = None,
    model: ModelConfig = None,
    sample: SampleNumber = None,
) -> None:
    """Show one analysis. Omit NAME to list them all.

    Example: rlprof show RUN breakdown
    """
    from lightning_rlprof.analysis.catalog import ANALYSES

    if name is None and is_absent(run) and console.did_you_mean(str(run), ANALYSES):
        run, name = SAVE_PATH, str(run)  # of the newest run
    elif name is not None and name not in ANALYSES and str(run) in ANALYSES:
        run, name = place(name), str(run)  # in the other order
    if name is None:
        _list_analyses(open_run(run), run)
        return
    if name not in ANALYSES:
        near = console.did_you_mean(name, ANALYSES)
        hint = f"{near} List all: rlprof show {shlex.quote(str(run))}".strip()
        raise RlprofError(f"unknown analysis '{name}'", hint=hint, code="unknown_analysis")
    checked = (("--params", params, "7.6e9"), ("--peak-tflops", peak_tflops, "989"))
    for option, value, example in checked:
        if value is not None and not 0 < value < 1e18:
            text = f"{option} {value} is not between 0 and 1e18"
            raise RlprofError(text, hint=f"For example {option} {example}")
    every = {"parameters": params, "peak_tflops": peak_tflops, "model": model}
    every["sample"] = sample
    given = {option: value for option, value in every.items() if value is not None}
    for option, analysis in map(_OPTIONS.__getitem__, given):
        if name != analysis:
            raise RlprofError(f"{option} applies to '{analysis}', not to '{name}'")
    spans = open_run(run)
    table = _of_rank(ANALYSES[name], spans, rank, given)
    files = _memory_files(spans) if name in ("memory", "memory_timeline") else []
    answer(spans, [table], "", facts={"files": files} if files else None, rows=_LIMIT)
    if not console.is_json():
        _print_memory_files(files)


def _list_analyses(spans: "Spans", run: Run) -> None:
    """Print every analysis by group, and whether this run has data for it."""
    from lightning_rlprof.analysis.catalog import CATALOG

    found = [(each, _has_data(each, spans)) for each in CATALOG]
    if console.is_json():
        facts = [
            {"name": each.name, "group": each.group, "answers": each.answers, "data": data}
            for each, data in found
        ]
        console.put_json(about(spans) | {"analyses": facts})
        return
    width = max(len(each.name) for each in CATALOG)
    for group in dict.fromkeys(each.group for each in CATALOG):
        console.say(group, "bold")
        for each, data in found:
            if each.group == group:
                text = f"  {each.name:{width}}  {each.answers}"
                console.say(text if data else f"{text} (no data)", "" if data else "dim")
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


def _of_rank(
    analysis: "Analysis", spans: "Spans", rank: int | None, given: dict[str, Any]
) -> "Table":
    """Return the table of an analysis, of one rank if that was asked for."""
    if rank is None:
        return analysis.run(spans, **given)
    from lightning_rlprof.loaders.rank_names import as_ranges

    if rank not in spans.ranks:
        raise RlprofError(f"rank {rank} is not in this run (ranks: {as_ranges(spans.ranks)})")
    if "ranks" in signature(analysis.run).parameters:
        return analysis.run(spans, ranks=[rank], **given)  # type: ignore[call-arg]
    table = analysis.run(spans, **given)
    names = [column.name for column in table.columns]
    if "rank" not in names:
        raise RlprofError(f"--rank does not apply to '{table.name}': it has no rank column")
    at = names.index("rank")
    return replace(table, rows=[row for row in table.rows if row[at] == rank])


# Names that the recorders give their files (importing them would load torch), and how to read them.
_MEMORY_FILES = {
    "snapshot": (
        "memory-snapshot_rank*.pickle",
        "Drop a snapshot on https://docs.pytorch.org/memory_viz (it stays in your browser).",
    ),
    "timeline": (
        "memory-timeline.jsonl",
        "A timeline has one JSON array per sample; its first line names the columns.",
    ),
}


def _memory_files(spans: "Spans") -> list[dict[str, Any]]:
    """Return the memory files of each rank and capture."""
    from lightning_rlprof.records.run_directory import is_inside, rank_directory

    run = spans.path if spans.path.is_dir() else spans.path.parent
    return [
        {"what": what, "rank": rank, "capture": path.parent.name, "path": str(path)}
        for rank in spans.ranks
        for path in sorted(rank_directory(run, rank).glob("*/memory-*"))
        if is_inside(run, path)
        for what, (pattern, _) in _MEMORY_FILES.items()
        if path.match(pattern)
    ]


def _print_memory_files(files: list[dict[str, Any]]) -> None:
    for what, (_, how) in _MEMORY_FILES.items():
        of_kind = [file for file in files if file["what"] == what]
        for file in of_kind:
            console.say(f"{what}, rank {file['rank']}, {file['capture']}: {file['path']}")
        if of_kind:
            console.say(how, "dim")


_LONGEST_TITLE = 120  # letters; a kernel's name in it has up to thousands
_STYLES = {"ok": "green", "warn": "yellow", "not checked": "dim"}


def findings(run: Run = SAVE_PATH) -> None:
    """List the most expensive problems, with evidence and next steps."""
    from lightning_rlprof.analysis.findings.data_quality import data_quality
    from lightning_rlprof.analysis.findings.findings import findings as find

    spans = open_run(run)
    checks, found = data_quality(spans), find(spans)
    if not console.is_table():
        answer(spans, [checks, found], "")
        return
    console.say(f"{spans.path}: data quality", "bold")
    width = max((len(str(state)) for _, state, _ in checks.rows), default=0)
    for check, state, text in checks.rows:
        console.say(f"{state:{width}}  {check}: {text}", _STYLES.get(str(state), ""))
    console.say("")
    console.say("Findings", "bold")
    commands = _print_cards(found, spans)
    console.next_command(*(commands or ("rlprof", "report", str(run))))


def _print_cards(found: "Table", spans: "Spans") -> list[str]:
    """Print the findings; returns the words of the command that shows the first one."""
    from lightning_rlprof.report.finding_cards import cards
    from lightning_rlprof.report.terminal import shortened

    if found.abstained is not None:
        console.say(f"No data. {found.abstained}")
    elif not found.rows:
        console.say("No problems found.")
    run = shlex.quote(str(spans.path))
    printed = cards(found, run, device=spans.device_word)
    for at, card in enumerate(printed, start=1):
        console.say(f"{at}. {shortened(card.title, _LONGEST_TITLE)}", "bold")
        console.say(f"   {card.cost}; {card.evidence}")
        console.say(f"   try: {card.suggestion}")
        console.say(f"   ruled out if: {card.ruled_out_if}")
        if card.where:
            console.say(f"   see {card.where} in the report and in the exported trace")
        for command in card.commands:
            console.say(f"   {command}", "dim")
    if found.note:
        count = found.note.partition(".")[0]
        console.say(f"{count}. See why: rlprof show {run} findings", "dim")
    return shlex.split(printed[0].commands[0]) if printed else []


class _Part(str, Enum):
    """What ``ledger --by`` takes."""

    RANK = "rank"
    STEP = "step"


Parts = Annotated[
    list[_Part] | None,
    typer.Option(metavar="PART", help="Also list every rank or step: rank, step (repeatable)"),
]
Price = Annotated[
    float | None, typer.Option(metavar="N", help="Price of a GPU-hour, for example 2.50")
]
Currency = Annotated[str, typer.Option(metavar="NAME", help="Currency of the price")]


def ledger(
    run: Run = SAVE_PATH, by: Parts = None, price: Price = None, currency: Currency = "EUR"
) -> None:
    """Show the GPU-hours of the whole job by category.

    Example: rlprof ledger RUN --price 2.50 --currency USD
    """
    if price is not None and not 0 <= price < math.inf:
        raise RlprofError(f"--price {price} is not a price", hint="For example --price 2.50")
    from lightning_rlprof.analysis.ledger.accounts import compute_accounts
    from lightning_rlprof.analysis.ledger.ledger import category_breakdown, category_totals

    spans = open_run(run)
    parts = by or ()
    accounts = compute_accounts(spans, per_rank=_Part.RANK in parts)
    tables = [category_totals(accounts, price=price, currency=currency)]
    tables += [category_breakdown(accounts, per_step=_Part.STEP in parts)] if by else []
    facts = {"wall_ns": accounts.wall_ns, "missing_ranks": list(accounts.silent)}
    answer(
        spans, tables, f"{spans.device_word}-hours by category", facts=facts, then=("findings", run)
    )


def stragglers(run: Run = SAVE_PATH) -> None:
    """Find ranks that slow the others down."""
    from lightning_rlprof.analysis.stragglers.stragglers import stragglers as find

    spans = open_run(run)
    answer(spans, [find(spans)], "stragglers", then=("whatif", run))


class _Row(str, Enum):
    """What ``critical-path --by`` takes."""

    RANK = "rank"
    SAMPLE = "sample"


Rows = Annotated[
    list[_Row] | None,
    typer.Option(metavar="PART", help="Add one row per rank or sample: rank, sample (repeatable)"),
]
Level = Annotated[
    Literal["rank", "device"],
    typer.Option(metavar="LEVEL", help="rank: stages and ranks; device: kernels, copies, launches"),
]


def critical_path(run: Run = SAVE_PATH, by: Rows = None, level: Level = "rank") -> None:
    """Show a step's critical path and the slack of everything else.

    For overlapping (async) steps, also show the bottleneck cycle.
    """
    from lightning_rlprof.analysis.critical_path.bottleneck_cycle import bottleneck_cycle
    from lightning_rlprof.analysis.critical_path.critical_path import critical_path as find
    from lightning_rlprof.analysis.device.device_critical_path import device_critical_path

    if level == "device" and by:
        raise RlprofError("--by applies to --level rank only")
    spans = open_run(run)
    if level == "device":
        tables = [device_critical_path(spans)]
    else:
        rows = by or ()
        path = find(spans, per_rank=_Row.RANK in rows, per_sample=_Row.SAMPLE in rows)
        cycle = bottleneck_cycle(spans)
        tables = [path] if cycle.abstained is not None else [path, cycle]
    answer(spans, tables, "critical path of a step", then=("whatif", run))


_PREDICTIONS = "predictions.jsonl"
_MOST_BYTES = 1 << 26

Speedup = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STAGE=N",
        autocompletion=complete_stage,
        help="Make a stage N times as fast (repeatable)",
    ),
]
Remove = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STAGE", autocompletion=complete_stage, help="Remove a stage (repeatable)"
    ),
]
Overlap = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STAGE",
        autocompletion=complete_stage,
        help="Assume a stage fully overlaps with the rest (repeatable)",
    ),
]
StopRolloutAt = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="End each rollout at this share of its requests (0 to 1)"),
]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Cap each response at N tokens")]
AddReplicas = Annotated[int | None, typer.Option(metavar="N", help="Add N rollout replicas")]
Save = Annotated[bool, typer.Option("--save", help="Save the predictions for rlprof whatif check")]


def whatif(
    run: Run = SAVE_PATH,
    speedup: Speedup = None,
    remove: Remove = None,
    overlap: Overlap = None,
    stop_rollout_at: StopRolloutAt = None,
    max_tokens: MaxTokens = None,
    add_replicas: AddReplicas = None,
    save: Save = False,
) -> None:
    """Estimate step time after a change: no straggler, a stage sped up, removed or overlapped.

    Compare saved predictions with a later run: rlprof whatif check RUN NEW_RUN

    Example: rlprof whatif RUN --speedup compute_reward=2 --overlap weight_sync
    """
    from lightning_rlprof.analysis.whatif.whatif import Rollout
    from lightning_rlprof.analysis.whatif.whatif import whatif as predict

    factors = dict(map(_factor, speedup or ()))
    spans = open_run(run)
    changes = (stop_rollout_at, max_tokens, add_replicas)
    table = predict(
        spans,
        speedup=factors,
        remove=remove or [],
        overlap=overlap or [],
        rollout=None if changes == (None, None, None) else Rollout(*changes),
    )
    file = _save(spans, table) if save and table.abstained is None else None
    facts = {"predictions_file": None if file is None else str(file)}
    answer(spans, [table], "step time after a change", facts=facts, then=("advise", run))
    if file is not None:
        then = f"rlprof whatif check {run} NEW_RUN"
        console.status(f"Saved predictions to {file}. After the change: {then}")


def whatif_check(
    run: Run,
    new_run: Annotated[
        Path,
        typer.Argument(
            parser=run_at,
            autocompletion=complete_run,
            metavar="NEW_RUN",
            help="The run after the change",
        ),
    ],
) -> None:
    """Compare the saved predictions of a run with a later run.

    Save them first: rlprof whatif RUN --save
    """
    from lightning_rlprof.analysis.whatif.whatif import score

    spans = open_run(run)
    table = score(_saved(_predictions_file(spans)), open_run(new_run))
    answer(spans, [table], f"predictions compared with {new_run}")


def _factor(text: str) -> tuple[str, float]:
    stage, _, factor = text.rpartition("=")
    try:
        return stage, float(factor)
    except ValueError:
        example = "For example --speedup actor_generate=2"
        raise RlprofError(f"--speedup {text} is not STAGE=N", hint=example) from None


def _predictions_file(spans: "Spans") -> Path:
    """Return where predictions are saved: in the run directory, else next to the file."""
    path = spans.path
    if isinstance(path, RemotePath):
        return Path(f"{path.stem}-{_PREDICTIONS}")
    return path / _PREDICTIONS if path.is_dir() else path.with_name(f"{path.stem}-{_PREDICTIONS}")


def _save(spans: "Spans", table: "Table") -> Path:
    """Append the predictions to the run's file."""
    from lightning_rlprof.analysis.whatif.whatif import predictions
    from lightning_rlprof.records.run_directory import mode_made_of
    from lightning_rlprof.system.files import draft_of, read_inside

    file = _predictions_file(spans)
    facts = {"unix": int(time.time()), "run": str(spans.path)}
    lines = [json.dumps(facts | each) + "\n" for each in predictions(table)]
    try:
        with draft_of(file, mode_made_of(spans.path)) as part:
            with suppress(FileNotFoundError):
                part.write_bytes(read_inside(file.parent, file, _MOST_BYTES))
            with part.open("a", encoding="utf-8") as stream:
                stream.writelines(lines)
    except OSError as error:
        raise RlprofError(f"cannot save predictions to {file} ({error.strerror})") from error
    return file


def _saved(file: Path) -> list[dict[str, Any]]:
    """Return the saved predictions; a line that a crash truncated is skipped."""
    from lightning_rlprof.system.files import read_inside

    hint = "Save predictions first: rlprof whatif RUN --save"
    try:
        data = read_inside(file.parent, file, _MOST_BYTES)
    except FileNotFoundError as error:
        raise RlprofError(f"no predictions: {file} does not exist", hint=hint) from error
    except OSError as error:
        raise RlprofError(f"{file} cannot be read ({error.strerror})") from error
    saved = []
    for line in data.splitlines():
        with suppress(ValueError):
            saved.append(json.loads(line))
    if not saved:
        raise RlprofError(f"no predictions in {file}", hint=hint)
    return saved
