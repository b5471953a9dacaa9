"""Options of single tools: what they add to a capture, and how much they may cost."""

import shlex
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from lightning_rlprof.config.numbers import RankList
from lightning_rlprof.config.section import Section, refused

__all__ = ["FinishConfig", "MemoryConfig", "ScheduleConfig", "TorchProfilerConfig"]


class ScheduleConfig(Section):
    """Which mini-batches of a capture are profiled; one mini-batch is one optimizer step.

    As `torch.profiler.schedule`, and on as soon as ``active`` is above 0. A part that the end of
    the capture cuts off is kept.
    """

    skip_first: NonNegativeInt = Field(default=0, description="Mini-batches to leave out at first.")
    wait: NonNegativeInt = Field(default=0, description="Then per cycle: how many are not watched.")
    warmup: NonNegativeInt = Field(default=0, description="… are watched and thrown away.")
    active: NonNegativeInt = Field(default=0, description="… are kept; 0 switches schedules off.")
    repeat: NonNegativeInt = Field(
        default=0, description="Number of cycles; 0 repeats until the capture closes."
    )

    @model_validator(mode="after")
    def _agrees(self) -> "ScheduleConfig":
        given = [key for key in self.model_fields_set if getattr(self, key)]
        if given and not self.active:
            raise refused("needs active above 0: without it nothing is profiled", key=given[0])
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
            "half of what was available when it began."
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
    interval_ms: PositiveFloat = Field(
        default=10.0, strict=False, description="Time between two samples of the timeline."
    )
    max_entries: PositiveInt = Field(
        default=100_000, description="Allocations that a snapshot remembers; older ones go."
    )
    stack_depth: PositiveInt = Field(
        default=32, description="Frames that a snapshot keeps per allocation."
    )


def _command(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise refused(f"cannot be split into words ({error})", value) from error
        shell = {"|", "||", "&", "&&", ";", ">", ">>", "<"} & set(value)
        if shell:
            raise refused(
                f"holds {shell.pop()!r}, and no shell runs it: write a script and give its name",
                value,
            )
    if isinstance(value, list) and not value:
        raise refused("is empty: give the program and its arguments, or null", value)
    return value


class FinishConfig(Section):
    """A command that runs once when a run's files are complete.

    It is started without a shell, off the training thread. Its environment holds RLPROF_RUN (the
    run directory), RLPROF_TOOL, RLPROF_RANK, RLPROF_PID and RLPROF_ROLE.
    """

    command: Annotated[list[str] | None, BeforeValidator(_command)] = Field(
        default=None, description="Program and arguments, as a list or as one line."
    )
    timeout_s: PositiveFloat = Field(
        default=600.0, strict=False, description="Seconds after which it is stopped."
    )
    all_ranks: bool = Field(default=False, description="Run it on every rank.")
    ranks: RankList | None = Field(
        default=None, description="Ranks that run it; unset, those that are captured."
    )
