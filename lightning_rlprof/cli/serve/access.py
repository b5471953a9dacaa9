"""Who may read: who shows a secret, and asks for a known name of this host.

The secret is looked for first, in the first 4 KB of each field, without a parser: what costs time
is done only for those who have shown it.

A page of another site can make a browser ask this server. It cannot read an answer, and a name that
it lets point here (DNS rebinding) is refused, as its name is in the Host header.
"""

import os
import secrets
import socket
import stat
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.files import IS_POSIX, lock, open_without_link, user
from lightning_rlprof.system.http_server import Answer, Request, text_answer

COOKIE = "rlprof-token"
"""Begin of the cookie that a browser gets for a link with the token; its port is the end.

Browsers send cookies to all ports of a host, and each of several servers needs its own.
"""

_LOOKED_AT = 4096  # Characters of a field that are searched for a secret.
_SHORTEST = 32  # Characters of a secret.
_HEADERS = {
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
}


class Guard:
    """Let a request through to the pages, or answer it.

    Args:
        pages: Answers those who may read.
        hosts: Names of this host, besides ``localhost`` and addresses.
        tokens: Secrets, of which a request must show one.
    """

    def __init__(
        self,
        pages: Callable[[Request], Awaitable[Answer]],
        hosts: Iterable[str],
        tokens: Iterable[str],
    ) -> None:
        self._pages, self._tokens = pages, [token.encode() for token in tokens]
        self._hosts = {name.lower() for name in hosts if name} | {"localhost"}

    async def __call__(self, request: Request) -> Answer:
        """Answer one request."""
        answer = self._refusal(request) or self._to_cookie(request) or await self._pages(request)
        return replace(answer, fields={**_HEADERS, **answer.fields})

    def _refusal(self, request: Request) -> Answer | None:
        if not any(self._is_token(each) for each in _shown(request)):
            return text_answer(
                HTTPStatus.UNAUTHORIZED,
                "a token is needed; open the address that rlprof serve printed",
                **{"www-authenticate": "Bearer"},
            )
        hosts = request.values("host")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            text = "unknown Host header; open the address that rlprof serve printed"
            return text_answer(HTTPStatus.MISDIRECTED_REQUEST, text)
        return None

    def _to_cookie(self, request: Request) -> Answer | None:
        """Move a token from the address, where it would stay in the history, into a cookie."""
        token = _value(request.query, "&", "token")
        if not self._is_token(token):
            return None
        fields = {
            # A path such as //host would lead to another site.
            "location": "/" + request.path.lstrip("/"),
            "set-cookie": f"{_cookie(request)}={token}; Path=/; HttpOnly; SameSite=Strict",
        }
        return Answer(HTTPStatus.SEE_OTHER, fields=fields)

    def _is_token(self, shown: str) -> bool:
        return any(secrets.compare_digest(shown.encode(), token) for token in self._tokens)

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


def _shown(request: Request) -> list[str]:
    """Return what may be a secret."""
    found = [_value(request.query, "&", "token")]
    for text in request.values("authorization"):
        scheme, _, word = text[:_LOOKED_AT].partition(" ")
        found.append(word.strip() if scheme.lower() == "bearer" else "")
    return found + [_value(text, ";", _cookie(request)) for text in request.values("cookie")]


def _value(text: str, separator: str, name: str) -> str:
    pairs = (pair.strip().partition("=") for pair in text[:_LOOKED_AT].split(separator))
    return next((value for known, _, value in pairs if known == name), "")


def _cookie(request: Request) -> str:
    port = "".join(request.values("host")).rpartition(":")[2]
    return f"{COOKIE}-{port if port.isdecimal() else 80}"


def scraper_token_path() -> Path:
    """Return the file with the secret of this user's scrapers."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state, "rlprof", "scraper-token")


def scraper_token() -> str:
    """Return the secret of this user's scrapers, which is made once and survives restarts.

    Raises:
        RlprofError: The file cannot be opened or made, is a link, belongs to another user, can be
            read by others, or has no secret; or the home of the user is unknown.
    """
    path = scraper_token_path()
    if not path.is_absolute():
        raise RlprofError(f"'{path}' is not absolute", hint="Set HOME or XDG_STATE_HOME")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(open_without_link(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != user():
                raise RlprofError(f"'{path}' is not a file of yours", hint="Delete it")
            if IS_POSIX and stat.S_IMODE(found.st_mode) & 0o077:
                raise RlprofError(f"others can read '{path}'", hint="Delete it, so that it is new")
            lock(file)  # If two servers start at once, one makes the secret.
            token = file.read(_LOOKED_AT).decode("ascii", "replace").strip()
            if not token:
                token = secrets.token_urlsafe(32)
                file.write(f"{token}\n".encode())
    except OSError as error:
        raise RlprofError(f"cannot open '{path}' ({error.strerror or error})") from error
    is_word = token.isascii() and token.isprintable() and " " not in token
    if len(token) < _SHORTEST or not is_word:
        raise RlprofError(f"'{path}' contains no secret", hint="Delete it, so that it is made")
    return token


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
