"""Begin and end the steps of a training around each of its batches."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from lightning_rlprof.session import Session

__all__ = ["Batches"]


class Batches:
    """Tell the session that a step has a batch and when it is done, until `remove`.

    One object for all ``with`` blocks around batches. A batch that raises ends no step, and one
    that a tuner runs, without the Trainer's callbacks, is none.

    Args:
        session: Whose steps they are.
        trainer: Who runs them.
        callback: One of the Trainer's callbacks, as long as the batches are of its training.
        give_up: Told what failed here; the training never hears of it.
    """

    def __init__(
        self, session: Session, trainer: Any, callback: Any, give_up: Callable[[Exception], None]
    ) -> None:
        self._session, self._trainer, self._callback = session, trainer, callback
        self._give_up = give_up
        self._progress = trainer.fit_loop.epoch_loop.batch_progress
        self._inside = False

    def remove(self) -> None:
        """Leave the session alone from now on, also at the end of a batch that has begun."""
        self._inside = False

    def __enter__(self) -> None:
        """Know that the step has a batch; begin it if batches before it were skipped."""
        if self._callback in self._trainer.callbacks:
            self._inside = True
            try:
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
            except Exception as ours:
                self._give_up(ours)
        self._inside = False
