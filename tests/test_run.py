"""A run in a notebook: the analyses are its methods, and the page shows what it says."""

import dataclasses
import runpy
from pathlib import Path

import pytest

import lightning_rlprof
from lightning_rlprof.analysis.catalog import ANALYSES
from lightning_rlprof.analysis.comparison.compare import compare
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.report.summary import summary
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.testing import make_header
from tests.places import ROOT

MS = 1_000_000


def recorded(path: Path) -> Run:
    writer = TraceWriter(path / "run", make_header(0, world_size=2))
    writer.write(
        [
            ("span", "step", "step", 1, 0, 10 * MS, 1, 1, None, None),
            ("span", "<b>mine</b>", "stage", 1, 0, 6 * MS, 1, 2, 1, {"tokens": 5}),
        ]
    )
    writer.close()
    return lightning_rlprof.load(path / "run")


def test_every_analysis_is_a_method_with_the_same_answer(tmp_path: Path) -> None:
    run = recorded(tmp_path)

    for name, each in ANALYSES.items():
        assert getattr(run, name)() == each.run(run), name
    assert run.stages(per_rank=True) == stages(run, per_rank=True)
    assert run.summary() == summary(run)
    assert run.compare(run) == compare(run, run)


def test_no_analysis_hides_a_part_of_the_run() -> None:
    assert not ANALYSES.keys() & {*dir(Spans), *Spans.__dataclass_fields__}


def test_types_are_known_for_each_method(capsys: pytest.CaptureFixture[str]) -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_methods.py"))
    main, text = generator["main"], Path(generator["FILE"]).read_text()
    assert main(["--check"]) == 0
    assert all(f"    {name} = _{name}\n" in text for name in ANALYSES)
    main.__globals__["CATALOG"] = ()
    assert main(["--check"]) == 1
    assert "methods.pyi is stale: python docs/generate_methods.py" in capsys.readouterr().err


def test_a_run_shows_its_name_and_size_and_no_arrays(tmp_path: Path) -> None:
    assert repr(recorded(tmp_path)) == "Run('run', 2 spans)"


def test_a_run_stays_one_when_a_part_is_replaced(tmp_path: Path) -> None:
    assert isinstance(dataclasses.replace(recorded(tmp_path), unix_ns=1), Run)


def test_a_notebook_shows_its_summary_stages_and_doubts_and_no_markup_of_the_run(
    tmp_path: Path,
) -> None:
    shown = recorded(tmp_path)._repr_html_()

    assert "&lt;b&gt;mine&lt;/b&gt;" in shown
    assert "<b>mine" not in shown
    assert "<table>" in shown
    assert "<li>of 2 ranks, these have no trace: 1</li>" in shown
    assert "<li>rank 0: its file is truncated" in shown
