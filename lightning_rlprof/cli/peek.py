"""The verb peek: the lines of code at which a running training spends its time, right now."""

import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.capture import asking, chosen_ranks
from lightning_rlprof.cli.completion import SAVE_PATH
from lightning_rlprof.cli.open_run import Run, as_json, run_directory
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.run_directory import read_header
from lightning_rlprof.records.stack_samples import LONGEST_S
from lightning_rlprof.system.process import process_state

if TYPE_CHECKING:
    from lightning_rlprof.analysis.stack_lines import StackLine
    from lightning_rlprof.loaders.live_run import RankProgress

_POLL_S, _PATIENCE_S = 0.2, 30
_SHORTEST_S = 0.5
_LINES = 5  # of each rank
_SILENT = (
    "no answer. Its process is stopped or gone, or C code keeps Python's lock. See: rlprof hang"
)


def peek(
    run: Run = SAVE_PATH,
    ranks: Annotated[str, typer.Option(metavar="RANKS", help="all, or a list such as 0,3")] = "all",
    seconds: Annotated[
        float,
        typer.Option(
            min=_SHORTEST_S, max=LONGEST_S, metavar="SECONDS", help="How long to take samples"
        ),
    ] = 5.0,
) -> None:
    """Name the lines at which a running training spends its time, without a restart.

    Each rank samples the stack of its training thread 20 times a second. Works while a step hangs,
    too. The samples stay in the run.
    """
    from lightning_rlprof.analysis.stack_lines import stack_table
    from lightning_rlprof.loaders.live_run import progress
    from lightning_rlprof.records.stack_samples import StackRequest, write_stack_request

    folder = run_directory(run)
    found = progress(folder)
    chosen = chosen_ranks(ranks, found, folder, "sampled", hint=f"See: rlprof findings {folder}")
    _check_samples(chosen)
    numbers = None if ranks == "all" else tuple(each.rank for each in chosen)
    request = StackRequest(secrets.token_hex(8), seconds, numbers)
    with asking(folder):
        write_stack_request(folder, request)
    console.status(f"Sampling stacks for {seconds:g} s. Ctrl-C stops waiting.")
    lines, problems = _wait(folder, chosen, request.id, seconds)
    table = stack_table([(rank, line) for rank, each in lines.items() for line in each[:_LINES]])
    if console.is_json():
        console.put_json({"run": str(folder), "problems": problems, "tables": as_json([table])})
    else:
        if console.is_table():
            for rank, each in lines.items():
                console.say(f"rank {rank}: {each[0]}", "bold")
        for text in problems:
            console.warn(text)
        console.print_tables([table] if lines else [])
    if not lines:
        raise console.CheckFailedError("no rank was sampled", hint=f"See: rlprof hang {folder}")


def _check_samples(chosen: "Sequence[RankProgress]") -> None:
    """Refuse a run whose configuration turns the samples off."""
    config = read_header(chosen[0].path).config
    for key in ("stack_samples", "hang_timeout"):
        if key in config and not config[key]:
            value = "false" if config[key] is False else "null"
            raise RlprofError(
                f"this training takes no stack samples: {key} is {value}",
                hint=f"Remove {key} from its configuration; py-spy dump works without",
            )


def _wait(
    run: Path, chosen: "Sequence[RankProgress]", request: str, seconds: float
) -> "tuple[dict[int, list[StackLine]], list[str]]":
    """Return the lines of each rank that answers, and what is wrong with the others."""
    from lightning_rlprof.analysis.stack_lines import stack_lines
    from lightning_rlprof.loaders.stack_answers import sampled_in
    from lightning_rlprof.records.stack_samples import read_stack_answer

    waiting = {each.rank: each for each in chosen}
    lines: dict[int, list[StackLine]] = {}
    problems: dict[int, str] = {}
    until = time.monotonic() + seconds + _PATIENCE_S
    while waiting and time.monotonic() < until:
        time.sleep(_POLL_S)
        for rank, each in list(waiting.items()):
            why_not = _why_silent(each)  # before the answer, which is the last thing it may write
            answer = read_stack_answer(run, rank)
            if answer is not None and answer.id == request:
                if answer.samples:
                    lines[rank] = stack_lines(sampled_in(answer, each.path, each.size))
                else:
                    problems[rank] = "its training thread runs no Python code"
                del waiting[rank]
            elif why_not:
                problems[rank] = why_not
                del waiting[rank]
    problems |= dict.fromkeys(waiting, _SILENT)
    return dict(sorted(lines.items())), [f"rank {rank}: {problems[rank]}" for rank in problems]


def _why_silent(rank: "RankProgress") -> str:
    """Return why a rank can't answer any more; empty if it can, or if that is unknown."""
    from lightning_rlprof.loaders.live_run import new_lines

    if any(line[0] == "end" for line in new_lines(rank.path, rank.size)[0]):
        return "the training ended before it answered"
    header = read_header(rank.path)
    if header.host == socket.gethostname() and process_state(header.pid) == "gone":
        return f"its process, PID {header.pid}, has ended"
    return ""
