"""Record any Python program: `start_session` finds its place in the job, `step` marks its steps."""

import atexit
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.end_summary import print_summary
from lightning_rlprof.recording import start
from lightning_rlprof.recording.accelerator import device_kind
from lightning_rlprof.recording.job import Place, find_place, free_ranks, remember, shared_run
from lightning_rlprof.recording.method_wrapping import ImportedWraps
from lightning_rlprof.recording.on_finish import OnFinish
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.recording.session import Session, current
from lightning_rlprof.recording.span_buffer import RankTakenError
from lightning_rlprof.recording.torch_hooks import BackwardPasses, OptimizerSteps, RecordFunctions

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
    a session records already, it ends and a new run begins; inside of a Lightning training that is
    recorded, its session is returned. The session ends with the process at the latest.

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
    built = ProfilerConfig.build(config, **options)
    running = current()
    if running is not None and running not in _own:
        log.warning("%s is already being recorded in this process, and continues", running.run)
        return _Guest(running)
    if running is not None:
        log.warning("%s ends here: another session starts in this process", running.run)
        running.close("finished")
    place = _place(rank, world_size, hosts)
    folder = built.save_path
    others = {
        "hosts": place.hosts,
        "device": device or device_kind(),
        "recorders": recorders,
        "on_finish": on_finish,
        "open_world": place.world_size is None,
        "packages": packages,
    }
    session = _start(built, folder, name, place, others)
    _own[:] = [session]
    remember(session.run)
    session.follows_threads = True
    session.idles = place.is_actor and session.header.role != "controller"
    _mark_all(session, built)
    _end_with_process(session)
    session.afterwards = _then(session.afterwards, partial(_summarize, session))
    return session


_own: list[Session] = []  # those that `start_session` started here, the last one only
_MOST = 100  # runs of one name, and ranks that others take at the same time


def _place(rank: int | None, world_size: int | None, hosts: int | None) -> Place:
    found = find_place()
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
        for rank in free_ranks(folder / run, place.rank):
            world = place.world_size or rank + 1
            try:
                session = start.start_session(
                    config, name=run, rank=rank, world_size=world, **others
                )
            except RankTakenError:
                continue
            if name and attempt > 1:
                text = f"{folder / name} has rank {rank} already: this is another run"
                session.note("warning", text)
            return session
    raise ConfigError(f"{_MOST} runs of the name {name} have this rank; choose another name")


def _mark_all(session: Session, config: ProfilerConfig) -> None:
    """Mark what the configuration names by import path, and what goes through torch's hooks."""
    imported = ImportedWraps(config.wrap)
    parts: list[Any] = [imported, OptimizerSteps(session), BackwardPasses(), RecordFunctions()]
    session.before_close += [part.remove for part in parts]
    session.before_close.append(partial(_remark, session, imported))
    if missing := [rule.target for rule in config.wrap if not rule.is_imported]:
        session.wrap_rules = config.wrap
        session.unwrapped = f"wrap: {missing[0]!r} needs its object: session.wrap(object)"


def _remark(session: Session, imported: ImportedWraps) -> None:
    session.remarks += imported.remarks()
    if session.unwrapped:
        session.remarks.append(session.unwrapped)


def _end_with_process(session: Session) -> None:
    """Write how the run ended however the process ends, if Python ends it."""
    before, status = sys.excepthook, ["finished"]

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        status[0] = f"interrupted by {kind.__name__}"
        before(kind, error, trace)

    def end() -> None:
        try:
            session.close(status[0])
        except Exception as error:
            log.warning("the run could not be finished: %s", error, exc_info=error)

    def forget() -> None:
        atexit.unregister(end)
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    atexit.register(end)
    session.before_close.append(forget)


def _then(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], object]:
    def both() -> None:
        first()
        second()

    return both


def _summarize(session: Session) -> None:
    wanted = session.config.summary and session.header.rank == 0 and session.has_steps
    if wanted and "ipykernel" not in sys.modules:  # a notebook shows the run itself
        print_summary(session.run, session.status)


class _Guest(Session):
    """The session of a training around: recorded into, and left open."""

    def __init__(self, host: Session) -> None:
        self.__dict__ = host.__dict__

    def begin_step(self, step: int) -> None:
        """Leave the steps to the training around."""

    def end_step(self) -> None:
        """Leave the steps to the training around."""

    def close(self, status: str = "finished") -> None:
        """Leave the run to the training around."""


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
        if (session := current()) in _own and session is not None:
            session.begin_step(session.next_step if self._number is None else self._number)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the step."""
        if (session := current()) in _own and session is not None:
            if kind is None:
                session.end_step()
            else:
                session.abandon_step(interrupted=True)
