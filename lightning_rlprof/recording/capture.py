"""One rank's captures: recorders opened and closed around windows, and dropped when they fail.

When a capture opens and closes follows from configuration, rank, step and stage. It covers a
window: whole steps (consecutive wanted steps may share one window) or, when stages were chosen or
``discrete`` is on, one stage of one step.

Of a generation the decoding iterations are counted: its capture opens at one, ends at another.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import described
from lightning_rlprof.recording.annotations import Marker
from lightning_rlprof.recording.open_spans import innermost
from lightning_rlprof.recording.recorders.base import (
    Counters,
    Late,
    Recorder,
    is_for_the_process,
    numbers_of,
)
from lightning_rlprof.records.notes import Code, Fact
from lightning_rlprof.records.records import Kind, Number

if TYPE_CHECKING:
    from lightning_rlprof.recording.session import Session

log = logging.getLogger(__name__)
T = TypeVar("T")

_OPEN = Marker("rlprof open capture", "region")
_CLOSE = Marker("rlprof close capture", "region")
_NO_RECORDER = (
    "no profiler is enabled: check profile_level, profile_with_cpu, profile_with_npu, tools"
)

GENERATION = "actor_generate"
"""The stage whose tokens are counted."""

Action = Literal["open", "close", "keep"]


@dataclass(eq=False)
class Ended:
    """What recorders know of a span that ended: numbers, and functions that know more later."""

    counters: dict[str, Number] = field(default_factory=dict)
    late: list[Late] = field(default_factory=list)


@dataclass(eq=False)
class _Token:
    """A mirrored span: each recorder's own token, and whether the window ends with the span."""

    closes: bool
    parts: list[tuple[Recorder, object]] = field(default_factory=list)
    ended: Ended = field(default_factory=Ended)


