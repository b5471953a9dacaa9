"""An exception in any function of rlprof that a Lightning training calls, one at a time."""

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning_rlprof
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.session import current
from lightning_rlprof.testing import FakeRecorder
from tests.builders.models import Tiny, loader, make_trainer
from tests.chaos.outcomes import Outcome

_PACKAGE = str(Path(lightning_rlprof.__file__).parent)
_BATCHES, _FROM_BATCH = 4, 1

Place = tuple[str, str]
"""A module and the name of a function in it."""


class InjectedError(Exception):
    """Raised where rlprof cannot expect it."""


@contextmanager
def _traced(called: Callable[[FrameType], object]) -> Iterator[None]:
    """Call a function whenever this thread enters one of rlprof's."""

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            called(frame)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _fit(folder: Path, called: Callable[[FrameType], object]) -> list[float]:
    """Train four batches with a capture; tell what is called from the second one on."""
    module = Tiny()
    armed: list[int] = []
    module.on_batch = lambda batch: armed.append(batch) if batch >= _FROM_BATCH else None
    callback = ProfilerCallback(
        profile_save_path=str(folder), steps=[2, 3], recorders=[FakeRecorder()], summary=False
    )
    trainer = make_trainer(callback)
    with _traced(lambda frame: called(frame) if armed else None):
        trainer.fit(module, loader(_BATCHES))
    return module.losses


def _place(frame: FrameType) -> Place:
    file = frame.f_code.co_filename.removeprefix(_PACKAGE)
    return file.strip("/").removesuffix(".py"), frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name


def places() -> list[Place]:
    """Return every function of rlprof that a training calls once it has begun."""
    found: dict[Place, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        _fit(Path(folder), lambda frame: found.setdefault(_place(frame)))
    return [*found]


def injected(place: Place, losses: list[float]) -> Outcome:
    """Raise in one function when it is first called; the training must not notice."""
    raised: list[Place] = []

    def fail(frame: FrameType) -> None:
        if not raised and _place(frame) == place:
            raised.append(place)
            raise InjectedError(f"in {place}")

    with tempfile.TemporaryDirectory() as name:
        try:
            found = _fit(Path(name), fail)
        except BaseException as error:
            if session := current():
                session.discard()
            return Outcome(f"the training ended: {error!r}")
        if session := current():
            session.discard()
            return Outcome("the session goes on after the training")
        if found != losses:
            return Outcome("the training has other losses")
        runs = [*Path(name).iterdir()]
        spans = load(runs[0]) if runs else None
        steps = 0 if spans is None else len(spans.rows(kind="step"))
        return Outcome("" if raised else "was never called", _BATCHES, _BATCHES - steps)
