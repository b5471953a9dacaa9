"""Host metrics from files as Linux writes them, and what is read where some are not there."""

from pathlib import Path

import pytest

from lightning_rlprof.recording.background import readings
from lightning_rlprof.recording.background.readings import (
    HostClaim,
    HostFiles,
    Reading,
    Total,
    cgroup_folders,
    host_parts,
    process_parts,
)

V2 = "31 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate\n"
V1 = "35 23 0:30 {root} /sys/fs/cgroup/{names} rw - cgroup cgroup rw,{names}\n"
STAT = """\
cpu  100 10 40 800 50 0 0 0 0 0
cpu0 50 5 20 400 25 0 0 0 0 0
cpu1 50 5 20 400 25 0 0 0 0 0
intr 12345 1 2 3
ctxt 99
"""
DISKS = """\
   8       0 sda 5 0 100 7 6 0 50 9 0 0 0 0 0 0 0 0 0
   8       1 sda1 5 0 100 7 6 0 50 9 0 0 0 0 0 0 0 0 0
   7       0 loop0 5 0 900 7 6 0 900 9 0 0 0 0 0 0 0 0 0
"""
NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0
  eth0: 300 1 0 0 0 0 0 0 40 1 0 0 0 0 0 0
docker0: 300 1 0 0 0 0 0 0 40 1 0 0 0 0 0 0
"""
PSI = """\
some avg10=0.00 avg60=0.00 avg300=0.00 total=2000000
full avg10=0.00 avg60=0.00 avg300=0.00 total=1000000
"""


class Machine:
    """A folder with the files of a machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = HostFiles(root)

    def write(self, **texts: str) -> None:
        for name, text in texts.items():
            self.put(name.replace("__", "/"), text)

    def put(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def part(self, name: str) -> Reading:
        parts = {part.name: part for part in [*host_parts(self.files), *process_parts(self.files)]}
        return parts[name].read()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_cpu_use_counts_neither_idle_time_nor_waiting_for_a_disk(machine: Machine) -> None:
    machine.write(proc__stat=STAT)
    reading = machine.part("host CPU")
    assert reading.totals["host_cpu_percent"] == Total(100 * 150, per=1000)
    assert reading.totals["host_cpu_cores"].value * readings._ticks() == pytest.approx(150)
    assert reading.values == {"host_cpu_count": 2}


def test_the_process_has_its_cpu_time_and_faults_whatever_it_is_called(machine: Machine) -> None:
    numbers = " ".join(map(str, range(4, 53)))  # field N of the manual is N
    machine.write(proc__self__stat=f"17 (a) b) S {numbers}\n")
    totals = machine.part("process").totals
    assert totals["process_cpu_cores"].value * readings._ticks() == pytest.approx(14 + 15)
    assert totals["process_minor_faults_per_s"] == Total(10)
    assert totals["process_major_faults_per_s"] == Total(12)


def test_memory_and_swap(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings.os, "sysconf", lambda name: 4096)
    machine.write(
        proc__meminfo="MemTotal:  9 kB\nMemAvailable:  7 kB\n",
        proc__vmstat="nr_free_pages 1\npswpin 2\npswpout 3\n",
    )
    assert machine.part("host memory").values == {"host_available_bytes": 7 * 1024}
    assert machine.part("swap").totals == {
        "swap_in_bytes_per_s": Total(2 * 4096),
        "swap_out_bytes_per_s": Total(3 * 4096),
    }


def test_a_disk_counts_once_and_neither_its_partitions_nor_loops(machine: Machine) -> None:
    machine.write(proc__diskstats=DISKS)
    for name in ("sda", "loop0"):
        (machine.root / "sys/block" / name).mkdir(parents=True)
    assert machine.part("disk").totals == {
        "disk_read_bytes_per_s": Total(100 * 512),
        "disk_write_bytes_per_s": Total(50 * 512),
    }


def test_a_machine_without_disks_says_so(machine: Machine) -> None:
    (machine.root / "sys/block/loop0").mkdir(parents=True)
    with pytest.raises(OSError, match="there is no disk"):
        machine.part("disk")


@pytest.mark.parametrize(("real", "received"), [(["eth0"], 300), ([], 600)])
def test_a_network_counts_real_interfaces_and_in_a_container_its_own(
    machine: Machine, real: list[str], received: int
) -> None:
    machine.write(proc__net__dev=NET)
    for name in real:
        (machine.root / f"sys/class/net/{name}/device").mkdir(parents=True)
    assert machine.part("network").totals["network_received_bytes_per_s"] == Total(received)


def in_v2(machine: Machine, root: str = "/", path: str = "/pod/c1") -> None:
    machine.write(proc__self__cgroup=f"0::{path}\n", proc__self__mountinfo=V2.format(root=root))


@pytest.mark.parametrize(
    ("root", "path", "folder"),
    [
        ("/", "/pod/c1", "sys/fs/cgroup/pod/c1"),
        ("/", "/", "sys/fs/cgroup"),  # in a cgroup namespace
        ("/pod/c1", "/pod/c1", "sys/fs/cgroup"),  # without one
        ("/pod", "/pod/c1", "sys/fs/cgroup/c1"),
    ],
)
def test_the_quota_counts_periods_of_cgroup_v2(
    machine: Machine, root: str, path: str, folder: str
) -> None:
    in_v2(machine, root, path)
    machine.put(f"{folder}/cpu.max", "150000 100000\n")
    machine.put(f"{folder}/cpu.stat", "usage_usec 7\nnr_periods 40\nnr_throttled 10\n")
    reading = machine.part("CPU quota")
    assert reading.totals == {"cpu_throttled_percent": Total(1000, per=40)}
    assert reading.values == {"cpu_quota_cores": 1.5}


def test_throttled_time_is_not_read_as_it_is_summed_over_cpus(machine: Machine) -> None:
    """8 threads that all wait half of a second are 4 s of it."""
    in_v2(machine)
    machine.put("sys/fs/cgroup/pod/c1/cpu.max", "100000 100000\n")
    stat = "usage_usec 7\nnr_periods 10\nnr_throttled 5\nthrottled_usec 4000000\n"
    machine.put("sys/fs/cgroup/pod/c1/cpu.stat", stat)
    assert {*machine.part("CPU quota").totals} == {"cpu_throttled_percent"}


def test_a_quota_may_be_of_a_cgroup_around(machine: Machine) -> None:
    in_v2(machine)
    machine.put("sys/fs/cgroup/pod/c1/cpu.max", "max 100000\n")
    machine.put("sys/fs/cgroup/pod/cpu.max", "200000 100000\n")
    machine.put("sys/fs/cgroup/pod/cpu.stat", "nr_periods 4\nnr_throttled 1\n")
    assert machine.part("CPU quota").values == {"cpu_quota_cores": 2.0}


def test_version_1_has_its_controllers_apart(machine: Machine) -> None:
    machine.write(
        proc__self__cgroup="5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n",
        proc__self__mountinfo=V1.format(root="/", names="cpu,cpuacct")
        + V1.format(root="/job", names="memory")
        + V2.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
    )
    folder = "sys/fs/cgroup/cpu,cpuacct/job"
    machine.put(f"{folder}/cpu.cfs_quota_us", "50000\n")
    machine.put(f"{folder}/cpu.cfs_period_us", "100000\n")
    machine.put(f"{folder}/cpu.stat", "nr_periods 33\nnr_throttled 18\nthrottled_time 249000000\n")
    machine.put(f"{folder}/cpuacct.usage", "3000000000\n")
    memory = "sys/fs/cgroup/memory"
    machine.put(f"{memory}/memory.limit_in_bytes", "1000\n")
    machine.put(f"{memory}/memory.usage_in_bytes", "900\n")
    machine.put(f"{memory}/memory.stat", "inactive_file 1\ntotal_inactive_file 200\n")
    assert machine.part("CPU quota") == Reading(
        {"cpu_throttled_percent": Total(1800, per=33)}, {"cpu_quota_cores": 0.5}
    )
    assert machine.part("CPU of the container").totals == {"container_cpu_cores": Total(3.0)}
    assert machine.part("memory limit").values == {
        "container_memory_bytes": 700,
        "container_memory_limit_bytes": 1000,
    }
    assert [*cgroup_folders(machine.files, "io")] == [("/sys/fs/cgroup/unified", True)]


def test_memory_of_cgroup_v2(machine: Machine) -> None:
    in_v2(machine)
    folder = "sys/fs/cgroup/pod/c1"
    machine.put(f"{folder}/memory.max", "1000\n")
    machine.put(f"{folder}/memory.current", "900\n")
    machine.put(f"{folder}/memory.stat", "anon 600\ninactive_file 250\n")
    assert machine.part("memory limit").values["container_memory_bytes"] == 650


def test_without_a_limit_there_is_nothing_to_sample_and_nothing_missing(machine: Machine) -> None:
    in_v2(machine)
    machine.put("sys/fs/cgroup/pod/c1/cpu.max", "max 100000\n")
    machine.put("sys/fs/cgroup/pod/c1/memory.max", "max\n")
    assert machine.part("CPU quota") == Reading()
    assert machine.part("memory limit") == Reading()


def test_a_cgroup_that_says_nothing_is_missing(machine: Machine) -> None:
    in_v2(machine)
    for name in ("CPU quota", "memory limit", "CPU of the container"):
        with pytest.raises(OSError, match="no cgroup has it"):
            machine.part(name)


def test_pressure_is_the_containers_else_the_machines(machine: Machine) -> None:
    in_v2(machine)
    machine.put("proc/pressure/memory", PSI)
    machine.put("proc/pressure/cpu", PSI)
    machine.put("sys/fs/cgroup/pod/c1/memory.pressure", PSI.replace("000000", "0000"))
    assert machine.part("memory pressure").totals == {
        "memory_pressure_percent": Total(2.0),
        "memory_full_pressure_percent": Total(1.0),
    }
    assert machine.part("cpu pressure").totals == {"cpu_pressure_percent": Total(200.0)}
    with pytest.raises(FileNotFoundError):
        machine.part("io pressure")


def test_without_proc_every_part_raises_and_none_crashes(machine: Machine) -> None:
    parts = [*host_parts(machine.files), *process_parts(machine.files)]
    assert len(parts) == 12
    for part in parts:
        with pytest.raises(OSError, match=r"No such file|no cgroup"):
            part.read()


def test_files_are_opened_once_and_closed(machine: Machine) -> None:
    machine.put("proc/a", "1")
    assert machine.files.read("/proc/a") == "1"
    machine.put("proc/a", "2")
    assert machine.files.read("/proc/a") == "2"
    machine.files.close()
    machine.files.close()
    assert not machine.files._open


@pytest.mark.skipif(readings.sys.platform != "linux", reason="a name space of Linux")
def test_one_process_of_a_host_samples_it_until_it_ends(tmp_path: Path) -> None:
    run, of_same_name = tmp_path / "a" / "run", tmp_path / ("b" * 200) / "run"
    first, second, other = HostClaim(run), HostClaim(run), HostClaim(of_same_name)
    assert (first.is_mine, second.is_mine, other.is_mine) == (True, False, True)
    second.close()
    first.close()
    third = HostClaim(run)
    assert third.is_mine
    for claim in (third, other):
        claim.close()


def test_elsewhere_no_process_samples_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings.sys, "platform", "darwin")
    assert not HostClaim(Path("run")).is_mine
