"""Starting a session: names, headers, recorders, and what is refused before training."""

import json
import os
import re
import shutil
import stat
import sys
import threading
import time

import pytest

from lightning_rlprof.analysis.efficiency.throughput import throughput
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import current
from lightning_rlprof.recording.start import make_header, new_run_name, start_session
from lightning_rlprof.records.run_directory import read_trace
from lightning_rlprof.report.html.page import configuration, render_report
from lightning_rlprof.testing import FakeRecorder
from tests.analysis.models.tiny import MODELS


def test_names_of_runs_sort_by_time_and_do_not_repeat():
    names = {new_run_name() for _ in range(300)}  # as if so many jobs began in one second
    assert len(names) == 300
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}", name) for name in names)


def test_a_header_says_who_records_where_and_with_what():
    config = ProfilerConfig.build(None, stage="actor_update")
    before = time.time_ns()
    header = make_header(config, "name", 1, 2, "cuda")
    assert (header.run_id, header.rank, header.world_size, header.device) == ("name", 1, 2, "cuda")
    assert (header.pid, header.role) == (os.getpid(), "actor")
    assert before <= header.unix_ns <= time.time_ns()
    assert header.config["integrated"]["stage"] == "actor_update"
    assert header.versions["python"] == sys.version.split()[0]
    assert "torch" in header.versions


def test_the_model_of_a_fake_device_tells_the_mfu_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    config = ProfilerConfig.build(None, profile_save_path=str(tmp_path))
    with start_session(config, name="mine", device="cuda", recorders=()) as session:
        session.begin_step(1)
        with stage("actor_update", flops=10**12):
            time.sleep(0.01)
        session.end_step()
    spans = load(tmp_path / "mine")
    assert spans.headers[0].hardware == "NVIDIA H100 80GB HBM3"
    assert spans.headers[0].device == "cuda"
    (took,) = spans.duration_ns[spans.rows(name="actor_update")].tolist()
    assert throughput(spans).column("MFU") == [pytest.approx(1e12 / (took * 989.4e3))]


def model_run(tmp_path, path):
    config = ProfilerConfig.build(None, profile_save_path=str(tmp_path), model=str(path))
    with start_session(config, name="mine", recorders=()) as session:
        session.begin_step(1)
        with stage("actor_update", tokens=10, samples=1):
            pass
        session.end_step()
    return load(tmp_path / "mine")


