"""The verb ``watch``: steps, stages, ranks and alarms of a run while it is being written."""

import time
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.completion import SAVE_PATH
from lightning_rlprof.cli.open_run import Run, run_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.console import Console, RenderableType

    from lightning_rlprof.report.live_view import LiveView

EVERY_S = 1.0
"""Seconds between two refreshes."""

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
) -> None:
    """Show steps, stages, ranks and alarms of a run while it is being written.

    On a terminal the view is refreshed once a second, of very many ranks less often; elsewhere each
    refresh is one line. It ends when all ranks have ended, or with Ctrl-C.
    """
    from rich.console import Console

    from lightning_rlprof.loaders.live_run import LiveRun
    from lightning_rlprof.report.live_view import live_view

    folder = run_directory(run)
    live, screen = LiveRun(folder), Console(highlight=False, emoji=False, markup=False)
    live.refresh()
    view = live_view(live)
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
