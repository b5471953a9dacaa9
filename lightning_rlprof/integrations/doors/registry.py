"""The table of doors, and how they open: each waits until the module of its framework is imported.

Nothing here imports torch: a program under ``rlprof run`` starts as fast as before.
"""

import importlib
import os
from functools import partial
from typing import Any, NamedTuple

from lightning_rlprof.integrations.doors import pytorch
from lightning_rlprof.integrations.lightning.autoload import is_on
from lightning_rlprof.system.post_import import when_imported

CHOSEN = "RLPROF_DOORS"
"""Variable that names the doors to open, by commas; unset, all; ``none``, none."""


class Door(NamedTuple):
    """A framework that is recorded without a change of code.

    Attributes:
        name: As users call it.
        package: The distribution, whose version is recorded.
        modules: Modules that are prepared once they are imported, each by ``install(module)``.
        home: Module of this package that has ``install``.
        tested: Versions that were tested, and how.
        also: Another distribution that has the same modules.
    """

    name: str
    package: str
    modules: tuple[str, ...]
    home: str
    tested: str
    also: str = ""


_TIMERS, _MARKED = "timer_classes", "marked_functions"
_DOUBLE = "a double of its functions"

DOORS = (
    Door("Ray", "ray", ("ray",), "ray", "2.60"),
    Door("transformers", "transformers", ("transformers.trainer",), "transformers", "5.24"),
    Door(
        "TRL",
        "trl",
        (
            "trl.trainer.grpo_trainer",
            "trl.trainer.rloo_trainer",
            "trl.trainer.dpo_trainer",
            "trl.trainer.kto_trainer",
            "trl.generation.vllm_generation",
            "trl.experimental.online_dpo.online_dpo_trainer",
        ),
        "trl",
        "1.16",
    ),
    Door(
        "verl",
        "verl",
        (
            "verl.utils.profiler.performance",
            "verl.utils.debug.performance",
            "verl.utils.tracking",
            "verl.trainer.ppo.ray_trainer",
        ),
        "verl",
        "0.9.1",
    ),
    Door(
        "Fabric",
        "lightning",
        ("lightning.fabric.fabric", "lightning_fabric.fabric"),
        "fabric",
        "2.6",
        also="pytorch-lightning",
    ),
    Door("sheeprl", "sheeprl", ("sheeprl.utils.timer",), _TIMERS, "0.8.4"),
    Door("codetiming", "codetiming", ("codetiming._timer",), _TIMERS, "1.4"),
    Door("OpenTelemetry", "opentelemetry-sdk", ("opentelemetry.sdk.trace",), _TIMERS, "1.45"),
    Door("SkyRL", "skyrl", ("skyrl.train.utils.utils",), _TIMERS, "the timer of 0.3.0"),
    Door("NeMo-RL", "nemo-rl", ("nemo_rl.utils.timer",), _TIMERS, _DOUBLE),
    Door("slime", "slime", ("slime.observability.timer", "slime.utils.timer"), _TIMERS, _DOUBLE),
    Door("AReaL", "areal", ("areal.utils.stats_tracker",), _MARKED, "the timer of 1.0.4"),
    Door(
        "OpenRLHF",
        "openrlhf",
        (
            "openrlhf.trainer.ppo_trainer",
            "openrlhf.trainer.ppo_utils.experience_maker",
            "openrlhf.trainer.ppo_utils.samples_generator",
        ),
        _MARKED,
        _DOUBLE,
    ),
    Door(
        "prime-rl",
        "prime-rl",
        ("prime_rl.trainer.rl.data", "prime_rl.trainer.rl.broadcast"),
        _MARKED,
        _DOUBLE,
    ),
    Door("PyTorch", "torch", pytorch.MODULES, "pytorch", "2.13"),
)
"""All doors; Lightning has an entry point of its own."""

_opened: set[str] = set()


def open_doors() -> None:
    """Prepare every framework that is imported from now on, or has been; once per process.

    Raises:
        ConfigError: ``RLPROF`` says neither yes nor no.
    """
    if not is_on():
        return
    wanted = os.environ.get(CHOSEN, "").lower().replace(" ", "")
    for door in DOORS:
        if door.name in _opened or (wanted and door.name.lower() not in wanted.split(",")):
            continue
        _opened.add(door.name)
        for module in door.modules:
            when_imported(module, partial(_install, door))


def fabric_callbacks() -> list[Any]:
    """Open the doors when Fabric asks for callbacks; there are none.

    Example::

        >>> fabric_callbacks()
        []
    """
    open_doors()
    return []


def _install(door: Door, module: Any) -> None:
    home = importlib.import_module(f"lightning_rlprof.integrations.doors.{door.home}")
    home.install(module)
