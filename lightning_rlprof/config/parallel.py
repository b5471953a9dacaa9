"""How one copy of the model is spread over ranks: the sizes of its process groups."""

import math

from pydantic import Field, PositiveInt

from lightning_rlprof.config.section import Section
from lightning_rlprof.errors import ConfigError

__all__ = ["ParallelConfig"]


class ParallelConfig(Section):
    """Sizes of the groups that hold one copy of the model; what is left is data parallel."""

    tp: PositiveInt = Field(default=1, description="Ranks that share a layer (tensor parallel).")
    cp: PositiveInt = Field(
        default=1, description="Ranks that share a sequence (context parallel, Ulysses)."
    )
    ep: PositiveInt = Field(default=1, description="Ranks that share experts (expert parallel).")
    pp: PositiveInt = Field(default=1, description="Stages of the pipeline (pipeline parallel).")

    def check_world(self, world_size: int) -> None:
        """Refuse sizes that so many ranks cannot have; a process alone, such as a driver, is none.

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
                f"parallel={{{given}}} takes {product} ranks for each copy of the model, but this "
                f"training has {world_size} (allowed products: {', '.join(map(str, allowed))})"
            )
