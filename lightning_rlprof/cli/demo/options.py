"""What a demo trains, and how."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_rlprof.errors import ConfigError

Fault = Literal["slow-step", "shift", "hang", "oom", "leak"]
"""What can be made to go wrong."""

# Steps of a demo with a fault. 30 of them show normal times before the fault in the middle.
_INJECTED_STEPS, _FEWEST_INJECTED = 80, 70


@dataclass(frozen=True)
class Recipe:
    """How a policy is trained, so that a demo takes a minute or two on two CPU cores.

    Attributes:
        steps: RL steps, unless the options say otherwise.
        prompts: Prompts per step and rank.
        samples: Answers sampled per prompt.
        held_out: Prompts that are not trained on, for the exact match before and after.
        warmup_batch: Right answers per step of the supervised warm start.
        warmup_rate: Learning rate of the warm start.
        learning_rate: Learning rate of GRPO.
        threads: Threads that torch computes on. Small matrices are slower on more: with a busy
            neighbour a step of the small policy took 3 s on two threads instead of 0.4 s.
    """

    steps: int = 300
    prompts: int = 8
    samples: int = 8
    held_out: int = 256
    warmup_batch: int = 64
    warmup_rate: float = 2e-3
    learning_rate: float = 3e-4
    threads: int = 1


@dataclass(frozen=True)
class DemoOptions:
    """What a demo trains.

    Attributes:
        recipe: How the policy is trained.
        steps: RL steps; None takes the recipe's, or 80 with a fault.
        kv_cache: Generate with a cache of keys and values; without it, generation dominates a step.
        ranks: Processes; more than one train together by DDP over gloo.
        save_path: Where the run directory goes.
        seed: Chooses weights, prompts and samples; on one rank it decides the whole result.
        warmup_steps: Steps of the supervised warm start; None takes the task's own number, or none
            with a fault: then all steps have the same work, answers of full length.
        slow_rank: A rank that is made slow, to see it found; None for none.
        slow_by: How much longer it takes for its own stages, those without waiting for others.
        inject: What goes wrong; None for nothing.

    Raises:
        ConfigError: `slow_rank` is not one of the ranks, or the fault needs other ranks or steps.
    """

    recipe: Recipe = Recipe()
    steps: int | None = None
    kv_cache: bool = False
    ranks: int = 1
    save_path: Path = Path("profiler_data")
    seed: int = 0
    warmup_steps: int | None = None
    slow_rank: int | None = None
    slow_by: float = 0.15
    inject: Fault | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.slow_rank is not None and not 0 <= self.slow_rank < self.ranks:
            have = f"0 to {self.ranks - 1}"
            raise ConfigError(f"slow_rank={self.slow_rank} is not trained here; ranks are {have}")
        what = f"inject={self.inject}"
        if self.inject == "hang":
            if self.ranks < 2:
                raise ConfigError(f"{what} needs ranks that wait; give ranks=2")
            return
        if self.inject == "oom" and self.ranks > 1:
            raise ConfigError(f"{what} is one rank's; ranks={self.ranks} is given, give ranks=1")
        if self.inject and self.steps is not None and self.steps < _FEWEST_INJECTED:
            text = f"{what} needs steps before and after it, and steps={self.steps} is given"
            raise ConfigError(f"{text}; give a number from {_FEWEST_INJECTED} up")

    @property
    def total_steps(self) -> int:
        """How many steps are trained."""
        return self.steps or (_INJECTED_STEPS if self.inject else self.recipe.steps)
