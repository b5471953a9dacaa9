"""The keys of the configuration, their defaults, and which of them contradict each other.

The whole configuration: its sources, and its answers for rank, step and stage.
"""

import os
from collections.abc import Mapping
from functools import reduce
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lightning_rlprof.config.blocks import (
    IntegratedConfig,
    MemoryConfig,
    NpuConfig,
    NsightConfig,
    ParallelConfig,
    RoleConfig,
    TorchProfilerConfig,
)
from lightning_rlprof.config.omegaconf import escaped
from lightning_rlprof.config.sources import (
    canonical,
    forget,
    from_environment,
    from_overrides,
    lay,
    merge,
    read,
)
from lightning_rlprof.config.stages import (
    CustomStages,
    OptimizerStages,
    WrapRule,
    as_rules,
    check_stages,
    or_by_method,
)
from lightning_rlprof.config.validation import (
    Positive,
    Ranks,
    Section,
    Steps,
    Tokens,
    Urls,
    explain,
    near,
    refused,
)
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.records.records import FOLDER_VARIABLE
from lightning_rlprof.system.location import redact

_NOT_CAPTURE = {"profile", "profile_save_path"}
_CAPTURE = (
    "steps",
    "ranks",
    "profile_continuous_steps",
    "discrete",
    "roles",
    "tokens",
    "tools",
    "with_stack",
    "torch_profiler",
    "npu",
    "memory",
)
_MARKING = {"nvtx", "nsight", "mstx"}

_BLOCKS: dict[str, type[Section]] = {
    "integrated": IntegratedConfig,
    "parallel": ParallelConfig,
    "nsight": NsightConfig,
    "torch_profiler": TorchProfilerConfig,
    "npu": NpuConfig,
    "memory": MemoryConfig,
}


def _places_of(key: str) -> str:
    """Return where blocks have a key, for people; empty if none has."""
    return " or ".join(
        f"{name}.{key}" for name, block in _BLOCKS.items() if key in block.model_fields
    )


Tool = Literal["nvtx", "nsight", "mstx", "npu_profiler", "torch_profiler", "memory"]


