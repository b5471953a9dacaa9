"""Options of single tools: what they add to a capture, and how much they may cost.

The block ``integrated`` exactly as MindSpeed-RL users write it: every key, every default.

Options of an Ascend capture beyond the block ``integrated``.

Options for Nsight Systems: those of its command line under Ray, and what becomes of reports.

How one copy of the model is spread over ranks: the sizes of its process groups.

Which ranks of a role are captured, and how: verl's block per role and its union.
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from os import PathLike, fspath
from os.path import expanduser
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from lightning_rlprof.config.stages import StageChoice
from lightning_rlprof.config.validation import (
    Ranks,
    Section,
    SomeRanks,
    StepNumber,
    near,
    refused,
)
from lightning_rlprof.errors import ConfigError

SAVE_PATH = "./profiler_data"
"""Where runs go unless told otherwise."""


def _path(value: Any) -> Any:
    # MindSpeed-RL's code defaults to "", although its documents say ./profiler_data.
    if value is None or value == "":
        return SAVE_PATH
    if value == "???":
        raise refused("is OmegaConf's marker for a missing value: give a directory", value)
    path = fspath(value) if isinstance(value, PathLike) else value
    if isinstance(path, str) and "://" in path:
        raise refused("is a URL: give a directory, and upload the run afterwards", value)
    return expanduser(path) if isinstance(path, str) else path


class IntegratedConfig(Section):
    """What a capture holds, and for which stage, steps and ranks it is on.

    Spans of all stages are always recorded; these keys choose what is captured, which is expensive.
    """

    profile: bool | None = None
    """Main switch of captures. false always wins. Unset: on as soon as any capture option is set,
    otherwise off."""

    mstx: bool = False
    """Add stage markers to the device trace: MSTX on Ascend, NVTX on NVIDIA."""

    stage: StageChoice = "all"
    """Stages to capture: all (whole steps), one stage, or a list."""

    profile_save_path: Annotated[str, BeforeValidator(_path)] = SAVE_PATH
    """Output directory; each training creates its run directory there. `~` is your home. A relative
    path starts where `rlprof run` was typed, else where the program is."""

    profile_export_type: Literal["text", "db"] = "text"
    """Format of an Ascend capture; db needs about 70% less disk space."""

    profile_step_start: StepNumber = 1
    """First step to capture; steps count from 1."""

    profile_step_end: StepNumber = 2
    """First step after the captured ones (the end is excluded)."""

    profile_level: Literal["level_none", "level0", "level1", "level2"] = "level0"
    """Depth of an Ascend capture: level_none records markers only, level2 everything."""

    profile_with_memory: bool = False
    """Record allocations of device memory."""

    profile_record_shapes: bool = False
    """Record the shapes of operator inputs."""

    profile_with_cpu: bool = True
    """Record host activity."""

    profile_with_npu: bool = True
    """Record device activity, on NPU or GPU."""

    profile_with_module: bool = False
    """Record the module hierarchy."""

    profile_analysis: bool = False
    """Parse Ascend captures after the training, in a separate process."""

    profile_ranks: SomeRanks = "all"
    """Ranks to capture: all, or a list of global ranks."""

    @model_validator(mode="after")
    def _agrees(self) -> "IntegratedConfig":
        if self.profile_step_end <= self.profile_step_start:
            raise refused(
                f"must be greater than profile_step_start={self.profile_step_start}: the end is "
                f"excluded, so one step needs profile_step_end={self.profile_step_start + 1}",
                self.profile_step_end,
                "profile_step_end",
            )
        if self.mstx and not self.profile_with_npu:
            raise refused(
                "contradicts profile_with_npu=False: markers live in the device's trace; "
                "set profile_with_npu: true or mstx: false",
                self.mstx,
                "mstx",
            )
        return self

    @property
    def lightweight(self) -> bool:
        """Whether a capture holds markers only: ``mstx``, ``level_none`` and no host activity."""
        return self.mstx and self.profile_level == "level_none" and not self.profile_with_cpu


_OWN_DOMAIN = "rlprof"


class NpuConfig(Section):
    """What torch_npu.profiler can do beyond the 16 keys; each is passed on where it exists.

    A key that is set and that the installed torch_npu does not know is refused before training.
    """

    device_ranges: bool = False
    """Also put stage ranges into the current stream, so the trace shows them in device time. Costs
    about ten times as much as a host range."""

    experimental: dict[str, Any] = Field(default_factory=dict)
    """Options of torch_npu's `_ExperimentalConfig`, by its own names: `l2_cache: true`,
    `aic_metrics: MemoryAccess`, `host_sys: [cpu, mem]`, `gc_detect_threshold: 0`,
    `mstx_domain_exclude: [communication]`, …"""

    @model_validator(mode="after")
    def _keeps_our_domain(self) -> "NpuConfig":
        given = (self.experimental.get(f"mstx_domain_{each}") for each in ("include", "exclude"))
        include, exclude = (each if isinstance(each, list) else [] for each in given)
        if _OWN_DOMAIN in exclude or (include and _OWN_DOMAIN not in include):
            text = f"leaves out the domain {_OWN_DOMAIN!r}, so no stage would be recorded"
            raise refused(text, self.experimental, "experimental")
        return self


_KEY = re.compile(r"[a-z][a-z0-9-]*")
# Ray puts the values into a shell command without quotes: only what no shell interprets may pass.
_VALUE = re.compile(r"[A-Za-z0-9_.,:/@%+=-]+")
_CAPTURE_RANGE = "cudaProfilerApi"
_TRACE: dict[str, str | None] = {
    "trace": "cuda,nvtx,cublas,ucx",
    "cuda-memory-usage": "true",
    "cuda-graph-trace": "graph",
}
_WORKER: dict[str, str | None] = {
    **_TRACE,
    "capture-range": _CAPTURE_RANGE,
    "capture-range-end": None,
    "kill": "none",
}


def _options(value: Any, defaults: dict[str, str | None]) -> Any:
    if not isinstance(value, Mapping):
        raise refused("is not a mapping of nsys options, such as {trace: 'cuda,nvtx'}", value)
    options = dict(defaults)
    for given, text in value.items():
        key = str(given).replace("_", "-")
        if not _KEY.fullmatch(key):
            raise refused(f"is not an option of nsys{near(key, defaults)}", key=str(given))
        if text is not None and not isinstance(text, str):
            wanted = str(text).lower() if isinstance(text, bool) else str(text)
            raise refused(f"must be text: put it in quotes, '{wanted}'", text, key)
        if text is not None and not _VALUE.fullmatch(text):
            raise refused(
                "may contain only letters, digits and _.,:/@%+=-: a shell reads it",
                "***" if key == "env-var" else text,
                key,
            )
        options[key] = text
    return options


class NsightConfig(Section):
    """How Nsight Systems records, and where its reports appear.

    ``controller`` and ``worker`` hold options of ``nsys profile`` by their long names, without the
    leading dashes. What is given is laid over the defaults; ``null`` leaves an option out.
    """

    controller: Annotated[
        dict[str, str | None], BeforeValidator(partial(_options, defaults=_TRACE))
    ] = Field(default_factory=_TRACE.copy)
    """Options for the controller (in verl: `controller_nsight_options`)."""

    worker: Annotated[
        dict[str, str | None], BeforeValidator(partial(_options, defaults=_WORKER))
    ] = Field(default_factory=_WORKER.copy)
    """Options for the workers (in verl: `worker_nsight_options`). `capture-range` is fixed. With
    `capture-range-end: null` it follows from the number of captures."""

    reports: str | None = Field(default=None, min_length=1)
    """Directory where the workers' reports appear. Unset: the directory of Ray."""

    @model_validator(mode="after")
    def _fixed(self) -> "NsightConfig":
        given = self.worker["capture-range"]
        if given != _CAPTURE_RANGE:
            raise refused(
                f"must stay '{_CAPTURE_RANGE}': captures in workers open and close with it",
                given,
                "worker.capture-range",
            )
        return self


