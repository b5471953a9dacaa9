"""NVML through a double of pynvml that is as strict as the package about names and arguments."""

# ruff: noqa: N802  # the names of pynvml

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlprof.recording.accelerator import used_device
from lightning_rlprof.recording.background import readings
from lightning_rlprof.recording.background.readings import Reading, Total, nvidia_part

UUID = "8d3fb4a1-5c0e-11ef-9c1d-0242ac120002"


class NVMLError(Exception):
    pass


class Nvml:
    """The functions of nvidia-ml-py that are used, of one GPU; each checks what it is given."""

    def __init__(self, kind: str = "GPU") -> None:
        self.reasons = 0x1
        self.kind = kind
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> object:
        assert self.is_open
        assert isinstance(uuid, bytes)
        if uuid.decode() != f"{self.kind}-{UUID}":
            raise NVMLError("Not Found")
        return self

    def _check(self, handle: object) -> None:
        if handle is not self:
            raise NVMLError("Invalid Argument")

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> Any:
        self._check(handle)
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> Any:
        self._check(handle)
        return SimpleNamespace(total=80 << 30, free=20 << 30, used=60 << 30)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        self._check(handle)
        return 7_000_500  # mJ

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        self._check(handle)
        return {0: 1, 1: 1410, 2: 2}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle: object, kind: int) -> int:
        self._check(handle)
        return {0: 1, 1: 1980, 2: 2}[kind]

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> int:
        self._check(handle)
        return {0: 66}[sensor]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: object) -> int:
        self._check(handle)
        return self.reasons


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    double = Nvml()
    monkeypatch.setattr(readings.importlib, "import_module", {"pynvml": double}.__getitem__)
    return double


def read(index: int = 0, uuid: str | None = UUID) -> Reading:
    return nvidia_part(index, uuid).read()


def test_all_is_read_of_the_device_of_torch_on_a_double(nvml: Nvml) -> None:
    assert nvidia_part(3, UUID).device == 3
    assert read() == Reading(
        {"device_power_watts": Total(7000.5)},  # joules, which become watts
        {
            "device_busy_percent": 97,
            "device_memory_used_bytes": 60 << 30,
            "device_clock_mhz": 1410,
            "device_max_clock_mhz": 1980,
            "device_temperature_celsius": 66,
            "device_power_throttled": 0,
            "device_thermal_throttled": 0,
            "device_hardware_slowdown": 0,
        },
    )


@pytest.mark.parametrize(
    ("reasons", "power", "heat", "hardware"),
    [
        (0x4, 1, 0, 0),
        (0x80, 1, 0, 0),
        (0x20, 0, 1, 0),
        (0x40 | 0x8, 0, 1, 1),
        (0x8, 0, 0, 1),
        (0x1 | 0x2 | 0x10 | 0x100, 0, 0, 0),  # idle, chosen clocks, sync boost, display
    ],
)
def test_reasons_become_power_and_heat_on_a_double(
    nvml: Nvml, reasons: int, power: int, heat: int, hardware: int
) -> None:
    nvml.reasons = reasons
    values = read().values
    names = ("power_throttled", "thermal_throttled", "hardware_slowdown")
    assert [values[f"device_{name}"] for name in names] == [power, heat, hardware]


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.delattr(Nvml, name)


def test_a_pynvml_that_lacks_functions_loses_only_these_metrics_on_a_double(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksEventReasons")
    part = nvidia_part(0, UUID)
    for _ in range(2):
        names = {*part.read().values}
        assert len(names) == 4
        assert not any("throttled" in name or "temperature" in name for name in names)


def test_a_slice_of_a_gpu_is_found_on_a_double(nvml: Nvml) -> None:
    nvml.kind = "MIG"
    assert read().values["device_busy_percent"] == 97
    nvml.kind = "GPU"
    assert read(uuid=f"GPU-{UUID}").values["device_busy_percent"] == 97


@pytest.mark.parametrize("uuid", [None, "another"])
def test_an_unknown_device_is_not_guessed_by_its_number_on_a_double(
    nvml: Nvml, uuid: str | None
) -> None:
    with pytest.raises(OSError, match=r"does not tell the UUID|no device another \(NVMLError"):
        read(0, uuid)


def test_a_failed_driver_raises_its_own_error_on_a_double(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = nvidia_part(0, UUID)
    part.read()
    nvml.is_open = False

    def lost(self: Nvml, handle: object) -> None:
        raise NVMLError("GPU is lost")

    monkeypatch.setattr(Nvml, "_check", lost)
    with pytest.raises(NVMLError, match="GPU is lost"):
        part.read()
    monkeypatch.undo()
    monkeypatch.setattr(readings.importlib, "import_module", {"pynvml": nvml}.__getitem__)
    assert part.read().values["device_busy_percent"] == 97


def test_without_pynvml_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(readings.importlib, "import_module", absent)
    with pytest.raises(OSError, match="pynvml is not installed: pip install nvidia-ml-py"):
        read()


@pytest.mark.cuda
def test_a_real_gpu_tells_its_clock_and_power() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("pynvml")
    torch.ones(1, device="cuda")
    used = used_device("cuda")
    assert used is not None
    part = nvidia_part(*used)
    values = part.read().values
    assert 0 < values["device_clock_mhz"] <= values["device_max_clock_mhz"]
    assert 0 < values["device_temperature_celsius"] < 120
    assert values["device_memory_used_bytes"] > 0
    assert values["device_power_throttled"] in (0, 1)
