"""Door to the Hugging Face Trainer: a callback in every Trainer of the process.

A step is an optimizer step, numbered by ``state.global_step``. What `training_step` runs is
``actor_update``, unless another stage is open in it, and so are clipping and the optimizer. Each
training is a run, and so is each attempt of ``auto_find_batch_size``.
"""

import functools
from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit
from lightning_rlprof.recording.annotations import Marker, record
from lightning_rlprof.recording.open_spans import Owner
from lightning_rlprof.recording.session import Session, current
from lightning_rlprof.records.records import VALIDATIONS

KIT = Kit("transformers", "transformers", "accelerate", "trl", "peft")


def install(module: Any) -> None:
    """Add the callback to those that every Trainer has, and mark the Trainer's methods.

    Args:
        module: ``transformers.trainer``.
    """
    trainer, base = KIT.find(module, "Trainer"), KIT.find(module, "TrainerCallback")
    callbacks = KIT.find(module, "DEFAULT_CALLBACKS")
    if trainer is None or base is None or callbacks is None:
        return
    KIT.marks(trainer, "training_step", "actor_update")
    if hasattr(trainer, "_clip_grad_norm"):  # Versions before 5.0 do not have it.
        KIT.marks(trainer, "_clip_grad_norm", "actor_update")
    KIT.marks(trainer, "get_batch_samples", "data_fetch")
    KIT.marks(trainer, "_save_checkpoint", "save_checkpoint")
    KIT.replace(trainer, "evaluate", Marker(VALIDATIONS[0], "region"))
    KIT.replace(trainer, "log", Marker("logging", "region"))
    # Every attempt of a training calls this method; a version without it tries once.
    attempt = "_inner_training_loop" if hasattr(trainer, "_inner_training_loop") else "train"
    KIT.replace(trainer, attempt, _ending)
    if not any(issubclass(kind, _Hooks) for kind in callbacks):
        callbacks.append(type("RlprofCallback", (_Hooks, base), {}))


class _Hooks:
    """What the callback does with each call of ``Trainer.train``."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._since: int | None = None  # The time at which the optimizer was about to step.

    @KIT.quiet
    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        # The training before may not have ended.
        self.end("interrupted by another training of its Trainer")
        place = args.process_index, args.world_size
        self.session = KIT.new_session(Owner(), place, args.device.type)
        self.session.expect_step(state.global_step + 1)

    @KIT.quiet
    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.session is not None:
            self.session.begin_step(state.global_step + 1)

    @KIT.quiet
    def on_pre_optimizer_step(self, *args: Any, **more: Any) -> None:
        if (session := current()) is not None:
            self._since = session.clock()

    @KIT.quiet
    def on_optimizer_step(self, *args: Any, **more: Any) -> None:
        session, since = current(), self._since
        if session is not None and since is not None:
            record("actor_update", since, session.clock())
        self._since = None

    @KIT.quiet
    def on_step_end(self, *args: Any, **more: Any) -> None:
        if self.session is not None:
            self.session.end_step()

    @KIT.quiet
    def on_train_end(self, *args: Any, **more: Any) -> None:
        self.end("finished")

    def end(self, status: str) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close(status)


@KIT.quiet
def _end(trainer: Any, status: str) -> None:
    """End what is left of a Trainer's training, if anything."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, _Hooks):
            callback.end(status)


def _ending(function: Any) -> Any:
    """End a run with the exception that leaves its training, also if the program catches it."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            found = function(self, *args, **kwargs)
        except BaseException as error:
            _end(self, f"interrupted by {type(error).__name__}")
            raise
        _end(self, "finished")
        return found

    return call
