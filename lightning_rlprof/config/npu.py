"""Options of an Ascend capture beyond the block ``integrated``."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lightning_rlprof.config.numbers import NotNegative, Positive
from lightning_rlprof.config.section import Section, refused

__all__ = ["NpuConfig"]

_HOST_SYSTEMS = Literal["cpu", "mem", "disk", "network", "osrt", "numa"]


def _once(value: Any) -> Any:
    if isinstance(value, list):
        twice = [item for item in value if value.count(item) > 1]
        if twice:
            raise refused(f"names {twice[0]!r} twice", value)
        if not value:
            raise refused("is an empty list: name at least one, or leave it out", value)
    return value


_Names = Annotated[list[str] | None, BeforeValidator(_once)]


class NpuConfig(Section):
    """What torch_npu.profiler can do beyond the 16 keys; each is passed on where it exists.

    A key that is set and that the installed torch_npu does not know is refused before training.
    """

    export_types: Annotated[list[Literal["text", "db"]] | None, BeforeValidator(_once)] = Field(
        default=None,
        description="Formats instead of `integrated.profile_export_type`; both at once, too.",
    )
    aic_metrics: (
        Literal[
            "PipeUtilization",
            "ArithmeticUtilization",
            "Memory",
            "MemoryL0",
            "MemoryUB",
            "ResourceConflictRatio",
            "L2Cache",
            "MemoryAccess",
            "AiCoreNone",
        ]
        | None
    ) = Field(
        default=None,
        description=(
            "Counters of the AI core. Unset: PipeUtilization from level1 on, as MindSpeed-RL, "
            "none below, where they would only cause a warning."
        ),
    )
    l2_cache: bool = Field(default=False, description="Record hits in the L2 cache.")
    op_attr: bool = Field(default=False, description="Record attributes of operators.")
    with_stack: bool = Field(
        default=False,
        description="Record Python stacks; large, and some versions of torch_npu crash at stop.",
    )
    record_op_args: bool = Field(default=False, description="Record arguments of operators.")
    data_simplification: bool = Field(
        default=True, description="Delete intermediate data once it is analysed."
    )
    gc_detect_threshold_ms: NotNegative | None = Field(
        default=None,
        description="Record garbage collections of Python that take as long; 0 records all.",
    )
    host_sys: Annotated[list[_HOST_SYSTEMS] | None, BeforeValidator(_once)] = Field(
        default=None, description="Record the host's cpu, mem, disk, network, osrt or numa."
    )
    sys_io: bool = Field(default=False, description="Record network cards and RoCE.")
    sys_interconnection: bool = Field(default=False, description="Record HCCS and PCIe.")
    mstx_domain_include: _Names = Field(
        default=None, description="Only these domains of MSTX ranges; ours is `rlprof`."
    )
    mstx_domain_exclude: _Names = Field(
        default=None, description="All but these domains, such as `communication`."
    )
    device_ranges: bool = Field(
        default=False,
        description=(
            "Put stage ranges into the current stream, too, so that the trace shows them in device "
            "time; about ten times the cost of a range."
        ),
    )
    analysis_timeout_s: Positive = Field(
        default=3600.0,
        description="Longest time of the analysis after training (`integrated.profile_analysis`).",
    )

    @model_validator(mode="after")
    def _agrees(self) -> "NpuConfig":
        if self.mstx_domain_include and self.mstx_domain_exclude:
            text = "contradicts mstx_domain_include: give one of the two"
            raise refused(text, self.mstx_domain_exclude, "mstx_domain_exclude")
        if "rlprof" in (self.mstx_domain_exclude or ()):
            text = "leaves out our own domain, and every stage with it"
            raise refused(text, self.mstx_domain_exclude, "mstx_domain_exclude")
        if self.mstx_domain_include and "rlprof" not in self.mstx_domain_include:
            text = "leaves out our own domain: add 'rlprof', or no stage is recorded"
            raise refused(text, self.mstx_domain_include, "mstx_domain_include")
        return self
