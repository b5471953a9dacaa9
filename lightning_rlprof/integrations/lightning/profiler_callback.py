"""`ProfilerCallback`: each Lightning hook is one call to the session.

Begin and end the steps of a training around each of its batches.
"""

import functools
import importlib
import importlib.util
import inspect
import logging
import sys
import types
from collections.abc import Callable, Collection, Sequence, Set
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

import torch  # noqa: F401 - the first to be missing, before Lightning, which needs it
from typing_extensions import NotRequired, TypedDict, Unpack

from lightning_rlprof.config.blocks import IntegratedConfig
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.validation import Section
from lightning_rlprof.errors import ConfigError, RecorderError
from lightning_rlprof.integrations.end_of_run import log_report, print_summary
from lightning_rlprof.integrations.lightning.marks_in_code import has_marks, rules_by_name
from lightning_rlprof.integrations.lightning.trainer_hooks import Actions, Batches, Cover
from lightning_rlprof.integrations.lightning.update_stage import (
    UpdateStages,
    check_optimizer_stages,
)
from lightning_rlprof.recording.accelerator import device_kind
from lightning_rlprof.recording.annotations import Marker, OwnMarker
from lightning_rlprof.recording.job import find_place, shared_run
from lightning_rlprof.recording.method_wrapping import ImportedWraps, Wraps
from lightning_rlprof.recording.open_spans import rejoin
from lightning_rlprof.recording.recorders.base import Recorder, recorder_names
from lightning_rlprof.recording.session import AlreadyRecordingError, Loop, Session, running
from lightning_rlprof.recording.start import OnFinish, new_run_name, start_session
from lightning_rlprof.recording.torch_hooks import OptimizerSteps
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import STAGES, Kind

__all__ = ["Callback", "ProfilerCallback", "guarded"]

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])

_OLDEST = (2, 4)  # Oldest version of Lightning.
_PLAIN = (bool, int, float, str, types.NoneType)


def _installed_bases() -> tuple[type, ...]:
    # The callbacks of lightning.pytorch and of pytorch_lightning are two classes. LightningCLI
    # accepts only that of its package, so deriving from every installed one serves all Trainers.
    bases: list[type] = []
    found: dict[str, tuple[int, ...]] = {}
    for package in ("pytorch_lightning", "lightning.pytorch"):
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            continue
        try:
            module = importlib.import_module(package)
            bases.append(module.Callback)
            found[package] = tuple(map(int, module.__version__.split(".")[:2]))
        except Exception as error:
            log.debug("%s cannot be imported: %s", package, error)
    if max(found.values(), default=(0,)) < _OLDEST:
        has = [f"{name} {'.'.join(map(str, version))}" for name, version in found.items()]
        raise ImportError(
            f"recording needs Lightning 2.4 or newer, found {' and '.join(has) or 'none'}. "
            'Run: pip install "lightning-rlprof[lightning]"'
        )
    return tuple(bases)


if TYPE_CHECKING:
    from pytorch_lightning import Callback
else:
    Callback = type("Callback", _installed_bases(), {"__doc__": "Base for both Trainers."})


def guarded(hook: F) -> F:
    """Turn a hook's own failure into one logged error and the end of the recording.

    The callback's ``give_up(error)`` is called; training continues.
    """

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)

    return call  # type: ignore[return-value]


def typed_options(others: Collection[str]) -> Any:
    """Return the annotation of ``**options``.

    Args:
        others: Keywords that are no fields, or not only.
    """
    fields = {**IntegratedConfig.model_fields, **ProfilerConfig.model_fields}
    fields = {name: field for name, field in fields.items() if name not in others}
    keys = {name: NotRequired[_type_of(field.annotation)] for name, field in fields.items()}
    options: Any = TypedDict("CallbackOptions", keys)  # type: ignore[misc]
    meanings = {**IntegratedConfig.meanings(), **ProfilerConfig.meanings()}
    lines = [f"    {name}: {meanings.get(name, '')}" for name in fields]
    options.__doc__ = "\n".join(["Fields of the configuration.", "", "Args:", *lines])
    return Unpack[options]


