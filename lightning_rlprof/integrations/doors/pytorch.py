"""Door to PyTorch itself: loops of no framework that rlprof knows.

A step is a rollout and the updates that follow it; where nothing rolls out, it is a step of the
optimizer. A rollout begins with a step of an environment or a call that generates. It ends at the
first call with gradients after which an update follows. What lies between calls belongs to the
rollout or the update around it. The session of another door, or of the program, takes the place of
this one's.

The side that records is imported with the first step of a loop: a program that imports torch and
trains nothing, such as a worker, does not pay for it.
"""

import atexit
import logging
import os
import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import isgeneratorfunction
from typing import TYPE_CHECKING, Any
from weakref import ref

from lightning_rlprof.recording import compiled_code
from lightning_rlprof.records.records import OPTIMIZER_STEP, ROLLOUT_AND_UPDATES
from lightning_rlprof.system.post_import import when_imported

if TYPE_CHECKING:
    from lightning_rlprof.recording.session import Session

log = logging.getLogger(__name__)

_MIN_TURNS = 5  # A mean of fewer turns that end with a module is not taken, if there are others.
_SESSIONS = "lightning_rlprof.recording.session"
_PACKAGES = (
    *("gymnasium", "stable-baselines3", "torchrl", "tianshou"),
    *("accelerate", "transformers", "vllm", "sglang"),
)


