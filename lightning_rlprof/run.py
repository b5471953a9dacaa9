"""Start a rank's session: name the run, describe the rank, build its recorders."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.model import FORMAT, Header
from lightning_rlprof.recorders.base import Recorder
from lightning_rlprof.recorders.choose import build_recorders, unmet
from lightning_rlprof.session import Session

__all__ = ["make_header", "new_run_name", "start_session"]

_PACKAGES = (
    "lightning-rlprof",
    "torch",
    "pytorch-lightning",
    "lightning",
    "torch-npu",
    "nvtx",
)


def start_session(
    config: ProfilerConfig | None = None,
    *,
    name: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    device: str = "cpu",
    recorders: Sequence[Recorder] | None = None,
) -> Session:
    """Start recording this process, in a loop of your own as in a Lightning training.

    Args:
        config: What to record.
        name: Name of the run directory, the same on all ranks; a new one by default.
        rank: Global rank.
        world_size: Number of ranks.
        device: Kind of the device, ``cuda | npu | xpu | mps | cpu``.
        recorders: Instead of those that the configuration chooses.

    Raises:
        ConfigError: The configuration does not fit this job, or its directory cannot be written.
        RecorderError: A recorder that was asked for cannot work here.

    Example::

        >>> import tempfile
        >>> from lightning_rlprof.marking import stage
        >>> config = ProfilerConfig.build(profile_save_path=tempfile.mkdtemp())
        >>> with start_session(config) as session:
        ...     for step in (1, 2, 3):
        ...         session.begin_step(step)
        ...         with stage("actor_update"):
        ...             pass
        ...         session.end_step()
    """
    config = config or ProfilerConfig()
    config.check_world(world_size)
    name = name or new_run_name()
    header = make_header(config, name, rank, world_size, device)
    text = None if recorders is not None else unmet(config, device)
    chosen = recorders if recorders is not None else build_recorders(config, header)
    session = Session(config, Path(config.integrated.profile_save_path) / name, header, chosen)
    if text:
        session.note("info", text)
    return session


def new_run_name() -> str:
    """Return a name that no other job will choose, sorted by time: ``20261121-141500-9f2c``."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def make_header(
    config: ProfilerConfig, run_id: str, rank: int, world_size: int, device: str
) -> Header:
    """Describe this rank; the two clocks are read one right after the other."""
    versions = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
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
        config=config.dump(),
        versions=versions,
    )
