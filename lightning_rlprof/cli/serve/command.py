"""The verb ``serve``: a run that is being written, in the browser and for Prometheus."""

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.completion import SAVE_PATH
from lightning_rlprof.cli.open_run import Run, run_directory
from lightning_rlprof.errors import RlprofError

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from lightning_rlprof.cli.serve.otlp import Exporter

_MOST_REQUESTS = 200  # at once


def serve(
    run: Run = SAVE_PATH,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on; 0.0.0.0 is all of them")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, metavar="PORT", help="0 takes a free one")
    ] = 8321,
    otlp: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Also push the metrics to an OpenTelemetry collector, such as http://HOST:4318",
        ),
    ] = None,
) -> None:
    """Show a run in the browser while it is being written, and export its metrics.

    Only this machine can open it, unless --host says otherwise; then a token is required. It
    changes nothing in the run. It ends with Ctrl-C.
    """
    folder = run_directory(run)
    try:
        import uvicorn

        from lightning_rlprof.cli.serve.access import is_loopback, own_names
        from lightning_rlprof.cli.serve.app import make_app
    except ImportError as error:
        raise RlprofError(
            f"serve needs {error.name}", hint='pip install "lightning-rlprof[serve]"'
        ) from error
    exporter = _exporter(otlp, folder) if otlp is not None else None
    listening = _listen(host, port)
    token = None if is_loopback(host) else secrets.token_urlsafe(32)
    config = uvicorn.Config(
        make_app(folder, own_names(host), token, lambda: server.should_exit, exporter),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        limit_concurrency=_MOST_REQUESTS,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    address = _address(host, listening.getsockname()[1])
    query = f"?{urlencode({'token': token})}" if token else ""
    console.say(f"Serving {folder} at {address}/{query} (Ctrl-C ends it)")
    if token:
        console.warn(
            "the connection is not encrypted: other machines on its way can read the token"
        )
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def _exporter(url: str, run: "Path") -> "Exporter":
    """Return what pushes metrics.

    Raises:
        RlprofError: The URL is not one, or OpenTelemetry is not installed.
    """
    from lightning_rlprof.cli.serve.otlp import Exporter

    try:
        return Exporter(url, run.resolve().name)
    except ImportError as error:
        raise RlprofError(
            f"--otlp needs {error.name}", hint='pip install "lightning-rlprof[serve,otlp]"'
        ) from error


def _listen(host: str, port: int) -> "socket.socket":
    """Return a socket that listens.

    Raises:
        RlprofError: The host is unknown, or the port is taken or not allowed.
    """
    import socket

    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise RlprofError(
            f"cannot listen on {host}, port {port} ({error.strerror or error})",
            hint="Choose another --port, or 0 for a free one",
        ) from error


def _address(host: str, port: int) -> str:
    import socket

    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
