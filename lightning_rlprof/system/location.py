"""A path or URL given by the user; and texts from outside, safe to show."""

import os
import re
from pathlib import Path
from typing import Any

from lightning_rlprof.errors import TraceError

_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]+"
_URL = re.compile(rf"(?:{_SCHEME}::)*{_SCHEME}://")
_IN_TEXT = re.compile(rf"{_SCHEME}://?[^\s'\"<>]+")  # A URL turned into a path has lost a slash.

# This is user:password@. A password may contain a slash, as AWS keys do. Digits and a slash are a
# port.
_PASSWORD = re.compile(r"(?<=:/)(/?)[^\s/?#@:]*:(?!:|\d*/)[^\s?#]*@")
_USER = re.compile(r"(?<=://)[^\s/?#@:]+@")
_CONTAINER = re.compile(r"(?:abfss?|wasbs?)://[^\s/?#@:]+@", re.I)  # On Azure, a bucket ends in @.
_TOKEN = re.compile(r"(?:^|::)https?://[^/?#]*@", re.I)


class RemotePath(type(Path())):  # type: ignore[misc]  # That of this system.
    """A URL where a path is expected; shown as given, but without user and query.

    It has the name and suffix of a path; it cannot be opened as a local file.

    Attributes:
        url: The URL as given, with its query.
    """

    url: str

    def __str__(self) -> str:
        """Return the URL without user and query."""
        return redact(self.url) if hasattr(self, "url") else super().__str__()

    def __reduce__(self) -> Any:
        """Keep the URL when pickled for another process."""
        return (place, (self.url,)) if hasattr(self, "url") else super().__reduce__()


def place(text: str | Path) -> Path:
    """Return a path, or a `RemotePath` if the text is a URL; ``~`` is your home directory.

    A `Path` that was made from a URL stays a local path: it has lost a slash.

    Raises:
        TraceError: It is neither text nor a path, or a URL that contains credentials.

    Example::

        >>> place("s3://bucket/run").name, place("profiler_data").name
        ('run', 'profiler_data')
        >>> print(place("https://host/run.json?sig=secret"))
        https://host/run.json?***
    """
    if not isinstance(text, str | Path):
        raise TraceError(f"expected a path or a URL, not {text!r:.80}")
    if isinstance(text, Path) or not _URL.match(text):
        return text if isinstance(text, RemotePath) else Path(os.path.expanduser(text))
    if _PASSWORD.search(text) or _TOKEN.search(text):
        raise TraceError(
            f"{redact(text)}: the URL contains credentials, which command lines and logs would "
            "show; set them in the environment, such as FSSPEC_S3_KEY and FSSPEC_S3_SECRET"
        )
    path = RemotePath(redact(text).partition("?")[0])
    path.url = text
    return path


def local_path(text: str | Path) -> Path:
    """Return a path on this machine.

    Raises:
        TraceError: It is a URL.
    """
    path = place(text)
    if isinstance(path, RemotePath):
        raise TraceError(f"{path} is a URL, but a local path is required; download it first")
    return path


def redact(text: str) -> str:
    """Return a text whose URLs have no user, password or query.

    Example::

        >>> redact("cannot read s3://KEY:secret@bucket/run: 403")
        'cannot read s3://bucket/run: 403'
    """
    return _IN_TEXT.sub(lambda found: _redact_url(found[0]), text)


def _redact_url(url: str) -> str:
    link = url.rstrip(":,;.)'\"")  # Punctuation at its end belongs to the sentence around it.
    end = url[len(link) :]
    if not _CONTAINER.match(link):
        link = _USER.sub("", _PASSWORD.sub(r"\1", link))
    head, query, _ = link.partition("?")
    return f"{head}?***{end}" if query else head + end


def plain(text: str) -> str:
    r"""Return text with every control character escaped: of lines, of colors, of direction.

    Example::

        >>> plain("a\x1b[31mb")
        'a\\x1b[31mb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
