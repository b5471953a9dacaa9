"""The server of pages with a secret: what it answers, and which clients it cuts off."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import ExitStack, suppress
from http import HTTPStatus

import pytest

from lightning_rlprof.system import http_server
from lightning_rlprof.system.http_server import Answer, HttpServer, Request
from tests.builders.http_client import fetch, serving

END = b"\r\n\r\n"


@pytest.fixture(autouse=True)
def _no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test end by what it tests, and not by a limit of time."""
    for name in ("_HEAD_S", "_IDLE_S", "_END_S"):
        monkeypatch.setattr(http_server, name, 3600.0)


async def echo(request: Request) -> Answer:
    text = f"{request.path}|{request.query}|{'+'.join(request.values('x-word'))}"
    return Answer(HTTPStatus.OK, text.encode(), {"content-type": "text/plain"})


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def sent(port: int, data: bytes) -> bytes:
    """Return all that a server answers to some bytes, until it closes the connection."""
    found = b""
    with connect(port) as client:
        client.sendall(data)
        with suppress(ConnectionResetError):
            while part := client.recv(65536):
                found += part
    return found


def is_open(client: socket.socket) -> bool:
    """Return whether a server has closed a connection on which it sent nothing."""
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def closed(client: socket.socket) -> bool:
    """Wait until a server closes a connection on which it sent nothing."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_request_is_answered_and_the_connection_closed() -> None:
    with serving(echo) as port:
        data = b"GET /a%20b?c=d HTTP/1.1\r\nX-Word: one\r\nx-word:two " + END
        head, _, body = sent(port, data).partition(END)
        assert body == b"/a%20b|c=d|one+two"
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"content-length: 18\r\n" in head + b"\r\n"
        assert b"connection: close\r\n" in head + b"\r\n"


def test_no_answer_is_kept_or_guessed() -> None:
    with serving(echo) as port:
        for method in ("GET", "POST"):
            headers = fetch(port, "/", method).headers
            assert headers["cache-control"] == "no-store"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /", b"400"),
        (b"GET / HTTP/2", b"400"),
        (b"", b"400"),
        (b"GET http://elsewhere/ HTTP/1.1", b"400"),
        (b"GET /\x00 HTTP/1.1", b"400"),
        (b"GET /\r HTTP/1.1", b"400"),
        (b"GET /\xc3\xa9 HTTP/1.1", b"400"),
        (b"POST / HTTP/1.1", b"405"),
        (b"HEAD / HTTP/1.1", b"405"),
        (b"OPTIONS / HTTP/1.1", b"405"),
        (b"get / HTTP/1.1", b"405"),
        (b"GET / HTTP/1.1" + b"\r\na:" * 100, b"200"),
        (b"GET / HTTP/1.1" + b"\r\na:" * 101, b"431"),
        (b"GET / HTTP/1.1\r\ncookie: " + b"a" * 60_000, b"200"),
        (b"GET / HTTP/1.1\r\ncookie: " + b"a" * 70_000, b"431"),
        (b"a" * 1_000_000, b"431"),
    ],
)
def test_what_is_not_a_request_for_a_page_is_refused(data: bytes, status: bytes) -> None:
    with serving(echo) as port:
        assert sent(port, data + END).startswith(b"HTTP/1.1 " + status)


def test_a_large_answer_arrives_whole() -> None:
    async def large(request: Request) -> Answer:
        return Answer(HTTPStatus.OK, b"0123456789" * 1_000_000)

    with serving(large) as port:
        assert fetch(port, "/").body == "0123456789" * 1_000_000


def test_an_error_of_ours_is_an_answer_and_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(request: Request) -> Answer:
        raise KeyError(request.path)

    with serving(fail) as port:
        assert fetch(port, "/x").status == 500
    assert "/x was not answered" in caplog.text


def test_the_oldest_of_too_many_that_wait_goes_and_a_request_is_answered() -> None:
    with serving(echo) as port, ExitStack() as stack:
        silent = [stack.enter_context(connect(port)) for _ in range(150)]
        halves = [stack.enter_context(connect(port)) for _ in range(150)]
        for half in halves:
            half.sendall(b"GET / HTTP/1.1\r\nCookie: " + b'"\\' * 100)
        assert fetch(port, "/page").body == "/page||"
        assert all(map(closed, silent))
        still_there = [half for half in halves if is_open(half)]
        assert 100 < len(still_there) <= http_server._MOST_WAITING


def test_a_request_that_was_sent_is_answered_before_newer_connections_push_it_out() -> None:
    """All connections are there before the server accepts the first one."""
    with ExitStack() as stack:
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port = listening.getsockname()[1]
        early = stack.enter_context(connect(port))
        early.sendall(b"GET /early HTTP/1.1" + END)
        for _ in range(400):
            stack.enter_context(connect(port))

        async def answered() -> bytes:
            task = asyncio.create_task(HttpServer(listening, echo).serve())
            found = await asyncio.to_thread(early.recv, 65536)
            task.cancel()
            await asyncio.wait([task])
            return found

        assert asyncio.run(answered()).startswith(b"HTTP/1.1 200")


def test_those_whose_request_was_read_are_not_counted() -> None:
    async def endless(request: Request) -> Answer:
        async def parts() -> AsyncGenerator[bytes, None]:
            yield b"begun"
            await asyncio.Event().wait()

        return Answer(HTTPStatus.OK, parts())

    with serving(endless) as port, ExitStack() as stack:
        streams = [stack.enter_context(connect(port)) for _ in range(5)]
        for stream in streams:
            stream.sendall(b"GET / HTTP/1.1" + END)
            assert stream.recv(15, socket.MSG_WAITALL) == b"HTTP/1.1 200 OK"
        silent = [stack.enter_context(connect(port)) for _ in range(300)]
        assert closed(silent[0])
        for stream in streams:
            assert is_open(stream)


def test_a_head_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAD_S", 0.01)
    with serving(echo) as port, connect(port) as silent, connect(port) as half:
        half.sendall(b"GET / HTTP/1.1\r\n")
        assert closed(silent)
        assert closed(half)


def test_a_client_that_takes_nothing_is_cut_off_and_a_pause_between_parts_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_IDLE_S", 0.01)
    ended = []

    async def answer(request: Request) -> Answer:
        async def parts() -> AsyncGenerator[bytes, None]:
            try:
                if request.path == "/much":
                    while True:
                        yield b"a" * 1_000_000
                for _ in range(3):
                    yield b"part"
                    await asyncio.sleep(2 * http_server._IDLE_S)
            finally:
                ended.append(request.path)

        return Answer(HTTPStatus.OK, parts())

    with serving(answer) as port, connect(port) as lazy:
        lazy.sendall(b"GET /much HTTP/1.1" + END)
        while not ended:
            assert fetch(port, "/paused").body == "part" * 3
            ended.remove("/paused")
    assert ended == ["/much"]


def test_at_the_end_streams_are_cut_and_answers_that_have_begun_are_sent() -> None:
    begun, asked = asyncio.Event(), []

    async def answer(request: Request) -> Answer:
        asked.append(request.path)
        if len(asked) == 2:
            begun.set()
        if request.path == "/slow":
            await ending.wait()
            return Answer(HTTPStatus.OK, b"whole")

        async def parts() -> AsyncGenerator[bytes, None]:
            yield b"begun"
            await asyncio.Event().wait()

        return Answer(HTTPStatus.OK, parts())

    async def run() -> tuple[bytes, bytes]:
        task = asyncio.create_task(HttpServer(listening, answer).serve())
        await begun.wait()
        task.cancel()
        asyncio.get_running_loop().call_soon(ending.set)
        await asyncio.wait([task])
        return slow.recv(65536), stream.recv(65536)

    ending = asyncio.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    with connect(port) as slow, connect(port) as stream:
        slow.sendall(b"GET /slow HTTP/1.1" + END)
        stream.sendall(b"GET /stream HTTP/1.1" + END)
        first, second = asyncio.run(run())
        assert first.endswith(b"whole")
        assert second.endswith(b"begun") or second == b""
