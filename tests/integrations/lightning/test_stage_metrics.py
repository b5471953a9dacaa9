"""`StageMetrics`: what reaches each logger, at which x, from which ranks."""

import csv
import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_rlprof.analysis.efficiency.peak_flops import DEVICES
from lightning_rlprof.analysis.models.flops import forward
from lightning_rlprof.analysis.models.huggingface import read_model
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning import stage_metrics
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.integrations.lightning.stage_metrics import StageMetrics
from lightning_rlprof.recording import annotations
from lightning_rlprof.testing import FakeRecorder
from tests.analysis.models.tiny import MODELS
from tests.builders.models import (
    PACKAGES,
    Tiny,
    TwoOptimizers,
    loader,
    make_trainer,
    module_of,
    of,
    only_run,
    steps_of,
    trace_of,
)

UPDATE = ("rlprof/actor_update_s", "rlprof/actor_update_share", "rlprof/actor_update_tokens_per_s")
ALWAYS = ("rlprof/step_s", "rlprof/peak_memory_gb")


class Logged:
    """The scalars of one log directory: name to [(x, value), …]."""

    def __init__(self, folder: Path) -> None:
        self._events = EventAccumulator(str(folder))
        self._events.Reload()

    def names(self) -> set[str]:
        return {name for name in self._events.Tags()["scalars"] if name.startswith("rlprof/")}

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in self._events.Scalars(name)]


def logged(folder: Path, module: Any = None, data: Any = None, **options: Any) -> Any:
    callback = ProfilerCallback(profile_save_path=str(folder / "runs"))
    logger = TensorBoardLogger(folder / "logs", name="", version="")
    trainer = make_trainer(callback, StageMetrics(), logger=logger, **options)
    trainer.fit(module or Tiny(), loader() if data is None else data)
    return callback, Logged(folder / "logs")


def test_every_step_is_logged_at_the_trainers_own_x(tmp_path: Path) -> None:
    callback, events = logged(tmp_path)
    assert events.names() == {*UPDATE, *ALWAYS}
    trace = trace_of(callback)
    stages, steps = of(trace, "actor_update"), of(trace, "step")
    for at, (stage, step) in enumerate(zip(stages, steps, strict=True)):
        seconds = (stage.end_ns - stage.start_ns) / 1e9
        whole = (step.end_ns - step.start_ns) / 1e9
        expected = dict(zip(UPDATE, (seconds, seconds / whole, 8 / seconds), strict=True))
        expected["rlprof/step_s"] = whole
        for name, value in expected.items():
            assert events.of(name)[at] == (at, pytest.approx(value, rel=1e-5))


@pytest.mark.parametrize("package", PACKAGES)
def test_both_trainers_log(package: Any, tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path / "runs"))
    logger = package.loggers.TensorBoardLogger(tmp_path / "logs", name="", version="")
    make_trainer(callback, StageMetrics(), package=package, logger=logger).fit(
        module_of(package), loader()
    )
    assert len(Logged(tmp_path / "logs").of("rlprof/step_s")) == 4


def test_x_counts_batches_not_the_steps_of_all_optimizers(tmp_path: Path) -> None:
    module = TwoOptimizers()
    _, events = logged(tmp_path, module)
    assert module.trainer.global_step == 16
    assert [x for x, _ in events.of("rlprof/step_s")] == [0, 1, 2, 3]


