"""Captures of a training: which files they leave, and what is said when there are none."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.profilers import PyTorchProfiler
from torch.utils.data import DataLoader, Dataset

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import current
from lightning_rlprof.testing import FakeRecorder
from tests.builders.models import Tiny, loader, make_trainer, of, recorded, trace_of


def captured(
    folder: Path, module: Any = None, **options: Any
) -> tuple[ProfilerCallback, list[str]]:
    recorder = FakeRecorder()
    callback = ProfilerCallback(profile_save_path=str(folder), recorders=[recorder], **options)
    make_trainer(callback).fit(module or Tiny(), loader())
    return callback, recorder.calls


def warnings_of(callback: ProfilerCallback) -> list[str]:
    return [note.text for note in trace_of(callback).notes if note.level == "warning"]


def test_a_capture_by_step_writes_one_file_with_role_step_rank_pid(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path), steps=[2], role="actor")
    make_trainer(callback).fit(Tiny(), loader())
    assert callback.run is not None
    (folder,) = (callback.run / "rank-00000").iterdir()
    assert folder.name == "step-000002"
    (file,) = folder.iterdir()
    assert "actor" in file.name
    assert str(os.getpid()) in file.name
    assert "2" in file.name
    assert file.name.endswith(".json.gz")
    assert json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_a_capture_by_stage_writes_a_folder_per_stage_and_step(tmp_path: Path) -> None:
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path), stage="actor_update", steps=[1, 3], role="actor"
    )
    make_trainer(callback).fit(Tiny(), loader())
    assert callback.run is not None
    folders = sorted((callback.run / "rank-00000").iterdir())
    assert [folder.name for folder in folders] == [
        "step-000001-actor_update", "step-000003-actor_update",
    ]  # fmt: skip
    for folder in folders:
        (file,) = folder.iterdir()
        assert file.name.endswith(".json.gz")


def test_a_captured_step_says_so_and_its_neighbours_do_not(tmp_path: Path) -> None:
    callback, _ = captured(tmp_path, steps=[2])
    flags = [(span.counters or {}).get("capture") for span in of(trace_of(callback), "step")]
    assert flags == [None, 1, None, None]


def test_recorders_see_the_spans_of_the_captured_step_alone(tmp_path: Path) -> None:
    _, calls = captured(tmp_path, steps=[2])
    inner = [call for call in calls if call == "enter actor_update"]
    assert calls[0] == "open step-000002"
    assert calls[-2:] == ["close", "finish"]
    assert len(inner) == 2  # the mark, and Lightning's part of the update


def test_default_captures_the_first_step_when_switched_on(tmp_path: Path) -> None:
    _, calls = captured(tmp_path, profile=True)
    assert [call for call in calls if call.startswith("open")] == ["open step-000001"]


def test_an_explicit_false_wins_over_every_capture_option(tmp_path: Path) -> None:
    callback, calls = captured(tmp_path, profile=False, steps=[1, 2], stage="actor_update")
    assert calls == ["finish"]
    assert warnings_of(callback) == []


def test_a_rank_that_is_not_wanted_captures_nothing_and_does_not_warn(tmp_path: Path) -> None:
    callback, calls = captured(tmp_path, steps=[1], ranks=[0])
    assert "open step-000001" in calls
    assert warnings_of(callback) == []


def test_a_step_that_was_never_reached_is_named_at_the_end(tmp_path: Path) -> None:
    callback, _ = captured(tmp_path, steps=[9])
    (text,) = warnings_of(callback)
    assert text == "nothing was captured: steps to capture: [9]; last complete step: 4"


def test_a_stage_that_was_never_seen_is_named_at_the_end(tmp_path: Path) -> None:
    callback, _ = captured(tmp_path, stage="critic_update", steps="all")
    (text,) = warnings_of(callback)
    assert text.startswith("nothing was captured: no stage to capture began in those steps")
    assert "actor_update" in text


def test_a_stage_that_was_never_seen_in_the_one_wanted_step_is_named(tmp_path: Path) -> None:
    callback, _ = captured(tmp_path, stage="critic_update", steps=[2])
    (text,) = warnings_of(callback)
    assert "no stage to capture began in those steps; stages there:" in text
    assert "actor_update" in text


def test_nothing_is_said_when_no_capture_was_asked_for(tmp_path: Path) -> None:
    assert recorded(tmp_path).notes == []


def test_a_rank_beyond_the_world_is_refused_before_training(tmp_path: Path) -> None:
    module = Tiny()
    callback = ProfilerCallback(profile_save_path=str(tmp_path), ranks=[0, 3], steps=[1])
    with pytest.raises(ConfigError, match=r"ranks: \[0, 3\] holds rank 3, .* has 1 "):
        make_trainer(callback).fit(module, loader())
    assert module.losses == []
    assert list(tmp_path.iterdir()) == []
    assert current() is None


def test_an_exception_in_a_captured_step_closes_the_capture(tmp_path: Path) -> None:
    recorder, module = FakeRecorder(), Tiny()
    module.on_batch = lambda batch_idx: 1 / (1 - batch_idx)
    callback = ProfilerCallback(profile_save_path=str(tmp_path), steps=[1, 2], recorders=[recorder])
    with pytest.raises(ZeroDivisionError):
        make_trainer(callback).fit(module, loader())
    assert recorder.calls[-2:] == ["close", "finish"]
    assert recorder.calls.count("enter actor_update") == recorder.calls.count("exit actor_update")


def test_lightweight_mode_on_a_cpu_says_once_that_spans_alone_are_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path), mstx=True, profile_level="level_none",
        profile_with_cpu=False, profile_step_end=4,
    )  # fmt: skip
    with caplog.at_level("INFO"):
        make_trainer(callback).fit(Tiny(), loader())
    said = "lightweight mode: cpu has no profiler markers, only spans are recorded"
    assert [note.text for note in trace_of(callback).notes if "lightweight" in note.text] == [said]
    assert sum(said in record.message for record in caplog.records) == 1
    assert warnings_of(callback) == []


@pytest.mark.parametrize("key", [{"profile_with_cpu": False}, {"profile_level": "level_none"}])
def test_a_configuration_that_leaves_nothing_to_capture_warns_at_the_end(
    key: dict[str, Any], tmp_path: Path
) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path), profile=True, **key)
    make_trainer(callback).fit(Tiny(), loader())
    (text,) = warnings_of(callback)
    assert text.startswith("nothing was captured: no profiler is enabled")


class Own(PyTorchProfiler):
    """Whose deletion is quiet where its fit never began, unlike that of Lightning's."""

    def __del__(self) -> None: ...


