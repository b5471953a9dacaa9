"""Start a rank's session: name the run, describe the rank, build its recorders."""

import json
import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import NOT_JSON, ConfigError, described
from lightning_rlprof.recording.accelerator import chip_facts, device_name, torch, used_device
from lightning_rlprof.recording.background import sampler
from lightning_rlprof.recording.clock_sync import Exchange, default_store, leaders
from lightning_rlprof.recording.end_remarks import without_effect
from lightning_rlprof.recording.open_spans import Owner
from lightning_rlprof.recording.recorders.base import (
    Recorder,
    build_recorders,
    recorder_names,
    unmet,
)
from lightning_rlprof.recording.session import Helpers, Loop, Session
from lightning_rlprof.recording.watchdog import Watchdog
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import FIRST_ROLE_RANK, FORMAT, SIGNS_VARIABLE, Header
from lightning_rlprof.system.location import plain
from lightning_rlprof.system.process import check_records

log = logging.getLogger(__name__)

_PACKAGES = (
    "lightning-rlprof",
    "torch",
    "pytorch-lightning",
    "lightning",
    "torch-npu",
    "nvtx",
)
_CLOCKS_EVERY_NS = 120_000_000_000

RUN_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}", re.ASCII)
"""What `new_run_name` returns."""

_MAX_CALL_S = 600.0


@dataclass(frozen=True)
class Finished:
    """What a finish hook is told.

    Attributes:
        run: The run directory; this rank's files in it are complete.
        tool: Recorders of the run, by commas: ``nsight,nvtx``; empty when only spans were recorded.
        rank: Global rank of this process.
        pid: Its process id.
        role: Its role.
    """

    run: Path
    tool: str
    rank: int
    pid: int
    role: str


# The type is not `object`: jsonargparse 4.39 takes any default for one, and then leaves the
# signature unread.
OnFinish = Callable[[Finished], Any]
"""What is called with a rank's finished capture or run; what it returns is not used."""


def start_session(
    config: ProfilerConfig | None = None,
    *,
    name: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    hosts: int | None = None,
    device: str = "cpu",
    recorders: Sequence[Recorder] | None = None,
    on_finish: OnFinish | None = None,
    open_world: bool = False,
    packages: Sequence[str] = (),
    owner: Owner | None = None,
    step_unit: str = "",
    loop: Loop | None = None,
) -> Session:
    """Start recording this process, whose place in the job is known; see `Session` for the steps.

    All ranks need the same ``name`` of the run directory. ``hosts`` have as many ranks each; unset,
    torchrun says. ``device`` is a kind as `device_kind` names it; ``recorders`` replace those of
    the configuration. ``on_finish`` is called with a `Finished` when the run's files are complete.
    In an open world ranks come and go. ``packages`` are those whose versions are recorded, too.
    ``owner`` and ``loop`` are as of `Session`, ``step_unit`` as of `Header`.

    Raises ConfigError or RecorderError where what was asked for does not fit this job or machine.
    """
    check_records("recording")
    config = config or ProfilerConfig()
    check_callable(on_finish)
    if not open_world:  # In an open world, the ranks that the configuration names may still come.
        config.check_world(world_size)
    _check_place(name, rank, world_size)
    header = make_header(config, name or new_run_name(), rank, world_size, device)
    run = config.save_path / header.run_id
    has_torch = torch is not None
    names = recorder_names(config, device, rank, has_torch=has_torch)
    names = names if recorders is None else _names(recorders)
    chosen = build_recorders(config, header) if recorders is None else recorders
    shown = {**header.config}
    if recorders is not None:
        shown["recorders"] = [*names]
    if on_finish is not None:
        shown["on_finish"] = getattr(on_finish, "__qualname__", type(on_finish).__qualname__)
    shown["model"], why_not = _model_content(config)
    versions = {**header.versions, **_versions(packages)}
    header = replace(
        header, config=shown, open_world=open_world, step_unit=step_unit, versions=versions
    )
    helpers = partial(_helpers, hosts)
    session = Session(config, run, header, chosen, owner=owner, loop=loop, helpers=helpers)
    try:
        _tell_launcher(run)
        _remark(session, own=recorders is not None)
        if why_not:
            session.note(Code.MODEL_UNREADABLE, why_not)
        session.after_close(partial(run_finish, config, header, run, names, on_finish))
    except BaseException:
        session.discard()
        raise
    return session


def _helpers(hosts: int | None, session: Session) -> Helpers:
    """Start what runs beside a session, by its configuration."""
    config, device = session.config, session.header.device
    exchange, background, engines, watchdog = _exchange(session, hosts), None, None, None
    if config.background_metrics:
        background = sampler.start(session, partial(used_device, device))
    try:
        if config.engine_metrics and session.header.rank == 0:
            from lightning_rlprof.recording.background import engines as pages

            engines = pages.start(session, config.engine_metrics)
        if config.hang_timeout is not None:
            watchdog = Watchdog(session, config.hang_timeout).start()
    except BaseException:
        for part in (background, engines):
            if part is not None:
                part.stop()
        raise
    return Helpers(background, engines, watchdog, exchange)


def _tell_launcher(run: Path) -> None:
    """Tell ``rlprof run``, if it started this program on this host, what is recorded."""
    if folder := os.environ.get(SIGNS_VARIABLE):
        with (
            suppress(OSError),
            open(Path(folder, f"run-{os.getpid()}"), "a", encoding="utf-8") as file,
        ):
            print(run, file=file)


