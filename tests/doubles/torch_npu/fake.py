"""A strict fake of torch_npu in five versions, made from `contract.json`; it proves calls alone.

Signatures, enums and exports are those of each version's source, so that an unknown keyword is a
TypeError. Like the real one it never raises for what it cannot do: it prints, resets or returns 0.
Here that is remembered, too: in `Device.printed` and `Device.lost`.
"""

import ast
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.doubles.torch_npu.experimental import make_experimental_config

CONTRACT: dict[str, Any] = json.loads(Path(__file__).with_name("contract.json").read_text())
VERSIONS = tuple(CONTRACT)

_VALUES = {
    "Constant.LEVEL0": "Level0",
    "Constant.AicMetricsNone": "ACL_AICORE_NONE",
    "Constant.AicPipeUtilization": "ACL_AICORE_PIPE_UTILIZATION",
    "Constant.Text": "text",
    "ExportType.Text": "text",
}
_SPECIAL = {"AiCoreNone": "ACL_AICORE_NONE", "PipeUtilization": "ACL_AICORE_PIPE_UTILIZATION"}


class Action(Enum):
    """torch_npu's ProfilerAction."""

    NONE = 0
    WARMUP = 1
    RECORD = 2
    RECORD_AND_SAVE = 3


class Activity(Enum):
    """torch_npu's ProfilerActivity, which is not torch's."""

    CPU = 1
    NPU = 2


class Device:
    """An NPU that profiles: what it was told, what it heard, and what was lost.

    Attributes:
        available: Whether there is a device.
        library: Whether CANN's profiler library is there.
        markers: Whether its library of markers is there.
        collects: Whether CANN writes data.
        calls: MSTX calls that reach CANN: ("start", number, message, stream, domain), ("end",
            number, domain), ("mark", message, domain), and ("profile", "start" or "stop").
        running: Ranges that CANN has seen begin, by number.
        lost: What the real one loses without a word.
        printed: What it prints and goes on after.
        profiles: Every profiler that was made.
    """

    def __init__(self, version: str) -> None:
        self.facts: Mapping[str, Any] = CONTRACT[version]
        self.available = self.library = self.markers = self.collects = True
        self.calls: list[tuple[Any, ...]] = []
        self.running: dict[int, str] = {}
        self.lost: list[str] = []
        self.printed: list[str] = []
        self.profiles: list[Any] = []
        self.recording: Any = None
        self.numbers = itertools.count(1)

    def hears(self, domain: str) -> bool:
        """Tell whether a range in this domain is recorded now."""
        profile = self.recording
        if profile is None or Activity.NPU not in profile.activities or not profile.config.marks:
            return False
        only, but = (
            profile.config.kept("mstx_domain_include"),
            profile.config.kept("mstx_domain_exclude"),
        )
        return domain in only if only else domain not in (but or ())


def strict(function: Callable[..., Any], parameters: Sequence[str], *first: str) -> Any:
    """Give a function the parameters of the contract; it gets every one by name, or a TypeError."""
    signature = _signature([*first, *parameters])

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(**bound.arguments)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _signature(parameters: Sequence[str]) -> inspect.Signature:
    kind, made = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for text in parameters:
        if text == "*":
            kind = inspect.Parameter.KEYWORD_ONLY  # type: ignore[assignment]
            continue
        name, equals, default = text.partition("=")
        value = inspect.Parameter.empty
        if equals:
            value = _VALUES[default] if default in _VALUES else ast.literal_eval(default)
        made.append(inspect.Parameter(name, kind, default=value))
    return inspect.Signature(made)


def install(monkeypatch: pytest.MonkeyPatch, version: str = "2.13.0") -> Device:
    """Let torch_npu be importable for the rest of the test, in one of `VERSIONS`."""
    device = Device(version)
    package, npu = ModuleType("torch_npu"), ModuleType("torch_npu.npu")
    inner, profiler = ModuleType("torch_npu.npu.mstx"), ModuleType("torch_npu.profiler")
    inner.mstx = _mstx(device)  # type: ignore[attr-defined]
    npu.mstx = inner.mstx  # type: ignore[attr-defined]  # the class hides its module, as in the real one
    npu.is_available = lambda: device.available  # type: ignore[attr-defined]
    npu.current_stream = lambda: "stream"  # type: ignore[attr-defined]
    package.npu, package.profiler = npu, profiler  # type: ignore[attr-defined]
    vars(profiler).update(_exports(device))
    for module in (package, npu, inner, profiler):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    real = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
    monkeypatch.setattr(
        torch.autograd, "_profiler_enabled", lambda: device.recording is not None or real()
    )
    return device


