import io
import re

import pytest
from rich.console import Console

from lightning_rlprof.report.terminal import duration, markdown, render
from lightning_rlprof.system.location import plain
from lightning_rlprof.tables.table import Column, Table

COLUMNS = (
    Column("stage", "text"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("B/A", "ratio"),
    Column("count", "count"),
    Column("loss", "number"),
)


def _text(table: Table, width: int = 80, *, terminal: bool = False, rows: int | None = None) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, highlight=False)
    console.print(render(table, rows=rows))
    return file.getvalue()


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.00 µs"),
        (9_994, "9.99 µs"),
        (9_996, "10.0 µs"),
        (999_600, "1.00 ms"),
        (60_206_351, "60.2 ms"),
        (123_456_789, "123 ms"),
        (59_900_000_000, "59.9 s"),
        (59_999_000_000, "60.0 s"),
        (60_000_000_000, "1 min 00 s"),
        (4_830_000_000_000, "1 h 20 min"),
        (2**62, "1,281,023 h 53 min"),
        (-1_500_000, "-1.50 ms"),
    ],
)
def test_durations_are_for_people(ns: int, text: str) -> None:
    assert duration(ns) == text


@pytest.mark.parametrize(
    "evil", ["\x1b[2J", "\x07", "\x9b31m", "a\nb", "a\rb", "\u202egnp", "\u200b", "\ud800", "\x00"]
)
def test_nothing_in_a_name_reaches_the_terminal_raw(evil: str) -> None:
    table = Table(evil, COLUMNS[:1], [(f"name{evil}",)], note=evil)
    printed = _text(table) + _text(Table("t", COLUMNS[:1], abstained=evil))

    assert all(c.isprintable() or c == "\n" for c in printed)
    assert f"name{plain(evil)}" in printed
    assert plain(evil).isprintable()
    printed.encode("utf-8")


def test_markup_in_a_name_is_only_text() -> None:
    assert "[red]x[/red] [link=http://a]" in _text(
        Table("t", COLUMNS[:1], [("[red]x[/red] [link=http://a]",)]), terminal=True
    )


def test_cells_are_written_by_kind_and_unknown_is_not_zero() -> None:
    rows = [("a", 0.5, 1_500_000, 1.25, 12345, 0.25), ("b", *(None,) * 5), ("c", 0.0, 0, 0.0, 0, 0)]
    lines = [line.split() for line in _text(Table("t", COLUMNS, rows)).splitlines()]

    assert lines[3] == ["a", "50.0%", "████", "1.50", "ms", "1.25x", "12,345", "0.25"]
    assert lines[4] == ["b", "-", "-", "-", "-", "-"]
    assert lines[5] == ["c", "0.0%", "0", "ns", "0.00x", "0", "0"]


def test_a_number_keeps_the_digits_before_its_point() -> None:
    rows = [("a", *[None] * 4, number) for number in (53_281.4, 0.012345, 5328.04)]
    lines = _text(Table("t", COLUMNS, rows)).splitlines()
    assert [line.split()[-1] for line in lines[3:6]] == ["53,281", "0.01235", "5,328"]


def test_numbers_stand_right_below_one_another() -> None:
    rows = [("a", 0.5, 1_500_000, 1.0, 5, 1), ("b", 0.05, 23, 10.0, 5000, 22)]
    a, b = _text(Table("t", COLUMNS, rows)).splitlines()[3:5]
    for left, right in (("1.50 ms", "23 ns"), ("1.00x", "10.00x"), ("50.0%", "5.0%")):
        assert a.index(left) + len(left) == b.index(right) + len(right)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_line_is_longer_than_the_terminal_and_left_out_columns_are_named(width: int) -> None:
    rows = [("actor_compute_log_prob", 0.5, 123_000_000, 1.0, 10**12, 1.5)] * 3
    printed = _text(Table("t", COLUMNS, rows), width)

    assert max(map(len, printed.splitlines())) <= width
    text = " ".join(printed.split())
    head = printed.splitlines()[1].split()
    if width >= 40:
        hidden = re.findall(r"hidden \((.*?)\)\.", text)
        named = hidden[0].split(", ") if hidden else []
        assert "123 ms" in text or "total" in named
        for column in COLUMNS:
            assert (column.name in head) != (column.name in named)


@pytest.mark.parametrize("width", range(30, 110, 5))
def test_a_cell_is_shown_whole_or_its_column_is_named(width: int) -> None:
    columns = (
        Column("stage", "text"),
        Column("total", "duration", "ns"),
        Column("number of calls", "count"),
        Column("worst rank", "count"),
        Column("worst step", "count"),
    )
    printed = _text(
        Table("t", columns, [("actor_generate", 123_000_000, 77, 1234, 567_890)]), width
    )

    assert max(map(len, printed.splitlines())) <= width
    shown, _, rest = printed.partition(" hidden (")
    named = " ".join(rest.partition(").")[0].split()).split(", ")
    for column, cell in zip(
        columns, ("actor_generate", "123 ms", "77", "1,234", "567,890"), strict=True
    ):
        assert (cell in shown) != (column.name in named)
    if width >= 80:
        assert "number of calls worst rank worst step" in " ".join(shown.split())


