"""The contract of a recorder, which is also the recorder that does nothing."""

from collections.abc import Mapping
from pathlib import Path

from lightning_rlprof.model import Number

__all__ = ["Recorder"]


class Recorder:
    """Mirror a session into one device tool; subclass it and override what you need.

    A session calls ``open (enter exit)* close`` once per capture, always on the thread that trains.
    Whatever raises costs this recorder its place in the run and nothing else: the session logs it,
    notes it in the run, and goes on without it.

    Example::

        >>> class Counting(Recorder):
        ...     spans = 0
        ...     def enter(self, name: str) -> object:
        ...         self.spans += 1
        ...         return self.spans
        >>> recorder = Counting()
        >>> recorder.enter("actor_update")
        1
    """

    def open(self, out: Path) -> None:
        """Start the heavy capture; ``out`` is its folder, made by whoever writes into it first."""

    def enter(self, name: str) -> object:
        """Note that a span began; what is returned comes back to `exit`."""
        return None

    def exit(self, token: object) -> Mapping[str, Number] | None:
        """Note that a span ended; return numbers to store with it, or None."""
        return None

    def close(self) -> None:
        """Stop capturing; slow work on files belongs on a thread, to be awaited in `finish`."""

    def finish(self) -> None:
        """Wait until all files are complete; called once, at the end of the run."""