class Capture:
    """Drive a session's recorders.

    `is_open` tells whether a window is open; `seen` holds the stages that a window could open for.

    Args:
        run: The session.
        folder: Where the windows' folders go.
        recorders: What to drive.
    """

    def __init__(self, run: "Session", folder: Path, recorders: Sequence[Recorder]) -> None:
        self.is_open = False
        self._run, self._folder = run, folder
        self._recorders = self._all = self._own = tuple(recorders)
        self._failed: list[Recorder] = []
        self._listening = self._now_listening()
        for recorder in recorders:
            recorder.note = run.note
        self._tokens: list[_Token] = []
        self._opened: dict[tuple[int, str | None], int] = {}
        self._window = ""
        self._facts: dict[str, Fact] = {}  # Facts for the notes of the window.
        self._works = self._kept = False
        self._steps: set[int] = set()
        self._captured: set[str] = set()
        self.seen: set[str] = set()

    def use(self, recorders: Sequence[Recorder] | None) -> None:
        """Capture with other recorders than those of the configuration; None brings those back.

        Recorders that listen outside of captures, too, stay.
        """
        if recorders is None:
            self._recorders = tuple(one for one in self._own if one not in self._failed)
        else:
            for recorder in recorders:
                recorder.note = self._run.note
            self._all = (*self._all, *recorders)
            self._recorders = (*(one for one in self._recorders if one.always), *recorders)
        self._listening = self._now_listening()

    @property
    def mirrors(self) -> bool:
        """Whether a window is open, or a recorder listens outside of them, too."""
        return self.is_open or bool(self._listening)

    @property
    def has_captured(self) -> bool:
        """Whether a window has closed with what a recorder captured."""
        return bool(self._captured)

    def _now_listening(self) -> tuple[Recorder, ...]:
        return tuple(one for one in self._recorders if self.is_open or one.always)

    def open(self, step: int, stage: str | None) -> None:
        """Open a window on a step, or on one stage of it."""
        start = self._run.clock()
        self._opened[step, stage] = self._opened.get((step, stage), 0) + 1
        self._window = window_name(step, stage, self._opened[step, stage])
        self._facts = {"capture": self._window, "step": step}
        if stage is not None:
            self._facts["stage"] = stage
        self.is_open = True
        self._listening = opened = self._recorders
        for recorder in opened:
            self._call(recorder, recorder.open, self._folder / self._window)
        # A recorder that failed took time, too. Without any recorder, a step is as long as usual.
        self._works = any(map(_works, opened))
        self._run.record(_OPEN, start, self._run.clock())

    def close(self, *, happened: bool = True) -> None:
        """Close the window: end what is mirrored in it, then stop the recorders in reverse.

        Args:
            happened: Whether there was anything to capture.
        """
        start = self._run.clock()
        for token in reversed(self._tokens):
            self._end(token, windowed=True)
        for recorder in reversed(self._recorders):
            self._call(recorder, recorder.close)
        self.is_open = False
        self._listening = self._now_listening()
        names = _names(filter(_works, self._recorders))
        if names and happened:
            self._captured.add(self._window)
            text = f"captured {self._window} with {names}"
            self._run.note(Code.CAPTURE_TAKEN, text, **self._facts)
        self._run.record(_CLOSE, start, self._run.clock())

    def enter(self, name: str, kind: Kind, *, closes: bool = False) -> object:
        """Mirror the beginning of a span; returns what `exit` needs, None without a listener."""
        if not (self.mirrors or closes):  # A span that closes a window may open it later, inside.
            return None
        step = self._run.step
        self.saw(step)
        token = _Token(closes)
        self._tokens.append(token)
        for recorder in self._listening:
            part = self._call(recorder, recorder.enter, name, kind, step)
            token.parts.append((recorder, part))
        return token

    def exit(self, token: object, *, keep: bool = False) -> Ended:
        """Mirror the end of a span; where its window has closed meanwhile, it ended there.

        Args:
            token: What `enter` returned.
            keep: Leave the window of the span open, until `close_kept`.
        """
        if not isinstance(token, _Token) or token not in self._tokens:
            return Ended()
        self._tokens.remove(token)
        self._end(token)
        if token.closes and self.is_open:
            self._kept = keep
            if not keep:
                self.close()
        return token.ended

    def close_kept(self) -> None:
        """Close the window that was left open at the end of its span."""
        if self._kept and self.is_open:
            self.close()
        self._kept = False

    def mark(self, name: str) -> None:
        """Mirror an instant."""
        for recorder in self._listening:
            self._call(recorder, recorder.mark, name, self._run.step)

    def forget(self, step: int) -> None:
        """Close a window that was opened for a step that never came, and do not count it."""
        opened = {key: number for key, number in self._opened.items() if key[0] != step}
        if len(opened) < len(self._opened) and self.is_open:
            text = f"nothing was captured in {self._window}: the training ended before that step"
            self._run.note(Code.CAPTURE_EMPTY, text, **self._facts)
            self.close(happened=False)
        self._opened = opened

    def saw(self, step: int) -> bool:
        """Tell whether a profiler ran in a step, and remember that it does while it runs."""
        if self.is_open and self._works:
            self._steps.add(step)
        return step in self._steps

    def finish(self) -> None:
        """Close an open window, end open spans, and wait for every recorder's files."""
        if self.is_open:
            self.close()
        for token in reversed(self._tokens):
            self._end(token)
        self._tokens.clear()
        for recorder in self._all:
            self._call(recorder, recorder.finish)

    def why_nothing(self, config: ProfilerConfig, rank: int, ended: int) -> str | None:
        """Say why a run that should have captured something did not; None where all is well.

        Args:
            config: What was wanted.
            rank: This process's.
            ended: The last step that ended.
        """
        if not config.captures or not config.wants_rank(rank) or self._captured:
            return None
        capturing = [recorder for recorder in self._all if _captures(recorder)]
        if not capturing:  # A note at the start says if mstx has no markers.
            return None if config.integrated.mstx else f"nothing was captured: {_NO_RECORDER}"
        if self._opened:
            if reasons := [one.why_nothing for one in capturing if one.why_nothing]:
                return f"nothing was captured: {reasons[0]}"
            return f"nothing was captured: all profilers failed: {_names(capturing)}"
        if all(recorder.always for recorder in capturing):
            return None
        return f"nothing was captured: {self._why_no_window(config, ended)}"

    def _why_no_window(self, config: ProfilerConfig, ended: int) -> str:
        block = config.integrated
        range_of = f"{block.profile_step_start} up to {block.profile_step_end - 1}"
        steps = range_of if config.steps is None else config.steps
        wanted = f"steps to capture: {steps}; last complete step: {ended}"
        if config.per_stage and self.seen:
            seen = ", ".join(sorted(self.seen))
            wanted = f"no stage to capture began in those steps; stages there: {seen}"
            if "actor_generate" in self.seen and config.tokens:
                wanted = f"actor_generate contained no span number {config.tokens[0]}"
        return wanted

    def _end(self, token: _Token, *, windowed: bool = False) -> None:
        """End a span for every recorder, or only for those that listen in windows."""
        ending = [part for part in token.parts if not (windowed and part[0].always)]
        token.parts = [part for part in token.parts if windowed and part[0].always]
        for recorder, part in reversed(ending):
            if recorder in self._recorders:
                found = self._call(recorder, _told, recorder.exit, part)
                if callable(found):
                    token.ended.late.append(found)
                elif found is not None:
                    token.ended.counters.update(found)

    def _call(self, recorder: Recorder, action: Callable[..., T], *arguments: object) -> T | None:
        try:
            return action(*arguments)
        except BaseException as error:
            if is_for_the_process(error):
                raise
            if recorder in self._recorders:
                self._drop(recorder, error)
                if action not in (recorder.close, recorder.finish):
                    self._call(recorder, recorder.close)  # Its tool must not stay on.
            return None

    def _drop(self, recorder: Recorder, error: BaseException) -> None:
        self._recorders = tuple(kept for kept in self._recorders if kept is not recorder)
        self._failed.append(recorder)
        self._listening = self._now_listening()
        log.debug("a recorder failed", exc_info=error)
        name = type(recorder).__name__
        text = f"{name} was disabled after an error ({described(error)})"
        self._run.note(Code.RECORDER_FAILED, text, recorder=name)


