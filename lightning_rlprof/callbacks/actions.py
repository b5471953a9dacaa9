"""Listen to a Lightning profiler's actions without disturbing the profiler itself."""

from collections.abc import Collection
from contextvars import ContextVar
from typing import Any

from lightning_rlprof.marking import Marker
from lightning_rlprof.session import Session

__all__ = ["Actions"]

# Lightning names an action "[Owner]Class.hook"; only these hooks are worth a span at every step.
_REGIONS = {
    "train_dataloader_next": "data_fetch",
    "batch_to_device": "batch_transfer",
    "training_step": "training_step",
    "save_checkpoint": "save_checkpoint",
}
# optimizer_step comes from torch's own hooks, which also see raw optimizers.
_LIGHTNINGS_OWN = {"run_training_epoch", "run_training_batch", "optimizer_step"}
# Other callbacks run between two batches: worth a span where they take time.
_CALLBACK_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
_SLOW_NS = 1_000_000


class _Nothing:
    """A context manager of builtins: an action that nobody wants costs no Python frame."""

    __enter__: Any = ContextVar("rlprof_nothing", default=None).get
    __exit__: Any = memoryview(b"").__exit__


class _IfSlow:
    """Record an action only when it took a millisecond or more."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name
        self._start = 0

    def __enter__(self) -> None:
        self._start = self._session.clock()

    def __exit__(self, *error: object) -> None:
        end = self._session.clock()
        if end - self._start >= _SLOW_NS:
            self._session.record(self._name, "region", self._start, end)


class Actions:
    """Turn the actions of ``trainer.profiler`` into spans until `remove`.

    The profiler stays the Trainer's own object: three of its methods are covered on the instance.
    Actions that Lightning's users name themselves become regions, or stages where the name is one.

    Args:
        profiler: ``trainer.profiler``.
        session: Where spans go.
        stages: Names that mean a stage.
    """

    def __init__(self, profiler: Any, session: Session, stages: Collection[str]) -> None:
        self._profiler, self._session, self._stages = profiler, session, stages
        self._start, self._stop = profiler.start, profiler.stop
        self._actions: dict[str, Any] = {}
        self._mine = {"start": self.start, "stop": self.stop}
        if type(profiler).__name__ == "PassThroughProfiler":
            # It does nothing at the price of a generator per action, 40 of them per step.
            self._mine["profile"] = self.profile
        own = vars(profiler)
        self._before = {name: own[name] for name in self._mine if name in own}
        own.update(self._mine)

    def profile(self, action_name: str) -> Any:
        """Return what marks the action."""
        return self._actions.get(action_name) or self._learn(action_name)

    def start(self, action_name: str) -> None:
        """Start the action in the profiler, then its span."""
        self._start(action_name)
        self.profile(action_name).__enter__()

    def stop(self, action_name: str) -> None:
        """Stop the action's span, then the action in the profiler."""
        self.profile(action_name).__exit__(None, None, None)
        self._stop(action_name)

    def remove(self) -> None:
        """Uncover the profiler's methods, except those that somebody has covered since."""
        for name, method in self._mine.items():
            if vars(self._profiler).get(name) == method:
                delattr(self._profiler, name)
                if name in self._before:  # somebody had covered it before us
                    setattr(self._profiler, name, self._before[name])

    def _learn(self, action: str) -> Any:
        owner, _, hook = action.rpartition(".")
        if action in self._stages:
            found: Any = Marker(action, "stage")
        elif owner.startswith("[Callback]") and hook in _CALLBACK_HOOKS:
            found = _IfSlow(self._session, f"{owner[10:].partition('{')[0]}.{hook}")
        elif owner.startswith(("[Strategy]", "[_TrainingEpochLoop]")) or action in _REGIONS:
            found = Marker(_REGIONS[hook], "region") if hook in _REGIONS else _Nothing()
        elif action.startswith("[") or action in _LIGHTNINGS_OWN:
            found = _Nothing()
        else:
            found = Marker(action, "region")
        self._actions[action] = found
        return found
