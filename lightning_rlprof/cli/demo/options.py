"""What a demo trains, and how."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lightning_rlprof.cli.console import did_you_mean
from lightning_rlprof.errors import ConfigError

_MOST_RANKS = 64

INJECTIONS = ("slow-step", "shift", "hang", "oom", "leak", "throttle")
"""What can be made to go wrong."""

INJECTED_STEPS = 80
"""Steps of a demo in which something goes wrong: 30 show what is usual before the middle one."""

_FEWEST_INJECTED = 70
_ONE_RANK = ("oom", "throttle")


@dataclass(frozen=True)
class Recipe:
    """How a policy is trained, so that a demo takes a minute or two on two CPU cores.

    Attributes:
        tasks: Of `demo.task.TASKS`, those that it can learn; the first is the default.
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

    tasks: tuple[str, ...] = ("spell_backward", "number_sorting")
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
        task: One of the recipe's tasks; None takes the first.
        steps: RL steps; None takes the recipe's.
        kv_cache: Generate with a cache of keys and values; without it, generation dominates a step.
        ranks: Processes; more than one train together by DDP over gloo.
        save_path: Where the run directory goes.
        seed: Chooses weights, prompts and samples; on one rank it decides the whole result.
        warmup_steps: Steps of the supervised warm start; None takes the task's own number.
        slow_rank: A rank that is made slow, to see it found; None for none.
        slow_by: How much longer it takes for its own stages, those without waiting for others.
        inject: What goes wrong, of `INJECTIONS`; None for nothing.

    Raises:
        ConfigError: A name is unknown, a number is too small or too large, or `slow_rank` is not
            one of the ranks.
    """

    recipe: Recipe = Recipe()
    task: str | None = None
    steps: int | None = None
    kv_cache: bool = False
    ranks: int = 1
    save_path: Path = Path("profiler_data")
    seed: int = 0
    warmup_steps: int | None = None
    slow_rank: int | None = None
    slow_by: float = 0.15
    inject: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.task is not None:
            _one_of("task", self.task, self.recipe.tasks)
        for name, value in (("steps", self.steps), ("ranks", self.ranks)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is too small; give a number from 1 up")
        if self.ranks > _MOST_RANKS:
            text = f"ranks={self.ranks} is too large: each is a process here"
            raise ConfigError(f"{text}; give a number up to {_MOST_RANKS}")
        if self.slow_rank is not None and not 0 <= self.slow_rank < self.ranks:
            have = f"0 to {self.ranks - 1}"
            raise ConfigError(f"slow_rank={self.slow_rank} is not trained here; ranks are {have}")
        if self.inject is not None:
            _one_of("inject", self.inject, INJECTIONS)
            self._check_inject()
        if not 0 < self.slow_by <= 10:
            raise ConfigError(f"slow_by={self.slow_by} is not allowed; 0.15 is 15 %, 10 the most")

    def _check_inject(self) -> None:
        what = f"inject={self.inject}"
        if self.inject == "hang":
            if self.ranks < 2:
                raise ConfigError(f"{what} needs ranks that wait; give ranks=2")
            return
        if self.inject in _ONE_RANK and self.ranks > 1:
            raise ConfigError(f"{what} is one rank's; ranks={self.ranks} is given, give ranks=1")
        if self.steps is not None and self.steps < _FEWEST_INJECTED:
            text = f"{what} needs steps before and after it, and steps={self.steps} is given"
            raise ConfigError(f"{text}; give a number from {_FEWEST_INJECTED} up")


def _one_of(key: str, name: str, allowed: Collection[str]) -> None:
    if name not in allowed:
        near = did_you_mean(name, allowed)
        hint = f"; {near}" if near else ""
        raise ConfigError(f"{key}={name!r} is unknown; allowed: {', '.join(allowed)}{hint}")