def test_long_names_and_long_tables_are_cut_visibly() -> None:
    rows = [("x" * 300, 0.1, 1, 1.0, n, 1) for n in range(12)]
    printed = _text(Table("t", COLUMNS, rows), 120, rows=5)
    assert "x" * 19 + "..." + "x" * 18 in printed
    assert "x" * 41 not in printed
    assert printed.count("xxx...") == 5
    assert "and 7 more rows" in printed


@pytest.mark.parametrize("width", [20, 35, 60, 90])
def test_names_that_begin_alike_are_told_apart_by_their_ends(width: int) -> None:
    rows = [
        (f"void at::native::{'elementwise_' * 20}kernel<{name}>", 0.1) for name in ("Add", "Mul")
    ]
    printed = _text(Table("t", COLUMNS[:2], rows), width)
    assert [
        re.search(r"void.*\.\.\.\S*(Add|Mul)>", line) is not None for line in printed.splitlines()
    ].count(True) == 2
    assert max(map(len, printed.splitlines())) <= width


@pytest.mark.parametrize("width", [100, 160, 240])
def test_names_that_are_cut_use_the_room_that_is_left(width: int) -> None:
    columns = (Column("kernel", "text"), Column("path", "text"), Column("calls", "count"))
    rows = [("k" * 300, "p" * 300, 1), ("gemm", "x", 2)]
    longest = max(map(len, _text(Table("t", columns, rows), width).splitlines()))
    assert width - 1 <= longest <= width


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    table = Table("t", COLUMNS, [("a", 0.5, 1, 1.0, 1, 1)])
    assert "\x1b[" in _text(table, terminal=True)
    assert "\x1b[" not in _text(table)


def test_a_table_without_rows_or_without_evidence_is_one_line() -> None:
    assert _text(Table("gaps", COLUMNS)) == "gaps: no rows\n"
    assert _text(Table("gaps", COLUMNS, abstained="no step")) == "gaps: no data. No step\n"


def test_a_note_follows_the_table() -> None:
    printed = _text(Table("t", COLUMNS[:1], [("a",)], note="Steps left out: 1."))
    assert printed.endswith("Steps left out: 1.\n")


def test_a_terminal_without_unicode_gets_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=80)
    console.print(render(Table("t", COLUMNS, [("a", 0.5, 1500, 1.0, 1, 1)])))
    file.flush()
    assert b"1.50 us" in file.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_column_that_knows_nothing_is_left_out() -> None:
    columns = (Column("stage", "text"), Column("slowest rank", "count"))
    assert "slowest" not in _text(Table("t", columns, [("a", None), ("b", None)]))
    assert "slowest" in _text(Table("t", columns, [("a", None), ("b", 3)]))


def test_a_narrow_terminal_has_room_for_numbers_and_not_for_bars() -> None:
    row = ("reference_compute_log_prob", 0.5, 123_000_000, None, None, None)
    assert "50.0%" in _text(Table("t", COLUMNS, [row]), 40)
    assert "█" in _text(Table("t", COLUMNS, [row]), 80)


def test_hours_are_never_in_scientific_notation() -> None:
    table = Table("ledger", (Column("rank-hours", "number", "h"),), [(1.41e-05,), (0.0625,)])
    assert "50.8 ms" in markdown(table)
    assert "0.06 h" in markdown(table)


WIDE = (
    *(Column(name, "text") for name in ("stage", "group")),
    *(Column(name, "number") for name in ("loss", "other", "more")),
    Column("share", "share"),
    Column("adjusted", "ratio"),
    Column("verdict", "text"),
    *(Column(name, "ratio") for name in ("CI low", "CI high")),
)
ROW = ("reference_compute_log_prob", "rollout", 1, 2.5, 3, 0.5, 1.1, "inconclusive", 1.06, 1.13)


@pytest.mark.parametrize("width", [52, 60, 80, 120])
def test_a_narrow_terminal_keeps_the_columns_that_answer(width: int) -> None:
    printed = _text(Table("t", WIDE, [ROW, (*ROW[:-2], None, None)]), width)
    head, row, other = (printed.splitlines()[at] for at in (1, 3, 4))
    assert max(map(len, printed.splitlines())) <= width
    for text in ("50.0%", "1.10x (1.06–1.13)", "inconclusive", "ence" if width > 52 else "refe"):
        assert text in row
    assert "1.10x" in other
    assert "(" not in other
    assert ("group" in head) == (width >= 80)
    assert ("█" in row) == (width >= 80)


def test_names_are_cut_before_a_column_that_answers_goes() -> None:
    columns = (Column("name", "text"), Column("saved", "duration", "ns"), Column("n", "count"))
    printed = _text(Table("t", columns, [("x" * 60, 5_000_000, 7)]), 30)
    assert "5.00 ms" in printed
    assert "1 column hidden (n)" not in _text(Table("t", columns, [("x" * 60, 5_000_000, 7)]), 40)
