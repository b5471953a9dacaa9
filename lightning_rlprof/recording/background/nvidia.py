"""An NVIDIA GPU by NVML, through the package ``pynvml`` (``nvidia-ml-py``) if it is installed."""

import importlib
from collections.abc import Callable
from typing import Any

from lightning_rlprof.errors import described
from lightning_rlprof.recording.background.readings import Number, Part, Reading, Total

# Numbers of NVML's C interface, which do not change.
_SM_CLOCK, _OF_GPU = 1, 0
_POWER = 0x4 | 0x80  # software power cap, power brake of the hardware
_HEAT = 0x20 | 0x40  # by software, by hardware
_HARDWARE = 0x8  # one of the two, or the current


def nvidia_part(index: int, uuid: str | None) -> Part:
    """Return how a GPU is read.

    Args:
        index: The number that torch gives it.
        uuid: NVML's numbers are not torch's, which follow CUDA_VISIBLE_DEVICES.
    """
    return Part("NVML", _Nvml(index, uuid).read, index)


class _Nvml:
    """Ask NVML, one function after the other; one that fails the first time is not asked again."""

    def __init__(self, index: int, uuid: str | None) -> None:
        self._index, self._uuid = index, uuid
        self._nvml: Any = None
        self._handle: Any = None
        self._asked: list[Callable[[], Reading]] = []
        self._has_read = False

    def read(self) -> Reading:
        """Return all that can be read. Raises if nothing can."""
        if self._nvml is None:
            self._open()
        totals: dict[str, Total] = {}
        values: dict[str, Number] = {}
        failed: list[Callable[[], Reading]] = []
        why: Exception | None = None
        for ask in self._asked:
            try:
                found = ask()
            except Exception as error:  # NVMLError, or a pynvml that lacks the function
                failed.append(ask)
                why = error
                continue
            totals.update(found.totals)
            values.update(found.values)
        if why is not None and len(failed) == len(self._asked):
            raise why
        if not self._has_read:
            self._asked = [ask for ask in self._asked if ask not in failed]
            self._has_read = True
        return Reading(totals, values)

    def _open(self) -> None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            raise OSError("pynvml is not installed: pip install nvidia-ml-py") from None
        nvml.nvmlInit()
        self._handle = self._find(nvml)
        self._nvml = nvml
        self._asked = [
            self._utilization,
            self._memory,
            self._power,
            self._clock,
            self._max_clock,
            self._temperature,
            self._throttling,
        ]

    def _find(self, nvml: Any) -> Any:
        if self._uuid is None:
            raise OSError("torch does not tell the UUID of its device")
        failed: Exception | None = None
        for kind in ("GPU", "MIG"):
            name = self._uuid if self._uuid.startswith(("GPU-", "MIG-")) else f"{kind}-{self._uuid}"
            try:
                return nvml.nvmlDeviceGetHandleByUUID(name.encode())
            except Exception as error:
                failed = failed or error
        raise OSError(f"no device {self._uuid} ({described(failed)})")  # type: ignore[arg-type]

    def _utilization(self) -> Reading:
        used = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return Reading(values={"device_busy_percent": used.gpu})

    def _memory(self) -> Reading:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return Reading(values={"device_memory_used_bytes": memory.used})

    def _power(self) -> Reading:
        """Ask for the energy, whose growth is the mean power; of old GPUs for the power."""
        try:
            energy = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except Exception:
            power = self._nvml.nvmlDeviceGetPowerUsage(self._handle)
            return Reading(values={"device_power_watts": power / 1000})
        return Reading({"device_power_watts": Total(energy / 1000)})

    def _clock(self) -> Reading:
        clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, _SM_CLOCK)
        return Reading(values={"device_clock_mhz": clock})

    def _max_clock(self) -> Reading:
        clock = self._nvml.nvmlDeviceGetMaxClockInfo(self._handle, _SM_CLOCK)
        return Reading(values={"device_max_clock_mhz": clock})

    def _temperature(self) -> Reading:
        heat = self._nvml.nvmlDeviceGetTemperature(self._handle, _OF_GPU)
        return Reading(values={"device_temperature_celsius": heat})

    def _throttling(self) -> Reading:
        nvml = self._nvml
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        ask = ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons  # until 2023
        bits = ask(self._handle)
        return Reading(
            values={
                "device_power_throttled": int(bool(bits & _POWER)),
                "device_thermal_throttled": int(bool(bits & _HEAT)),
                "device_hardware_slowdown": int(bool(bits & _HARDWARE)),
            }
        )
