"""The words of this package as frozen data: spans, their counters, headers, notes, known stages."""

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec

FORMAT = 1
"""Version of the trace format that this package writes; it reads this one and older ones."""

EXPORT: Mapping[str, str] = {"written_by": "lightning_rlprof"}
"""What an exported trace says of itself beside its events."""

FIRST_ROLE_RANK = 10_000
"""Processes with a role and no rank in the job's world, such as servers, are counted from here."""

JOB_VARIABLE = "RLPROF_JOB"
"""Variable of the environment that all processes of a program share: they write one run."""

FOLDER_VARIABLE = "RLPROF_FOLDER"
"""Variable with the folder in which ``rlprof run`` was typed: relative paths start there."""

SIGNS_VARIABLE = "RLPROF_SIGNS"
"""Variable with a folder where processes tell ``rlprof run`` what they are and what they record."""

STAGES: tuple[str, ...] = (
    "actor_generate",
    "actor_compute_log_prob",
    "actor_image_embeds",
    "actor_update",
    "reference_compute_log_prob",
    "critic_compute_values",
    "critic_update",
    "compute_reward",
    "compute_advantage",
    "weight_sync",
)
"""The stages of an RL step that every tool of this field knows, by MindSpeed-RL's names."""

PHASES: tuple[str, ...] = (
    "data_fetch",
    "batch_transfer",
    "training_step",
    "backward",
    "optimizer_step",
    "save_checkpoint",
    "logging",
)
"""Regions that the callback records of Lightning's loop."""

VALIDATIONS: tuple[str, ...] = ("validation", "sanity_check")
"""Regions that it records of validations in a fit, whose work does not count as training."""

SAMPLE, FIRST_TOKEN = "sample", "first token"
"""How the marks of a sample are named: ``sample trained`` tells its fate, by the counter sample."""

NO_KNOWN_FATE = "unknown"
"""Stands in the mark for a word that is none of them."""

OPTIMIZER_STEP = "optimizer step"
"""The unit of steps in a run that an optimizer alone divides."""

ROLLOUT_AND_UPDATES = "rollout and its updates"
"""The unit of steps in a run that rollouts divide."""

EXPERTS = "tokens_per_expert"
"""Counts of tokens by layer and expert: a histogram per layer, ``tokens_per_expert[3]``."""

LENGTHS = "lengths"
"""Lengths of responses in tokens, a histogram."""

MAX_STACKS_S = 60.0
"""Most seconds for which stacks are sampled on request; `hang_reports` takes 10 ms to import."""

_PER_DOUBLING = 4
_BIN_NAME = re.compile(r"(.+)\[(\d+)\]")

BACKGROUND_METRICS = "background_metrics"
ENGINE_KV_CACHE = "engine_kv_cache_percent"
"""Name of the table with the samples."""

GC_PAUSE, GC_COUNT = "gc_pause_ns", "gc_collections"
"""Counters of steps: pauses of Python's garbage collection, in all threads, and how many."""

SHADOW = "shadow"
"""Counter that marks a shadow step."""

STEP_END = "step_end_ns"
"""Counter of a step: how much of its start rlprof spent on the end of the step before it."""

_64_BITS = (1 << 64) - 1

Number = int | float
"""What a counter may hold."""

Kind = Literal["epoch", "step", "stage", "region", "mark"]
"""What a span is."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""The kinds in the order of their codes."""

Fate = Literal[
    "trained",
    "zero_advantage",
    "truncated",
    "filtered",
    "stale",
    "aborted",
    "retried",
    "evaluation",
]
"""What became of a sample; if several are recorded, the first of these counts."""

FATES: tuple[Fate, ...] = get_args(Fate)
"""All fates, from the one that used the sample most."""


