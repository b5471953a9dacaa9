"""A small HTTP server for pages that need a secret: GET alone, one request per connection.

Clients that have not sent a request are limited in number, time and size. What a request may see is
decided by the function that answers it, so that it can look at the secret before all else.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

_MOST_WAITING = 128  # Connections without a whole request.
_MOST_HEAD = 64 * 1024  # Bytes of a request.
_MOST_FIELDS = 100  # Fields in the head of a request.
_HEAD_S = 10.0  # Seconds for the head of a request.
_IDLE_S = 60.0  # Seconds in which a client takes a part of an answer.
_END_S = 5.0  # Seconds for answers that have begun when the server ends.
_RETRY_S = 0.1  # Seconds after a connection that could not be accepted.
_PART = 64 * 1024
_BACKLOG = 1024  # Connections that the kernel keeps until they are accepted.
# Every answer has these: nothing is kept or guessed, and no address reaches another site.
_FIELDS = {
    "cache-control": "no-store",
    "connection": "close",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """What a client asks for.

    Attributes:
        path: Printable ASCII that begins with a slash, still quoted.
        query: What follows the question mark.
        fields: Names, in lower case, and values of the head.
    """

    path: str
    query: str
    fields: list[tuple[str, str]]

    def values(self, name: str) -> list[str]:
        """Return the values of all fields with a name in lower case."""
        return [value for known, value in self.fields if known == name]


@dataclass(frozen=True)
class Answer:
    """What a client gets.

    Attributes:
        status: The status.
        body: All of it, or parts of it as they come.
        fields: The head, without length.
    """

    status: HTTPStatus
    body: bytes | AsyncGenerator[bytes, None] = b""
    fields: Mapping[str, str] = field(default_factory=dict)


def text_answer(status: HTTPStatus, text: str, **fields: str) -> Answer:
    """Return an answer of one line."""
    kind = {"content-type": "text/plain; charset=utf-8"}
    return Answer(status, f"{text}\n".encode(), kind | fields)


class HttpServer:
    """Answer requests that come to a socket.

    Args:
        listening: The socket. The server closes it.
        answer: Makes the answer, in the server's event loop.
    """

    def __init__(
        self, listening: socket.socket, answer: Callable[[Request], Awaitable[Answer]]
    ) -> None:
        self._listening, self._answer = listening, answer
        # Both are in the order in which they came.
        self._waiting: dict[asyncio.WriteTransport, None] = {}
        self._tasks: dict[asyncio.Task[Any], bool] = {}  # True for an endless answer.

    def run(self, *beside: Coroutine[Any, Any, None]) -> None:
        """Answer until Ctrl-C or SIGTERM, and run what is beside it as long."""

        async def interruptible() -> None:
            serving = asyncio.current_task()
            assert serving is not None
            with suppress(NotImplementedError):  # On Windows, asyncio raises KeyboardInterrupt.
                for each in (signal.SIGINT, signal.SIGTERM):
                    asyncio.get_running_loop().add_signal_handler(each, serving.cancel)
            tasks = [asyncio.create_task(each) for each in beside]
            try:
                await self.serve()
            finally:
                for task in tasks:
                    task.cancel()

        with suppress(asyncio.CancelledError, KeyboardInterrupt):
            asyncio.run(interruptible())

    async def serve(self) -> None:
        """Answer until this is canceled; then answers that have begun get some seconds."""
        self._listening.setblocking(False)
        self._listening.listen(_BACKLOG)
        try:
            while True:
                await self._accept()
        finally:
            self._listening.close()
            for transport in self._waiting:
                transport.abort()
            for task, is_endless in self._tasks.items():
                if is_endless:
                    task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_END_S)

    async def _accept(self) -> None:
        """Accept one connection.

        The event loop turns meanwhile. So a request that has arrived is read before newer
        connections can push it out.
        """
        try:
            client, _ = await asyncio.get_running_loop().sock_accept(self._listening)
            reader, writer = await asyncio.open_connection(sock=client, limit=_MOST_HEAD)
        except OSError:  # The client has gone, or this process has too many files open.
            await asyncio.sleep(_RETRY_S)
            return
        if len(self._waiting) == _MOST_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.abort()
        self._waiting[writer.transport] = None
        self._tasks[asyncio.create_task(self._connection(reader, writer))] = False

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            request = await self._request(reader, writer.transport)
            answer = request if isinstance(request, Answer) else await self._answered(request)
            self._tasks[task] = not isinstance(answer.body, bytes)
            await _send(writer, answer)
        except (EOFError, OSError):
            pass  # The client has gone, or was too slow.
        except Exception:
            _log.exception("an answer ended early")
        finally:
            del self._tasks[task]
            writer.close()

    async def _request(
        self, reader: asyncio.StreamReader, transport: asyncio.WriteTransport
    ) -> Request | Answer:
        """Return what is asked for, or the answer to what cannot be a request."""
        too_late = asyncio.get_running_loop().call_later(_HEAD_S, transport.abort)
        try:
            return _parsed(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError:
            return _TOO_LARGE
        finally:
            too_late.cancel()
            self._waiting.pop(transport, None)

    async def _answered(self, request: Request) -> Answer:
        try:
            return await self._answer(request)
        except Exception:
            _log.exception("%s was not answered", request.path)
            return text_answer(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed; see its log")


_TOO_LARGE = text_answer(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"a request has {_MOST_HEAD // 1024} KiB and {_MOST_FIELDS} fields at most; delete cookies",
)


def _parsed(head: bytes) -> Request | Answer:
    first, *lines = head[:-4].decode("latin-1").split("\r\n", _MOST_FIELDS + 1)
    if len(lines) > _MOST_FIELDS:
        return _TOO_LARGE
    method, _, rest = first.partition(" ")
    target, _, version = rest.partition(" ")
    path, _, query = target.partition("?")
    is_plain = target.isascii() and target.isprintable() and target.startswith("/")
    if not is_plain or not version.startswith("HTTP/1."):
        return text_answer(HTTPStatus.BAD_REQUEST, "not a request of HTTP/1.1")
    if method != "GET":
        text = "only GET: this server changes nothing"
        return text_answer(HTTPStatus.METHOD_NOT_ALLOWED, text, allow="GET")
    parts = [line.partition(":") for line in lines]
    return Request(path, query, [(name.lower(), value.strip()) for name, _, value in parts])


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> None:
    """Send an answer; a client that takes nothing for long is cut off."""
    fields = {**_FIELDS, **answer.fields}
    if isinstance(answer.body, bytes):
        fields["content-length"] = str(len(answer.body))
    lines = [f"HTTP/1.1 {int(answer.status)} {answer.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    writer.transport.set_write_buffer_limits(0)  # With 0, `drain` waits until the kernel has all.
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
    body = _parts(answer.body) if isinstance(answer.body, bytes) else answer.body
    async with aclosing(body) as parts:
        async for part in parts:
            writer.write(part)
            too_slow = asyncio.get_running_loop().call_later(_IDLE_S, writer.transport.abort)
            try:
                await writer.drain()
            finally:
                too_slow.cancel()


async def _parts(body: bytes) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(body), _PART):
        yield body[at : at + _PART]
