"""Ask an ASGI application without a server."""

import asyncio
from typing import Any, NamedTuple

OWN = (b"host", b"localhost:8321")


class Answer(NamedTuple):
    """What came back; headers by lower-case name."""

    status: int
    headers: dict[str, str]
    body: str


def ask(
    app: Any,
    target: str,
    *headers: tuple[bytes, bytes],
    host: tuple[bytes, bytes] | None = OWN,
    method: str = "GET",
    most: int = 10_000,
) -> Answer:
    """Return the answer to one request, or its first parts; then the client is gone."""
    return asyncio.run(_ask(app, target, headers, host, method, most))


async def _ask(app: Any, target: str, headers: Any, host: Any, method: str, most: int) -> Answer:
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [*([host] if host else []), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8321),
    }
    sent: list[Any] = []
    gone = asyncio.Event()
    asked = False

    async def receive() -> Any:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > most:
            gone.set()

    await app(scope, receive, send)
    start, *parts = sent
    given = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    body = b"".join(part.get("body", b"") for part in parts)
    return Answer(start["status"], given, body.decode())
