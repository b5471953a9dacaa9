"""Who may read: only GET, only known names of this host, and only with the token if there is one.

A page of another site can make a browser ask this server. It cannot read an answer, and a name that
it lets point here (DNS rebinding) is refused, as its name is in the Host header.
"""

import secrets
import socket
from collections.abc import Iterable
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, quote

COOKIE = "rlprof-token"
"""Cookie that a browser gets for a link with the token."""

_Scope = dict[str, Any]
_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


class Guard:
    """Let a request through to an ASGI application, or answer it.

    Args:
        app: The application.
        hosts: Names of this host, besides ``localhost`` and addresses.
        token: What a request must know; None asks for nothing.
    """

    def __init__(self, app: Any, hosts: Iterable[str], token: str | None) -> None:
        self._app, self._token = app, token
        self._hosts = {name.lower() for name in hosts if name} | {"localhost"}

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message.get("headers", ())}
                more = [pair for pair in _HEADERS if pair[0] not in own]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        if refused := self._refusal(scope):
            await _answer(send_guarded, *refused)
        elif self._is_link(scope):
            path = "/" + scope["path"].lstrip("/")  # never //host, another site
            cookie = f"{COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            headers = [(b"location", quote(path).encode()), (b"set-cookie", cookie.encode())]
            await _answer(send_guarded, HTTPStatus.SEE_OTHER, "", headers)
        else:
            await self._app(scope, receive, send_guarded)

    def _refusal(self, scope: _Scope) -> tuple[HTTPStatus, str] | None:
        host = _header(scope, b"host")
        if len(host) != 1 or not self._is_own(host[0]):
            text = "unknown Host header; open the address that rlprof serve printed"
            return HTTPStatus.MISDIRECTED_REQUEST, text
        if scope["method"] not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "only GET: this server changes nothing"
        if self._token is not None and not self._knows_token(scope):
            text = "a token is needed; open the address that rlprof serve printed"
            return HTTPStatus.UNAUTHORIZED, text
        return None

    def _is_own(self, host: str) -> bool:
        """Return whether a Host header has a name of this host; an address cannot be rebound."""
        if host.startswith("["):
            name, end, rest = host[1:].partition("]")
            if not end:
                return False
        else:
            name, _, rest = host.partition(":")
        if rest.removeprefix(":") and not rest.removeprefix(":").isdecimal():
            return False
        return name.lower() in self._hosts or _is_address(name)

    def _knows_token(self, scope: _Scope) -> bool:
        given = [_query_token(scope)]
        for text in _header(scope, b"authorization"):
            scheme, _, word = text.partition(" ")
            given.append(word.strip() if scheme.lower() == "bearer" else "")
        for text in _header(scope, b"cookie"):
            try:
                cookie = SimpleCookie(text).get(COOKIE)
            except CookieError:
                continue
            given.append(cookie.value if cookie is not None else "")
        expected = (self._token or "").encode()
        return any(secrets.compare_digest(each.encode(), expected) for each in given)

    def _is_link(self, scope: _Scope) -> bool:
        """Return whether the token is in the address, where it would stay in the history."""
        return self._token is not None and bool(_query_token(scope))


def own_names(host: str) -> set[str]:
    """Return the names by which this host may be asked, without looking one up."""
    return {host, socket.gethostname(), socket.gethostname().partition(".")[0]}


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host.

    Example::

        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _header(scope: _Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


def _query_token(scope: _Scope) -> str:
    query: str = scope["query_string"].decode("latin-1")
    return parse_qs(query).get("token", [""])[0]


async def _answer(
    send: Any, status: HTTPStatus, text: str, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    body = f"{text}\n".encode() if text else b""
    kind = (b"content-type", b"text/plain; charset=utf-8")
    allow = [(b"allow", b"GET, HEAD")] if status == HTTPStatus.METHOD_NOT_ALLOWED else []
    challenge = [(b"www-authenticate", b"Bearer")] if status == HTTPStatus.UNAUTHORIZED else []
    length = (b"content-length", str(len(body)).encode())
    all_headers = [kind, length, *allow, *challenge, *headers]
    await send({"type": "http.response.start", "status": int(status), "headers": all_headers})
    await send({"type": "http.response.body", "body": body})
