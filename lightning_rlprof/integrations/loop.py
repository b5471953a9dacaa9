"""Record any Python program: `start_session` finds its place in the job, `step` marks its steps."""

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError, RlprofError, described
from lightning_rlprof.integrations.end_of_run import print_summary, print_without_steps
from lightning_rlprof.integrations.termination import Termination
from lightning_rlprof.recording import start
from lightning_rlprof.recording.accelerator import device_kind, torch
from lightning_rlprof.recording.annotations import Marker, has_begun
from lightning_rlprof.recording.job import Place, find_place, free_ranks, remember, shared_run
from lightning_rlprof.recording.method_wrapping import ImportedWraps
from lightning_rlprof.recording.open_spans import Owner, rejoin
from lightning_rlprof.recording.recorders.base import Recorder, is_for_the_process
from lightning_rlprof.recording.session import (
    AlreadyRecordingError,
    Helpers,
    Loop,
    Session,
    current,
    running,
)
from lightning_rlprof.recording.span_buffer import RankTakenError, StepTotals
from lightning_rlprof.recording.start import OnFinish
from lightning_rlprof.records.notes import Code, Remark
from lightning_rlprof.records.records import FIRST_ROLE_RANK, FORMAT, Header

log = logging.getLogger(__name__)


def start_session(
    config: ProfilerConfig | Mapping[str, Any] | str | PathLike[str] | None = None,
    *,
    name: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    hosts: int | None = None,
    device: str | None = None,
    recorders: Sequence[Recorder] | None = None,
    on_finish: OnFinish | None = None,
    packages: Sequence[str] = (),
    **options: Any,
) -> Session:
    """Start recording this process, in any program; see `Session` for the steps.

    All processes of a job record into one run directory. Rank, world size and the name of the run
    come from torch.distributed, torchrun, SLURM, Ray or ``rlprof run``, unless they are given. If
    this thread's session records already, it ends and a new run begins; inside of a training that
    is recorded, its session is returned. A process records one session at a time, with the thread
    that starts it and those that this starts: another thread gets a session that records nothing.
    The session ends with the process at the latest.

    Args:
        config: As of `ProfilerCallback`.
        name: Name of the run directory, the same on all ranks.
        rank: Global rank.
        world_size: Number of ranks.
        hosts: Number of hosts, which have as many ranks each.
        device: A kind as `device_kind` names it.
        recorders: Recorders of your own, instead of those that the configuration chooses.
        on_finish: Called with a `Finished` when the run's files are complete.
        packages: Names of packages whose versions the run is to contain, too.
        **options: Fields of the configuration, which win over ``config``.

    Raises:
        ConfigError: What was asked for does not fit this job or machine.
        RecorderError: The same, of a recorder.

    Example::

        >>> import tempfile
        >>> from lightning_rlprof import stage
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with start_session(profile_save_path=folder, summary=False) as session:
        ...         for _ in range(2):
        ...             with step():
        ...                 with stage("actor_update"):
        ...                     pass
        ...     sorted(session.metrics())[:2]
        ['rlprof/actor_update_s', 'rlprof/actor_update_share']
    """
    try:
        built = ProfilerConfig.build(config, **options)
        place = _place(rank, world_size, hosts, built.role)
        asked = {
            "device": device,
            "recorders": recorders,
            "on_finish": on_finish,
            "packages": packages,
        }
        other = running()
        is_own = other is not None and other in _own
        if other is not None and is_own and (other.owner.has_process or other.owner.is_here):
            log.warning("%s ends here: another session starts in this process", other.run)
            other.close(other.standing)
        owner = Owner(is_training=False, has_process=place.is_actor)
        return open_session(built, name, place, owner, asked)
    except RlprofError:
        raise
    except Exception as error:
        text = "nothing is recorded, the training continues: %s"
        log.error(text, described(error), exc_info=error)
        return _Unrecorded(ProfilerConfig.model_construct(), is_apart=False)


