"""The verbs of a training that runs: watch, capture, hang and serve."""

import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.console import option
from lightning_rlprof.cli.open_run import (
    SAVE_PATH,
    Run,
    as_json,
    check_exists,
    complete_stage,
    run_directory,
)
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.capture_request import MOST_STEPS
from lightning_rlprof.records.records import MAX_STACKS_S
from lightning_rlprof.records.run_directory import read_header
from lightning_rlprof.system.process import process_state
from lightning_rlprof.system.remote_files import local

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

    from lightning_rlprof.analysis.hangs import Hang, RankState, StackLine
    from lightning_rlprof.cli.serve.otlp import Exporter
    from lightning_rlprof.records.capture_request import CaptureRequest
    from lightning_rlprof.records.hang_reports import StackAnswer
    from lightning_rlprof.records.records import Note
    from lightning_rlprof.records.run_directory import RankReader
    from lightning_rlprof.report.live_view import LiveView

_POLL_S, _PATIENCE_S = 0.2, 60
_STACK_PATIENCE_S = 30
_SHORTEST_S = 0.5
_LINES = 5  # Lines of stacks per rank.
_NEVER = 2**63 - 1
_SILENT = (
    "no answer. Its process is stopped or gone, or C code keeps Python's lock. See: rlprof hang"
)
_ROWS, _MOST_FRAMES, _MOST_STACKS = 20, 12, 2


