"""Where a process stands in its job, and the run directory that all processes of the job share.

Rank and world size come from torch.distributed, from a launcher's variables or from SLURM, or else
from an object of a framework, which may be one of several: a player with a device of its own. A
process that none of these knows, such as a Ray actor, takes the first rank of the run that is free.
The name of the run is agreed on through the store of the process group, else by an agreement in the
folder of runs. That is a folder whose only entry is called like the run: each process tries to give
one of its own the name of the agreement, and a folder never takes the place of one that has an
entry. So it is whole at once, on file systems without hard links, too. Nothing here waits for
another process.
"""

import errno
import hashlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.recording import annotations
from lightning_rlprof.recording.clock_sync import default_store
from lightning_rlprof.recording.session import current
from lightning_rlprof.recording.start import RUN_NAME, new_run_name, ray_worker
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import FIRST_ROLE_RANK, JOB_VARIABLE
from lightning_rlprof.records.run_directory import rank_file, rank_files, read_header
from lightning_rlprof.system.files import IS_POSIX, folder_inside, user
from lightning_rlprof.system.post_import import process_group
from lightning_rlprof.system.process import process_state

_AGREEMENTS = ".jobs"  # The folder is next to the runs; the user's number is appended.
_MAX_AGREEMENTS = 1_000  # Runs that one job, or jobs of the same name, may have begun here.
_FRESH_S = 600  # Seconds within which all ranks of a job start if its name may come again.
_ALONE = "this rank has a run of its own, unless name= says which"


class Place(NamedTuple):
    """Where a process stands in its job.

    Attributes:
        rank: Global rank; None if nothing says it: the first free one is taken.
        world_size: Number of ranks; None if the world may grow.
        hosts: Number of hosts, as far as it is known.
        job: What all processes of the job have in common; empty for a process alone.
        is_unique: Whether no other job has, or will have, the same ``job``.
        is_actor: Whether it is a worker of Ray, which waits for calls between its steps.
        first_rank: Where to look for a free rank.
    """

    rank: int | None
    world_size: int | None
    hosts: int | None
    job: str
    is_unique: bool
    is_actor: bool = False
    first_rank: int = 0


def find_place(
    environ: Mapping[str, str] = os.environ,
    own: tuple[int, int] | None = None,
    role: str | None = None,
) -> Place:
    """Return where this process stands, by what it can see; see `Place`.

    Args:
        environ: Variables of the process.
        own: Rank and world size as a framework's object has them, for want of anything better.
        role: Of the process. A server may start before the training, whose ranks it must not take.

    Example::

        >>> find_place({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"})[:2]
        (1, 4)
        >>> find_place({})[:4]
        (0, 1, None, '')
        >>> find_place({"RLPROF_JOB": "j"}, role="tools").first_rank
        10000
    """
    ray = _ray_job()
    is_server = role not in (None, "controller") and not ray and process_group() is None
    # What a process that records has started, such as a server, inherits the rank of its parent.
    rank, world = (None, None) if is_server and annotations.IS_CHILD else _ranks(environ)
    if own is not None and (world is None or (world < own[1] and process_group() is None)):
        rank, world = own
    job, is_unique = _job(environ)
    if not job and ray:
        job, is_unique = ray, True
    hosts = None
    if rank is None and (ray or job):
        world, hosts = None, 1  # Whether other ranks come, and where, is unknown.
    elif rank is None:
        rank, world = 0, 1
    first = FIRST_ROLE_RANK if is_server and rank is None else 0
    return Place(rank, world, hosts, job, is_unique, bool(ray), first)


