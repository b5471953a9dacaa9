"""Door to PyTorch itself: loops of no framework that rlprof knows.

A step is a rollout and the updates that follow it; where nothing rolls out before the first update,
it is a step of the optimizer. A rollout begins with a step of an environment, a call that generates
or a mark of one. It ends at the first call with gradients after which an update follows. What lies
between calls belongs to the rollout or the update around it. Marks of the program begin a session,
too, and are its stages.

The session of another door, or of the program, takes the place of this one's. What runs inside of
its stages then says what they are: a rollout in a loader, a reference in an update.

The side that records is imported with the first step of a loop: a program that imports torch and
trains nothing, such as a worker, does not pay for it.
"""

import atexit
import logging
import multiprocessing
import os
import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Iterator
from functools import partial, wraps
from inspect import isgeneratorfunction
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

from lightning_rlprof.integrations.doors.unrecorded import Unrecorded
from lightning_rlprof.recording import compiled_code
from lightning_rlprof.records.records import OPTIMIZER_STEP, ROLLOUT_AND_UPDATES
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.system.post_import import when_imported

if TYPE_CHECKING:
    from lightning_rlprof.recording.annotations import Marker
    from lightning_rlprof.recording.open_spans import Span
    from lightning_rlprof.recording.session import Session

log = logging.getLogger(__name__)