def test_the_trainers_own_torch_profiler_is_refused_beside_ours(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path), steps=[2])
    with pytest.raises(ConfigError, match=r"PyTorchProfiler and our torch\.profiler cannot"):
        make_trainer(callback, profiler=Own()).fit(Tiny(), loader())
    assert current() is None


class Rows(Dataset[torch.Tensor]):
    """Generates in the worker of a data loader."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with stage("actor_generate"):
            return torch.ones(4)


@pytest.mark.parametrize(
    "way", ["fork", *(pytest.param(way, marks=pytest.mark.deep) for way in ("spawn", "forkserver"))]
)
def test_marks_in_a_worker_of_the_data_loader_are_said_at_the_end(way: str, tmp_path: Path) -> None:
    data = DataLoader(Rows(), num_workers=1, multiprocessing_context=way, persistent_workers=True)
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback).fit(Tiny(), data)
    assert warnings_of(callback) == [
        "marks in child processes were not recorded, the first one was actor_generate in a "
        "DataLoader worker. Mark in the training process, or use num_workers=0"
    ]


def test_a_chosen_stage_that_the_module_never_marks_is_said_at_the_end(tmp_path: Path) -> None:
    callback, _ = captured(tmp_path, stage=["actor_update", "critic_update"], steps="all")
    assert warnings_of(callback) == [
        "stage critic_update was never marked; stages seen: actor_update. "
        'Mark it with stage("critic_update"), or add a rule: wrap: {METHOD: critic_update}'
    ]


def test_options_without_effect_on_this_device_are_said_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path), steps=[1, 1000], profile_level="level1",
        profile_export_type="db", profile_analysis=True,
    )  # fmt: skip
    make_trainer(callback).fit(Tiny(), loader())
    said = warnings_of(callback)
    assert said == [
        "steps never reached: 1000; last complete step: 4",
        "no effect on cpu: integrated.profile_export_type, integrated.profile_level, "
        "integrated.profile_analysis; they are for Ascend",
    ]
    assert {*said} <= {record.message for record in caplog.records}


def test_a_stage_that_lightnings_loop_stands_for_was_marked(tmp_path: Path) -> None:
    class Plain(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).mean()

    callback, _ = captured(tmp_path, stage="actor_update", steps="all", module=Plain())
    assert warnings_of(callback) == []
