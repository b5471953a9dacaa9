"""What spans of OpenTelemetry mean, for whatever reads or writes them: steps, stages, waits, ranks.

NeMo-RL, Megatron, ROLL and the proposed conventions for reinforcement learning name their spans in
the namespace ``rl``, where the last part of a name counts: ``rl.grpo.step`` is a step. Elsewhere a
span counts only if its name is that of a known stage or a step.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from lightning_rlprof.records.records import KINDS, STAGES, Kind
from lightning_rlprof.records.stage_aliases import BACKPRESSURES, DATA_WAITS, standard_stage

BUCKET, IDLE = "rl.bucket", "idle"
"""The attribute that says what a span's time is good for, and its value for a wait."""

STEP, RANK, WORLD_SIZE, ROLE = "rl.step", "nv.dl.rank", "nv.dl.world_size", "rl.role"
HOST, PROCESS, THREAD, SERVICE = "host.name", "process.pid", "thread.id", "service.name"
RUNS = ("rl.run.id", "nv.dl.run.uuid")
"""Attributes of a process that say of which run it is."""

KIND, NAME = "rlprof.kind", "rlprof.name"
"""Attributes of spans that this package wrote: what they are in the run."""

STEPS = ("step", "step_total", "pipeline_step_total")
"""Names of steps in the timers of several frameworks."""

COUNTER_PREFIX = "rlprof.counter."
"""How attributes begin that are counters of this package's own spans."""

_RL, _WAITING = "rl.", "rl.idle."
_ROLES = (ROLE, "nv.dl.role")
_NUMBERS = (STEP, "rl.iteration")
_JOB = "job"  # It is as long as the run.
_PROPOSED = {
    "step": "loop",
    "actor_generate": "sample",
    "compute_reward": "reward",
    "actor_update": "train",
    "weight_sync": "sync",
}
KEPT_PREFIXES = (*_NUMBERS, THREAD, COUNTER_PREFIX)
"""How attributes of a span begin that say more than what it is."""

_MEANT = {theirs: ours for ours, theirs in _PROPOSED.items()}
_WAITS = frozenset(f"{DATA_WAITS} {BACKPRESSURES}".split())
_MAX_NUMBER = 2**52


class Meaning(NamedTuple):
    """What a span is in a run."""

    kind: Kind
    name: str


class Place(NamedTuple):
    """What a process says of itself, None where it says nothing: its rank, its world, its role."""

    rank: int | None
    world_size: int | None
    role: str | None


def is_of_training(name: str, attributes: Mapping[str, Any]) -> bool:
    """Return whether a span is one of a training's own, which count whatever their name is."""
    return name.startswith(_RL) or BUCKET in attributes


def meaning_of(name: str, attributes: Mapping[str, Any]) -> Meaning | None:
    """Return what a span is; None for one of a library, and for that of a whole job.

    Example::

        >>> meaning_of("rl.grpo.generation", {}), meaning_of("rl.idle.validation", {})[1]
        (Meaning(kind='stage', name='actor_generate'), 'wait_for_data#validation')
        >>> meaning_of("optimizer.step", {}), meaning_of("rl.loop", {})
        (None, Meaning(kind='step', name='step'))
    """
    if isinstance(own := attributes.get(NAME), str) and attributes.get(KIND) in KINDS:
        return Meaning(attributes[KIND], own)
    is_wait = attributes.get(BUCKET) == IDLE or name.startswith(_WAITING)
    return _meaning(name, is_wait=is_wait, is_training=is_of_training(name, attributes))


@lru_cache(maxsize=1_000)
def _meaning(name: str, *, is_wait: bool, is_training: bool) -> Meaning | None:
    last = name.rpartition(".")[2] if is_training else name
    stage = (_MEANT.get(last) if is_training else None) or standard_stage(last)
    if last in STEPS or stage == "step":
        return Meaning("step", "step")
    if is_wait:
        is_known = stage in _WAITS or stage == "weight_sync"
        return Meaning("stage", stage if is_known else f"wait_for_data#{last}")
    is_stage = stage in STAGES or (is_training and last != _JOB)
    return Meaning("stage", stage) if is_stage else None


def name_of(meaning: Meaning) -> str:
    """Return a span's name in the namespace ``rl``, as proposed where there is a proposal.

    Example::

        >>> name_of(Meaning("step", "step")), name_of(Meaning("stage", "buffer_starvation"))
        ('rl.loop', 'rl.idle.buffer_starvation')
    """
    return (_WAITING if is_wait(meaning) else _RL) + _PROPOSED.get(meaning.name, meaning.name)


def is_wait(meaning: Meaning) -> bool:
    """Return whether a span is a wait for data or for space, by its name."""
    return meaning.name.partition("#")[0] in _WAITS


def number_in(attributes: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these attributes that is a number of something; texts count, too."""
    for name in names:
        value = attributes.get(name)
        if isinstance(value, str) and value.isdecimal() and len(value) < 16:
            value = int(value)
        if type(value) is int and 0 <= value < _MAX_NUMBER:
            return value
    return None


def place_in(attributes: Mapping[str, Any]) -> Place:
    """Return which rank and role a process has, by its attributes or those of one of its spans."""
    rank, world = (number_in(attributes, name) for name in (RANK, WORLD_SIZE))
    role = next((each for name in _ROLES if (each := attributes.get(name))), None)
    return Place(rank, world, None if role is None else str(role))


class StepNumbers:
    """Number the steps of a process as it does, from 1 where it counts from 0."""

    def __init__(self) -> None:
        self._shift: int | None = None

    def next(self, attributes: Mapping[str, Any], last: int) -> int:
        """Return the number of the next step: the told one if it is larger than the last one."""
        told = number_in(attributes, *_NUMBERS)
        if told is None:
            return last + 1
        if self._shift is None:
            self._shift = int(told == 0)
        return told + self._shift if told + self._shift > last else last + 1
