"""What is read of the machine, its container, this process and its device; how totals are rated."""

import ctypes
import hashlib
import importlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.errors import described

_MAX_BYTES = 1 << 16
_SECTOR = 512  # Bytes; /proc/diskstats counts in this unit, whatever the disk.
_NO_LIMIT = 1 << 60  # For "no limit", cgroup v1 writes a number near 2**63.
_VIRTUAL_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")

# These numbers of NVML's C interface do not change.
_SM_CLOCK, _OF_GPU = 1, 0
_POWER = 0x4 | 0x80  # Software power cap, and power brake of the hardware.
_HEAT = 0x20 | 0x40  # Thermal slowdown by software, and by hardware.
_HARDWARE = 0x8  # Thermal slowdown or power brake of the hardware, or the current.

_DCMI = "libdcmi.so"
_PLACES = (
    _DCMI,
    f"/usr/local/dcmi/{_DCMI}",
    f"/usr/local/Ascend/driver/lib64/driver/{_DCMI}",
)
_AI_CORE = 2
_MIB = 2**20

Number = int | float
ReadOwn = Callable[[str], str]
"""Reads a file of a cgroup's folder by its name."""


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
    """A part of what is sampled: its name for people, how it is read, and its device.

    A part that ``may_come``, such as a server, is asked again if it was never there.
    """

    name: str
    read: Read
    device: int | None = None
    may_come: bool = False


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
        self._found: dict[str, Any] = {}

    def read(self, path: str) -> str:
        """Return the content of a file. Raises OSError."""
        number = self._open.get(path)
        if number is None:
            number = os.open(self.place(path), os.O_RDONLY | os.O_CLOEXEC)
            self._open[path] = number
        return os.pread(number, _MAX_BYTES, 0).decode("ascii", "replace")

    def place(self, path: str) -> Path:
        """Return where a file or folder is."""
        return self._root / path.lstrip("/")

    def once(self, what: str, find: Callable[["HostFiles"], Any]) -> Any:
        """Return what is looked for once, such as the names of the disks."""
        if what not in self._found:
            self._found[what] = find(self)
        return self._found[what]

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
            except OSError:  # Another process has it.
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
    return [Part("process", partial(_process, files))]


