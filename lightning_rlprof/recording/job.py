"""Where a process stands in its job, and the run directory that all processes of the job share.

Rank and world size come from torch.distributed, from a launcher's variables or from SLURM, or else
from an object of a framework, which may be one of several: a player with a device of its own. A
process that none of these knows, such as a Ray actor, takes the first rank of the run that is free.
The name of the run is agreed on through the store of the process group, else by a small file in the
folder of runs. Nothing here waits for another process.
"""

import hashlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.recording.clock_sync import default_store
from lightning_rlprof.recording.start import new_run_name
from lightning_rlprof.records.records import JOB_VARIABLE
from lightning_rlprof.records.run_directory import rank_file, rank_files, read_header

_AGREEMENTS = ".jobs"  # folder beside the runs
_FRESH_S = 600  # ranks of a job whose name may come again start within this


class Place(NamedTuple):
    """Where a process stands in its job.

    Attributes:
        rank: Global rank; None if nothing says it: the first free one is taken.
        world_size: Number of ranks; None if the world may grow.
        hosts: Number of hosts, as far as it is known.
        job: What all processes of the job have in common; empty for a process alone.
        is_unique: Whether no other job has, or will have, the same ``job``.
        is_actor: Whether it is a worker of Ray, which waits for calls between its steps.
    """

    rank: int | None
    world_size: int | None
    hosts: int | None
    job: str
    is_unique: bool
    is_actor: bool = False


def find_place(
    environ: Mapping[str, str] = os.environ, own: tuple[int, int] | None = None
) -> Place:
    """Return where this process stands, by what it can see; see `Place`.

    Args:
        environ: Variables of the process.
        own: Rank and world size as a framework's object has them, for want of anything better.

    Example::

        >>> find_place({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"})[:2]
        (1, 4)
        >>> find_place({})
        Place(rank=0, world_size=1, hosts=None, job='', is_unique=False, is_actor=False)
    """
    rank, world = _ranks(environ)
    if own is not None and (world is None or (world < own[1] and not _is_distributed())):
        rank, world = own
    ray = _ray_job()
    job, is_unique = _job(environ)
    if not job and ray:
        job, is_unique = ray, True
    hosts = None
    if rank is None and (ray or job):
        world, hosts = None, 1  # whether others come, and where, is unknown
    elif rank is None:
        rank, world = 0, 1
    return Place(rank, world, hosts, job, is_unique, bool(ray))


def _ranks(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    if "WG_PREFIX" in environ:  # verl numbers the workers of each group from 0
        return None, None
    if _is_distributed():
        distributed: Any = sys.modules["torch.distributed"]
        return distributed.get_rank(), distributed.get_world_size()
    for rank, world in [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]:
        found = environ.get(rank, ""), environ.get(world, "")
        if all(map(str.isdecimal, found)) and int(found[0]) < int(found[1]):
            return int(found[0]), int(found[1])
    return None, None


def _is_distributed() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return bool(
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    )


def _job(environ: Mapping[str, str]) -> tuple[str, bool]:
    if JOB_VARIABLE in environ:
        return environ[JOB_VARIABLE], True
    if "SLURM_STEP_NUM_TASKS" in environ:
        return f"slurm {environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}", True
    if "RANK" not in environ or "MASTER_PORT" not in environ:
        return "", False
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    parts = [environ.get(name, "") for name in names]
    one_host = "TORCHELASTIC_RUN_ID" in environ and environ.get("GROUP_WORLD_SIZE") == "1"
    if one_host:  # all ranks are children of one torchrun
        parts += [str(os.getppid())]
    return f"torchrun {' '.join(parts)}", False


def _ray_job() -> str:
    """Return the job of a Ray worker; nothing elsewhere."""
    ray: Any = sys.modules.get("ray")
    try:
        if ray is None or not ray.is_initialized():
            return ""
        context = ray.get_runtime_context()
        if ray._private.worker.global_worker.mode != ray.WORKER_MODE:
            return ""
        return f"ray {context.gcs_address} {context.get_job_id()}"
    except Exception:  # another version of Ray
        return ""


_recorded: set[Path] = set()  # runs that this process has recorded into
_agreed = 0  # names that this process took from the store


def shared_run(folder: Path, place: Place) -> str:
    """Return the name of the run that the processes of a job record into now.

    The n-th run of one process is the n-th of all. A process alone gets a name of its own.

    Args:
        folder: Where runs are written; it is made if it is missing.
        place: Of this process.
    """
    global _agreed
    store: Any = default_store()
    if store is not None and JOB_VARIABLE not in os.environ:
        with suppress(Exception):  # a store that cannot compare and set, or that is gone
            name: bytes = store.compare_set(f"rlprof/run/{_agreed}", "", new_run_name())
            _agreed += 1
            return name.decode()
    if not place.job:
        return new_run_name()
    with suppress(OSError):  # the run directory itself will say what is wrong
        return _by_file(folder, place)
    return new_run_name()


def _by_file(folder: Path, place: Place) -> str:
    key = hashlib.sha256(place.job.encode()).hexdigest()[:16]
    (folder / _AGREEMENTS).mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        agreement = folder / _AGREEMENTS / f"{key}-{number}"
        name = _propose(agreement)
        is_fresh = place.is_unique or time.time() - agreement.stat().st_mtime < _FRESH_S
        if is_fresh and _may_join(folder / name, place.rank):
            return name
        number += 1


def _may_join(run: Path, rank: int | None) -> bool:
    """Return whether a run lacks this rank, and a process of it still lives, or none has begun."""
    if run.absolute() in _recorded or (rank is not None and rank_file(run, rank).exists()):
        return False
    files = rank_files(run)
    return not files or any(map(_is_alive, files))


def _is_alive(file: Path) -> bool:
    try:
        header = read_header(file)
    except TraceError:  # it is just being written
        return True
    return header.host != socket.gethostname() or Path(f"/proc/{header.pid}").exists()


def _propose(agreement: Path) -> str:
    """Return what a file says, written by whichever process came first."""
    with suppress(FileNotFoundError):
        return agreement.read_text().strip()
    draft = agreement.with_name(f"{agreement.name}.{secrets.token_hex(4)}")
    draft.write_text(new_run_name())
    try:
        os.link(draft, agreement)  # whole at once, and only if it does not exist
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return agreement.read_text().strip()


def free_ranks(run: Path, rank: int | None) -> "range | list[int]":
    """Return the ranks to try in a run: the known one, else those that are free, ascending."""
    if rank is not None:
        return [rank]
    taken = 0
    while rank_file(run, taken).exists():
        taken += 1
    return range(taken, taken + 1_000)


def remember(run: Path) -> None:
    """Note that this process records into a run."""
    _recorded.add(run.absolute())


def forget(run: Path) -> None:
    """Let this process record into a run that it has discarded, in another place of the job."""
    _recorded.discard(run.absolute())