def _ranks(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    if "WG_PREFIX" in environ:  # In verl, the workers of each group count from 0.
        return None, None
    if (distributed := process_group()) is not None:
        return distributed.get_rank(), distributed.get_world_size()
    for rank, world in [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]:
        found = environ.get(rank, ""), environ.get(world, "")
        if all(map(str.isdecimal, found)) and int(found[0]) < int(found[1]):
            return int(found[0]), int(found[1])
    return None, None


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
    if one_host:  # All ranks are children of one torchrun.
        parts += [str(os.getppid())]
    return f"torchrun {' '.join(parts)}", False


def _ray_job() -> str:
    """Return the job of a Ray worker; nothing elsewhere."""
    with suppress(Exception):  # Another version of Ray may lack it.
        if (context := ray_worker()) is not None:
            return f"ray {context.gcs_address} {context.get_job_id()}"
    return ""


_recorded: set[Path] = set()  # Runs that this process has recorded into.
_agreed = 0  # Number of names that this process took from the store.
_remarks: dict[str, None] = {}  # Remarks that wait until the run can have a note.


def shared_run(folder: Path, place: Place) -> str:
    """Return the name of the run that the processes of a job record into now.

    The n-th run of one process is the n-th of all. A process alone gets a name of its own.

    Args:
        folder: Where runs are written; it is made if it is missing.
        place: Of this process.
    """
    global _agreed
    _remarks.clear()
    store: Any = default_store()
    if store is not None and JOB_VARIABLE not in os.environ:
        with suppress(Exception):  # The store cannot compare and set, or is gone.
            name: bytes = store.compare_set(f"rlprof/run/{_agreed}", "", new_run_name())
            _agreed += 1
            try:
                return _checked(name.decode("utf-8", "replace"))
            except OSError as error:
                _remarks[f"the name in the store of the job is left out: {error.strerror}"] = None
    if not place.job or not IS_POSIX:
        return new_run_name()
    try:
        return _by_folder(folder, place)
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        _remarks[f"the ranks of this job could not agree on one run ({where}); {_ALONE}"] = None
    return new_run_name()


def _checked(name: str) -> str:
    """Return the name of a run that another process made; raises OSError if that is none."""
    if not RUN_NAME.fullmatch(name):
        raise OSError(errno.EINVAL, f"{name!r:.80} is not the name of a run")
    return name


def _by_folder(folder: Path, place: Place) -> str:
    key = hashlib.sha256(place.job.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    home = folder / f"{_AGREEMENTS}-{user()}"
    with folder_inside(folder, home, 0o700) as (_, agreements):
        assert agreements is not None
        draft, name = f"{key}.{secrets.token_hex(4)}", new_run_name()
        os.mkdir(draft, 0o700, dir_fd=agreements)
        try:
            os.mkdir(f"{draft}/{name}", 0o700, dir_fd=agreements)
            owner = os.stat(draft, dir_fd=agreements, follow_symlinks=False).st_uid
            if os.fstat(agreements).st_uid != owner:
                raise PermissionError(errno.EPERM, "belongs to another user", str(home))
            for number in range(_MAX_AGREEMENTS):
                agreement = f"{key}-{number}"
                try:
                    os.rename(draft, agreement, src_dir_fd=agreements, dst_dir_fd=agreements)
                except OSError as refused:
                    try:
                        agreed, since = _read(agreements, agreement, owner)
                    except FileNotFoundError:  # This file system cannot do it.
                        raise refused from None
                    except OSError as error:
                        _remarks[f"{home / agreement} is left out: {error.strerror}"] = None
                        continue
                else:
                    return name
                is_fresh = place.is_unique or time.time() - since < _FRESH_S
                if is_fresh and _may_join(folder / agreed, place.rank, owner):
                    return agreed
            raise OSError(errno.EEXIST, "has agreements enough for this job", str(home))
        finally:
            with suppress(OSError):  # It has become the agreement.
                os.rmdir(f"{draft}/{name}", dir_fd=agreements)
                os.rmdir(draft, dir_fd=agreements)


def _read(agreements: int, agreement: str, owner: int) -> tuple[str, float]:
    """Return the name of the run, and when it was agreed on; raises OSError if it is none."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW
    opened = os.open(agreement, flags, dir_fd=agreements)
    try:
        found = os.fstat(opened)
        with os.scandir(opened) as entries:
            names = [entry.name for entry in islice(entries, 2)]
    finally:
        os.close(opened)
    if found.st_uid != owner or len(names) != 1:
        raise OSError(errno.EINVAL, "it is not an agreement of this user")
    return _checked(names[0]), found.st_mtime


def _may_join(run: Path, rank: int | None, owner: int) -> bool:
    """Return whether a run lacks this rank, and a process of it still lives, or none has begun.

    A folder of another user, or a link, is not the run.
    """
    with suppress(FileNotFoundError):
        found = run.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner:
            _remarks[f"{run} is left out: it is not a folder of this user"] = None
            return False
    if run.absolute() in _recorded or (rank is not None and rank_file(run, rank).exists()):
        return False
    files = rank_files(run)
    return not files or any(map(_is_alive, files))


def _is_alive(file: Path) -> bool:
    try:
        header = read_header(file)
    except TraceError:  # It is just being written.
        return True
    return header.host != socket.gethostname() or process_state(header.pid) != "gone"


def free_ranks(run: Path, place: Place) -> "range | list[int]":
    """Return the ranks to try in a run: the known one, else those that are free, ascending."""
    if place.rank is not None:
        return [place.rank]
    free = next(each for each in count(place.first_rank) if not rank_file(run, each).exists())
    return range(free, free + 1_000)


def remember(run: Path) -> None:
    """Note that this process records into a run, and in the run what was wrong with agreements."""
    _recorded.add(run.absolute())
    if session := current():
        for text in _remarks:
            session.note(Code.RUN_NOT_SHARED, text)
    _remarks.clear()


def forget(run: Path) -> None:
    """Let this process record into a run that it has discarded, in another place of the job."""
    _recorded.discard(run.absolute())