@dataclass(frozen=True, slots=True)
class Span:
    """One named stretch of time on one rank.

    Attributes:
        name: Stage or region, e.g. ``actor_update``.
        kind: ``epoch | step | stage | region | mark``.
        rank: Global rank of the process.
        step: RL step, counted from 1; 0 before training.
        start_ns: Start on the rank's monotonic clock, in nanoseconds.
        end_ns: End on the same clock; equal to ``start_ns`` for a mark.
        thread: Identity of the thread, see `Header` for names.
        id: Number of the span, unique in its rank.
        parent: ``id`` of the span that it was opened in, or None.
        counters: Numbers attached to it, e.g. ``{"tokens": 4096}``.

    Example::

        >>> Span("actor_update", "stage", 0, 1, 5, 9, 1, 1, None).duration_ns
        4
    """

    name: str
    kind: Kind
    rank: int
    step: int
    start_ns: int
    end_ns: int
    thread: int
    id: int
    parent: int | None
    counters: Mapping[str, Number] | None = None

    @property
    def duration_ns(self) -> int:
        """Length in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Header:
    """First line of a rank's trace file: who recorded, where, when and with what.

    ``unix_ns`` and ``clock_ns`` are read together: ``unix = t - clock_ns + unix_ns`` turns a span's
    time into the host's wall clock. ``device`` is the kind, ``device_name`` the model; what other
    tools recorded has the model alone, as ``device``. ``chip`` is what CANN's files say of an
    Ascend: ``cube_cores`` and ``cube_mhz``. ``world_size`` of an open world, where processes come
    and go, is that of the ranks up to this one. ``step_unit`` is `OPTIMIZER_STEP` where nothing
    tells what the steps of the program's own loop are, and `ROLLOUT_AND_UPDATES` where calls do.
    """

    format: Annotated[int, msgspec.Meta(ge=1)]
    run_id: str
    rank: int
    world_size: int
    role: str
    host: str
    pid: int
    device: str
    unix_ns: int
    clock_ns: int
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    device_name: str | None = None
    open_world: bool = False
    chip: Mapping[str, int] = field(default_factory=dict)
    step_unit: str = ""

    @property
    def hardware(self) -> str:
        """The model of the device, ``NVIDIA H100 80GB HBM3``, or its kind where that is unknown."""
        return self.device_name or self.device


class Note(msgspec.Struct, array_like=True, tag="note", frozen=True):
    """Something that a run's reader must know: what was not recorded, and why.

    Notes of older runs end after their text.

    Attributes:
        clock_ns: When it was made, on the rank's monotonic clock.
        level: ``info``, ``warning`` or ``error``.
        text: For people.
        code: For programs, see `lightning_rlprof.records.notes`; empty if it was written without.
        facts: Numbers and texts that belong to the code.
    """

    clock_ns: int
    level: str
    text: str
    code: str = ""
    facts: dict[str, Any] = {}


def stated_world_size(headers: Iterable[Header]) -> int:
    """Return how many ranks the headers say that a training had; 0 without any."""
    return max((header.world_size for header in headers), default=0)


def as_number(value: object) -> Number | None:
    """Read a number out of a NumPy scalar, a tensor of one element or the like; None if it is none.

    Example::

        >>> as_number(True), as_number("3"), as_number(object())
        (1, None, None)
    """
    if isinstance(value, str):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        # PyTorch warns about float() of a tensor that requires a gradient.
        value = value.detach() if hasattr(value, "detach") else value
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def copy_name(kind: str | None) -> str:
    """Return the name of a copy as torch's traces spell it: what lies in a table is its kind.

    Example::

        >>> copy_name("HtoD"), copy_name("memset"), copy_name(None)
        ('Memcpy HtoD', 'Memset', 'Memcpy')
    """
    return "Memset" if kind == "memset" else f"Memcpy {kind or ''}".rstrip()


def bin_of(value: float) -> int:
    """Return the bin of a value: 0 below 1, and n from ``2 ** ((n - 1) / 4)`` on.

    Example::

        >>> [bin_of(value) for value in (0, 1, 2, 3, 1024)]
        [0, 1, 5, 7, 41]
    """
    return 0 if value < 1 else 1 + math.floor(_PER_DOUBLING * math.log2(value) + 1e-9)


def bin_start(number: int) -> float:
    """Return the least value of a bin.

    Example::

        >>> [round(bin_start(number), 2) for number in (0, 1, 2, 5)]
        [0.0, 1.0, 1.19, 2.0]
    """
    return 0.0 if number == 0 else float(2.0 ** ((number - 1) / _PER_DOUBLING))


def bin_name(name: str, number: int) -> str:
    """Return the counter of a bin."""
    return f"{name}[{number}]"


def bin_in_name(counter: str) -> tuple[str, int] | None:
    """Return the histogram and the bin that a counter is of, None if it is of none.

    Example::

        >>> bin_in_name("lengths[17]"), bin_in_name("tokens")
        (('lengths', 17), None)
    """
    found = _BIN_NAME.fullmatch(counter)
    return None if found is None else (found[1], int(found[2]))


def expert_name(layer: int, expert: int) -> str:
    """Return the counter of an expert's tokens.

    Example::

        >>> expert_name(3, 17), expert_in_name("tokens_per_expert[3][17]")
        ('tokens_per_expert[3][17]', (3, 17))
    """
    return bin_name(bin_name(EXPERTS, layer), expert)


def expert_in_name(counter: str) -> tuple[int, int] | None:
    """Return the layer and the expert whose tokens a counter counts, None if it does not."""
    found = bin_in_name(counter)
    layer = None if found is None else bin_in_name(found[0])
    return None if found is None or layer is None or layer[0] != EXPERTS else (layer[1], found[1])


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
    "engine_running_requests": Metric("requests", False, "requests that rollout engines run"),
    "engine_waiting_requests": Metric("requests", False, "requests that wait at rollout engines"),
    ENGINE_KV_CACHE: Metric("%", False, "KV cache in use, of the fullest rollout engine"),
    "engine_preemptions_per_s": Metric("1/s", True, "requests that rollout engines preempt"),
    "engine_prompt_tokens_per_s": Metric("tokens/s", True, "prompt tokens of rollout engines"),
    "engine_generated_tokens_per_s": Metric("tokens/s", True, "tokens that they generate"),
}
"""All of them. Those of ``host``, ``container``, CPU, memory, swap, disk and network are of the
first rank of each host, those of ``engine`` of rank 0."""


def pair_of(step: int) -> int:
    """Return the pair of a step: steps 1 and 2 are pair 1, steps 3 and 4 pair 2."""
    return (step + 1) // 2


def is_shadow(step: int) -> bool:
    """Return whether a step is the shadow step of its pair, on every rank alike.

    Which of the two it is follows from a hash of the pair, the last part of SplitMix64. So nothing
    periodic in the training falls on one kind of step.

    Example::

        >>> [step for step in range(1, 13) if is_shadow(step)]
        [1, 4, 5, 8, 9, 12]
    """
    mixed = pair_of(step) * 0x9E3779B97F4A7C15 & _64_BITS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _64_BITS
    return (mixed ^ mixed >> 31) & 1 == step & 1
