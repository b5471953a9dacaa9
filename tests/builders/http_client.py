"""Ask what answers HTTP requests: without a server, or by a server in another thread."""

import asyncio
import http.client
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from lightning_rlprof.system.http_server import Answer, HttpServer, Request

OWN = ("host", "localhost:8321")

Answering = Callable[[Request], Awaitable[Answer]]


class Got(NamedTuple):
    """What came back; headers by lower-case name."""

    status: int
    headers: dict[str, str]
    body: str


def ask(
    answering: Answering,
    target: str,
    *fields: tuple[str, str],
    host: tuple[str, str] | None = OWN,
    most: int = 10_000,
) -> Got:
    """Return the answer to one request, or its first parts; then the client is gone."""
    path, _, query = target.partition("?")
    request = Request(path, query, [*([host] if host else []), *fields])

    async def asked() -> Got:
        answer = await answering(request)
        body = answer.body if isinstance(answer.body, bytes) else await _first(answer.body, most)
        return Got(int(answer.status), dict(answer.fields), body.decode())

    return asyncio.run(asked())


async def _first(parts: AsyncGenerator[bytes, None], most: int) -> bytes:
    found = b""
    async for part in parts:
        found, most = found + part, most - 1
        if not most:
            break
    await parts.aclose()
    return found


@contextmanager
def serving(answering: Answering) -> Iterator[int]:
    """Answer requests in another thread; yields the port."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    began = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, Any]] = []

    async def until_canceled() -> None:
        loops.append((asyncio.get_running_loop(), asyncio.current_task()))
        began.set()
        with suppress(asyncio.CancelledError):
            await HttpServer(listening, answering).serve()

    thread = threading.Thread(target=asyncio.run, args=(until_canceled(),))
    thread.start()
    began.wait()
    try:
        yield port
    finally:
        ((loop, task),) = loops
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def fetch(port: int, path: str, method: str = "GET", **headers: str) -> Got:
    """Return what a server of this machine answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Got(answer.status, found, answer.read().decode())
    finally:
        connection.close()