def test_the_content_of_the_models_configuration_is_kept_in_the_run(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["llama"]))
    for place in (path, tmp_path):
        spans = model_run(tmp_path, place)
        shutil.rmtree(tmp_path / "mine")
        assert spans.headers[0].config["model"] == MODELS["llama"]
        assert throughput(spans).column("FLOPs source") == ["model"]


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_model_that_cannot_be_read_is_a_warning_of_the_run(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    spans = model_run(tmp_path, path)
    assert spans.headers[0].config["model"] is None
    (note,) = [note for note in spans.notes if "gives no MFU" in note.text]
    assert (note.level, str(path) in note.text) == ("warning", True)


def test_a_loop_of_ones_own_is_recorded(tmp_path):
    config = ProfilerConfig.build(None, profile_save_path=str(tmp_path))
    with start_session(config, name="mine") as session:
        session.begin_step(1)
        with stage("actor_update"):
            pass
        session.end_step()
    trace = read_trace(tmp_path / "mine" / "rank-00000.jsonl")
    assert [span.name for span in trace.spans] == ["actor_update", "step"]


def test_own_recorders_replace_the_chosen_ones(tmp_path):
    config = ProfilerConfig.build(None, profile_save_path=str(tmp_path), steps=[1])
    recorder = FakeRecorder()
    with start_session(config, recorders=[recorder]) as session:
        session.begin_step(1)
        session.end_step()
    assert recorder.calls == ["open step-000001", "enter step", "exit step", "close", "finish"]


def upload(finished):
    """Run at the end."""


def test_what_is_passed_in_code_is_in_the_configuration_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RLPROF__STEPS", "[3]")
    config = ProfilerConfig.build(
        {"discrete": True}, stage="actor_update", profile_save_path=str(tmp_path)
    )
    with start_session(config, recorders=[FakeRecorder()], on_finish=upload, name="run"):
        pass
    path = tmp_path / "run" / "rank-00000.jsonl"
    header = read_trace(path).header
    assert header.config["steps"] == [3]
    assert header.config["discrete"] is True
    assert header.config["integrated"]["stage"] == "actor_update"
    assert header.config["recorders"] == ["FakeRecorder"]
    assert header.config["on_finish"] == "upload"
    shown = dict(configuration(load(tmp_path / "run")))
    assert shown["recorders"] == '["FakeRecorder"]'
    assert shown["on_finish"] == "upload"


def test_secrets_are_in_no_file_log_or_report_of_a_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("RLPROF__NSIGHT__WORKER__ENV_VAR", "HF_TOKEN=SECRET,OTHER=SECRET")
    caplog.set_level(0)
    config = ProfilerConfig.build(profile_save_path=str(tmp_path))
    with start_session(config, name="run"):
        pass
    path = tmp_path / "run" / "rank-00000.jsonl"
    assert "SECRET" not in path.read_text() + caplog.text
    header = read_trace(path).header
    assert header.config["nsight"]["worker"]["env-var"] == "HF_TOKEN,OTHER"
    assert "SECRET" not in render_report(load(tmp_path / "run"), {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (FakeRecorder(), "recorders: must be a list, such as [FakeRecorder()]"),
        ([FakeRecorder], "recorders: the class FakeRecorder is not a recorder; pass an instance,"),
        ([None], "recorders: None is not a recorder; pass an instance,"),
        ("memory", "recorders: 'memory' is not a recorder; pass an instance,"),
    ],
)
def test_what_is_no_list_of_recorders_is_refused(wrong, text, tmp_path):
    config = ProfilerConfig.build(profile_save_path=str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(text)):
        start_session(config, recorders=wrong)
    assert list(tmp_path.iterdir()) == []


def test_lightweight_mode_on_a_cpu_says_that_spans_are_all_there_is(tmp_path):
    config = ProfilerConfig.build(
        None,
        profile_save_path=str(tmp_path),
        mstx=True,
        profile_level="level_none",
        profile_with_cpu=False,
    )
    with start_session(config) as session:
        pass
    (note,) = read_trace(session.run / "rank-00000.jsonl").notes
    assert note.text == ("lightweight mode: cpu has no profiler markers, only spans are recorded")


def test_a_rank_that_the_job_does_not_have_is_refused(tmp_path):
    config = ProfilerConfig.build(None, ranks=[3], profile_save_path=str(tmp_path))
    with pytest.raises(ConfigError, match="3"):
        start_session(config, world_size=2)
    assert current() is None


def test_a_process_whose_role_is_not_captured_says_so(tmp_path):
    options = {"profile_save_path": str(tmp_path), "roles": {"actor": {}, "critic": {}}}
    for role, expected in (("rollout", 1), ("critic", 0)):
        config = ProfilerConfig.build(None, **options, role=role)
        with start_session(config, name=role):
            pass
        notes = read_trace(tmp_path / role / "rank-00000.jsonl").notes
        said = [note.text for note in notes if "this process captures nothing:" in note.text]
        assert said == expected * [
            "this process captures nothing: role 'rollout' is not enabled in roles"
        ]


@pytest.mark.parametrize(
    ("verls", "reason"),
    [
        ({"trainer": {"profile_steps": None}}, "no steps are chosen"),
        (
            {"trainer": {"profile_steps": [1]}, "critic": {"profiler": {"discrete": True}}},
            "no role is enabled (critic): set enable or ranks of one",
        ),
    ],
)
def test_keys_of_verl_that_choose_nothing_say_so(verls, reason, tmp_path):
    config = ProfilerConfig.build(verls, profile_save_path=str(tmp_path))
    with start_session(config, name="run"):
        pass
    (note,) = read_trace(tmp_path / "run" / "rank-00000.jsonl").notes
    assert note.text == f"this process captures nothing: {reason}"


def test_a_run_that_asked_for_no_capture_says_nothing(tmp_path):
    config = ProfilerConfig.build(None, profile_save_path=str(tmp_path))
    with start_session(config, name="run"):
        pass
    assert read_trace(tmp_path / "run" / "rank-00000.jsonl").notes == []


def test_a_training_that_goes_to_another_directory_keeps_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    config = ProfilerConfig.build(None, profile_save_path="runs", stage="actor_update")

    class Writes(FakeRecorder):
        def open(self, out):
            out.mkdir(parents=True, exist_ok=True)

    told = []
    with start_session(config, name="mine", recorders=[Writes()], on_finish=told.append) as session:
        os.chdir("work")
        session.begin_step(1)
        with stage("actor_update"):
            pass
        session.end_step()
    run = tmp_path / "runs" / "mine"
    assert session.run == run
    assert (run / "rank-00000" / "step-000001-actor_update").is_dir()
    assert list((tmp_path / "work").iterdir()) == []
    for thread in threading.enumerate():
        if thread.name.startswith("rlprof-finish"):
            thread.join()
    assert [finished.run for finished in told] == [run]


@pytest.mark.parametrize(("rank", "size"), [(-1, 1), (3, 2), (0, 0), (1, 1)])
def test_a_rank_outside_of_its_world_is_refused(rank, size, tmp_path):
    config = ProfilerConfig.build(None, profile_save_path=str(tmp_path))
    with pytest.raises(ConfigError, match=f"rank={rank} of world_size={size}"):
        start_session(config, rank=rank, world_size=size)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["..", ".", "../../x", "/tmp/x", "a/b", "a\\b", "a\0b"])
def test_a_name_that_is_no_directory_of_its_own_is_refused(name, tmp_path):
    config = ProfilerConfig.build(None, profile_save_path=str(tmp_path / "runs"))
    with pytest.raises(ConfigError, match="is not a directory name: remove / and"):
        start_session(config, name=name)
    assert list(tmp_path.iterdir()) == []
