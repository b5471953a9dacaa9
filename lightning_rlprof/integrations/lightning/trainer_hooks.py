"""What a run follows of a Trainer: its profiler and its batches."""

from collections.abc import Callable, Collection, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from types import TracebackType
from typing import Any

from lightning_rlprof.recording.annotations import Marker
from lightning_rlprof.recording.method_wrapping import Replaced
from lightning_rlprof.recording.session import Session

# Lightning names an action "[Owner]Class.hook"; only these hooks are worth a span at every step.
_REGIONS = {
    "train_dataloader_next": "data_fetch",
    "batch_to_device": "batch_transfer",
    "training_step": "training_step",
    "save_checkpoint": "save_checkpoint",
}
_BATCH = "run_training_batch"
# Optimizer steps come from torch's own hooks, which also see raw optimizers.
_LIGHTNINGS_OWN = {"run_training_epoch", _BATCH, "optimizer_step"}
# Other callbacks run between two batches; they are worth a span if they take time.
_CALLBACK_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
_OURS = "ProfilerCallback"
_OWNERS = ("[Strategy]", "[_TrainingEpochLoop]")
_SLOW_NS = 1_000_000


class Cover(Replaced):
    """A method of one object that is ours until `remove`; its class and its equals stay untouched.

    A copy of the object, and what is pickled of it, has its own method again: workers of a data
    loader that are spawned get the whole Trainer, as soon as their dataset knows it.

    Args:
        owner: The object.
        name: The method.
        mine: What is called instead.
    """

    def __init__(self, owner: Any, name: str, mine: Callable[..., Any]) -> None:
        super().__init__()
        covering = _Covering(mine)
        covering.covers = getattr(owner, name)
        self.put(owner, name, covering)


class _Covering(partial[Any]):
    """Calls ours without a Python frame; its copy is one of the method that it covers."""

    covers: Callable[..., Any]

    def __reduce__(self) -> Any:
        return _itself, (self.covers,)


def _itself(copied: Any) -> Any:
    return copied


class _Nothing:
    """A context manager of builtins: an action that is not recorded costs no Python frame."""

    __enter__: Any = ContextVar("rlprof_nothing", default=None).get
    __exit__: Any = memoryview(b"").__exit__

    def __call__(self, function: Any) -> Any:
        """Return a function that it decorates, as Lightning's own actions may, as it is."""
        return function


class _IfSlow:
    """Record an action only when it took a millisecond or more."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._marker = session, Marker(name, "region")
        self._start = 0

    def __enter__(self) -> None:
        self._start = self._session.clock()

    def __exit__(self, *error: object) -> None:
        end = self._session.clock()
        if end - self._start >= _SLOW_NS:
            self._session.record(self._marker, self._start, end)


class Actions:
    """Turn the actions of ``trainer.profiler`` into spans until `remove`.

    The profiler stays the Trainer's own object: three of its methods are covered on the instance.
    Actions that Lightning's users name themselves become regions, or stages where the name is one.

    Args:
        profiler: ``trainer.profiler``.
        session: Where spans go.
        stages: Names that mean a stage.
        batch: Entered and left around each training batch, which is an action, too.
    """

    def __init__(
        self,
        profiler: Any,
        session: Session,
        stages: Collection[str],
        batch: AbstractContextManager[object],
    ) -> None:
        self._session, self._stages, self._batch = session, stages, batch
        self._start, self._stop, self._profile = profiler.start, profiler.stop, profiler.profile
        # The caches answer without a Python frame. They are bounded, as names may contain a number.
        self._known = lru_cache(maxsize=1024)(self._learn)
        mine = {"start": self.start, "stop": self.stop, "profile": self.around}
        changed = {*mine} & {*vars(profiler)}
        if type(profiler).__name__ == "PassThroughProfiler" and not changed:
            # It does nothing, but costs a generator per action, 40 of them per step.
            profile = lru_cache(maxsize=1024)(self.profile)
            mine = {"start": self.enter, "stop": self.exit, "profile": profile}
        self._covers = [Cover(profiler, name, method) for name, method in mine.items()]

    def profile(self, action_name: str) -> Any:
        """Return what to enter and leave around an action."""
        return self._batch if action_name == _BATCH else self._known(action_name)

    def around(self, action_name: str) -> Any:
        """Return the same where the profiler does something: it calls our `start` and `stop`."""
        inner = self._profile(action_name)
        return _both(self._batch, inner) if action_name == _BATCH else inner

    def start(self, action_name: str) -> None:
        """Start the action in the profiler, then its span."""
        self._start(action_name)
        self.enter(action_name)

    def stop(self, action_name: str) -> None:
        """Stop the action's span, then the action in the profiler."""
        self.exit(action_name)
        self._stop(action_name)

    def enter(self, action_name: str) -> None:
        """Begin the action's span."""
        self._known(action_name).__enter__()

    def exit(self, action_name: str) -> None:
        """End the action's span."""
        self._known(action_name).__exit__(None, None, None)

    def remove(self) -> None:
        """Restore the profiler's methods, except those that other code replaced since."""
        for cover in self._covers:
            cover.remove()

    def _learn(self, action_name: object) -> Any:
        # A user's action may be a number, or a member of an Enum that is also a string.
        action_name = (str.__str__ if isinstance(action_name, str) else str)(action_name)
        owner, _, hook = action_name.rpartition(".")
        if action_name in self._stages:
            return Marker(action_name, "stage")
        if owner.startswith("[Callback]") and hook in _CALLBACK_HOOKS and owner[10:] != _OURS:
            return _IfSlow(self._session, f"{owner[10:].partition('{')[0]}.{hook}")
        if hook in _REGIONS and (owner.startswith(_OWNERS) or action_name in _REGIONS):
            return Marker(_REGIONS[hook], "region")
        if action_name.startswith("[") or action_name in _LIGHTNINGS_OWN:
            return _Nothing()
        return Marker(action_name, "region")


@contextmanager
def _both(
    outer: AbstractContextManager[object], inner: AbstractContextManager[object]
) -> Iterator[object]:
    with outer, inner as found:
        yield found


class Batches:
    """Tell the session that a step has a batch and when it is done, until `remove`.

    One object for all ``with`` blocks around batches. A batch that raises ends no step, and one
    that a tuner runs, without the Trainer's callbacks, is none.

    Args:
        session: Whose steps they are.
        trainer: Who runs them.
        watched: Ids of callbacks; as long as the Trainer has one, batches are of its training.
        give_up: Told what failed here; the training never hears of it.
        after: Called after each step.
    """

    def __init__(
        self,
        session: Session,
        trainer: Any,
        watched: Set[int],
        give_up: Callable[[Exception], None],
        after: Callable[[], None],
    ) -> None:
        self._session, self._trainer, self._watched = session, trainer, watched
        self._give_up, self._after = give_up, after
        self._progress = trainer.fit_loop.epoch_loop.batch_progress
        self._inside = False

    def remove(self) -> None:
        """Leave the session alone from now on, also at the end of a batch that has begun."""
        self._inside = False

    def __enter__(self) -> None:
        """Know that the step has a batch; begin it if batches before it were skipped."""
        try:
            if not self._watched.isdisjoint(map(id, self._trainer.callbacks)):
                self._inside = True
                self._session.begin_step(self._progress.total.ready)
        except Exception as error:
            self._give_up(error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the step."""
        if self._inside and kind is None:
            try:
                self._session.end_step()
                self._after()
            except Exception as ours:
                self._give_up(ours)
        self._inside = False
