"""What is read of the machine, its container, this process and its device; and how it is rated."""

import ctypes
import hashlib
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.errors import described

_MOST = 1 << 16  # bytes of a file
_SECTOR = 512  # bytes, of /proc/diskstats whatever the disk
_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"
_VIRTUAL_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")

# Numbers of NVML's C interface, which do not change.
_SM_CLOCK, _OF_GPU = 1, 0
_POWER = 0x4 | 0x80  # software power cap, power brake of the hardware
_HEAT = 0x20 | 0x40  # by software, by hardware
_HARDWARE = 0x8  # one of the two, or the current
LIBRARY = "libdcmi.so"
_PLACES = (
    LIBRARY,
    f"/usr/local/dcmi/{LIBRARY}",
    f"/usr/local/Ascend/driver/lib64/driver/{LIBRARY}",
)
_AI_CORE = 2
_MIB = 2**20
_EVERY_S = 60.0  # npu-smi is a process, which takes far more than a call
_NPU_SMI_TIMEOUT_S = 10.0

_COMMON = {
    "Aicore Usage Rate(%)": "device_busy_percent",
    "NPU Real-time Power(W)": "device_power_watts",
    "Temperature(C)": "device_temperature_celsius",
    "Aicore curFreq(MHZ)": "device_clock_mhz",
    "Aicore Freq(MHZ)": "device_max_clock_mhz",
}


Number = int | float


class Total(NamedTuple):
    """A number that only grows, and what its growth is divided by: another one, or the seconds."""

    value: Number
    per: Number | None = None


@dataclass(frozen=True)
class Reading:
    """What was read at one time: totals that become rates, and values as they are."""

    totals: Mapping[str, Total] = field(default_factory=dict)
    values: Mapping[str, Number] = field(default_factory=dict)


Read = Callable[[], Reading]
"""Reads a part; raises what it likes where that part cannot be read."""


class Part(NamedTuple):
    """A part of what is sampled: its name for people, how it is read, and its device."""

    name: str
    read: Read
    device: int | None = None


def rates(
    before: Mapping[str, Total], now: Mapping[str, Total], elapsed_ns: int
) -> dict[str, float]:
    """Return how fast totals grew; those that fell, as after a reset, are left out.

    Example::

        >>> rates({"a": Total(5), "b": Total(1, 10)}, {"a": Total(9), "b": Total(2, 12)}, 2 * 10**9)
        {'a': 2.0, 'b': 0.5}
        >>> rates({"a": Total(5), "b": Total(1, 10)}, {"a": Total(4), "b": Total(1, 10)}, 10**9)
        {}
    """
    found = {}
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        per = elapsed_ns / 1e9 if old.per is None or new.per is None else new.per - old.per
        if new.value >= old.value and per > 0:
            found[name] = float(f"{(new.value - old.value) / per:.5g}")
    return dict(sorted(found.items()))


class HostFiles:
    """Files that are opened once and read often: opening one takes ten times as long.

    Args:
        root: Where ``/proc`` and ``/sys`` are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._open: dict[str, int] = {}

    def read(self, path: str) -> str:
        """Return the content of a file. Raises OSError."""
        number = self._open.get(path)
        if number is None:
            number = os.open(self.place(path), os.O_RDONLY | os.O_CLOEXEC)
            self._open[path] = number
        return os.pread(number, _MOST, 0).decode("ascii", "replace")

    def place(self, path: str) -> Path:
        """Return where a file or folder is."""
        return self._root / path.lstrip("/")

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])


class HostClaim:
    """The right to sample this host, which the first process of a run has: one per host.

    It is a name in Linux' abstract socket namespace, which the kernel frees when the process ends.

    Args:
        run: Directory of the run; runs of the same name in two places are two runs.
    """

    def __init__(self, run: Path) -> None:
        self._socket: socket.socket | None = None
        if sys.platform != "linux":
            return
        place = os.fsencode(os.path.realpath(run))
        name = hashlib.blake2b(place, digest_size=16).hexdigest()
        with suppress(OSError):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._socket.bind(f"\0rlprof-host-{name}")
            except OSError:  # another process has it
                self.close()

    @property
    def is_mine(self) -> bool:
        """Whether this process samples the host."""
        return self._socket is not None

    def close(self) -> None:
        """Give it up; in a forked child: keep it for the parent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def process_parts(files: HostFiles) -> list[Part]:
    """Return what is read of this process."""
    return [Part("process", lambda: _process(files))]


def host_parts(files: HostFiles) -> list[Part]:
    """Return what is read of the machine and of the container."""
    return [
        Part("host CPU", lambda: _host_cpu(files)),
        Part("host memory", lambda: _host_memory(files)),
        Part("swap", lambda: _swap(files)),
        Part("disk", _Disks(files).read),
        Part("network", _Network(files).read),
        *_container_parts(files),
    ]


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK")


