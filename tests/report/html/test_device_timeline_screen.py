"""The device sections in a real browser: used by mouse and by keys alone, on a desk and a phone."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_rlprof.analysis.device.kernel_names import kernel_name
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html.page import report_tables, write_report
from lightning_rlprof.tables.spans import Spans
from tests.builders.browser import Tab
from tests.builders.calls import Call, Copy, Kernel, run
from tests.builders.device_work import Job, spans_of
from tests.builders.runs import Row, loaded
from tests.places import SHARED_DATA

FULL = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"
KERNEL = "gemm f32 128x64 nn (cublas ampere)"
REAL = ("kineto/vllm_prefill_decode_graph.json.gz", "nsys/h100_2gpu_1s.sqlite")


def trace() -> Spans:
    """Return two ranks whose hosts load data for a long time before every tenth kernel."""
    calls, kernels, copies = [], [], []
    for rank in (0, 1):
        now = 10_000
        for at in range(200):
            calls.append(Call("aten::add", now, now + 900, rank=rank))
            name = FULL if at % 2 else "ampere_sgemm_128x64_nn"
            start = now + 3_000
            kernels.append(Kernel(name, start, start + 15_000, now + 100, 300, rank=rank))
            wait = 900_000 if at == 150 else 60_000 if at % 10 == 9 else 0
            if wait:
                calls.append(Call("load_batch", now + 20_000, now + 20_000 + wait, rank=rank))
            now += 20_000 + wait
        copies.append(Copy("HtoD", now, now + 700, now - 50, 10, rank))
    steps = [Row("step", "step", 1, 0, now)]
    return replace(loaded(steps), tables=run(calls, kernels, copies).tables)


def written(spans: Spans, folder: Path) -> Path:
    write_report(spans, report_tables(spans), folder / "device.html")
    return folder / "device.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(trace(), tmp_path_factory.mktemp("report"))


def text(tab: Tab, selector: str) -> str:
    return str(tab.run(f"document.querySelector({selector!r}).innerText")).strip()


def shown(tab: Tab) -> tuple[float, float]:
    """Return the shown range in nanoseconds as the page says it to a screen reader."""
    first, last = tab.run("document.getElementById('device-lanes').dataset.view.split(' ')")
    return float(first), float(last)


def inked(tab: Tab, selector: str) -> int:
    """Return how many colors are on a canvas."""
    return int(
        tab.run(
            f"(({{width, height}}, pen) => new Set(new Uint32Array(pen.getImageData(0, 0, width,"
            f" height).data.buffer)).size)(document.querySelector({selector!r}),"
            f" document.querySelector({selector!r}).getContext('2d'))"
        )
    )


def test_the_timeline_and_the_icicle_are_drawn_and_named(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert {"device", "icicle"} <= {*tab.run("document.body.dataset.drawn").split()}
    assert tab.run("Number(document.body.dataset.ready)") > 0
    for canvas in ("#device-lanes canvas", "#device-strip canvas"):
        assert inked(tab, canvas) > 5
    label = tab.run("document.getElementById('device-lanes').ariaLabel")
    assert label.startswith("Timeline of 2 streams")
    assert tab.run("document.querySelector('#icicle svg').getAttribute('aria-label')")
    assert text(tab, "#device-range").startswith("All 6.10 ms")
    assert tab.problems == []


def test_a_press_on_a_gap_shows_it_and_moves_the_focus_there(tab: Tab, page: Path) -> None:
    tab.open(page)
    gaps = tab.run(
        "[...document.querySelectorAll('#idle-gaps button')].map((each) =>"
        " [Number(each.dataset.from), Number(each.dataset.to)])"
    )
    assert len(gaps) == 6
    assert "the host is in load_batch" in text(tab, "#idle-gaps button")
    for at, (first, last) in enumerate(gaps):
        tab.run(f"document.querySelectorAll('#idle-gaps button')[{at}].click()")
        low, high = shown(tab)
        assert low <= first < last <= high
        assert high - low <= 2.3 * (last - first)
        assert tab.run("document.activeElement.id") == "device-lanes"
    assert tab.problems == []


def test_keys_alone_choose_a_kernel_read_it_zoom_and_come_back(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.run("document.getElementById('device-lanes').focus()")
    whole = shown(tab)
    tab.press(".")
    assert text(tab, "#device-chosen b") == kernel_name("ampere_sgemm_128x64_nn").short
    tab.press(".")
    chosen = text(tab, "#device-chosen")
    assert FULL in chosen
    for fact in ("duration 15.0 µs", "launched 2.90 µs before", "operator aten::add", "rank 0"):
        assert fact in chosen
    assert tab.run("document.getElementById('device-chosen').ariaLive") == "polite"
    tab.press("ArrowDown")
    assert "rank 1" in text(tab, "#device-chosen")
    tab.press("Enter")
    low, high = shown(tab)
    assert high - low == pytest.approx(45_000, abs=2)
    tab.press("ArrowRight")
    assert shown(tab)[0] > low
    tab.press("-")
    assert shown(tab)[1] - shown(tab)[0] > high - low
    tab.press("Home")
    assert shown(tab) == whole
    tab.press("Escape")
    assert "Press a kernel" in text(tab, "#device-chosen")
    assert tab.problems == []


def test_a_drag_zooms_and_a_press_chooses_what_is_under_it(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.run("document.getElementById('device-lanes').scrollIntoView({block: 'center'})")
    box = tab.run(
        "(({x, y, width}) => [x, y, width])"
        "(document.getElementById('device-lanes').getBoundingClientRect())"
    )
    tab.drag(box[0] + 200, box[1] + 40, box[0] + 230)
    low, high = shown(tab)
    assert 400_000 < low < high < 900_000
    tab.hover(box[0] + 400, box[1] + 95)
    tab.wait("!document.getElementById('tip').hidden")
    assert tab.problems == []


def test_the_icicle_is_walked_searched_and_zoomed(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.run("document.querySelector('#icicle [data-box=\"0\"]').focus()")
    tab.press("ArrowDown")
    assert tab.run("document.activeElement.getAttribute('aria-label')").startswith("operator")
    tab.press("Enter")
    assert "aten::add" in text(tab, "#icicle-path b")
    tab.resize(1000, 900)  # All is drawn again, and the focus stays.
    tab.wait("document.querySelector('#icicle svg').getAttribute('viewBox').split(' ')[2] < 800")
    tab.press("Escape")
    assert text(tab, "#icicle-path b") == "all kernels and copies"
    tab.run("document.getElementById('icicle-find').value = 'ADD'")
    tab.run("document.getElementById('icicle-find').dispatchEvent(new Event('input'))")
    assert text(tab, "#icicle-found").endswith("100%")
    tab.run("document.querySelector('#icicle [data-box=\"1\"]').dispatchEvent("
            "new MouseEvent('click', {bubbles: true}))")  # fmt: skip
    assert "aten::add" in text(tab, "#icicle-path b")
    assert tab.problems == []


def test_a_legend_entry_or_a_kernels_name_picks_it_out_everywhere(tab: Tab, tmp_path: Path) -> None:
    page = written(replace(spans_of(Job({0: [], 1: []})), tables=trace().tables), tmp_path)
    canvas = "document.querySelector('#device-lanes canvas').toDataURL()"
    lit = "[...document.querySelectorAll({!r})].filter((each) => !each.matches('.faded'))"
    bar, picture, rows = (lit.format(f"{of} [data-pick]") for of in ("#bar", "#busy", "#kernels"))
    boxes = lit.format("#icicle .box-k")

    def press(selector: str) -> None:
        tab.run(f"document.querySelector({selector!r}).click()")

    tab.open(page)
    plain = tab.run(canvas)
    everything = [tab.run(f"{each}.length") for each in (bar, picture, rows, boxes)]
    press("#bar ~ .legend [data-name=matmul] button")
    for each in (bar, picture, rows):
        assert tab.run(f"{each}.map((each) => each.dataset.pick)") == ["matmul"]
    assert tab.run(f"{boxes}.map((each) => each.textContent)") == [KERNEL + "50%"]
    assert text(tab, "#device-legend [aria-pressed=true]") == "matmul"
    assert len({plain, tab.run(canvas)}) == 2
    by_class = tab.run(canvas)
    press("#device-legend [aria-pressed=true]")
    assert [tab.run(f"{each}.length") for each in (bar, picture, rows, boxes)] == everything
    assert tab.run(canvas) == plain

    press("tr[data-pick=matmul] button")  # The only kernel of its class.
    assert tab.run(f"{bar}.map((each) => each.dataset.pick)") == ["matmul"]
    assert tab.run(f"{rows}.map((each) => each.dataset.kernel)") == [KERNEL]
    assert text(tab, "#device-legend [aria-pressed=true]") == KERNEL
    assert tab.run("document.activeElement.value") == KERNEL
    assert tab.run(canvas) == by_class
    press("#bar ~ .legend [data-name='host-bound idle'] button")
    assert tab.run(f"{bar}.map((each) => each.dataset.pick)") == ["host-bound idle"]
    assert tab.run(lit.format("#idle tr[data-pick]") + ".length") == 1
    assert tab.problems == []


def test_it_fits_a_phone_in_light_and_dark(tab: Tab, page: Path) -> None:
    for scheme in ("light", "dark"):
        tab.theme(scheme)
        tab.resize(390, 800)
        tab.open(page)
        assert tab.run("document.documentElement.scrollWidth") <= 390
        assert inked(tab, "#device-lanes canvas") > 5
        assert tab.problems == []


def test_a_cpu_trace_has_an_icicle_of_host_time(tab: Tab, tmp_path: Path) -> None:
    spans = run([Call("aten::linear", 0, 9_000), Call("aten::mm", 1_500, 6_000)])
    rows = [Row("step", "step", 1, 0, 10_000)]
    tab.open(written(replace(loaded(rows), tables=spans.tables), tmp_path))
    assert tab.run("document.getElementById('device-timeline')") is None
    assert text(tab, "#operators .lead").startswith("Width is host time")
    assert text(tab, "#icicle-path").startswith("all operators")
    assert tab.problems == []


@pytest.mark.deep
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no real traces in ../shared/data")
@pytest.mark.parametrize("name", REAL)
def test_real_traces_are_drawn(tab: Tab, tmp_path: Path, name: str) -> None:
    tab.open(written(load(SHARED_DATA / name), tmp_path))
    assert inked(tab, "#device-lanes canvas") > 5
    first = tab.run("Number(document.querySelector('#idle-gaps button').dataset.from)")
    tab.run("document.querySelector('#idle-gaps button').click()")
    assert shown(tab)[0] <= first
    assert tab.problems == []


def test_of_many_devices_one_is_shown_and_a_gap_chooses_its_own(tab: Tab, tmp_path: Path) -> None:
    kernels = [
        Kernel("k", at * 10_000 + 5_000 * (rank == 11 and at == 7), at * 10_000 + 9_000, rank=rank)
        for rank in range(12)
        for at in range(9)
    ]
    tab.open(written(replace(run(), tables=run(None, kernels).tables), tmp_path))
    assert len(tab.run("[...document.querySelectorAll('#device-picker option')]")) == 8
    tab.run("document.querySelector('#idle-gaps button').click()")
    assert tab.run("document.getElementById('device-picker').selectedOptions[0].text") == "rank 11"
    assert "8 of 12 devices" in text(tab, "#device-timeline .note")
    assert tab.problems == []
