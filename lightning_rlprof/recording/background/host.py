"""The machine, the container and this process by Linux' files: CPU, memory, disk, network."""

import hashlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_rlprof.recording.background.readings import Part, Reading, Total

_MOST = 1 << 16  # bytes of a file
_SECTOR = 512  # bytes, of /proc/diskstats whatever the disk
_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"
_VIRTUAL_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")


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
