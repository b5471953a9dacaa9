"""At the end of `fit` the first rank prints where the time went, and never harms the training."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.integrations import end_of_run
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.records.records import OPTIMIZER_STEP
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.report import summary
from lightning_rlprof.testing import make_header
from tests.builders.models import Tiny, loader, make_trainer
from tests.builders.runs import grpo_run


def test_a_training_ends_with_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback).fit(Tiny(), loader())
    out, err = capsys.readouterr()
    assert "rlprof" not in out, "standard output belongs to the program"
    lines = err[err.index("rlprof: ") :].splitlines()
    assert lines[0].startswith("rlprof: 4 steps on 1 rank, median ")
    assert len(lines) <= 12
    assert lines[-1] == f"See it:    rlprof report {callback.run} --open"


def test_a_key_turns_it_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path), summary=False)
    make_trainer(callback).fit(Tiny(), loader())
    assert "rlprof: " not in capsys.readouterr().err


class Fails(Tiny):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise ValueError("mine")
        return super().training_step(batch, batch_idx)


def test_a_training_that_fails_has_one_too_and_its_error_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    with pytest.raises(ValueError, match="mine"):
        make_trainer(callback).fit(Fails(), loader())
    err = capsys.readouterr().err
    assert ", interrupted by ValueError\n" in err[err.index("rlprof: ") :]


def test_what_fails_in_it_is_logged_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(summary, "summary", broken)
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    trainer = make_trainer(callback)
    with caplog.at_level(logging.WARNING):
        trainer.fit(Tiny(), loader())
    assert trainer.state.finished
    assert any("failed: broken" in record.getMessage() for record in caplog.records)


def test_of_a_long_run_the_last_steps_are_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grpo_run(tmp_path, steps=300, ranks=2)
    monkeypatch.setattr(end_of_run, "_LARGEST", 50_000)
    end_of_run.print_summary(tmp_path, "finished")
    first = capsys.readouterr().err.splitlines()[1]
    assert re.match(
        r"rlprof: the last \d\d steps \(from step 2\d\d on\) on 2 ranks, median ", first
    )


def test_a_run_whose_iterations_show_from_its_start_alone_is_not_summed_up_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_of_run, "_LARGEST", 10)
    TraceWriter(tmp_path, replace(make_header(), step_unit=OPTIMIZER_STEP)).close()
    end_of_run.print_summary(tmp_path, "finished")
    err = capsys.readouterr().err
    assert err == f"\nrlprof: recorded {tmp_path}\nSee it: rlprof report {tmp_path} --open\n"