def open_session(
    config: ProfilerConfig,
    name: str | None,
    place: Place,
    owner: Owner,
    asked: Mapping[str, Any],
    end_if_left: Callable[[], object] | None = None,
    *,
    yields: bool = False,
) -> Session:
    """Start a session; if another one records this process, return what stands for one.

    Args:
        config: What to record.
        name: As of `start_session`.
        place: Where this process stands.
        owner: Whose spans are recorded.
        asked: More arguments of `recording.start.start_session`.
        end_if_left: As of `Loop`.
        yields: As of `Loop`.
    """
    if (other := running()) is not None:
        return _beside(other, config, owner)
    by_path = [rule for rule in config.wrap if rule.is_imported]
    loop = Loop(
        follows_threads=True,
        idles=place.is_actor and config.role != "controller",
        object_rules=config.wrap if len(by_path) < len(config.wrap) else (),
        end_if_left=end_if_left,
        yields=yields,
    )
    others = {
        **asked,
        "loop": loop,
        "hosts": place.hosts,
        "device": asked.get("device") or device_kind(),
        "open_world": place.world_size is None,
        "owner": owner,
    }
    try:
        session = _start(config, config.save_path, name, place, others)
    except AlreadyRecordingError as error:  # Another thread has just begun to record.
        return _beside(error.session, config, owner)
    try:
        _own[:] = [session]
        remember(session.run)
        _mark_all(session, config)
        _end_with_process(session)
        session.after_close(partial(_summarize, session))
    except BaseException:
        session.discard()
        raise
    return session


def _beside(other: Session, config: ProfilerConfig, owner: Owner) -> Session:
    is_apart = other.decline("a training", is_training=owner.is_training)
    return _Unrecorded(config, is_apart) if is_apart else _Guest(other)


_STEP = Marker("step", "step")
_own: list[Session] = []  # The session that `start_session` started last, if any.
_MOST = 100  # Runs of one name, and ranks that other processes take at the same time.


def _place(rank: int | None, world_size: int | None, hosts: int | None, role: str | None) -> Place:
    found = find_place(role=role)
    if rank is None and world_size is None:
        return found if hosts is None else found._replace(hosts=hosts)
    known = found.world_size if found.rank is not None else None
    world = world_size or known or 1
    own = (found.rank or 0) if rank is None else rank
    if not 0 <= own < world:
        raise ConfigError(f"rank={own} of world_size={world}: ranks count from 0 to below it")
    return found._replace(rank=own, world_size=world, hosts=hosts)


def _start(
    config: ProfilerConfig, folder: Path, name: str | None, place: Place, others: dict[str, Any]
) -> Session:
    """Start a session on a rank that is free, in the named run or the one of the job."""
    for attempt in range(1, _MOST):
        run = name or shared_run(folder, place)
        if name and attempt > 1:
            run = f"{name}-{attempt}"
        for rank in free_ranks(folder / run, place):
            world = place.world_size or (rank + 1 if rank < FIRST_ROLE_RANK else 1)
            try:
                session = start.start_session(
                    config, name=run, rank=rank, world_size=world, **others
                )
            except RankTakenError:
                continue
            if name and attempt > 1:
                text = f"{folder / name} has rank {rank} already: this is another run"
                session.note(Code.RUN_RENAMED, text)
            return session
    raise ConfigError(f"{_MOST} runs of the name {name} have this rank; choose another name")


def _mark_all(session: Session, config: ProfilerConfig) -> None:
    """Mark what the configuration names by import path, and what goes through torch's hooks."""
    imported = ImportedWraps(config.wrap)
    parts: list[Any] = [imported]
    if torch is not None:
        from lightning_rlprof.recording import torch_hooks

        parts += [torch_hooks.OptimizerSteps(session), torch_hooks.BackwardPasses()]
        parts.append(torch_hooks.RecordFunctions())
    session.at_close(*(part.remove for part in parts), partial(_remark, session, imported))


def _remark(session: Session, imported: ImportedWraps) -> None:
    session.note_at_end(*imported.remarks())
    missing = [rule.target for rule in session.loop.object_rules if not rule.is_imported]
    if missing and not session.has_wrapped:
        text = f"wrap: {missing[0]!r} needs its object: session.wrap(object)"
        session.note_at_end(Remark(Code.WRAP_WITHOUT_CALL, text, {"target": missing[0]}))


