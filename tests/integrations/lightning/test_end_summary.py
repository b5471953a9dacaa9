"""At the end of `fit` the first rank prints where the time went, and never harms the training."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.integrations import end_of_run
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.report import summary
from tests.builders.models import Tiny, loader, make_trainer


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


def test_a_very_large_run_is_not_read_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_of_run, "_LARGEST", 10)
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback).fit(Tiny(), loader())
    err = capsys.readouterr().err
    assert f"rlprof: recorded {callback.run}\nSee it: rlprof report " in err
    assert "median" not in err