def _type_of(annotation: Any) -> Any:
    """Return a type that accepts all that a field does, and is as narrow as a reader can check."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return dict[str, Any]
    is_union = get_origin(annotation) in (Union, types.UnionType)
    parts = get_args(annotation) if is_union else (annotation,)
    is_plain = all(part in _PLAIN or get_origin(part) is Literal for part in parts)
    return annotation if is_plain else Any


class ProfilerCallback(Callback):
    """Record where each RL step of a Lightning training goes; put it first in ``callbacks=[…]``.

    Works in Trainers of both names. Spans are always recorded, and captures (torch.profiler, NVTX,
    memory) where the configuration asks for them. Each ``fit`` writes one run directory.

    Args:
        config: A `ProfilerConfig`, a mapping or DictConfig, or the path of a YAML file.
        recorders: Recorders of your own, instead of those that the configuration chooses.
        on_finish: Called with a `Finished` when this rank's files are complete, off the training
            thread: on captured ranks, or on rank 0 if none is captured. It may take ten minutes.
        **options: Fields of the configuration, which win over ``config``.

    Raises:
        ConfigError: The configuration is wrong.

    Example::

        >>> callback = ProfilerCallback(stage="actor_update", profile_save_path="runs")
        >>> callback.config.integrated.stage
        'actor_update'
    """

    def __init__(
        self,
        config: ProfilerConfig | dict[str, Any] | str | Path | None = None,
        *,
        recorders: Sequence[Recorder] | None = None,
        on_finish: OnFinish | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = ProfilerConfig.build(config, **options)
        self.recorders, self.on_finish = recorders, on_finish
        self.by_environment = False
        self.run: Path | None = None
        self._session: Session | None = None
        # Its fit is recorded; a fit inside of that may have this callback, too.
        self._trainer: Any = None
        self._apart: Any = None  # Its fit, in another thread, is not recorded.
        self._undo: list[Any] = []
        self._by_name: list[Wraps] = []
        self._own_ended = 0
        self._starts: dict[str, int] = {}
        self._watched: Set[int] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run behind in copies and other processes: it belongs to who records it."""
        # Lightning sets two methods of the module on every callback, and with them the weights.
        left = {"log", "log_dict"}
        kept = {key: value for key, value in vars(self).items() if key not in left}
        run: dict[str, Any] = {
            "_session": None,
            "_trainer": None,
            "_apart": None,
            "_undo": [],
            "_by_name": [],
            "_starts": {},
            "_watched": frozenset(),
        }
        return {**kept, **run}

    # ---- the life of a run

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start the run: everything that can be known to be wrong raises here."""
        if stage != "fit" or not self._is_the_one(trainer.callbacks):
            return
        if self._trainer is trainer and self._session and not self._session.step:
            return  # A callback that contains this one forwards Lightning's calls, too.
        if self._trainer is trainer or (self._trainer and not _trains(self._trainer)):
            self._finish("interrupted by an error that was not reported to callbacks")
        if other := running():
            self._decline(other, trainer)
            return
        try:
            self._start(trainer, pl_module)
        except AlreadyRecordingError as error:  # Another thread has just begun to record.
            self._decline(error.session, trainer)
        except (ConfigError, RecorderError):
            self._finish("interrupted by the configuration")
            raise
        except Exception as error:
            self.give_up(error)

    def _decline(self, other: Session, trainer: Any) -> None:
        """Have no run of a fit: another session records."""
        if other.owner.is_here:
            _warn_once(other.run)
        elif other.decline("a fit"):
            self._apart = trainer

    def _is_the_one(self, callbacks: Sequence[Any]) -> bool:
        others = [one for one in callbacks if isinstance(one, ProfilerCallback) and one is not self]
        if not self.by_environment and any(not other.by_environment for other in others):
            raise ConfigError("the Trainer has two ProfilerCallbacks; remove one")
        return not (self.by_environment and others)  # A callback in the code wins over RLPROF=1.

    def _start(self, trainer: Any, pl_module: Any) -> None:
        device = _device(trainer)
        if self.recorders is None:
            _refuse_a_second_profiler(trainer, self.config, device)
        own = trainer.global_rank, trainer.world_size
        place = find_place(own=own)
        if (place.rank, place.world_size) == own:
            name = trainer.strategy.broadcast(new_run_name(), src=0)
        else:  # Every process of a job has its own Trainer.
            name = shared_run(self.config.save_path, place)
        self._session = session = start_session(
            self.config,
            name=name,
            rank=own[0] if place.rank is None else place.rank,
            world_size=place.world_size or own[1],
            hosts=trainer.num_nodes,
            device=device,
            recorders=self.recorders,
            on_finish=self.on_finish,
            loop=Loop(end_if_left=self._end_if_left, give_up=self.give_up),
        )
        self.run, self._trainer = session.run, trainer
        self._starts = {}
        self._undo.append(ImportedWraps(self.config.wrap))
        # The module may make the target in its `setup`, which comes later.
        with suppress(Exception):
            self._undo += [Wraps(pl_module, self.config.wrap)]
        stages = {*STAGES, *self.config.custom_stages}
        self._watched = _watched(trainer.callbacks)
        batches = Batches(session, trainer, self._watched, self.give_up, self._after_step)
        actions = Actions(trainer.profiler, session, stages, batches)
        self._undo += [batches, actions, OptimizerSteps(session)]
        for logger in trainer.loggers:
            with suppress(Exception):  # Some objects take no attributes.
                logs = Marker("logging", "region")(logger.log_metrics)
                self._undo.append(Cover(logger, "log_metrics", logs))
        # These are last, so that an update ends after the optimizer step that ends it.
        self._undo.append(UpdateStages(session, trainer, pl_module, self.give_up))
        self._cover_loop(trainer, pl_module)

    def _cover_loop(self, trainer: Any, pl_module: Any) -> None:
        """Cover what Lightning tells no callback, and what costs less than a hook."""
        loop = trainer.fit_loop
        run = loop.run

        def begin_and_run() -> Any:
            # A loader of unknown length makes its first batch, a rollout, before on_train_start.
            check_optimizer_stages(self.config.optimizer_stages, trainer.optimizers)
            self.on_train_start(trainer, pl_module)
            return run()

        self._undo.append(Cover(loop, "run", begin_and_run))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Mark the methods of what did not exist at `setup`; what is missing now raises."""
        if self._trainer is not trainer:
            return
        if not any(isinstance(part, Wraps) for part in self._undo):
            try:
                self._undo += [Wraps(pl_module, self.config.wrap)]
            except ConfigError:
                self._finish("interrupted by the configuration")
                raise
        if self.config.auto_stages and not self.config.wrap:
            self._mark_by_name(pl_module)

    def _mark_by_name(self, pl_module: Any) -> None:
        """Mark methods whose names mean a stage, in code that marks none."""
        session, rules = self._session, []
        assert session is not None
        try:
            found = [] if has_marks(pl_module) else rules_by_name(pl_module)
        except Exception as error:  # The module's code may raise any error.
            log.debug("the module cannot be looked into", exc_info=error)
            return
        for rule in found:
            with suppress(ConfigError):  # Some objects take no attributes.
                self._by_name.append(Wraps(pl_module, [rule], by_name=True))
                rules.append(rule)
        if rules:
            self._undo += self._by_name
            self._own_ended = OwnMarker.ended
            shown = ", ".join(f"{rule.target} ({rule.stage})" for rule in rules)
            text = f"methods marked by their names: {shown}. To turn off: auto_stages: false"
            session.note(Code.MARKED_BY_NAME, text)
        for part in self._undo:
            if isinstance(part, UpdateStages):
                part.rules = rules

    def _after_step(self) -> None:
        """Leave the marking to the code, as soon as it has marked a stage."""
        if not self._by_name or self._session is None:
            return
        others = self._session.buffer.stage_count - (OwnMarker.ended - self._own_ended)
        self._own_ended = OwnMarker.ended
        if others > 0:
            for part in self._by_name:
                part.remove()
            self._by_name = []
            text = "methods are no longer marked by their names, as the code marks stages"
            self._session.note(Code.MARKED_BY_CODE, text)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the run of a fit that went through."""
        self._end_fit(trainer, "finished")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run where it is; the exception passes through."""
        self._end_fit(trainer, f"interrupted by {type(exception).__name__}")

    def _end_fit(self, trainer: Any, status: str) -> None:
        if self._trainer is trainer:
            self._finish(status)
        if self._apart is trainer:
            self._apart = None
            rejoin()

    def _end_if_left(self) -> None:
        if self._trainer is None or not _trains(self._trainer):
            self._finish("interrupted by an error that was not reported to callbacks")

    def give_up(self, error: Exception) -> None:
        """Stop recording after a failure in rlprof; training continues."""
        log.error("recording stopped, training continues: %s", error, exc_info=error)
        self._finish(f"stopped by an error in rlprof: {type(error).__name__}")

    def _finish(self, status: str) -> None:
        loggers = self._trainer.loggers if self._trainer else ()
        session, self._session, self._trainer = self._session, None, None
        undo, self._undo, self._by_name = self._undo, [], []
        for part in undo:
            try:
                part.remove()
                if isinstance(part, Wraps | ImportedWraps) and session is not None:
                    for code, text, facts in part.remarks():
                        session.note(code, text, **facts)
            except Exception as error:  # The other parts, and the session, end all the same.
                log.error("%s could not be removed: %s", part, error, exc_info=error)
        if session is None:
            return
        try:
            if status == "finished" and not session.has_steps:  # A tuner records no step.
                log.info("no step was recorded: %s is removed", session.run)
                session.discard()
                self.run = None
            else:
                session.close(status)
                if session.header.rank == 0:
                    if session.config.summary:
                        print_summary(session.run, status)
                    if session.config.log_report:
                        log_report(session.run, loggers)
        except Exception as error:
            log.error("the run could not be finished: %s", error, exc_info=error)
            with suppress(Exception):
                session.close(status)  # It does nothing if the session is closed.

    # ---- steps

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the first step, so that a rollout in the data loader belongs to it."""
        session = self._recording(trainer)
        # Tuners run the loop without its callbacks, and their batches are not steps.
        if session is not None and not self._watched.isdisjoint(map(id, trainer.callbacks)):
            # The index is of the batch before this one, counted from 0, also right after a resume.
            step = trainer.fit_loop.epoch_loop.total_batch_idx + 2
            if session.step != step:
                session.expect_step(step)

    @guarded
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the step that no batch came for."""
        if (session := self._recording(trainer)) is not None:
            session.abandon_step(interrupted=False)

    @guarded
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Know that Lightning's closure is done, and what follows is the update."""
        if not pl_module.automatic_optimization:
            return
        for part in reversed(self._undo):
            if isinstance(part, UpdateStages | OptimizerSteps):
                part.closure_done()

    # ---- what lies around steps; hooks that come without their partner leave nothing

    @guarded
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the epoch; a run that resumes inside one never comes here."""
        self._begin("epoch", trainer)

    @guarded
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the epoch."""
        self._end("epoch", trainer, "epoch")

    @guarded
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a validation, in the middle of an epoch or after it, or before training."""
        self._begin("sanity_check" if trainer.sanity_checking else "validation", trainer)

    @guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the validation."""
        self._end("sanity_check" if trainer.sanity_checking else "validation", trainer)

    def _begin(self, name: str, trainer: Any) -> None:
        if (session := self._recording(trainer)) is not None:
            self._starts[name] = session.clock()

    def _end(self, name: str, trainer: Any, kind: Kind = "region") -> None:
        session = self._recording(trainer)
        if session is not None and (start := self._starts.pop(name, None)) is not None:
            session.record(Marker(name, kind), start, session.clock())

    def _recording(self, trainer: Any) -> Session | None:
        """Return the session of this Trainer's fit, not that of a fit around it."""
        return self._session if self._trainer is trainer else None


