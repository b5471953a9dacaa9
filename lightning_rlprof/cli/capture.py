"""The verb ``capture``: profile the next steps of a training that runs."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.completion import SAVE_PATH, complete_stage
from lightning_rlprof.cli.open_run import Run, run_directory
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.capture_request import MOST_STEPS

if TYPE_CHECKING:
    from lightning_rlprof.records.capture_request import CaptureRequest
    from lightning_rlprof.records.records import Note
    from lightning_rlprof.records.run_directory import RankReader

_POLL_S, _PATIENCE_S = 0.2, 60


def capture(
    run: Run = SAVE_PATH,
    steps: Annotated[
        int, typer.Option(min=1, max=MOST_STEPS, metavar="N", help="How many steps")
    ] = 1,
    ranks: Annotated[str, typer.Option(metavar="RANKS", help="all, or a list such as 0,3")] = "0",
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE",
            autocompletion=complete_stage,
            help="Capture this stage instead of whole steps; may be repeated",
        ),
    ] = None,
) -> None:
    """Capture the next steps of a running training, without a restart.

    All ranks capture the same steps. The profilers are those of the training's configuration;
    without one, torch.profiler, or torch_npu.profiler on Ascend.
    """
    from lightning_rlprof.loaders.live_run import progress
    from lightning_rlprof.records.capture_request import (
        CaptureRequest,
        steps_ahead,
        write_request,
    )

    folder = run_directory(run)
    found = progress(folder)
    hint = "To capture from the start: rlprof run --stage actor_update -- python train.py"
    chosen = chosen_ranks(ranks, found, folder, "captured", hint=hint)
    now = max(each.last_step for each in found)
    slowest = max((each.step_ns or 0.0 for each in found), default=0.0)
    lead = steps_ahead(slowest)
    request = CaptureRequest(
        id=secrets.token_hex(8),
        unix_ns=time.time_ns(),
        first_step=now + lead,
        steps=steps,
        ranks=None if ranks == "all" else [each.rank for each in chosen],
        stages=stage or [],
        why="rlprof capture",
    )
    with asking(folder):
        write_request(folder, request)
    where = f"step {request.first_step}"
    if steps > 1:
        where = f"steps {request.first_step} to {request.last_step}"
    seconds = lead * slowest / 1e9
    ahead = f", in about {seconds:.0f} s" if seconds >= 1 else ""
    console.status(f"Requested {where} on {_ranks_text(chosen)}{ahead}. Ctrl-C stops waiting.")
    if not _report(chosen, _wait(chosen, request, seconds), request):
        raise console.CheckFailedError(
            f"{where} was not captured", hint="Ask again: rlprof capture"
        )
    console.next_command("rlprof", "summary", folder)


@contextmanager
def asking(run: Path) -> Iterator[None]:
    """Turn a failure to write a request into an error that says who may ask."""
    try:
        yield
    except OSError as error:
        raise RlprofError(
            f"the training of '{run}' cannot be asked ({error.strerror})",
            hint="Only its user and root may ask it, where its run directory can be written.",
        ) from error


def chosen_ranks(
    ranks: str, found: "Sequence[RankReader]", run: Path, done: str, hint: str
) -> "list[RankReader]":
    """Return the ranks that were asked for, which must record.

    Args:
        ranks: ``all``, or numbers.
        found: The ranks of the run.
        run: Its directory.
        done: What is to be done with it, for the error that it has ended.
        hint: What to do instead.

    Raises:
        RlprofError: The run has ended, or a rank does not exist.
    """
    by_rank = {each.rank: each for each in found}
    if not by_rank or all(each.status is not None for each in found):
        raise RlprofError(
            f"the training of '{run}' has ended; only a running one can be {done}",
            hint=hint,
        )
    if ranks == "all":
        return list(found)
    numbers = [part.strip() for part in ranks.split(",")]
    unknown = [part for part in numbers if not part.isdecimal() or int(part) not in by_rank]
    if unknown:
        known = f"0 to {max(by_rank)}" if len(by_rank) > 1 else str(*by_rank)
        raise RlprofError(
            f"--ranks {ranks}: {unknown[0]!r} is not a rank of this run",
            hint=f"Ranks of this run: {known}. All of them: --ranks all",
            code="usage",
        )
    return [by_rank[number] for number in sorted({int(part) for part in numbers})]


def _wait(
    chosen: "Sequence[RankReader]", request: "CaptureRequest", seconds: float
) -> "dict[int, list[Note]]":
    """Return what each rank noted until it was past the request, or ended."""
    before = {each.rank: len(each.notes) for each in chosen}
    open_ranks = list(chosen)
    until = time.monotonic() + _PATIENCE_S + 5 * seconds * (1 + request.steps)
    while open_ranks and time.monotonic() < until:
        time.sleep(_POLL_S)
        for each in open_ranks:
            while each.read():
                pass
        open_ranks = [
            each
            for each in open_ranks
            if each.status is None and each.last_step < request.last_step
        ]
    return {each.rank: each.notes[before[each.rank] :] for each in chosen}


def _report(
    chosen: "Sequence[RankReader]", said: "dict[int, list[Note]]", request: "CaptureRequest"
) -> bool:
    """Say what each rank captured; return whether one captured something."""
    from lightning_rlprof.records.notes import CAPTURE_FAILURES, Code

    steps, some = range(request.first_step, request.last_step + 1), False
    for each in chosen:
        notes = said[each.rank]
        taken = [note for note in notes if note.code == Code.CAPTURE_TAKEN]
        captured = [note.text for note in taken if note.facts.get("step") in steps]
        for text in captured:
            console.say(f"rank {each.rank}: {text}")
        if not captured:
            warnings = [note for note in notes if note.level != "info"]
            reasons = [note for note in notes if note.code in CAPTURE_FAILURES] or warnings
            reason = f"it didn't reach step {request.last_step} in time"
            if reasons:
                reason = reasons[-1].text
            console.warn(f"rank {each.rank} captured nothing: {reason}")
        some |= bool(captured)
    return some


def _ranks_text(chosen: "Sequence[RankReader]") -> str:
    numbers = ", ".join(str(each.rank) for each in chosen[:8]) + ", …" * (len(chosen) > 8)
    return f"rank{'s' * (len(chosen) > 1)} {numbers}"
