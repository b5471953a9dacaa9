"""Answers that a cache keeps: made once, the same as of the run itself, wherever that lies."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.diagnosis import diagnosis
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report import summary as first_screen
from lightning_rlprof.report.html import page, step_charts
from lightning_rlprof.report.html.page import render_report, report_tables
from lightning_rlprof.report.summary import lead_tables, summary
from lightning_rlprof.run import Run
from lightning_rlprof.store import answers, ingest
from lightning_rlprof.store.open_run import open_run
from lightning_rlprof.tables.spans import answer
from lightning_rlprof.tables.table import Column, Loss, Table
from tests.golden.runs.make import unpack


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a slow rank, whose cache has its first screen as if it were a large one."""
    unpack(tmp_path)
    monkeypatch.setattr(answers, "_FEWEST_SPANS", 1)
    monkeypatch.setattr(ingest, "_LARGE", 1)
    assert ingest.ingest_one(str(tmp_path / "slow")).state == "cached"
    return tmp_path / "slow"


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("it was computed again")


def test_the_first_screen_out_of_a_cache_is_that_of_the_run_and_reads_no_span(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = load(cached)
    expected, tables = summary(own), lead_tables(own)
    assert expected.first
    monkeypatch.setattr(first_screen, "_summary", refuse)
    monkeypatch.setattr(first_screen, "_lead_tables", refuse)
    found = Run.of(open_run(cached))
    assert summary(found) == expected
    assert [table.to_dict() for table in lead_tables(found)] == [own.to_dict() for own in tables]
    assert not vars(found).keys() & {"name", "kind", "rank", "start_ns", "end_ns", "counters"}


def test_the_report_out_of_a_cache_is_that_of_the_run_and_reads_no_span(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = load(cached)
    expected = render_report(own, report_tables(own))
    for module, name in ((page, "timeline"), (step_charts, "StepCharts"), (diagnosis, "_diagnose")):
        monkeypatch.setattr(module, name, refuse)
    found = Run.of(open_run(cached))
    assert render_report(found, report_tables(found)) == expected
    assert not vars(found).keys() & {"name", "kind", "rank", "start_ns", "end_ns", "counters"}


def test_texts_that_say_what_was_lost_are_kept_as_texts(cached: Path) -> None:
    spans = open_run(cached)
    lossy = Table("lossy", (Column("a", "count"),), [(1,)], losses=(Loss("3 rows", rows=3),))
    (own,) = answer(spans, "lossy", list[Table], lambda run: [lossy])
    (kept,) = answer(spans, "lossy", list[Table], refuse)
    assert own.losses == kept.losses == ("3 rows",)


def test_it_moves_with_its_run(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = cached.rename(cached.with_name("elsewhere"))
    expected = summary(load(place))
    assert str(place) in expected.first[0].look
    found = open_run(place)
    assert summary(found) == expected


def test_one_that_is_damaged_is_made_again(cached: Path) -> None:
    expected = summary(load(cached))
    (file,) = cached.glob(".rlprof-cache/*/answer-summary.json")
    stat, good = file.stat(), file.read_bytes()
    for damage in (b"", b"{", b"{}", good[:-9] + b"}" * 9):
        file.write_bytes(damage)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert summary(open_run(cached)) == expected
        assert file.read_bytes() == good


def test_a_copy_with_other_spans_is_asked_itself(cached: Path) -> None:
    few = open_run(cached)
    assert summary(few).steps > 0
    none = Run.of(load(cached)).rows(kind="step")[:0]
    columns = ("name", "kind", "rank", "step", "start_ns", "end_ns", "thread", "id", "parent")
    empty = replace(few, counters={}, **{name: getattr(few, name)[none] for name in columns})
    assert summary(empty).steps == 0


def test_a_column_that_is_damaged_is_read_from_the_run_itself(cached: Path) -> None:
    own = load(cached)
    (table,) = cached.glob(".rlprof-cache/*/spans.parquet")
    data, stat = bytearray(table.read_bytes()), table.stat()
    data[100:2_000] = bytes(1_900)
    table.write_bytes(data)
    os.utime(table, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    found = open_run(cached)
    for column in ("name", "kind", "start_ns", "end_ns", "thread", "parent"):
        assert getattr(found, column).tolist() == getattr(own, column).tolist()


def test_an_analysis_that_fails_costs_the_screen_and_not_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unpack(tmp_path)
    monkeypatch.setattr(ingest, "_LARGE", 1)
    monkeypatch.setattr(first_screen, "_summary", refuse)
    assert ingest.ingest_one(str(tmp_path / "slow")).state == "cached"
    assert "its summary failed" in caplog.text
