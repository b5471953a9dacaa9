"""Windows of torch_npu.profiler on the strict fake: what is called when, for whom.

The analysis after training, with stand-ins for `rlprof ascend parse` that keep to its interface.
"""

import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.recorders import npu_profiler
from lightning_rlprof.recording.recorders.npu_profiler import analyse_captures, build
from lightning_rlprof.records.notes import level_of
from lightning_rlprof.testing import check_recorder, make_header
from tests.builders.npu_run import notes, record, session_of, windows
from tests.doubles.torch_npu.fake import VERSIONS, Device, install

ECHO = "import sys; print('parsing', *sys.argv[1:]); print(); print('done', file=sys.stderr)"
FAILS = "import sys; print('msprof: no space'); sys.exit(3)"
# The analyser forks: a child that lives on holds the output open.
FORKS = "import os, time; os.fork(); print('forked', flush=True); time.sleep(600)"


def said(script: str, captures: list[Path], timeout_s: float = 60.0) -> list[tuple[str, str]]:
    notes: list[tuple[str, str]] = []
    command = (sys.executable, "-c", script)
    analyse_captures(
        captures,
        timeout_s,
        lambda code, text, **facts: notes.append((level_of(code), text)),
        command,
    )
    return notes


def test_it_gets_the_captures_as_arguments_and_its_progress_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger=npu_profiler.__name__):
        notes = said(ECHO, [Path("one_ascend_pt"), Path("a b; $(c)_ascend_pt")])
    assert notes == [("info", "parsing 2 captures, for at most 60 s")]
    assert set(caplog.messages) == {
        "analyse: parsing one_ascend_pt a b; $(c)_ascend_pt",
        "analyse: done",
    }


def test_a_failure_is_noted_with_its_last_words() -> None:
    _, (level, text) = said(FAILS, [Path("one_ascend_pt")])
    assert level == "warning"
    assert text == (
        "parsing failed with status 3 (msprof: no space); run `rlprof ascend parse` later"
    )


def test_after_its_limit_it_is_stopped_with_what_it_forked() -> None:
    before = time.monotonic()
    _, (level, text) = said(FORKS, [Path("one_ascend_pt")], timeout_s=1.0)
    assert time.monotonic() - before < 60
    assert level == "warning"
    assert text.startswith("parsing was stopped after 1 s; run `rlprof ascend parse` later")


def test_what_cannot_be_started_is_noted() -> None:
    notes: list[tuple[str, str]] = []
    command = (os.devnull,)
    analyse_captures(
        [Path("x")], 1.0, lambda code, text, **facts: notes.append((level_of(code), text)), command
    )
    assert notes[1][0] == "warning"
    assert notes[1][1].startswith("parsing could not be started ([Errno 13]")


def test_by_default_it_is_rlprof_analyse_of_this_interpreter() -> None:
    expected = (sys.executable, "-m", "lightning_rlprof", "ascend", "parse")
    assert expected == npu_profiler._COMMAND


WHOLE = {"profile_step_start": 2, "profile_step_end": 4}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return install(monkeypatch)


def starts(device: Device) -> int:
    return device.calls.count(("profile", "start"))


