"""Count the decoding iterations of a generation: its capture opens at one, ends at another."""

from typing import Literal

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.nodes import innermost

__all__ = ["GENERATION", "TokenWindow"]

GENERATION = "actor_generate"
"""The stage whose tokens are counted."""


class TokenWindow:
    """Say when the capture of a generation opens and closes, where ``token_start`` or ``_end`` ask.

    An iteration is a span directly inside of the stage, such as the model's forward, marked in the
    code or by ``wrap``. Of several names the one that comes first counts. Iterations begin at 0 in
    every generation; the first is the prompt's and makes token 0.

    Args:
        config: What is wanted.
    """

    def __init__(self, config: ProfilerConfig) -> None:
        self._start, self._end = config.token_start or 0, config.token_end
        self._on = config.token_start is not None or config.token_end is not None
        self._armed = False
        self._name, self._number = "", 0

    @property
    def inside(self) -> bool:
        """Whether a generation with iterations is open around whoever asks."""
        span = innermost() if self._armed else None
        while span is not None and span[2].name != GENERATION:
            span = span[1]
        return span is not None

    def action(self, name: str, opens: bool) -> Literal["open", "close", "keep"]:
        """Return what the beginning of a span does to the capture.

        Args:
            name: Of the span.
            opens: Whether it is a stage that has its own capture.
        """
        if opens:
            self._armed = self._on and name == GENERATION
            self._name, self._number = "", 0
            return "keep" if self._armed else "open"
        above = innermost() if self._armed else None
        if above is None or above[2].name != GENERATION or name != (self._name or name):
            return "keep"
        number, self._name, self._number = self._number, name, self._number + 1
        if number == self._start:
            return "open"
        return "close" if number == self._end else "keep"
