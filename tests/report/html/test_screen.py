"""The HTML report in a real browser: what is on screen where, used by mouse and keys, for all."""

import os
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.image import imread, imsave

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.records.records import bin_of
from lightning_rlprof.report.html.page import write_report
from lightning_rlprof.tables.spans import Spans
from tests.builders.browser import Tab
from tests.builders.runs import Row, grpo_run, loaded
from tests.builders.scripted import Script, play

STEPS = 60


def written(spans: Spans, folder: Path) -> Path:
    tables = {each.name: each.run(spans) for each in CATALOG if each.report}
    write_report(spans, tables, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of four ranks: rank 2 is slow, and all wait for it in the update."""
    spans = play(Script(ranks=4, steps=STEPS, slow={2: 0.4}), 3).spans
    return written(spans, tmp_path_factory.mktemp("report"))


def box(tab: Tab, selector: str) -> dict[str, float]:
    found: dict[str, float] = tab.run(
        f"(({{x, y, width, height, bottom}}) => ({{x, y, width, height, bottom}}))"
        f"(document.querySelector({selector!r}).getBoundingClientRect())"
    )
    return found


def texts(tab: Tab, selector: str) -> list[str]:
    found = tab.run(f"[...document.querySelectorAll({selector!r})].map((node) => node.innerText)")
    return [str(each).strip() for each in found]


def test_the_first_screen_has_the_answers(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert tab.run("document.body.dataset.drawn") == "rate steps timeline heat whatif"
    for answer in (".hero .big", "#rate svg", "#bar", ".first .title", ".first .price", ".badge"):
        assert box(tab, answer)["bottom"] < 900, answer
    assert box(tab, "#step-bars svg")["y"] < 700
    assert texts(tab, ".first .title")[0].startswith("A rank slows the others down (rank 2")
    assert texts(tab, ".badge")[0] == "✓ Complete and consistent"
    assert tab.problems == []


def test_the_bar_is_drawn_to_scale_and_waiting_has_a_part(tab: Tab, page: Path) -> None:
    tab.open(page)
    whole = box(tab, "#bar")["width"]
    drawn = tab.run(
        "[...document.querySelectorAll('#bar i')].map((part) =>"
        " [part.getBoundingClientRect().width, Number(part.style.getPropertyValue('--share'))])"
    )
    assert sum(share for _, share in drawn) == pytest.approx(1, abs=1e-3)
    assert all(abs(width / whole - share) < 0.006 for width, share in drawn)
    assert any(
        name.startswith("waiting in actor_update") for name in texts(tab, ".part .legend li")
    )


def test_a_selection_is_followed_by_the_page_and_kept_in_its_address(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert texts(tab, "#table-stages .versus") == []
    tab.run("document.getElementById('step-bars').focus()")
    tab.press("Home")
    for _ in range(4):
        tab.press("ArrowRight", shift=True)
    assert tab.run("location.hash") == "#steps=1-5"
    assert texts(tab, "#selection span") == ["Steps 1–5 selected"]
    assert texts(tab, "#table-stages .versus")[0] == "vs. other steps"
    tab.press("Escape")
    assert tab.run("location.hash") == ""
    assert texts(tab, "#table-stages .versus") == []
    bars = box(tab, "#step-bars")
    tab.drag(bars["x"] + 200, bars["y"] + 60, bars["x"] + 400)
    chosen = tab.run("location.hash")
    assert re.fullmatch(r"#steps=\d+-\d+", chosen)
    tab.open(page, "#steps=7-9")
    assert texts(tab, "#selection span") == ["Steps 7–9 selected"]
    assert tab.problems == []


def test_selected_steps_are_summed_up_by_their_own_figures(tab: Tab, page: Path) -> None:
    tab.open(page, f"#steps=1-{STEPS}")
    whole = texts(tab, "#table-stages td.num")
    assert set(texts(tab, "#table-stages td.versus")) == {"–"}, "there are no others"
    tab.open(page)
    unselected = texts(tab, "#table-stages td.num")
    rows = len(texts(tab, "#table-stages tbody tr"))
    whole = [each for each in whole if each != "–"]
    assert len(whole) == len(unselected) == 4 * rows
    for one, other in zip(map(str.split, whole), map(str.split, unselected), strict=True):
        assert one[1] == other[1]
        assert float(one[0]) == pytest.approx(float(other[0]), rel=0.01)  # of whole microseconds


def test_tables_are_sorted_by_their_headings(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.run("document.querySelector('#table-ranks th:nth-child(2) button').focus()")
    tab.run("document.activeElement.click()")
    assert tab.run("document.activeElement.closest('th').ariaSort") == "descending"
    assert texts(tab, "#table-ranks tbody th")[0] == "2", "the latest rank"
    tab.run("document.activeElement.click()")
    assert tab.run("document.activeElement.closest('th').ariaSort") == "ascending"
    assert texts(tab, "#table-ranks tbody th")[-1] == "2"


def test_charts_and_tables_can_be_taken_along(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.run(
        "window.saved = []; URL.createObjectURL = (blob) => { saved.push(blob); return 'blob:x'; }"
    )
    tab.run("HTMLAnchorElement.prototype.click = function () { saved.push(this.download); }")
    for button in range(tab.run("document.querySelectorAll('.save button').length")):
        tab.run(f"document.querySelectorAll('.save button')[{button}].click()")
    tab.run("document.querySelector('#stages .table-tools button:last-child').click()")
    saved = tab.run(
        "Promise.all(saved.map((each) => each instanceof Blob && each.type !== 'image/png'"
        " ? each.text() : each))"
    )
    files = [each for each in saved if isinstance(each, str) and re.fullmatch(r"[\w-]+\.\w+", each)]
    assert sorted(each for each in files if each.endswith(".csv")) == [
        *("heat.csv", "rate.csv", "stages.csv", "steps.csv", "timeline.csv", "whatif.csv")
    ]
    assert sorted(each for each in files if each.endswith(".svg")) == [
        *("rate.svg", "steps.svg", "timeline.svg", "whatif.svg")
    ]
    steps = next(each for each in saved if isinstance(each, str) and each.startswith("first step"))
    assert len(steps.splitlines()) in (STEPS + 1, STEPS + 2)
    assert tab.run("typeof copyText") == "undefined", "nothing of the page is global"


@pytest.mark.deep
@pytest.mark.parametrize("width", [1280, 820, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_read_it_on_every_screen(
    width: int, theme: str, tab: Tab, page: Path
) -> None:
    tab.resize(width, 844)
    tab.theme(theme)
    tab.open(page)
    tab.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.violations() == []
    assert tab.problems == []


# What lies outside its chart, letters of a word on several lines, bars that begin inside the text.
CUT = """[...document.querySelectorAll('.plot > svg')].flatMap((chart) =>
    [...chart.querySelectorAll(':scope > text')].filter((text) => {
        const { x, width } = text.getBBox();
        return x < -0.5 || x + width > chart.clientWidth + 0.5;
    }).map((text) => text.textContent))"""
BROKEN = """[...document.querySelectorAll('td, th, .bar i, .legend, nav a')].flatMap((host) => {
    const walker = document.createTreeWalker(host, NodeFilter.SHOW_TEXT), found = [];
    for (let node = walker.nextNode(); node; node = walker.nextNode())
        for (const word of node.data.matchAll(/[A-Za-z_]{2,24}/g)) {
            const range = document.createRange();
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1)
                found.push(word[0]);
        }
    return found;
})"""
COVERED = """[...document.querySelectorAll('td.share')].filter((cell) =>
    getComputedStyle(cell).backgroundImage !== 'none').length"""

AWAY = """[...document.querySelectorAll('.chip + bdi')].filter((label) => {
    const [first] = label.getClientRects();
    return first && first.top > label.previousElementSibling.getBoundingClientRect().bottom;
}).map((label) => label.textContent)"""


@pytest.mark.parametrize("width", [820, 500, 390])
def test_a_color_is_on_the_line_of_its_label(width: int, tab: Tab, page: Path) -> None:
    tab.resize(width, 844)
    tab.open(page)
    tab.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert tab.run(AWAY) == []


@pytest.mark.parametrize("width", [1280, 390])
def test_no_label_is_cut_no_word_is_broken_and_no_bar_lies_over_its_number(
    width: int, tab: Tab, page: Path
) -> None:
    tab.resize(width, 844)
    tab.open(page)
    tab.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert tab.run(BROKEN) == []
    assert tab.run(COVERED) == 0
    for _ in range(24):  # closer: labels such as "1,234.5678 ms" come near both ends of the ruler
        assert tab.run(CUT) == []
        tab.run("document.getElementById('closer').click()")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_ruler_is_as_wide_as_the_lanes_below_it(width: int, tab: Tab, page: Path) -> None:
    """The buttons that save the chart made it narrower, which cut its last label."""
    tab.resize(width, 844)
    tab.open(page)
    wide = "document.getElementById('{}').getBoundingClientRect().width"
    assert tab.run(wide.format("ruler")) == tab.run(wide.format("lanes"))


@pytest.mark.parametrize("values", [(9, 99, 999, 9_999, 99_999), (1, 10)])
@pytest.mark.parametrize("width", [1280, 390])
def test_bins_of_lengths_are_named_once_and_the_last_one_whole(
    width: int, values: tuple[int, ...], tab: Tab, tmp_path: Path
) -> None:
    """Labels begin at their bins: the one of the last bin was cut at the edge of the chart."""
    counters = {f"lengths[{bin_of(each)}]": 1 for each in values}
    rows = [Row("step", "step", n, 100 * n, 100 * n + 100) for n in range(1, 9)]
    rows += [row._replace(name="a", kind="stage", counters=counters) for row in rows]
    tab.resize(width, 844)
    tab.open(written(loaded(rows), tmp_path))
    labels = "[...document.querySelectorAll('#length-bars text')].map((each) => each.textContent)"
    named = [text for text in tab.run(labels) if "%" not in text]
    assert named != []
    assert len(named) == len(set(named))
    assert tab.run(CUT) == []


def test_each_link_has_its_section(tab: Tab, page: Path) -> None:
    tab.open(page)
    targets = tab.run("[...document.querySelectorAll('nav a')].map((a) => a.hash)")
    assert all(tab.run(f"document.querySelector({each!r}) !== null") for each in targets)
    assert tab.run("document.querySelectorAll('details[open]').length") == 0
    assert tab.run("document.documentElement.scrollHeight") < 5_000


def test_a_run_without_accelerator_speaks_of_none(tab: Tab, tmp_path: Path) -> None:
    path = written(grpo_run(tmp_path / "run", steps=30, ranks=2), tmp_path)
    tab.open(path)
    shown = tab.run("document.querySelector('#overview').innerText")
    assert re.findall("GPU|CUDA|kernel", shown) == []


def test_a_printed_report_is_short(tab: Tab, page: Path) -> None:
    tab.open(page)
    pages = re.findall(rb"/Type\s*/Page\b(?!s)", tab.pdf())
    assert 1 <= len(pages) <= 6


@pytest.mark.deep
def test_a_large_job_fits_into_two_megabytes_and_opens(tab: Tab, tmp_path: Path) -> None:
    path = written(play(Script(ranks=64, steps=1_000, uneven=0.2), 1).spans, tmp_path)
    assert path.stat().st_size < 2_000_000
    tab.open(path)
    drawing = tab.run("performance.timing.loadEventEnd - performance.timing.navigationStart")
    selecting = tab.run(
        "(() => { const from = performance.now(); location.hash = '#steps=10-400';"
        " return new Promise((done) => setTimeout(() => done(performance.now() - from), 0)); })()"
    )
    tab.wait("document.querySelectorAll('#table-stages .versus').length > 1")
    # A minute: on a busy machine, too, where it takes a second or two on a quiet one.
    assert drawing < 60_000
    assert selecting < 60_000
    assert tab.problems == []


SCREENS = Path(__file__).with_name("screens")
BLOCK = 20  # pixels: fonts of another machine move text by a few


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "width", "height", "theme"),
    [
        ("desktop-light", 1280, 900, "light"),
        ("desktop-dark", 1280, 900, "dark"),
        ("phone", 390, 840, "light"),
    ],
)
def test_the_first_screen_looks_as_it_did(
    tab: Tab, page: Path, tmp_path: Path, name: str, width: int, height: int, theme: str
) -> None:
    """UPDATE_SCREENS=1 stores the new ones; look at them before they are committed."""
    tab.resize(width, height)
    tab.theme(theme)
    tab.open(page)
    tab.picture(tmp_path / "screen.png")
    now, stored = coarse(tmp_path / "screen.png"), SCREENS / f"{name}.png"
    if "UPDATE_SCREENS" in os.environ:
        imsave(stored, now)
    difference = np.abs(now - imread(stored)[..., :3]).max(axis=2)
    assert difference.mean() < 0.03, "a color or a font has changed"
    assert (difference > 0.15).mean() < 0.05, "a chart or a box has changed"


def coarse(picture: Path) -> npt.NDArray[np.float32]:
    """Return the mean color of each block of a PNG, 0 to 1."""
    pixels = imread(picture)[..., :3]
    height, width = (size - size % BLOCK for size in pixels.shape[:2])
    blocks = pixels[:height, :width].reshape(height // BLOCK, BLOCK, width // BLOCK, BLOCK, 3)
    means: npt.NDArray[np.float32] = blocks.mean(axis=(1, 3))
    return means
