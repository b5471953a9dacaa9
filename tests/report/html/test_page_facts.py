"""What the page says of a run beside its figures."""

import dataclasses
from pathlib import Path

import pytest

from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import OPTIMIZER_STEP, ROLLOUT_AND_UPDATES
from lightning_rlprof.report.html.page import (
    changed_settings,
    configuration,
    environment,
    facts,
    missing,
    remarks,
    report_tables,
    versions,
    write_report,
)
from lightning_rlprof.tables.spans import RankNote, RunWarning
from tests.builders.runs import Row, grpo_rows, grpo_run, header, write_rank


def test_ranks_with_one_trouble_are_named_together(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path / "run", steps=3)
    problems = [RunWarning(rank, "it stopped") for rank in (3, 0, 1, 2, 9)]
    spans = dataclasses.replace(
        spans,
        warnings=(*problems, RunWarning(None, "no clock"), RunWarning(4, "late")),
        notes=(RankNote(7, 0, "warning", "disk"), RankNote(None, 0, "info", "newest")),
    )
    assert missing(spans) == [
        ("ranks 0-3, 9", "it stopped"),
        ("", "no clock"),
        ("rank 4", "late"),
        ("rank 7", "disk"),
    ]
    assert remarks(spans) == [("", "newest")]


def test_values_that_differ_between_ranks_name_the_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for rank in range(3):
        config = {"a": {"b": rank // 2, "c": []}, "d": "x"}
        own = {"torch": "2.13.0"} | ({"cann": "8"} if rank == 1 else {})
        write_rank(run, header(rank, 3, config=config, versions=own), [])
    spans = load(run)
    assert configuration(spans) == [
        ("a.b", "0 (ranks 0-1); 1 (rank 2)"),
        ("a.c", "[]"),
        ("d", "x"),
    ]
    assert versions(spans) == [("torch", "2.13.0"), ("cann", "8 (rank 1)")]


def test_facts_count_what_is_there_and_what_should_be(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for rank in range(5):
        head = header(rank, 8, host=f"node-{rank}")
        write_rank(run, head, grpo_rows(3), status="finished" if rank else None)
    spans = load(run)
    assert facts(spans)[:3] == ["5 of 8 ranks", "CPU", "3 steps"]
    assert facts(spans)[-1] == "2023-11-14 22:13 UTC"
    found = {fact.name: fact.value for fact in environment(spans)}
    assert found["Steps"] == "1–3"
    assert found["Ended"] == "4 of 5 finished"
    assert found["5 hosts"] == "node-0, node-1, node-2, … and 2 more"


def test_settings_that_differ_from_the_defaults_are_listed_with_these(tmp_path: Path) -> None:
    config = {"integrated": {"stage": "actor_update", "profile_level": "level0"}, "own": 1}
    write_rank(tmp_path / "run", header(config=config), grpo_rows(3))
    assert changed_settings(configuration(load(tmp_path / "run"))) == [
        ("integrated.stage", "all", "actor_update")
    ]


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        ("", "Half of the steps take "),
        (OPTIMIZER_STEP, "Half of the steps of the optimizer take "),
        (ROLLOUT_AND_UPDATES, "Half of the steps, each a rollout and its updates, take "),
    ],
)
def test_the_page_says_what_a_step_is(unit: str, text: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    head = dataclasses.replace(header(0, 1), step_unit=unit)
    rows = [Row("step", "step", at, at * 1_000, (at + 1) * 1_000) for at in range(1, 9)]
    write_rank(run, head, rows)
    spans = load(run)
    write_report(spans, report_tables(spans), tmp_path / "page.html")
    assert text in (tmp_path / "page.html").read_text(encoding="utf-8")
