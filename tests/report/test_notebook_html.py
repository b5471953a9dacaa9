"""What a notebook shows of a run: a static overview, and the report in a frame that is cut off."""

import html
import re
import time
from pathlib import Path

import pytest

from lightning_rlprof.report.html.step_charts import paints
from lightning_rlprof.report.notebook import ReportFrame, summary_html
from lightning_rlprof.report.summary import summary
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import Spans
from tests.builders.browser import Page, Tab, find_browser
from tests.builders.runs import Row, grpo_run, loaded
from tests.builders.scripted import Script, play
from tests.report.html.test_page import EVIL


@pytest.fixture(scope="module")
def spans() -> Spans:
    return play(Script(ranks=4, steps=40, slow={2: 0.4}), 3).spans


def test_the_overview_has_the_bar_of_the_mean_step_and_the_first_finding(spans: Spans) -> None:
    parts = summary(spans).parts
    source = summary_html(spans, summary(spans))
    _, *bars = Page(source).find("svg")
    assert [bar["class"] for bar in bars] == [part.kind for part in parts]
    widths = [float(bar["width"].rstrip("%")) for bar in bars]
    assert widths == pytest.approx([100 * part.share for part in parts], abs=0.001)
    assert sum(widths) == pytest.approx(100, abs=0.01)
    colors = paints({part.stage for part in parts} - {"untraced"})
    fills = re.findall(r'<rect width="100%" height="100%" fill="(#\w+)"', source)
    assert fills == [colors[p.stage].fill if p.stage in colors else "#b9bec6" for p in parts]
    hatched = sum(part.kind != "stage" for part in parts)
    assert source.count("url(#rlprof-hatch)") == hatched > 0
    text = Page(source).text()
    assert "40 steps on 4 ranks, median " in text
    assert "Fix first: A rank slows the others down (rank 2" in text
    assert "waiting in actor_update " in text
    assert not re.search(r"<script|<style|http(?!://www.w3.org/2000/svg)", source), "it is static"


def test_no_name_of_a_run_is_markup_in_a_notebook() -> None:
    rows = [Row("step", "step", n, 1000 * n, 1000 * n + 900) for n in range(1, 9)]
    rows += [Row(EVIL, "stage", n, 1000 * n, 1000 * n + 800) for n in range(1, 9)]
    source = Run.of(loaded(rows))._repr_html_()
    assert html.escape("<img src=x") in source
    assert not Page(source).find("img")
    assert not Page(source).find("script")


def test_without_stages_there_is_no_bar_and_few_steps_say_what_is_needed(tmp_path: Path) -> None:
    rows = [Row("step", "step", n, 1000 * n, 1000 * n + 900) for n in range(1, 9)]
    bare, few = loaded(rows), grpo_run(tmp_path / "few", steps=1)
    assert "<svg" not in summary_html(bare, summary(bare))
    assert "1 step on 1 rank; 3 are needed" in summary_html(few, summary(few))


def test_the_report_is_in_a_frame_that_cannot_reach_the_notebook(tmp_path: Path) -> None:
    run = Run.of(grpo_run(tmp_path / "run", steps=4))
    (frame,) = Page(run.report()._repr_html_()).find("iframe")
    assert frame["srcdoc"] == run.report().page
    assert "<h1><bdi>run</bdi></h1>" in run.report().page
    assert frame["sandbox"] == "allow-scripts allow-downloads"


@pytest.mark.deep
def test_links_and_selections_work_in_the_frame(spans: Spans, tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("NO BROWSER: install chromium or set CHROMIUM; the report was not opened")
    script = """
        document.querySelector('nav a[href="#findings"]').click();
        const waiting = setInterval(() => {
            if (location.hash !== "#findings" || scrollY <= 100) return;
            clearInterval(waiting);
            const bars = document.getElementById("step-bars");
            bars.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
            for (const shiftKey of [true, true])
                bars.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", shiftKey }));
            const shown = document.querySelector("#selection span").innerText;
            parent.postMessage([location.hash, shown], "*");
        }, 20);
    """
    page = Run.of(spans).report().page
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    page = policy.sub("", page).replace("</body>", f"<script>{script}</script></body>")
    listen = "onmessage = (event) => { document.body.dataset.heard = JSON.stringify(event.data); }"
    outer = tmp_path / "notebook.html"
    frame = ReportFrame(page)._repr_html_()
    outer.write_text(f'<body data-drawn=""><script>{listen}</script>{frame}</body>')
    with Tab(browser, tmp_path) as tab:
        tab.open(outer)
        limit = time.monotonic() + 120
        while (heard := tab.run("document.body.dataset.heard ?? null")) is None:
            assert time.monotonic() < limit, "the link did not lead to the findings"
        assert heard == '["#steps=1-3","Steps 1–3 selected"]'
        assert tab.problems == []