def at_step(config: ProfilerConfig, rank: int, step: int, *, is_open: bool) -> Action:
    """Tell what the beginning of a step does to the capture of whole steps."""
    wanted = _wants(config, rank, step) and not config.per_stage
    if is_open == wanted:
        return "keep"
    return "open" if wanted else "close"


def after_step(config: ProfilerConfig, rank: int, step: int, *, is_open: bool) -> Action:
    """Tell what the end of a step does: windows end with their last wanted step."""
    goes_on = config.joins_steps and not config.per_stage and _wants(config, rank, step + 1)
    return "close" if is_open and not goes_on else "keep"


def arms_stages(config: ProfilerConfig, rank: int, step: int) -> bool:
    """Tell whether a stage that begins in this step may open a capture."""
    return config.per_stage and _wants(config, rank, step)


def at_stage(config: ProfilerConfig, rank: int, step: int, stage: str, *, is_open: bool) -> Action:
    """Tell whether a stage's beginning opens a capture; inside an open one it never does."""
    wanted = arms_stages(config, rank, step) and config.wants_stage(stage) and not is_open
    return "open" if wanted else "keep"


def window_name(step: int, stage: str | None, number: int) -> str:
    """Return the name of a window's folder; the second window of one stage and step ends in ``-2``.

    Example::

        >>> window_name(3, "actor_update", 1), window_name(3, None, 2)
        ('step-000003-actor_update', 'step-000003-2')
    """
    safe = "".join(c if c.isalnum() or c in "._+=" else "_" for c in stage or "")
    parts = [f"step-{step:06d}", safe, str(number) if number > 1 else ""]
    return "-".join(part for part in parts if part)


def _wants(config: ProfilerConfig, rank: int, step: int) -> bool:
    return config.captures and config.wants_rank(rank) and config.wants_step(step)


def _captures(recorder: Recorder) -> bool:
    """Tell whether a recorder does anything in a window that it does not do outside, too."""
    own = type(recorder)
    return own is not Recorder and (not recorder.always or own.open is not Recorder.open)


def _works(recorder: Recorder) -> bool:
    """Tell whether a recorder captures, and its tool records something in this process."""
    return _captures(recorder) and not recorder.why_nothing


def _names(recorders: Iterable[Recorder]) -> str:
    return ", ".join(type(recorder).__name__ for recorder in recorders)


def _told(
    end: Callable[[object], Counters | Late | None], token: object
) -> Late | dict[str, Number]:
    found = end(token)
    return found if callable(found) else numbers_of(found)


class TokenWindow:
    """Say when the capture of a generation opens and closes, where ``tokens`` asks for some.

    An iteration is a span directly inside of the stage, such as the model's forward, marked in the
    code or by ``wrap``. Of several names the one that comes first counts. Iterations begin at 0 in
    every generation; the first is the prompt's and makes token 0.

    Args:
        config: What is wanted.
    """

    def __init__(self, config: ProfilerConfig) -> None:
        self._on = config.tokens is not None
        self._start, self._end = config.tokens or (0, None)
        self._armed = False
        self._name, self._number = "", 0

    @property
    def inside(self) -> bool:
        """Whether a generation with iterations is open around the caller."""
        one = innermost() if self._armed else None
        while one is not None and one.marker.name != GENERATION:
            one = one.around
        return one is not None

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
        if above is None or above.marker.name != GENERATION or name != (self._name or name):
            return "keep"
        number, self._name, self._number = self._number, name, self._number + 1
        if number == self._start:
            return "open"
        return "close" if number == self._end else "keep"
