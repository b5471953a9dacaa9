"""The verb ``watch``: a run while it is being written, and the lines at which it is."""

import secrets
import socket
import time
from contextlib import contextmanager, suppress
from datetime import datetime
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
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rich.console import Console, RenderableType

    from lightning_rlprof.analysis.hangs import StackLine
    from lightning_rlprof.records.run_directory import RankReader
    from lightning_rlprof.records.stack_samples import StackAnswer
    from lightning_rlprof.report.live_view import LiveView

EVERY_S = 1.0
"""Seconds between two refreshes."""

_POLL_S, _PATIENCE_S = 0.2, 30
_SHORTEST_S = 0.5
_LINES = 5  # of each rank
_NEVER = 2**63 - 1
_SILENT = (
    "no answer. Its process is stopped or gone, or C code keeps Python's lock. See: rlprof hang"
)
_REST = 3  # times as long as a refresh took: of a thousand ranks it takes a second


def pause_s(took_s: float) -> float:
    """Return how long to wait after a refresh, so that watching takes a quarter of a CPU at most.

    Example::

        >>> pause_s(0.05), pause_s(0.9)
        (1.0, 2.7)
    """
    return max(EVERY_S, round(_REST * took_s, 3))


def watch(
    run: Run = SAVE_PATH,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end")] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Name the lines at which the training is, and end")
    ] = False,
    ranks: Annotated[
        str, typer.Option(metavar="RANKS", help="--stacks: all, or a list such as 0,3")
    ] = "all",
    seconds: Annotated[
        float,
        typer.Option(
            min=_SHORTEST_S,
            max=LONGEST_S,
            metavar="SECONDS",
            help="--stacks: how long to take samples",
        ),
    ] = 5.0,
) -> None:
    """Show steps, stages, ranks and alarms of a running training.

    On a terminal the view is refreshed once a second, of very many ranks less often; elsewhere each
    refresh is one line. It ends when all ranks have ended, or with Ctrl-C.

    With --stacks, each rank samples the stack of its training thread 20 times a second. Works
    while a step hangs, too. The samples stay in the run.
    """
    from rich.console import Console

    from lightning_rlprof.loaders.live_run import LiveRun
    from lightning_rlprof.report.live_view import live_view

    folder = run_directory(run)
    if stacks:
        _print_stacks(folder, ranks, seconds)
        return
    live, screen = LiveRun(folder), Console(highlight=False, emoji=False, markup=False)
    live.refresh()
    view = live_view(live)
    if not console.is_table():
        _print_for_programs(folder, view)
        return
    if once:
        screen.print(_page(folder, view))
        return
    with suppress(KeyboardInterrupt), _shown(folder, screen) as show:
        show(view)
        took_s = 0.0
        while not view.has_ended:
            time.sleep(pause_s(took_s))
            begin = time.perf_counter()
            live.refresh()
            view = live_view(live)
            show(view)
            took_s = time.perf_counter() - begin
        console.next_command("rlprof", "summary", folder)


def _print_for_programs(folder: "Path", view: "LiveView") -> None:
    """Print one view as JSON, CSV or Markdown."""
    if console.is_json():
        facts = {"run": str(folder), "title": view.title, "slowest": [*view.slowest]}
        console.put_json(facts | {"ended": view.has_ended, "tables": as_json(view.tables)})
    else:
        console.print_tables(view.tables)


@contextmanager
def _shown(folder: "Path", screen: "Console") -> "Iterator[Callable[[LiveView], None]]":
    """Show views in place on a terminal, as lines elsewhere."""
    if not screen.is_terminal:
        yield lambda view: console.say(f"{datetime.now():%H:%M:%S}  {view.line}")
        return
    from rich.live import Live

    with Live(console=screen, auto_refresh=False) as shown:
        yield lambda view: shown.update(_page(folder, view), refresh=True)


def _page(folder: "Path", view: "LiveView") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    from lightning_rlprof.report.terminal import render
    from lightning_rlprof.system.plain_text import plain

    parts: list[RenderableType] = [
        Text(plain(f"{folder.name} · {view.title}"), style="bold"),
        *(Text(plain(text)) for text in view.slowest),
    ]
    for table in view.tables:
        parts += [Text(""), render(table)]
    return Group(*parts)


def _print_stacks(folder: "Path", ranks: str, seconds: float) -> None:
    """Ask the ranks of a training for samples of their stacks, and print the lines."""
    from lightning_rlprof.analysis.hangs import stack_table
    from lightning_rlprof.loaders.live_run import progress
    from lightning_rlprof.records.stack_samples import StackRequest, write_stack_request

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


def _check_samples(chosen: "Sequence[RankReader]") -> None:
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
    run: "Path", chosen: "Sequence[RankReader]", request: str, seconds: float
) -> "tuple[dict[int, list[StackLine]], list[str]]":
    """Return the lines of each rank that answers, and what is wrong with the others."""
    from lightning_rlprof.analysis.hangs import stack_lines
    from lightning_rlprof.records.stack_samples import read_stack_answer

    waiting = {each.rank: each for each in chosen}
    before = {each.rank: len(each.spans) for each in chosen}
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
                    lines[rank] = stack_lines(answer.samples, _spans(answer, each, before[rank]))
                else:
                    problems[rank] = "its training thread runs no Python code"
                del waiting[rank]
            elif why_not:
                problems[rank] = why_not
                del waiting[rank]
    problems |= dict.fromkeys(waiting, _SILENT)
    return dict(sorted(lines.items())), [f"rank {rank}: {problems[rank]}" for rank in problems]


def _why_silent(rank: "RankReader") -> str:
    """Return why a rank can't answer any more; empty if it can, or if that is unknown."""
    while rank.read():
        pass
    if rank.status is not None:
        return "the training ended before it answered"
    header = read_header(rank.path)
    if header.host == socket.gethostname() and process_state(header.pid) == "gone":
        return f"its process, PID {header.pid}, has ended"
    return ""


def _spans(answer: "StackAnswer", rank: "RankReader", before: int) -> list[tuple[str, int, int]]:
    """Return the stages and regions of a training thread, those that ended since the request too.

    Args:
        answer: Of the rank.
        rank: Has read what was written until it answered.
        before: Number of its spans when it was asked.
    """
    while rank.read():
        pass
    return [(name, start, _NEVER) for name, start in answer.spans] + [
        (line.name, line.start_ns, line.end_ns)
        for line in rank.spans[before:]
        if line.thread == answer.thread
        and line.kind in ("stage", "region")
        and 0 <= line.start_ns <= line.end_ns < _NEVER
    ]
