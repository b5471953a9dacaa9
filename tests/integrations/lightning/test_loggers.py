"""Loggers of a Trainer: what they take; metrics and the report for real W&B (offline), MLflow."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger

from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.integrations import end_of_run
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.loaders.load import load
from tests.builders.models import Tiny, loader, make_trainer, of, only_run, trace_of

PROGRAM = """
import sys

from pytorch_lightning.loggers import MLFlowLogger, WandbLogger

from lightning_rlprof import ProfilerCallback, StageMetrics
from tests.builders.models import Tiny, loader, make_trainer

class Logged(Tiny):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

folder = sys.argv[1]
make_trainer(
    ProfilerCallback(profile_save_path=f"{folder}/runs", log_report=True),
    StageMetrics(),
    logger=[WandbLogger(save_dir=folder, offline=True), MLFlowLogger(save_dir=f"{folder}/mlruns")],
).fit(Logged(), loader())
"""


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training with both loggers, which leave processes and variables behind in their own."""
    folder = tmp_path_factory.mktemp("loggers")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        capture_output=True, text=True, timeout=300, check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": ":".join(sys.path),
             "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB__SERVICE_WAIT": "300"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.deep
def test_wandb_offline_gets_metrics_and_the_report(logged: Path) -> None:
    run = next((logged / "runs").iterdir())
    records = list(wandb_records(next(logged.glob("wandb/*/*.wandb"))))
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in each.item}
        for each in (record.history for record in records if record.HasField("history"))
    ]
    joined = [row for row in rows if "rlprof/step_s" in row]
    assert [row["trainer/global_step"] for row in joined] == [0, 1, 2, 3]
    assert all("loss" in row for row in joined)  # beside the training's own
    assert all(row["rlprof/actor_update_tokens_per_s"] > 0 for row in joined)
    [artifact] = [record.artifact for record in records if record.HasField("artifact")]
    assert (artifact.name, artifact.type) == (f"rlprof-{run.name}", "report")
    [entry] = artifact.manifest.contents
    assert entry.path == "report.html"
    assert Path(entry.local_path).read_bytes() == (run / "report.html").read_bytes()


@pytest.mark.deep
def test_mlflow_gets_metrics_and_the_report(logged: Path) -> None:
    run = next((logged / "runs").iterdir())
    [metric] = logged.glob("mlruns/*/*/metrics/rlprof/step_s")
    assert [int(line.split()[2]) for line in metric.read_text().splitlines()] == [0, 1, 2, 3]
    [page] = logged.glob("mlruns/*/*/artifacts/rlprof/report.html")
    assert page.read_bytes() == (run / "report.html").read_bytes()


def wandb_records(path: Path) -> Iterator[Any]:
    """Read W&B's file: LevelDB's log of records, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:  # no header fits into the rest of this block
            at += 32_768 - at % 32_768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


class Logged(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Server(CSVLogger):
    """A logger whose server refuses the metrics of one step."""

    refuses: int | None = None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if step == self.refuses:
            raise ConnectionError("no server")
        super().log_metrics(metrics, step)


@pytest.mark.parametrize("loggers", [1, 2])
def test_what_a_logger_takes_is_a_phase_of_the_loop(tmp_path: Path, loggers: int) -> None:
    own = [CSVLogger(tmp_path / str(number)) for number in range(loggers)]
    callback = ProfilerCallback(profile_save_path=str(tmp_path / "runs"))
    make_trainer(callback, logger=own).fit(Logged(), loader())
    trace = trace_of(callback)
    assert [span.kind for span in of(trace, "logging")] == ["region"] * 4 * loggers
    assert "logging" in stages(load(callback.run)).column("stage")
    for each in own:
        assert "log_metrics" not in vars(each)  # It is its own again.
        rows = (Path(each.log_dir) / "metrics.csv").read_text().splitlines()
        assert len(rows) == 1 + 4


def test_what_a_logger_raises_is_the_trainings_own(tmp_path: Path) -> None:
    callback, server = ProfilerCallback(profile_save_path=str(tmp_path / "runs")), Server(tmp_path)
    server.refuses = 2
    with pytest.raises(ConnectionError, match="no server"):
        make_trainer(callback, logger=server).fit(Logged(), loader())
    assert "log_metrics" not in vars(server)
    assert len(of(trace_of(callback), "logging")) == 3


class MLFlowLogger:
    """The part of MLflow's logger that the report needs; the real one is tested above."""

    run_id = "7"

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.logged = error, []

    @property
    def experiment(self) -> "MLFlowLogger":
        return self

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str | None = None) -> None:
        if self.error:
            raise self.error
        self.logged.append((run_id, Path(local_path).name, artifact_path))


def test_a_logger_that_fails_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(tmp_path)
    broken, whole = MLFlowLogger(ConnectionError("no server")), MLFlowLogger()
    end_of_run.log_report(run, [broken, object(), whole])
    assert whole.logged == [("7", "report.html", "rlprof")]
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"{run / 'report.html'} could not be logged: no server"
    ]


def test_without_such_a_logger_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(tmp_path, log_report=True)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "log_report: the Trainer has no WandbLogger or MLFlowLogger; "
        f"write the report with rlprof report {run}"
    ]
    assert not (run / "report.html").exists()


def test_a_report_that_fails_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end_of_run.log_report(tmp_path / "gone", [MLFlowLogger()])
    [record] = caplog.records
    assert record.message.startswith(f"the report of {tmp_path / 'gone'} failed: ")


def trained(folder: Path, **options: Any) -> Path:
    callback = ProfilerCallback(profile_save_path=str(folder / "runs"), **options)
    make_trainer(callback).fit(Tiny(), loader())
    assert only_run(folder / "runs")
    assert callback.run is not None
    return callback.run
