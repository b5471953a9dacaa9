"""An Ascend NPU by DCMI, the driver's C library, or by ``npu-smi`` if the library is not there."""

import ctypes
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable

from lightning_rlprof.errors import described
from lightning_rlprof.recording.background.readings import Part, Reading

LIBRARY = "libdcmi.so"
_PLACES = (
    LIBRARY,
    f"/usr/local/dcmi/{LIBRARY}",
    f"/usr/local/Ascend/driver/lib64/driver/{LIBRARY}",
)
_AI_CORE = 2
_MIB = 2**20
_EVERY_S = 60.0  # npu-smi is a process, which takes far more than a call
_TIMEOUT_S = 10.0


class _AiCore(ctypes.Structure):
    _fields_ = (("freq", ctypes.c_uint), ("cur_freq", ctypes.c_uint))


class _Hbm(ctypes.Structure):
    _fields_ = (
        ("memory_size", ctypes.c_ulonglong),  # MiB
        ("freq", ctypes.c_uint),
        ("memory_usage", ctypes.c_ulonglong),  # MiB
        ("temp", ctypes.c_int),
        ("bandwidth_util_rate", ctypes.c_uint),
    )


def ascend_part(index: int, uuid: str | None) -> Part:
    """Return how an NPU is read; ``index`` is the number that torch_npu gives it."""
    return Part("NPU", _Npu(_logic_id(index)).read, index)


def _logic_id(index: int) -> int:
    """Return the number of a device on its host."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    numbers = [int(each) for each in visible.split(",") if each.strip().isdecimal()]
    return numbers[index] if index < len(numbers) else index


class _Npu:
    def __init__(self, logic_id: int) -> None:
        self._logic_id = logic_id
        self._ask: Callable[[], Reading] | None = None

    def read(self) -> Reading:
        if self._ask is None:
            try:
                self._ask = Dcmi(_library(), self._logic_id).read
            except OSError as error:
                program = shutil.which("npu-smi")
                if program is None:
                    raise OSError(f"{error}; npu-smi is not on PATH") from None
                self._ask = NpuSmi(program, self._logic_id).read
        return self._ask()


def _library() -> ctypes.CDLL:
    failed = OSError(LIBRARY)
    for place in _PLACES:
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            failed = error
    raise OSError(f"{LIBRARY}: {described(failed)}")


class Dcmi:
    """Ask the driver's library; a question that it does not answer is left out.

    Raises:
        OSError: It does not know the device.
    """

    def __init__(self, library: ctypes.CDLL, logic_id: int) -> None:
        self._library = library
        if status := library.dcmi_init():
            raise OSError(f"dcmi_init returned {status}")
        card, device = ctypes.c_int(), ctypes.c_int()
        status = library.dcmi_get_card_id_device_id_from_logicid(
            ctypes.byref(card), ctypes.byref(device), ctypes.c_uint(logic_id)
        )
        if status:
            raise OSError(f"dcmi_get_card_id_device_id_from_logicid returned {status}")
        self._of = card, device

    def read(self) -> Reading:
        """Return what the library answers. Raises OSError if it answers nothing."""
        values: dict[str, int | float] = {}
        core, hbm = _AiCore(), _Hbm()
        used, power, heat = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
        if self._asked("dcmi_get_device_utilization_rate", ctypes.c_int(_AI_CORE), used):
            values["device_busy_percent"] = used.value
        if self._asked("dcmi_get_device_power_info", power):
            values["device_power_watts"] = power.value / 10
        if self._asked("dcmi_get_device_temperature", heat):
            values["device_temperature_celsius"] = heat.value
        if self._asked("dcmi_get_device_aicore_info", core):
            values["device_clock_mhz"] = core.cur_freq
            values["device_max_clock_mhz"] = core.freq
        if self._asked("dcmi_get_device_hbm_info", hbm):
            values["device_memory_used_bytes"] = hbm.memory_usage * _MIB
        if not values:
            raise OSError("DCMI answers no question")
        return Reading(values=values)

    def _asked(
        self, name: str, *arguments: "ctypes.c_int | ctypes.Structure | ctypes.c_uint"
    ) -> bool:
        """Call a function, whose last argument takes the answer; return whether it did."""
        function = getattr(self._library, name, None)
        if function is None:
            return False
        *given, answer = arguments
        return not function(*self._of, *given, ctypes.byref(answer))


_COMMON = {
    "Aicore Usage Rate(%)": "device_busy_percent",
    "NPU Real-time Power(W)": "device_power_watts",
    "Temperature(C)": "device_temperature_celsius",
    "Aicore curFreq(MHZ)": "device_clock_mhz",
    "Aicore Freq(MHZ)": "device_max_clock_mhz",
}


class NpuSmi:
    """Run ``npu-smi info`` once a minute; between two runs nothing new is known.

    Raises:
        OSError: It fails, or does not list the device.
    """

    def __init__(
        self, program: str, logic_id: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._program, self._clock = program, clock
        self._next = clock()
        card, chip = _card_of(self._run("info", "-m"), logic_id)
        self._command = ("info", "-t", "common", "-i", card, "-c", chip)

    def read(self) -> Reading:
        """Return what it printed, nothing until the minute has passed."""
        if self._clock() < self._next:
            return Reading()
        self._next = self._clock() + _EVERY_S
        values = {}
        for line in self._run(*self._command).splitlines():
            name, _, text = line.partition(" : ")
            if name.strip() in _COMMON and re.fullmatch(r"\d+(\.\d+)?", text.strip()):
                values[_COMMON[name.strip()]] = float(text)
        if not values:
            raise OSError("npu-smi prints none of the metrics")
        return Reading(values=values)

    def _run(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [self._program, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=True,
            )
        except subprocess.SubprocessError as error:
            raise OSError(f"npu-smi {' '.join(arguments)}: {described(error)}") from None
        return done.stdout


def _card_of(table: str, logic_id: int) -> tuple[str, str]:
    """Return card and chip of a device by the table that ``npu-smi info -m`` prints."""
    for line in table.splitlines():
        words = line.split()
        if len(words) > 3 and words[0].isdecimal() and words[2] == str(logic_id):
            return words[0], words[1]
    raise OSError(f"npu-smi does not list device {logic_id}")
