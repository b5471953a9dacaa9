"""Record every optimizer step of the process as a region, through torch's global hooks."""

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


class OptimizerSteps:
    """Record ``optimizer_step`` regions until `remove`, also of optimizers unknown to Lightning.

    Under automatic optimisation Lightning runs the training step and the backward pass inside
    ``optimizer.step``; `closure_done`, called just before the update, cuts them off.

    Args:
        session: Where spans go.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._start = 0
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def closure_done(self) -> None:
        """Begin the region anew: what ran since the optimizer was called was no update."""
        self._start = self._session.clock()

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._start = self._session.clock()

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        session = self._session  # not its `record`: a frame less
        session.append(made(_UPDATE, session.step, self._start, session.clock(), None))
