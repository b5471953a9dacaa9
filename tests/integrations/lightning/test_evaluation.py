"""Validation, test and prediction are no training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_rlprof.analysis.efficiency.throughput import throughput
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.analysis.stages import StepTimes, stages
from lightning_rlprof.analysis.steps.step_selection import warm_up
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.integrations.lightning.stage_metrics import StageMetrics
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import current
from lightning_rlprof.report.summary import run_line, summary
from lightning_rlprof.tables.table import figure, rows_of
from tests.builders.models import (
    Tiny,
    Validated,
    loader,
    make_trainer,
    steps_of,
    trace_of,
)
from tests.integrations.lightning.test_stage_metrics import Logged


class Rolls(Validated):
    """Generates in every batch, trained or not."""

    def roll(self, batch: torch.Tensor) -> torch.Tensor:
        with stage("actor_generate"):
            return self.layer(batch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.roll(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.roll(batch)

    test_step = predict_step = validation_step


def run(verb: str, trainer: Any, module: Any = None) -> None:
    options = {} if verb == "predict" else {"verbose": False}
    getattr(trainer, verb)(module or Rolls(), loader(), **options)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_each_verb_alone_leaves_no_run(verb: str, tmp_path: Path) -> None:
    run(verb, make_trainer(ProfilerCallback(profile_save_path=str(tmp_path))))
    assert list(tmp_path.iterdir()) == []
    assert current() is None


def test_a_region_of_the_users_that_is_called_predict_stays_one(tmp_path: Path) -> None:
    from lightning_rlprof.recording.annotations import annotate

    class Predicts(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            with annotate("predict"), stage("actor_generate"):
                self.layer(batch)
            return super().training_step(batch, batch_idx)

    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback).fit(Predicts(), loader())
    assert "actor_generate" in stages(load(callback.run)).column("stage")


def test_sanity_checks_and_validations_of_a_fit_are_no_training(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback, val_check_interval=2).fit(Rolls(), loader(), loader())
    spans = load(callback.run)
    rollouts = [
        spans.step[row]
        for row in spans.rows(kind="stage")
        if spans.names[spans.name[row]] == "actor_generate"
    ]
    assert rollouts == [1, 2, 3, 4]


class Counts(Rolls):
    """Counts tokens: many more in validations, which generate with another number of spans."""

    def roll(self, batch: torch.Tensor) -> torch.Tensor:
        with stage("actor_generate", tokens=10 if self.training else 1_000, flops=1):
            return self.layer(batch)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train eight batches with four validations inside of steps; returns the run and its logs."""
    folder = tmp_path_factory.mktemp("counted")
    callback = ProfilerCallback(profile_save_path=str(folder / "runs"))
    logger = TensorBoardLogger(folder / "logs", name="", version="")
    trainer = make_trainer(
        callback, StageMetrics(), logger=logger, val_check_interval=2, max_epochs=2
    )
    trainer.fit(Counts(), loader(), loader())
    assert callback.run is not None
    return callback.run, folder / "logs"


def test_no_table_counts_the_rollouts_of_validations(counted: tuple[Path, Path]) -> None:
    spans = load(counted[0])
    row = {each["stage"]: each for each in rows_of(stages(spans))}
    generated = row["actor_generate"]["total"]
    steps = 8 - len(warm_up(spans))  # on a busy machine the first one counts as warm-up
    assert row["actor_generate"]["calls"] == steps
    assert row["validation"]["calls"] == 3  # the fourth is after the last step
    table = throughput(spans)
    tokens = dict(zip(table.column("stage"), table.column("tokens"), strict=True))
    assert tokens["actor_generate"] == 10 * steps
    account = ledger(spans)
    assert (
        dict(zip(account.column("category"), account.column("total"), strict=True))["rollout"]
        == generated
    )


def test_tokens_per_second_are_those_of_training(counted: tuple[Path, Path]) -> None:
    spans = load(counted[0])
    series = StepTimes(spans)
    assert series.tokens is not None
    assert series.tokens[1].tolist() == [10] * 8
    steps, validations = spans.rows(kind="step"), spans.rows(kind="stage", name="validation")
    inside = validations[spans.start_ns[validations] < spans.end_ns[steps].max()]
    training, own = spans.duration_ns[steps].sum(), spans.duration_ns[inside].sum()
    assert series.training_ns.sum() == training - own
    warm = steps[np.isin(spans.step[steps], warm_up(spans))]  # before the first validation
    ns = training - own - spans.duration_ns[warm].sum()
    rate = figure(10 * (8 - len(warm)) / ns * 1e9)
    assert run_line(summary(spans)).endswith(f", {rate} tokens/s")


def test_stage_metrics_log_training_alone(counted: tuple[Path, Path]) -> None:
    spans, logged = load(counted[0]), Logged(counted[1])
    steps, rollouts = (
        spans.rows(kind=kind, name=name)
        for kind, name in (("step", "step"), ("stage", "actor_generate"))
    )
    validations = spans.rows(kind="stage", name="validation")
    trained = spans.duration_ns[steps].astype(float)
    for row in validations:
        within = (spans.start_ns[steps] <= spans.start_ns[row]) & (
            spans.end_ns[steps] >= spans.end_ns[row]
        )
        trained[within] -= spans.duration_ns[row]
    own = spans.duration_ns[rollouts]
    for name, expected in (
        ("step_s", trained / 1e9),
        ("actor_generate_s", own / 1e9),
        ("actor_generate_share", own / trained),
        ("actor_generate_tokens_per_s", 10 / own * 1e9),
    ):
        values = [value for _, value in logged.of(f"rlprof/{name}")]
        assert values == pytest.approx(expected.tolist(), rel=1e-5), name


# ---- tuners


class Tuned(Validated):
    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.1, 2

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(32, 4), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, 4))


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")  # of Lightning, about all sorts of short trainings
@pytest.mark.parametrize("tunes", ["lr_find", "fit", "validate"])
def test_a_tuner_leaves_no_run_without_steps(
    tunes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where it leaves checkpoints
    callback = ProfilerCallback(profile_save_path="runs")
    trainer = make_trainer(callback)
    if tunes == "lr_find":
        Tuner(trainer).lr_find(Tuned(), num_training=5)
    else:
        Tuner(trainer).scale_batch_size(Tuned(), method=tunes, max_trials=2, steps_per_trial=2)
    runs = Path("runs")
    assert not runs.exists() or list(runs.iterdir()) == []
    assert callback.run is None
    assert current() is None
    trainer.fit(Tuned())
    assert len(list(runs.iterdir())) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_tuner_inside_a_training_adds_no_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    callback = ProfilerCallback(profile_save_path="runs")
    finder = pytorch_lightning.callbacks.LearningRateFinder(num_training_steps=5)
    make_trainer(callback, finder).fit(Tuned())
    assert steps_of(trace_of(callback)) == list(range(1, 17))