def _mstx(device: Device) -> type:
    """Return the class ``torch_npu.npu.mstx``; where there are no domains all are the default."""

    def mark(message: str, stream: Any = None, domain: str = "default") -> None:
        if device.hears(domain):
            device.calls.append(("mark", message, domain))

    def range_start(message: str, stream: Any = None, domain: str = "default") -> int | None:
        if not device.markers:
            device.printed.append("[ERROR] Call range_start failed: libms_tools_ext.so")
            return None
        if not (message and isinstance(message, str) and device.hears(domain)):
            return 0
        number = next(device.numbers)
        device.running[number] = domain
        device.calls.append(("start", number, message, stream, domain))
        return number

    def range_end(range_id: int, domain: str = "default") -> None:
        begun = device.running.pop(range_id, None)
        if begun == domain and device.hears(domain):
            device.calls.append(("end", range_id, domain))
        else:
            device.lost.append(f"range {range_id} of {begun}, ended in {domain}")

    made = {
        function.__name__: staticmethod(strict(function, device.facts[f"mstx.{function.__name__}"]))
        for function in (mark, range_start, range_end)
    }
    return type("mstx", (), made)


def _exports(device: Device) -> dict[str, Any]:
    """Return what ``torch_npu.profiler`` exports in this version, and nothing else."""
    enums = {
        name: SimpleNamespace(**{member: _value(name, member) for member in members})
        for name, members in device.facts["enums"].items()
    }
    names = {
        **enums,
        "ProfilerAction": Action,
        "ProfilerActivity": Activity,
        "_ExperimentalConfig": make_experimental_config(device, strict),
        "profile": _profile(device),
        "tensorboard_trace_handler": strict(
            lambda **given: _handler(device, **given), device.facts["tensorboard_trace_handler"]
        ),
    }
    return {name: value for name, value in names.items() if name in device.facts["exports"]}


def _value(enum: str, member: str) -> str:
    if enum == "AiCMetrics":
        return _SPECIAL.get(member, f"ACL_AICORE_{member.upper()}")
    return member if enum == "ProfilerLevel" else member.lower()


def _handler(device: Device, dir_name: Any, analyse_flag: bool, **_: Any) -> Any:
    if dir_name is not None and Path(dir_name).is_file():
        device.printed.append("Call tensorboard_trace_handler failed")
        return None
    if analyse_flag:
        raise AssertionError("an analysis in the process that trains")
    return SimpleNamespace(folder=Path(dir_name))


def _profile(device: Device) -> type:
    def made(self: Any, **given: Any) -> None:
        if not device.available:
            raise RuntimeError("NPU function error: c10_npu::SetDevice(device_id_)")
        self.given, self.device = given, device
        self.activities, self.config = set(given["activities"]), given["experimental_config"]
        self.schedule, self.step_num, self.stopped = given["schedule"], 0, False
        self.current_action = self.schedule(0)
        self.prof_if, self.metadata = SimpleNamespace(prof_path=""), {}
        device.profiles.append(self)

    init = strict(made, device.facts["profile.__init__"], "self")
    return type("profile", (_Profile,), {"__init__": init})


class _Profile:
    """What ``torch_npu.profiler.profile`` does at its calls."""

    device: Device
    stopped: bool
    step_num: int
    current_action: Action

    def add_metadata(self, key: str, value: str) -> None:
        self.metadata[key] = value  # type: ignore[attr-defined]

    def start(self) -> None:
        self._begin()

    def step(self) -> None:
        before = self.current_action
        self.step_num += 1
        self.current_action = self.schedule(self.step_num)  # type: ignore[attr-defined]
        if before is not Action.RECORD_AND_SAVE and self.current_action is Action.NONE:
            self.device.printed.append(f"Incorrect schedule: {before.name} followed by NONE")
        if before is Action.RECORD_AND_SAVE or self.current_action is Action.NONE:
            self._end()
        if before is Action.RECORD_AND_SAVE and self.current_action is not Action.NONE:
            self._begin()

    def stop(self) -> None:
        if self.current_action is not Action.NONE:
            self.device.printed.append(f"Stop profiler while {self.current_action.name}")
            self._end()
        self.stopped = True

    def _begin(self) -> None:
        device, handler = self.device, self.given["on_trace_ready"]  # type: ignore[attr-defined]
        number = len(device.profiles)
        folder = handler.folder / f"host_7_2026010100000000{number}_ascend_pt"
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            device.printed.append(f"[ERROR] Call start failed: {error}")
            return
        self.prof_if.prof_path = str(folder)  # type: ignore[attr-defined]
        if not device.library:
            device.printed.append("[ERROR] Call start failed: libmsprofiler.so")
            return
        if device.collects and Activity.NPU in self.activities:  # type: ignore[attr-defined]
            (folder / "PROF_000001_FAKE").mkdir()
        device.recording = self
        device.calls.append(("profile", "start"))

    def _end(self) -> None:
        device = self.device
        device.lost += [f"range {number}, never ended" for number in device.running]
        device.running.clear()
        device.recording = None
        device.calls.append(("profile", "stop"))
