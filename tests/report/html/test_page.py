"""The HTML report: complete in itself, drawn without error by a real browser, inert to names."""

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html.page import render_report, write_report
from lightning_rlprof.report.terminal import duration
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.advised import Fact, advised
from tests.builders.browser import Page, find_browser, open_page
from tests.builders.runs import MAIN, Row, grpo_rows, grpo_run, header, spans_of, write_rank

EVIL = "</script><img src=x onerror=\"document.body.dataset.evil='1'\">\u2028&lt;b>"

Browse = Callable[[str], Page]


def tables_of(spans: Spans) -> dict[str, Table]:
    return {
        table.name: table
        for table in (each(spans) for each in [each.run for each in CATALOG if each.report])
    }


def source_of(spans: Spans) -> str:
    return render_report(spans, tables_of(spans))


def titles_of(source: str) -> list[str]:
    return [text for tag, text in Page(source).texts if tag == "h2" and text.strip()]


def data_of(source: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', source, re.S)
    assert found
    return dict(json.loads(found[1]))


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Open a page from disk in headless Chromium; return it as it is after its script has run."""
    browser = find_browser()
    if browser is None:
        pytest.skip("NO BROWSER: install chromium or set CHROMIUM; the report was not opened")
    return lambda source: open_page(browser, source, tmp_path)


def poked(source: str, script: str) -> str:
    """Return the page without its policy, and with a script of the test's own at its end."""
    source, count = re.subn(r"<meta http-equiv[^>]*>", "", source)
    assert count == 1
    return source.replace("</body>", f"<script>{script}</script></body>")


def test_a_stage_with_inner_ones_has_the_time_of_whole_spans_beside_its_own(
    tmp_path: Path,
) -> None:
    rows = []
    for step in range(1, 5):
        now = step * 10**9
        rows.append(Row("step", "step", step, now, now + 10**9))
        rows.append(Row("actor_update", "stage", step, now, now + 900 * 10**6))
        rows.append(Row("weight_sync", "stage", step, now, now + 300 * 10**6))
    page = source_of(spans_of(tmp_path / "run", rows))
    cells = {
        name: re.findall(r'<td class="(?:num|faint)">(.*?)</td>', row)
        for name, row in re.findall(r'<tr data-part="(.*?)">(.*?)</tr>', page)
    }
    assert cells["actor_update"] == [*["600 ms"] * 4, "900 ms"]
    assert cells["weight_sync"] == [*["300 ms"] * 4, "–"]
    plain = source_of(
        spans_of(tmp_path / "plain", [each for each in rows if each.name != "weight_sync"])
    )
    assert ("Per call, inclusive" in page, "Per call, inclusive" in plain) == (True, False)


def test_the_charts_are_drawn_without_error(tmp_path: Path, browse: Browse) -> None:
    spans = grpo_run(tmp_path / "run", steps=6, ranks=3)
    page = browse(source_of(spans))
    assert "data-error" not in page.body
    assert page.body["data-drawn"] == "rate steps timeline heat"
    drawn = [a for a in page.find("rect") if "data-span" in a]
    assert len(drawn) == 3 * 5  # of the median step: four stages and a region on each rank
    assert all(float(a["width"]) > 0.5 and float(a["height"]) > 8 for a in drawn)
    assert len([a for a in page.find("rect") if "data-gap" in a]) == 3 * 5
    bars = [a["d"].count("M") for a in page.find("path", _class="part")]
    assert bars == [6] * 6  # four stages, a region and untraced in every step
    assert len(page.find("option")) == 6 + 3  # steps of the timeline, values of the heat map
    for stage in stages(spans).column("stage"):
        assert str(stage) in page.text()


def test_the_page_answers_first_and_proves_below(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path / "run", steps=6, ranks=2)
    page = Page(source_of(spans))
    assert titles_of(page.source) == [
        "Steps",
        "Stages",
        "Ranks",
        "Time ledger",
        "Findings",
        "Data quality",
        "Configuration",
        "Environment",
        "More tables",
    ]
    cells = [text for tag, text in page.texts if tag == "bdi"]
    assert {str(stage) for stage in stages(spans).column("stage")} <= set(cells)
    for total in ledger(spans).column("total"):
        assert duration(int(total or 0)).rpartition(" ")[0] in cells
    assert {a["scope"] for a in page.find("th")} == {"col", "row"}


USE = """
const say = (key, value) => { document.body.dataset[key] = value; };
const id = (name) => document.getElementById(name);
const bars = () => document.querySelectorAll("[data-span]").length;
const tip = () => id("tip").hidden ? "" : id("tip").textContent;
const move = (node, type, x, more) => node.dispatchEvent(new PointerEvent(type,
  { bubbles: true, clientX: x, clientY: node.getBoundingClientRect().top + 3, ...more }));
id("step").value = "0";
id("step").dispatchEvent(new Event("change"));
say("chosen", id("chosen").textContent);
const bar = document.querySelector('[data-span="0"]');
move(bar, "pointermove", bar.getBoundingClientRect().left + 1);
say("tip", tip());
const label = id("step-bars");
move(label, "pointermove", label.getBoundingClientRect().right - 20);
say("bar", tip());
say("before", bars());
id("lanes").dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
for (let i = 0; i < 9; i++) id("closer").click();
say("zoomed", bars());
id("fit").click();
say("fitted", bars());
label.dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
say("opened", id("chosen").textContent);
id("timeline-table").open = true;
"""


def test_a_page_can_be_used_by_mouse_and_keyboard(tmp_path: Path, browse: Browse) -> None:
    spans = grpo_run(tmp_path / "run", steps=4)
    page = browse(poked(source_of(spans), USE))
    body = page.body
    assert "data-error" not in body
    assert body["data-chosen"].startswith("Step 1 · ")
    assert body["data-tip"].startswith(("actor_generate", "training_step"))
    assert body["data-bar"].startswith("Step 4: ")
    assert int(body["data-zoomed"]) < int(body["data-before"]) == int(body["data-fitted"]) == 5
    assert body["data-opened"].startswith("Step 4 · ")
    in_tables = [text for text in page.text().split() if text == "actor_update"]
    assert len(in_tables) > len(re.findall("actor_update", Page(source_of(spans)).text()))


def test_hostile_names_are_text_and_nothing_else(tmp_path: Path, browse: Browse) -> None:
    rows = [
        *grpo_rows(3),
        Row(EVIL, "stage", 2, 2_000_000, 3_000_000, MAIN, counters={EVIL: 1.0}, id=900),
        Row(EVIL, "region", 2, 2_100_000, 2_900_000, MAIN, parent=900, id=901),
    ]
    head = header(
        host=EVIL, device=EVIL, config={EVIL: {EVIL: EVIL}}, versions={EVIL: EVIL}, role=EVIL
    )
    notes = [(0, "warning", EVIL), (0, "info", EVIL)]
    write_rank(tmp_path / "run", head, rows, notes=notes, threads={MAIN: EVIL}, status=EVIL)
    spans = load(tmp_path / "run")
    tables = {**tables_of(spans), EVIL: Table(EVIL, (Column(EVIL, "text"),), [(EVIL,)], EVIL)}
    source = render_report(spans, tables)
    assert "<img" not in source
    assert "\u2028" not in str(re.search(r"<script[^>]*json.*?</script>", source, re.S))
    assert EVIL in data_of(source)["timeline"]["names"]
    # Without the policy too: it is the second wall, not the only one.
    for page in (browse(source), browse(poked(source, "document.body.dataset.poked = '1'"))):
        assert page.find("img") == []
        assert "data-evil" not in page.body
        assert "data-error" not in page.body
        assert page.body["data-drawn"].startswith("rate steps timeline")
        assert EVIL in page.text()
    assert page.body["data-poked"] == "1"


@contextmanager
def counting_server() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_policy_forbids_every_request_and_every_other_script(
    tmp_path: Path, browse: Browse
) -> None:
    source = source_of(grpo_run(tmp_path / "run", steps=3))
    with counting_server() as (address, asked):
        added = f"<img src={address}/i><link rel=stylesheet href={address}/c>"
        added += f"<iframe src={address}/f></iframe>"
        added += f"<script src={address}/s></script><script>document.body.dataset.evil=1</script>"
        page = browse(source.replace("</main>", f"{added}</main>"))
        assert asked == []
        assert "data-evil" not in page.body
        assert page.body["data-drawn"].startswith("rate steps timeline")
        page = browse(poked(source.replace("</main>", f"{added}</main>"), ""))
        assert sorted(asked) == ["/c", "/f", "/i", "/s"]  # so the test can fail
        assert page.body["data-evil"] == "1"


def test_nothing_in_the_file_points_outside(tmp_path: Path) -> None:
    source = source_of(grpo_run(tmp_path / "run", steps=3, ranks=2))
    page = Page(source)
    links = {a[key] for _, a in page.elements for key in ("src", "href", "action") if key in a}
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    assert re.findall(r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", source) == []


def test_a_run_without_steps_is_still_a_page(tmp_path: Path, browse: Browse) -> None:
    write_rank(tmp_path / "run", header(0, 2), [], status=None)
    page = browse(source_of(load(tmp_path / "run")))
    assert page.body["data-drawn"] == ""
    assert "data-error" not in page.body
    text = page.text()
    assert "0 steps on 1 rank; 3 are needed to show where time goes." in text
    assert "3 doubts" in text
    assert "No answer yet" in text
    assert "of 2 ranks, these have no trace: 1" in text
    assert "its file is truncated" in text


def test_an_interrupted_step_is_drawn_and_named(tmp_path: Path, browse: Browse) -> None:
    run = tmp_path / "run"
    whole = grpo_rows(4)
    write_rank(run, header(0, 2), whole)
    cut = [row for row in grpo_rows(4, 1) if not (row.step == 4 and row.kind != "stage")]
    write_rank(run, header(1, 2, host="node-b"), cut[:-1], status=None)
    script = "const s = document.getElementById('step'); s.value = '3';"
    script += "s.dispatchEvent(new Event('change'));"
    page = browse(poked(source_of(load(run)), script))
    assert "data-error" not in page.body
    assert "not ended by rank 1" in page.text()
    assert "as hosts' clocks are not calibrated" in page.text()


def test_tables_with_names_of_their_own_come_last(tmp_path: Path) -> None:
    spans = spans_of(tmp_path / "run", grpo_rows(3))
    own = Table("mine", (Column("what", "text"), Column("speed", "number", "MB/s")), [("a", 1.5)])
    empty = Table("none", (Column("what", "text"),))
    page = Page(render_report(spans, {"mine": own, "none": empty, **tables_of(spans)}))
    assert titles_of(page.source)[-1] == "More tables"
    folds = [text for tag, text in page.texts if tag == "summary" and text.strip()]
    assert folds[-2:] == ["Mine", "Tables without data"]
    assert "MB/s" in page.text()


def test_an_accelerator_without_a_capture_is_told_how_to_make_one(tmp_path: Path) -> None:
    write_rank(tmp_path / "gpu", header(device="cuda"), grpo_rows(4))
    write_rank(tmp_path / "cpu", header(), grpo_rows(4))
    gpu, cpu = (source_of(load(tmp_path / name)) for name in ("gpu", "cpu"))
    assert "Device" in titles_of(gpu)
    (code,) = re.findall(r"<code>(integrated: .*?)</code>", gpu)
    ProfilerConfig.build(yaml.safe_load(code))
    assert "Device" not in titles_of(cpu)


def test_a_problem_is_a_card_with_its_remedies_and_what_to_record_follows() -> None:
    spans = advised(Fact(spans={"logging": 0.2, "actor_update": 0.8}, versions={"trl": "1"}))
    page = Page(source_of(spans))
    cards = [each for each in page.find("li") if str(each.get("id", "")).startswith("finding-")]
    assert len(cards) == len(diagnose(spans).found)
    text = page.text()
    assert "TRL: GRPOConfig.logging_steps" in text
    assert "not decided, and what to record" in text


def test_a_page_needs_no_table(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path / "run", steps=3, ranks=2)
    source = render_report(spans, {})
    assert titles_of(source) == [
        *("Steps", "Stages", "Ranks", "Findings", "Data quality", "Configuration", "Environment")
    ]
    assert "Median step" in Page(source).text()


def test_a_report_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = grpo_run(tmp_path / "a\udcffb", steps=3)
    path = tmp_path / "report.html"
    write_report(spans, tables_of(spans), path)
    first = path.read_bytes()
    assert b"a?b" in first

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:99])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_report(spans, tables_of(spans), path)
    assert path.read_bytes() == first
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == ["report.html"]