class Options(Section):
    """Every key, checked against the others; the master switch is resolved to true or false."""

    integrated: IntegratedConfig = Field(default_factory=IntegratedConfig)
    """The block of MindSpeed-RL, unchanged."""

    steps: Steps = None
    """Steps to capture instead of `integrated.profile_step_start` and `…_end`: all, or a list of
    steps and ranges such as `[2, 10-20]`, whose ends are included. An empty list captures
    nothing."""

    ranks: Ranks | None = None
    """Ranks to capture instead of `integrated.profile_ranks`: all, or a list; an empty one means
    rank 0."""

    profile_continuous_steps: bool | None = None
    """Join consecutive steps in one capture. Unset: true for steps from
    `integrated.profile_step_start` and `…_end`, false for `steps`."""

    discrete: bool = False
    """true makes one capture per stage instead of whole steps."""

    roles: dict[str, RoleConfig] = Field(default_factory=dict)
    """What to capture per role, by role name. Roles that are not listed are not captured."""

    role: str | None = None
    """The role of this process. Unset: all roles share the process (their union)."""

    custom_stages: CustomStages = Field(default_factory=list)
    """Names of your own stages; they are allowed wherever a stage is."""

    wrap: list[WrapRule] = Field(default_factory=list, json_schema_extra=or_by_method)
    """Stages for methods of the LightningModule, without a change to its code: a list of rules, or
    one mapping of methods to stages."""

    auto_stages: bool = True
    """Without any mark or `wrap` rule, mark methods of the LightningModule and its direct parts
    whose names mean a stage, such as `generate` or `compute_reward`."""

    optimizer_stages: OptimizerStages = Field(default_factory=list)
    """The update stage of each optimizer, in the order of `configure_optimizers`. Unset:
    `critic_update` for an optimizer of parameters that are called critic or value, else
    `actor_update`."""

    device_time: bool | None = None
    """Measure the device time of every stage in every step, without a capture. Unset: true if there
    is an accelerator."""

    background_metrics: bool = True
    """Sample host and device once a second (CPU, memory, disk, network, power, clocks), and count
    pauses of garbage collection."""

    engine_metrics: Urls = Field(default_factory=list)
    """URLs of the Prometheus pages of rollout engines (vLLM, SGLang), such as
    `http://localhost:8000/metrics`: one, or a list. Rank 0 reads them once a second: requests, KV
    cache, preemptions, tokens."""

    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """How many ranks form one replica of the model, for `rlprof stragglers`. Rank order as in
    Megatron: `tp` first, then `cp`, `ep`, data parallel, and `pp` last."""

    model: str | None = None
    """Path of the model's `config.json`, or of its folder, for MFU per stage from counted tokens.
    Its content is kept in the run."""

    summary: bool = True
    """Whether rank 0 prints a summary when training ends: step time, where it goes, what to fix
    first."""

    log_report: bool = False
    """Whether rank 0 logs the HTML report as an artifact of the Trainer's W&B and MLflow loggers
    when training ends."""

    group_access: bool = False
    """Whether the group of the training's user may read the run: folders get mode 0750 and rank
    files 0640, instead of 0700 and 0600. Reports, exports and caches follow."""

    ignore_findings: list[str] = Field(default_factory=list)
    """Ids of problems and remedies that `rlprof findings` leaves out, such as `[rollout-overlap]`.
    `rlprof findings --explain all` lists them."""

    applied: list[str] = Field(default_factory=list)
    """Ids of remedies that this training applies and the run before it did not, such as
    `[swap-ranks]`. `rlprof findings` then says what they brought."""

    capture_anomalies: bool = False
    """Capture two steps after one step, or several, that took unusually long for their tokens. Of
    more than 4 ranks, the slowest is captured, a healthy one, and one of each role; at most 3 times
    an hour, and 10 times in a run."""

    measure_overhead: bool = False
    """Measure what rlprof costs: of every two steps, one records nothing but its length. `rlprof
    findings` compares them; other analyses exclude these shadow steps."""

    hang_timeout: Positive | None = 300
    """Seconds without any progress after which a rank writes a report for `rlprof hang`; null turns
    this and the samples of stacks off. Six times as long before the first step has ended, between
    steps, in a stage for the first time, and in checkpoints and evaluations."""

    tokens: Tokens | None = None
    """Capture only these tokens of `actor_generate`: `[start, end]`, counted from 0 in each call,
    the end excluded; null as the end has no end. The spans directly inside are decoding
    iterations: mark the model's forward, or `wrap` it."""

    tools: list[Tool] | None = None
    """Profilers to use. Unset: they follow from configuration and device. `nsight` includes `nvtx`.
    """

    with_stack: bool = False
    """Record Python stacks with torch.profiler (about twice the time and size) or
    torch_npu.profiler (large; some of its versions crash when they stop)."""

    nsight: NsightConfig = Field(default_factory=NsightConfig)
    """Options of Nsight Systems."""

    torch_profiler: TorchProfilerConfig = Field(default_factory=TorchProfilerConfig)
    """More options of torch.profiler."""

    npu: NpuConfig = Field(default_factory=NpuConfig)
    """More options of an Ascend capture."""

    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    """Memory recording in captures."""

    max_file_bytes: Annotated[int, Field(ge=1_000_000)] | None = 8_000_000_000
    """Bytes that the file of a rank may take, about, without captures. Beyond it, steps are left
    out, and the run says how many. null: no limit."""

    @classmethod
    def _unknown(cls, key: str) -> str:
        if places := _places_of(key):
            return f"is one level down: {places}"
        return super()._unknown(key)

    @field_validator(*_BLOCKS, mode="before")
    @classmethod
    def _in_its_place(cls, value: Any, info: ValidationInfo) -> Any:
        own = _BLOCKS[str(info.field_name)].model_fields
        for given in value if isinstance(value, Mapping) else ():
            key = str(given).replace("-", "_")
            if key not in own and (place := key if key in cls.model_fields else _places_of(key)):
                raise refused(f"is in the wrong place; write {place}", key=str(given))
        return value

    _rules = field_validator("wrap", mode="before")(as_rules)

    @model_validator(mode="after")
    def _known_stages(self) -> "Options":
        stage = self.integrated.stage
        if stage != "all":
            check_stages(_listed(stage), self.custom_stages, "integrated.stage", stage)
        given = self.optimizer_stages
        check_stages(given, self.custom_stages, "optimizer_stages", given)
        targets = [rule.target for rule in self.wrap]
        for number, rule in enumerate(self.wrap):
            for key, name in rule.names().items():
                check_stages([name], self.custom_stages, f"wrap[{number}].{key}", name)
            if targets.index(rule.target) != number:
                text = "has a rule already; one method has one rule"
                raise refused(text, rule.target, f"wrap[{number}].target")
        return self

    @model_validator(mode="after")
    def _one_choice_of_ranks(self) -> "Options":
        block = self.integrated.profile_ranks
        if self.ranks is not None and block != "all":
            text = f"contradicts integrated.profile_ranks={block}: choose ranks in one place"
            raise refused(text, self.ranks, "ranks")
        if self.roles and (self.ranks is not None or block != "all"):
            where = "integrated.profile_ranks" if self.ranks is None else "ranks"
            raise refused(
                f"contradicts roles: give roles.{next(iter(self.roles))}.ranks", key=where
            )
        return self

    @model_validator(mode="after")
    def _one_unit(self) -> "Options":
        # `per_stage` refuses roles that cannot share.
        if self.per_stage and self.profile_continuous_steps:
            what = "discrete=True" if self.integrated.stage == "all" else "integrated.stage"
            text = f"contradicts {what}, which makes one capture per stage"
            raise refused(text, self.profile_continuous_steps, "profile_continuous_steps")
        names = {*_listed(self.integrated.stage)}
        if self.tokens and not (self.per_stage and {"all", "actor_generate"} & names):
            text = "needs one capture per stage: set integrated.stage: actor_generate"
            raise refused(text, [*self.tokens], "tokens")
        return self

    @model_validator(mode="after")
    def _tools_agree(self) -> "Options":
        tools, level = self.tools, self.memory.level
        if {"nsight", "torch_profiler"} <= set(tools or ()) and self.integrated.profile_with_npu:
            text = (
                "contains nsight and torch_profiler, but only one can record the GPU: keep one, "
                "or set integrated.profile_with_npu: false"
            )
            raise refused(text, tools, "tools")
        if tools and level and "memory" not in tools:
            text = f"contradicts tools={tools}: add memory to tools, or remove the level"
            raise refused(text, level, "memory.level")
        if tools and self.integrated.mstx and not _MARKING.intersection(tools):
            text = f"contradicts tools={tools}: add nvtx (NVIDIA) or mstx (Ascend) to tools"
            raise refused(text, self.integrated.mstx, "integrated.mstx")
        return self

    @model_validator(mode="after")
    def _switch(self) -> "Options":
        # Tools that save a configuration write every key, so whether profile was given is lost on
        # the way: the answer is stored instead. A key that was filled in with profile: null counts
        # as given when it differs from its default.
        block = self.integrated
        values, given = dict(block), set(block.model_fields_set)
        if "profile" in given and block.profile is None:
            given = {key for key in given if values[key] != _default(IntegratedConfig, key)}
        off = self.nothing_chosen()
        asked = bool(given - _NOT_CAPTURE) or any(
            getattr(self, key) != _default(type(self), key) for key in _CAPTURE
        )
        wanted = (asked and not off) if block.profile is None else block.profile
        if wanted and off:
            raise refused(f"has nothing to capture: {off}", wanted, "integrated.profile")
        if wanted and not (block.profile_with_cpu or block.profile_with_npu):
            text = "contradicts profile_with_npu=False: nothing is left to capture"
            raise refused(text, block.profile_with_cpu, "integrated.profile_with_cpu")
        values["profile"] = wanted
        # `model_copy` would mark profile as given, and a later keyword could not switch it on.
        self.__dict__["integrated"] = IntegratedConfig.model_construct(given, **values)
        return self

    def nothing_chosen(self) -> str:
        """Why no capture can happen, for people: no step, tool or role is chosen; else empty."""
        if self.steps == []:
            return "no steps are chosen"
        if self.tools == []:
            return "tools is an empty list"
        if self.roles and not any(role.enable for role in self.roles.values()):
            names = ", ".join(self.roles)
            return f"no role is enabled ({names}): set enable or ranks of one"
        return ""

    def _shared_role(self) -> RoleConfig | None:
        """The role block that applies in this process; None without roles.

        Also None while captures are off, where roles need not agree on one.
        """
        if not self.roles or self.integrated.profile is False or self.nothing_chosen():
            return None
        own = {
            name: role
            if role.discrete is not None
            else role.model_copy(update={"discrete": self.discrete})
            for name, role in self.roles.items()
        }
        if self.role is not None:
            return own.get(self.role, RoleConfig(enable=False))
        return reduce(RoleConfig.union, own.values())

    @property
    def per_stage(self) -> bool:
        """Whether a capture opens and closes with a stage instead of with a step."""
        role = self._shared_role()
        discrete = self.discrete if role is None else role.discrete
        return bool(discrete) or self.integrated.stage != "all"


