"""Record every optimizer step of the process as a region, through torch's global hooks."""

import threading
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_rlprof.marking import Marker
from lightning_rlprof.nodes import made
from lightning_rlprof.session import Session

__all__ = ["OptimizerSteps"]

_UPDATE = Marker("optimizer_step", "region")
_MOST = 64  # optimizers that step one another


class _Running(threading.local):
    """Steps that have begun in this thread, outermost first: whose each is, and since when.

    One that raises is never heard of again: it stays until one below it ends, or too many came.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []


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
        """Begin regions anew: what ran since the optimizer was called was no update."""
        now, steps = self._session.clock(), self._running.steps
        steps[:] = [(whose, now) for whose, _ in steps]

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        steps = self._running.steps
        steps.append((id(optimizer), self._session.clock()))
        if len(steps) > _MOST:
            del steps[0]

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        session, steps = self._session, self._running.steps
        while steps:
            whose, start = steps.pop()
            if whose == id(optimizer):  # not its `record`: a frame less
                session.append(made(_UPDATE, session.step, start, session.clock(), None))
                return
