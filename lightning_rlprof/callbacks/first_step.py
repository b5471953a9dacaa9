"""Know when the Trainer starts its loop, which Lightning tells no callback."""

from collections.abc import Callable
from typing import Any

__all__ = ["FirstStep"]


class FirstStep:
    """Call ``begin`` whenever the fit loop starts to run, until `remove`.

    A data loader of unknown length makes its first batch, often the first rollout, before
    ``on_train_start``: a first step that begins there would miss it.

    Args:
        fit_loop: ``trainer.fit_loop``; its ``run`` is covered on the instance.
        begin: What to call.
    """

    def __init__(self, fit_loop: Any, begin: Callable[[], None]) -> None:
        self._own, self._run, self._begin = vars(fit_loop), fit_loop.run, begin
        self._own["run"] = self._covered

    def remove(self) -> None:
        """Uncover the loop, unless somebody has covered it since."""
        if self._own.get("run") == self._covered:
            del self._own["run"]

    def _covered(self) -> Any:
        self._begin()
        return self._run()
