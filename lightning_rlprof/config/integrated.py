"""The block ``integrated`` exactly as MindSpeed-RL users write it: every key, every default."""

from os import PathLike, fspath
from os.path import expanduser
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lightning_rlprof.config.numbers import AllOrRanks, StepNumber
from lightning_rlprof.config.section import Section, refused
from lightning_rlprof.config.stages import StageChoice

__all__ = ["SAVE_PATH", "IntegratedConfig"]

SAVE_PATH = "./profiler_data"
"""Where runs go unless told otherwise."""


def _path(value: Any) -> Any:
    # MindSpeed-RL's code defaults to "" where its documents say ./profiler_data
    if value is None or value == "":
        return SAVE_PATH
    if value == "???":
        raise refused("is OmegaConf's word for a value that is missing: give a directory", value)
    path = fspath(value) if isinstance(value, PathLike) else value
    if isinstance(path, str) and "://" in path:
        raise refused("is a URL: give a directory, and ship the run from it by on_finish", value)
    return expanduser(path) if isinstance(path, str) else path


class IntegratedConfig(Section):
    """What a capture holds, and for which stage, steps and ranks it is on.

    Spans of all stages are always recorded; these keys steer only the capture, which is dear.
    """

    profile: bool | None = Field(
        default=None,
        description=(
            "Master switch of captures. An explicit false always wins; left unset, it is on as "
            "soon as a capture option is given, else false."
        ),
    )
    mstx: bool = Field(
        default=False,
        description="Put stage markers into the device trace: MSTX on Ascend, NVTX on NVIDIA.",
    )
    stage: StageChoice = Field(
        default="all",
        description="Stages to capture: all (whole steps), one stage, or a list.",
    )
    profile_save_path: Annotated[str, BeforeValidator(_path)] = Field(
        default=SAVE_PATH,
        description="Directory in which each training makes its run directory; `~` is your home.",
    )
    profile_export_type: Literal["text", "db"] = Field(
        default="text", description="Format of an Ascend capture; db takes about 70 % less disk."
    )
    profile_step_start: StepNumber = Field(
        default=1, description="First step to capture; steps count from 1."
    )
    profile_step_end: StepNumber = Field(
        default=2, description="First step that is no longer captured (the end is excluded)."
    )
    profile_level: Literal["level_none", "level0", "level1", "level2"] = Field(
        default="level0",
        description="Depth of an Ascend capture: level_none markers only, level2 everything.",
    )
    profile_with_memory: bool = Field(
        default=False, description="Record allocations of device memory."
    )
    profile_record_shapes: bool = Field(
        default=False, description="Record the shapes of operator inputs."
    )
    profile_with_cpu: bool = Field(default=True, description="Record host activity.")
    profile_with_npu: bool = Field(
        default=True, description="Record device activity, whatever the device: NPU or GPU."
    )
    profile_with_module: bool = Field(default=False, description="Record the module hierarchy.")
    profile_analysis: bool = Field(
        default=False,
        description="Analyse Ascend captures when training is over, in a process of its own.",
    )
    profile_ranks: AllOrRanks = Field(
        default="all", description="Ranks to capture: all, or a list of global ranks."
    )

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
