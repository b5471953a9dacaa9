"""Doors to frameworks that time their stages by a class of their own, in one table.

Each row says which class it is, which methods begin and end an interval, where its name is, and
which names are steps.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from lightning_rlprof.integrations.doors.kit import Kit, TimerNames, Timers
from lightning_rlprof.integrations.doors.registry import DOORS
from lightning_rlprof.records.otel_names import STEPS, meaning_of

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
        told: What an interval says of itself and its process, as attributes of OpenTelemetry.
    """

    kind: str
    methods: tuple[tuple[str, str], ...]
    name_of: NameOf
    names: TimerNames = TimerNames()
    by_instance: bool = True
    unless: str | None = None
    told: Callable[[Any], Mapping[str, Any]] = lambda timer: {}


def _argument(timer: Any, name: str = "", *args: Any, **kwargs: Any) -> str | None:
    return str(kwargs.get("label", name)) or None


def _own(attribute: str) -> NameOf:
    def name_of(timer: Any, *args: Any, **kwargs: Any) -> str | None:
        found = getattr(timer, attribute, None)
        return None if found is None else str(found)

    return name_of


def _attributes(span: Any) -> dict[str, Any]:
    return {**span.resource.attributes, **span.attributes}


def _span(span: Any, *args: Any, **kwargs: Any) -> str | None:
    meaning = meaning_of(str(span.name), span.attributes)
    return None if meaning is None or meaning.kind == "region" else meaning.name


_SHEEPRL_ENV, _SHEEPRL_TRAIN = "Time/env_interaction_time", "Time/train_time"
_BOTH_CONTEXTS = (("__enter__", "__exit__"), ("__aenter__", "__aexit__"))

TIMER_CLASSES: dict[str, TimerClass] = {
    "codetiming._timer": TimerClass(
        "Timer", (("start", "stop"),), _own("name"), TimerNames(STEPS), unless="verl"
    ),
    "opentelemetry.sdk.trace": TimerClass(
        "Span", (("start", "end"),), _span, TimerNames(("step",)), told=_attributes
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
        begun, ends = partial(_begun, row, timers), partial(_ends, row, timers)
        kit.replace(kind, begin, partial(kit.around, after=begun))
        kit.replace(kind, end, partial(kit.around, before=ends))


def _begun(row: TimerClass, timers: Timers, found: Any, timer: Any, *args: Any, **kw: Any) -> None:
    if (name := _name(row, timer, *args, **kw)) is not None:
        timers.start(_key(row, timer, name), name, partial(row.told, timer))


def _ends(row: TimerClass, timers: Timers, timer: Any, *args: Any, **kwargs: Any) -> None:
    if (name := _name(row, timer, *args, **kwargs)) is not None:
        timers.stop(_key(row, timer, name), name)


def _name(row: TimerClass, timer: Any, *args: Any, **kwargs: Any) -> str | None:
    """Return the name of an interval; None if it does not count."""
    return None if row.unless in sys.modules else row.name_of(timer, *args, **kwargs)


def _key(row: TimerClass, timer: Any, name: str) -> object:
    return id(timer) if row.by_instance else (id(timer), name)
