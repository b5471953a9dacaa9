"""The open stage on Lightning's progress bar: while steps are long, and on a terminal only."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar

from lightning_rlprof.integrations.lightning import trainer_hooks
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.annotations import Marker, stage
from tests.builders.models import Tiny, loader, make_trainer, steps_of, trace_of

BARS = (TQDMProgressBar, RichProgressBar)


class Output(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Rollout(Tiny):
    """Notes what stands in front of the bar inside and outside of its stages."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []
        self.looks = True

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.seen.append([])
        self.look()
        with stage("actor_generate"):
            self.look()
            with stage("compute_reward[0]"):
                self.look()
            self.look()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.look()

    def look(self) -> None:
        bar = self.trainer.progress_bar_callback.train_progress_bar
        text = bar.desc if hasattr(bar, "desc") else bar.description
        self.seen[-1].append(text.removesuffix(": "))


@pytest.fixture
def fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Rollout, ProfilerCallback]]:
    def run(bar: Any, *, long: bool = True, terminal: bool = True) -> Any:
        monkeypatch.setattr(trainer_hooks, "_LONG_NS", 0 if long else 10**15)
        monkeypatch.setattr(sys, "stdout", Output(terminal=terminal))
        callback = ProfilerCallback(profile_save_path=str(tmp_path))
        module = Rollout()
        make_trainer(callback, bar, enable_progress_bar=True).fit(module, loader())
        return module, callback

    return run


def bar_of(kind: Any, *, terminal: bool = True) -> Any:
    if kind is TQDMProgressBar:
        return TQDMProgressBar()
    return RichProgressBar(console_kwargs={"file": sys.stdout, "force_terminal": terminal})


@pytest.mark.parametrize("kind", BARS)
def test_the_bar_shows_the_innermost_open_stage(kind: Any, fit: Any) -> None:
    module, callback = fit(bar_of(kind))
    reward = "compute_reward[0]" if kind is TQDMProgressBar else r"compute_reward\[0]"
    for before, rollout, inner, after, end in module.seen:
        assert before == end
        assert before.startswith("Epoch 0")
        assert (rollout, after) == (f"{before} actor_generate",) * 2
        assert inner == f"{before} {reward}"
    assert len(module.seen) == 4
    assert steps_of(trace_of(callback)) == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", BARS)
def test_short_steps_show_no_stage_after_the_first(kind: Any, fit: Any) -> None:
    module, _ = fit(bar_of(kind), long=False)
    assert [len({*seen}) for seen in module.seen] == [3, 1, 1, 1]


@pytest.mark.parametrize("kind", BARS)
def test_a_log_file_shows_no_stage(kind: Any, fit: Any) -> None:
    module, _ = fit(bar_of(kind, terminal=False), terminal=False)
    assert [len({*seen}) for seen in module.seen] == [1] * 4


def test_a_bar_of_the_users_is_left_alone(fit: Any) -> None:
    class Mine(TQDMProgressBar):
        pass

    module, _ = fit(Mine())
    assert [len({*seen}) for seen in module.seen] == [1] * 4


def test_a_bar_that_fails_is_left_alone_and_training_goes_on(
    fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> bool:
        raise AttributeError("another version")

    monkeypatch.setattr(trainer_hooks.StageOnBar, "_write_tqdm", fail)
    module, callback = fit(TQDMProgressBar())
    assert (len(module.losses), steps_of(trace_of(callback))) == (4, [1, 2, 3, 4])


def test_without_a_bar_markers_are_those_without_it(tmp_path: Path) -> None:
    names: list[str] = []
    module = Tiny()
    module.on_batch = lambda _: names.append(Marker.__enter__.__qualname__)
    make_trainer(ProfilerCallback(profile_save_path=str(tmp_path))).fit(module, loader())
    assert {"_telling" in name for name in names} == {False}