# A signature shows these types, and LightningCLI reads them; type checkers cannot see them.
ProfilerCallback.__init__.__annotations__["options"] = typed_options(
    [*inspect.signature(ProfilerCallback).parameters]
)


def _watched(callbacks: Sequence[Any]) -> Set[int]:
    """Return the ids of a Trainer's callbacks: one of them is, or holds, the `ProfilerCallback`.

    Tuners train without the Trainer's callbacks, but keep its progress bar.
    """
    return {id(each) for each in callbacks if not hasattr(each, "refresh_rate")}


@lru_cache(maxsize=1)
def _warn_once(run: Path) -> None:
    """Say that a fit is not recorded; there may be one inside of every step."""
    log.warning("%s is already being recorded in this process; this fit is not recorded", run)


def _trains(trainer: Any) -> bool:
    return trainer.state.status.value in ("initializing", "running")


def _device(trainer: Any) -> str:
    """Return the kind of device that trains; Lightning itself knows none by the name of npu."""
    kind: str = trainer.strategy.root_device.type
    if kind == "cpu" and "torch_npu" in sys.modules:
        return device_kind()
    return kind


def _refuse_a_second_profiler(trainer: Any, config: ProfilerConfig, device: str) -> None:
    """Refuse Lightning's PyTorchProfiler beside torch_profiler: the later one breaks training."""
    kinds = {kind.__name__ for kind in type(trainer.profiler).__mro__}
    ours = {"npu_profiler": "torch_npu.profiler", "torch_profiler": "our torch.profiler"}
    for name in recorder_names(config, device, trainer.global_rank):
        if "PyTorchProfiler" in kinds and name in ours:
            raise ConfigError(
                f"the Trainer's PyTorchProfiler and {ours[name]} cannot profile the "
                f"same process: remove Trainer(profiler=…), or set "
                f"integrated.profile: false"
            )
