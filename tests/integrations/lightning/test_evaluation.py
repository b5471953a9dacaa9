"""Validation, test and prediction are no training; alone they are a run of their own."""

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
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.integrations.lightning.stage_metrics import StageMetrics
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import current
from lightning_rlprof.report.summary import run_line, summary
from lightning_rlprof.tables.table import figure, rows_of
from tests.builders.models import (
    PACKAGES,
    Tiny,
    Validated,
    loader,
    make_trainer,
    steps_of,
    trace_of,
)
from tests.integrations.lightning.test_stage_metrics import Logged

VERBS = {"validate": "validation", "test": "test", "predict": "predict"}


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


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_alone_is_a_run_with_a_row_of_its_own(verb: str, tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    run(verb, make_trainer(callback))
    trace, table = trace_of(callback), stages(load(callback.run))
    assert (steps_of(trace), trace.status) == ([1, 2, 3, 4], "finished")
    assert table.column("stage") == [VERBS[verb], "untraced"]
    assert load(callback.run).warnings == ()
    assert current() is None


@pytest.mark.parametrize("verb", VERBS)
def test_rollouts_in_it_are_no_rollouts_of_training(verb: str, tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    run(verb, make_trainer(callback))
    spans = load(callback.run)
    assert {spans.names[at] for at in spans.name[spans.rows(kind="stage")]} == {VERBS[verb]}
    assert "actor_generate" in {spans.names[at] for at in spans.name[spans.rows(kind="region")]}


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


@pytest.mark.parametrize("package", PACKAGES)
def test_both_trainers_record_it(package: Any, tmp_path: Path) -> None:
    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return batch

    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    run("predict", make_trainer(callback, package=package), Module())
    assert steps_of(trace_of(callback)) == [1, 2, 3, 4]


def test_a_capture_counts_its_batches(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path), steps=[2])
    run("predict", make_trainer(callback))
    assert callback.run is not None
    assert [each.name for each in (callback.run / "rank-00000").iterdir()] == ["step-000002"]


@pytest.mark.parametrize("verb", VERBS)
def test_after_a_training_the_newest_run_is_still_the_training(verb: str, tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    trainer = make_trainer(callback)
    run(verb, trainer)
    trainer.fit(Rolls(), loader(), loader())
    first = callback.run
    run(verb, trainer)
    assert callback.run == first
    assert len(list(tmp_path.iterdir())) == 2


def test_an_exception_passes_through_and_ends_the_run(tmp_path: Path) -> None:
    class Breaks(Rolls):
        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.roll(batch) / (1 // (2 - batch_idx))

    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        run("predict", make_trainer(callback), Breaks())
    trace = trace_of(callback)
    assert (steps_of(trace), trace.status) == ([1, 2], "interrupted by ZeroDivisionError")
    assert current() is None


def test_a_rule_for_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path), wrap={"rol": "actor_generate"})
    with pytest.raises(ConfigError, match="did you mean 'roll'"):
        run("validate", make_trainer(callback))
    assert current() is None


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