_MIN_TURNS = 5  # A mean of fewer turns that end with a module is not taken, if there are others.
_SESSIONS = "lightning_rlprof.recording.session"
_PACKAGES = (
    *("gymnasium", "stable-baselines3", "torchrl", "tianshou"),
    *("lightning", "accelerate", "transformers", "vllm", "sglang"),
)
_PID = os.getpid()  # A forked process has another one.
_ROLLOUT, _UPDATE = "actor_generate", "actor_update"
_TRAINING_STEP = "training_step"  # Lightning's, where no stage is marked.
_UNITS = {_ROLLOUT: ROLLOUT_AND_UPDATES, _UPDATE: OPTIMIZER_STEP}
_REFERENCE = "reference_compute_log_prob"
_DIMENSIONS = 3  # Of logits: sequences, tokens, and the words of a vocabulary.
_AROUND = {
    *("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "LightningModule")
}
"""Classes of modules that call others, which do the work, such as a whole ``training_step``."""


class _Loop:
    """What a loop does, as far as calls show it: of the main thread, or of the one that updates.

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
        self._marks: Any = None  # The side that records, once there is a session.
        self._place: tuple[int, int] | None = None
        self._device: str | None = None
        self.rollouts = 0
        self.thread = threading.main_thread().ident
        self._begins = threading.RLock()
        self.has_optimizer = self._has_updated = False
        self._hook: Any = None
        # Modules that were called with gradients, by id: those of a program may have no hash.
        self._trained: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._trained_last: Callable[[], Any] = lambda: None
        self._leader: Callable[[], Any] = lambda: None  # The optimizer whose steps end a step.
        self._others: set[int] = set()  # Ids of the optimizers that stepped since the leader did.
        self._is_marked = self._is_closed = False  # A step is marked if the program has stages.
        self._by_rollout = False
        # How long the loop takes from a step of an environment to its next call, and how often: if
        # that is a module, and if it is another step.
        self._turns = {True: [0, 0], False: [0, 0]}
        self._number = 0
        self._unrecorded = Unrecorded(self._is_free)
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
        return not self.inside and get_ident() == self.thread

    def _is_free(self) -> bool:
        with self._begins:  # A session may begin just now.
            return self.session is None

    def watch(self) -> None:
        """Know what the program does until a step is found."""
        self._unrecorded.begin()

    def stand(self, rank: int, world_size: int, device: str) -> None:
        """Know rank and world size, as an object of a framework has them; the largest world wins.

        Args:
            rank: Global rank.
            world_size: Number of ranks.
            device: Its kind.
        """
        if self._place is None or world_size > self._place[1]:
            self._place = rank, world_size
        self._device = device

    def leave(self) -> None:
        """End the run: another training begins, or another session."""
        self.tell(_Loop.leave_untrained)
        session, self.session = self.session, None
        self._place = self._device = None
        if session is not None and not session.status:
            session.close(session.standing)

    # ---- what is called

    def forward(self, module: Any) -> None:
        """A module is about to be called by the loop itself."""
        if self._environment_end and self._left is None and self.session is not None:
            self._left = self.session.clock()
        if _has_gradients():
            if self._trained_last() is not module:
                self._trained[id(module)], self._trained_last = module, ref(module)
            self._with_gradients()
        elif self.fetching:
            self.rollout()
        elif self.session is not None and self._asked is None and not self._is_updating:
            self._asked = self.session.clock()

    @property
    def _is_updating(self) -> bool:
        """Whether gradients are computed, and no optimizer has stepped after them."""
        return self._gradients is not None and self._updated is None

    def forwarded(self, module: Any, start: int, found: Any) -> None:
        """A language model has been called: in the update, without gradients, it scores."""
        logits = getattr(found, "logits", found)
        if not _has_gradients() and getattr(logits, "ndim", 0) == _DIMENSIONS:
            own = id(module) in self._trained
            self._inside_update("actor_compute_log_prob" if own else _REFERENCE, start)

    def generated(self, start: int) -> None:
        """A call that generates has ended."""
        self._inside_update(_ROLLOUT, start)

    def other(self) -> "Session | None":
        """Return the session of another door, or of the program, for what runs inside of it."""
        module = sys.modules.get(_SESSIONS)
        return None if self.session is not None or module is None else module.current()

    def _inside_update(self, name: str, start: int) -> None:
        """Record a stage of another session's update, unless a stage in it says what this is."""
        from lightning_rlprof.recording.annotations import Marker
        from lightning_rlprof.recording.open_spans import innermost

        around, session = innermost(), self.other()
        while around is not None and (around.end_ns is not None or _is_inner_region(around)):
            around = around.around
        if session is None or around is None:
            return
        if around.name == _TRAINING_STEP or standard_stage(around.name) == _UPDATE:
            session.record(Marker(name, "stage"), start, session.clock())

    def marked(self, session: "Session") -> None:
        """A stage has begun or ended in this door's session: one of a rollout is a rollout."""
        span, step = self._marks.innermost(), session.step
        self._is_marked = self._is_marked or (get_ident() == self.thread and self._marks.in_stage())
        if span is None or standard_stage(span.name) != _ROLLOUT or not self.makes_call():
            return
        self.rollout()
        if session.step != step and session.step_start_ns is not None:
            span.step, span.start_ns = session.step, session.step_start_ns

    def begun(self, marker: "Marker") -> None:
        """A stage or a step of the program begins, and no session records."""
        is_child = os.getpid() != _PID or multiprocessing.parent_process() is not None
        if marker.kind in ("stage", "step") and not is_child:
            with self._begins:
                if self.session is None and not _records_here():
                    self._start(_UNITS.get(standard_stage(marker.name), ""))

    def rollout(self) -> None:
        """A step of an environment, or a call that generates, is about to begin."""
        self.rollouts += 1
        session = self._own(ROLLOUT_AND_UPDATES if self.has_optimizer else None)
        if session is None:
            return
        now, asked = session.clock(), self._asked
        if not session.has_steps and session.header.step_unit != OPTIMIZER_STEP:
            self._by_rollout = True
        if self._updated is not None:
            self._end_step(session)
            if asked is not None:
                self._record(_ROLLOUT, asked, now)
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
        self._unrecorded.saw("backward passes")
        # Mostly a module was called with gradients in this step, which says the same.
        is_known = self.session is not None and self._gradients is not None and self._asked is None
        if not is_known and self._own(OPTIMIZER_STEP) is not None:
            self._with_gradients()

    def update(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        self._has_updated = True
        self._unrecorded.saw("optimizer steps")
        session = self.session
        if session is None or session.status or self._gradients is None:
            return
        self._updated, self._asked = session.clock(), None
        is_last = self._leader() is optimizer and not self._others
        if not self._by_rollout and (is_last or self._leads(optimizer)):
            self._end_step(session)

    def saw(self, error: BaseException) -> None:
        """An exception has left a call: if no step follows, it is how the run ended."""
        if self.session is not None:
            self.session.saw(error)

    def elsewhere(self) -> None:
        """An optimizer has stepped in another thread: if none did in this loop's, that has it."""
        self._unrecorded.saw("optimizer steps")
        if get_ident() != self.thread and not self._has_updated:
            with self._begins:  # The other thread may begin a session just now.
                self.leave_untrained()
                self.thread, self._has_updated, self.inside = get_ident(), True, False
                self._forget_step()

    def fetched(self, start: int, rollouts: int) -> None:
        """A batch was loaded; what a loader rolls out is a part of the rollout."""
        from lightning_rlprof.recording.annotations import Marker

        if self.session is None and (other := self.other()) is not None:
            if rollouts != self.rollouts:
                other.record(Marker(_ROLLOUT, "stage"), start, other.clock())
        elif self.session is not None and rollouts == self.rollouts:
            self._record("data_fetch", start, self.session.clock())

    def communicated(self, name: str, start: int) -> None:
        """A collective has ended: ranks waited in it for the last one."""
        from lightning_rlprof.recording.annotations import Marker

        if self.session is not None:
            self.session.record(Marker(name, "region"), start, self.session.clock())

    def _with_gradients(self) -> None:
        if self._gradients is None and self.session is not None:
            self._gradients = self.session.clock()
            if self._asked is not None and not self._by_rollout:
                self._record("forward_no_grad", self._asked, self._gradients)
        self._asked = None

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

    def _own(self, unit: str | None = None) -> "Session | None":
        """Return this door's session, started now if the process has none and a unit is given."""
        if self.session is None and unit is not None:
            with self._begins:
                if get_ident() == self.thread and not _records_here():
                    self._start(unit)
        if self.session is None or self.session.status:
            return None
        return self.session

    def _start(self, unit: str) -> None:
        from lightning_rlprof.integrations.doors.kit import Kit
        from lightning_rlprof.recording import annotations
        from lightning_rlprof.recording.job import find_place
        from lightning_rlprof.recording.open_spans import Owner

        # What a worker of Ray trains is a part of its driver's step.
        if Kit.has_failed or find_place().is_actor:
            self._is_closed = True
            return
        used = [each for each in _PACKAGES if each.replace("-", "_") in sys.modules]
        session = Kit("PyTorch", *used).new_session(
            # A server marks in the threads of its requests.
            Owner(is_training=False, has_process=get_ident() != self.thread),
            self._place,
            self._device,
            unit,
            end_if_left=self.leave,
            yields=True,
        )
        if not session.loop.yields:  # Another thread's session came first.
            self._is_closed = True
            return
        self._forget_step()
        self.session, self._number, self._marks = session, 1, annotations
        self._by_rollout = unit == ROLLOUT_AND_UPDATES
        self.listen_to_optimizers()
        session.watch_stages(partial(self.tell, _Loop.marked, session))
        session.at_close(lambda: self.tell(_Loop.flush))
        atexit.register(self.tell, _Loop.leave_untrained)  # It runs before the session's.
        session.expect_step(1)

    def listen_to_optimizers(self) -> None:
        """Hear of the steps of all optimizers, after the session does."""
        if "torch" not in sys.modules:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if self._hook is not None:
            self._hook.remove()
        self._hook = register_optimizer_step_post_hook(_stepped)

    def _end_step(self, session: "Session", end: int | None = None) -> None:
        """Record the step that was seen, and end it, unless the program has steps itself.

        Args:
            session: Of the step.
            end: When it ended; unset, now.
        """
        start, gradients, updated = self._rollout, self._gradients, self._updated
        if start is not None and gradients is not None:
            gradients = self._rollout_end(gradients)
            self._record(_ROLLOUT, start, gradients)
            if self._calls:
                marker, total = self._marks.Marker("env_step", "region"), {"calls": self._calls}
                sum_end = min(start + self._in_environment, gradients)
                session.append(self._marks.new_span(marker, session.step, start, sum_end, total))
        if gradients is not None and updated is not None:
            self._record(_UPDATE, gradients, updated)
        self._forget_step()
        self._unrecorded.end()
        if session.step == self._number and session.waiting:
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
        session = self.session
        if session is not None and not (self._is_marked and self._has_marks(start, end)):
            step = session.step_at(start)
            if step != session.step or not session.silent_thread:  # `record` costs five frames.
                span = self._marks.new_span(self._marks.stage(name), step, start, end, None)
                span.parent = None
                session.append(span)

    def _has_marks(self, start: int, end: int) -> bool:
        """Return whether the program itself marks a stage between two times."""
        spans = [] if self.session is None else self.session.buffer.recent()
        around = self._marks.innermost()
        while around is not None:
            spans.append(around)
            around = around.around
        return any(
            each.kind == "stage" and each.start_ns < end and (each.end_ns or end) > start
            for each in spans
        )

    def flush(self) -> None:
        """Record the last step, which no other rollout ends: its last update does."""
        if self.session is not None and self._rollout is not None and self._updated is not None:
            self._end_step(self.session, self._updated)

    def leave_untrained(self) -> None:
        """Leave no run of a program that has not trained."""
        self.flush()
        session = self.session
        if session is None or session.status or session.has_steps:
            return
        if not session.buffer.has_stages():
            from lightning_rlprof.recording.job import forget

            session.discard()
            forget(session.run)
            self.session = None


def _records_here() -> bool:
    """Return whether a session records this thread."""
    module = sys.modules.get(_SESSIONS)
    return module is not None and module.current() is not None


LOOP = _Loop()
_has_gradients: Callable[[], bool] = bool  # torch's own, once that is imported.
_name_of = attrgetter("__name__")


def install(module: Any) -> None:
    """Listen to torch, to an environment's wrappers, or to what generates."""
    name = module.__name__
    if name == "torch":
        _listen(module)
    elif name == "lightning_rlprof.recording.annotations":
        if not module.IS_CHILD:  # The parent says what its children mark.
            module.when_begun(partial(LOOP.tell, _Loop.begun))
    elif name == "torch.distributed":
        for each in _COLLECTIVES:
            _cover(module, "", each, _communicating)
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

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all"),
    *("barrier", "broadcast", "broadcast_object_list", "reduce_scatter", "reduce_scatter_tensor"),
)

MODULES = (
    *("torch", "torch.distributed", "torch.utils.data.dataloader"),
    *("lightning_rlprof.recording.annotations", *_ROLLS, *_COLLECTS),
)
"""Modules that are prepared once they are imported."""


def _is_inner_region(span: "Span") -> bool:
    return span.kind == "region" and span.name != _TRAINING_STEP


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
    # A module within another is called as torch's own function does it, without its frame.
    is_own = call is vars(torch.nn.Module).get("_wrapped_call_impl")
    backward = torch.autograd.backward

    @wraps(call)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        # These are the words of `makes_call`: a call of it costs each module of a model a frame.
        if LOOP.inside or get_ident() != LOOP.thread or compiled_code.is_compiling():
            if is_own and self._compiled_call_impl is None:
                return self._call_impl(*args, **kwargs)
            return call(self, *args, **kwargs)
        if not _AROUND.isdisjoint(map(_name_of, type(self).__mro__)):
            return call(self, *args, **kwargs)
        LOOP.inside = True
        try:
            LOOP.tell(_Loop.forward, self)
            if LOOP.session is not None or (other := LOOP.other()) is None:
                return call(self, *args, **kwargs)
            start = other.clock()
            found = call(self, *args, **kwargs)
            LOOP.tell(_Loop.forwarded, self, start, found)
            return found
        except BaseException as error:
            LOOP.tell(_Loop.saw, error)
            raise
        finally:
            LOOP.inside = False

    @wraps(backward)
    def begun(*args: Any, **kwargs: Any) -> Any:
        if not LOOP.inside and get_ident() == LOOP.thread:
            LOOP.tell(_Loop.backward)
        return backward(*args, **kwargs)

    LOOP.tell(_Loop.watch)
    # A forked process of an environment is not a part of this loop.
    os.register_at_fork(after_in_child=LOOP.__init__)  # type: ignore[misc]
    global _has_gradients
    torch.nn.Module.__call__, _has_gradients = called, torch.is_grad_enabled
    _cover(torch.optim, "Optimizer", "__init__", _optimizing)
    when_imported("torch._dynamo", lambda module: module.decorators.skip(begun))
    torch.autograd.backward = begun
    _cover(torch.autograd, "", "grad", _differentiating)


def _optimizing(function: Any) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        if not LOOP.has_optimizer:
            LOOP.has_optimizer = True
            LOOP.tell(_Loop.listen_to_optimizers)
        function(*args, **kwargs)

    return call


def _stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    if compiled_code.is_compiling():
        return
    if not LOOP.inside and get_ident() == LOOP.thread:
        LOOP.tell(_Loop.update, optimizer)
    else:
        LOOP.tell(_Loop.elsewhere)


def _differentiating(function: Any) -> Any:
    """Let `torch.autograd.grad` be a backward pass of a program that has an optimizer."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiled_code.is_compiling() and LOOP.has_optimizer and LOOP.makes_call():
            LOOP.tell(_Loop.backward)
        return function(*args, **kwargs)

    return call


def _communicating(function: Any) -> Any:
    """Record a collective that the loop itself calls."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        session = LOOP.session
        if compiled_code.is_compiling() or session is None or not LOOP.makes_call():
            return function(*args, **kwargs)
        start = session.clock()
        found = function(*args, **kwargs)
        LOOP.tell(_Loop.communicated, function.__name__, start)
        return found

    return call


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
            session = LOOP.session if counts else LOOP.other()
            start = session.clock() if session is not None else 0
            found = function(*args, **kwargs)
            if start:
                LOOP.tell(_Loop.environment if counts else _Loop.generated, start)
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
        session = LOOP.other() if LOOP.session is None else LOOP.session
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
