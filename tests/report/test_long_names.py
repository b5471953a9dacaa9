"""Names and sentences that do not fit into their place in the report."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html.page import render_report
from lightning_rlprof.tables.table import Column, Table
from tests.builders.browser import Page, find_browser, open_page
from tests.builders.runs import MAIN, Row, header, loaded, write_rank
from tests.report.html.test_page import poked, source_of


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
    assert "clocks of hosts node-a, node-b were not synchronized" in page.text()
    assert page.body["data-cut"] == "0"


def test_a_name_in_a_table_is_whole(tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("NO BROWSER: install chromium or set CHROMIUM; the report was not opened")
    columns = (Column("region", "text"), Column("count", "count"))
    rows = [("void at::native::" + "x" * 300, 1), ("gemm " * 60, 2)]
    source = render_report(loaded([]), {"regions": Table("regions", columns, rows)})
    ask = "document.body.dataset.cut = [...document.querySelectorAll('.wide .name')]"
    ask += ".filter((cell) => cell.scrollWidth > cell.clientWidth).length"
    page = open_page(browser, poked(source, ask), tmp_path)
    assert rows[0][0] in page.text()
    assert page.body["data-cut"] == "0"


def test_a_name_turns_no_sentence_around() -> None:
    turned = "\u202egnirts"
    table = Table("t", (Column("stage", "text"),), [(turned,)], f"Without {turned}, 5 ranks.")
    told = replace(table, note="", abstained=f"{turned} is no stage")
    source = render_report(loaded([]), {"a": table, "b": told})
    text = Page(source).text()
    for sentence in ("Without {}, 5 ranks.", "No data: {} is no stage."):
        assert sentence.format("\\u202egnirts") in text
    assert turned in text, "a cell stands by itself"
