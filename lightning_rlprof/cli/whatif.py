"""The verbs ``whatif``, which estimates step time after a change, and ``whatif check``."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.cli.console import status
from lightning_rlprof.cli.open_run import Run, answer, open_run
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import RemotePath, place

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Table


_FILE = "predictions.jsonl"

Speedup = Annotated[
    list[str] | None,
    typer.Option(metavar="STAGE=N", help="Make a stage N times as fast (repeatable)"),
]
Remove = Annotated[
    list[str] | None, typer.Option(metavar="STAGE", help="Remove a stage (repeatable)")
]
Overlap = Annotated[
    list[str] | None,
    typer.Option(metavar="STAGE", help="Assume a stage fully overlaps with the rest (repeatable)"),
]
StopRolloutAt = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="End each rollout at this share of its requests (0 to 1)"),
]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Cap each response at N tokens")]
AddReplicas = Annotated[int | None, typer.Option(metavar="N", help="Add N rollout replicas")]
Save = Annotated[bool, typer.Option("--save", help="Save the predictions for rlprof whatif check")]


def whatif(
    run: Run,
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
    answer(spans, [table], "step time after a change", facts=facts)
    if file is not None:
        status(f"Saved predictions to {file}. After the change: rlprof whatif check {run} NEW_RUN")


def check(
    run: Run,
    new_run: Annotated[
        Path, typer.Argument(parser=place, metavar="NEW_RUN", help="The run after the change")
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
        return Path(f"{path.stem}-{_FILE}")
    return path / _FILE if path.is_dir() else path.with_name(f"{path.stem}-{_FILE}")


def _save(spans: "Spans", table: "Table") -> Path:
    """Append the predictions to the run's file."""
    from lightning_rlprof.analysis.whatif.whatif import predictions

    file = _predictions_file(spans)
    about = {"unix": int(time.time()), "run": str(spans.path)}
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(about | each) + "\n" for each in predictions(table))
    except OSError as error:
        raise RlprofError(f"cannot save predictions to {file} ({error.strerror})") from error
    return file


def _saved(file: Path) -> list[dict[str, Any]]:
    """Return the saved predictions; a line that a crash truncated is skipped."""
    hint = "Save predictions first: rlprof whatif RUN --save"
    if not file.is_file():
        raise RlprofError(f"no predictions: {file} does not exist", hint=hint)
    saved = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            saved.append(json.loads(line))
    if not saved:
        raise RlprofError(f"no predictions in {file}", hint=hint)
    return saved