def _end_with_process(session: Session) -> None:
    """Write how the run ended however the process ends, if Python ends it."""
    before, status = sys.excepthook, ["finished"]

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        status[0] = f"interrupted by {kind.__name__}"
        before(kind, error, trace)

    def end() -> None:
        session.close(session.standing if status[0] == "finished" else status[0])

    def forget() -> None:
        atexit.unregister(end)
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    atexit.register(end)
    termination = Termination(partial(session.end_at_once, "interrupted by SIGTERM"))
    session.at_close(forget, termination.remove)


def _summarize(session: Session) -> None:
    if not session.config.summary or session.header.rank or "ipykernel" in sys.modules:
        return  # A notebook shows the run itself.
    if session.has_steps:
        print_summary(session.run, session.status)
    elif session.buffer.has_stages():
        print_without_steps(session.run, session.buffer.stages_seen)


class _Guest(Session):
    """The session of a training around: recorded into, and left open."""

    def __init__(self, host: Session) -> None:
        self.__dict__ = host.__dict__

    def begin_step(self, step: int) -> None:
        """Leave the steps to the training around."""

    def end_step(self, end_ns: int | None = None) -> None:
        """Leave the steps to the training around."""

    def close(self, status: str = "finished") -> None:
        """Leave the run to the training around."""


def _do_nothing(self: Session, *args: Any, **options: Any) -> Any:
    """Do nothing: the thread has no run."""


class _Unrecorded(Session):
    """What a thread gets whose training is not recorded: all calls do nothing."""

    training_thread = stage_count = 0
    next_step = 1
    mirrors = has_steps = has_wrapped = False
    step_start_ns = None
    step_totals = StepTotals(0, False, {}, {})
    standing = "not recorded"
    nothing: Any = _do_nothing
    begin_step = expect_step = end_step = abandon_step = saw = nothing
    append = add = record = note = note_at_end = flush = nothing
    stage_ended = enter = exit = mark = failed = give_up = nothing
    wrap = watch_stages = keep_windows = close_kept_window = nothing
    at_close = after_close = end_if_left = end_at_once = nothing

    def __init__(self, config: ProfilerConfig, is_apart: bool) -> None:
        self._is_apart = is_apart
        self.config, self.clock, self.owner = config, perf_counter_ns, Owner()
        self.loop, self.helpers = Loop(), Helpers()
        self.run = Path(config.integrated.profile_save_path, "not-recorded").absolute()
        name, pid = self.run.name, os.getpid()
        self.header = Header(FORMAT, name, 0, 1, "actor", "", pid, "cpu", unix_ns=0, clock_ns=0)
        self.step = self.silent_thread = self.flush_at_ns = 0
        self.status, self.waiting = "not recorded", False

    def step_times_ns(self) -> list[int]:
        """Return no times."""
        return []

    def step_at(self, time_ns: int) -> int:
        """Return no step."""
        return 0

    def request_capture(self, *args: Any, **kwargs: Any) -> int:
        """Capture nothing."""
        return 0

    def close(self, status: str = "finished") -> None:
        """Let the thread belong to those around it again."""
        if self._is_apart:
            rejoin()
        self._is_apart = False

    discard = close


class step(ContextDecorator):  # noqa: N801 - a name like `stage`
    """Mark one step of the loop; steps follow one another without a gap.

    Without a session, and in a training that has steps of its own, this does nothing. A step that
    raises stays in the run, as interrupted.

    Args:
        number: The step, such as the version of the weights; unset, the one after the last.

    Example::

        >>> with step():
        ...     pass
    """

    def __init__(self, number: int | None = None) -> None:
        self._number = number

    def __enter__(self) -> None:
        """Begin the step."""
        with suppress(Exception):  # The training continues after any error.
            has_begun(_STEP)
        number = self._number
        _tell(lambda session: session.begin_step(session.next_step if number is None else number))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the step."""
        if kind is None:
            _tell(Session.end_step)
        else:
            name = kind.__name__
            _tell(lambda session: session.abandon_step(interrupted=True, error=name))


def _tell(what: Callable[[Session], object]) -> None:
    """Tell this thread's session of a step, unless its steps are those of a training."""
    try:
        session = current()
        if session is not None and session in _own:
            what(session)
    except Exception as error:
        if is_for_the_process(error):
            raise
        log.error("a step is not recorded, the training continues: %s", described(error))