_OF_SNAPSHOTS = ("max_entries", "stack_depth")


class ScheduleConfig(Section):
    """Which mini-batches of a capture are profiled; one mini-batch is one optimizer step.

    As `torch.profiler.schedule`, and on as soon as ``active`` is above 0. A part that the end of
    the capture cuts off is kept; stages that step no optimizer are captured whole.
    """

    skip_first: NonNegativeInt = 0
    """Mini-batches to skip once, at the start."""

    wait: NonNegativeInt = 0
    """Mini-batches to skip at the start of each cycle."""

    warmup: NonNegativeInt = 0
    """Mini-batches to profile and discard after that (warm-up)."""

    active: NonNegativeInt = 0
    """Mini-batches to keep after the warm-up; 0 turns the schedule off."""

    repeat: NonNegativeInt = 0
    """Number of cycles; 0 repeats until the capture closes."""

    @model_validator(mode="after")
    def _agrees(self) -> "ScheduleConfig":
        given = [(key, value) for key, value in self if value]
        if given and not self.active:
            key, value = given[0]
            raise refused("needs active above 0, which turns the schedule on", value, key)
        return self


class TorchProfilerConfig(Section):
    """torch.profiler beyond what the block ``integrated`` says."""

    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """Profile only some mini-batches of a capture."""


