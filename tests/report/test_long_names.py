"""Names and sentences that are longer than their place in the report."""

from pathlib import Path

import pytest

from lightning_rlprof.loaders.load import load
from tests.report.browser import find_browser, open_page
from tests.report.test_html import poked, source_of
from tests.runs import MAIN, Row, header, write_rank


def test_a_name_is_never_cut_within_a_character(tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("NO BROWSER: install chromium or set CHROMIUM; the report was not opened")
    names = ["a" * length + "\U0001f600" * 60 for length in range(8)]
    rows = [
        Row(name, "stage", 1, at * 10**6, (at + 1) * 10**6, MAIN, id=at + 1)
        for at, name in enumerate(names)
    ]
    rows.append(Row("step", "step", 1, 0, 8 * 10**6, MAIN, id=100))
    write_rank(tmp_path / "run", header(), rows)
    ask = "document.body.dataset.whole = document.documentElement.outerHTML"
    source = poked(source_of(load(tmp_path / "run")), f"{ask}.isWellFormed()")
    page = open_page(browser, source, tmp_path)
    assert page.body["data-whole"] == "true"
    assert "\U0001f600…" in page.text()


def test_a_sentence_in_a_table_is_never_cut(tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("NO BROWSER: install chromium or set CHROMIUM; the report was not opened")
    for rank, host in enumerate(("node-a", "node-b")):
        head = header(rank, 2, host=host)
        write_rank(tmp_path / "run", head, [Row("step", "step", 1, 0, 9, MAIN)])
    ask = "document.body.dataset.cut = [...document.querySelectorAll('td:not([class])')]"
    ask += ".filter((cell) => cell.scrollWidth > cell.clientWidth).length"
    page = open_page(browser, poked(source_of(load(tmp_path / "run")), ask), tmp_path)
    assert "clocks of hosts node-a, node-b were never compared" in page.text()
    assert page.body["data-cut"] == "0"
