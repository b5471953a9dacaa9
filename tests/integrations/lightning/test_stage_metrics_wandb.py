"""`StageMetrics` beside the rows of W&B, whose numbers stay those of a training without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import Logger

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.integrations.lightning.stage_metrics import StageMetrics
from tests.builders.models import Tiny, TwoOptimizers, loader, make_trainer, of, trace_of

X = "trainer/global_step"
STEP_S = "rlprof/step_s"


class Experiment:
    """Rows as W&B makes them: what is not committed is part of the next one."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.partial: dict[str, Any] = {}

    @property
    def step(self) -> int:
        return len(self.rows)

    def log(self, data: dict[str, Any], commit: bool | None = None) -> None:
        self.partial |= data
        if commit is not False:
            self.rows.append(self.partial)
            self.partial = {}


class WandbLogger(Logger):
    """A double that has the name of Lightning's, by which it is known."""

    name = version = "double"
    LOGGER_JOIN_CHAR = "-"

    def __init__(self, prefix: str = "") -> None:
        self.experiment, self._prefix = Experiment(), prefix

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        prefix = f"{self._prefix}-" if self._prefix else ""
        own = {f"{prefix}{name}": value for name, value in metrics.items()}
        self.experiment.log({**own, X: step})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Plain(Logger):
    name = version = "plain"

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Logs(Tiny):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self._how = how

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, **self._how)
        return loss


class LogsOfTwo(TwoOptimizers):
    def training_step(self, *args: Any) -> Any:
        found = super().training_step(*args)
        self.log("loss", 1.0)
        return found


class LogsItself(Tiny):
    """Calls the logger's own interface, as ``wandb.log`` does."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.logger.experiment.log({"own": batch_idx})
        return super().training_step(batch, batch_idx)


def fit(
    module: Any, folder: Path, logger: Any, metrics: bool = True, **options: Any
) -> tuple[ProfilerCallback, list[dict[str, Any]]]:
    callback = ProfilerCallback(profile_save_path=str(folder))
    callbacks = [callback, StageMetrics()] if metrics else [callback]
    make_trainer(*callbacks, logger=logger, **options).fit(module, loader())
    logger = logger[0] if isinstance(logger, list) else logger
    return callback, logger.experiment.rows


def without_ours(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if "rlprof/" not in name and name != "loss"}
        for row in rows
    ]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Logs, {}),
        (Logs, {"log_every_n_steps": 2}),
        (Logs, {"accumulate_grad_batches": 2}),
        (LogsOfTwo, {}),
        (LogsOfTwo, {"log_every_n_steps": 2, "max_epochs": 2}),
    ],
)
def test_metrics_are_in_the_trainers_own_rows(
    kind: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    _, plain = fit(kind(), tmp_path / "plain", WandbLogger(), metrics=False, **options)
    _, rows = fit(kind(), tmp_path / "ours", WandbLogger(), **options)
    assert without_ours(rows) == without_ours(plain)
    assert len(rows) > 1
    assert all(STEP_S in row for row in rows)


def test_a_prefix_is_that_of_the_logger_and_other_loggers_get_every_row(tmp_path: Path) -> None:
    other = Plain()
    _, rows = fit(Logs(), tmp_path, [WandbLogger("run"), other])
    assert [f"run-{STEP_S}" in row for row in rows] == [True] * 4
    assert [step for step, row in other.rows if STEP_S in row] == [0, 1, 2, 3]
    assert [step for step, row in other.rows if "loss" in row] == [0, 1, 2, 3]


def test_a_row_of_an_epoch_has_the_metrics_of_its_last_step(tmp_path: Path) -> None:
    module = Logs(on_step=False, on_epoch=True)
    callback, rows = fit(module, tmp_path, WandbLogger(), max_epochs=2)
    seconds = [(step.end_ns - step.start_ns) / 1e9 for step in of(trace_of(callback), "step")]
    assert [(row[X], row[STEP_S]) for row in rows] == [(3, seconds[3]), (7, seconds[7])]


def test_rows_of_the_code_have_the_metrics_of_the_step_before(tmp_path: Path) -> None:
    callback, rows = fit(LogsItself(), tmp_path, WandbLogger())
    seconds = [(step.end_ns - step.start_ns) / 1e9 for step in of(trace_of(callback), "step")]
    assert [row["own"] for row in rows] == [0, 1, 2, 3]
    assert STEP_S not in rows[0]
    assert [(row[X], row[STEP_S]) for row in rows[1:]] == [
        (at, pytest.approx(seconds[at])) for at in range(3)
    ]


def test_what_fails_costs_the_metrics_not_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = Experiment.log

    def refuse(self: Experiment, data: dict[str, Any], commit: bool | None = None) -> None:
        if commit is False:
            raise ConnectionError("no network")
        log(self, data)

    monkeypatch.setattr(Experiment, "log", refuse)
    _, rows = fit(Logs(), tmp_path, WandbLogger())
    assert [row[X] for row in rows] == [0, 1, 2, 3]
    assert sum("stage metrics could not be logged" in each.message for each in caplog.records) == 1


@pytest.mark.deep
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", exc_type=ImportError)
    from pytorch_lightning import loggers

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = loggers.WandbLogger(save_dir=tmp_path, offline=True)
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback, StageMetrics(), logger=logger).fit(Logs(), loader())
    rows, summary = logger.experiment.step, dict(logger.experiment.summary)
    wandb.finish()
    last = of(trace_of(callback), "step")[-1]
    assert (rows, summary[X]) == (4, 3)
    assert summary[STEP_S] == pytest.approx((last.end_ns - last.start_ns) / 1e9)
    assert {"loss", "rlprof/actor_update_s", "rlprof/peak_memory_gb"} <= {*summary}
