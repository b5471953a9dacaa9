"""What a finding points at is there: in the page's timeline, and in the exported trace."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.analysis.diagnosis.diagnosis import findings
from lightning_rlprof.report.chrome_trace import write_trace
from lightning_rlprof.report.html.page import render_report
from lightning_rlprof.tables.spans import Spans
from tests.builders.browser import Page, find_browser, open_page
from tests.builders.runs import Row, loaded
from tests.report.html.test_page import poked

CLICK = """
document.querySelector('a[href="#step-12"]').click();
setTimeout(() => {
  const top = document.getElementById("timeline-title").getBoundingClientRect().top;
  document.body.dataset.chosen = document.getElementById("chosen").textContent;
  document.body.dataset.near = String(Math.abs(top) < innerHeight);
}, 500);
"""


def rows() -> Iterator[Row]:
    """Yield twenty steps that mostly generate, step 12 most of all."""
    for step in range(1, 21):
        start, end = step * 10**7, (step + 1) * 10**7
        yield Row("training_step", "step", step, start, end)
        length = (8 if step == 12 else 7) * 10**6
        yield Row("actor_generate", "stage", step, start, start + length)


@pytest.fixture
def spans() -> Spans:
    return loaded([*rows()])


def source_of(spans: Spans) -> str:
    tables = {
        table.name: table
        for table in (each(spans) for each in [each.run for each in CATALOG if each.summary])
    }
    return render_report(spans, tables)


def test_a_finding_links_to_a_step_that_the_page_has(spans: Spans) -> None:
    page = Page(source_of(spans))
    links = [a["href"] for a in page.find("a") if a["href"].startswith("#step-")]
    assert links == ["#step-12", "#step-1"], "of most rollout, of most untraced"
    anchors = [f"#{a['id']}" for a in page.find("span") if a.get("id")]
    assert sorted(anchors) == sorted(links)
    assert "Rollout takes most of the time" in page.text()


def test_the_link_opens_the_step(spans: Spans, tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("NO BROWSER: install chromium or set CHROMIUM; the link was not followed")
    page = open_page(browser, poked(source_of(spans), CLICK), tmp_path)
    assert "data-error" not in page.body
    assert page.body["data-chosen"].startswith("Step 12 · ")
    assert page.body["data-near"] == "true"


def test_a_page_that_is_opened_with_a_link_shows_its_step(spans: Spans, tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("NO BROWSER: install chromium or set CHROMIUM; the link was not followed")
    source = poked(source_of(spans), "document.body.dataset.chosen = chosen.textContent;")
    opened = source.replace(
        "<main>", "<script>history.replaceState(null, '', '#step-12');</script><main>"
    )
    page = open_page(browser, opened, tmp_path)
    assert page.body["data-chosen"].startswith("Step 12 · ")


def test_the_exported_trace_has_the_evidence_at_the_place_that_is_named(
    spans: Spans, tmp_path: Path
) -> None:
    write_trace(spans, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = {(e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    table = findings(spans)
    places = [*zip(*map(table.column, ("rank", "from", "to")), strict=True)]
    assert len(places) == 2
    for rank, start, end in places:
        first, last = int(start or 0), int(end or 0)
        assert (int(rank or 0) + 1, first / 1e3, (last - first) / 1e3) in drawn
