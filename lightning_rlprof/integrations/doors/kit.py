"""What doors share: a session that is started when it is needed, and hooks that never raise."""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.integrations.loop import open_session
from lightning_rlprof.recording import compiled_code
from lightning_rlprof.recording.annotations import count, record, stage
from lightning_rlprof.recording.job import find_place
from lightning_rlprof.recording.open_spans import Owner
from lightning_rlprof.recording.session import Session, current, note_in_all_runs, running
from lightning_rlprof.recording.start import ray_worker
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.otel_names import StepNumbers, place_in
from lightning_rlprof.records.stage_aliases import standard_stage

log = logging.getLogger(__name__)


class Kit:
    """One door's hooks.

    Args:
        name: Of the framework.
        packages: Distributions whose versions the run is to contain.
    """

    has_failed: ClassVar[bool] = False  # One door is enough to say why nothing is recorded.

    def __init__(self, name: str, *packages: str) -> None:
        self.name, self._packages = name, packages
        self._failed: set[str] = set()

    def session(self, **options: Any) -> Session | None:
        """Return the session of this process, started now if there is none; None if it cannot be.

        Args:
            **options: As of `start_session`.
        """
        session = current()
        if session is not None and session.loop.yields:
            running()  # This ends a session that yields.
            session = current()
        if session is None and running() is None and "session" not in self._failed:
            try:
                session = self.new_session(Owner(is_training=False, has_process=True), **options)
            except Exception as error:
                self._say("session", error)
        return session

    def new_session(
        self,
        owner: Owner,
        own_place: tuple[int, int] | None = None,
        device: str | None = None,
        step_unit: str = "",
        end_if_left: Callable[[], object] | None = None,
        *,
        yields: bool = False,
        **options: Any,
    ) -> Session:
        """Start a session; raises what `start_session` raises.

        Args:
            owner: Whose spans are recorded.
            own_place: Rank and world size as the framework has them; see `find_place`.
            device: As of `start_session`.
            step_unit: As of `Header`.
            end_if_left: As of `Loop`.
            yields: As of `Loop`.
            **options: Fields of the configuration.
        """
        config = ProfilerConfig.build(os.environ.get("RLPROF_CONFIG") or None, **options)
        asked = {"device": device, "packages": self._packages, "step_unit": step_unit}
        place = find_place(own=own_place, role=config.role)
        return open_session(config, None, place, owner, asked, end_if_left, yields=yields)

    def begin_step(self, **options: Any) -> Session | None:
        """Begin a step unless one has begun; return the session, as `session` does."""
        session = self.session(**options)
        if session is not None and (session.waiting or session.step_start_ns is None):
            session.begin_step(session.next_step)
        return session

    def quiet(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that logs what it raises, once, and returns None then."""
        named: Any = hook.func if isinstance(hook, functools.partial) else hook

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception as error:
                self._say(getattr(named, "__qualname__", repr(named)), error)
            return None

        return call

    def _say(self, what: str, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            Kit.has_failed = True
            log.warning(
                "rlprof's door to %s: %s failed, the training continues: %s",
                self.name,
                what,
                error,
                exc_info=error,
            )

    def missing(self, text: str) -> None:
        """Note once, in the log and in the run, what this version of the framework lacks."""
        if text in self._failed:
            return
        self._failed.add(text)
        text = f"{self.name}: {text}, so it is not recorded"
        note_in_all_runs(Code.DOOR_NOT_RECORDED, text, framework=self.name)

    def find(self, module: Any, name: str) -> Any:
        """Return a class or function of a module; None, which is noted, if it is absent."""
        found = getattr(module, name, None)
        if found is None:
            self.missing(f"{module.__name__} has no {name}")
        return found

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Replace a function of a class or module by what is made of it; note if it is absent.

        A method that a class inherits is left to the class that has it.
        """
        if owner is None:
            return False
        before = inspect.getattr_static(owner, name, None)
        if before is None:
            self.missing(f"{getattr(owner, '__qualname__', owner.__name__)} has no {name}")
            return False
        if name not in vars(owner) or getattr(before, "_rlprof", False):
            return True
        kind = type(before) if isinstance(before, staticmethod | classmethod) else None
        made = make(before.__func__ if kind else before)
        made._rlprof = True
        setattr(owner, name, kind(made) if kind else made)
        return True

    def marks(
        self,
        owner: Any,
        name: str,
        marker: str,
        counts: Callable[[Any], Mapping[str, Any]] | None = None,
    ) -> bool:
        """Mark every call of a method as a stage.

        Args:
            owner: Class or module.
            name: Of the method.
            marker: The stage.
            counts: Given what the method returned, what to `count`.
        """

        def counted(found: Any, *args: Any, **kwargs: Any) -> None:
            if counts is not None:
                count(**counts(found))

        def make(function: Any) -> Any:
            return stage(marker)(self.around(function, after=counted) if counts else function)

        return self.replace(owner, name, make)

    def around(
        self,
        function: Any,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
    ) -> Any:
        """Return a function or coroutine function with hooks, which are `quiet`.

        Args:
            function: What is called.
            before: Given its arguments.
            after: Given what it returned, and its arguments.
        """
        begin, end = (None if hook is None else self.quiet(hook) for hook in (before, after))

        def tell(hook: Callable[..., object] | None, *args: Any, **kwargs: Any) -> None:
            if hook is not None and not compiled_code.is_compiling():
                hook(*args, **kwargs)

        async def call_awaited(*args: Any, **kwargs: Any) -> Any:
            tell(begin, *args, **kwargs)
            found = await function(*args, **kwargs)
            tell(end, found, *args, **kwargs)
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            tell(begin, *args, **kwargs)
            found = function(*args, **kwargs)
            tell(end, found, *args, **kwargs)
            return found

        is_async = inspect.iscoroutinefunction(function)
        return functools.wraps(function)(call_awaited if is_async else call)


def _options(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what attributes of OpenTelemetry say of a session.

    Workers of Ray count their ranks from 0 in each group.
    """
    rank, world, role = place_in(told)
    options: dict[str, Any] = {} if role is None else {"role": role}
    if rank is not None and world is not None and rank < world and ray_worker() is None:
        options["own_place"] = rank, world
    return options


class TimerNames(NamedTuple):
    """What the names of a framework's timers mean.

    Attributes:
        steps: Those that are steps.
        stages: Those that mean something else here than everywhere.
        ignored: Those that are sums of others.
        first: Timer with which a step begins, and the one before ends, where no timer is a step.
        last: Timer with which a step ends, likewise.
        joined: Timer of one turn of a loop: what is between two turns is the loop's, too.
    """

    steps: tuple[str, ...] = ()
    stages: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    first: str | None = None
    last: str | None = None
    joined: str | None = None


class Timers:
    """Intervals of a framework's own timers, by the names that it gives them.

    A timer that is known as a step begins and ends one; any other is a stage, under the name of the
    known stage that it means.

    Args:
        kit: Of the framework.
        names: What they mean.
    """

    def __init__(self, kit: Kit, names: TimerNames) -> None:
        self._kit, self._names, self._turn_ended = kit, names, 0
        self._open: dict[Any, int] = {}
        self._numbers = StepNumbers()
        self.start, self.stop = kit.quiet(self._start), kit.quiet(self._stop)

    def stage_of(self, name: str) -> str:
        """Return the stage that a timer's name means."""
        return dict(self._names.stages).get(name) or standard_stage(name)

    def is_step(self, name: str) -> bool:
        """Return whether a timer's name is that of a step."""
        return name in self._names.steps

    def _start(self, key: Any, name: str, told: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Begin an interval; only the first one and steps ask for the attributes in ``told``."""
        options = _options(told()) if current() is None else {}
        session, names = self._kit.session(**options), self._names
        if session is None:
            return
        if self.is_step(name):
            session.begin_step(self._numbers.next(told(), session.next_step - 1))
        elif names.first or names.last:
            if name == names.first and not session.waiting and session.step_start_ns is not None:
                session.end_step()
            self._kit.begin_step()
        start = session.clock()
        if name == names.joined:
            start = self._turn_ended or start
        self._open[key], self._turn_ended = start, 0

    def _stop(self, key: Any, name: str) -> None:
        session, start = current(), self._open.pop(key, None)
        if session is None or start is None:
            return
        if self.is_step(name):
            session.end_step()
        elif name not in self._names.ignored:
            now = session.clock()
            record(self.stage_of(name), start, now)
            self._turn_ended = now if name == self._names.joined else 0
            if name == self._names.last:
                session.end_step()
