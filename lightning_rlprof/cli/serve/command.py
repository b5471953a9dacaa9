"""The verb ``serve``: a run that is being written, in the browser and for Prometheus."""

import secrets
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.completion import SAVE_PATH
from lightning_rlprof.cli.open_run import Run, run_directory
from lightning_rlprof.errors import RlprofError

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from lightning_rlprof.cli.serve.otlp import Exporter


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
    """Show a run in the browser while it is being written.

    Only this machine can open it, unless --host says otherwise. The address that is printed has a
    secret, without which nothing is answered. It changes nothing in the run. It ends with Ctrl-C.

    Its metrics can be scraped by Prometheus, or are pushed with --otlp.
    """
    from lightning_rlprof.cli.serve import access
    from lightning_rlprof.cli.serve.app import Pages
    from lightning_rlprof.cli.serve.live_feed import LiveFeed
    from lightning_rlprof.cli.serve.otlp import push_always
    from lightning_rlprof.system.http_server import HttpServer

    folder = run_directory(run)
    exporter = _exporter(otlp, folder) if otlp is not None else None
    listening = _listen(host, port)
    feed, tokens = LiveFeed(folder), [secrets.token_urlsafe(32)]
    address = _address(host, listening.getsockname()[1])
    console.say(f"Serving {folder} at {address}/?token={tokens[0]} (Ctrl-C ends it)")
    try:
        tokens.append(access.scraper_token())
        console.status(f"Scrapers send the secret in {access.scraper_token_path()}")
    except RlprofError as error:
        console.warn(f"scrapers have no secret that stays: {error}. {error.hint}".rstrip(". "))
    if not access.is_loopback(host):
        console.warn(
            "the connection is not encrypted: other machines on its way can read the token"
        )
    server = HttpServer(listening, access.Guard(Pages(feed), access.own_names(host), tokens))
    server.run(*([push_always(exporter, feed)] if exporter else []))


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
            f"--otlp needs {error.name}", hint='pip install "lightning-rlprof[otlp]"'
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