class _Loop:
    """What the main thread's loop does, as far as calls show it.

    Times are those of the session's clock; None where that has not happened in this step.

    Attributes:
        inside: Whether a call is open, so that those that it makes are a part of it.
        fetching: Whether a batch is being loaded.
        session: The session of this door, once it has one.
        rollouts: How many calls rolled out.
        has_optimizer: Whether this process has made one, as workers and servers don't.
    """

    def __init__(self) -> None:
        self.inside = self.fetching = False
        self.session: Session | None = None
        self.rollouts = 0
        self._thread = threading.main_thread().ident
        self.has_optimizer = False
        self._leader: Callable[[], Any] = lambda: None  # The optimizer whose steps end a step.
        self._others: set[int] = set()  # Ids of the optimizers that stepped since the leader did.
        self._is_marked = self._is_closed = False  # A step is marked if the program has stages.
        # How long the loop takes from a step of an environment to its next call, and how often: if
        # that is a module, and if it is another step.
        self._turns = {True: [0, 0], False: [0, 0]}
        self._number = 0
        self._forget_step()

    def _forget_step(self) -> None:
        self._rollout: int | None = None
        self._gradients: int | None = None
        self._updated: int | None = None
        self._asked: int | None = None  # Time of the first call without gradients since the update.
        self._left: int | None = None  # Time of the first module after a step of an environment.
        self._in_environment = self._calls = self._environment_end = 0

    def tell(self, event: Callable[..., None], *facts: Any) -> None:
        """Tell of an event; a failure is logged once, and ends this door."""
        try:
            if not self._is_closed:
                event(self, *facts)
        except Exception as error:
            self._is_closed = True
            text = "rlprof's door to PyTorch failed, the training continues: %s"
            log.warning(text, error, exc_info=error)

    def makes_call(self) -> bool:
        """Return whether the loop itself calls, rather than another call that is known."""
        return not self.inside and get_ident() == self._thread

    # ---- what is called

    def forward(self) -> None:
        """A module is about to be called by the loop itself."""
        import torch

        if self._environment_end and self._left is None and self.session is not None:
            self._left = self.session.clock()
        if torch.is_grad_enabled():
            self._with_gradients()
        elif self.fetching:
            self.rollout()
        elif self._updated is not None and self._asked is None and self.session is not None:
            self._asked = self.session.clock()

    def rollout(self) -> None:
        """A step of an environment, or a call that generates, is about to begin."""
        self.rollouts += 1
        session = self._own(ROLLOUT_AND_UPDATES if self.has_optimizer else "")
        if session is None:
            return
        now, asked = session.clock(), self._asked
        if self._updated is not None:
            self._end_step(session)
            if asked is not None:
                self._record("actor_generate", asked, now)
            now = session.clock()  # It belongs to the new step.
        if self._rollout is None:
            self._rollout = now
        if self._environment_end:
            turns = self._turns[self._left is not None]
            turns[0] += (self._left or now) - self._environment_end
            turns[1] += 1
        self._gradients = self._left = None
        self._environment_end = 0

    def collected(self) -> None:
        """A call has ended that rolls out for the whole step."""
        if self.session is not None:
            self._left, self._environment_end = self.session.clock(), 0
            self._gradients = None

    def environment(self, start: int) -> None:
        """A step of an environment has ended; a call of some microseconds is only added up."""
        if self.session is not None:
            self._environment_end = self.session.clock()
            self._in_environment += self._environment_end - start
            self._calls += 1

    def backward(self) -> None:
        """A backward pass is about to begin."""
        if self._own(OPTIMIZER_STEP) is not None:
            self._with_gradients()

    def update(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        session = self._own("")
        if session is None or self._gradients is None:
            return
        self._updated, self._asked = session.clock(), None
        if self._rollout is None and self._leads(optimizer):
            self._end_step(session)

    def fetched(self, start: int, rollouts: int) -> None:
        """A batch was loaded; what a loader rolls out is a part of the rollout."""
        if self.session is not None and rollouts == self.rollouts:
            self._record("data_fetch", start, self.session.clock())

    def _with_gradients(self) -> None:
        self._asked = None
        if self._gradients is None and self.session is not None:
            self._gradients = self.session.clock()

    def _leads(self, optimizer: Any) -> bool:
        """Return whether a step ends with this optimizer: of several, with the first one."""
        leader = self._leader()
        if leader is not None and leader is not optimizer and id(optimizer) not in self._others:
            self._others.add(id(optimizer))
            return False
        self._leader = ref(optimizer)
        self._others.clear()
        return True

    # ---- what is recorded

    def _own(self, unit: str) -> "Session | None":
        """Return this door's session, started now if the process has none and a unit is given."""
        if self.session is None and unit:
            module = sys.modules.get(_SESSIONS)
            if module is None or module.current() is None:
                self._start(unit)
        if self.session is None or self.session.status:
            return None
        from lightning_rlprof.recording.annotations import in_stage

        self._is_marked = self._is_marked or in_stage()
        return self.session

    def _start(self, unit: str) -> None:
        from lightning_rlprof.integrations.doors.kit import Kit
        from lightning_rlprof.recording.job import find_place
        from lightning_rlprof.recording.open_spans import Owner

        # What a worker of Ray trains is a part of its driver's step.
        if Kit.has_failed or find_place().is_actor:
            self._is_closed = True
            return
        session = Kit("PyTorch", *_PACKAGES).new_session(
            Owner(is_training=False), step_unit=unit, end_if_left=self._make_room, yields=True
        )
        if not session.loop.yields:  # Another thread's session came first.
            self._is_closed = True
            return
        atexit.register(self.tell, _Loop.leave_untrained)  # It runs before the session's.
        self.lead(session)

    def lead(self, session: "Session") -> None:
        """Let the steps of this thread's loop be those of a session, until that ends."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._forget_step()
        self._thread, self.session, self._number = get_ident(), session, 1
        hook = register_optimizer_step_post_hook(_stepped)  # It runs after the session's hook.
        session.at_close(lambda: self.tell(_Loop.flush), hook.remove)
        session.expect_step(1)

    def _end_step(self, session: "Session", end: int | None = None) -> None:
        """Record the step that was seen, and end it, unless the program has steps itself.

        Args:
            session: Of the step.
            end: When it ended; unset, now.
        """
        from lightning_rlprof.recording.annotations import Marker
        from lightning_rlprof.recording.open_spans import new_span

        start, gradients, updated = self._rollout, self._gradients, self._updated
        if start is not None and gradients is not None:
            gradients = self._rollout_end(gradients)
            self._record("actor_generate", start, gradients)
            if self._calls:
                marker, total = Marker("env_step", "region"), {"calls": self._calls}
                sum_end = min(start + self._in_environment, gradients)
                session.append(new_span(marker, session.step, start, sum_end, total))
        if gradients is not None and updated is not None:
            self._record("actor_update", gradients, updated)
        self._forget_step()
        if session.step == self._number:
            session.begin_step(session.next_step)
            session.end_step(end)
            self._number = session.step

    def _rollout_end(self, gradients: int) -> int:
        """Return when the rollout ended; after a step of an environment no call says so.

        What follows that step takes as long as after others. What takes longer prepares the update,
        such as a batch that is drawn from a replay buffer, and values of a target network.
        """
        end = min(self._left or gradients, gradients)
        module, other = self._turns[True], self._turns[False]
        total, count = other if module[1] < min(_MIN_TURNS, other[1]) else module
        if self._environment_end and count:
            end = min(end, self._environment_end + total // count)
        return end

    def _record(self, name: str, start: int, end: int) -> None:
        from lightning_rlprof.recording.annotations import record

        if not self._is_marked:
            record(name, start, end)

    def flush(self) -> None:
        """Record the last step, which no other rollout ends: its last update does."""
        if self.session is not None and self._rollout is not None and self._updated is not None:
            self._end_step(self.session, self._updated)

    def leave_untrained(self) -> None:
        """Leave no run of a program that has not trained."""
        self.flush()
        session = self.session
        if session is not None and not session.status and not session.has_steps:
            from lightning_rlprof.recording.job import forget

            session.discard()
            forget(session.run)
            self.session = None

    def _make_room(self) -> None:
        """End, because another session begins."""
        self.tell(_Loop.leave_untrained)
        session, self.session = self.session, None
        if session is not None and not session.status:
            session.close(session.standing)


LOOP = _Loop()


def install(module: Any) -> None:
    """Listen to torch, to an environment's wrappers, or to what generates."""
    name = module.__name__
    if name == "torch":
        _listen(module)
    elif name == "torch.utils.data.dataloader":
        _cover(module, "_BaseDataLoaderIter", "__next__", _fetching)
    elif name in _COLLECTS:
        owner, method = _COLLECTS[name]
        _cover(module, owner, method, _collecting)
    else:
        for owner, method in _ROLLS[name]:
            _cover(module, owner, method, _rolling)


_ROLLS = {
    "gymnasium.wrappers.common": [
        (name, "step") for name in ("TimeLimit", "OrderEnforcing", "PassiveEnvChecker")
    ],
    "gymnasium.vector.sync_vector_env": [("SyncVectorEnv", "step")],
    "gymnasium.vector.async_vector_env": [("AsyncVectorEnv", "step_wait")],
    "gym.wrappers.time_limit": [("TimeLimit", "step")],
    "gym.wrappers.order_enforcing": [("OrderEnforcing", "step")],
    "transformers.generation.utils": [("GenerationMixin", "generate")],
    "vllm.entrypoints.llm": [("LLM", "generate")],
    "sglang.srt.entrypoints.engine": [("Engine", "generate")],
}
"""Classes and methods that roll out; `gym.make` puts the wrappers around every environment."""

_COLLECTS = {
    "stable_baselines3.common.on_policy_algorithm": ("OnPolicyAlgorithm", "collect_rollouts"),
    "stable_baselines3.common.off_policy_algorithm": ("OffPolicyAlgorithm", "collect_rollouts"),
    "tianshou.data.collector": ("BaseCollector", "collect"),
    "torchrl.collectors._base": ("BaseCollector", "__iter__"),
    "ray.rllib.execution.rollout_ops": ("", "synchronous_parallel_sample"),
}
"""Methods and functions that roll out for a whole step, also in other processes."""

MODULES = ("torch", "torch.utils.data.dataloader", *_ROLLS, *_COLLECTS)
"""Modules that are prepared once they are imported."""


def _cover(module: Any, name: str, method: str, make: Callable[[Any], Any]) -> None:
    owner = getattr(module, name, None) if name else module
    function = None if owner is None else vars(owner).get(method)
    if function is not None:  # Other versions may lack the method.
        setattr(owner, method, make(function))


def _listen(torch: Any) -> None:
    """Hear of backward passes, and of outermost calls of modules.

    What torch.compile knows as `Module.__call__` is what it finds when it is imported, which is
    later: it compiles `forward` past it.
    """
    call: Any = torch.nn.Module.__call__
    backward = torch.autograd.backward

    @wraps(call)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiled_code.is_compiling() or not LOOP.makes_call():
            return call(self, *args, **kwargs)
        LOOP.inside = True
        try:
            LOOP.tell(_Loop.forward)
            return call(self, *args, **kwargs)
        finally:
            LOOP.inside = False

    @wraps(backward)
    def begun(*args: Any, **kwargs: Any) -> Any:
        if LOOP.makes_call():
            LOOP.tell(_Loop.backward)
        return backward(*args, **kwargs)

    # A forked process of an environment is not a part of this loop.
    os.register_at_fork(after_in_child=LOOP.__init__)  # type: ignore[misc]
    torch.nn.Module.__call__ = called
    _cover(torch.optim, "Optimizer", "__init__", _optimizing)
    when_imported("torch._dynamo", lambda module: module.decorators.skip(begun))
    torch.autograd.backward = begun


def _optimizing(function: Any) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        LOOP.has_optimizer = True
        function(*args, **kwargs)

    return call


def _stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not compiled_code.is_compiling() and LOOP.makes_call():
        LOOP.tell(_Loop.update, optimizer)


def _rolling(function: Any) -> Any:
    """Let a call be a part of the rollout, with all that it calls."""
    counts = function.__name__ != "generate"

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not LOOP.makes_call():
            return function(*args, **kwargs)
        LOOP.inside = True
        try:
            LOOP.tell(_Loop.rollout)
            session = LOOP.session
            start = session.clock() if session is not None else 0
            found = function(*args, **kwargs)
            if counts and start:
                LOOP.tell(_Loop.environment, start)
            return found
        finally:
            LOOP.inside = False

    return call


def _collecting(function: Any) -> Any:
    """Let a call be a rollout from its begin to its end; of a generator, each turn of it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not LOOP.makes_call():
            return function(*args, **kwargs)
        LOOP.tell(_Loop.rollout)
        found = function(*args, **kwargs)
        LOOP.tell(_Loop.collected)
        return found

    @wraps(function)
    def turns(*args: Any, **kwargs: Any) -> Iterator[Any]:
        items = function(*args, **kwargs)
        following = _collecting(next)
        while (item := following(items, items)) is not items:
            yield item

    return turns if isgeneratorfunction(function) else call


def _fetching(function: Any) -> Any:
    """Record how long a loader took for a batch."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        session = LOOP.session
        if session is None or LOOP.fetching or not LOOP.makes_call():
            return function(*args, **kwargs)
        start, rollouts = session.clock(), LOOP.rollouts
        LOOP.fetching = True
        try:
            found = function(*args, **kwargs)
            LOOP.tell(_Loop.fetched, start, rollouts)
            return found
        finally:
            LOOP.fetching = False

    return call
