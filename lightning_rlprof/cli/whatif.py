"""The command about changes that were not made yet: what each would buy, and who was right."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.cli.console import next_command, put_json, say, show
from lightning_rlprof.cli.open_run import Json, Run, count_doubts, opened
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import RemotePath, place

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Table


_FILE = "predictions.jsonl"

Faster = Annotated[
    list[str] | None,
    typer.Option(metavar="STAGE=TIMES", help="Make a stage so many times as fast; repeatable"),
]
Removed = Annotated[
    list[str] | None, typer.Option(metavar="STAGE", help="Leave a stage out; repeatable")
]
Hidden = Annotated[
    list[str] | None,
    typer.Option(metavar="STAGE", help="Let a stage happen beside the rest; repeatable"),
]
Cut = Annotated[
    float | None, typer.Option(metavar="SHARE", help="End rollouts at this share of their requests")
]
Cap = Annotated[int | None, typer.Option(metavar="TOKENS", help="No answer has more tokens")]
Replicas = Annotated[int | None, typer.Option(help="So many rollout replicas more")]
Score = Annotated[
    Path | None,
    typer.Option(
        parser=place, metavar="LATER_RUN", help="Compare what was predicted with a later run"
    ),
]
Keep = Annotated[
    bool, typer.Option(help=f"Keep the predictions in {_FILE} beside the run, for --score")
]


def whatif(
    run: Run,
    as_json: Json = False,
    faster: Faster = None,
    removed: Removed = None,
    hidden: Hidden = None,
    cut: Cut = None,
    cap: Cap = None,
    replicas: Replicas = None,
    score: Score = None,
    keep: Keep = True,
) -> None:
    """Predict what a step would take after a change: nobody slow, a stage faster, gone or hidden.

    Example: rlprof whatif RUN --faster compute_reward=2 --hidden weight_sync
    """
    speeds = dict(map(_speed, faster or ()))
    spans = opened(run)
    if score is not None:
        _print(spans, _scored(spans, score), f"what was predicted, beside {score}", as_json=as_json)
        return
    table = _asked(spans, speeds, (removed or [], hidden or []), (cut, cap, replicas))
    file = _keep(spans, table) if keep and table.abstained is None else None
    _print(spans, table, "what a change would buy", as_json=as_json, file=file)
    if not as_json:
        if file is not None:
            say(f"Kept in {file}: rlprof whatif RUN --score LATER_RUN compares")
        next_command("rlprof", "path", run)


def _asked(
    spans: "Spans",
    speeds: dict[str, float],
    stages: tuple[list[str], list[str]],
    rollout: tuple[float | None, int | None, int | None],
) -> "Table":
    from lightning_rlprof.analysis.whatif.whatif import Rollout, whatif

    asked = None if rollout == (None,) * 3 else Rollout(*rollout)
    return whatif(spans, speedup=speeds, remove=stages[0], overlap=stages[1], rollout=asked)


def _speed(text: str) -> tuple[str, float]:
    name, _, times = text.rpartition("=")
    try:
        return name, float(times)
    except ValueError:
        raise RlprofError(f"--faster {text}: takes STAGE=TIMES, for instance generate=2") from None


def _print(
    spans: "Spans", table: "Table", title: str, *, as_json: bool, file: Path | None = None
) -> None:
    from lightning_rlprof.report.terminal import render

    if as_json:
        problems = [problem._asdict() for problem in spans.warnings]
        facts = {"run": str(spans.path), "ranks": list(spans.ranks), "warnings": problems}
        kept = None if file is None else str(file)
        put_json(facts | {"kept": kept, "tables": [table.to_dict()]})
        return
    say(f"{spans.path}: {title}", "bold")
    show("", render(table), "")
    count_doubts(spans)


def _file(spans: "Spans") -> Path:
    """Return where a run's predictions are: in its directory, beside a file, or here for a URL."""
    path = spans.path
    if isinstance(path, RemotePath):
        return Path(f"{path.stem}-{_FILE}")
    return path / _FILE if path.is_dir() else path.with_name(f"{path.stem}-{_FILE}")


def _keep(spans: "Spans", table: "Table") -> Path | None:
    """Append the predictions to the run's file; where it cannot be written, say so and go on."""
    from lightning_rlprof.analysis.whatif.whatif import predictions

    file = _file(spans)
    lines = [
        json.dumps({"unix": int(time.time()), "run": str(spans.path), **each})
        for each in predictions(table)
    ]
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.write("".join(f"{line}\n" for line in lines))
    except OSError as error:
        typer.echo(f"{file}: the predictions are not kept ({error.strerror})", err=True)
        return None
    return file


def _scored(spans: "Spans", later: Path) -> "Table":
    from lightning_rlprof.analysis.whatif.whatif import score

    file = _file(spans)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        raise RlprofError(f"{file}: is not there; rlprof whatif RUN writes it") from None
    return score(_read(file, lines), opened(later))


def _read(file: Path, lines: list[str]) -> list[dict[str, Any]]:
    """Return what was kept; a line that was cut off by a crash is passed over."""
    kept = []
    for line in lines:
        try:
            each = json.loads(line)
        except ValueError:
            continue
        if isinstance(each, dict) and {"change", "predicted", "CI low", "CI high"} <= each.keys():
            kept.append(each)
    if not kept:
        raise RlprofError(f"{file}: holds no prediction; rlprof whatif RUN writes them")
    return kept
