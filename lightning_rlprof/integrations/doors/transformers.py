"""Door to the Hugging Face Trainer: a callback in every Trainer of the process.

A step is an optimizer step, numbered by ``state.global_step``. What `training_step` runs is
``actor_update``, unless another stage is open in it, and so are clipping and the optimizer.
"""

from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit
from lightning_rlprof.recording.annotations import Marker, record
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
    if hasattr(trainer, "_clip_grad_norm"):  # since 5.0
        KIT.marks(trainer, "_clip_grad_norm", "actor_update")
    KIT.marks(trainer, "get_batch_samples", "data_fetch")
    KIT.marks(trainer, "_save_checkpoint", "save_checkpoint")
    KIT.replace(trainer, "evaluate", Marker(VALIDATIONS[0], "region"))
    callback = _callback(base)
    if all(kind.__name__ != callback.__name__ for kind in callbacks):
        callbacks.append(callback)


class _Training:
    """One call of ``Trainer.train``."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._since: int | None = None  # when the last micro-batch ended, or the last hook ran

    def begin(self, args: Any, state: Any) -> None:
        running = current()
        if running is not None and running is not self.session:
            self.session = None  # a session of the program's own, or a training around this one
            return
        self.session = KIT.new_session(
            rank=args.process_index, world_size=args.world_size, device=args.device.type
        )
        self.session.expect_step(state.global_step + 1)

    def begin_step(self, state: Any) -> None:
        if self.session is not None:
            self.session.begin_step(state.global_step + 1)

    def end_step(self) -> None:
        if self.session is not None:
            self.session.end_step()

    def before_optimizer(self) -> None:
        if (session := current()) is not None:
            self._since = session.clock()

    def after_optimizer(self) -> None:
        session, since = current(), self._since
        if session is not None and since is not None:
            record("actor_update", since, session.clock())
        self._since = None

    def end(self) -> None:
        if self.session is not None:
            self.session.close("finished")
            self.session = None


def _callback(base: Any) -> Any:
    """Return the class of callbacks, which needs that of the framework."""
    quiet = KIT.quiet

    class RlprofCallback(base):  # type: ignore[misc]
        """Tells the session of steps."""

        def __init__(self) -> None:
            self._training = _Training()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            quiet(self._training.begin)(args, state)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            quiet(self._training.begin_step)(state)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            quiet(self._training.before_optimizer)()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            quiet(self._training.after_optimizer)()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            quiet(self._training.end_step)()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            quiet(self._training.end)()

    return RlprofCallback
