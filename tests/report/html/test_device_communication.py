"""The communication of devices on the page: the longest calls rank by rank, and links."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html.device_charts import DeviceCharts
from lightning_rlprof.tables.spans import Spans
from tests.analysis.communication.test_collectives import Call, with_calls
from tests.analysis.communication.test_links import link, mesh
from tests.analysis.communication.test_links import run as with_links
from tests.builders.browser import Tab
from tests.places import SHARED_DATA
from tests.report.html.test_device_page import MS, trace, written

REAL = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no real traces in ../shared/data")
LONGEST = "#table-longest-calls"
HEADS = ["Collective", "Each rank, from its arrival to the end", "Time", "Bytes", "Transfer"]


def communicating(*calls: Call, links: Sequence[tuple[object, ...]] = (), ranks: int = 2) -> Spans:
    """Return a trace of ranks that ran kernels, these collectives, and used these links."""
    spans = trace(ranks, 4)
    tables = {**spans.tables, "collectives": with_calls(*calls).tables["collectives"]}
    if links:
        tables["links"] = with_links(*links).tables["links"]
    return replace(spans, tables=tables)


def together(start: int, *arrivals: int) -> list[Call]:
    """Return a collective that each rank begins so much after its start; it ends after 10 ms."""
    size = len(arrivals)
    return [Call(r, start + at, 10 * MS - at, size=size) for r, at in enumerate(arrivals)]


def texts(tab: Tab, selector: str) -> list[str]:
    found: list[str] = tab.run(
        f"[...document.querySelectorAll({selector!r})].map((each) => each.innerText.trim())"
    )
    return found


def boxes(tab: Tab, selector: str) -> list[dict[str, float]]:
    found: list[dict[str, float]] = tab.run(
        f"[...document.querySelectorAll({selector!r})].map((each) => each.getBoundingClientRect()"
        ".toJSON())"
    )
    return found


def cells(tab: Tab, row: int) -> list[str]:
    return texts(tab, f"{LONGEST} tbody tr:nth-child({row}) > *")


def test_the_longest_call_is_drawn_rank_by_rank(tab: Tab, tmp_path: Path) -> None:
    tab.open(written(communicating(*together(0, 0, 4 * MS), *together(20 * MS, MS, 0)), tmp_path))
    assert texts(tab, f"{LONGEST} thead th") == [*HEADS, "Wait", "Last rank", "Group"]
    first = cells(tab, 1)
    assert first[:1] + first[2:] == [
        *("all_reduce", "10.0 ms", "1000 B", "6.00 ms", "4.00 ms", "1", "dp"),
    ]
    assert first[1].split() == ["0", "1"]
    zero, one = boxes(tab, f"{LONGEST} tr:nth-child(1) .split-bar")
    assert zero["right"] == pytest.approx(one["right"]), "a collective ends for all ranks at once"
    assert one["width"] == pytest.approx(0.6 * zero["width"], abs=2)
    assert zero["bottom"] <= one["top"], "the first to arrive is on top"
    bars = tab.run(
        f"[...document.querySelectorAll('{LONGEST} .split-bar')].map((bar) => [...bar.children]"
        ".map((part) => [part.title, Number(part.style.getPropertyValue('--share'))]))"
    )
    assert [[title for title, _ in bar] for bar in bars[:2]] == [
        ["wait 4.00 ms", "transfer 6.00 ms"],
        ["transfer 6.00 ms"],
    ]
    for bar in bars:
        assert sum(share for _, share in bar) == pytest.approx(1, abs=1e-4)
    assert cells(tab, 2)[1].split() == ["1", "0"]
    assert tab.problems == []


def test_six_calls_are_shown_those_first_that_take_longest(tab: Tab, tmp_path: Path) -> None:
    calls = [Call(rank, at * 20 * MS, at * MS + 1) for at in range(1, 9) for rank in range(2)]
    tab.open(written(communicating(*calls), tmp_path))
    times = texts(tab, f"{LONGEST} tbody td:nth-child(3)")
    assert times == [f"{at}.00 ms" for at in range(8, 2, -1)]


def test_what_lacks_ranks_is_bounded_and_what_one_rank_has_is_a_text(
    tab: Tab, tmp_path: Path
) -> None:
    lacking = [Call(0, 0, 9 * MS, size=4), Call(1, MS, 8 * MS, size=4)]
    alone = Call(1, 30 * MS, 5 * MS, operation="broadcast")
    tab.open(written(communicating(*lacking, alone), tmp_path))
    assert cells(tab, 1)[4:7] == ["at most 8.00 ms", "at least 1.00 ms", "–"]
    assert cells(tab, 2)[:7] == [
        *("broadcast", "only rank 1: no other rank has it", "5.00 ms", "1000 B", "–", "–", "–"),
    ]
    tab.open(written(communicating(alone._replace(rank=0), ranks=1), tmp_path))
    assert cells(tab, 1)[1] == "only rank 0 is here"
    assert "end together" not in tab.run("document.getElementById('communication').innerText")
    assert tab.problems == []


def test_of_many_ranks_the_first_and_the_last_to_arrive_are_among_eight() -> None:
    calls = together(0, *(at * 1000 for at in range(64)))
    (row,) = DeviceCharts(communicating(*calls, ranks=64)).longest_calls
    assert [bar.name for bar in row.bars] == ["0", "9", "18", "27", "36", "45", "54", "63"]
    assert row.text == "56 more ranks"


def test_links_are_a_matrix_in_which_the_slow_one_is_marked(tab: Tab, tmp_path: Path) -> None:
    rows = mesh(4, 3, lambda one, other, _: 10 if (one, other) == (1, 2) else 20)
    tab.open(written(communicating(*together(0, 0, MS), links=rows), tmp_path))
    table = "#table-link-matrix"
    assert texts(tab, f"{table} thead th") == ["from \\ to", "0", "1", "2", "3"]
    assert texts(tab, f"{table} tbody tr:nth-child(2) > *") == ["1", "20.0", "·", "10.0", "20.0"]
    assert texts(tab, f"{table} .bad") == ["10.0"]
    title = tab.run(f"document.querySelector('{table} .bad').title")
    assert title.startswith("28.6 MiB in 3.00 ms over HCCS; 0.50x")
    assert title.endswith(": slow")
    assert "Slow link: rank 1 to rank 2" in tab.run(
        "document.getElementById('communication').innerText"
    )
    assert tab.problems == []


def test_without_links_one_sentence_says_what_records_them(tab: Tab, tmp_path: Path) -> None:
    tab.open(written(communicating(*together(0, 0, MS)), tmp_path))
    assert tab.run("document.getElementById('table-link-matrix')") is None
    shown = tab.run("document.getElementById('communication').innerText")
    assert shown.count("no bandwidth of links") == 1
    assert "profile_level: level1" in shown


def test_of_very_many_ends_those_of_the_slowest_links_are_shown() -> None:
    rows = mesh(40, 1, lambda one, other, _: 5 if (one, other) == (38, 39) else 20)
    matrix, _ = DeviceCharts(with_links(*rows)).links
    assert matrix is not None
    assert (matrix.shown, matrix.ends) == (32, 40)
    assert {"38", "39"} < {*matrix.destinations}
    assert len(matrix.rows) == len(matrix.destinations) == 32


def test_an_end_of_unknown_rank_is_its_number_in_the_group() -> None:
    matrix, note = DeviceCharts(with_links(link(0, 1, 1000, 10), link(0, 2, 1000, 20))).links
    assert matrix is not None
    assert matrix.destinations == ["#1", "#2"]
    assert [name for name, _ in matrix.rows] == ["0"]
    assert "number within that group" in note


@pytest.mark.deep
@REAL
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_real_calls_and_links_can_be_read(theme: str, width: int, tab: Tab, tmp_path: Path) -> None:
    tab.resize(width, 844)
    tab.theme(theme)
    tab.open(written(load(SHARED_DATA / "ascend" / "text_level1_rank0"), tmp_path))
    assert [text.split()[-1] for text in texts(tab, f"{LONGEST} td:nth-child(5)")] == ["CANN"] * 4
    assert texts(tab, f"{LONGEST} td:nth-child(2)") == ["only rank 0 is here"] * 4
    assert texts(tab, "#table-link-matrix thead th")[1:] == [f"#{at}" for at in range(1, 8)]
    assert all(15 < float(text) < 17 for text in texts(tab, "#table-link-matrix td"))
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.violations() == []
    tab.open(written(load(SHARED_DATA / "kineto" / "two_ranks"), tmp_path))
    rows: list[Any] = texts(tab, f"{LONGEST} tbody tr")
    assert len(rows) == 6
    assert sum("at most" in row for row in rows) == 1
    assert sum("no other rank has it" in row for row in rows) == 5
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.violations() == []
    assert tab.problems == []