class MemoryConfig(Section):
    """How closely memory is watched in a capture."""

    level: Literal["counters", "timeline", "snapshot"] | None = None
    """counters: memory per span; timeline: also 100 samples a second; snapshot: also every
    allocation, written per capture and on OutOfMemoryError. Unset: counters with
    `profile_with_memory`, otherwise off."""

    max_entries: PositiveInt = 100_000
    """Latest allocations and frees that a snapshot keeps."""

    stack_depth: PositiveInt = 32
    """Stack frames that a snapshot keeps per allocation."""

    @model_validator(mode="after")
    def _agrees(self) -> "MemoryConfig":
        for key in _OF_SNAPSHOTS:
            value = getattr(self, key)
            if self.level is None and value != type(self).model_fields[key].default:
                raise refused("needs memory.level, such as level: snapshot", value, key)
        return self


class ParallelConfig(Section):
    """Sizes of the groups that hold one copy of the model; what is left is data parallel."""

    tp: PositiveInt = 1
    """Ranks that share a layer (tensor parallel)."""

    cp: PositiveInt = 1
    """Ranks that share a sequence (context parallel, Ulysses)."""

    ep: PositiveInt = 1
    """Ranks that share experts (expert parallel)."""

    pp: PositiveInt = 1
    """Stages of the pipeline (pipeline parallel)."""

    def check_world(self, world_size: int) -> None:
        """Refuse sizes that do not divide ``world_size``; a driver has no ranks.

        Raises:
            ConfigError: Their product does not divide ``world_size``.

        Example::

            >>> ParallelConfig(tp=2, pp=2).check_world(8)
        """
        sizes = {key: size for key, size in self if size > 1}
        product = math.prod(sizes.values())
        if world_size > 1 and world_size % product:
            allowed = [each for each in range(1, world_size + 1) if world_size % each == 0]
            given = ", ".join(f"{key}: {size}" for key, size in sizes.items())
            raise ConfigError(
                f"parallel={{{given}}} needs {product} ranks per replica of the model, but this "
                f"training has {world_size} (allowed products: {', '.join(map(str, allowed))})"
            )


class RoleConfig(Section):
    """The capture of one role; without ``ranks`` its rank 0 is captured."""

    enable: bool = True
    """Whether this role is captured."""

    ranks: Ranks = Field(default_factory=list)
    """Ranks to capture: all, or a list; an empty one means rank 0, as in verl."""

    discrete: bool | None = None
    """Make one capture per stage. Unset: the top-level `discrete`."""

    @model_validator(mode="before")
    @classmethod
    def _may_be_empty(cls, data: Any) -> Any:
        return {} if data is None else data

    def wants_rank(self, rank: int) -> bool:
        """Whether this role is captured on a rank.

        Example::

            >>> RoleConfig().wants_rank(0), RoleConfig().wants_rank(1)
            (True, False)
        """
        return self.enable and (self.ranks == "all" or rank in (self.ranks or [0]))

    def union(self, other: "RoleConfig") -> "RoleConfig":
        """The capture of a process in which both roles live; a role that is off adds nothing.

        Raises:
            ConfigError: One wants a capture per step and the other one per stage.

        Example::

            >>> RoleConfig(ranks=[1]).union(RoleConfig()).ranks
            [0, 1]
        """
        if not (self.enable and other.enable):
            return self if self.enable else other
        if self.discrete != other.discrete:
            raise ConfigError(
                f"roles with discrete={self.discrete} and discrete={other.discrete} share a "
                "process, which captures either per step or per stage: give both the same "
                "discrete, or set role to the one that this process has"
            )
        if "all" in (self.ranks, other.ranks):
            return RoleConfig(ranks="all", discrete=self.discrete)
        ranks = sorted({*(self.ranks or [0]), *(other.ranks or [0])} - {"all"})
        return RoleConfig(ranks=ranks, discrete=self.discrete)