def _process(files: HostFiles) -> Reading:
    fields = files.read("/proc/self/stat").rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / _ticks()
    return Reading(
        {
            "process_cpu_cores": Total(cpu),
            "process_minor_faults_per_s": Total(int(fields[7])),
            "process_major_faults_per_s": Total(int(fields[9])),
        }
    )


def _host_cpu(files: HostFiles) -> Reading:
    content = files.read("/proc/stat")
    ticks = [int(each) for each in content.partition("\n")[0].split()[1:9]]  # guests are in user
    idle = ticks[3] + (ticks[4] if len(ticks) > 4 else 0)  # and waiting for a disk
    busy, count = sum(ticks) - idle, len(re.findall(r"^cpu\d", content, re.MULTILINE))
    return Reading(
        {
            "host_cpu_percent": Total(100 * busy, per=sum(ticks)),
            "host_cpu_cores": Total(busy / _ticks()),
        },
        {"host_cpu_count": count},
    )


def _numbers(text: str) -> dict[str, int]:
    """Return the first number of each line by the word before it, without a colon."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdecimal():
            found[words[0].rstrip(":")] = int(words[1])
    return found


def _host_memory(files: HostFiles) -> Reading:
    return Reading(
        values={
            "host_available_bytes": _numbers(files.read("/proc/meminfo"))["MemAvailable"] * 1024
        }
    )


def _swap(files: HostFiles) -> Reading:
    pages, size = _numbers(files.read("/proc/vmstat")), os.sysconf("SC_PAGE_SIZE")
    return Reading(
        {
            "swap_in_bytes_per_s": Total(pages["pswpin"] * size),
            "swap_out_bytes_per_s": Total(pages["pswpout"] * size),
        }
    )


class _Disks:
    """Bytes of whole disks: those of partitions and of mapped devices would count twice."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files
        self._names: set[str] = set()

    def read(self) -> Reading:
        if not self._names:
            self._names = {
                path.name
                for path in self._files.place("/sys/block").iterdir()
                if not path.name.startswith(_VIRTUAL_DISKS)
            }
            if not self._names:
                raise OSError("there is no disk")
        read = written = 0
        for line in self._files.read("/proc/diskstats").splitlines():
            words = line.split()
            if len(words) > 9 and words[2] in self._names:
                read, written = read + int(words[5]), written + int(words[9])
        return Reading(
            {
                "disk_read_bytes_per_s": Total(read * _SECTOR),
                "disk_write_bytes_per_s": Total(written * _SECTOR),
            }
        )


