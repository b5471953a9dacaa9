"""The pages of ``rlprof serve``, and what all that are open share. No address names a file."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from importlib import resources
from pathlib import Path

from lightning_rlprof.cli.serve.live_page import page, view_as_json
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.loaders.live_run import LiveRun
from lightning_rlprof.report.live_view import (
    Gauge,
    LiveScreen,
    LiveView,
    exposition,
    gauges,
)
from lightning_rlprof.system.http_server import Answer, Request, text_answer
from lightning_rlprof.system.location import plain
from lightning_rlprof.tables.spans import Spans

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report's page also contains a policy.
_REPORT_POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HTML = "text/html; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_EVENTS = "text/event-stream; charset=utf-8"
_ASSETS = {
    "/live.js": (__package__, "text/javascript; charset=utf-8"),
    "/live.css": (__package__, "text/css; charset=utf-8"),
    "/style.css": ("lightning_rlprof.report.html", "text/css; charset=utf-8"),
}
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
        if request.path in _ASSETS:
            package, kind = _ASSETS[request.path]
            asset = resources.files(package).joinpath(f"assets{request.path}")
            return _page(asset.read_bytes(), kind, _POLICY)
        return text_answer(HTTPStatus.NOT_FOUND, "no such page")

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Send the figures as they are read, until the page is closed or all ranks have ended."""
        yield b"retry: 2000\n\n"
        while True:
            view = await self._feed.view()
            yield f"data: {view_as_json(self._feed.run, view)}\n\n".encode()
            if view.has_ended:
                return
            await asyncio.sleep(self._feed.due_in_s)

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

    However many pages are open, a run that takes long to read is read less often, see `LiveScreen`.

    Args:
        run: The run directory.
        clock: Seconds, monotonic.
    """

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.run, self._clock = run, clock
        self._screen = LiveScreen(LiveRun(run))
        self._reading, self._making = asyncio.Lock(), asyncio.Lock()
        self._read_again_at = self._made_at = float("-inf")
        self._view: LiveView | None = None
        self._report = ""

    @property
    def due_in_s(self) -> float:
        """In how many seconds the run is read again."""
        return max(self._read_again_at - self._clock(), 0.0)

    async def view(self) -> LiveView:
        """Return the figures, at most a second old."""
        async with self._reading:
            if self._view is None or self._clock() >= self._read_again_at:
                self._view = await asyncio.to_thread(self._screen.view)
                self._read_again_at = self._clock() + self._screen.pause_s
            return self._view

    async def metrics(self) -> list[Gauge]:
        """Return the figures as metrics."""
        view = await self.view()
        async with self._reading:
            return await asyncio.to_thread(gauges, self._screen.run, view)

    async def spans(self) -> Spans | None:
        """Return the last steps of all ranks; None before the first header."""
        await self.view()
        async with self._reading:
            return await asyncio.to_thread(lambda: self._screen.run.spans)

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


def _report(run: Path) -> str:
    from lightning_rlprof.report.html.page import render_report, report_tables
    from lightning_rlprof.run import load

    spans = load(run)  # Loading a run writes nothing.
    return render_report(spans, report_tables(spans))
