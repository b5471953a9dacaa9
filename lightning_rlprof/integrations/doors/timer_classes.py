"""Doors to frameworks that time their stages by a class of their own, in one table.

Each row says which class it is, which methods begin and end an interval, where its name is, and
which names are steps.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from lightning_rlprof.integrations.doors.kit import Kit, Timers
from lightning_rlprof.integrations.doors.registry import DOORS
from lightning_rlprof.records.records import STAGES
from lightning_rlprof.records.stage_aliases import standard_stage

NameOf = Callable[..., str | None]


class TimerClass(NamedTuple):
    """One framework's class of timers.

    Attributes:
        kind: Name of the class.
        methods: Names of the methods that begin and end an interval, in pairs.
        name_of: The name of an interval, from the timer and the arguments of the method; None if it
            has none.
        by_instance: Whether each object has one interval at a time, whatever its name.
        steps: Names that are steps.
        stages: Names that mean something else here than everywhere.
        ignored: Names that are sums of others.
        first: Name with which a step begins, where none is a step.
        last: Name with which a step ends, likewise.
        joined: Name of one turn of a loop: what is between two turns is the loop's, too.
        unless: A package that has a door of its own and uses these timers.
        only_known: Whether names that mean no known stage, nor a step, are left out.
    """

    kind: str
    methods: tuple[tuple[str, str], ...]
    name_of: NameOf
    by_instance: bool = True
    steps: tuple[str, ...] = ()
    stages: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    first: str | None = None
    last: str | None = None
    joined: str | None = None
    unless: str | None = None
    only_known: bool = False


def _argument(timer: Any, name: str = "", *args: Any, **kwargs: Any) -> str | None:
    return str(kwargs.get("label", name)) or None


def _own(attribute: str) -> NameOf:
    def name_of(timer: Any, *args: Any, **kwargs: Any) -> str | None:
        found = getattr(timer, attribute, None)
        return None if found is None else str(found)

    return name_of


_STEPS = ("step", "step_total", "pipeline_step_total")
_BOTH_CONTEXTS = (("__enter__", "__exit__"), ("__aenter__", "__aexit__"))

TIMER_CLASSES: dict[str, TimerClass] = {
    "codetiming._timer": TimerClass(
        "Timer", (("start", "stop"),), _own("name"), steps=_STEPS, unless="verl"
    ),
    "opentelemetry.sdk.trace": TimerClass(
        "Span", (("start", "end"),), _own("name"), steps=_STEPS, only_known=True
    ),
    "sheeprl.utils.timer": TimerClass(
        "timer",
        (("__enter__", "__exit__"),),
        _own("name"),
        stages=(
            ("Time/env_interaction_time", "actor_generate"),
            ("Time/train_time", "actor_update"),
        ),
        last="Time/train_time",
        joined="Time/env_interaction_time",
    ),
    "skyrl.train.utils.utils": TimerClass(
        "Timer",
        _BOTH_CONTEXTS,
        _own("message"),
        steps=("step",),
        # In the asynchronous trainer the updates inside are on a thread of their own.
        stages=(("train_critic_and_policy", "actor_update"),),
        ignored=("run_training",),
    ),
    "nemo_rl.utils.timer": TimerClass(
        "Timer",
        (("start", "stop"),),
        _argument,
        by_instance=False,
        steps=("total_step_time",),
        ignored=("prepare_for_generation/total",),
    ),
    "slime.observability.timer": TimerClass(
        "Timer",
        (("start", "end"),),
        _argument,
        by_instance=False,
        ignored=("train",),
        first="train_wait",
    ),
}
"""By the module that has the class."""

TIMER_CLASSES["slime.utils.timer"] = TIMER_CLASSES["slime.observability.timer"]


def install(module: Any) -> None:
    """Let the timers of a module record what they time."""
    row = TIMER_CLASSES[module.__name__]
    door = next(each for each in DOORS if module.__name__ in each.modules)
    kit = Kit(door.name, door.package)
    timers = Timers(kit, row.steps, dict(row.stages), row.ignored, row.first, row.last, row.joined)
    kind = kit.find(module, row.kind)
    for begin, end in row.methods:
        # An interval begins after its method has run, and ends before the other one runs.
        begun, ends = partial(_begun, row, timers), partial(_tell, row, timers.stop)
        kit.replace(kind, begin, partial(kit.around, after=begun))
        kit.replace(kind, end, partial(kit.around, before=ends))


def _begun(row: TimerClass, timers: Timers, found: Any, timer: Any, *args: Any, **kw: Any) -> None:
    _tell(row, timers.start, timer, *args, **kw)


def _tell(row: TimerClass, what: Callable[..., Any], timer: Any, *args: Any, **kwargs: Any) -> None:
    """Tell of an interval's begin or end, if its name counts."""
    name = row.name_of(timer, *args, **kwargs)
    if name is None or row.unless in sys.modules:
        return
    if not row.only_known or name in row.steps or standard_stage(name) in STAGES:
        what(id(timer) if row.by_instance else (id(timer), name), name)
