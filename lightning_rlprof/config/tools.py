"""Options of single tools: what they add to a capture, and how much they may cost."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from lightning_rlprof.config.command import Command
from lightning_rlprof.config.numbers import Positive, RankList
from lightning_rlprof.config.section import Section, refused

__all__ = ["FinishConfig", "MemoryConfig", "ScheduleConfig", "TorchProfilerConfig"]

_NEEDS = {"interval_ms": "timeline", "max_entries": "snapshot", "stack_depth": "snapshot"}


class ScheduleConfig(Section):
    """Which mini-batches of a capture are profiled; one mini-batch is one optimizer step.

    As `torch.profiler.schedule`, and on as soon as ``active`` is above 0. A part that the end of
    the capture cuts off is kept; stages that step no optimizer are captured whole.
    """

    skip_first: NonNegativeInt = Field(default=0, description="Mini-batches left out at first.")
    wait: NonNegativeInt = Field(
        default=0, description="Mini-batches per cycle that are not watched, the first ones."
    )
    warmup: NonNegativeInt = Field(
        default=0, description="Mini-batches per cycle that are then watched and thrown away."
    )
    active: NonNegativeInt = Field(
        default=0, description="Mini-batches per cycle that are then kept; 0 is no schedule."
    )
    repeat: NonNegativeInt = Field(
        default=0, description="Number of cycles; 0 goes on until the capture closes."
    )

    @model_validator(mode="after")
    def _agrees(self) -> "ScheduleConfig":
        given = [(key, value) for key, value in self if value]
        if given and not self.active:
            key, value = given[0]
            raise refused("needs active above 0: without it there is no schedule", value, key)
        return self


class TorchProfilerConfig(Section):
    """torch.profiler beyond what the block ``integrated`` says."""

    with_stack: bool = Field(
        default=False, description="Record Python stacks: about twice the time and the size."
    )
    schedule: ScheduleConfig = Field(
        default_factory=ScheduleConfig, description="Profile only some mini-batches of a capture."
    )
    max_events: PositiveInt = Field(
        default=20_000_000,
        description="End a capture early, with a warning, when it holds about so many events.",
    )
    max_host_bytes: PositiveInt | None = Field(
        default=None,
        description=(
            "End a capture early when writing it would take more host memory than this; unset, "
            "this rank's part of half of what was available when it began."
        ),
    )


class MemoryConfig(Section):
    """How closely memory is watched in a capture."""

    level: Literal["counters", "timeline", "snapshot"] | None = Field(
        default=None,
        description=(
            "counters: numbers per span; timeline: also a sample every `interval_ms`; snapshot: "
            "also every allocation, written per capture and on OutOfMemoryError. Unset: counters "
            "with `profile_with_memory`, else nothing."
        ),
    )
    interval_ms: Positive = Field(
        default=10.0, description="Time between two samples of the timeline."
    )
    max_entries: PositiveInt = Field(
        default=100_000, description="Allocations and frees that a snapshot holds; older ones go."
    )
    stack_depth: PositiveInt = Field(
        default=32, description="Frames that a snapshot keeps per allocation."
    )

    @model_validator(mode="after")
    def _agrees(self) -> "MemoryConfig":
        for key, level in _NEEDS.items():
            value = getattr(self, key)
            if self.level is None and value != type(self).model_fields[key].default:
                raise refused(f"needs a level, such as level: {level}", value, key)
        return self


class FinishConfig(Section):
    """A command that runs once when a run's files are complete.

    It is started without a shell, off the training thread. Its environment holds RLPROF_RUN (the
    run directory), RLPROF_TOOL, RLPROF_RANK, RLPROF_PID and RLPROF_ROLE, and the same by the names
    of verl's hooks, VERL_PROFILE_SAVE_PATH and so on.
    """

    command: Command = Field(
        default=None,
        description=(
            "Program and arguments, as a list or as one line without anything that only a shell "
            "understands; verl's `finish_hook_cmd`."
        ),
    )
    timeout_s: Positive = Field(
        default=600.0, description="Seconds after which it is stopped, with all that it started."
    )
    all_ranks: bool = Field(default=False, description="Run it on every rank.")
    ranks: RankList | None = Field(
        default=None,
        description=(
            "Ranks that run it, captured or not; an empty list is none. Unset, those that are "
            "captured, and rank 0 where nothing is."
        ),
    )

    @model_validator(mode="after")
    def _agrees(self) -> "FinishConfig":
        if self.all_ranks and self.ranks is not None:
            raise refused("contradicts all_ranks=True: give one of the two", self.ranks, "ranks")
        return self
