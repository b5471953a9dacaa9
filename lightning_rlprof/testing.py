"""Tools for tests of recorders and training code: a fake clock, a recorder that remembers."""

import math
from collections.abc import Mapping
from pathlib import Path

from lightning_rlprof.recording.recorders.base import Counters, Late, Recorder
from lightning_rlprof.records.records import FORMAT, Header, Kind, Number


class FakeClock:
    """Nanoseconds that pass only when told to, so that durations in tests are exact.

    Example::

        >>> clock = FakeClock()
        >>> clock.advance(7)
        >>> clock()
        7
    """

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        """Return the time in nanoseconds."""
        return self.now

    def advance(self, nanoseconds: int) -> None:
        """Let time pass."""
        self.now += nanoseconds


class FakeRecorder(Recorder):
    """Remember every call as a word, and fail where it is told to.

    Args:
        fail_at: Name of the method that shall raise, or None.

    Example::

        >>> recorder = FakeRecorder()
        >>> recorder.open(Path("step-000001"))
        >>> recorder.calls
        ['open step-000001']
    """

    def __init__(self, fail_at: str | None = None) -> None:
        self.fail_at = fail_at
        self.calls: list[str] = []

    def open(self, out: Path) -> None:
        """Remember the window."""
        self._remember("open", out.name)

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Remember the span; its name is the token."""
        self._remember("enter", name)
        return name

    def exit(self, token: object) -> Mapping[str, Number]:
        """Remember the token and return one counter."""
        self._remember("exit", str(token))
        return {"fake": 1}

    def mark(self, name: str, step: int) -> None:
        """Remember the instant."""
        self._remember("mark", name)

    def close(self) -> None:
        """Remember the end of the window."""
        self._remember("close")

    def finish(self) -> None:
        """Remember the end of the run."""
        self._remember("finish")

    def _remember(self, *words: str) -> None:
        self.calls.append(" ".join(words))
        if words[0] == self.fail_at:
            raise RuntimeError(f"asked to fail at {words[0]}")


def check_recorder(recorder: Recorder, folder: Path) -> None:
    """Run the contract of a recorder: two windows, nested spans, an empty window, the end.

    Raises:
        AssertionError: It returned counters that are no numbers.
        Exception: Whatever it raised; a recorder must serve a correct sequence without raising.
    """
    late: list[Late | None] = []
    for number in (1, 2):
        recorder.open(folder / f"step-{number:06d}")
        step = recorder.enter("step", "step", number)
        outer = recorder.enter("actor_update", "stage", number)
        recorder.mark("weights published", number)
        inner = recorder.enter("é" * 50, "region", number)
        late += [_check(recorder.exit(token)) for token in (inner, outer, step)]
        recorder.close()
    recorder.open(folder / "step-000003")
    recorder.close()
    recorder.finish()
    for ask in filter(None, late):
        _check(ask())


def _check(found: Counters | Late | None) -> Late | None:
    if callable(found):
        return found
    bad = {key: value for key, value in (found or {}).items() if not _is_number(value)}
    if bad:
        raise AssertionError(f"counters must be finite numbers by name, got {bad}")
    return None


def make_header(rank: int = 0, world_size: int = 1, device: str = "cpu") -> Header:
    """Return a header for runs made by hand."""
    return Header(FORMAT, "test-run", rank, world_size, "actor", "host", 1, device, 0, 0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