class _Network:
    """Bytes of the machine's interfaces; in a container, which has none of them, of its own."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files
        self._names: set[str] | None = None

    def read(self) -> Reading:
        lines = self._files.read("/proc/net/dev").splitlines()[2:]
        found = {name.strip(): rest.split() for name, _, rest in (x.partition(":") for x in lines)}
        if self._names is None:
            real = {
                name
                for name in found
                if self._files.place(f"/sys/class/net/{name}/device").exists()
            }
            self._names = real or {*found} - {"lo"}
        own = [found[name] for name in self._names if name in found]
        if not own:
            raise OSError("there is no network interface")
        return Reading(
            {
                "network_received_bytes_per_s": Total(sum(int(each[0]) for each in own)),
                "network_sent_bytes_per_s": Total(sum(int(each[8]) for each in own)),
            }
        )


# ---- the container: cgroup v2, or the controllers of v1
def cgroup_folders(files: HostFiles, controller: str) -> Iterator[tuple[str, bool]]:
    """Yield the folder of this process's cgroup and those around it, and whether they are of v2.

    Those of a controller of version 1 come first: with both, version 2 has no controllers.
    """
    own = [line.split(":", 2) for line in files.read("/proc/self/cgroup").splitlines()]
    mounts = [*_mounts(files)]
    for is_v2 in (False, True):
        for number, names, path in own:
            if (number == "0") != is_v2 or not (is_v2 or controller in names.split(",")):
                continue
            for root, point, kind, options in mounts:
                if kind == ("cgroup2" if is_v2 else "cgroup") and (is_v2 or controller in options):
                    yield from ((each, is_v2) for each in _upwards(root, point, path))
                    break


def _mounts(files: HostFiles) -> Iterator[tuple[str, str, str, Sequence[str]]]:
    """Yield of each mount what it shows, where, its kind and its options."""
    for line in files.read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        words, more = left.split(), right.split()
        if len(words) > 4 and more and more[0].startswith("cgroup"):
            yield words[3], words[4], more[0], more[-1].split(",")


def _upwards(root: str, point: str, path: str) -> Iterator[str]:
    """Yield the folder of a cgroup, then those around it, to where cgroups are mounted."""
    inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else ""
    parts = [part for part in inside.split("/") if part and part != ".."]
    for size in range(len(parts), -1, -1):
        yield "/".join([point.rstrip("/"), *parts[:size]])


def _first(
    files: HostFiles, controller: str, has: Callable[[str, bool], bool]
) -> tuple[str, bool] | None:
    """Return the innermost cgroup folder that has something; None if none of them has it.

    Raises OSError if no folder says whether it has.
    """
    said = False
    for folder, is_v2 in cgroup_folders(files, controller):
        with suppress(OSError):
            if has(folder, is_v2):
                return folder, is_v2
            said = True
    if not said:
        raise OSError("no cgroup has it")
    return None


def _container_parts(files: HostFiles) -> list[Part]:
    parts = [
        Part("CPU of the container", _Found(lambda: _container_cpu(files)).read),
        Part("CPU quota", _Found(lambda: _quota(files)).read),
        Part("memory limit", _Found(lambda: _memory_limit(files)).read),
    ]
    for resource in ("cpu", "memory", "io"):
        found = _Found(lambda resource=resource: _pressure(files, resource))  # type: ignore[misc]
        parts.append(Part(f"{resource} pressure", found.read))
    return parts


class _Found:
    """A part whose file is looked for once."""

    def __init__(self, find: Callable[[], Callable[[], Reading]]) -> None:
        self._find = find
        self._read: Callable[[], Reading] | None = None

    def read(self) -> Reading:
        if self._read is None:
            self._read = self._find()
        return self._read()


def _container_cpu(files: HostFiles) -> Callable[[], Reading]:
    def has(folder: str, is_v2: bool) -> bool:
        return bool(files.read(f"{folder}/{'cpu.stat' if is_v2 else 'cpuacct.usage'}"))

    found = _first(files, "cpuacct", has)
    if found is None:
        return Reading
    folder, is_v2 = found

    def read() -> Reading:
        if is_v2:
            used = _numbers(files.read(f"{folder}/cpu.stat"))["usage_usec"] / 1e6
        else:
            used = int(files.read(f"{folder}/cpuacct.usage")) / 1e9
        return Reading({"container_cpu_cores": Total(used)})

    return read


def _quota_cores(files: HostFiles, folder: str, is_v2: bool) -> float | None:
    """Return the quota of a cgroup; None without one."""
    if is_v2:
        quota, period = files.read(f"{folder}/cpu.max").split()
    else:
        quota = files.read(f"{folder}/cpu.cfs_quota_us").strip()
        period = files.read(f"{folder}/cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdecimal() else None


def _quota(files: HostFiles) -> Callable[[], Reading]:
    def has(folder: str, is_v2: bool) -> bool:
        return _quota_cores(files, folder, is_v2) is not None

    found = _first(files, "cpu", has)
    if found is None:  # no quota is set, so there is nothing to sample
        return Reading
    folder, is_v2 = found

    def read() -> Reading:
        # Not the time: it is summed over CPUs, and may be longer than the time that has passed.
        stat = _numbers(files.read(f"{folder}/cpu.stat"))
        cores = _quota_cores(files, folder, is_v2)
        return Reading(
            {"cpu_throttled_percent": Total(100 * stat["nr_throttled"], per=stat["nr_periods"])},
            {} if cores is None else {"cpu_quota_cores": cores},
        )

    return read


def _memory_limit(files: HostFiles) -> Callable[[], Reading]:
    def limit(folder: str, is_v2: bool) -> int:
        text = files.read(f"{folder}/{'memory.max' if is_v2 else 'memory.limit_in_bytes'}")
        return _NO_LIMIT if text.strip() == "max" else int(text)

    def has(folder: str, is_v2: bool) -> bool:
        return limit(folder, is_v2) < _NO_LIMIT

    found = _first(files, "memory", has)
    if found is None:  # no limit is set
        return Reading
    folder, is_v2 = found

    def read() -> Reading:
        used = int(files.read(f"{folder}/{'memory.current' if is_v2 else 'memory.usage_in_bytes'}"))
        inactive = "inactive_file" if is_v2 else "total_inactive_file"
        freed = _numbers(files.read(f"{folder}/memory.stat")).get(inactive, 0)
        return Reading(
            values={
                "container_memory_bytes": max(used - freed, 0),
                "container_memory_limit_bytes": limit(folder, is_v2),
            }
        )

    return read


def _pressure(files: HostFiles, resource: str) -> Callable[[], Reading]:
    """Read the pressure of the container, else that of the machine."""

    def has(folder: str, is_v2: bool) -> bool:
        return is_v2 and bool(files.read(f"{folder}/{resource}.pressure"))

    path = f"/proc/pressure/{resource}"
    with suppress(OSError):
        if found := _first(files, resource, has):
            path = f"{found[0]}/{resource}.pressure"

    def read() -> Reading:
        lines = dict(line.split(" ", 1) for line in files.read(path).splitlines())
        names = {"some": f"{resource}_pressure_percent"}
        if resource != "cpu":  # of CPUs, "full" means nothing for a machine
            names["full"] = f"{resource}_full_pressure_percent"
        return Reading(
            {
                name: Total(int(lines[kind].rpartition("total=")[2]) / 1e4)
                for kind, name in names.items()
                if kind in lines
            }
        )

    return read


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
                timeout=_NPU_SMI_TIMEOUT_S,
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
