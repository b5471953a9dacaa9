"""The pages of ``rlprof serve`` as an ASGI application. No address names a file of the run."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_rlprof.cli.serve.access import Guard
from lightning_rlprof.cli.serve.live_feed import EVERY_S, LiveFeed, page, view_as_json
from lightning_rlprof.cli.serve.otlp import Exporter, push_always
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.report.prometheus import exposition
from lightning_rlprof.system.plain_text import plain

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # besides its own
_ASSETS = {
    "/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/live.css": ("live.css", "text/css; charset=utf-8"),
}
_HTML = "text/html; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


def make_app(
    run: Path,
    hosts: Iterable[str] = (),
    token: str | None = None,
    is_stopping: Callable[[], bool] = bool,
    exporter: Exporter | None = None,
) -> Guard:
    """Return the application.

    Args:
        run: The run directory.
        hosts: Names of this host, besides ``localhost`` and addresses.
        token: What requests must know; None asks for nothing.
        is_stopping: Whether open pages must be let go, as the server ends.
        exporter: Where metrics are pushed while the server runs.
    """
    feed = LiveFeed(run)
    routes = [Route(path, _asset(*which)) for path, which in _ASSETS.items()]
    answers = {"/": _page, "/events": _events, "/metrics": _metrics, "/report": _report}
    routes += [Route(path, answer) for path, answer in answers.items()]

    @asynccontextmanager
    async def pushing(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(push_always(exporter, feed))] if exporter else []
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    app = Starlette(routes=routes, lifespan=pushing)
    app.state.feed, app.state.is_stopping = feed, is_stopping
    return Guard(app, hosts, token)


def _asset(name: str, kind: str) -> Any:
    body = resources.files(__package__).joinpath("assets", name).read_bytes()

    async def answer(request: Request) -> Response:
        headers = {"content-type": kind, "content-security-policy": _POLICY}
        return Response(body, headers=headers)

    return answer


async def _page(request: Request) -> Response:
    feed: LiveFeed = request.app.state.feed
    text = page(feed.run, await feed.view())
    headers = {"content-type": _HTML, "content-security-policy": _POLICY}
    return Response(text.encode("utf-8", "replace"), headers=headers)


async def _events(request: Request) -> Response:
    """Send the figures once a second, until the page is closed or all ranks have ended."""
    feed: LiveFeed = request.app.state.feed

    async def events() -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        while not request.app.state.is_stopping():
            view = await feed.view()
            yield f"data: {view_as_json(feed.run, view)}\n\n"
            if view.has_ended:
                return
            await asyncio.sleep(EVERY_S)

    return StreamingResponse(events(), media_type="text/event-stream")


async def _metrics(request: Request) -> Response:
    text = exposition(await request.app.state.feed.metrics())
    return Response(text, headers={"content-type": _METRICS})


async def _report(request: Request) -> Response:
    headers = {
        "content-type": _HTML,
        "content-security-policy": _REPORT_POLICY,
    }
    try:
        text = await request.app.state.feed.report()
    except RlprofError as error:
        return PlainTextResponse(f"no report: {plain(str(error))}\n", status_code=503)
    return Response(text.encode("utf-8", "replace"), headers=headers)