def capture(
    run: Run = SAVE_PATH,
    steps: Annotated[int, option("N", "How many steps", min=1, max=MOST_STEPS)] = 1,
    ranks: Annotated[str, option("RANKS", "all, or a list such as 0,3")] = "0",
    stage: Annotated[
        list[str] | None,
        option("STAGE", "Capture this stage only (repeatable)", autocompletion=complete_stage),
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
    if not _report_captures(chosen, _wait_for_captures(chosen, request, seconds), request):
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


def _wait_for_captures(
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


def _report_captures(
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
        if captured and each.status is not None and each.last_step < request.last_step:
            lacking = f"steps {each.last_step + 1} to {request.last_step}"
            ended = f"the training ended at step {each.last_step}"
            console.warn(f"rank {each.rank}: {ended}, so {lacking} are not in the capture")
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


def watch(
    run: Run = SAVE_PATH,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end")] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Name the lines at which the training is, and end")
    ] = False,
    ranks: Annotated[str, option("RANKS", "--stacks: all, or a list such as 0,3")] = "all",
    seconds: Annotated[
        float,
        option("SECONDS", "--stacks: how long to take samples", min=_SHORTEST_S, max=MAX_STACKS_S),
    ] = 5.0,
) -> None:
    """Show steps, ranks, problems and alarms of a running training.

    On a terminal the view is refreshed once a second, of very many ranks less often; elsewhere each
    refresh is one line. It ends when all ranks have ended, or with Ctrl-C.

    With --stacks, each rank samples the stack of its training thread 20 times a second. Works
    while a step hangs, too. The samples stay in the run.
    """
    from rich.console import Console

    from lightning_rlprof.loaders.live_run import LiveRun
    from lightning_rlprof.report.live_view import LiveScreen

    folder = run_directory(run)
    if stacks:
        _print_stacks(folder, ranks, seconds)
        return
    live, screen = (
        LiveScreen(LiveRun(folder)),
        Console(highlight=False, emoji=False, markup=False),
    )
    view = live.view()
    if not console.is_table():
        _print_for_programs(folder, view)
        return
    if once:
        screen.print(_page(folder, view))
        return
    with suppress(KeyboardInterrupt), _shown(folder, screen) as show:
        show(view)
        while not view.has_ended:
            time.sleep(live.pause_s)
            view = live.view()
            show(view)
        console.next_command("rlprof", "summary", folder)


def _print_for_programs(folder: "Path", view: "LiveView") -> None:
    """Print one view as JSON, CSV or Markdown."""
    if console.is_json():
        found = None if view.found is None else view.found.to_dict()
        facts = {"run": str(folder), "title": view.title, "summary": found}
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
    from lightning_rlprof.system.location import plain

    parts: list[RenderableType] = [
        Text(plain(f"{folder.name} · {view.title}"), style="bold"),
        *(Text(plain(text)) for text in view.facts),
    ]
    for table in view.tables:
        parts += [Text(""), render(table)]
    return Group(*parts)


def _print_stacks(folder: "Path", ranks: str, seconds: float) -> None:
    """Ask the ranks of a training for samples of their stacks, and print the lines."""
    from lightning_rlprof.analysis.hangs import stack_table
    from lightning_rlprof.loaders.live_run import progress
    from lightning_rlprof.records.hang_reports import StackRequest, write_stack_request

    found = progress(folder)
    chosen = chosen_ranks(ranks, found, folder, "sampled", hint=f"See: rlprof findings {folder}")
    _check_samples(chosen)
    numbers = None if ranks == "all" else tuple(each.rank for each in chosen)
    request = StackRequest(secrets.token_hex(8), seconds, numbers)
    with asking(folder):
        write_stack_request(folder, request)
    console.status(f"Sampling stacks for {seconds:g} s. Ctrl-C stops waiting.")
    lines, problems = _wait_for_stacks(folder, chosen, request.id, seconds)
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
    if read_header(chosen[0].path).config.get("hang_timeout", 1) is None:
        raise RlprofError(
            "this training takes no stack samples: hang_timeout is null",
            hint="Remove hang_timeout from its configuration; py-spy dump works without",
        )


def _wait_for_stacks(
    run: "Path", chosen: "Sequence[RankReader]", request: str, seconds: float
) -> "tuple[dict[int, list[StackLine]], list[str]]":
    """Return the lines of each rank that answers, and what is wrong with the others."""
    from lightning_rlprof.analysis.hangs import stack_lines
    from lightning_rlprof.records.hang_reports import read_stack_answer

    waiting = {each.rank: each for each in chosen}
    before = {each.rank: len(each.spans) for each in chosen}
    lines: dict[int, list[StackLine]] = {}
    problems: dict[int, str] = {}
    until = time.monotonic() + seconds + _STACK_PATIENCE_S
    while waiting and time.monotonic() < until:
        time.sleep(_POLL_S)
        for rank, each in list(waiting.items()):
            # This comes before the answer, which may be the last thing that the rank writes.
            why_not = _why_silent(each)
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


def hang(run: Run = SAVE_PATH) -> None:
    """Name the rank and the line that a hanging run waits for.

    Works while the run hangs, and after it was killed.
    """
    from lightning_rlprof.analysis.hangs import find_hang
    from lightning_rlprof.loaders.live_run import hang_evidence
    from lightning_rlprof.loaders.load import run_directory

    check_exists(run)
    with local(run) as path:
        found = run_directory(path)
        result = find_hang(hang_evidence(found), time.time_ns())
    if console.is_json():
        console.put_json(_hang_as_json(str(found), result))
        return
    console.status(str(found), "bold")
    if console.is_csv():
        console.print_tables([result.table()], rows=_ROWS)
        return
    console.line(result.headline, "bold")
    if not console.is_table():
        console.line("")
    console.print_tables([result.table()], rows=_ROWS)
    for cause in [each for each in result.causes if each.stack][:_MOST_STACKS]:
        console.line("")
        console.line(f"Stack of rank {cause.rank}, training thread:")
        for line in _stack_lines(cause):
            console.line(line)
    for hint in result.hints:
        console.status(hint)


def _stack_lines(cause: "RankState") -> list[str]:
    """Return the frames of a stack, innermost first, each with its line of code."""
    from lightning_rlprof.analysis.hangs import short_stack

    frames, lines = short_stack(cause.stack)[:_MOST_FRAMES], []
    for each in frames:
        lines.append(f"  {each.file}:{each.line} {each.function}")
        if each.text:
            lines.append(f"    {each.text}")
    if more := len(cause.stack) - len(frames):
        lines.append(f"  and {console.count(more, 'frame')} of libraries. See: --json")
    return lines


def _hang_as_json(run: str, result: "Hang") -> dict[str, object]:
    causes = [
        {
            "rank": each.rank,
            "state": each.state,
            "reason": each.reason,
            "waits_for": each.waits_in or None,
            "stack": [asdict(frame) for frame in each.stack],
        }
        for each in result.causes
    ]
    return {
        "run": run,
        "headline": result.headline,
        "causes": causes,
        "hints": [*result.hints],
        "tables": as_json([result.table()]),
    }


def serve(
    run: Run = SAVE_PATH,
    host: Annotated[
        str, option("HOST", "Address to listen on; 0.0.0.0 is all of them")
    ] = "127.0.0.1",
    port: Annotated[int, option("PORT", "0 takes a free one", min=0, max=65_535)] = 8321,
    otlp: Annotated[
        str | None,
        option(
            "URL", "Push metrics and steps to an OpenTelemetry collector, such as http://HOST:4318"
        ),
    ] = None,
) -> None:
    """Show a run in the browser while it is being written.

    Only this machine can open it, unless --host says otherwise. The address that is printed has a
    secret, without which nothing is answered. It changes nothing in the run. It ends with Ctrl-C.

    Its metrics can be scraped by Prometheus, or are pushed with --otlp, and its steps as spans.
    """
    from lightning_rlprof.cli.serve import access
    from lightning_rlprof.cli.serve.app import LiveFeed, Pages
    from lightning_rlprof.cli.serve.otlp import push_always
    from lightning_rlprof.system.http_server import HttpServer

    folder = run_directory(run)
    exporter = _exporter(otlp, folder) if otlp is not None else None
    listening = _listen(host, port)
    feed, tokens = LiveFeed(folder), [secrets.token_urlsafe(32)]
    address = _address(host, listening.getsockname()[1])
    console.say(f"Serving {folder} at {address}/?token={tokens[0]} (Ctrl-C ends it)")
    try:
        tokens.append(access.scraper_token())
        console.status(f"Scrapers send the secret in {access.scraper_token_path()}")
    except RlprofError as error:
        console.warn(f"scrapers have no secret that stays: {error}. {error.hint}".rstrip(". "))
    if not access.is_loopback(host):
        console.warn(
            "the connection is not encrypted: other machines on its way can read the token"
        )
    server = HttpServer(listening, access.Guard(Pages(feed), access.own_names(host), tokens))
    server.run(*([push_always(exporter, feed)] if exporter else []))


def _exporter(url: str, run: "Path") -> "Exporter":
    """Return what pushes metrics.

    Raises:
        RlprofError: The URL is not one, or OpenTelemetry is not installed.
    """
    from lightning_rlprof.cli.serve.otlp import Exporter

    try:
        return Exporter(url, run.resolve().name)
    except ImportError as error:
        raise RlprofError(
            f"--otlp needs {error.name}", hint='pip install "lightning-rlprof[otlp]"'
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        RlprofError: The host is unknown, or the port is taken or not allowed.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise RlprofError(
            f"cannot listen on {host}, port {port} ({error.strerror or error})",
            hint="Choose another --port, or 0 for a free one",
        ) from error


def _address(host: str, port: int) -> str:
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