def test_x_under_gradient_accumulation_is_the_trainers(tmp_path: Path) -> None:
    class Logs(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    _, events = logged(tmp_path, Logs(), accumulate_grad_batches=2)
    assert [x for x, _ in events.of("rlprof/step_s")] == [x for x, _ in events.of("loss")]


def test_a_stage_that_a_step_did_not_have_is_not_logged_for_it(tmp_path: Path) -> None:
    class Sometimes(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if batch_idx % 2:
                return super().training_step(batch, batch_idx)
            return self.layer(batch).pow(2).mean()

    _, events = logged(tmp_path, Sometimes())
    assert [x for x, _ in events.of("rlprof/actor_update_s")] == [1, 3]
    assert [x for x, _ in events.of("rlprof/step_s")] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None:UserWarning")
def test_a_batch_of_none_does_not_log_the_step_before_again(tmp_path: Path) -> None:
    class Gappy:
        def __iter__(self) -> Any:
            yield from (torch.ones(1, 4), None, torch.ones(1, 4))

    _, events = logged(tmp_path, data=Gappy())
    assert len(events.of("rlprof/step_s")) == 2


class Plain(Logger):
    """A logger that knows nothing of ranks: a line per row, with the process that wrote it."""

    name = version = "plain"

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self.path.open("a") as file:
            print(os.getpid(), step, json.dumps(metrics), file=file)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Slower(Tiny):
    """Rank 1 takes longer, and has a stage of its own."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.global_rank:
            with annotations.stage("compute_reward"):
                time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def test_rank_0_logs_means_and_maxima_of_all_ranks(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path / "runs"))
    make_trainer(
        callback, StageMetrics(), logger=Plain(tmp_path / "rows"), devices=2, strategy="ddp_fork",
        use_distributed_sampler=False,
    ).fit(Slower(), loader())  # fmt: skip
    rows = [line.split(maxsplit=2) for line in (tmp_path / "rows").read_text().splitlines()]
    traces = {trace.header.rank: trace for trace in only_run(tmp_path / "runs")}
    pid = str(traces[0].header.pid)
    assert [row[:2] for row in rows] == [[pid, str(x)] for x in range(4)]
    # backward waits for the other rank: what that sent after its step before has arrived
    for x in range(1, 4):
        found = json.loads(rows[x][2])
        own, *late = (
            seconds(traces[rank], "step", at) for rank, at in ((0, x), (1, x), (1, x - 1))
        )
        assert found["rlprof/ranks"] == 2
        assert found["rlprof/step_s"] in [pytest.approx((own + each) / 2) for each in late]
        assert found["rlprof/step_s_max"] in [pytest.approx(max(own, each)) for each in late]
        late = [seconds(traces[1], "compute_reward", at) for at in (x, x - 1)]
        assert found["rlprof/compute_reward_s"] in [pytest.approx(each) for each in late]
        own, *late = (
            8 / seconds(traces[rank], "actor_update", at)
            for rank, at in ((0, x), (1, x), (1, x - 1))
        )
        rate = found["rlprof/actor_update_tokens_per_s"]
        assert rate in [pytest.approx(own + each) for each in late]


def seconds(trace: Any, name: str, at: int) -> float:
    span = of(trace, name)[at]
    return (span.end_ns - span.start_ns) / 1e9


def test_a_store_that_fails_leaves_the_metrics_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise ConnectionError("the store is gone")

    monkeypatch.setattr(stage_metrics, "default_store", Gone)
    monkeypatch.setattr(pytorch_lightning.Trainer, "world_size", 2)
    _, events = logged(tmp_path)
    assert events.names() == {*UPDATE, *ALWAYS}
    assert [one.message for one in caplog.records if "the store is gone" in one.message] == [
        "stage metrics could not be logged: the store is gone"
    ]


# ---- MFU


class Counts(Tiny):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        with annotations.stage("compute_reward", flops=2_000_000):
            pass
        return super().training_step(batch, batch_idx)


def mfu_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tflops: float | None = 1e6, **options: Any
) -> tuple[Any, dict[str, list[float]]]:
    device = None if tflops is None else replace(DEVICES[0], tflops=tflops)
    monkeypatch.setattr(stage_metrics, "recorded_device", lambda header: device)
    callback = ProfilerCallback(profile_save_path=str(folder / "runs"), **options)
    logger = TensorBoardLogger(folder / "logs", name="", version="")
    make_trainer(callback, StageMetrics(), logger=logger).fit(Counts(), loader())
    events = Logged(folder / "logs")
    names = [name for name in events.names() if name.endswith("_mfu")]
    return trace_of(callback), {name: [value for _, value in events.of(name)] for name in names}


def test_mfu_is_of_counted_flops_or_of_tokens_and_the_model_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["llama"]))
    trace, found = mfu_of(tmp_path, monkeypatch, model=str(path))
    one = forward(read_model(path), [1])  # tokens without samples: without attention
    flops = {"compute_reward": 2_000_000, "actor_update": 8 * 3 * (one.forward - one.attention)}
    assert found == {
        f"rlprof/{name}_mfu": [
            pytest.approx(each / seconds(trace, name, at) / 1e18, rel=1e-5) for at in range(4)
        ]
        for name, each in flops.items()
    }


def test_a_model_of_an_unknown_type_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba2"}')
    _, found = mfu_of(tmp_path, monkeypatch, model=str(path))
    assert list(found) == ["rlprof/compute_reward_mfu"]
    assert caplog.text.count("no MFU from the model: unknown model type 'mamba2'") == 1


def test_mfu_above_the_peak_is_left_out_as_is_one_without_a_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mfu_of(tmp_path / "above", monkeypatch, 1e-9)[1] == {}
    assert mfu_of(tmp_path / "unknown", monkeypatch, None)[1] == {}


# ---- other loggers


def fit_with(logger: Any, folder: Path) -> Any:
    callback = ProfilerCallback(profile_save_path=str(folder / "runs"))
    make_trainer(callback, StageMetrics(), logger=logger).fit(Tiny(), loader())
    return trace_of(callback)


def test_csv(tmp_path: Path) -> None:
    trace = fit_with(CSVLogger(tmp_path, name="", version=""), tmp_path)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    assert {*UPDATE, *ALWAYS} <= {*rows[0]}
    found = [float(row["rlprof/step_s"]) for row in rows]
    assert found == pytest.approx([seconds(trace, "step", at) for at in range(4)])


@pytest.mark.deep
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    pytest.importorskip("mlflow", exc_type=ImportError)
    from pytorch_lightning.loggers import MLFlowLogger

    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path / 'mlruns'}")
    trace = fit_with(logger, tmp_path)
    for name in (*UPDATE, *ALWAYS):
        rows = logger.experiment.get_metric_history(logger.run_id, name)
        assert sorted(row.step for row in rows) == [0, 1, 2, 3]
    rows = sorted(logger.experiment.get_metric_history(logger.run_id, "rlprof/step_s"),
                  key=lambda row: row.step)  # fmt: skip
    expected = [seconds(trace, "step", at) for at in range(4)]
    assert [row.value for row in rows] == pytest.approx(expected)


@pytest.mark.parametrize("before", [[], [StageMetrics()]])
def test_the_wrong_order_is_refused(before: list[Any], tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    order = [*before, *([callback] if before else [StageMetrics()])]
    with pytest.raises(ConfigError, match=r"callbacks=\[ProfilerCallback\(…\), StageMetrics"):
        make_trainer(*order).fit(Tiny(), loader())


def test_without_a_logger_and_in_fast_dev_run_nothing_breaks(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    module = Tiny()
    make_trainer(callback, StageMetrics()).fit(module, loader())
    make_trainer(callback, StageMetrics(), fast_dev_run=True).fit(module, loader())
    assert len(module.losses) == 5


def test_a_logger_that_fails_costs_the_metrics_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = TensorBoardLogger(tmp_path / "logs", name="", version="")

    def refuse(metrics: dict[str, float], step: int) -> None:
        if any(name.startswith("rlprof/") for name in stage_metrics):
            raise ConnectionError("no network")

    monkeypatch.setattr(logger, "log_metrics", refuse)
    callback, module = ProfilerCallback(profile_save_path=str(tmp_path / "runs")), Tiny()
    make_trainer(callback, StageMetrics(), logger=logger).fit(module, loader())
    assert len(module.losses) == 4
    assert steps_of(trace_of(callback)) == [1, 2, 3, 4]
    said = [one for one in caplog.records if one.name.startswith("lightning_rlprof")]
    assert [one.levelno for one in said] == [logging.WARNING]  # once, not at every step


def test_log_every_n_steps_is_respected(tmp_path: Path) -> None:
    _, events = logged(tmp_path, log_every_n_steps=2)
    assert [x for x, _ in events.of("rlprof/step_s")] == [1, 3]


def test_a_row_is_of_all_batches_since_the_one_before(tmp_path: Path) -> None:
    class EverySecond(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if batch_idx % 2 == 0:
                return super().training_step(batch, batch_idx)
            return self.layer(batch).pow(2).mean()

    callback, events = logged(tmp_path, EverySecond(), log_every_n_steps=2)
    trace = trace_of(callback)
    whole = [step.end_ns - step.start_ns for step in of(trace, "step")]
    own = [stage.end_ns - stage.start_ns for stage in of(trace, "actor_update")]
    for name, expected in {
        "rlprof/step_s": [(whole[at] + whole[at + 1]) / 2e9 for at in (0, 2)],
        "rlprof/actor_update_s": [each / 2e9 for each in own],
        "rlprof/actor_update_share": [
            each / (whole[at] + whole[at + 1]) for each, at in zip(own, (0, 2), strict=True)
        ],
        "rlprof/actor_update_tokens_per_s": [8 / (each / 1e9) for each in own],
    }.items():
        assert events.of(name) == [
            (x, pytest.approx(value, rel=1e-5)) for x, value in zip((1, 3), expected, strict=True)
        ], name


def test_a_logger_that_fails_silences_no_other(tmp_path: Path) -> None:
    class Broken(TensorBoardLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            raise ConnectionError("no network")

    broken = Broken(tmp_path / "broken", name="", version="")
    logger = TensorBoardLogger(tmp_path / "logs", name="", version="")
    callback = ProfilerCallback(profile_save_path=str(tmp_path / "runs"))
    make_trainer(callback, StageMetrics(), logger=[broken, logger]).fit(Tiny(), loader())
    assert len(Logged(tmp_path / "logs").of("rlprof/step_s")) == 4


def test_metrics_and_captures_go_together(tmp_path: Path) -> None:
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path / "runs"), steps=[2], recorders=[FakeRecorder()]
    )
    logger = TensorBoardLogger(tmp_path / "logs", name="", version="")
    make_trainer(callback, StageMetrics(), logger=logger).fit(Tiny(), loader())
    events = Logged(tmp_path / "logs")
    assert len(events.of("rlprof/step_s")) == 4
    assert events.names() == {*UPDATE, *ALWAYS}


def test_the_callback_of_the_environment_may_stand_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPROF", "1")
    monkeypatch.setenv("RLPROF__INTEGRATED__PROFILE_SAVE_PATH", str(tmp_path / "runs"))
    logger = TensorBoardLogger(tmp_path / "logs", name="", version="")
    trainer = make_trainer(StageMetrics(), logger=logger)
    assert isinstance(trainer.callbacks[-1], ProfilerCallback)
    trainer.fit(Tiny(), loader())
    stages = of(trace_of(trainer.callbacks[-1]), "actor_update")
    seconds = [(stage.end_ns - stage.start_ns) / 1e9 for stage in stages]
    logged = Logged(tmp_path / "logs").of("rlprof/actor_update_s")
    assert [value for _, value in logged] == pytest.approx(seconds)


def test_times_of_captured_steps_are_left_out_where_a_row_has_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_step = {True: 9.0, False: 1.0}
    monkeypatch.setattr(stage_metrics, "_memory_gb", lambda _, keep_peak: of_step[keep_peak])

    class Slow(FakeRecorder):
        def open(self, out: Path) -> None:
            time.sleep(0.2)

    callback = ProfilerCallback(
        profile_save_path=str(tmp_path / "runs"), stage="actor_update", recorders=[Slow()]
    )
    logger = TensorBoardLogger(tmp_path / "logs", name="", version="")
    trainer = make_trainer(callback, StageMetrics(), logger=logger, log_every_n_steps=4)
    trainer.fit(Tiny(), loader())
    trace = trace_of(callback)
    steps = {span.step: (span.end_ns - span.start_ns) / 1e9 for span in of(trace, "step")}
    assert steps[1] > 0.2
    ((x, found),) = Logged(tmp_path / "logs").of("rlprof/step_s")
    others = [seconds for step, seconds in steps.items() if step != 1]
    assert (x, found) == (3, pytest.approx(sum(others) / 3, rel=1e-5))
    assert Logged(tmp_path / "logs").of("rlprof/peak_memory_gb") == [(3, 9.0)]
