"""Doors to frameworks that time their stages by a class of their own, in one table.

Each row says which class it is, which methods begin and end an interval, where its name is, and
which names are steps.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from lightning_rlprof.integrations.doors.kit import Kit, TimerNames, Timers
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
        names: What the names mean.
        by_instance: Whether each object has one interval at a time, whatever its name.
        unless: A package that has a door of its own and uses these timers.
        only_known: Whether names that mean no known stage, nor a step, are left out, unless they
            are of the namespace ``rl``.
    """

    kind: str
    methods: tuple[tuple[str, str], ...]
    name_of: NameOf
    names: TimerNames = TimerNames()
    by_instance: bool = True
    unless: str | None = None
    only_known: bool = False


def _argument(timer: Any, name: str = "", *args: Any, **kwargs: Any) -> str | None:
    return str(kwargs.get("label", name)) or None


def _own(attribute: str) -> NameOf:
    def name_of(timer: Any, *args: Any, **kwargs: Any) -> str | None:
        found = getattr(timer, attribute, None)
        return None if found is None else str(found)

    return name_of


def _span(span: Any, *args: Any, **kwargs: Any) -> str | None:
    """Return a span's name, of the namespace ``rl`` its last part: ``rl.grpo.step`` is a step."""
    name = str(span.name)
    return name.rpartition(".")[2] if name.startswith(_RL) else name


_RL = "rl."  # NeMo-RL's, and proposed for OpenTelemetry's conventions.
_STEPS = ("step", "step_total", "pipeline_step_total")
_SHEEPRL_ENV, _SHEEPRL_TRAIN = "Time/env_interaction_time", "Time/train_time"
_BOTH_CONTEXTS = (("__enter__", "__exit__"), ("__aenter__", "__aexit__"))

TIMER_CLASSES: dict[str, TimerClass] = {
    "codetiming._timer": TimerClass(
        "Timer", (("start", "stop"),), _own("name"), TimerNames(_STEPS), unless="verl"
    ),
    "opentelemetry.sdk.trace": TimerClass(
        "Span", (("start", "end"),), _span, TimerNames(_STEPS), only_known=True
    ),
    "sheeprl.utils.timer": TimerClass(
        "timer",
        (("__enter__", "__exit__"),),
        _own("name"),
        TimerNames(
            stages=((_SHEEPRL_ENV, "actor_generate"), (_SHEEPRL_TRAIN, "actor_update")),
            last=_SHEEPRL_TRAIN,
            joined=_SHEEPRL_ENV,
        ),
    ),
    "skyrl.train.utils.utils": TimerClass(
        "Timer",
        _BOTH_CONTEXTS,
        _own("message"),
        # In the asynchronous trainer, the updates inside run on another thread.
        TimerNames(
            ("step",), (("train_critic_and_policy", "actor_update"),), ignored=("run_training",)
        ),
    ),
    "nemo_rl.utils.timer": TimerClass(
        "Timer",
        (("start", "stop"),),
        _argument,
        TimerNames(("total_step_time",), ignored=("prepare_for_generation/total",)),
        by_instance=False,
    ),
    "slime.observability.timer": TimerClass(
        "Timer",
        (("start", "end"),),
        _argument,
        TimerNames(ignored=("train",), first="train_wait"),
        by_instance=False,
    ),
}
"""By the module that has the class."""

TIMER_CLASSES["slime.utils.timer"] = TIMER_CLASSES["slime.observability.timer"]


def install(module: Any) -> None:
    """Let the timers of a module record what they time."""
    row = TIMER_CLASSES[module.__name__]
    door = next(each for each in DOORS if module.__name__ in each.modules)
    kit = Kit(door.name, door.package)
    timers = Timers(kit, row.names)
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
    known = name in row.names.steps or standard_stage(name) in STAGES
    if not row.only_known or known or str(getattr(timer, "name", "")).startswith(_RL):
        what(id(timer) if row.by_instance else (id(timer), name), name)
