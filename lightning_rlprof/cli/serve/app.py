"""The pages of ``rlprof serve``. No address names a file of the run."""

import asyncio
from collections.abc import AsyncGenerator
from http import HTTPStatus
from importlib import resources

from lightning_rlprof.cli.serve.live_feed import EVERY_S, LiveFeed, page, view_as_json
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.report.prometheus import exposition
from lightning_rlprof.system.http_server import Answer, Request, text_answer
from lightning_rlprof.system.plain_text import plain

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # besides its own
_HTML = "text/html; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_EVENTS = "text/event-stream; charset=utf-8"
_ASSETS = {"/live.js": "text/javascript; charset=utf-8", "/live.css": "text/css; charset=utf-8"}


class Pages:
    """Answer each request with a page about a run.

    Args:
        feed: The figures of the run.
    """

    def __init__(self, feed: LiveFeed) -> None:
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
