"""The benchmark of ingest: its traces are read without loss, and a rank that grows is seen."""

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_rlprof.loaders.load import load
from tests.places import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """Import the benchmark as it is imported when it runs as a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("ingest")
    for name in ("_measure", "ingest"):
        sys.modules.pop(name, None)


def chosen(**options: Any) -> argparse.Namespace:
    unset = {"full": False, "ranks": None, "events": None, "plot": None, "json": None}
    return argparse.Namespace(**{**unset, "jobs": 1, "markdown": False, **options})


def test_its_traces_are_read_whole(benchmark: ModuleType, tmp_path: Path) -> None:
    size = benchmark.write_rank(tmp_path / "rank0003.json", 3, 8, 3_300)
    spans = load(tmp_path / "rank0003.json")
    assert size == (tmp_path / "rank0003.json").stat().st_size
    assert (spans.ranks, spans.headers[3].world_size, spans.warnings) == ((3,), 8, ())
    kernels = spans.table("kernels")
    assert len(kernels.rows) == 1_100
    assert set(kernels.column("stage")) == {"actor_update"}
    assert set(kernels.column("step")) == {1, 2}


def test_it_runs_and_draws_a_dot_per_rank(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    assert benchmark.main(chosen(ranks=3, events=300, plot=plot)) == 0
    out = capsys.readouterr().out
    assert "| 1 to 3 |" in out
    assert "peak of all processes" in out
    assert plot.read_text().count("<circle") == 3


@pytest.mark.parametrize(
    ("seconds", "peak", "broken"), [([1.0] * 8, 500.0, 0), ([1.0] * 6 + [2.0] * 2, 1500.0, 2)]
)
def test_a_rank_that_costs_more_than_the_first_and_too_much_memory_do_not_hold(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: list[float],
    peak: float,
    broken: int,
) -> None:
    cost = benchmark.Cost(seconds, [peak], 1_000)
    monkeypatch.setattr(benchmark, "_measure", lambda *_: cost)
    assert benchmark.main(chosen(full=True)) == bool(broken)
    assert capsys.readouterr().out.count("DOES NOT HOLD") == broken
