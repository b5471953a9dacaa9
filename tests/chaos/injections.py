"""An exception in any function of rlprof that a training calls, one at a time.

The training is one of Lightning's, or a loop of its own.
"""

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.profiler import record_function

import lightning_rlprof
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.integrations.loop import start_session, step
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import count, stage
from lightning_rlprof.recording.session import current
from lightning_rlprof.testing import FakeRecorder
from tests.builders.models import Tiny, loader, make_trainer
from tests.chaos.outcomes import Outcome

_PACKAGE = str(Path(lightning_rlprof.__file__).parent)
_BATCHES, _FROM_BATCH = 4, 1
# Also what only stages and actions that take long do.
_WHATEVER_IT_TAKES = {
    "recording.annotations._MIN_LONG_NS": -1,
    "recording.session._UNWRITTEN_NS": -1,
    "recording.span_buffer._WRITE_NS": 0,
    "integrations.lightning.trainer_hooks._SLOW_NS": -1,
}

Place = tuple[str, str]
"""A module and the name of a function in it."""

SHELLS = {
    # what keeps failures from the training
    "_finish",
    "_end_fit",
    "_follow_starts.<locals>.start",
    "_tell",
    "_guarded.<locals>.guard.<locals>.call",
    "_safely",
    # markers, which only read and write attributes and lists, at the price of nanoseconds
    *("__init__", "_end_around", "counters_of", "innermost", "_function.<locals>.call"),
    *("has_thread", "is_here"),
    *(f"_recording.<locals>.{name}" for name in ("enter", "leave")),
    *(f"_mirrored.<locals>.{name}" for name in ("enter", "leave")),
    # parts of a name, once for each
    "_learn",
}
"""Functions that nothing is around; by the last part of their names."""


class InjectedError(Exception):
    """Raised where rlprof cannot expect it."""


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(_PACKAGE)


@contextmanager
def _traced(called: Callable[[FrameType], object]) -> Iterator[None]:
    """Call a function whenever one of rlprof's calls another on this thread.

    What the training calls itself is left out: it is what keeps a failure from it.
    """

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and _is_ours(frame) and _is_ours(frame.f_back):
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
    with ExitStack() as stack:
        for name, value in _WHATEVER_IT_TAKES.items():
            stack.enter_context(patch(f"lightning_rlprof.{name}", value))
        stack.enter_context(_traced(lambda frame: called(frame) if armed else None))
        trainer.fit(module, loader(_BATCHES))
    return module.losses


def _loop(folder: Path, called: Callable[[FrameType], object]) -> list[float]:
    """Train the same batches in a loop, with a capture; tell what is called from its start on."""
    module, losses = Tiny(), []
    optimizer = module.configure_optimizers()
    with ExitStack() as stack:
        for name, value in _WHATEVER_IT_TAKES.items():
            stack.enter_context(patch(f"lightning_rlprof.{name}", value))
        stack.enter_context(_traced(called))
        session = start_session(
            profile_save_path=str(folder), steps=[2, 3], recorders=[FakeRecorder()], summary=False
        )
        for number, batch in enumerate(loader(_BATCHES)):
            if number % 2:
                with step():
                    losses.append(_update(module, optimizer, batch))
            else:
                session.begin_step(session.next_step)
                losses.append(_update(module, optimizer, batch))
                session.end_step()
        session.metrics()
        session.close()
    return losses


def _update(module: Tiny, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    with stage("actor_update"):
        loss = module.layer(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count(tokens=8)
    return loss.item()


@contextmanager
def _restored() -> Iterator[None]:
    """Put back what a function that failed at its removal has left in this process."""
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    before = [each.copy() for each in hooks]
    kind, backward, excepthook = record_function, torch.autograd.backward, sys.excepthook
    enter, leave = kind.__enter__, kind.__exit__
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave  # type: ignore[method-assign]
        torch.autograd.backward, sys.excepthook = backward, excepthook
        for each, kept in zip(hooks, before, strict=True):
            each.clear()
            each.update(kept)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


PROGRAMS = {"fit": _fit, "loop": _loop}
"""Programs by name: train into a folder, tell of calls, return the losses."""


def _place(frame: FrameType) -> Place:
    file = frame.f_code.co_filename.removeprefix(_PACKAGE)
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.10 has no long one
    return file.strip("/").removesuffix(".py"), name


def places(program: str) -> list[Place]:
    """Return every function of rlprof that a training calls once it has begun."""
    found: dict[Place, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        PROGRAMS[program](Path(folder), lambda frame: found.setdefault(_place(frame)))
    return [place for place in found if not _is_shell(place)]


def _is_shell(place: Place) -> bool:
    name = place[1]
    return any(name == shell or name.endswith(f".{shell}") for shell in SHELLS)


def losses_of(program: str) -> list[float]:
    """Return the losses of a training to which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        return PROGRAMS[program](Path(folder), bool)


def injected(program: str, place: Place, losses: list[float]) -> Outcome:
    """Raise in one function when it is first called; the training must not notice.

    It ended no step if the function was not called this time.
    """
    raised: list[Place] = []

    def fail(frame: FrameType) -> None:
        if not raised and _place(frame) == place:
            raised.append(place)
            raise InjectedError(f"in {place}")

    with tempfile.TemporaryDirectory() as name, _restored():
        try:
            found = PROGRAMS[program](Path(name), fail)
        except BaseException as error:
            if session := current():
                session.discard()
            return Outcome(f"the training ended: {error!r}")
        if session := current():
            session.discard()
            return Outcome("the session goes on after the training")
        if found != losses:
            return Outcome("the training has other losses")
        runs = [path for path in Path(name).iterdir() if path.name[0] != "."]
        spans = load(runs[0]) if runs else None
        steps = 0 if spans is None else len(spans.rows(kind="step"))
        return Outcome("", _BATCHES if raised else 0, _BATCHES - steps)
