"""Tables of several ranks put end to end, in whatever form each of them is."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.tables import Piece, join_tables
from lightning_rlprof.table import Cell, Column, ColumnRows, Table

HEADS = (
    Column("rank", "count"),
    Column("start", "duration", "ns"),
    Column("duration", "duration", "ns"),
    Column("kernel", "text"),
    Column("share", "number"),
)
cells = st.tuples(
    st.just(0),
    st.none() | st.integers(-(2**60), 2**60),
    st.integers(0, 9),
    st.none() | st.sampled_from("abc"),
    st.none() | st.floats(0, 1),
)


def table(rows: list[tuple[Cell, ...]], heads: tuple[Column, ...] = HEADS, **more: Any) -> Table:
    return Table("t", heads, rows, **more)


def columns(rows: list[tuple[Cell, ...]]) -> ColumnRows:
    """Return rows as columns; what is not known is masked, or a code below 0."""
    found: list[Any] = []
    for at, head in enumerate(HEADS):
        own = [row[at] for row in rows]
        if head.kind == "text":
            texts = sorted({each for each in own if isinstance(each, str)})
            found.append((np.array([texts.index(e) if e else -1 for e in own], np.int64), texts))
            continue
        mask = [each is None for each in own]
        kind = np.float64 if head.kind == "number" else np.int64
        found.append(np.ma.masked_array(np.array([each or 0 for each in own], kind), mask))
    return ColumnRows(found)


@given(st.lists(st.tuples(st.lists(cells, max_size=5), st.booleans(), st.integers(0, 2**61))))
def test_rows_come_in_order_exactly_with_their_times_moved(pieces: Any) -> None:
    made = [
        Piece((at,), later, lambda rows=rows, coded=coded: table(columns(rows) if coded else rows))
        for at, (rows, coded, later) in enumerate(pieces)
    ]

    found = join_tables("t", made)

    wanted = [
        (rank, None if start is None else start + later, *rest)
        for rows, _, later in pieces
        for rank, start, *rest in rows
    ]
    assert list(found.rows) == wanted


def test_a_column_that_one_table_lacks_is_not_known_there() -> None:
    short = table([(0, 1, 2)], HEADS[:3])
    long = table([(1, 3, 4, "gemm", 0.5)])

    found = join_tables("t", [Piece((0,), 0, lambda: short), Piece((1,), 0, lambda: long)])

    assert list(found.rows) == [(0, 1, 2, None, None), (1, 3, 4, "gemm", 0.5)]


def test_a_text_under_a_heading_of_numbers_elsewhere_is_not_lost() -> None:
    parts = [table([(cell,)], (Column("group", "text"),)) for cell in ("a", 7, None)]
    parts[1] = Table("t", (Column("group", "count"),), [(7,)])

    pieces = [Piece((at,), 0, lambda part=part: part) for at, part in enumerate(parts)]

    assert join_tables("t", pieces).column("group") == ["a", "7", None]


def test_rows_without_a_rank_get_that_of_their_piece_and_none_of_several() -> None:
    own = table([(4,)], (Column("time", "duration", "ns"),))

    found = join_tables("t", [Piece((3,), 10, lambda: own), Piece((5, 6), 0, lambda: own)])

    assert [column.name for column in found.columns] == ["rank", "time"]
    assert list(found.rows) == [(3, 14), (None, 4)]


def test_names_of_the_cache_are_moments_too_and_lengths_are_not() -> None:
    heads = tuple(
        Column(name, "duration", "ns") for name in ("start_ns", "launch duration", "launch_ns")
    )
    found = join_tables("t", [Piece((0,), 100, lambda: table([(1, 2, 3)], heads))])

    assert [*found.rows] == [(0, 101, 2, 103)]


def test_what_cannot_be_told_is_said_once_for_all_its_ranks() -> None:
    def broken() -> Table:
        raise TraceError("disk gone")

    pieces = [
        Piece((0,), 0, lambda: table([(0, 1, 2, None, None)], note="some lost")),
        *(Piece((rank,), 0, broken) for rank in (1, 2)),
        Piece((3,), 0, lambda: table([], abstained="no device")),
        Piece((4,), 0, None),
    ]

    found = join_tables("t", pieces)

    assert found.note == (
        "rank 0: some lost; rank 1-2: disk gone; rank 3: no device; "
        "rank 4: no such table was recorded"
    )
    assert len(found.rows) == 1
    assert join_tables("t", pieces[1:4]).abstained == "rank 1-2: disk gone; rank 3: no device"


def test_a_long_note_is_cut_and_says_so() -> None:
    pieces = [
        Piece((rank,), 0, lambda rank=rank: table([], note=f"lost {rank}")) for rank in range(12)
    ]

    assert join_tables("t", pieces).note.endswith("rank 7: lost 7; and 4 more remarks")


def test_a_rank_lacks_a_table_only_where_none_of_its_pieces_has_one() -> None:
    def read() -> Table:
        return table([])

    pieces = [Piece((0,), 0, None), Piece((0,), 0, read), Piece((1,), 0, None)]

    assert join_tables("t", pieces).note == "rank 1: no such table was recorded"
    assert join_tables("t", []).abstained == "no such table was recorded"


def test_rows_are_numbered_on_in_each_rank_and_so_is_who_names_them() -> None:
    heads = tuple(Column(name, "count") for name in ("rank", "id", "parent"))

    def calls(rank: int) -> Piece:
        rows = [(rank, 0, None), (rank, 2, 0)]
        return Piece((rank,), 0, lambda: table(rows, heads))

    found = join_tables("t", [calls(0), calls(1), calls(0), calls(0)])

    assert list(found.rows) == [
        *((0, 0, None), (0, 2, 0), (1, 0, None), (1, 2, 0)),
        *((0, 3, None), (0, 5, 3), (0, 6, None), (0, 8, 6)),
    ]
