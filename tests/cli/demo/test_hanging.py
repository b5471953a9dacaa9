"""A demo whose last rank hangs in its reward: what is trained, caught and printed."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_rlprof.analysis.hangs import find_hang
from lightning_rlprof.cli.demo.options import DemoOptions
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.loaders.hang_evidence import hang_evidence
from tests.builders.runs import grpo_rows, header, write_rank

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    """Put a demo in place that trains nothing, and return what it was asked for."""
    seen: list[DemoOptions] = []

    def run_hanging_demo(options: DemoOptions, progress: object) -> Path | None:
        seen.append(options)
        if options.task is not None:
            return None
        write_rank(options.save_path / "run", header(), grpo_rows(4))
        return options.save_path / "run"

    module: Any = ModuleType("lightning_rlprof.cli.demo.hanging")
    module.run_hanging_demo = run_hanging_demo
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def test_two_ranks_train_unless_more_are_asked_for(
    rlprof: Run, asked: list[DemoOptions], tmp_path: Path
) -> None:
    status, out, _ = rlprof("demo", "--inject", "hang", "-o", tmp_path)
    rlprof("demo", "--inject", "hang", "--ranks", 3, "-o", tmp_path / "more")
    assert status == 0
    assert [(each.inject, each.ranks) for each in asked] == [("hang", 2), ("hang", 3)]
    assert "no rank has reported a hang" in " ".join(out.split()), "of the run that was written"
    assert out.endswith(f"Wrote {tmp_path}/run\n")


def test_a_training_without_a_run_is_one_line(
    rlprof: Run, asked: list[DemoOptions], tmp_path: Path
) -> None:
    words = ("demo", "--inject", "hang", "--task", "spell_backward", "-o", tmp_path)
    assert "the training left no run" in rlprof(*words)[2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"inject": "hnag", "ranks": 2}, "did you mean 'hang'"),
        ({"inject": "hang"}, "inject=hang needs ranks that wait; give ranks=2"),
    ],
)
def test_what_cannot_be_injected_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DemoOptions(**options)


@pytest.mark.deep
def test_a_real_training_is_caught_and_the_rank_and_line_are_named(tmp_path: Path) -> None:
    from lightning_rlprof.cli.demo.hanging import run_hanging_demo

    run = run_hanging_demo(DemoOptions(inject="hang", ranks=2, steps=8, save_path=tmp_path))

    assert run is not None
    (cause,) = find_hang(hang_evidence(run), 0).causes
    assert cause.rank == 1
    assert cause.at is not None
    assert cause.at.function == "wait_for_closing_bracket"
    assert cause.report is not None
    assert [span.name for span in cause.report.spans][-1] == "compute_reward"
