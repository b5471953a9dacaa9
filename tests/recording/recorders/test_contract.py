"""Every recorder keeps the contract that `check_recorder` states, and a broken one does not."""

import inspect
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.recording.recorders.device_time import DeviceTimeRecorder
from lightning_rlprof.recording.recorders.memory import (
    MemoryRecorder,
    MemorySnapshotRecorder,
    MemoryTimelineRecorder,
)
from lightning_rlprof.recording.recorders.mstx import MstxRecorder
from lightning_rlprof.recording.recorders.npu_profiler import NpuProfilerRecorder
from lightning_rlprof.recording.recorders.nsight import NsightRecorder
from lightning_rlprof.recording.recorders.nvtx import NvtxRecorder
from lightning_rlprof.recording.recorders.torch_profiler import (
    TorchProfilerRecorder,
)
from lightning_rlprof.records.records import Number
from lightning_rlprof.testing import FakeRecorder, check_recorder, make_header
from tests.builders.fake_events import FakeStream
from tests.doubles.torch_npu.fake import install

RECORDERS: dict[str, Callable[[], Recorder]] = {
    "base": Recorder,
    "device_time on a fake stream": lambda: DeviceTimeRecorder(FakeStream().event),
    "fake": FakeRecorder,
    "memory": lambda: MemoryRecorder("cpu"),
    "memory_snapshot without a device": lambda: MemorySnapshotRecorder(
        "cpu", 0, max_entries=1, stack_depth=1
    ),
    "memory_timeline": lambda: MemoryTimelineRecorder("cpu", 10.0),
    "mstx on a fake torch_npu": lambda: _of("mstx", {"tools": ["mstx"]}),
    "npu_profiler on a fake torch_npu": lambda: _of("npu_profiler", {"profile": True}),
    "nsight without nsys": lambda: NsightRecorder(ProfilerConfig(), make_header()),
    "nvtx without a tool": NvtxRecorder,
    "torch_profiler": lambda: TorchProfilerRecorder(ProfilerConfig(), make_header()),
}


def _of(name: str, options: dict[str, Any]) -> Recorder:
    recorder: Recorder = import_module(f"lightning_rlprof.recording.recorders.{name}").build(
        ProfilerConfig.build(**options), make_header(device="npu")
    )
    return recorder


METHODS = ("open", "enter", "exit", "mark", "close", "finish")


@pytest.mark.parametrize("name", RECORDERS)
def test_every_recorder_keeps_the_contract(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    check_recorder(RECORDERS[name](), tmp_path)


def test_every_recorder_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    folder = Path(inspect.getfile(Recorder)).parent
    rooms = [
        import_module(f"lightning_rlprof.recording.recorders.{name}")
        for name in (path.stem for path in folder.glob("*.py"))
    ]
    kinds = {
        kind
        for room in rooms
        for kind in vars(room).values()
        if isinstance(kind, type) and issubclass(kind, Recorder)
    }
    built = {type(make()) for make in RECORDERS.values()}
    assert kinds == built - {FakeRecorder}


def test_every_method_has_the_parameters_of_the_base() -> None:
    for kind in (
        DeviceTimeRecorder,
        MemoryRecorder,
        MstxRecorder,
        NpuProfilerRecorder,
        NvtxRecorder,
        TorchProfilerRecorder,
    ):
        for method in METHODS:
            mine, base = (inspect.signature(getattr(c, method)) for c in (kind, Recorder))
            assert list(mine.parameters) == list(base.parameters), (kind, method)


def test_the_base_is_the_recorder_that_does_nothing(tmp_path: Path) -> None:
    recorder = Recorder()
    assert recorder.open(tmp_path / "window") is None
    assert recorder.exit(recorder.enter("actor_update", "stage", 1)) is None
    assert (recorder.close(), recorder.finish()) == (None, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_recorder_that_raises_breaks_the_contract(method: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"asked to fail at {method}"):
        check_recorder(FakeRecorder(fail_at=method), tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, "3", None, [1]])
def test_a_counter_that_is_no_finite_number_breaks_the_contract(value: Any, tmp_path: Path) -> None:
    class Counting(Recorder):
        def exit(self, token: object) -> Mapping[str, Number]:
            return {"good": 1, "bad": value}

    with pytest.raises(AssertionError, match=r"must be finite numbers by name, got \{'bad'"):
        check_recorder(Counting(), tmp_path)


def test_a_recorder_that_opens_only_once_breaks_the_contract(tmp_path: Path) -> None:
    class Once(Recorder):
        opened = False

        def open(self, out: Path) -> None:
            if self.opened:
                raise RuntimeError("opened twice")
            self.opened = True

    with pytest.raises(RuntimeError, match="opened twice"):
        check_recorder(Once(), tmp_path)


def test_a_recorder_that_mixes_tokens_up_breaks_the_contract(tmp_path: Path) -> None:
    class Strict(Recorder):
        def __init__(self) -> None:
            self.names: list[str] = []

        def enter(self, name: str, kind: str, step: int) -> object:
            self.names.append(name)
            return self.names[0]  # always the outermost

        def exit(self, token: object) -> None:
            if self.names.pop() != token:
                raise ValueError("not the span that ends")

    with pytest.raises(ValueError, match="not the span that ends"):
        check_recorder(Strict(), tmp_path)


def test_the_contract_is_two_full_windows_and_an_empty_one(tmp_path: Path) -> None:
    recorder = FakeRecorder()
    check_recorder(recorder, tmp_path)
    verbs = [call.split()[0] for call in recorder.calls]
    window = ["open", "enter", "enter", "mark", "enter", "exit", "exit", "exit", "close"]
    assert verbs == [*window, *window, "open", "close", "finish"]
    opened = [call for call in recorder.calls if call.startswith("open")]
    assert len(set(opened)) == 3
