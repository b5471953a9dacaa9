"""The live page in a real browser: what is on screen, without a script, on a phone, of 64 ranks."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_rlprof.cli.serve.live_page import page, view_as_json
from lightning_rlprof.loaders.live_run import LiveRun
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.report.live_view import LiveView, live_view
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.testing import make_header
from tests.builders.browser import Page, Tab, find_browser
from tests.builders.scripted import Script, play
from tests.cli.serve.test_command import Served, serving

STEPS = 40


class Growing:
    """A run of which more and more is written."""

    def __init__(self, run: Path, spans: Spans) -> None:
        self.run, self._spans = run, spans
        self.writers = {
            rank: TraceWriter(run, replace(header, host="node"))
            for rank, header in spans.headers.items()
        }

    def write(self, first: int, last: int) -> None:
        for each in sorted(self._spans, key=lambda span: span.end_ns):
            if first <= each.step <= last:
                times = (each.step, each.start_ns, each.end_ns, 7, each.id, each.parent)
                counters = dict(each.counters) if each.counters else None
                self.writers[each.rank].write([("span", each.name, each.kind, *times, counters)])

    def end(self) -> None:
        for writer in self.writers.values():
            writer.write([("end", int(self._spans.end_ns.max()), "finished")])

    @property
    def view(self) -> LiveView:
        live = LiveRun(self.run)
        live.refresh()
        return live_view(live)


def growing(run: Path, ranks: int = 4, steps: int = STEPS) -> Growing:
    """Return a run whose rank 2 is 15% slow; all wait for it in the update."""
    return Growing(run, play(Script(ranks=ranks, steps=steps, slow={2: 0.15}), 3).spans)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Growing:
    made = growing(tmp_path_factory.mktemp("state") / "run")
    made.write(1, STEPS - 10)
    return made


@pytest.fixture(scope="module")
def served(job: Growing) -> Iterator[Served]:
    if find_browser() is None:
        pytest.skip("NO BROWSER: install chromium or set CHROMIUM; the page was not opened")
    with serving(job.run) as found:
        yield found


@pytest.fixture
def tab(served: Served, tmp_path: Path) -> Iterator[Tab]:
    with Tab(str(find_browser()), tmp_path, site=served.address) as found:
        yield found


def text(tab: Tab, selector: str) -> str:
    return str(tab.run(f"document.querySelector({selector!r}).innerText")).strip()


def test_the_slow_rank_is_named_and_nothing_says_that_ranks_are_alike(job: Growing) -> None:
    shown = " ".join(Page(page(job.run, job.view)).text().split())
    assert "Fix first" in shown
    assert "A rank slows the others down (rank 2" in shown
    assert "Slowest rank 2: 1.1" in shown
    assert "within" not in shown


def test_before_the_first_step_the_page_says_so(tmp_path: Path) -> None:
    shown = Page(page(tmp_path, growing(tmp_path).view)).text()
    assert "no step has ended yet" in shown
    assert "Fix first" not in shown


def test_many_small_stages_are_one_part_and_the_bar_adds_up(tmp_path: Path) -> None:
    writer, at = TraceWriter(tmp_path, make_header(0)), 0
    for step in range(1, 5):
        begin = at
        for stage in range(300):
            ns = 10**6 if stage else 10**9
            span = ("span", f"stage_{stage}", "stage", step, at, at + ns, 7, at + 1, None, None)
            writer.write([span])
            at += ns
        writer.write([("span", "step", "step", step, begin, at, 7, at + 1, None, None)])
    live = LiveRun(tmp_path)
    live.refresh()
    shown = Page(page(tmp_path, live_view(live)))
    widths = [float(each["width"].rstrip("%")) for each in shown.find("svg") if "x" in each]
    assert len(widths) == 2
    assert sum(widths) == pytest.approx(100)
    assert [each["data-part"] for each in shown.find("li")] == ["stage_0", "299 others"]


@pytest.mark.deep
def test_64_ranks_and_a_thousand_steps_are_bounded(tmp_path: Path) -> None:
    job = growing(tmp_path, 64, 250)
    job.write(1, 250)
    view = job.view
    figures = json.loads(view_as_json(tmp_path, view))["figures"]
    found = Page(figures)
    assert len(figures) < 150_000
    assert len(found.elements) < 1_500
    bars = [each for each in found.find("rect") if each.get("class") == "hit"]
    assert len(bars) == 200
    assert re.search(r"steps 51 to 250", found.text())
    (picture,) = found.find("img")
    assert picture["src"].startswith("data:image/png;base64,")
    assert len(view.ranks.rows) == 16


@pytest.mark.deep
def test_a_page_that_is_open_follows_the_run(job: Growing, served: Served, tab: Tab) -> None:
    tab.visit(served.link)
    tab.wait("Number(document.body?.dataset.updates) >= 1")
    assert tab.run("document.querySelector('.first').getBoundingClientRect().bottom < 900")
    job.write(STEPS - 9, STEPS)
    tab.wait(f"document.getElementById('title').textContent.includes('step {STEPS} ')")
    assert text(tab, ".first .title").startswith("A rank slows the others down (rank 2")
    assert tab.run("document.querySelectorAll('.columns title').length") == STEPS
    heat = "document.querySelector('.heat-map')"
    assert tab.run(f"[{heat}.naturalWidth, {heat}.naturalHeight]") == [STEPS, 4]
    widths = (
        "[...document.querySelectorAll('#bar svg rect')]"
        ".map((each) => each.getBoundingClientRect().width)"
    )
    whole = tab.run("document.getElementById('bar').getBoundingClientRect().width")
    assert sum(tab.run(widths)) == pytest.approx(whole, abs=0.5)
    assert tab.run("Number(document.body.dataset.drew) >= 0")
    assert tab.problems == []


@pytest.mark.deep
def test_it_can_be_read_without_a_script_and_loads_itself_again(
    job: Growing, served: Served, tab: Tab
) -> None:
    tab._call("Emulation.setScriptExecutionDisabled", value=True)
    tab.visit(served.link)
    tab.wait("document.querySelector('.first .title') !== null")
    assert text(tab, ".first .title").startswith("A rank slows the others down (rank 2")
    assert tab.run("document.body.dataset.updates") == "0"
    assert "%" in text(tab, ".legend li b")
    tab.run("document.body.dataset.old = 'yes'; 1")
    tab.wait("document.readyState === 'complete' && !('old' in document.body.dataset)")
    assert text(tab, ".first .title").startswith("A rank slows the others down (rank 2")
    assert tab.problems == []


@pytest.mark.deep
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_read_it_on_every_screen(
    width: int, theme: str, served: Served, tab: Tab
) -> None:
    tab.resize(width, 844)
    tab.theme(theme)
    tab.visit(served.link)
    tab.wait("Number(document.body?.dataset.updates) >= 1")
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.violations() == []
    assert tab.problems == []
