"""The lane of device work below a rank whose step was captured, as data and in a real browser."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.device.breakdown import IDLE, WORK, DeviceParts
from lightning_rlprof.report.html import timeline as page_timeline
from lightning_rlprof.report.html.timeline import timeline
from lightning_rlprof.tables.spans import Spans
from tests.builders.browser import Tab
from tests.builders.device_work import Job, Work, rows_of, spans_of, table
from tests.builders.runs import Row
from tests.report.html.test_device_page import KERNELS, MS, written

GEMM, _, MEAN, REDUCE = KERNELS
SHOW_FIRST = """(() => { const step = document.getElementById('step'); step.value = '0';
    step.dispatchEvent(new Event('change')); })()"""


def captured(ranks: int = 2, devices: int = 1) -> Spans:
    """Return a run of three steps of 50 ms, of which the first was captured on every rank.

    Each device multiplies for 4 ms from 10 ms on, then reduces and exchanges for 2 ms each.
    """
    jobs: dict[int, list[Row]] = {}
    work, names = [], []
    for rank in range(ranks):
        jobs[rank] = [
            Row("rlprof open capture", "region", 1, 0, MS, id=1),
            Row("rlprof close capture", "region", 1, 40 * MS, 41 * MS, id=2),
        ]
        for step in range(1, 4):
            begin, counters = 50 * MS * step - 50 * MS, {"capture": 1} if step == 1 else {}
            jobs[rank] += [
                Row("step", "step", step, begin, begin + 50 * MS, counters=counters, id=10 * step),
                Row("actor_update", "stage", step, begin + MS, begin + 39 * MS, id=10 * step + 1),
            ]
        for device in range(devices):
            for name, start, end in ((GEMM, 10, 14), (MEAN, 14, 16), (REDUCE, 16, 18)):
                times = (start * MS, end * MS, "actor_update", start * MS - 9_000)
                work.append(Work("compute", *times, rank=rank, device=device))
                names.append(name)
    spans = spans_of(Job(jobs, work, ours=True))
    rows = [row | {"kernel": name} for row, name in zip(rows_of(work), names, strict=True)]
    return replace(spans, tables={"kernels": lambda: table("kernels", rows)})


def sums(lane: list[Any]) -> Counter[str]:
    return Counter(dict(zip((*WORK, "idle"), map(sum, lane[5]), strict=True)))


def test_a_captured_step_has_what_each_device_did_in_it_to_the_nanosecond() -> None:
    spans = captured()
    first, *others = timeline(spans)["steps"]
    assert [lane[:4] for lane in first["devices"]] == [[rank, 0, 0, 50 * MS] for rank in (0, 1)]
    (own,) = DeviceParts(spans).columns(1, 0, 50 * MS, 1)
    wanted = dict(zip(WORK, own.ns[0].tolist(), strict=False))
    wanted["idle"] = int(own.ns[0, len(WORK) : len(WORK) + len(IDLE)].sum())
    for lane in first["devices"]:
        found = sums(lane)
        assert dict(found) == wanted
        assert (found["matmul"], found["reduction"]) == (4 * MS, 2 * MS)
        assert found["exposed communication"] == 2 * MS
        wide = [*map(sum, zip(*filter(None, lane[5]), strict=True))]
        assert len(wide) == lane[4] == 240
        assert max(wide) <= -(-50 * MS // 240)
    assert [step["devices"] for step in others] == [[], []], "they were not captured"


def test_many_devices_share_the_columns_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_timeline, "_DEVICE_COLUMNS", 60)
    (first, *_) = timeline(captured(ranks=3, devices=2))["steps"]
    assert [lane[:2] for lane in first["devices"]] == [
        *([0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]),
    ]
    assert {lane[4] for lane in first["devices"]} == {10}
    assert {sums(lane)["matmul"] for lane in first["devices"]} == {4 * MS}


def box(tab: Tab, selector: str) -> dict[str, float]:
    found: dict[str, float] = tab.run(
        f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()"
    )
    return found


def label(tab: Tab, text: str, at: int = 0) -> dict[str, float]:
    found: dict[str, float] = tab.run(
        "[...document.querySelectorAll('#lanes text.label')].filter((each) =>"
        f" each.textContent === {text!r})[{at}].getBoundingClientRect().toJSON()"
    )
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(captured(), tmp_path_factory.mktemp("devices"))


@pytest.mark.parametrize("width", [1280, 390])
def test_the_lane_lies_under_its_rank_on_the_same_axis(width: int, tab: Tab, page: Path) -> None:
    tab.resize(width, 900)
    tab.open(page)
    tab.run(SHOW_FIRST)
    assert tab.run("document.querySelectorAll('#lanes [data-device]').length") == 2
    tops = [
        *(label(tab, "rank 0")["top"], label(tab, "device", 0)["top"]),
        *(label(tab, "rank 1")["top"], label(tab, "device", 1)["top"]),
    ]
    assert tops == sorted(tops)
    stages = tab.run(
        "[...document.querySelectorAll('#lanes rect.stage')].map((each) =>"
        " each.getBoundingClientRect().toJSON())"
    )
    for rank, stage in enumerate(stages):
        lane = box(tab, f"#lanes [data-device='{rank}']")
        assert stage["bottom"] <= lane["top"], "below what the host did"
        assert rank == 1 or lane["bottom"] <= stages[1]["top"], "and above the next rank"
        # The stage takes 38 of the 50 ms from 1 ms on, the matmul 4 ms from 10 ms on.
        gemm = tab.run(
            f"[...document.querySelectorAll('#lanes [data-work=matmul]')][{rank}]"
            ".getBoundingClientRect().toJSON()"
        )
        ms, column = stage["width"] / 38, lane["width"] / 240
        assert gemm["left"] == pytest.approx(stage["left"] + 9 * ms, abs=column + 1)
        assert gemm["right"] == pytest.approx(stage["left"] + 13 * ms, abs=column + 1)
        assert gemm["height"] == pytest.approx(lane["height"], abs=1), "busy all the time"
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.problems == []


def test_a_zoom_moves_stages_and_devices_alike(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.run(SHOW_FIRST)
    before = box(tab, "#lanes rect.stage"), box(tab, "#lanes [data-work=matmul]")
    tab.run("document.getElementById('closer').click()")
    after = box(tab, "#lanes rect.stage"), box(tab, "#lanes [data-work=matmul]")
    grown = [now["width"] / then["width"] for now, then in zip(after, before, strict=True)]
    assert grown == pytest.approx([1 / 0.6] * 2, rel=0.02)


def test_the_pointer_is_told_the_class_and_how_busy_the_device_was(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.run(SHOW_FIRST)
    tab.run("document.getElementById('inside').scrollIntoView()")
    gemm = box(tab, "#lanes [data-work=matmul]")
    middle = (gemm["left"] + gemm["right"]) / 2, (gemm["top"] + gemm["bottom"]) / 2
    tab.hover(*middle)
    shown = tab.run("document.getElementById('tip').innerText").split()
    assert shown[:5] == ["matmul", "device", "·", "rank", "0"]
    assert shown[shown.index("busy") + 1] == "100%"
    lane = box(tab, "#lanes [data-device='0']")
    tab.hover(lane["left"] + 0.5 * lane["width"], middle[1])
    shown = tab.run("document.getElementById('tip').innerText").split()
    assert shown[0] == "idle"
    assert shown[shown.index("busy") + 1] == "0.0%"
    tab.hover(lane["left"] + 0.95 * lane["width"], middle[1])
    assert tab.run("document.querySelector('#tip b').innerText") == "not recorded"
    assert tab.problems == []


def test_classes_are_in_the_legend_and_the_table_of_a_captured_step_alone(
    tab: Tab, page: Path
) -> None:
    legend = "[...document.querySelectorAll('#timeline-legend button')].map((e) => e.innerText)"
    lead = "document.querySelector('#inside > .note').innerText"
    tab.open(page)
    tab.run(SHOW_FIRST)
    assert tab.run(legend) == [
        *("actor_update", "untraced", "matmul", "reduction", "communication"),
    ]
    assert "what its device did" in tab.run(lead)
    tab.run("document.getElementById('timeline-table').open = true")
    tab.wait("document.querySelector('#timeline-table tbody') !== null")
    rows = tab.run(
        "[...document.querySelectorAll('#timeline-table tbody tr')].map((row) =>"
        " [...row.cells].map((cell) => cell.innerText)).filter((row) => row[1] === 'device')"
    )
    assert rows[:4] == [
        ["matmul", "device", "0", "device", "0 ns", "4.00 ms"],
        ["reduction", "device", "0", "device", "0 ns", "2.00 ms"],
        ["exposed communication", "device", "0", "device", "0 ns", "2.00 ms"],
        ["idle", "device", "0", "device", "0 ns", rows[3][5]],
    ]
    tab.run("[...document.querySelectorAll('#timeline-legend button')][2].click()")
    assert tab.run("document.querySelectorAll('#lanes .work.faded').length") == 4
    tab.run("document.getElementById('next').click()")
    assert tab.run(legend) == ["actor_update", "untraced"]
    assert tab.run("document.querySelector('#lanes [data-device]')") is None
    assert tab.problems == []


def test_the_drawing_that_is_saved_has_the_stripes(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.run(SHOW_FIRST)
    tab.run("window.saved = []; URL.createObjectURL = (blob) => { saved.push(blob); return ''; }")
    tab.run("HTMLAnchorElement.prototype.click = () => {}")
    tab.run("document.querySelector('[data-chart=timeline] .save button').click()")
    drawing = tab.run("saved[0].text()")
    assert "#stripes-communication" in drawing
    pattern = drawing.partition('id="stripes-communication"')[2].partition("</pattern>")[0]
    assert "stroke: rgb(61, 67, 75)" in pattern, "the file has no style sheet"


@pytest.mark.deep
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_read_it(width: int, theme: str, tab: Tab, page: Path) -> None:
    tab.resize(width, 844)
    tab.theme(theme)
    tab.open(page)
    tab.run(SHOW_FIRST)
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.violations() == []
    assert tab.problems == []