def host_parts(files: HostFiles) -> list[Part]:
    """Return what is read of the machine and of the container."""
    reads: dict[str, Callable[..., Reading]] = {
        "host CPU": _host_cpu,
        "host memory": _host_memory,
        "swap": _swap,
        "disk": _disks,
        "network": _network,
        "CPU of the container": partial(_in_cgroup, "cpuacct", _container_cpu),
        "CPU quota": partial(_in_cgroup, "cpu", _quota),
        "memory limit": partial(_in_cgroup, "memory", _memory_limit),
    }
    reads |= {f"{kind} pressure": partial(_pressure, kind) for kind in ("cpu", "memory", "io")}
    return [Part(name, partial(read, files)) for name, read in reads.items()]


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
    # User time includes that of guests.
    ticks = [int(each) for each in content.partition("\n")[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # A CPU that waits for a disk is idle, too.
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
    return {name: int(number) for name, number in re.findall(r"^(\w+):?[ \t]+(\d+)", text, re.M)}


def _host_memory(files: HostFiles) -> Reading:
    free = _numbers(files.read("/proc/meminfo"))["MemAvailable"]
    return Reading(values={"host_available_bytes": free * 1024})


def _swap(files: HostFiles) -> Reading:
    pages, size = _numbers(files.read("/proc/vmstat")), os.sysconf("SC_PAGE_SIZE")
    return Reading(
        {
            "swap_in_bytes_per_s": Total(pages["pswpin"] * size),
            "swap_out_bytes_per_s": Total(pages["pswpout"] * size),
        }
    )


def _disks(files: HostFiles) -> Reading:
    names = files.once("disks", _disk_names)
    lines = map(str.split, files.read("/proc/diskstats").splitlines())
    own = [words for words in lines if len(words) > 9 and words[2] in names]
    return Reading(
        {
            "disk_read_bytes_per_s": Total(sum(int(words[5]) for words in own) * _SECTOR),
            "disk_write_bytes_per_s": Total(sum(int(words[9]) for words in own) * _SECTOR),
        }
    )


def _disk_names(files: HostFiles) -> set[str]:
    """Return whole disks: bytes of partitions and of mapped devices would count twice."""
    found = {path.name for path in files.place("/sys/block").iterdir()}
    names = {name for name in found if not name.startswith(_VIRTUAL_DISKS)}
    if not names:
        raise OSError("there is no disk")
    return names


def _network(files: HostFiles) -> Reading:
    names, found = files.once("network", _interface_names), _interfaces(files)
    own = [found[name] for name in names if name in found]
    if not own:
        raise OSError("there is no network interface")
    return Reading(
        {
            "network_received_bytes_per_s": Total(sum(int(each[0]) for each in own)),
            "network_sent_bytes_per_s": Total(sum(int(each[8]) for each in own)),
        }
    )


def _interfaces(files: HostFiles) -> dict[str, list[str]]:
    lines = (line.partition(":") for line in files.read("/proc/net/dev").splitlines()[2:])
    return {name.strip(): rest.split() for name, _, rest in lines}


def _interface_names(files: HostFiles) -> set[str]:
    """Return the machine's interfaces; in a container, which has none of them, its own."""
    found = {*_interfaces(files)}
    real = {name for name in found if files.place(f"/sys/class/net/{name}/device").exists()}
    return real or found - {"lo"}


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


def _in_cgroup(
    controller: str, of: Callable[[ReadOwn, bool], Reading | None], files: HostFiles
) -> Reading:
    """Return what the innermost cgroup says that has something; nothing if none of them has it.

    Args:
        controller: Of cgroup v1.
        of: Returns what a cgroup says, given how to read its files and whether it is of v2; None
            if it has nothing, as without a limit. Raises OSError if it does not say.
        files: Those of the machine.
    """
    found = files.once(controller, partial(_cgroup_with, controller, of))
    return Reading() if found is None else of(*found) or Reading()


def _cgroup_with(
    controller: str, of: Callable[[ReadOwn, bool], Reading | None], files: HostFiles
) -> tuple[ReadOwn, bool] | None:
    said = False
    for folder, is_v2 in cgroup_folders(files, controller):
        read = partial(_read_in, files, folder)
        with suppress(OSError):
            if of(read, is_v2) is not None:
                return read, is_v2
            said = True
    if not said:
        raise OSError("no cgroup has it")
    return None


def _read_in(files: HostFiles, folder: str, name: str) -> str:
    return files.read(f"{folder}/{name}")


def _container_cpu(read: ReadOwn, is_v2: bool) -> Reading:
    used = (
        _numbers(read("cpu.stat"))["usage_usec"] / 1e6
        if is_v2
        else int(read("cpuacct.usage")) / 1e9
    )
    return Reading({"container_cpu_cores": Total(used)})


def _quota(read: ReadOwn, is_v2: bool) -> Reading | None:
    names = ["cpu.max"] if is_v2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
    quota, period = " ".join(map(read, names)).split()
    if not quota.isdecimal():
        return None
    # Periods are counted: throttled time is summed over CPUs, and may exceed the time that passed.
    stat = _numbers(read("cpu.stat"))
    return Reading(
        {"cpu_throttled_percent": Total(100 * stat["nr_throttled"], per=stat["nr_periods"])},
        {"cpu_quota_cores": int(quota) / int(period)},
    )


def _memory_limit(read: ReadOwn, is_v2: bool) -> Reading | None:
    text = read("memory.max" if is_v2 else "memory.limit_in_bytes").strip()
    if text == "max" or int(text) >= _NO_LIMIT:
        return None
    used = int(read("memory.current" if is_v2 else "memory.usage_in_bytes"))
    inactive = "inactive_file" if is_v2 else "total_inactive_file"
    freed = _numbers(read("memory.stat")).get(inactive, 0)
    return Reading(
        values={
            "container_memory_bytes": max(used - freed, 0),
            "container_memory_limit_bytes": int(text),
        }
    )


def _pressure(resource: str, files: HostFiles) -> Reading:
    """Return the pressure of the container, else that of the machine."""
    path = files.once(f"{resource} pressure", partial(_pressure_file, resource))
    lines = dict(line.split(" ", 1) for line in files.read(path).splitlines())
    names = {"some": f"{resource}_pressure_percent"}
    if resource != "cpu":  # For the CPUs of a machine, "full" has no meaning.
        names["full"] = f"{resource}_full_pressure_percent"
    return Reading(
        {
            name: Total(int(lines[kind].rpartition("total=")[2]) / 1e4)
            for kind, name in names.items()
            if kind in lines
        }
    )


def _pressure_file(resource: str, files: HostFiles) -> str:
    with suppress(OSError):
        for folder, is_v2 in cgroup_folders(files, resource):
            with suppress(OSError):
                if is_v2 and files.read(path := f"{folder}/{resource}.pressure"):
                    return path
    return f"/proc/pressure/{resource}"


def nvidia_part(index: int, uuid: str | None) -> Part:
    """Return how a GPU is read: by NVML, through the package ``pynvml`` (``nvidia-ml-py``).

    Args:
        index: The number that torch gives it.
        uuid: NVML's numbers are not torch's, which follow CUDA_VISIBLE_DEVICES.
    """
    return Part("NVML", _Nvml(uuid).read, index)


class _Nvml:
    """Ask NVML, one question after the other; one that fails the first time is not asked again."""

    def __init__(self, uuid: str | None) -> None:
        self._uuid = uuid
        self._device: tuple[Any, Any] | None = None  # The library, and its handle of the device.
        self._asked = dict(_QUESTIONS)
        self._has_read = False

    def read(self) -> Reading:
        """Return all that can be read. Raises if nothing can."""
        if self._device is None:
            self._device = _nvml_device(self._uuid)
        found: dict[str, Number | Total] = {}
        for name, ask in tuple(self._asked.items()):
            try:
                found[name] = ask(*self._device)
            except Exception as error:  # NVML failed, or this pynvml lacks the function.
                why = error
                if not self._has_read:
                    del self._asked[name]
        if not found:
            raise why
        self._has_read = True
        totals = {name: each for name, each in found.items() if isinstance(each, Total)}
        return Reading(
            totals, {name: each for name, each in found.items() if not isinstance(each, Total)}
        )


def _nvml_device(uuid: str | None) -> tuple[Any, Any]:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise OSError("pynvml is not installed: pip install nvidia-ml-py") from None
    nvml.nvmlInit()
    if uuid is None:
        raise OSError("torch does not tell the UUID of its device")
    failed: Exception | None = None
    for kind in ("GPU", "MIG"):
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"{kind}-{uuid}"
        try:
            return nvml, nvml.nvmlDeviceGetHandleByUUID(name.encode())
        except Exception as error:
            failed = failed or error
    raise OSError(f"no device {uuid} ({described(failed)})")  # type: ignore[arg-type]


def _slowed(reasons: int, nvml: Any, handle: Any) -> int:
    """Return whether one of some reasons lowers the clock."""
    return int(bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & reasons))


_QUESTIONS: dict[str, Callable[[Any, Any], Number | Total]] = {
    "device_busy_percent": lambda nvml, own: nvml.nvmlDeviceGetUtilizationRates(own).gpu,
    "device_memory_used_bytes": lambda nvml, own: nvml.nvmlDeviceGetMemoryInfo(own).used,
    "device_power_watts": lambda nvml, own: Total(  # The growth of energy is the mean power.
        nvml.nvmlDeviceGetTotalEnergyConsumption(own) / 1000
    ),
    "device_clock_mhz": lambda nvml, own: nvml.nvmlDeviceGetClockInfo(own, _SM_CLOCK),
    "device_max_clock_mhz": lambda nvml, own: nvml.nvmlDeviceGetMaxClockInfo(own, _SM_CLOCK),
    "device_temperature_celsius": lambda nvml, own: nvml.nvmlDeviceGetTemperature(own, _OF_GPU),
    "device_power_throttled": partial(_slowed, _POWER),
    "device_thermal_throttled": partial(_slowed, _HEAT),
    "device_hardware_slowdown": partial(_slowed, _HARDWARE),
}


def ascend_part(index: int, uuid: str | None) -> Part:
    """Return how an NPU is read, by DCMI, the driver's C library.

    ``index`` is the number that torch_npu gives it.
    """
    opened: list[_Dcmi] = []

    def read() -> Reading:
        if not opened:
            opened.append(_Dcmi(_logic_id(index)))
        return opened[0].read()

    return Part("NPU", read, index)


def _logic_id(index: int) -> int:
    """Return the number of a device on its host."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    numbers = [int(each) for each in visible.split(",") if each.strip().isdecimal()]
    return numbers[index] if index < len(numbers) else index


def _dcmi() -> ctypes.CDLL:
    failed = OSError(_DCMI)
    for place in _PLACES:
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            failed = error
    raise OSError(f"{_DCMI}: {described(failed)}")


class _AiCore(ctypes.Structure):
    _fields_ = (("freq", ctypes.c_uint), ("cur_freq", ctypes.c_uint))


class _Hbm(ctypes.Structure):
    _fields_ = (
        ("memory_size", ctypes.c_ulonglong),  # MiB.
        ("freq", ctypes.c_uint),
        ("memory_usage", ctypes.c_ulonglong),  # MiB.
        ("temp", ctypes.c_int),
        ("bandwidth_util_rate", ctypes.c_uint),
    )


class _Dcmi:
    """Ask the driver's library; a question that it does not answer is left out.

    Raises:
        OSError: It is not there, or does not know the device.
    """

    def __init__(self, logic_id: int) -> None:
        self._library = library = _dcmi()
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
