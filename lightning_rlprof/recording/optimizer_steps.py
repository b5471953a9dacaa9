"""Regions of backward passes and optimizer steps, through torch's own hooks."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_rlprof.recording.annotations import Marker
from lightning_rlprof.recording.open_spans import made
from lightning_rlprof.recording.session import Session

_UPDATE = Marker("optimizer_step", "region")
_MOST = 64  # optimizers that step one another


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
        if steps and self._session.mirrors:  # which torch's own row began before
            whose, _, token = steps[-1]
            steps[-1] = whose, now, token or self._session.enter(_UPDATE.name, _UPDATE.kind)

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        steps = self._running.steps
        steps.append((id(optimizer), self._session.clock(), None))
        if len(steps) > _MOST:
            del steps[0]

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        session, steps = self._session, self._running.steps
        while steps:
            whose, start, token = steps.pop()
            if whose == id(optimizer):  # not its `record`: a frame less
                line = made(_UPDATE, session.step, start, session.clock(), None)
                if token is not None:
                    session.exit((line, None, _UPDATE, token))
                session.append(line)
                return


_BACKWARD = Marker("backward", "region")


class BackwardPasses:
    """Record ``backward`` regions until `remove`: of ``loss.backward()``, too, which calls it."""

    def __init__(self) -> None:
        self._torchs: Callable[..., Any] = torch.autograd.backward
        self._mine = _BACKWARD(self._torchs)
        torch.autograd.backward = self._mine

    def remove(self) -> None:
        """Restore torch's function, unless other code replaced it since."""
        if torch.autograd.backward is self._mine:
            torch.autograd.backward = self._torchs
