"""What torch's own hooks tell: optimizer steps, backward passes, and ``record_function`` stages."""

import threading
from _thread import get_ident
from contextlib import suppress
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_rlprof.recording import compiled_code
from lightning_rlprof.recording.annotations import Marker, stage
from lightning_rlprof.recording.method_wrapping import Replaced
from lightning_rlprof.recording.open_spans import OwnName, innermost, new_span
from lightning_rlprof.recording.session import Session
from lightning_rlprof.records.records import STAGES
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.system.post_import import when_imported

_UPDATE = Marker("optimizer_step", "region")
_MAX_NESTED_OPTIMIZERS = 64
_BACKWARD = Marker("backward", "region")

_MAX_NAMES = 1_000  # Some programs put a number into each name.


class _Running(threading.local):
    """Steps that have begun in this thread, outermost first: whose each is, and since when.

    The third item is what a capture knows each by, or None.

    One that raises is never heard of again: it stays until one below it ends, or too many came.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, object]] = []


class OptimizerSteps:
    """Record ``optimizer_step`` regions until `remove`, also of optimizers unknown to Lightning.

    Under automatic optimisation Lightning runs the training step and the backward pass inside
    ``optimizer.step``; `closure_done`, called just before the update, cuts them off. An optimizer
    that steps another one has a region around that one's.

    Args:
        session: Where spans go.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._running = _Running()
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def closure_done(self) -> None:
        """Restart regions: what ran since the optimizer was called was not an update."""
        now, steps = self._session.clock(), self._running.steps
        steps[:] = [(whose, now, token) for whose, _, token in steps]
        # The row of torch.profiler began before the closure, so recorders get one that begins now.
        if steps and self._session.mirrors:
            whose, _, token = steps[-1]
            steps[-1] = whose, now, token or self._session.enter(_UPDATE.name, _UPDATE.kind)

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        session = self._session
        if compiled_code.is_compiling() or session.silent_thread:
            return
        if get_ident() != session.owner.ident and not session.owner.has_thread():
            return
        steps = self._running.steps
        steps.append((id(optimizer), session.clock(), None))
        if len(steps) > _MAX_NESTED_OPTIMIZERS:
            del steps[0]

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if compiled_code.is_compiling():
            return
        session, steps = self._session, self._running.steps
        while steps and not session.silent_thread:
            whose, start, token = steps.pop()
            if whose != id(optimizer):
                continue
            try:  # A call of `session.record` would cost one more Python frame.
                span = new_span(_UPDATE, session.step, start, session.clock(), None)
                if token is not None:
                    span.token = token
                    session.exit(span)
                session.append(span)
            except Exception as error:
                session.failed(error)
            return


class BackwardPasses(Replaced):
    """Record ``backward`` regions until `remove`: of ``loss.backward()``, too, which calls it."""

    def __init__(self) -> None:
        super().__init__()
        mine = _BACKWARD(torch.autograd.backward)
        # Like torch's own, it breaks a graph. If it were compiled itself, it would break another.
        when_imported("torch._dynamo", lambda module: module.decorators.skip(mine))
        self.put(torch.autograd, "backward", mine)


class RecordFunctions(Replaced):
    """Record those whose names mean a known stage, until `remove`; others are left alone.

    One inside a span of the same name is not another stage.
    """

    def __init__(self) -> None:
        super().__init__()
        enter, leave = vars(record_function)["__enter__"], vars(record_function)["__exit__"]
        known: dict[str, Marker | None] = {}

        def begin(self: Any) -> Any:
            name = self.name
            if isinstance(name, OwnName):
                return enter(self)
            marker = known.get(name)
            if marker is None and name not in known and len(known) < _MAX_NAMES:
                marker = known[name] = None
                with suppress(Exception):  # The training continues after any error.
                    found = standard_stage(name)
                    marker = known[name] = stage(found) if found in STAGES else None
            around = innermost() if marker is not None else None
            if marker is None or (around is not None and around.marker.name in (name, marker.name)):
                return enter(self)
            self.rlprof_marker = marker
            marker.__enter__()
            return enter(self)

        def end(self: Any, *error: Any) -> Any:
            found = leave(self, *error)
            if (marker := vars(self).pop("rlprof_marker", None)) is not None:
                marker.__exit__(None, None, None)
            return found

        self.put(record_function, "__enter__", begin)
        self.put(record_function, "__exit__", end)
