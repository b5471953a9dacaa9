"""The metrics that rlprof samples in the background, by name: what each means, and its unit."""

from collections.abc import Mapping
from typing import NamedTuple

BACKGROUND_METRICS = "background_metrics"
"""Name of the table with the samples."""

GC_PAUSE, GC_COUNT = "gc_pause_ns", "gc_collections"
"""Counters of steps: pauses of Python's garbage collection, in all threads, and how many."""


class Metric(NamedTuple):
    """Unit and meaning of a metric; ``is_rate`` if a value is the mean since the sample before."""

    unit: str
    is_rate: bool
    text: str


METRICS: Mapping[str, Metric] = {
    "host_cpu_percent": Metric("%", True, "CPU use of the machine; 100 is all CPUs"),
    "host_cpu_cores": Metric("cores", True, "CPUs of the machine in use"),
    "host_cpu_count": Metric("cores", False, "CPUs of the machine"),
    "container_cpu_cores": Metric("cores", True, "CPUs in use by the cgroup of this process"),
    "cpu_quota_cores": Metric("cores", False, "CPU quota of the cgroup"),
    "cpu_throttled_percent": Metric("%", True, "periods in which the CPU quota was used up"),
    "cpu_pressure_percent": Metric("%", True, "time in which a thread waited for a CPU"),
    "memory_pressure_percent": Metric("%", True, "time in which a thread waited for memory"),
    "memory_full_pressure_percent": Metric(
        "%", True, "time in which every active thread waited for memory"
    ),
    "io_pressure_percent": Metric("%", True, "time in which a thread waited for a disk"),
    "io_full_pressure_percent": Metric(
        "%", True, "time in which every active thread waited for a disk"
    ),
    "host_available_bytes": Metric("bytes", False, "memory of the machine that is available"),
    "container_memory_bytes": Metric(
        "bytes", False, "memory of the cgroup, inactive files left out"
    ),
    "container_memory_limit_bytes": Metric("bytes", False, "memory limit of the cgroup"),
    "swap_in_bytes_per_s": Metric("bytes/s", True, "read from swap, by the machine"),
    "swap_out_bytes_per_s": Metric("bytes/s", True, "written to swap, by the machine"),
    "disk_read_bytes_per_s": Metric("bytes/s", True, "read from disks of the machine"),
    "disk_write_bytes_per_s": Metric("bytes/s", True, "written to disks of the machine"),
    "network_received_bytes_per_s": Metric("bytes/s", True, "received, without RDMA"),
    "network_sent_bytes_per_s": Metric("bytes/s", True, "sent, without RDMA"),
    "process_cpu_cores": Metric("cores", True, "CPUs in use by this process"),
    "process_minor_faults_per_s": Metric("1/s", True, "page faults without a read"),
    "process_major_faults_per_s": Metric("1/s", True, "page faults that read from a disk"),
    "device_busy_percent": Metric("%", False, "time in which a kernel ran, by the driver"),
    "device_memory_used_bytes": Metric("bytes", False, "memory in use, by all processes"),
    "device_power_watts": Metric("W", False, "power; the mean since the last sample if known"),
    "device_clock_mhz": Metric("MHz", False, "clock of the SMs or AI cores"),
    "device_max_clock_mhz": Metric("MHz", False, "highest clock of the SMs or AI cores"),
    "device_temperature_celsius": Metric("°C", False, "temperature of the chip"),
    "device_power_throttled": Metric("", False, "1 if the clock is lowered by the power limit"),
    "device_thermal_throttled": Metric("", False, "1 if the clock is lowered by heat"),
    "device_hardware_slowdown": Metric(
        "", False, "1 if hardware lowers the clock, by power or heat"
    ),
}
"""All of them. Those of ``host``, ``container``, CPU, memory, swap, disk and network are of the
first rank of each host."""
