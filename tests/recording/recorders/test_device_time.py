"""Device time of stages: on fake events here, on a GPU where there is one."""

from types import SimpleNamespace

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import Marker, stage
from lightning_rlprof.recording.recorders import device_time
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.recording.recorders.device_time import DeviceTimeRecorder, build
from lightning_rlprof.recording.session import Session
from lightning_rlprof.testing import make_header
from tests.builders.fake_events import FakeEvent, FakeStream


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(device_time, "_LAST_WAIT_S", 0.0)
    return FakeStream()


def recorder_of(stream):
    return DeviceTimeRecorder(stream.event, lambda: stream.capturing)


def run(stream, folder, steps):
    """Run steps with one stage each; the device passes as many events as each step says."""
    with Session(ProfilerConfig(), folder, make_header(), [recorder_of(stream)]) as session:
        for number, milliseconds in enumerate(steps, 1):
            session.begin_step(number)
            with stage("actor_update"), Marker("micro_batch", "region"):
                pass
            for time in milliseconds:
                stream.pass_next(time)
            session.end_step()
    loaded = load(folder)
    return [loaded.counters_of(row) for row in loaded.rows(name="actor_update")]


def test_stages_carry_the_time_between_their_fake_events_in_nanoseconds(stream, tmp_path):
    found = run(stream, tmp_path, [[1.0, 3.5], [4.0, 4.0005]])

    assert found == [{"device_ns": 2_500_000}, {"device_ns": 500}]


def test_a_device_that_lags_behind_fills_in_later(stream, tmp_path):
    found = run(stream, tmp_path, [[], [1.0], [2.0, 5.0, 6.5, 7.0]])

    assert found == [{"device_ns": 1_000_000}, {"device_ns": 1_500_000}, None]


def test_events_are_reused(stream, tmp_path):
    run(stream, tmp_path, [[1.0, 2.0]] * 50)

    assert stream.made == 2


def test_regions_have_no_events(stream):
    recorder = recorder_of(stream)

    assert recorder.exit(recorder.enter("micro_batch", "region", 1)) is None
    assert stream.made == 0


def test_nothing_is_put_into_a_graph_that_is_being_captured(stream):
    recorder = recorder_of(stream)
    stream.capturing = True
    assert recorder.enter("actor_generate", "stage", 1) is None
    stream.capturing = False
    token = recorder.enter("actor_generate", "stage", 1)
    stream.capturing = True

    assert recorder.exit(token) is None


def test_a_device_that_hangs_stops_costing_memory(stream, monkeypatch):
    monkeypatch.setattr(device_time, "_MAX_WAITING", 3)
    recorder = recorder_of(stream)
    for _ in range(9):
        recorder.exit(recorder.enter("actor_update", "stage", 1))

    assert stream.made == 6


def test_the_end_waits_for_the_last_event_of_a_fake(stream, monkeypatch):
    monkeypatch.setattr(device_time, "_LAST_WAIT_S", 60.0)
    monkeypatch.setattr(device_time, "sleep", lambda _: stream.pass_next(9.0))
    recorder = recorder_of(stream)
    ask = recorder.exit(recorder.enter("actor_update", "stage", 1))
    stream.pass_next(1.0)
    assert ask() is None

    recorder.finish()

    assert ask() == {"device_ns": 8_000_000}


def test_a_device_without_events_is_refused_where_they_were_asked_for():
    with pytest.raises(
        RecorderError, match="device_time=true: 'cpu' has no events with timestamps"
    ):
        build(ProfilerConfig(device_time=True), make_header(device="cpu"))


def test_a_device_without_events_is_said_where_nobody_asked(caplog):
    assert type(build(ProfilerConfig(), make_header(device="cpu"))) is Recorder
    assert "device times are not recorded: 'cpu' has no events" in caplog.text


def test_a_fake_device_whose_own_events_alone_tell_a_time_is_measured_by_them(stream, monkeypatch):
    class Vague(FakeEvent):
        def elapsed_time(self, end):
            raise RuntimeError("Backend doesn't support elapsedTime.")  # torch_npu 2.6

    def own(*, enable_timing):
        assert enable_timing
        return stream.event()

    monkeypatch.setattr("torch.Event", lambda device, enable_timing: Vague(stream))
    with pytest.raises(RecorderError, match=r"'npu' has no events .*elapsedTime"):
        build(ProfilerConfig(device_time=True), make_header(device="npu"))
    monkeypatch.setattr("torch.npu", SimpleNamespace(Event=own), raising=False)
    recorder = build(ProfilerConfig(device_time=True), make_header(device="npu"))
    assert isinstance(recorder.enter("actor_update", "stage", 1), FakeEvent)
    assert not isinstance(recorder.enter("actor_update", "stage", 1), Vague)


@pytest.mark.cuda
def test_a_known_kernel_takes_its_time_on_a_gpu(tmp_path):
    import torch

    recorder = build(ProfilerConfig(), make_header(device="cuda"))
    cycles = 100_000_000
    torch.cuda._sleep(1000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    token = recorder.enter("actor_update", "stage", 1)
    torch.cuda._sleep(cycles)
    ask = recorder.exit(token)
    torch.cuda.synchronize()
    expected = start.elapsed_time(end) * 1e6

    assert ask()["device_ns"] == pytest.approx(expected, rel=0.05)
