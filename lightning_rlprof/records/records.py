"""The words of this package as frozen data: spans, headers, notes and the known stages."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import msgspec

from lightning_rlprof.records.notes import Fact

FORMAT = 1
"""Version of the trace format that this package writes; it reads this one and older ones."""

EXPORT: Mapping[str, str] = {"written_by": "lightning_rlprof"}
"""What an exported trace says of itself beside its events."""

JOB_VARIABLE = "RLPROF_JOB"
"""Variable of the environment that all processes of a program share: they write one run."""

FOLDER_VARIABLE = "RLPROF_FOLDER"
"""Variable with the folder in which ``rlprof run`` was typed: relative paths start there."""

SIGNS_VARIABLE = "RLPROF_SIGNS"
"""Variable with a folder where processes tell ``rlprof run`` what they are and what they record."""

Number = int | float
"""What a counter may hold."""

Kind = Literal["epoch", "step", "stage", "region", "mark"]
"""What a span is."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""The kinds in the order of their codes."""

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
)
"""Regions that the callback records of Lightning's loop."""

VALIDATIONS: tuple[str, ...] = ("validation", "sanity_check")
"""Regions that it records of validations in a fit, whose work does not count as training."""


SAMPLE, FIRST_TOKEN = "sample", "first token"
"""How the marks of a sample are named: ``sample trained`` tells its fate, by the counter sample."""

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

NO_KNOWN_FATE = "unknown"
"""Stands in the mark for a word that is none of them."""

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


OPTIMIZER_STEP = "optimizer step"
"""The unit of steps in a run that an optimizer alone divides."""


@dataclass(frozen=True)
class Header:
    """First line of a rank's trace file: who recorded, where, when and with what.

    ``unix_ns`` and ``clock_ns`` are read together: ``unix = t - clock_ns + unix_ns`` turns a span's
    time into the host's wall clock. ``device`` is the kind, ``device_name`` the model; what other
    tools recorded has the model alone, as ``device``. ``chip`` is what CANN's files say of an
    Ascend: ``cube_cores`` and ``cube_mhz``. ``world_size`` of an open world, where processes come
    and go, is that of the ranks up to this one. ``step_unit`` is `OPTIMIZER_STEP` where nothing
    tells what the steps of the program's own loop are.
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


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a run's reader must know: what was not recorded, and why.

    Attributes:
        clock_ns: When it was made, on the rank's monotonic clock.
        level: ``info``, ``warning`` or ``error``.
        text: For people.
        code: For programs, see `lightning_rlprof.records.notes`; empty if it was written without.
        facts: Numbers and names that belong to the code.
    """

    clock_ns: int
    level: str
    text: str
    code: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)


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
        value = value.detach() if hasattr(value, "detach") else value  # torch warns where it learns
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
