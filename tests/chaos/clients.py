"""Hostile clients of a server, in a process of their own, and how long its pages take meanwhile.

300 clients connect and send nothing, half of a request, or a byte at a time; each that is cut off
comes again. Others send requests without the secret, as fast as they are answered.
"""

import asyncio
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.cookiejar import CookieJar

from tests.places import ROOT

_HELD = 300
_PAUSE_S = 0.1  # before a client comes again, and between two bytes
_HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: "
_HOSTILE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: " + b'"\\' * 30_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: " + b'a="\\073;' * 7_500 + b"\r\n\r\n",
    b"GET /?token=" + b"%41" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /?" + b"&" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: " + b"[" * 60_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1" + b"\r\na:" * 15_000 + b"\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n" + b"a" * 60_000,
    b"a" * 100_000,
)


@contextmanager
def attacked(port: int) -> Iterator[Callable[[], int]]:
    """Attack a server meanwhile; yields what ends that and returns how many still held it."""
    command = [sys.executable, "-m", "tests.chaos.clients", str(port)]
    pipe = subprocess.PIPE
    crowd = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def end() -> int:
        return int(crowd.communicate()[0])

    try:
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == "all came\n"
        yield end
    finally:
        crowd.kill()
        crowd.wait()


async def _attack(port: int) -> None:
    held: set[int] = set()
    came: set[int] = set()
    tasks = [asyncio.create_task(_hold(port, number, held, came)) for number in range(_HELD)]
    tasks += [asyncio.create_task(_send(port, request)) for request in _HOSTILE]
    while len(came) < _HELD:
        await asyncio.sleep(_PAUSE_S)
    print("all came", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until it is closed
    print(len(held), flush=True)
    for task in tasks:
        task.cancel()


async def _hold(port: int, number: int, held: set[int], came: set[int]) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            held.add(number)
            came.add(number)
            if number % 3:
                writer.write(_HALF)
            while number % 3 == 2 and not reader.at_eof():
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(_PAUSE_S)
            await reader.read()
            writer.close()
        held.discard(number)
        await asyncio.sleep(_PAUSE_S)


async def _send(port: int, request: bytes) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            await reader.read()
            writer.close()
        await asyncio.sleep(0)


def slowest_page(link: str, pages: list[str], times: int) -> tuple[str, float]:
    """Return which page took longest for a browser with the link, and how many ms.

    Raises:
        OSError: A page was refused.
    """
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    address = re.sub(r"\?.*", "", link)
    took: list[tuple[float, str]] = []
    for page in ["", *pages] * times:
        start = time.perf_counter()
        with opener.open(f"{address}{page}" if page else link, timeout=60) as answer:
            # of a stream, the first line
            body = answer.readline() if page == "events" else answer.read()
        assert body, page
        took.append((1e3 * (time.perf_counter() - start), page or "/"))
    longest, page = max(took)
    return page, longest


if __name__ == "__main__":
    asyncio.run(_attack(int(sys.argv[1])))