@pytest.mark.parametrize("version", VERSIONS)
def test_stage_all_is_one_window_over_the_wanted_steps(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = install(monkeypatch, version)
    trace = record(tmp_path, mstx=True, **WHOLE)
    assert windows(tmp_path) == ["step-000002"]
    (profile,) = device.profiles
    assert profile.step_num == 4  # after the last step, so the file holds ProfilerStep#2 and #3
    assert starts(device) == 1
    assert (device.printed, device.lost, notes(trace)) == ([], [], [])
    assert notes(trace, "info") == ["captured step-000002 with NpuProfilerRecorder, MstxRecorder"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stage_is_one_window_per_step_named_by_step_and_stage(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = install(monkeypatch, version)
    stages = ["actor_update", "actor_generate"]
    trace = record(tmp_path, rank=3, stage=stages, **WHOLE)
    assert windows(tmp_path, 3) == [
        f"step-00000{step}-{name}" for step in (2, 3) for name in sorted(stages)
    ]
    assert [profile.step_num for profile in device.profiles] == [3, 3, 4, 4]
    assert (starts(device), device.printed, notes(trace)) == (4, [], [])


def test_a_stage_that_comes_twice_in_a_step_has_two_windows(device: Device, tmp_path: Path) -> None:
    with session_of(tmp_path, stage="actor_update") as session:
        session.begin_step(1)
        for _ in range(2):
            with stage("actor_update"):
                pass
        session.end_step()
    assert windows(tmp_path) == ["step-000001-actor_update", "step-000001-actor_update-2"]


def test_listed_steps_have_a_window_each_and_joined_ones_share_it(
    device: Device, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"profile": True}
    with session_of(tmp_path / "alone", **config, steps=[1, 2, 4]) as session:
        _run(session, 4)
    assert windows(tmp_path / "alone") == ["step-000001", "step-000002", "step-000004"]
    joined = {"steps": [1, 2, 4], "profile_continuous_steps": True}
    with session_of(tmp_path / "joined", **config, **joined) as session:
        _run(session, 4)
    assert windows(tmp_path / "joined") == ["step-000001", "step-000004"]
    assert device.printed == []


def _run(session: Any, steps: int) -> None:
    for step in range(1, steps + 1):
        session.begin_step(step)
        session.end_step()


def test_a_training_that_ends_early_still_stops_the_profiler(
    device: Device, tmp_path: Path
) -> None:
    trace = record(tmp_path, steps=3, mstx=True, profile_step_start=2, profile_step_end=9)
    assert torch.autograd._profiler_enabled() is False
    assert device.calls[-1] == ("profile", "stop")
    assert (device.lost, windows(tmp_path)) == ([], ["step-000002"])
    assert notes(trace) == []
    assert device.printed == ["Stop profiler while RECORD"]


def test_what_happens_before_the_first_step_is_in_no_window(device: Device, tmp_path: Path) -> None:
    with session_of(tmp_path, mstx=True) as session:
        with stage("weight_sync"):  # initialisation
            pass
        assert device.profiles == []
        session.begin_step(1)
        assert len(device.profiles) == 1
        session.end_step()
    assert not [call for call in device.calls if "weight_sync" in call]


@pytest.mark.parametrize(
    ("options", "rank", "captured"),
    [
        ({"profile_ranks": [0, 3]}, 3, True),
        ({"profile_ranks": [0, 3]}, 2, False),
        ({"profile_ranks": "all"}, 7, True),
        ({"profile": False}, 0, False),
        ({"roles": {"critic": {}}, "role": "critic"}, 0, True),
        ({"roles": {"actor": {}}, "role": "critic"}, 0, False),
    ],
)
def test_only_wanted_ranks_of_wanted_roles_are_captured(
    options: dict[str, Any], rank: int, captured: bool, device: Device, tmp_path: Path
) -> None:
    record(tmp_path, rank=rank, **{"profile": True, **options})
    assert bool(device.profiles) is captured


def test_metadata_tell_captures_apart(device: Device, tmp_path: Path) -> None:
    record(tmp_path, rank=5, profile=True)
    assert device.profiles[0].metadata == {
        "role": "critic",
        "rlprof_run": "test-run",
        "rlprof_rank": "5",
        "rlprof_window": "step-000001",
    }


def test_the_contract_holds(device: Device, tmp_path: Path) -> None:
    recorder = build(ProfilerConfig.build(profile=True), npu_header())
    check_recorder(recorder, tmp_path)
    assert (starts(device), device.printed) == (3, [])


def npu_header() -> Any:
    return replace(make_header(), device="npu")


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(npu_profiler, "analyse_captures", lambda *given: calls.append(given[:2]))
    return calls


def test_analysis_sees_all_captures_after_training_with_its_limit(
    device: Device, tmp_path: Path, analysed: list[Any]
) -> None:
    options: dict[str, Any] = {"profile_analysis": True}
    with session_of(tmp_path, stage="actor_update", **WHOLE, **options) as session:
        for step in (1, 2, 3, 4):
            session.begin_step(step)
            with stage("actor_update"):
                pass
            session.end_step()
        assert analysed == []
    ((folders, limit),) = analysed
    assert [os.path.basename(folder.parent) for folder in folders] == windows(tmp_path)
    assert limit == 3600.0


def test_without_captures_or_without_being_asked_nothing_is_analysed(
    device: Device, tmp_path: Path, analysed: list[Any]
) -> None:
    record(tmp_path / "none", profile_analysis=True, profile_step_start=8, profile_step_end=9)
    record(tmp_path / "unasked", profile=True)
    assert analysed == []
