"""The page of a device trace, and that of a run with captures, in a real browser."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_rlprof.analysis.device.breakdown import COMPUTE_CLASSES, breakdown
from lightning_rlprof.analysis.device.timeline import idle
from lightning_rlprof.analysis.efficiency.matmuls import matmuls
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html.page import report_tables, write_report
from lightning_rlprof.report.terminal import percent
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of as rows_of_table
from tests.analysis.device.test_agreement import TRACES
from tests.analysis.efficiency.test_matmuls import H100, measured, product
from tests.builders.browser import Tab
from tests.builders.calls import Kernel
from tests.builders.device_work import Job, Work, rows_of, spans_of, table
from tests.builders.runs import Row
from tests.places import SHARED_DATA

KERNELS = (
    *("ampere_sgemm_128x64_nn", "vectorized_elementwise_kernel<4, AddFunctor<float>>"),
    *("reduce_kernel<512, 1, ReduceOp<float, MeanOps<float>>>", "ncclDevKernel_AllReduce_Sum_f32"),
)
MS = 1_000_000
WORD = "softmax_forward"


def written(spans: Spans, folder: Path) -> Path:
    path = folder / "report.html"
    write_report(spans, report_tables(spans), path)
    return path


def trace(ranks: int = 2, names: int = 30) -> Spans:
    """A trace without stages: kernels of many names on each rank, with gaps between them."""
    work, full = [], []
    for rank in range(ranks):
        for at in range(names):
            start = (at + 1) * MS + rank * 1000 * at
            work.append(Work("compute", start, start + MS // 2, None, start - 9_000, rank=rank))
            full.append(KERNELS[at] if at < len(KERNELS) else f"{chr(93 + at)}fold_{WORD}")
    rows = [row | {"kernel": name} for row, name in zip(rows_of(work), full, strict=True)]
    spans = spans_of(
        Job({rank: [Row("step", "step", 1, 0, 40 * MS)] for rank in range(ranks)}, work)
    )
    return replace(spans, tables={"kernels": lambda: table("kernels", rows)})


def captured() -> Spans:
    """A run of rlprof with stages, of which one step was captured."""
    rows = [
        Row("rlprof open capture", "region", 1, 0, MS, id=1),
        Row("rlprof close capture", "region", 1, 41 * MS, 42 * MS, id=2),
    ]
    for step in range(1, 5):
        begin = step * 50 * MS - 50 * MS
        counters = {"capture": 1} if step == 1 else {}
        rows.append(
            Row("step", "step", step, begin, begin + 50 * MS, counters=counters, id=10 * step)
        )
        for at, stage in enumerate(("actor_generate", "actor_update")):
            first = begin + 2 * MS + at * 20 * MS
            rows.append(Row(stage, "stage", step, first, first + 19 * MS, id=10 * step + 1 + at))
    work = [
        Work("compute", at * MS, at * MS + MS // 2, "actor_update", at * MS - 9_000)
        for at in range(23, 40)
    ]
    return spans_of(Job({0: rows}, work, ours=True))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(trace(), tmp_path_factory.mktemp("trace"))


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(captured(), tmp_path_factory.mktemp("staged"))


def bottom(tab: Tab, selector: str) -> float:
    found: float = tab.run(f"document.querySelector({selector!r}).getBoundingClientRect().bottom")
    return found


def segments(tab: Tab, selector: str) -> Counter[str]:
    """Return the time of each part of the bars, and check that their shares add up."""
    found: Counter[str] = Counter()
    bars = tab.run(
        f"[...document.querySelectorAll({selector!r})].map((bar) => [...bar.querySelectorAll('i')]"
        ".map((part) => [part.dataset.part, Number(part.dataset.ns),"
        " Number(part.style.getPropertyValue('--share'))]))"
    )
    for bar in bars:
        assert sum(share for _, _, share in bar) == pytest.approx(1, abs=1e-3)
        for name, ns, _ in bar:
            found[name] += int(ns)
    return found


def check_sums(spans: Spans, found: Counter[str]) -> None:
    """Compare the parts of a bar with the tables, to the nanosecond."""
    total = rows_of_table(breakdown(spans))[-1]
    assert sum(found[name] for name in COMPUTE_CLASSES) == (total["compute"] or 0)
    for name in ("exposed communication", "exposed memcpy"):
        assert found[name] == (total[name] or 0)
    causes: Counter[str] = Counter()
    gaps = idle(spans)
    for row in rows_of_table(gaps) if gaps.abstained is None else ():
        causes[row["kind"]] += row["total"]
    assert {name: found[name] for name in causes} == dict(causes)


def check_page(tab: Tab, spans: Spans, path: Path) -> None:
    tab.open(path)
    for answer in ("#bar", ".first .title", ".trust"):
        assert bottom(tab, answer) < 900, answer
    check_sums(spans, segments(tab, "#bar"))
    shown = tab.run("document.body.innerText")
    assert "untraced" not in shown
    assert "No answer yet" not in shown
    names = tab.run(
        "[...document.querySelectorAll('#table-short-kernels tbody th')].map((each) =>"
        " [each.textContent, each.title])"
    )
    assert len({text for text, _ in names}) == len(names)
    assert all(full for _, full in names)
    assert tab.run("'error' in document.body.dataset") is False
    tab.resize(390, 844)
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.problems == []


def test_the_first_screen_of_a_trace_has_the_answers(tab: Tab, page: Path) -> None:
    check_page(tab, trace(), page)
    tab.resize(1280, 900)
    assert bottom(tab, "#busy svg") < 300
    assert len(tab.run("[...document.querySelectorAll('#devices .bar')].map(String)")) == 2


@pytest.mark.deep
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no real traces in ../shared/data")
@pytest.mark.parametrize("name", [name for name in TRACES if "cpu_only" not in name])
def test_the_first_screen_of_real_traces_has_the_answers(
    name: str, tab: Tab, tmp_path: Path
) -> None:
    spans = load(SHARED_DATA / name)
    check_page(tab, spans, written(spans, tmp_path))


def test_a_run_with_captures_has_the_device_in_its_overview_and_by_stage(
    tab: Tab, staged: Path
) -> None:
    tab.open(staged)
    assert bottom(tab, "#device-bar") < 900
    whole = segments(tab, "#device-bar")
    check_sums(captured(), whole)
    assert segments(tab, "#stage-bars .bar") == whole
    assert "1 captured step" in tab.run("document.getElementById('overview').innerText")
    stages = tab.run(
        "[...document.querySelectorAll('#stage-bars .who-bar')].map((e) => e.innerText)"
    )
    assert stages == ["actor_generate", "actor_update", "untraced"]
    assert tab.problems == []


def test_the_table_of_kernels_begins_with_twelve_and_keys_show_all(tab: Tab, page: Path) -> None:
    rows = (
        "[...document.querySelectorAll('#table-short-kernels tbody tr')]"
        ".filter((row) => row.getClientRects().length).length"
    )
    tab.open(page)
    every = tab.run("document.querySelectorAll('#table-short-kernels tbody tr').length")
    assert every > 12
    assert tab.run(rows) == 12
    tab.run("document.querySelector('#kernels .show-all').focus()")
    assert tab.run("document.activeElement.innerText") == f"Show all {every}"
    tab.run("document.activeElement.click()")
    assert tab.run(rows) == every
    tab.open(page)
    tab.run(
        "(() => { const input = document.querySelector('#kernels input');"
        " input.value = 'zfold'; input.dispatchEvent(new Event('input')); })()"
    )
    assert tab.run(rows) >= 1, "what is searched is found beyond the first twelve, too"


@pytest.mark.deep
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["page", "staged"])
def test_everybody_can_read_it_on_every_screen(
    width: int, theme: str, kind: str, tab: Tab, request: pytest.FixtureRequest
) -> None:
    tab.resize(width, 844)
    tab.theme(theme)
    tab.open(request.getfixturevalue(kind))
    tab.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.violations() == []
    assert tab.problems == []


def test_of_many_devices_the_least_busy_the_median_and_the_most_busy_have_a_bar(
    tab: Tab, tmp_path: Path
) -> None:
    tab.open(written(trace(ranks=64, names=4), tmp_path))
    bars = tab.run("[...document.querySelectorAll('#devices .who-bar')].map((e) => e.innerText)")
    assert [text.partition(":")[0] for text in bars] == ["least busy", "median", "most busy"]
    assert "3 of 64 devices" in tab.run("document.getElementById('overview').innerText")
    assert bottom(tab, ".trust") < 900
    assert tab.problems == []


def test_a_trace_without_kernels_says_how_to_record_them(tab: Tab, tmp_path: Path) -> None:
    tab.open(written(spans_of(Job({0: [Row("step", "step", 1, 0, 9 * MS)]})), tmp_path))
    shown = tab.run("document.getElementById('overview').innerText")
    assert "No kernel or copy was recorded." in shown
    assert "ProfilerActivity.CUDA" in shown
    assert tab.run("document.querySelector('#overview .big').innerText") == "–"
    assert tab.run("document.getElementById('bar')") is None
    assert tab.problems == []


def test_one_kernel_claims_no_spread(tab: Tab, tmp_path: Path) -> None:
    tab.open(written(trace(ranks=1, names=1), tmp_path))
    heads = tab.run(
        "[...document.querySelectorAll('#table-short-kernels thead th')].map((e) => e.innerText)"
    )
    assert [each.strip() for each in heads] == ["Kernel", "Class", "Share", "Total", "Count"]
    assert tab.problems == []


def test_kernels_of_known_shapes_have_their_share_of_the_peak(tab: Tab, tmp_path: Path) -> None:
    gemm = Kernel("ampere_sgemm_128x64_nn", 0, 5_000, launch=150)
    own = gemm, Kernel("CopyFunctor", 6_000, 7_000)
    (row, _) = rows_of_table(matmuls(measured([product(100, 200)], *own)))
    column = "#table-short-kernels tr > :last-child"
    for device, cells in (
        (H100, ["Of peak", percent(row["% of peak"]), "–"]),
        ("unknown", ["Count", "1", "1"]),
    ):
        tab.open(written(measured([product(100, 200)], *own, device=device), tmp_path))
        texts = f"[...document.querySelectorAll('{column}')].map((e) => e.innerText.trim())"
        assert tab.run(texts) == cells
        assert tab.problems == []


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no real traces in ../shared/data")
def test_kernels_of_a_real_h100_have_their_share_of_the_peak(tab: Tab, tmp_path: Path) -> None:
    tab.open(written(load(SHARED_DATA / "kineto" / "h100_qwen1.5-0.5b.json.gz"), tmp_path))
    rows = tab.run(
        "[...document.querySelectorAll('#table-short-kernels tbody tr')].map((row) =>"
        " [row.cells[0].textContent, row.cells[1].textContent, row.cells[7].textContent])"
    )
    rated = {(name.split()[0], kind): share for name, kind, share in rows if share != "–"}
    assert rated == {("gemm", "matmul"): "63%", ("flash_fwd", "attention"): "9.1%"}


def test_numbers_and_names_are_there_without_script(page: Path) -> None:
    text = page.read_text().partition("<script")[0]
    assert 'id="bar"' in text
    assert text.count('class="kernel"') > 12
    assert "<path" in text


def test_a_printed_trace_is_short(tab: Tab, page: Path) -> None:
    tab.open(page)
    pages = re.findall(rb"/Type\s*/Page\b(?!s)", tab.pdf())
    assert 1 <= len(pages) <= 4
