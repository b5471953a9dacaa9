"""The timeline as a browser draws it: aligned ranks, empty threads, stages that were left out."""

import json
from pathlib import Path

import pytest

from lightning_rlprof.report.html import timeline
from lightning_rlprof.report.html.page import render_report
from lightning_rlprof.tables.spans import Spans
from tests.builders.browser import Page, find_browser, open_page
from tests.builders.runs import Row, loaded, spans_of
from tests.report.html.test_page import poked
from tests.report.html.test_timeline import shifted

LOOK = """
const told = [...document.querySelectorAll("#lanes [data-span], #lanes [data-gap]")].map((bar) => {
  bar.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
  return [document.getElementById("tip").textContent, Number(bar.getAttribute("x"))];
});
document.body.dataset.told = JSON.stringify(told);
document.body.dataset.chosen = document.getElementById("chosen").textContent;
"""


def drawn(spans: Spans, tmp_path: Path) -> Page:
    browser = find_browser()
    if browser is None:
        pytest.skip("NO BROWSER: install chromium or set CHROMIUM; the timeline was not drawn")
    page = open_page(browser, poked(render_report(spans, {}), LOOK), tmp_path)
    assert "data-error" not in page.body
    return page


def told(page: Page) -> list[tuple[str, float]]:
    return [(text, x) for text, x in json.loads(page.body["data-told"])]


def test_an_aligned_rank_shows_what_began_before_its_step(tmp_path: Path) -> None:
    fetch, step = Row("fetch", "region", 1, 0, 4000), Row("step", "step", 1, 5000, 9000)
    rows = [fetch, step]
    page = drawn(spans_of(tmp_path / "run", rows, shifted(rows, 9**6)), tmp_path)
    bars = [(text, x) for text, x in told(page) if text.startswith("fetch")]
    assert len(bars) == 2
    assert all("begins after-5.00 µs" in text and x >= 74 for text, x in bars)


def test_a_thread_beside_the_steps_hides_no_untraced_time(tmp_path: Path) -> None:
    rows = [Row("reward", "stage", 1, 3, 6, thread=7), Row("step", "step", 1, 0, 9)]
    gaps = [text for text, _ in told(drawn(loaded(rows), tmp_path)) if text.startswith("untraced")]
    assert len(gaps) == 1
    assert "duration9 ns" in gaps[0]


def test_ranks_whose_steps_are_empty_are_counted(tmp_path: Path) -> None:
    page = drawn(loaded([Row("step", "step", 1, 0, 9)]), tmp_path)
    assert "1 rank · 0 spans" in page.body["data-chosen"]


def test_time_of_stages_that_were_left_out_is_not_hatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "_SPANS_PER_STEP", 3)
    rows = [Row("a", "stage", 1, at * 9, at * 9 + 9) for at in range(4)]
    page = drawn(loaded([*rows, Row("step", "step", 1, 0, 36)]), tmp_path)
    assert [text[0] for text, _ in told(page)] == ["a"] * 3
    assert "left out of this file, stages too: nothing is hatched" in page.body["data-chosen"]
