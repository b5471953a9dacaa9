"""`rlprof serve` as a command: what it prints and refuses, and a browser beside a writer."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import pytest

from tests.builders.browser import Tab, find_browser
from tests.cli.serve.test_app import HOSTILE, begin, steps
from tests.report.test_grafana import EXPRESSIONS
from tests.report.test_live_view_metrics import full


def test_a_port_that_is_taken_is_one_clear_line(rlprof, tmp_path):
    begin(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = rlprof("serve", tmp_path, "--port", port)
    assert code == 2
    assert f"cannot listen on 127.0.0.1, port {port} (" in err
    assert "hint: Choose another --port, or 0 for a free one" in err


def test_what_is_not_a_run_is_refused_before_anything_listens(rlprof, tmp_path):
    code, _, err = rlprof("serve", tmp_path)
    assert code == 2
    assert "is not a run of rlprof" in err


class Served(NamedTuple):
    """A server: the link that it printed, its address without the token, and its process."""

    link: str
    address: str
    token: str
    process: "subprocess.Popen[str]"


@contextmanager
def serving(run: Path, *words: str) -> Iterator[Served]:
    """Serve a run in another process, as a user whose state is in the folder above the run."""
    command = [sys.executable, "-m", "lightning_rlprof", "serve", str(run), "--port", "0", *words]
    environment = {**os.environ, "COLUMNS": "500", "PYTHONUNBUFFERED": "1"}
    environment["XDG_STATE_HOME"] = str(run.parent / "state")
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"Serving {run} at http://"), line + process.stderr.read()
        link = line.split(" at ")[1].split()[0]
        address, _, token = link.partition("?token=")
        yield Served(link, address, token, process)
    finally:
        process.kill()
        process.communicate()


def get(address: str, token: str, **headers: str) -> tuple[int, str]:
    headers |= {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.deep
def test_a_server_answers_who_has_its_link_and_ends_with_ctrl_c(tmp_path):
    run = tmp_path / "run"
    begin(run, ended=False)
    with (
        serving(run) as served,
        urllib.request.urlopen(
            urllib.request.Request(
                f"{served.address}events", headers={"Authorization": f"Bearer {served.token}"}
            )
        ) as page,
    ):
        assert page.readline() == b"retry: 2000\n"
        assert served.address.startswith("http://127.0.0.1:")
        assert len(served.token) > 40
        for path in ("", "live.js", "events", "metrics", "report", "nothing"):
            assert get(f"{served.address}{path}", "wrong")[0] == 401
        assert get(f"{served.address}metrics", served.token)[0] == 200
        assert get(served.address, served.token, Host="evil.example")[0] == 421
        served.process.send_signal(signal.SIGINT)
        _, err = served.process.communicate(timeout=60)
    assert (served.process.returncode, err) == (0, "")


@pytest.mark.deep
def test_the_secret_of_scrapers_survives_a_restart(tmp_path):
    run = tmp_path / "run"
    begin(run)
    links = []
    for _ in range(2):
        with serving(run) as served:
            assert get(f"{served.address}metrics", served.token)[0] == 200
            token = (tmp_path / "state/rlprof/scraper-token").read_text().strip()
            assert get(f"{served.address}metrics", token)[0] == 200
            links += [served.token, token]
    first, stable, second, again = links
    assert stable == again
    assert len({first, second, stable}) == 3


@pytest.mark.deep
def test_other_machines_are_answered_with_the_token(tmp_path):
    run = tmp_path / "run"
    begin(run)
    (tmp_path / "state/rlprof").mkdir(parents=True)
    (tmp_path / "state/rlprof/scraper-token").symlink_to("/dev/zero")
    with serving(run, "--host", "0.0.0.0") as served:
        port = urlsplit(served.address).port
        local = f"http://127.0.0.1:{port}/metrics"
        assert get(local, "wrong")[0] == 401
        assert get(local, served.token)[0] == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.process.stdout is not None
        # `communicate` would lose what the reader of the first line has already taken.
        out = served.process.stdout.read()
        assert served.process.wait(timeout=60) == 0
    assert "warning: scrapers have no secret that stays: cannot open '" in out
    assert "warning: the connection is not encrypted" in out


@pytest.mark.deep
def test_a_browser_follows_a_run_without_loading_the_page_again(tmp_path):
    browser = find_browser()
    if browser is None:
        pytest.skip("NO BROWSER: install chromium or set CHROMIUM; the page was not opened")
    run = tmp_path / "run"
    writer, last, stop = begin(run, ended=False), [5], threading.Event()

    def write() -> None:
        while not stop.wait(0.05):
            writer.write(steps(last[0] + 1, last[0] + 1))
            last[0] += 1

    writing = threading.Thread(target=write)
    writing.start()
    try:
        with serving(run) as served, Tab(browser, tmp_path, site=served.address) as tab:
            tab.visit(served.link)
            tab.wait("Number(document.body?.dataset.updates) >= 1")
            tab.run(
                "window.before = true; window.first = document.getElementById('title').textContent"
            )
            tab.wait("document.getElementById('title').textContent !== window.first")
            tab.wait("Number(document.body.dataset.updates) >= 3")
            assert tab.run("window.before"), "the page was loaded again"
            assert tab.run("document.getElementById('state').textContent") == "live"
            shown = tab.run("document.querySelector('[data-name=stages] tbody td').textContent")
            assert shown == HOSTILE.replace("\x1b", "\\x1b")
            assert tab.run("document.querySelectorAll('img').length") == 0
            whole, part = (
                tab.run(f"document.querySelector('{each}').getBoundingClientRect().width")
                for each in ("#bar", "#bar svg rect")
            )
            assert part / whole == pytest.approx(2 / 3, abs=0.006)
            assert tab.run("document.querySelectorAll('.columns title').length") >= 6
            stop.set()
            writing.join()
            writer.write([("end", 999, "finished")])
            tab.wait("document.getElementById('state').textContent === 'all ranks have ended'")
            assert f"step {last[0]} " in tab.run("document.getElementById('title').textContent")
            tab.visit(tab.run("document.querySelector('a[href=report]').href"))
            tab.wait("document.readyState === 'complete' && 'drawn' in document.body.dataset")
            assert tab.problems == []
    finally:
        stop.set()
        writing.join()


@pytest.mark.deep
def test_a_real_prometheus_scrapes_it_and_answers_every_expression_of_the_dashboard(tmp_path):
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("NO PROMETHEUS: install prometheus; nothing was scraped")
    run = tmp_path / "run"
    run.mkdir()
    full(run)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serving(run) as served:
        target = f"127.0.0.1:{urlsplit(served.address).port}"
        scrape = {"job_name": "rlprof", "scrape_interval": "1s", "scrape_timeout": "1s"}
        scrape |= {"static_configs": [{"targets": [target]}]}
        token = tmp_path / "state/rlprof/scraper-token"
        scrape |= {"authorization": {"credentials_file": str(token)}}
        (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))
        command = [
            prometheus,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        quiet = subprocess.DEVNULL
        scraping = subprocess.Popen(command, stdout=quiet, stderr=quiet)
        try:
            missing, until = list(EXPRESSIONS), time.monotonic() + 120
            while missing:
                assert time.monotonic() < until, missing
                assert scraping.poll() is None
                time.sleep(0.2)
                missing = [each for each in missing if not asked(port, each)]
        finally:
            scraping.kill()
            scraping.wait()


def asked(port: int, expression: str) -> list[object]:
    """Return what Prometheus answers; nothing while it does not listen yet."""
    query = quote(expression.replace("$instance", ".+"))
    try:
        status, body = get(f"http://127.0.0.1:{port}/api/v1/query?query={query}", "")
    except OSError:
        return []
    assert status in (200, 503), body
    return list(json.loads(body)["data"]["result"]) if status == 200 else []