def _model_content(config: ProfilerConfig) -> tuple[Any, str]:
    """Return the content of a model's ``config.json``, and why there is none: MFU needs it later.

    A rank that cannot read it, such as on another host, trains on.
    """
    path = config.model
    if path is None:
        return None, ""
    place = config.located(path)
    place = place / "config.json" if place.is_dir() else place
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, *NOT_JSON) as error:
        return None, f"model={path}: cannot be read, so it gives no MFU ({described(error)})"
    if not isinstance(content, dict):
        return None, f"model={path}: is not a config.json, so it gives no MFU"
    return content, ""


def _check_place(name: str | None, rank: int, world_size: int) -> None:
    """Refuse ranks outside the job, and a run name that is not a single directory."""
    if not 0 <= rank < world_size and rank < FIRST_ROLE_RANK:
        raise ConfigError(f"rank={rank} of world_size={world_size}: ranks count from 0 to below it")
    if name and (name in (".", "..") or {*name} & {*"/\\\0"}):
        raise ConfigError(f"name={name!r} is not a directory name: remove / and \\")


def _names(recorders: Any) -> tuple[str, ...]:
    """Return what recorders of the user's own are called; raises ConfigError where one is none."""
    for one in recorders if isinstance(recorders, list | tuple) else [recorders]:
        if not isinstance(one, Recorder):
            what = f"the class {one.__name__}" if isinstance(one, type) else repr(one)
            raise ConfigError(
                f"recorders: {what:.80} is not a recorder; pass an instance, [MyRecorder()]"
            )
    if isinstance(recorders, Recorder):
        raise ConfigError(f"recorders: must be a list, such as [{type(recorders).__name__}()]")
    return tuple(type(recorder).__name__ for recorder in recorders)


def _exchange(session: Session, hosts: int | None) -> Exchange | None:
    """Let one rank of each host compare its clock with rank 0's, if there is a process group."""
    header = session.header
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if hosts is None and here.isdecimal():
        hosts = header.world_size // max(int(here), 1)
    peers = leaders(header.world_size, hosts or 1)
    store = default_store() if header.rank in (0, *peers) and peers else None
    if store is None:
        return None
    exchange = Exchange(store, session, header.rank, peers, header.run_id, _CLOCKS_EVERY_NS)
    exchange.meet()
    return exchange


def _remark(session: Session, *, own: bool) -> None:
    """Say what this process does not capture, and where it is."""
    config, header = session.config, session.header
    if not own and (text := unmet(config, header.device, has_torch=torch is not None)):
        session.note(Code.CAPTURE_UNSUPPORTED, text, device=header.device)
    if not own:
        session.note_at_end(*without_effect(config, header.device))
    if not config.captures and (config.integrated.profile or config.nothing_chosen()):
        text = f"this process captures nothing: {config.why_off}"
        session.note(Code.CAPTURES_OFF, text)
    run = plain(str(session.run))
    log.info("recording %s on host %s, PID %d", run, header.host, header.pid)


def new_run_name() -> str:
    """Return a name that no other job will choose: ``20261121-141500-9f2c41d7``, sorted by time."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def make_header(
    config: ProfilerConfig, run_id: str, rank: int, world_size: int, device: str
) -> Header:
    """Describe this rank; the two clocks are read one right after the other."""
    versions = {"python": sys.version.split()[0], **_versions(_PACKAGES)}
    model = device_name(device)
    clock_ns = time.perf_counter_ns()
    return Header(
        format=FORMAT,
        run_id=run_id,
        rank=rank,
        world_size=world_size,
        role=config.role or "actor",
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device,
        unix_ns=time.time_ns(),
        clock_ns=clock_ns,
        config=config.masked(),
        versions=versions,
        device_name=model,
        chip=chip_facts(model) if device == "npu" else {},
    )


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def check_callable(action: object) -> None:
    """Refuse what cannot be called when a run is complete.

    Raises:
        ConfigError: It is not a callable, such as a command.
    """
    if action is not None and not callable(action):
        raise ConfigError(
            f"on_finish={action!r:.80} is not callable; pass a function that takes a Finished"
        )


def run_finish(
    config: ProfilerConfig,
    header: Header,
    run: Path,
    tools: Sequence[str],
    action: OnFinish | None = None,
) -> threading.Thread | None:
    """Start a callable on a thread of its own; the interpreter waits for it, ten minutes at most.

    Ray kills its workers without waiting: in one this returns when the call has ended. A failure is
    one warning, and a call that takes longer is left behind. Returns the thread, or None if this
    rank has nothing to do.

    Args:
        config: Says which ranks are captured.
        header: Describes this rank.
        run: The run directory.
        tools: Names of the recorders.
        action: What to call.
    """
    if action is None or not config.wants_finish(header.rank):
        return None
    finished = Finished(run, ",".join(tools), header.rank, header.pid, header.role)
    thread = threading.Thread(target=_call, args=[action, finished], name="rlprof-finish")
    thread.start()
    if ray_worker() is not None:
        thread.join(_MAX_CALL_S)
    return thread


def ray_worker() -> Any:
    """Return Ray's context if this process is one of its workers, else None."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    worker = getattr(context, "worker", None)  # A Ray client has none.
    return context if worker is not None and worker.mode == ray.WORKER_MODE else None


def _call(action: OnFinish, finished: Finished) -> None:
    def call() -> None:
        try:
            action(finished)
        except BaseException as error:  # Ctrl-C is never raised on this thread.
            log.warning("on_finish failed on rank %d: %r", finished.rank, error, exc_info=error)

    thread = threading.Thread(target=call, name="rlprof-finish-call", daemon=True)
    thread.start()
    thread.join(_MAX_CALL_S)
    if thread.is_alive():
        log.warning(
            "on_finish of rank %d still runs after %g s; no longer waiting for it",
            finished.rank,
            _MAX_CALL_S,
        )