def _starting_folder() -> str:
    typed_in = os.environ.get(FOLDER_VARIABLE, "")
    if os.path.isdir(typed_in):  # Another host may not have it.
        return typed_in
    try:
        return os.getcwd()
    except OSError:  # The folder is gone, so only absolute paths have a meaning.
        return ""


def _default(section: type[Section], key: str) -> Any:
    return section.model_fields[key].get_default(call_default_factory=True)


class ProfilerConfig(Options):
    """What to record and what to capture; frozen, and it opens no file and runs no command.

    Relative paths start from the folder in which it is made, or ``rlprof run`` was typed, wherever
    the program goes afterwards.

    `build` reads every source and says in one line what is wrong. ``model_validate`` takes the same
    blocks (ours, MindSpeed-RL's, verl's; OmegaConf's mappings too) and raises Pydantic's error.

    Example::

        >>> config = ProfilerConfig.build({"integrated": {"stage": "actor_update"}})
        >>> config.captures, config.wants_step(1), config.wants_step(2)
        (True, True, False)
    """

    _made_in: str = PrivateAttr(default_factory=_starting_folder)

    @property
    def save_path(self) -> Path:
        """``integrated.profile_save_path``, absolute."""
        return self.located(self.integrated.profile_save_path)

    def located(self, path: str) -> Path:
        """Return a path of this configuration, absolute."""
        return Path(self._made_in, path)

    @classmethod
    def build(
        cls,
        source: "ProfilerConfig | Mapping[str, Any] | str | PathLike[str] | None" = None,
        **overrides: Any,
    ) -> "ProfilerConfig":
        """Read a source, lay ``RLPROF__…`` variables and then keywords over it, and check it all.

        Args:
            source: A configuration, a mapping (OmegaConf's too), a YAML file's path, or nothing.
            **overrides: Top-level keys, and keys of ``integrated`` given flat (``stage=…``).

        Raises:
            ConfigError: One line that names the dotted key, what is allowed and a near match.
        """
        fields = tuple(cls.model_fields)
        variables, origins = from_environment(os.environ, fields)
        keywords = from_overrides(overrides, fields)
        if isinstance(source, ProfilerConfig) and not (variables or keywords):
            return source
        translated: dict[str, str] = {}
        if isinstance(source, ProfilerConfig):
            base = source.model_dump(exclude_unset=True)
        else:
            base = canonical(read({} if source is None else source), fields, translated)
        data = lay(escaped(base), translated, merge(variables, keywords))
        forget(origins, keywords)
        try:
            built = cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(explain(error, translated | origins)) from error
        if isinstance(source, ProfilerConfig):
            built._made_in = source._made_in
        return built

    @model_validator(mode="before")
    @classmethod
    def _our_keys(cls, data: Any) -> Any:
        return canonical(data, tuple(cls.model_fields)) if isinstance(data, Mapping) else data

    @property
    def captures(self) -> bool:
        """Whether captures are on at all in this process: the master switch, resolved."""
        role = self._shared_role()
        return bool(self.integrated.profile) and (role is None or role.enable)

    @property
    def why_off(self) -> str:
        """Why nothing is captured in this process, for people; empty when captures are on."""
        if self.captures:
            return ""
        if not self.integrated.profile:
            return (
                self.nothing_chosen()
                or "integrated.profile is false, or no capture option was given"
            )
        hint = "" if self.role in self.roles else near(self.role or "", self.roles)
        return f"role {self.role!r} is not enabled in roles{hint}"

    @property
    def joins_steps(self) -> bool:
        """Whether one capture stays open over consecutive wanted steps."""
        if self.per_stage:
            return False
        joined = self.profile_continuous_steps
        return self.steps is None if joined is None else joined

    @property
    def last_step(self) -> int | None:
        """The last captured step: None without an end, 0 when none is captured."""
        if not self.captures:
            return 0
        if self.steps is None:
            return self.integrated.profile_step_end - 1
        return None if self.steps == "all" else max(self.steps)

    @property
    def wanted_ranks(self) -> Literal["all"] | list[int]:
        """The ranks of this process's role that are captured; none while captures are off."""
        role = self._shared_role()
        if not self.captures:
            return []
        if role is not None:
            return role.ranks or [0]
        return self.integrated.profile_ranks if self.ranks is None else self.ranks or [0]

    def wants_rank(self, rank: int) -> bool:
        """Whether a global rank of this process's role is captured."""
        ranks = self.wanted_ranks
        return ranks == "all" or rank in ranks

    def wants_finish(self, rank: int) -> bool:
        """Whether ``on_finish`` is called on a rank: a captured one, or rank 0 if none is."""
        return self.wants_rank(rank) if self.integrated.profile else rank == 0

    def wants_step(self, step: int) -> bool:
        """Whether a step, counted from 1, is captured."""
        if not self.captures or step < 1:
            return False
        if self.steps is None:
            start, end = self.integrated.profile_step_start, self.integrated.profile_step_end
            return start <= step < end
        return self.steps == "all" or step in self.steps

    def wants_stage(self, stage: str) -> bool:
        """Whether a stage is captured."""
        chosen = self.integrated.stage
        return self.captures and (chosen == "all" or stage in _listed(chosen))

    def check_world(self, world_size: int) -> None:
        """Refuse ranks that this training does not have; those of captures only while they are on.

        Raises:
            ConfigError: A rank is not below ``world_size``, or it cannot hold copies of the model
                as ``parallel`` says.
        """
        self.parallel.check_world(world_size)
        ranks = self.wanted_ranks
        beyond = [rank for rank in ranks if rank >= world_size] if ranks != "all" else []
        if beyond:
            own = "integrated.profile_ranks" if self.ranks is None else "ranks"
            raise ConfigError(
                f"{'roles' if self.roles else own}: {ranks} holds rank {beyond[0]}, but this "
                f"training has {world_size} (allowed: 0 to {world_size - 1})"
            )

    def dump(self) -> dict[str, Any]:
        """Every key as JSON holds it, ``${`` escaped; `build` makes an equal one of it."""
        dumped: dict[str, Any] = escaped(self.model_dump(mode="json"))
        return dumped

    def masked(self) -> dict[str, Any]:
        """Every key as JSON holds it, for files and people: without what may be secret.

        These are values in ``env-var`` of Nsight's options, and credentials in URLs.
        """
        dumped = self.model_dump(mode="json")
        for options in (dumped["nsight"]["controller"], dumped["nsight"]["worker"]):
            if given := options.get("env-var"):
                names = [each.partition("=")[0] for each in given.split(",")]
                options["env-var"] = ",".join(names)
        return {key: _without_credentials(value) for key, value in dumped.items()}


def _without_credentials(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_credentials(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_credentials(each) for each in value]
    return redact(value) if isinstance(value, str) else value


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names
