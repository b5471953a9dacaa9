"""What a user names: a path here or a URL; and texts in which no credential of a URL is left."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any
from urllib.parse import unquote

from lightning_rlprof.errors import TraceError

_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]+"
_URL = re.compile(rf"(?:{_SCHEME}::)*{_SCHEME}://")
_IN_TEXT = re.compile(rf"{_SCHEME}://?[^\s'\"<>]*[^\s'\"<>:]")  # as a path, a URL has lost a slash
# Of a password with a slash, as the keys of AWS have it, the first @ is the end; behind a port is
# a path.
_LOGIN = r"([^/?#:]*):([^/?#]*)|([^/?#:]+)|([^/?#:]*):(?!:|\d*/)([^?#@]*)"
_USER = re.compile(rf"(?<=://)(?:{_LOGIN})@")
_USER_IN_TEXT = re.compile(rf"(?:(?<=://)|(?<=:/)(?!/))(?:{_LOGIN})@".replace("[^", r"[^\s"))
_CONTAINER = re.compile(r"(?:abfss?|wasbs?)://[^\s/?#@:]+@", re.I)  # Azure's bucket ends in @
_QUERY = re.compile(r"\?.*", re.S)
_SECRET = "key|token|secret|signature|passw|credential|auth"
_NAMED = re.compile(_SECRET, re.I)
_ASSIGNED = re.compile(
    rf"((?:[\w-]*(?:{_SECRET})[\w-]*|\bsig)['\"]?\s*[=:]\s*)"
    r"['\"]?(?:(?:Bearer|Basic)\s+)?[^\s'\",;&)]+",
    re.I,
)
_HIDDEN = "***"
# Characters of a password in a URL, of a value in the environment, and of a user's name that is a
# token: shorter ones are in any text.
_PASSWORD, _VALUE, _TOKEN = 4, 8, 16


class RemotePath(PosixPath):
    """A URL where a path is expected; shown as it was given, without credentials.

    It has the name and suffix of a path; nothing can be opened by it.

    Attributes:
        url: As it was given, with credentials if it had any.
    """

    url: str

    def __str__(self) -> str:
        """Return the URL without user, password and query."""
        return _bare(self.url, _USER) if hasattr(self, "url") else super().__str__()

    def __reduce__(self) -> Any:
        """Keep the URL where another process goes on."""
        return (place, (self.url,)) if hasattr(self, "url") else super().__reduce__()


def place(text: str | Path) -> Path:
    """Return what a user named as a path: a `RemotePath` where it is a URL; ``~`` is your home.

    A `Path` that was made of a URL stays what it is: it has lost a slash.

    Raises:
        TraceError: It is neither text nor a path.

    Example::

        >>> place("s3://KEY:very-secret@bucket/run").name, place("profiler_data").name
        ('run', 'profiler_data')
        >>> print(place("s3://KEY:very-secret@bucket/run"))
        s3://bucket/run
    """
    if not isinstance(text, str | Path):
        raise TraceError(f"a path or a URL is needed, not {text!r:.80}")
    if isinstance(text, Path) or not _URL.match(text):
        return text if isinstance(text, RemotePath) else Path(os.path.expanduser(text))
    path = RemotePath(_bare(text, _USER).partition("?")[0])
    path.url = text
    return path


def here(text: str | Path) -> Path:
    """Return what a user named as a path on this machine.

    Raises:
        TraceError: It is a URL.
    """
    path = place(text)
    if isinstance(path, RemotePath):
        raise TraceError(f"{path}: is a URL, and only what lies here can be taken; copy it first")
    return path


def bare(text: str) -> str:
    """Return a text with its URLs, or paths made of some, without users, passwords and queries."""
    return _IN_TEXT.sub(lambda found: _bare(found[0], _USER_IN_TEXT), text)


def scrubbed(text: str, url: str = "") -> str:
    """Return a text as one line without users, passwords, queries and keys.

    Args:
        text: A URL, or what an error says.
        url: What is secret in it is not left in the text by itself either.
    """
    text = hidden(text, secrets_of(url) | _configured())
    return " ".join(_ASSIGNED.sub(rf"\1{_HIDDEN}", bare(text)).split())


def hidden(text: str, secrets: set[str]) -> str:
    """Return a text with stars in the place of secrets.

    Example::

        >>> hidden("GET /run?sig=abcdef", {"abcdef"})
        'GET /run?sig=***'
    """
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text


def secrets_of(url: str, least: int = _PASSWORD) -> set[str]:
    """Return what is secret in a URL, as it stands there and decoded, if it is so long at least."""
    found = None if _CONTAINER.search(url) else _USER.search(url)
    user, password, alone, other, long = found.groups("") if found else [""] * 5
    tokens = [name for name in (user, alone, other) if len(name) >= _TOKEN]
    values = [part.partition("=")[2] for part in url.partition("?")[2].split("&")]
    secrets = (password, long, *tokens, *values)
    return {form for each in secrets for form in (each, unquote(each)) if len(form) >= least}


def _bare(url: str, user: re.Pattern[str]) -> str:
    kept = url if _CONTAINER.match(url) else user.sub("", url)
    return _QUERY.sub(f"?{_HIDDEN}", kept)


def _configured() -> set[str]:
    """Return the secrets in the environment, and in what fsspec was told if it is there."""
    found = {value for name, value in os.environ.items() if _NAMED.search(name)}
    told: list[Mapping[str, Any]] = []
    if "fsspec" in sys.modules:
        told.append(sys.modules["fsspec"].config.conf)
    while told:
        for name, value in told.pop().items():
            if isinstance(value, Mapping):
                told.append(value)
            elif isinstance(value, str) and _NAMED.search(name):
                found.add(value)
    return {each for each in found if len(each) >= _VALUE}
