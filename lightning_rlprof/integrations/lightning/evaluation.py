"""Record ``Trainer.validate``, ``test`` and ``predict`` outside of any training."""

from collections.abc import Callable, Collection
from typing import Any

from lightning_rlprof.integrations.lightning.profiler_actions import Cover
from lightning_rlprof.recording.annotations import Marker
from lightning_rlprof.recording.session import Session

VERBS = {"validate": "validation", "test": "test", "predict": "predict"}
"""Verbs of the Trainer, and the name of what each of them does."""


class EvaluationBatches:
    """Make each batch a step of the run, with all of it in one row, until `remove`.

    Args:
        session: Whose steps they are.
        trainer: Who runs them.
        verb: A key of `VERBS`.
        watched: Ids of callbacks; a tuner runs batches without all of them, and those are no steps.
        begin: Called before the first batch.
        give_up: Told what failed here; the evaluation never hears of it.
    """

    def __init__(
        self,
        session: Session,
        trainer: Any,
        verb: str,
        watched: Collection[int],
        begin: Callable[[], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        name, loop = VERBS[verb], getattr(trainer, f"{verb}_loop")
        self._trainer, self._watched = trainer, watched
        self._session, self._marker = session, Marker(name, "region")
        self._begin, self._give_up = begin, give_up
        self._run, self._step = loop.run, getattr(trainer.strategy, f"{name}_step")
        self._covers = [
            Cover(loop, "run", self._run_all),
            Cover(trainer.strategy, f"{name}_step", self._run_step),
        ]

    def remove(self) -> None:
        """Restore what was covered."""
        for cover in self._covers:
            cover.remove()

    def _run_all(self) -> Any:
        if not self._is_watched():
            return self._run()
        self._begin()
        self._safely(lambda: self._session.expect_step(1))
        found = self._run()
        self._safely(lambda: self._session.abandon_step(interrupted=False))
        return found

    def _run_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_watched():
            return self._step(*args, **kwargs)
        self._safely(lambda: self._session.begin_step(self._session.step))
        found = self._step(*args, **kwargs)
        self._safely(self._end)
        return found

    def _is_watched(self) -> bool:
        return any(id(each) in self._watched for each in self._trainer.callbacks)

    def _end(self) -> None:
        session = self._session
        start = session.step_start_ns
        if start is not None:
            session.record(self._marker, start, session.clock())
        session.end_step()

    def _safely(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self._give_up(error)
