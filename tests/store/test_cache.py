import json
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import KINDS, Header
from lightning_rlprof.store.cache import Cache, cached_spans, place, sources
from lightning_rlprof.tables.spans import Counter, RankNote, RunWarning, Spans, Thread
from lightning_rlprof.tables.table import Column, ColumnRows, Table
from tests.builders.alike import assert_same_run, assert_same_table
from tests.builders.runs import grpo_run, header
from tests.effort import examples

INT = st.integers(-(2**63) + 1, 2**63 - 1)
TEXT = st.text(max_size=8)
BYTE = st.integers(0, 255)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


def column(count: int, values: Any = INT) -> Any:
    arrays = st.lists(values, min_size=count, max_size=count)
    return arrays.map(lambda own: np.array(own, dtype=np.int64))


@st.composite
def counters(draw: Any, count: int) -> Counter:
    rows = sorted(draw(st.sets(st.integers(0, count - 1)))) if count else []
    kind, values = draw(
        st.sampled_from(
            [("<i8", INT), ("<f8", st.floats()), ("|O", st.integers() | st.floats()), ("<i4", BYTE)]
        )
    )
    drawn = draw(st.lists(values, min_size=len(rows), max_size=len(rows)))
    return Counter(np.array(rows, np.int64), np.array(drawn, dtype=kind))


@st.composite
def headers(draw: Any, rank: int) -> Header:
    config = draw(st.dictionaries(TEXT, JSON, max_size=2))
    versions = draw(st.dictionaries(TEXT, TEXT, max_size=2))
    texts = draw(st.tuples(TEXT, TEXT, TEXT))
    return header(rank, 9, config=config, versions=versions, run_id=texts[0], host=texts[1])


@st.composite
def runs(draw: Any) -> Spans:
    count = draw(st.integers(0, 12))
    ranks = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=3)))
    names = tuple(draw(st.lists(TEXT, unique=True, min_size=1, max_size=20)))
    thread = st.builds(Thread, st.integers(0, 9), st.integers(), TEXT)
    threads = tuple(draw(st.lists(thread, min_size=1, max_size=4)))
    note = st.builds(RankNote, st.none() | BYTE, INT, st.just("info"), TEXT)
    facts = st.dictionaries(TEXT, TEXT | INT, max_size=2)
    warning = st.builds(RunWarning, st.none() | BYTE, TEXT, TEXT, facts)
    return Spans(
        Path("elsewhere/run"),
        names,
        threads,
        name=draw(column(count, st.integers(0, len(names) - 1))),
        kind=draw(column(count, st.integers(0, len(KINDS) - 1))),
        rank=np.sort(draw(column(count, st.sampled_from(ranks)))),
        step=draw(column(count)),
        start_ns=draw(column(count, st.integers(-(2**61), 2**61))),
        end_ns=draw(column(count, st.integers(-(2**61), 2**61))),
        thread=draw(column(count, st.integers(0, len(threads) - 1))),
        id=draw(column(count)),
        parent=draw(column(count, st.just(-1) | st.integers(0, 2**60))),
        counters=draw(st.dictionaries(TEXT, counters(count), max_size=4)),
        headers={rank: draw(headers(rank)) for rank in ranks},
        statuses={rank: draw(st.none() | TEXT) for rank in ranks},
        notes=tuple(draw(st.lists(note, max_size=2))),
        warnings=tuple(draw(st.lists(warning, max_size=2))),
        unix_ns=draw(st.integers(0, 2**62)),
    )


def kept(spans: Spans, folder: Path) -> tuple[Cache, Spans]:
    """Write a cache of spans as if a file had been read, and open it."""
    path = folder / "trace.json"
    path.write_text("{}")
    spans = replace(spans, path=path)
    cache = place(path, sources(path), spans)
    for name, read in spans.tables.items():
        cache.add(read(), name)
    found = cached_spans(cache, path, unread)
    assert found is not None
    return cache, found


def unread(path: Path) -> Spans:
    raise AssertionError(f"{path} was read")


