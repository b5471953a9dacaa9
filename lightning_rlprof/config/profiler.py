"""The whole configuration: its sources, and its answers for rank, step and stage."""

import os
from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from lightning_rlprof.config.omega import escaped
from lightning_rlprof.config.options import Options
from lightning_rlprof.config.section import explain, near
from lightning_rlprof.config.sources import (
    canonical,
    forget,
    from_environment,
    from_overrides,
    lay,
    merge,
    read,
)
from lightning_rlprof.errors import ConfigError

__all__ = ["ProfilerConfig"]


class ProfilerConfig(Options):
    """What to record and what to capture; frozen, and it opens no file and runs no command.

    `build` reads every source and says in one line what is wrong. ``model_validate`` takes the same
    blocks (ours, MindSpeed-RL's, verl's; OmegaConf's mappings too) and raises Pydantic's error.

    Example::

        >>> config = ProfilerConfig.build({"integrated": {"stage": "actor_update"}})
        >>> config.captures, config.wants_step(1), config.wants_step(2)
        (True, True, False)
    """

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
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(explain(error, translated | origins)) from error

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
            return self._nothing() or "integrated.profile is false, or no capture option was given"
        hint = "" if self.role in self.roles else near(self.role or "", self.roles)
        return f"role {self.role!r} is not enabled in roles{hint}"

    @property
    def lightweight(self) -> bool:
        """Whether a capture holds markers only: ``mstx``, ``level_none`` and no host activity."""
        return self.integrated.lightweight

    @property
    def joins_steps(self) -> bool:
        """Whether one capture stays open over consecutive wanted steps."""
        if self.per_stage:
            return False
        joined = self.profile_continuous_steps
        return self.steps is None if joined is None else joined

    @property
    def last_step(self) -> int | None:
        """The last captured step: None when there is no last one, 0 when none is captured."""
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
            return "all" if role.all_ranks else role.ranks or [0]
        if self.ranks is not None or self.all_ranks is not None:
            return "all" if self.all_ranks else self.ranks or [0]
        return self.integrated.profile_ranks

    def wants_rank(self, rank: int) -> bool:
        """Whether a global rank of this process's role is captured."""
        ranks = self.wanted_ranks
        return ranks == "all" or rank in ranks

    def wants_finish(self, rank: int) -> bool:
        """Whether ``on_finish`` runs on a rank.

        That is a rank chosen for it, captured or not; else a captured one; else, where captures are
        off for every role, rank 0.
        """
        hook = self.on_finish
        if hook.all_ranks or hook.ranks is not None:
            return hook.all_ranks or rank in (hook.ranks or [])
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
        chosen = self._ranks() if self.captures else {}
        for key, ranks in {**chosen, "on_finish.ranks": self.on_finish.ranks or []}.items():
            beyond = [rank for rank in ranks if rank >= world_size]
            if beyond:
                raise ConfigError(
                    f"{key}={ranks} holds rank {beyond[0]}, but this training has {world_size} "
                    f"(allowed: 0 to {world_size - 1})"
                )

    def _ranks(self) -> dict[str, list[int]]:
        if self.roles:
            names = self.roles if self.role is None else [self.role]
            blocks = {name: self.roles[name] for name in names if self.roles[name].enable}
            return {f"roles.{name}.ranks": role.ranks for name, role in blocks.items()}
        chosen = self.integrated.profile_ranks
        listed = [] if chosen == "all" else chosen
        return {"ranks": self.ranks or [], "integrated.profile_ranks": listed}

    def dump(self) -> dict[str, Any]:
        """Every key as JSON holds it, ``${`` escaped; `build` makes an equal one of it."""
        dumped: dict[str, Any] = escaped(self.model_dump(mode="json"))
        return dumped


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names
