"""The pages of ``rlprof serve``, and what all that are open share. No address names a file."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from functools import cache
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.loaders.live_run import LiveRun
from lightning_rlprof.report.live_view import Gauge, LiveView, exposition, gauges, live_view
from lightning_rlprof.report.terminal import cell_text
from lightning_rlprof.system.http_server import Answer, Request, text_answer
from lightning_rlprof.system.location import plain
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

if TYPE_CHECKING:
    from jinja2 import Template

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report's page also contains a policy.
_REPORT_POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HTML = "text/html; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_EVENTS = "text/event-stream; charset=utf-8"
_ASSETS = {"/live.js": "text/javascript; charset=utf-8", "/live.css": "text/css; charset=utf-8"}
EVERY_S = 1.0
"""Seconds between two readings of the run, however many pages are open."""

_REPORT_S = 30.0  # Seconds after which a report is rendered again.


class Pages:
    """Answer each request with a page about a run.

    Args:
        feed: The figures of the run.
    """

    def __init__(self, feed: "LiveFeed") -> None:
        self._feed = feed

    async def __call__(self, request: Request) -> Answer:
        """Answer one request."""
        if request.path == "/":
            text = page(self._feed.run, await self._feed.view())
            return _page(text.encode("utf-8", "replace"), _HTML, _POLICY)
        if request.path == "/events":
            return Answer(HTTPStatus.OK, self._events(), {"content-type": _EVENTS})
        if request.path == "/metrics":
            text = exposition(await self._feed.metrics())
            return Answer(HTTPStatus.OK, text.encode(), {"content-type": _METRICS})
        if request.path == "/report":
            return await self._report()
        if kind := _ASSETS.get(request.path):
            asset = resources.files(__package__).joinpath(f"assets{request.path}")
            return _page(asset.read_bytes(), kind, _POLICY)
        return text_answer(HTTPStatus.NOT_FOUND, "no such page")

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Send the figures once a second, until the page is closed or all ranks have ended."""
        yield b"retry: 2000\n\n"
        while True:
            view = await self._feed.view()
            yield f"data: {view_as_json(self._feed.run, view)}\n\n".encode()
            if view.has_ended:
                return
            await asyncio.sleep(EVERY_S)

    async def _report(self) -> Answer:
        try:
            text = await self._feed.report()
        except RlprofError as error:
            text = f"no report: {plain(str(error))}"
            return text_answer(HTTPStatus.SERVICE_UNAVAILABLE, text)
        return _page(text.encode("utf-8", "replace"), _HTML, _REPORT_POLICY)


def _page(body: bytes, kind: str, policy: str) -> Answer:
    return Answer(HTTPStatus.OK, body, {"content-type": kind, "content-security-policy": policy})


class LiveFeed:
    """Read a run when a client asks, at most once a second; make its report at most every 30 s.

    Args:
        run: The run directory.
        clock: Seconds, monotonic.
    """

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.run, self._clock = run, clock
        self._live, self._reading, self._making = LiveRun(run), asyncio.Lock(), asyncio.Lock()
        self._read_at = self._made_at = float("-inf")
        self._view: LiveView | None = None
        self._report = ""

    async def view(self) -> LiveView:
        """Return the figures, at most a second old."""
        async with self._reading:
            if self._view is None or self._clock() - self._read_at >= EVERY_S:
                self._view = await asyncio.to_thread(self._read)
                self._read_at = self._clock()
            return self._view

    async def metrics(self) -> list[Gauge]:
        """Return the figures as metrics."""
        view = await self.view()
        async with self._reading:
            return await asyncio.to_thread(gauges, self._live, view)

    async def spans(self) -> Spans | None:
        """Return the last steps of all ranks; None before the first header."""
        await self.view()
        async with self._reading:
            return await asyncio.to_thread(lambda: self._live.spans)

    async def report(self) -> str:
        """Return the report of what is recorded so far.

        Raises:
            TraceError: The run cannot be read.
        """
        async with self._making:
            if not self._report or self._clock() - self._made_at >= _REPORT_S:
                self._report = await asyncio.to_thread(_report, self.run)
                self._made_at = self._clock()
            return self._report

    def _read(self) -> LiveView:
        self._live.refresh()
        return live_view(self._live)


def _report(run: Path) -> str:
    from lightning_rlprof.report.html.page import render_report, report_tables
    from lightning_rlprof.run import load

    spans = load(run)  # Loading a run writes nothing.
    return render_report(spans, report_tables(spans))


def page(run: Path, view: LiveView) -> str:
    """Return the page with the figures of this moment, so that it shows them before any event."""
    return _template().render(_values(run, view), whole=True)


def view_as_json(run: Path, view: LiveView) -> str:
    """Return the figures for a page that is open: the part of it that changes."""
    values = _values(run, view)
    figures = _template().render(values, whole=False)
    return json.dumps({"figures": figures, "state": values["state"], "ended": view.has_ended})


@cache
def _template() -> "Template":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("lightning_rlprof.cli.serve", "assets")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(
        "live.html"
    )


def _values(run: Path, view: LiveView) -> dict[str, Any]:
    return {
        "run": plain(run.resolve().name),
        "title": plain(view.title),
        "slowest": [plain(text) for text in view.slowest],
        "state": "all ranks have ended" if view.has_ended else "live",
        "tables": [_table(table) for table in view.tables],
    }


def _table(table: Table) -> dict[str, Any]:
    known = [
        at for at in range(len(table.columns)) if any(row[at] is not None for row in table.rows)
    ]
    columns = [table.columns[at] for at in known]
    return {
        "name": table.name,
        "columns": columns,
        "rows": [[_cell(row[at], table.columns[at]) for at in known] for row in table.rows],
        "note": plain(table.note),
    }


def _cell(value: Cell, column: Column) -> dict[str, Any]:
    """Return the text of a cell, and how long the bar of a share is."""
    is_share = column.kind == "share" and isinstance(value, float)
    percent = round(min(max(100 * float(value or 0), 0), 100), 1) if is_share else None
    return {"text": cell_text(value, column), "percent": percent}