@settings(max_examples=examples(25), deadline=None)
@given(runs())
def test_a_run_out_of_its_cache_is_the_same_in_every_column_counter_and_header(
    spans: Spans,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = kept(spans, Path(folder))[1]
        assert_same_run(found, replace(spans, path=Path(folder) / "trace.json"))


@st.composite
def cells(draw: Any, count: int) -> Any:
    """Return a column of a table in any form that loaders make."""
    form = draw(st.sampled_from(["whole", "masked", "float", "masked float", "texts"]))
    if form == "texts":
        texts = draw(st.lists(TEXT, min_size=1, max_size=40, unique=True))
        return draw(column(count, st.integers(-1, len(texts) - 1))), texts
    values = st.floats(allow_nan=False) if "float" in form else INT
    array = np.array(draw(st.lists(values, min_size=count, max_size=count)), dtype=None)
    array = array.astype(np.float64 if "float" in form else np.int64)
    if "masked" not in form:
        return array
    mask = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return np.ma.masked_array(array, mask=np.array(mask, dtype=bool))


@st.composite
def tables(draw: Any) -> Table:
    count = draw(st.integers(0, 12))
    columns = draw(st.lists(cells(count), min_size=1, max_size=4))
    heads = [
        Column(
            f"the {at}", "text" if isinstance(each, tuple) else "count" if whole(each) else "number"
        )
        for at, each in enumerate(columns)
    ]
    return Table("kernels", tuple(heads), ColumnRows(columns), note=draw(TEXT))


def whole(array: Any) -> bool:
    return bool(array.dtype.kind == "i")


@settings(max_examples=examples(25), deadline=None)
@given(tables())
def test_a_table_out_of_its_file_is_the_same_in_every_row(table: Table) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _, found = kept(small(kernels=table), Path(folder))
        assert_same_table(found.table("kernels"), table)


def small(**tables: Table) -> Spans:
    none = np.zeros(0, np.int64)
    lazy = {name: partial(lambda table: table, table) for name, table in tables.items()}
    columns = ("name", "kind", "rank", "step", "start_ns", "end_ns", "thread", "id", "parent")
    return Spans(Path(), (), (), **dict.fromkeys(columns, none), tables=lazy)


@pytest.mark.parametrize(
    "table",
    [
        Table("t", (Column("a", "text"), Column("b", "count")), [("x", 1), (None, 2), ("x", None)]),
        Table("t", (Column("a", "share"),), [(0.5,), (None,)], note="a note"),
        Table("t", (Column("a b", "duration", "ns"),), [(2**62,), (-5,)]),
        Table("t", (Column("a", "text"),), []),
        Table("t", (Column("a", "count"),), abstained="nothing was traced"),
    ],
)
def test_a_table_of_plain_rows_and_one_that_abstained_come_back(
    table: Table, tmp_path: Path
) -> None:
    assert_same_table(kept(small(t=table), tmp_path)[1].table("t"), table)


def test_a_counter_that_is_not_a_number_comes_back(tmp_path: Path) -> None:
    columns = dict.fromkeys(("name", "kind", "rank", "step", "thread", "id"), np.zeros(2, np.int64))
    counter = Counter(np.arange(2), np.array([np.nan, 0.5]))
    spans = replace(small(), names=("a",), threads=(Thread(0, 1, "b"),), **columns)
    spans = replace(spans, **dict.fromkeys(("start_ns", "end_ns", "parent"), np.arange(2)))
    found = kept(replace(spans, counters={"loss": counter}), tmp_path)[1]
    assert str(found.counters["loss"]) == str(counter)


def test_rows_stay_in_order_where_there_are_more_texts_than_rows(tmp_path: Path) -> None:
    texts = [f"kernel {at}" for at in range(5_000)]
    rows = ColumnRows([(np.arange(4_999, -1, -1), texts), np.arange(5_000)])
    table = Table("t", (Column("kernel", "text"), Column("n", "count")), rows)
    cache, found = kept(small(t=table), tmp_path)
    assert_same_table(found.table("t"), table)
    once = cache.file("t").read_bytes()
    cache.file("t").unlink()
    cache.add(table, "t")
    assert cache.file("t").read_bytes() == once


def test_only_the_columns_that_are_looked_at_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ColumnRows([np.arange(5_000), np.arange(5_000) * 2])
    heads = (Column("a", "count"), Column("b", "count"))
    _, found = kept(small(t=Table("t", heads, rows)), tmp_path)
    table = found.table("t")
    asked: list[str] = []
    file = table.rows.columns  # type: ignore[attr-defined]
    ask = file._ask
    monkeypatch.setattr(file, "_ask", lambda query: asked.append(query) or ask(query))
    assert table.column("b")[-1] == 9_998
    assert [query.partition(" FROM ")[0] for query in asked] == ['SELECT "b" AS c1']
    assert table.rows[:2] == [(0, 0), (1, 2)]
    assert len(list(table.rows)) == 5_000
    assert len(asked) == 3


def test_a_table_without_a_file_is_read_from_the_run_itself(tmp_path: Path) -> None:
    path = tmp_path / "run"
    grpo_run(path, steps=2)
    table = Table("t", (Column("a", "count"),), [(1,)])
    full = replace(load(path), tables={"t": lambda: table})
    cache = place(path, sources(path), full)
    found = cached_spans(cache, path, lambda path: full)
    assert found is not None
    assert found.table("t") is table
    assert_same_run(found, full)


@pytest.mark.parametrize("damage", ["", "{", "{}", "[]", '{"path": 3}'])
def test_damaged_facts_are_no_run(damage: str, tmp_path: Path) -> None:
    cache, found = kept(small(), tmp_path)
    facts = cache.folder / "run.json"
    stat, good = facts.stat(), json.loads(facts.read_bytes())
    assert good["unix_ns"] == found.unix_ns
    facts.write_text(damage)
    os.utime(facts, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cached_spans(cache, tmp_path / "trace.json", unread) is None


def test_a_page_that_is_damaged_is_told_when_its_column_is_read(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**60, 50_000)
    table = Table("t", (Column("a", "count"),), ColumnRows([numbers]))
    cache, found = kept(small(t=table), tmp_path)
    good = found.table("t")
    data, stat = bytearray(cache.file("t").read_bytes()), cache.file("t").stat()
    data[1_000:300_000] = bytes(299_000)
    cache.file("t").write_bytes(data)
    os.utime(cache.file("t"), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(TraceError, match=r"t\.parquet: corrupt .*; delete it"):
        good.column("a")


def test_a_header_with_values_of_other_libraries_is_kept_as_plain_ones(tmp_path: Path) -> None:
    config = {"a": np.int64(3), "b": MappingProxyType({"c": Path("x")})}
    found = kept(replace(small(), headers={0: header(config=config)}), tmp_path)[1]
    assert found.headers[0].config == {"a": 3, "b": {"c": "x"}}


def test_a_damaged_table_says_what_to_delete(tmp_path: Path) -> None:
    rows = ColumnRows([np.arange(5_000)])
    cache, found = kept(small(t=Table("t", (Column("a", "count"),), rows)), tmp_path)
    data = cache.file("t").read_bytes()
    stat = cache.file("t").stat()
    cache.file("t").write_bytes(data[:4] + bytes(len(data) - 8) + data[-4:])
    os.utime(cache.file("t"), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(TraceError, match=r"t\.parquet.*; run rlprof ingest to rebuild it"):
        found.table("t")
