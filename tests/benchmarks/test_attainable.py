"""Published stage times are inside the attainable range as often as docs/accuracy.md says."""

import sys
from importlib import import_module
from typing import Any

import pytest

from tests.places import ROOT

PAGE = (ROOT / "docs" / "accuracy.md").read_text()
CORRECTED = {
    "new": ("generation", "training"),
    "fresh": ("generation", "training", "log-prob", "refit"),
    "last": ("generation", "training", "log-prob", "refit"),
    "unseen": ("training", "log-prob"),
}
"""Stages of a split that the page has twice: as first scored, and by the corrected model."""


@pytest.fixture(scope="module")
def benchmark() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return import_module("attainable")
    finally:
        sys.path.pop(0)


def test_each_row_names_its_document_and_no_document_is_in_two_splits(benchmark: Any) -> None:
    splits: dict[str, set[str]] = {}
    for row in benchmark.rows():
        splits.setdefault(row.source, set()).add(row.split)
    assert splits.keys() == benchmark.SOURCES.keys()
    assert all(len(own) == 1 or own == {"new", "after"} for own in splits.values())


@pytest.mark.deep
def test_the_page_has_the_shares_that_the_benchmark_computes(benchmark: Any) -> None:
    every = list(benchmark.rows())
    pages = {"log-prob": "log-probabilities", "refit": "weight sync"}
    for split, stage in {(row.split, row.stage): None for row in every}:
        found = benchmark.scored([row for row in every if (row.split, row.stage) == (split, stage)])
        if not found["rows"]:
            continue
        corrected = ", corrected" if split in CORRECTED and stage in CORRECTED[split] else ""
        name = f"| {split}{corrected} | {pages.get(stage, stage)} | {found['sources']} |"
        assert f"{name} {found['inside']} / {found['rows']} | {found['width']:.1f} |" in PAGE
