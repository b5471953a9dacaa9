"""Which ranks of a role are captured, and how: verl's block per role and its union."""

from typing import Any

from pydantic import Field, model_validator

from lightning_rlprof.config.numbers import RankList
from lightning_rlprof.config.section import Section, refused
from lightning_rlprof.errors import ConfigError

__all__ = ["RoleConfig"]


class RoleConfig(Section):
    """The capture of one role; with neither ``all_ranks`` nor ``ranks`` its rank 0 is captured."""

    enable: bool = Field(default=True, description="Whether this role is captured.")
    all_ranks: bool = Field(default=False, description="Capture every rank of the role.")
    ranks: RankList = Field(
        default_factory=list, description="Ranks to capture; empty means rank 0, as in verl."
    )
    discrete: bool | None = Field(
        default=None, description="One capture per stage; unset means the top-level `discrete`."
    )

    @model_validator(mode="before")
    @classmethod
    def _may_be_empty(cls, data: Any) -> Any:
        return {} if data is None else data

    @model_validator(mode="after")
    def _agrees(self) -> "RoleConfig":
        if self.all_ranks and self.ranks:
            raise refused("contradicts all_ranks=True: give one of the two", self.ranks, "ranks")
        return self

    def wants_rank(self, rank: int) -> bool:
        """Whether this role is captured on a rank.

        Example::

            >>> RoleConfig().wants_rank(0), RoleConfig().wants_rank(1)
            (True, False)
        """
        return self.enable and (self.all_ranks or rank in (self.ranks or [0]))

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
                "process, which captures either once per step or once per stage: give them the "
                "same discrete, or say with role which one this process plays"
            )
        if self.all_ranks or other.all_ranks:
            return RoleConfig(all_ranks=True, discrete=self.discrete)
        ranks = sorted({*(self.ranks or [0]), *(other.ranks or [0])})
        return RoleConfig(ranks=ranks, discrete=self.discrete)
