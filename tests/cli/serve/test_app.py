"""The pages of `rlprof serve`: figures, metrics, report; nothing else, and nothing is written."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_rlprof.cli.serve.app import LiveFeed, Pages
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.testing import make_header
from tests.builders.browser import Page
from tests.builders.http_client import ask

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m"


def steps(first: int, last: int, stage: str = HOSTILE) -> list[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for step in range(first, last + 1):
        at, ms = step * 100_000_000, 1_000_000
        lines.append(
            ("span", stage, "stage", step, at, at + 60 * ms, 7, 2 * step, 2 * step + 1, None)
        )
        lines.append(("span", "step", "step", step, at, at + 90 * ms, 7, 2 * step + 1, None, None))
    return lines


def begin(run: Path, *, ended: bool = True) -> TraceWriter:
    writer = TraceWriter(run, replace(make_header(0), role="actor"))
    writer.write(steps(1, 5))
    if ended:
        writer.write([("end", 999, "finished")])
    return writer


def contents(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def events(body: str) -> list[dict]:
    return [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: ")]


def test_the_page_allows_only_its_own_script(tmp_path):
    begin(tmp_path)
    page = ask(Pages(LiveFeed(tmp_path)), "/")
    assert page.status == 200
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert "<script src=" in page.body
    assert "<script>" not in page.body
    assert "style=" not in page.body


def test_the_page_has_the_figures_before_any_script_runs(tmp_path):
    begin(tmp_path)
    page = Page(ask(Pages(LiveFeed(tmp_path)), "/").body)
    shown = page.text()
    assert "1 rank, all ended · step 5 · median 90.0 ms" in shown
    assert "all ranks have ended" in shown
    assert HOSTILE.replace("\x1b", "\\x1b") in shown
    assert "mean 90.0 ms" in shown
    assert page.find("img") == [], "of one rank nothing is compared"
    names = [section["aria-label"] for section in page.find("section")]
    assert names == ["Overview", "Steps", "Stages", "Ranks"]
    parts = [part["width"] for part in page.find("svg") if "x" in part]
    assert parts == ["66.667%", "33.333%"]
    assert {"http-equiv": "refresh", "content": "5"} in page.find("meta")


@pytest.mark.parametrize("path", ["/live.js", "/live.css", "/style.css"])
def test_what_the_page_loads_is_there(path, tmp_path):
    begin(tmp_path)
    answer = ask(Pages(LiveFeed(tmp_path)), path)
    assert (answer.status, len(answer.body) > 500) == (200, True)


def test_the_events_of_a_run_that_has_ended_are_one(tmp_path):
    begin(tmp_path)
    answer = ask(Pages(LiveFeed(tmp_path)), "/events")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    (view,) = events(answer.body)
    assert (view["state"], view["ended"]) == ("all ranks have ended", True)
    assert view["figures"] in ask(Pages(LiveFeed(tmp_path)), "/").body
    assert "1 rank, all ended · step 5 · median 90.0 ms" in view["figures"]
    assert "<img src=x" not in view["figures"]
    assert "\x1b" not in answer.body


def test_the_events_of_a_run_that_goes_on_follow_it(tmp_path, monkeypatch):
    writer, real = begin(tmp_path, ended=False), asyncio.sleep
    monkeypatch.setattr("lightning_rlprof.report.live_view.EVERY_S", 0.0)
    monkeypatch.setattr("lightning_rlprof.report.live_view._REST", 0)

    async def wait(seconds):
        writer.write(steps(6, 7))
        await real(0)

    monkeypatch.setattr("lightning_rlprof.cli.serve.app.asyncio.sleep", wait)
    found = events(ask(Pages(LiveFeed(tmp_path)), "/events", most=4).body)
    assert len(found) >= 2
    assert ["step 5" in found[0]["figures"], "step 7" in found[1]["figures"]] == [True, True]
    assert not found[1]["ended"]


def test_all_pages_together_read_once_a_second(tmp_path):
    writer, now = begin(tmp_path, ended=False), [10.0]

    async def look() -> list[str]:
        feed = LiveFeed(tmp_path, lambda: now[0])
        titles = [(await feed.view()).title]
        writer.write(steps(6, 6))
        now[0] += 0.9
        titles.append((await feed.view()).title)
        now[0] += 0.1
        titles.append((await feed.view()).title)
        return titles

    first, second, third = asyncio.run(look())
    assert first == second
    assert "step 5" in first
    assert "step 6" in third


def test_the_report_of_a_run_that_goes_on_is_what_is_recorded_so_far(tmp_path):
    writer, now = begin(tmp_path, ended=False), [10.0]

    async def look() -> list[str]:
        feed = LiveFeed(tmp_path, lambda: now[0])
        pages = [await feed.report()]
        writer.write(steps(6, 9, "actor_update"))
        now[0] += 29
        pages.append(await feed.report())
        now[0] += 2
        pages.append(await feed.report())
        return pages

    first, second, third = asyncio.run(look())
    assert "rlprof report</title>" in first
    assert first is second
    assert "actor_update" in third
    assert "actor_update" not in first


def test_a_report_that_cannot_be_made_says_why(tmp_path):
    (tmp_path / "rank-00000.jsonl").write_text("no header\n")
    answer = ask(Pages(LiveFeed(tmp_path)), "/report")
    assert answer.status == 503
    assert answer.body.startswith("no report: ")


def test_no_address_names_a_file_and_nothing_is_written(tmp_path):
    run = tmp_path / "run"
    begin(run)
    (tmp_path / "secret").write_text("outside")
    (run / "capture.txt").write_text("inside")
    before = contents(tmp_path)
    app = Pages(LiveFeed(run))
    for path in (
        "/rank-00000.jsonl",
        "/capture.txt",
        "/../secret",
        "/%2e%2e/secret",
        "/..%2fsecret",
        "//secret",
        "/live.js/../../access.py",
        "/assets/live.js",
        "/live.html",
        "/app.py",
    ):
        assert ask(app, path).status == 404, path
    for path in ("/", "/events", "/metrics", "/report"):
        assert ask(app, path).status == 200, path
    assert contents(tmp_path) == before


def test_the_report_keeps_its_own_policy(tmp_path):
    begin(tmp_path)
    answer = ask(Pages(LiveFeed(tmp_path)), "/report")
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert 'http-equiv="Content-Security-Policy"' in answer.body


def test_the_metrics_are_typed_text(tmp_path):
    begin(tmp_path)
    answer = ask(Pages(LiveFeed(tmp_path)), "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'rlprof_step{rank="0",role="actor"} 5\n' in answer.body
