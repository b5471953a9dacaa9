"""Show on Lightning's progress bar which stage is open, in steps long enough to read it."""

import logging
from _thread import get_ident
from typing import Any

from lightning_rlprof.recording.open_spans import innermost
from lightning_rlprof.recording.session import Session

log = logging.getLogger(__name__)

_LONG_NS = 1_000_000_000  # a bar that moves more often shows no stage: it could not be read
_MOST = 40  # times that the bar is drawn in a step, some 100 µs each


class StageOnBar:
    """Put the open stage behind the bar's ``Epoch 0`` until `remove`.

    Only on a terminal, and only on Lightning's own bars: one of the user's is left alone. While
    steps are shorter than a second, stages cost nothing more than without it.

    Args:
        session: Whose stages they are.
        bar: ``trainer.progress_bar_callback``, or None.
    """

    def __init__(self, session: Session, bar: Any) -> None:
        self._session, self._bar, self._thread = session, bar, get_ident()
        self._base = self._shown = ""
        self._left, self._since, self._watches = _MOST, session.clock(), False
        kind = f"{type(bar).__module__.rpartition('.')[2]}.{type(bar).__name__}"
        lightnings = type(bar).__module__.startswith(("pytorch_lightning.", "lightning."))
        self._write = {
            "rich_progress.RichProgressBar": self._write_rich,
            "tqdm_progress.TQDMProgressBar": self._write_tqdm,
        }.get(kind if lightnings else "")
        self._watch(on=self._write is not None)

    def remove(self) -> None:
        """Leave the bar as it would be."""
        self._left = _MOST
        self._show("")
        self._write = None
        self._watch(on=False)

    def end_step(self) -> None:
        """Clear the stage, and choose by the step's length whether the next shows its stages."""
        if self._write is None:
            return
        now = self._session.clock()
        self._left = _MOST
        self._show("")
        self._watch(on=now - self._since >= _LONG_NS and self._write is not None)
        self._since = now

    def _watch(self, *, on: bool) -> None:
        if on != self._watches:
            self._watches = on
            self._session.watch_stages(self._changed if on else None)

    def _changed(self) -> None:
        """Show the innermost open stage of the thread that trains."""
        if get_ident() != self._thread or self._left <= 0:
            return
        self._left -= 1
        span = innermost()
        while span is not None and (span.end_ns is not None or span.kind != "stage"):
            span = span.around
        self._show("" if span is None else span.name)

    def _show(self, stage: str) -> None:
        try:
            if self._write is not None and not self._write(stage):
                self._write = None  # not a terminal
        except Exception as error:  # the insides of a bar, which differ between versions
            log.debug("the progress bar shows no stage", exc_info=error)
            self._write = None

    def _text(self, now: str, stage: str) -> str | None:
        """Return the new text in front of the bar; None if it is there."""
        if now != self._shown:  # Lightning has begun another epoch
            self._base = now
        self._shown = f"{self._base.removesuffix(': ')} {stage}" if stage else self._base
        return None if self._shown == now else self._shown

    def _write_rich(self, stage: str) -> bool:
        """Write a stage on the bar, if it is there; return whether that is on a terminal."""
        progress, task = self._bar.progress, self._bar.train_progress_bar_id
        if progress is None or task is None:
            return True
        if self._bar.is_disabled or not progress.console.is_terminal:
            return False
        text = self._text(self._bar.train_progress_bar.description, stage.replace("[", r"\["))
        if text is not None:
            progress.update(task, description=text)
            self._bar.refresh()  # drawn by the bar's own thread
        return True

    def _write_tqdm(self, stage: str) -> bool:
        bar = getattr(self._bar, "_train_progress_bar", None)
        if bar is None:
            return True
        if bar.disable or not bar.fp.isatty():
            return False
        text = self._text(bar.desc, stage)
        if text is not None:
            bar.set_description_str(text)
            self._shown = bar.desc
        return True
